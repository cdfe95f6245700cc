//! What happens to scores between the products, down their columns: (keys, QUERIES).

use super::QUERIES;
use crate::cpu::vector::lanes::{LANES_MAX, Lanes};
use crate::cpu::vector::{exp_lanes, multiversion};

const _: () = assert!(
    QUERIES.is_multiple_of(LANES_MAX),
    "columns are whole vectors"
);

multiversion! {
    /// Scores become `e^(score - largest)`; `factors` (QUERIES) one over each column's sum.
    pub(super) fn soften(scores: &mut [f32], factors: &mut [f32; QUERIES]) = soften_body;
    /// Every column times its factor.
    pub(super) fn scale_queries(x: &mut [f32], factors: &[f32; QUERIES]) = scale_body;
    /// Backward of the softmax: `dp` becomes `p * (dp - sum over keys of p * dp)`.
    pub(super) fn score_gradients(p: &[f32], dp: &mut [f32]) = gradients_body;
}

#[inline(always)]
fn soften_body<L: Lanes>(l: L, scores: &mut [f32], factors: &mut [f32; QUERIES]) {
    for column in (0..QUERIES).step_by(L::N) {
        let mut top = l.splat(f32::NEG_INFINITY);
        for row in scores.chunks_exact(QUERIES) {
            top = l.max(top, l.take(&row[column..]));
        }
        let mut sum = l.splat(0.0);
        for row in scores.chunks_exact_mut(QUERIES) {
            let e = exp_lanes(l, l.sub(l.take(&row[column..]), top));
            sum = l.add(sum, e);
            l.put(&mut row[column..], e);
        }
        l.put(&mut factors[column..], l.div(l.splat(1.0), sum));
    }
}

#[inline(always)]
fn scale_body<L: Lanes>(l: L, x: &mut [f32], factors: &[f32; QUERIES]) {
    for column in (0..QUERIES).step_by(L::N) {
        let factor = l.take(&factors[column..]);
        for row in x.chunks_exact_mut(QUERIES) {
            let scaled = l.mul(l.take(&row[column..]), factor);
            l.put(&mut row[column..], scaled);
        }
    }
}

#[inline(always)]
fn gradients_body<L: Lanes>(l: L, p: &[f32], dp: &mut [f32]) {
    for column in (0..QUERIES).step_by(L::N) {
        let mut sum = l.splat(0.0);
        for (p, dp) in p.chunks_exact(QUERIES).zip(dp.chunks_exact(QUERIES)) {
            sum = l.fma(l.take(&p[column..]), l.take(&dp[column..]), sum);
        }
        for (p, dp) in p.chunks_exact(QUERIES).zip(dp.chunks_exact_mut(QUERIES)) {
            let slope = l.sub(l.take(&dp[column..]), sum);
            l.put(&mut dp[column..], l.mul(l.take(&p[column..]), slope));
        }
    }
}
