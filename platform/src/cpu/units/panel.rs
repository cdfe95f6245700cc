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
            let a = &a[t * stride + first..][..k];
            let (mut index, mut factors) = ([0; BATCH], [0.0; BATCH]);
            for (i, a) in a.chunks(BATCH).enumerate() {
                let mut n = 0;
                for (k, &a) in a.iter().enumerate() {
                    // Written in any case and kept only if the count moves on: no branch.
                    (index[n], factors[n]) = (k as u16, a);
                    n += usize::from(a != 0.0);
                }
                let panel = &panel[i * BATCH * d..][..a.len() * d];
                self.vector.token_add(panel, &index[..n], &factors[..n], y);
            }
        }
    }
}

/// Activations of a token that are sorted out at a time.
const BATCH: usize = 256;

multiversion! {
    fn token_add(panel: &[f32], index: &[u16], factors: &[f32], y: &mut [f32]) = token_add_body;
}

/// `y += factors[i] * panel[index[i]]`. Shapes: `panel` (columns, `y`).
///
/// One token at a time: a multiplication needs one load, and processors load as many vectors a cycle
/// as they multiply. What several tokens at once would save is gone as soon as zeros are left out.
#[inline(always)]
fn token_add_body<L: Lanes>(l: L, panel: &[f32], index: &[u16], factors: &[f32], y: &mut [f32]) {
    let d = y.len();
    assert_eq!(index.len(), factors.len(), "a factor a column");
    assert!(
        index
            .iter()
            .all(|&i| (usize::from(i) + 1) * d <= panel.len()),
        "columns of the panel"
    );
    let columns = Picked {
        panel,
        index,
        factors,
        d,
    };
    // As many sums as leave a few registers to load into.
    let at = match L::N {
        8 => columns.runs::<L, 8>(l, 0, y),
        _ => columns.runs::<L, 16>(l, 0, y),
    };
    let at = columns.runs::<L, 4>(l, at, y);
    let at = columns.runs::<L, 1>(l, at, y);
    let rest = &mut y[at..];
    if !rest.is_empty() {
        let mut sum = l.take_part(rest, 0.0);
        for (&i, &factor) in index.iter().zip(factors) {
            let column = &panel[usize::from(i) * d + at..][..rest.len()];
            sum = l.fma(l.splat(factor), l.take_part(column, 0.0), sum);
        }
        l.put_part(rest, sum);
    }
}

/// The columns of a panel that count for a token.
struct Picked<'a> {
    panel: &'a [f32],
    /// Each with its `d` elements inside `panel`.
    index: &'a [u16],
    factors: &'a [f32],
    d: usize,
}

impl Picked<'_> {
    /// Runs of `V` vectors from element `at`, as many as fit; returns where they end.
    #[inline(always)]
    fn runs<L: Lanes, const V: usize>(&self, l: L, at: usize, y: &mut [f32]) -> usize {
        let runs = y[at..].chunks_exact_mut(V * L::N);
        let ends = at + runs.len() * V * L::N;
        for (i, run) in runs.enumerate() {
            self.add::<L, V>(l, at + i * V * L::N, run);
        }
        ends
    }

    /// `V` vectors of sums, `at` elements from the start of a column.
    #[inline(always)]
    fn add<L: Lanes, const V: usize>(&self, l: L, at: usize, y: &mut [f32]) {
        assert!(
            y.len() == V * L::N && at + y.len() <= self.d,
            "sums of {V} vectors"
        );
        let mut sums = [l.splat(0.0); V];
        for (sum, y) in sums.iter_mut().zip(y.chunks_exact(L::N)) {
            *sum = l.take(y);
        }
        for (&i, &factor) in self.index.iter().zip(self.factors) {
            let column = self
                .panel
                .as_ptr()
                .wrapping_add(usize::from(i) * self.d + at);
            let factor = l.splat(factor);
            for (v, sum) in sums.iter_mut().enumerate() {
                // SAFETY: column `i` has `d` elements in the panel, and these are among them.
                *sum = l.fma(factor, unsafe { l.load(column.add(v * L::N)) }, *sum);
            }
        }
        for (sum, y) in sums.iter().zip(y.chunks_exact_mut(L::N)) {
            l.put(y, *sum);
        }
    }
}
