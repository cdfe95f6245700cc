//! Activations of the feed-forward network: `h = act(gate) * up`, or `relu(u)^2` without a gate.
//!
//! The backward pass works in place and gives `h` again, which the down matrix' gradient takes: three
//! buffers serve for everything.

use std::sync::atomic::{AtomicU64, Ordering};

use super::CHUNK_FLOATS;
use super::arith::flat;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, exp_lanes, multiversion};
use crate::tune::team::Team;
use leanstream_core::plan::Activation;

/// `h[i] = act(gate[i]) * up[i]`, the bits of a run. Shapes: all (n).
///
/// # Panics
/// The lengths differ, or the activation has no gate.
pub fn activate(team: &Team, v: Vector, act: Activation, gate: &[f32], up: &[f32], h: &mut [f32]) {
    assert!(act.gated(), "an activation with a gate");
    assert_eq!(gate.len(), h.len(), "as many gates as outputs");
    assert_eq!(up.len(), h.len(), "as many inputs as outputs");
    team.rows([flat(h)], CHUNK_FLOATS, |first, [h], _| {
        let part = first..first + h.len();
        h.copy_from_slice(&gate[part.clone()]);
        let up = &up[part];
        match act {
            Activation::Silu => v.silu_mul(h, up),
            Activation::Gelu => v.gelu_tanh_mul(h, up),
            Activation::Relu | Activation::ReluSquared => v.relu_mul(h, up),
        }
    });
}

/// Backward in place: `gate` and `up` become their gradients, `dh` becomes `h`. Shapes: all (n).
///
/// # Panics
/// The lengths differ, or the activation has no gate.
pub fn activate_backward(
    team: &Team,
    v: Vector,
    act: Activation,
    dh: &mut [f32],
    gate: &mut [f32],
    up: &mut [f32],
) {
    assert!(act.gated(), "an activation with a gate");
    let sheets = [flat(dh), flat(gate), flat(up)];
    team.rows(sheets, CHUNK_FLOATS, |_, [dh, gate, up], _| match act {
        Activation::Silu => v.silu_back(dh, gate, up),
        Activation::Gelu => v.gelu_back(dh, gate, up),
        Activation::Relu | Activation::ReluSquared => v.relu_back(dh, gate, up),
    });
}

/// `h[i] = max(u[i], 0)^2`, the bits of a run. Shapes: both (n).
///
/// # Panics
/// The lengths differ.
pub fn relu_sq(team: &Team, v: Vector, u: &[f32], h: &mut [f32]) {
    assert_eq!(u.len(), h.len(), "as many inputs as outputs");
    team.rows([flat(h)], CHUNK_FLOATS, |first, [h], _| {
        h.copy_from_slice(&u[first..first + h.len()]);
        v.relu_sq(h);
    });
}

/// Backward of [`relu_sq`] in place: `u` becomes its gradient, `dh` becomes `h`. Shapes: both (n).
///
/// # Panics
/// The lengths differ.
pub fn relu_sq_backward(team: &Team, v: Vector, dh: &mut [f32], u: &mut [f32]) {
    team.rows([flat(dh), flat(u)], CHUNK_FLOATS, |_, [dh, u], _| {
        v.relu_sq_back(dh, u);
    });
}

/// Pushes neurons to silence: where `h` isn't 0, `slope` is added to the gradient `du` of what ReLU takes,
/// which is what a penalty of `slope` times the sum of ReLU's outputs adds (ProSparse, Song et al. 2024, has it
/// on the FFN's outputs). Returns how many of `h` aren't 0. Shapes: both (n).
///
/// # Panics
/// The lengths differ.
pub fn sparsify(team: &Team, h: &[f32], du: &mut [f32], slope: f32) -> u64 {
    assert_eq!(h.len(), du.len(), "as many gradients as outputs");
    let active = AtomicU64::new(0);
    team.rows([flat(du)], CHUNK_FLOATS, |first, [du], _| {
        let mut here = 0_u32;
        for (du, h) in du.iter_mut().zip(&h[first..]) {
            let fires = *h != 0.0;
            *du += if fires { slope } else { 0.0 };
            here += u32::from(fires);
        }
        active.fetch_add(here.into(), Ordering::Relaxed);
    });
    active.into_inner()
}

