//! Which elements matter: positive gates, rows of the head that can still win.

use super::super::vector::lanes::Lanes;
use super::super::vector::multiversion;
use super::UnitKernels;

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
fn positives_body<L: Lanes>(_: L, g: &[f32], index: &mut [u16]) -> usize {
    let mut n = 0;
    for (i, &g) in g.iter().enumerate() {
        // Written in any case and kept only if the count moves on: no branch to mispredict.
        index[n] = i as u16;
        n += usize::from(g > 0.0);
    }
    n
}

#[inline(always)]
fn above_body<L: Lanes>(
    _: L,
    estimate: &[f32],
    error: &[f32],
    h: f32,
    threshold: f32,
    first: u32,
    rows: &mut [u32],
) -> Option<usize> {
    let mut n = 0;
    for (v, (&estimate, &error)) in (first..).zip(estimate.iter().zip(error)) {
        // Not `>=`: without a number nothing is known.
        let below = estimate + error * h < threshold;
        if !below {
            *rows.get_mut(n)? = v;
            n += 1;
        }
    }
    Some(n)
}
