//! A tensor that is being saved: its rows come from the threads that compute them, in any order.
//!
//! So the last pass of a kernel quantizes rows while they are in its cache, and the store needs no pass
//! of its own. Ranges that the kernel has found on its way save the codec's own.

use std::sync::atomic::{AtomicU64, Ordering};

use leanstream_core::act::Width;
use leanstream_core::act::codec::{Bits, Key, Meta, NotFinite, Range, float};

use super::codec::{Coding, Run};
use super::place::chunks;
use super::saved::{RUN_GROUPS, SaveError, Saved, View};

/// No element.
const NONE: u64 = u64::MAX;

/// A tensor that has its room, and waits for its rows. Dropped before [`Filling::end`], it is
/// released.
pub struct Filling<'s, 'm> {
    saved: &'s mut Saved<'m>,
    view: View,
    key: Key,
    /// The first element that could not be quantized.
    failed: AtomicU64,
    ended: bool,
}

impl<'s, 'm> Filling<'s, 'm> {
    pub(super) fn new(saved: &'s mut Saved<'m>, view: View) -> Self {
        for word in &saved.claimed[..view.layout.rows.div_ceil(64)] {
            word.store(0, Ordering::Relaxed);
        }
        Self {
            saved,
            key: view.counter.rounding(),
            view,
            failed: AtomicU64::new(NONE),
            ended: false,
        }
    }

    /// Saves the rows from `first` on, from any thread.
    ///
    /// Shapes: `x` (some rows, cols).
    ///
    /// # Panics
    /// They aren't whole rows of the tensor, or one of them was given before.
    pub fn put(&self, first: usize, x: &[f32]) {
        self.write(first, x, None);
    }

    /// [`Filling::put`] where the producer knows the range of each group. Elements outside of it become
    /// its ends.
    ///
    /// Shapes: `x` (some rows, cols), `ranges` one for each group of these rows.
    ///
    /// # Panics
    /// As there, or the number of ranges is another.
    pub fn put_ranged(&self, first: usize, x: &[f32], ranges: &[Range]) {
        let per_row = self.view.layout.grouping.per_row();
        let rows = x.len() / self.view.layout.grouping.cols();
        assert_eq!(ranges.len(), rows * per_row, "a range for each group");
        self.write(first, x, Some(ranges));
    }

    /// All rows have been given.
    ///
    /// # Errors
    /// [`SaveError::NotFinite`]; nothing is saved then.
    ///
    /// # Panics
    /// A row is missing.
    pub fn end(mut self) -> Result<(), SaveError> {
        let rows = self.view.layout.rows;
        let claimed = &self.saved.claimed[..rows.div_ceil(64)];
        let given: u32 = claimed
            .iter()
            .map(|word| word.load(Ordering::Relaxed).count_ones())
            .sum();
        assert_eq!(given as usize, rows, "every row is given");
        let failed = self.failed.load(Ordering::Relaxed);
        if failed == NONE {
            self.ended = true;
            return Ok(());
        }
        let grouping = &self.view.layout.grouping;
        let element = failed as usize;
        let (group, within) = (element / grouping.group(), element % grouping.group());
        Err(SaveError::NotFinite {
            tensor: self.view.tensor,
            row: group / grouping.per_row(),
            col: grouping.columns(group).start + within,
        })
    }

    fn write(&self, first: usize, x: &[f32], ranges: Option<&[Range]>) {
        let (saved, view) = (&*self.saved, &self.view);
        let grouping = &view.layout.grouping;
        let rows = x.len() / grouping.cols();
        assert!(
            x.len().is_multiple_of(grouping.cols()) && first + rows <= view.layout.rows,
            "rows of the tensor"
        );
        for row in first..first + rows {
            let bit = 1 << (row % 64);
            let was = saved.claimed[row / 64].fetch_or(bit, Ordering::Relaxed);
            assert_eq!(was & bit, 0, "row {row} is given once");
        }
        match Bits::of(view.width) {
            Some(bits) => self.write_codes(bits, first, x, ranges),
            None => self.write_floats(first, x),
        }
    }

    fn write_codes(&self, bits: Bits, first: usize, x: &[f32], ranges: Option<&[Range]>) {
        let (saved, view) = (&*self.saved, &self.view);
        let grouping = view.layout.grouping;
        let rows = x.len() / grouping.cols();
        let all = grouping.groups(first)..grouping.groups(first + rows);
        let start = first * grouping.cols();
        let coding = Coding {
            bits,
            key: self.key,
        };
        for (chunk, groups) in chunks(all.clone(), view.layout.chunk_groups) {
            let base = chunk * view.layout.chunk_groups;
            for run in saved.runs(view, chunk, groups) {
                // SAFETY: the store is borrowed exclusively by this filling; among its threads, rows
                // were just claimed, and groups and their bytes belong to one row each.
                let mut codes = unsafe { run.write(saved.pages) };
                let run = Run {
                    grouping,
                    first: base + run.units.start,
                    groups: run.units.len(),
                };
                let mut metas = [Meta::default(); RUN_GROUPS];
                let metas = &mut metas[..run.groups];
                let at = run.elements();
                let x = &x[at.start - start..at.end - start];
                let vector = saved.vector;
                let done = match ranges {
                    Some(ranges) => {
                        let ranges = &ranges[run.first - all.start..][..run.groups];
                        vector.quantize_ranged(run, coding, x, ranges, metas, &mut codes)
                    }
                    None => vector.quantize(run, coding, x, metas, &mut codes),
                };
                if let Err(NotFinite { element }) = done {
                    self.failed.fetch_min(element as u64, Ordering::Relaxed);
                    return;
                }
                let slab = &saved.metas[view.first_group + run.first..];
                for (slab, meta) in slab.iter().zip(metas) {
                    slab.store(u32::from_le_bytes(meta.to_bytes()), Ordering::Relaxed);
                }
            }
        }
    }

    fn write_floats(&self, first: usize, x: &[f32]) {
        let (saved, view) = (&*self.saved, &self.view);
        let start = first * view.layout.grouping.cols();
        let mut rest = x;
        for (chunk, units) in chunks(start..start + x.len(), view.layout.chunk_elements()) {
            for run in saved.runs(view, chunk, units) {
                // SAFETY: as for codes: elements belong to one row each.
                for bytes in unsafe { run.write(saved.pages) } {
                    let (x, others) = rest.split_at(bytes.len() * 8 / view.width.bits() as usize);
                    rest = others;
                    match view.width {
                        Width::Bf16 => saved.vector.to_bf16(x, bytes),
                        _ => float::encode_f32(x, bytes),
                    }
                }
            }
        }
    }
}

impl Drop for Filling<'_, '_> {
    fn drop(&mut self) {
        if !self.ended {
            let released = self.saved.release(self.view.tensor);
            debug_assert!(released.is_ok());
        }
    }
}