multiversion! {
    fn silu_back(dh: &mut [f32], gate: &mut [f32], up: &mut [f32]) = back::<_, Silu>;
    fn gelu_back(dh: &mut [f32], gate: &mut [f32], up: &mut [f32]) = back::<_, Gelu>;
    fn relu_back(dh: &mut [f32], gate: &mut [f32], up: &mut [f32]) = back::<_, Relu>;
    fn relu_sq_back(dh: &mut [f32], u: &mut [f32]) = relu_sq_body;
}

/// A function and its slope.
trait Curve {
    fn of<L: Lanes>(l: L, x: L::V) -> (L::V, L::V);
}

struct Silu;
impl Curve for Silu {
    #[inline(always)]
    fn of<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
        // With s = 1 / (1 + e^-x): f = x s and f' = s (1 + x - f).
        let one = l.splat(1.0);
        let under = l.add(one, exp_lanes(l, l.sub(l.splat(0.0), x)));
        let f = l.div(x, under);
        let s = l.div(one, under);
        (f, l.fma(s, l.sub(x, f), s))
    }
}

struct Gelu;
impl Curve for Gelu {
    #[inline(always)]
    fn of<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
        // With z = c x + 0.044715 c x^3 and s = 1 / (1 + e^-z): f = x s and f' = s + x s (1 - s) z'.
        const C: f32 = 1.595_769; // 2 sqrt(2 / pi)
        let (one, square) = (l.splat(1.0), l.mul(x, x));
        let cubic = l.fma(square, l.splat(-0.044_715 * C), l.splat(-C));
        let under = l.add(one, exp_lanes(l, l.mul(x, cubic)));
        let f = l.div(x, under);
        let s = l.div(one, under);
        let slope = l.fma(square, l.splat(3.0 * 0.044_715 * C), l.splat(C));
        // Bounded, so that far out it is 0 times a number.
        let slope = l.min(l.splat(1e30), slope);
        let bend = l.mul(x, l.mul(s, l.sub(one, s)));
        (f, l.fma(bend, slope, s))
    }
}

struct Relu;
impl Curve for Relu {
    #[inline(always)]
    fn of<L: Lanes>(l: L, x: L::V) -> (L::V, L::V) {
        let zero = l.splat(0.0);
        (l.max(zero, x), l.where_less(zero, x, l.splat(1.0), zero))
    }
}

#[inline(always)]
fn back<L: Lanes, C: Curve>(l: L, dh: &mut [f32], gate: &mut [f32], up: &mut [f32]) {
    let n = dh.len();
    let whole = n - n % L::N;
    for i in (0..whole).step_by(L::N) {
        let (x, y, z) = (l.take(&dh[i..]), l.take(&gate[i..]), l.take(&up[i..]));
        let (h, dgate, dup) = back_lanes::<L, C>(l, x, y, z);
        l.put(&mut dh[i..], h);
        l.put(&mut gate[i..], dgate);
        l.put(&mut up[i..], dup);
    }
    if whole < n {
        let (dh, gate, up) = (&mut dh[whole..], &mut gate[whole..], &mut up[whole..]);
        let (x, y) = (l.take_part(dh, 0.0), l.take_part(gate, 0.0));
        let (h, dgate, dup) = back_lanes::<L, C>(l, x, y, l.take_part(up, 0.0));
        l.put_part(dh, h);
        l.put_part(gate, dgate);
        l.put_part(up, dup);
    }
}

/// `h`, and the gradients of gate and up. No closure: one would lack the instruction set's features.
#[inline(always)]
fn back_lanes<L: Lanes, C: Curve>(l: L, dh: L::V, gate: L::V, up: L::V) -> (L::V, L::V, L::V) {
    let (f, slope) = C::of(l, gate);
    (l.mul(f, up), l.mul(l.mul(dh, up), slope), l.mul(dh, f))
}

