//! Which elements matter: positive gates, rows of the head that can still win.

use super::super::vector::multiversion;
use super::UnitKernels;
use super::unpack::Unpack;

impl UnitKernels {
    /// The indices of the elements of `g` above 0, in order; returns how many. NaN isn't above 0.
    /// Elements of `index` past that number hold anything. Shapes: `g` and `index` (n).
    ///
    /// # Panics
    /// There are more than 65536 elements, or the lengths differ.
    pub fn positives(&self, g: &[f32], index: &mut [u16]) -> usize {
        assert!(g.len() <= 1 << 16, "indices of 16 bits");
        assert_eq!(g.len(), index.len(), "room for every index");
        self.vector.positives(g, index)
    }

    /// The numbers `first + v` of the rows whose estimate and error reach the threshold, in order:
    /// `estimate[v] + error[v] * h >= threshold` in f32, or no number at all, of which nothing is
    /// known. Returns how many, or `None` if `rows` has no room for all of them; then it holds
    /// the first ones. Elements past the returned number hold anything.
    ///
    /// The sum is rounded (once or twice, by instruction set): a threshold meant as a proof has to
    /// leave room for that.
    ///
    /// Shapes: `estimate` and `error` (n).
    ///
    /// # Panics
    /// The lengths differ, or a number doesn't fit 32 bits.
    pub fn above(
        &self,
        estimate: &[f32],
        error: &[f32],
        h: f32,
        threshold: f32,
        first: u32,
        rows: &mut [u32],
    ) -> Option<usize> {
        assert_eq!(estimate.len(), error.len(), "an error an estimate");
        assert!(
            u32::try_from(estimate.len()).is_ok_and(|n| first.checked_add(n).is_some()),
            "row numbers of 32 bits"
        );
        self.vector
            .above(estimate, error, h, threshold, first, rows)
    }
}

multiversion! {
    fn positives(g: &[f32], index: &mut [u16]) -> usize = positives_body;
    fn above(
        estimate: &[f32],
        error: &[f32],
        h: f32,
        threshold: f32,
        first: u32,
        rows: &mut [u32],
    ) -> Option<usize> = above_body;
}

#[inline(always)]
fn positives_body<L: Unpack>(l: L, g: &[f32], index: &mut [u16]) -> usize {
    l.positives(g, index)
}

#[inline(always)]
fn above_body<L: Unpack>(
    l: L,
    estimate: &[f32],
    error: &[f32],
    h: f32,
    threshold: f32,
    first: u32,
    rows: &mut [u32],
) -> Option<usize> {
    let (h, limit) = (l.splat(h), l.splat(threshold));
    let mut found = Found { rows, n: 0 };
    let mut at = first;
    let (whole, last) = estimate.split_at(estimate.len() - estimate.len() % (4 * L::N));
    let (errors, last_errors) = error.split_at(whole.len());
    // Hardly any row gets past the first comparison: four vectors at a time, and one branch.
    for (estimate, error) in whole
        .chunks_exact(4 * L::N)
        .zip(errors.chunks_exact(4 * L::N))
    {
        let x: [L::V; 4] = std::array::from_fn(|i| {
            l.fma(l.take(&error[i * L::N..]), h, l.take(&estimate[i * L::N..]))
        });
        if !l.all_below(x, limit) {
            for (i, x) in (0..).zip(x) {
                found.push(l.not_below(x, limit), at + i * L::N as u32)?;
            }
        }
        at += 4 * L::N as u32;
    }
    for (estimate, error) in last.chunks(L::N).zip(last_errors.chunks(L::N)) {
        let x = l.fma(l.take_part(error, 0.0), h, l.take_part(estimate, 0.0));
        let there = (1u32 << estimate.len()) - 1;
        found.push(l.not_below(x, limit) & there, at)?;
        at += estimate.len() as u32;
    }
    Some(found.n)
}

/// The rows found so far.
struct Found<'a> {
    rows: &'a mut [u32],
    n: usize,
}

impl Found<'_> {
    /// Row `first + i` for every bit `i`; `None` if there is no room for one.
    #[inline(always)]
    fn push(&mut self, mut bits: u32, first: u32) -> Option<()> {
        while bits != 0 {
            *self.rows.get_mut(self.n)? = first + bits.trailing_zeros();
            self.n += 1;
            bits &= bits - 1;
        }
        Some(())
    }
}
