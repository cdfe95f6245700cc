//! Where the bytes of a chunk are: its pages, in order, with *units* of equal size from the first byte on:
//! groups of codes, or single floats.

use std::ops::Range;

use leanstream_core::act::codec::{Bits, Counter};
use leanstream_core::act::pool::{PageId, Pool, Shrink};

use super::pages::Pages;
use super::room::CHUNK_MAX;
use crate::cpu::vector::Vector;

/// Pages that a run lies in, at most.
const SPANS: usize = 5;

/// Pages of the largest chunk of codes.
const CHUNK_PAGES_MAX: usize = 8 * CHUNK_MAX;

/// Some units of one chunk, and where their bytes are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Counted in the chunk.
    pub(super) units: Range<usize>,
    /// In order; the rest is empty.
    spans: [(PageId, Range<usize>); SPANS],
}

impl Run {
    /// The run's bytes, page by page.
    ///
    /// # Safety
    /// Nobody writes these bytes while the result lives.
    pub(super) unsafe fn read<'a>(&self, pages: &'a Pages) -> [&'a [u8]; SPANS] {
        // SAFETY: the caller's promise.
        std::array::from_fn(|i| unsafe { pages.bytes(self.spans[i].0, self.spans[i].1.clone()) })
    }

    /// The run's bytes, page by page, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes while the result lives.
    #[expect(
        clippy::mut_from_ref,
        reason = "threads write disjoint parts of pages; the contract says so"
    )]
    pub(super) unsafe fn write<'a>(&self, pages: &'a Pages) -> [&'a mut [u8]; SPANS] {
        // SAFETY: the caller's promise; spans don't overlap.
        std::array::from_fn(|i| unsafe {
            pages.bytes_mut(self.spans[i].0, self.spans[i].1.clone())
        })
    }
}

/// Some units of a chunk, run by run.
pub(super) struct Runs<P> {
    pages: P,
    page_bytes: usize,
    unit_bytes: usize,
    units: Range<usize>,
    units_max: usize,
    /// Where the next unit begins.
    page: PageId,
    at: usize,
}

impl<P: Iterator<Item = PageId>> Runs<P> {
    /// Units `units`, of `unit_bytes` each, of the chunk that has these pages, counted from its first;
    /// at most `units_max` a run.
    ///
    /// # Panics
    /// The chunk has too few pages.
    pub(super) fn new(
        mut pages: P,
        page_bytes: usize,
        unit_bytes: usize,
        units: Range<usize>,
        units_max: usize,
    ) -> Self {
        let start = units.start * unit_bytes;
        let page = pages.nth(start / page_bytes).expect("a page of the chunk");
        Self {
            pages,
            page_bytes,
            unit_bytes,
            units,
            units_max,
            page,
            at: start % page_bytes,
        }
    }
}

impl<P: Iterator<Item = PageId>> Iterator for Runs<P> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.units.is_empty() {
            return None;
        }
        let wanted = self.units.len().min(self.units_max) * self.unit_bytes;
        let mut spans = std::array::from_fn(|_| (self.page, 0..0));
        let (mut bytes, mut last) = (0, 0);
        for (i, span) in spans.iter_mut().enumerate() {
            if bytes == wanted {
                break;
            }
            if self.at == self.page_bytes {
                (self.page, self.at) = (self.pages.next().expect("as many pages"), 0);
            }
            let len = (self.page_bytes - self.at).min(wanted - bytes);
            *span = (self.page, self.at..self.at + len);
            self.at += len;
            bytes += len;
            last = i;
        }
        // What doesn't make a whole unit is for the next run. It is less than a page, and the last span is a whole
        // one then.
        let part = bytes % self.unit_bytes;
        spans[last].1.end -= part;
        self.at -= part;
        let first = self.units.start;
        self.units.start += bytes / self.unit_bytes;
        Some(Run {
            units: first..self.units.start,
            spans,
        })
    }
}

/// `units` of a tensor, chunk by chunk: which chunk, and which units counted in it.
pub(super) fn chunks(
    units: Range<usize>,
    per_chunk: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = units.start;
    std::iter::from_fn(move || {
        let chunk = at / per_chunk;
        let base = chunk * per_chunk;
        let end = (base + per_chunk).min(units.end);
        let part = at - base..end - base;
        (at < units.end).then(|| {
            at = end;
            (chunk, part)
        })
    })
}

/// Requantizes a chunk in place: its codes move to the front of its pages. `first` is the number of the
/// chunk's first element.
///
/// # Safety
/// Nobody else reads or writes the chunk's pages meanwhile.
pub(super) unsafe fn shrink_chunk(
    vector: Vector,
    pool: &Pool<'_>,
    pages: &Pages,
    action: Shrink,
    counter: &Counter,
    first: usize,
) {
    let bits = |width| Bits::of(width).expect("only codes shrink");
    let (from, to) = (bits(action.from), bits(action.to));
    let elements = action.elements as usize;
    let mut parts: [&mut [u8]; CHUNK_PAGES_MAX] = std::array::from_fn(|_| &mut [][..]);
    let chunk = pool.pages(action.tensor, action.chunk).expect("held");
    for (part, page) in parts.iter_mut().zip(chunk) {
        // SAFETY: the caller's promise; a chunk's pages are different ones.
        *part = unsafe { pages.bytes_mut(page, 0..pages.page_bytes()) };
    }
    let parts = &mut parts[..action.pages_from as usize];
    vector.shrink_codes(
        elements,
        from,
        to,
        counter.shrinking(from, to),
        first,
        parts,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_follow_each_other_over_pages() {
        let page_bytes = 4096;
        for unit_bytes in [1, 2, 4, 24, 96, 192, 256] {
            let all = 9 * page_bytes / unit_bytes;
            for units_max in [64, usize::MAX] {
                for first in [0, 1, 7, all / 2, all - 1] {
                    let ids = [4, 0, 7, 2, 9, 1, 3, 8, 5].map(PageId);
                    let runs = Runs::new(
                        ids.into_iter(),
                        page_bytes,
                        unit_bytes,
                        first..all,
                        units_max,
                    );
                    let mut next = first * unit_bytes;
                    for run in runs {
                        assert_eq!(run.units.start * unit_bytes, next);
                        assert!(!run.units.is_empty() && run.units.len() <= units_max);
                        for (page, bytes) in run.spans.iter().filter(|(_, b)| !b.is_empty()) {
                            assert_eq!(*page, ids[next / page_bytes]);
                            assert_eq!(bytes.start, next % page_bytes);
                            assert!(bytes.end <= page_bytes);
                            next += bytes.len();
                        }
                        assert_eq!(run.units.end * unit_bytes, next);
                    }
                    assert_eq!(next, all * unit_bytes);
                }
            }
        }
    }

    #[test]
    fn units_are_cut_at_chunks() {
        let cut: Vec<_> = chunks(3..25, 10).collect();
        assert_eq!(cut, [(0, 3..10), (1, 0..10), (2, 0..5)]);
        assert_eq!(chunks(10..20, 10).collect::<Vec<_>>(), [(1, 0..10)]);
        assert_eq!(chunks(7..7, 10).count(), 0);
    }
}
