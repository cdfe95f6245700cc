//! Activation functions of feed-forward networks, most of them times a second input: the gate.

use super::exp::exp_lanes;
use super::lanes::Lanes;

super::multiversion! {
    /// SwiGLU, in place: `gate[i]` becomes `gate[i] / (1 + e^-gate[i]) * up[i]`. Shapes: both (n). Within
    /// 1e-6 of itself.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn silu_mul(gate: &mut [f32], up: &[f32]) = silu_body;

    /// GEGLU with GELU's tanh form, in place: `gate[i]` becomes
    /// `gate[i] / 2 * (1 + tanh(sqrt(2 / pi) (gate[i] + 0.044715 gate[i]^3))) * up[i]`.
    /// Shapes: both (n). Computed in f32 throughout, within 2e-6 of itself where it isn't tiny; a
    /// program that looks the function up in a table of half floats will differ in the fourth digit.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn gelu_tanh_mul(gate: &mut [f32], up: &[f32]) = gelu_body;

    /// ReGLU, in place: `gate[i]` becomes `max(gate[i], 0) * up[i]`. Shapes: both (n).
    ///
    /// # Panics
    /// The lengths differ.
    pub fn relu_mul(gate: &mut [f32], up: &[f32]) = relu_body;

    /// Squared ReLU, without a gate: `x[i] = max(x[i], 0)^2`. Shapes: `x` (n).
    pub fn relu_sq(x: &mut [f32]) = relu_sq_body;
}

/// A function of one vector.
trait Curve {
    fn of<L: Lanes>(l: L, x: L::V) -> L::V;
}

struct Silu;
impl Curve for Silu {
    #[inline(always)]
    fn of<L: Lanes>(l: L, x: L::V) -> L::V {
        let e = exp_lanes(l, l.sub(l.splat(0.0), x));
        l.div(x, l.add(l.splat(1.0), e))
    }
}

struct Gelu;
impl Curve for Gelu {
    #[inline(always)]
    fn of<L: Lanes>(l: L, x: L::V) -> L::V {
        // (1 + tanh u) / 2 = 1 / (1 + e^-2u), which keeps its digits where tanh is near -1.
        const TWICE: f32 = -1.595_769; // -2 sqrt(2 / pi)
        let cubic = l.fma(l.mul(x, x), l.splat(0.044_715 * TWICE), l.splat(TWICE));
        let e = exp_lanes(l, l.mul(x, cubic));
        l.div(x, l.add(l.splat(1.0), e))
    }
}

struct Relu;
impl Curve for Relu {
    #[inline(always)]
    fn of<L: Lanes>(l: L, x: L::V) -> L::V {
        l.max(l.splat(0.0), x)
    }
}

#[inline(always)]
fn gated<L: Lanes, C: Curve>(l: L, gate: &mut [f32], up: &[f32]) {
    assert_eq!(gate.len(), up.len(), "as many gates as inputs");
    let whole = gate.len() - gate.len() % L::N;
    let (gate, gate_rest) = gate.split_at_mut(whole);
    let (up, up_rest) = up.split_at(whole);
    for (gate, up) in gate.chunks_exact_mut(L::N).zip(up.chunks_exact(L::N)) {
        l.put(gate, l.mul(C::of(l, l.take(gate)), l.take(up)));
    }
    if !gate_rest.is_empty() {
        let y = C::of(l, l.take_part(gate_rest, 0.0));
        l.put_part(gate_rest, l.mul(y, l.take_part(up_rest, 0.0)));
    }
}

#[inline(always)]
fn silu_body<L: Lanes>(l: L, gate: &mut [f32], up: &[f32]) {
    gated::<L, Silu>(l, gate, up);
}

#[inline(always)]
fn gelu_body<L: Lanes>(l: L, gate: &mut [f32], up: &[f32]) {
    gated::<L, Gelu>(l, gate, up);
}

#[inline(always)]
fn relu_body<L: Lanes>(l: L, gate: &mut [f32], up: &[f32]) {
    gated::<L, Relu>(l, gate, up);
}

#[inline(always)]
fn relu_sq_body<L: Lanes>(_: L, x: &mut [f32]) {
    for x in x {
        let positive = if *x < 0.0 { 0.0 } else { *x };
        *x = positive * positive;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::{LENGTHS, Random, close};

    fn silu(x: f64) -> f64 {
        x / (1.0 + (-x).exp())
    }

    fn gelu(x: f64) -> f64 {
        let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
        0.5 * x * (1.0 + u.tanh())
    }

    #[test]
    fn gates_match_double_precision() {
        let mut random = Random(2);
        for v in Vector::available() {
            for len in LENGTHS {
                let gate = random.floats(len, 12.0);
                let up = random.floats(len, 2.0);
                let wide = |i: usize| (f64::from(gate[i]), f64::from(up[i]));
                let mut out = gate.clone();
                v.silu_mul(&mut out, &up);
                for (i, got) in out.iter().enumerate() {
                    let (g, u) = wide(i);
                    close(*got, silu(g) * u, 1e-6, 1e-30);
                }
                let mut out = gate.clone();
                v.gelu_tanh_mul(&mut out, &up);
                for (i, got) in out.iter().enumerate() {
                    let (g, u) = wide(i);
                    close(*got, gelu(g) * u, 2e-6, 1e-7);
                }
                let mut out = gate.clone();
                v.relu_mul(&mut out, &up);
                for (i, got) in out.iter().enumerate() {
                    assert_eq!(*got, gate[i].max(0.0) * up[i]);
                }
                let mut x = gate.clone();
                v.relu_sq(&mut x);
                for (i, got) in x.iter().enumerate() {
                    assert_eq!(*got, gate[i].max(0.0) * gate[i].max(0.0));
                }
            }
        }
    }

    #[test]
    fn far_inputs_saturate_without_nan() {
        for v in Vector::available() {
            let gate = [-1e30, -200.0, -90.0, 90.0, 200.0, 1e6];
            let mut out = gate;
            v.silu_mul(&mut out, &[1.0; 6]);
            assert!(out[..3].iter().all(|y| y.abs() < 1e-30), "{v:?} {out:?}");
            assert_eq!(out[3..], [90.0, 200.0, 1e6], "{v:?}");
            let mut out = gate;
            v.gelu_tanh_mul(&mut out, &[1.0; 6]);
            assert!(out[..3].iter().all(|y| y.abs() < 1e-30), "{v:?} {out:?}");
            assert_eq!(out[3..], [90.0, 200.0, 1e6], "{v:?}");
        }
    }

    #[test]
    fn nan_is_not_hidden() {
        for v in Vector::available() {
            let mut out = [f32::NAN; 20];
            v.silu_mul(&mut out, &[1.0; 20]);
            assert!(out.iter().all(|y| y.is_nan()), "{v:?}");
            let mut out = [f32::NAN; 20];
            v.gelu_tanh_mul(&mut out, &[1.0; 20]);
            assert!(out.iter().all(|y| y.is_nan()), "{v:?}");
            let mut out = [f32::NAN; 20];
            v.relu_mul(&mut out, &[1.0; 20]);
            assert!(out.iter().all(|y| y.is_nan()), "{v:?}");
            let mut x = [f32::NAN; 20];
            v.relu_sq(&mut x);
            assert!(x.iter().all(|y| y.is_nan()), "{v:?}");
        }
    }
}
