//! Exponential and hyperbolic tangent: polynomials, the same steps on every instruction set.

use super::lanes::Lanes;

/// `1 / ln 2`.
const LOG2_E: f32 = core::f32::consts::LOG2_E;
/// `ln 2` in two parts: the high one has trailing zeros, so that `n` times it is exact.
const LN_2_HIGH: f32 = 0.693_359_4;
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Minimax for `(e^r - 1 - r) / r^2` on `|r| <= ln 2 / 2`, in rising powers; 3.3e-9 of `e^r`.
const EXP: [f32; 5] = [
    0.499_999_94,
    0.166_665_15,
    0.041_668_456,
    0.008_369_419,
    0.001_381_314_5,
];
/// Minimax for `(tanh x - x) / x^3` in rising powers of `x^2` on `0 ..= 0.625`; 4.4e-9 of `tanh x`.
const TANH: [f32; 5] = [
    -0.333_332_8,
    0.133_314_42,
    -0.053_739_71,
    0.020_639_08,
    -0.005_704_98,
];

/// `e^x` within 2e-7 of itself. Below about -87 it is exactly 0 (no subnormals, which would be slow),
/// above 88.73 infinity; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp_lanes<L: Lanes>(l: L, x: L::V) -> L::V {
    // In these bounds `n` is -126 ..= 128, and `pow2(n - 1)` gives 0 for the first.
    let x = l.max(l.splat(-87.33), l.min(l.splat(89.0), x));
    let n = l.round(l.mul(x, l.splat(LOG2_E)));
    let r = l.fma(n, l.splat(-LN_2_HIGH), x);
    let r = l.fma(n, l.splat(-LN_2_LOW), r);
    let mut p = l.splat(EXP[4]);
    for c in [EXP[3], EXP[2], EXP[1], EXP[0]] {
        p = l.fma(p, r, l.splat(c));
    }
    let p = l.fma(l.mul(r, r), p, r);
    let p = l.add(p, l.splat(1.0));
    // Half the power twice: 2^128 has no float, yet e^88.5 has.
    l.mul(l.add(p, p), l.pow2(l.sub(n, l.splat(1.0))))
}

/// `tanh x` within 5e-7 of itself.
#[inline(always)]
pub(crate) fn tanh_lanes<L: Lanes>(l: L, x: L::V) -> L::V {
    let zero = l.splat(0.0);
    let size = l.where_less(x, zero, l.sub(zero, x), x);
    // 1 - 2 / (e^2|x| + 1) loses digits near 0; there the odd polynomial serves.
    let e = exp_lanes(l, l.add(size, size));
    let one = l.splat(1.0);
    let far = l.sub(one, l.div(l.splat(2.0), l.add(e, one)));
    let far = l.where_less(x, zero, l.sub(zero, far), far);
    let square = l.mul(x, x);
    let mut p = l.splat(TANH[4]);
    for c in [TANH[3], TANH[2], TANH[1], TANH[0]] {
        p = l.fma(p, square, l.splat(c));
    }
    let near = l.fma(l.mul(x, square), p, x);
    l.where_less(size, l.splat(0.625), near, far)
}

super::multiversion! {
    /// `x[i] = e^x[i]`, within 2e-7 of itself; exactly 0 below about -87, infinite above 88.73.
    ///
    /// Shapes: `x` (n).
    pub fn exp(x: &mut [f32]) = exp_body;
}

#[inline(always)]
fn exp_body<L: Lanes>(l: L, x: &mut [f32]) {
    let mut chunks = x.chunks_exact_mut(L::N);
    for chunk in &mut chunks {
        l.put(chunk, exp_lanes(l, l.take(chunk)));
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        l.put_part(rest, exp_lanes(l, l.take_part(rest, 0.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::close;

    #[test]
    fn exp_is_accurate_over_its_whole_range() {
        for v in Vector::available() {
            let inputs: Vec<f32> = (-86_900..=88_700).map(|i| i as f32 * 1e-3).collect();
            let mut outputs = inputs.clone();
            v.exp(&mut outputs);
            for (x, got) in inputs.iter().zip(outputs) {
                close(got, f64::from(*x).exp(), 2e-7, 0.0);
            }
        }
    }

    #[test]
    fn exp_at_the_edges() {
        for v in Vector::available() {
            let mut x = [
                0.0,
                -0.0,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::NAN,
                88.72,
                88.73,
                -87.2,
                -1e30,
                1e30,
            ];
            v.exp(&mut x);
            assert_eq!(x[..4], [1.0, 1.0, f32::INFINITY, 0.0], "{v:?}");
            assert!(x[4].is_nan(), "{v:?}");
            assert!(x[5].is_finite() && x[5] > 3.3e38, "{v:?}");
            assert_eq!(x[6..], [f32::INFINITY, 0.0, 0.0, f32::INFINITY], "{v:?}");
        }
    }
}