#[inline(always)]
fn relu_sq_body<L: Lanes>(_: L, dh: &mut [f32], u: &mut [f32]) {
    for (dh, u) in dh.iter_mut().zip(u) {
        let positive = if *u < 0.0 { 0.0 } else { *u };
        *u = 2.0 * *dh * positive;
        *dh = positive * positive;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{agree, differences, every_machine, same_bits, weighted, wide};
    use super::*;
    use crate::cpu::vector::testing::{LENGTHS, Random};

    /// The activations in double precision.
    fn curve(act: Activation, x: f64) -> f64 {
        match act {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::Gelu => {
                let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                0.5 * x * (1.0 + u.tanh())
            }
            Activation::Relu => x.max(0.0),
            Activation::ReluSquared => x.max(0.0).powi(2),
        }
    }

    /// Inputs in `-size .. size`, none so near 0 that a difference would reach across the kink there.
    fn apart(random: &mut Random, len: usize, size: f32) -> Vec<f32> {
        let mut x = random.floats(len, size);
        x.iter_mut().for_each(|x| *x += 0.01f32.copysign(*x));
        x
    }

    #[test]
    fn gated_gradients() {
        every_machine(|team, v| {
            let mut random = Random(7);
            for act in [Activation::Silu, Activation::Gelu, Activation::Relu] {
                for len in LENGTHS {
                    let gate = apart(&mut random, len, 6.0);
                    let (up, dh) = (random.floats(len, 2.0), random.floats(len, 1.0));
                    let mut h = vec![f32::NAN; len];
                    activate(team, v, act, &gate, &up, &mut h);
                    let (g, u) = (wide(&gate), wide(&up));
                    let forward = |g: &[f64], u: &[f64]| -> Vec<f64> {
                        g.iter().zip(u).map(|(g, u)| curve(act, *g) * u).collect()
                    };
                    agree(&h, &forward(&g, &u), 1e-6, "h");
                    let (mut again, mut dgate, mut dup) = (dh.clone(), gate.clone(), up.clone());
                    activate_backward(team, v, act, &mut again, &mut dgate, &mut dup);
                    agree(&again, &wide(&h), 1e-6, "h again");
                    let want = differences(&g, |g| weighted(&forward(g, &u), &dh));
                    agree(&dgate, &want, 2e-6, "dgate");
                    let want = differences(&u, |u| weighted(&forward(&g, u), &dh));
                    agree(&dup, &want, 2e-6, "dup");
                }
            }
        });
    }

    #[test]
    fn squared_relu_gradients() {
        every_machine(|team, v| {
            let mut random = Random(8);
            for len in LENGTHS {
                let u = apart(&mut random, len, 3.0);
                let dh = random.floats(len, 1.0);
                let mut h = vec![f32::NAN; len];
                relu_sq(team, v, &u, &mut h);
                let forward = |u: &[f64]| -> Vec<f64> {
                    u.iter()
                        .map(|u| curve(Activation::ReluSquared, *u))
                        .collect()
                };
                agree(&h, &forward(&wide(&u)), 1e-6, "h");
                let (mut again, mut du) = (dh.clone(), u.clone());
                relu_sq_backward(team, v, &mut again, &mut du);
                assert_eq!(again, h);
                let want = differences(&wide(&u), |u| weighted(&forward(u), &dh));
                agree(&du, &want, 1e-6, "du");
            }
        });
    }

    #[test]
    fn a_push_to_silence_is_the_gradient_of_a_sum() {
        every_machine(|team, v| {
            let mut random = Random(11);
            for len in LENGTHS {
                let u = apart(&mut random, len, 3.0);
                let (mut h, mut du) = (random.floats(len, 1.0), u.clone());
                let dh = h.clone();
                relu_sq_backward(team, v, &mut h, &mut du);
                let active = sparsify(team, &h, &mut du, 0.25);
                assert_eq!(active, u.iter().filter(|u| **u > 0.0).count() as u64);
                let loss = |u: &[f64]| {
                    let square: Vec<f64> = u.iter().map(|u| u.max(0.0).powi(2)).collect();
                    weighted(&square, &dh) + 0.25 * u.iter().map(|u| u.max(0.0)).sum::<f64>()
                };
                agree(&du, &differences(&wide(&u), loss), 1e-6, "du");
            }
        });
    }

    #[test]
    fn far_inputs_have_finite_gradients() {
        every_machine(|team, v| {
            for act in [Activation::Silu, Activation::Gelu, Activation::Relu] {
                let mut gate = [-1e30, -1e20, -200.0, -90.0, 90.0, 200.0, 1e20, 1e30];
                let (mut dh, mut up) = ([1.0; 8], [1.0; 8]);
                activate_backward(team, v, act, &mut dh, &mut gate, &mut up);
                assert_eq!(gate[4..], [1.0; 4], "{act:?} {v:?}");
                assert!(gate[..4].iter().all(|g| g.abs() < 1e-30), "{act:?} {v:?}");
            }
        });
    }

    #[test]
    fn threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(9);
            let [mut dh, mut gate, mut up] = [(); 3].map(|()| random.floats(30_011, 3.0));
            activate_backward(team, v, Activation::Silu, &mut dh, &mut gate, &mut up);
            relu_sq_backward(team, v, &mut dh, &mut up);
            [dh, gate, up].concat()
        });
    }
}
