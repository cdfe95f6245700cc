//! Down columns of prompt batches: decoded once, then added to many tokens.

use super::super::vector::lanes::Lanes;
use super::super::vector::multiversion;
use super::{Column, UnitKernels};

impl UnitKernels {
    /// The elements of a column as f32. Shapes: `out` (column).
    ///
    /// For the moved types `scale[j] * (code[j] - offset) + min[j]`.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn panel(&self, column: &Column<'_>, out: &mut [f32]) {
        out.fill(0.0);
        self.column_add(column, 1.0, out);
    }

    /// `y[t] += sum over i of a[t][i] * panel[i]`, in order of `i`, leaving out activations of 0.
    /// The result for a token doesn't depend on the others.
    ///
    /// Shapes: `panel` (k, d), `y` (tokens, d). `a` (tokens, `stride`): the activations of token `t`
    /// are the `k` from `t * stride + first`.
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn outer_add(
        &self,
        panel: &[f32],
        d: usize,
        a: &[f32],
        stride: usize,
        first: usize,
        y: &mut [f32],
    ) {
        assert!(d > 0 && panel.len().is_multiple_of(d), "whole columns");
        assert!(y.len().is_multiple_of(d), "whole tokens");
        let (k, tokens) = (panel.len() / d, y.len() / d);
        assert!(first + k <= stride, "activations of every column");
        assert!(
            a.len() >= tokens.saturating_sub(1) * stride + first + k || tokens == 0,
            "activations of every token"
        );
        for (t, y) in y.chunks_exact_mut(d).enumerate() {
            self.vector
                .token_add(panel, &a[t * stride + first..][..k], y);
        }
    }
}

multiversion! {
    fn token_add(panel: &[f32], a: &[f32], y: &mut [f32]) = token_add_body;
}

#[inline(always)]
fn token_add_body<L: Lanes>(_: L, panel: &[f32], a: &[f32], y: &mut [f32]) {
    for (column, &a) in panel.chunks_exact(y.len()).zip(a) {
        if a != 0.0 {
            for (y, v) in y.iter_mut().zip(column) {
                *y += a * v;
            }
        }
    }
}
