//! Where the bytes of a chunk are: its pages, in order, with groups of equal size from the first byte
//! on. A group may lie across the end of a page; it is then read and written through a copy.

use std::ops::Range;

use leanstream_core::act::codec::{Bits, Counter, GROUP_MAX, shrink};
use leanstream_core::act::pool::{PageId, Pool, Shrink};

use super::pages::Pages;

/// Bytes of the longest group at the greatest width. No page is shorter.
pub(super) const GROUP_BYTES_MAX: usize = 4 * GROUP_MAX;

/// Groups of one chunk that lie one after the other in a page; or a single one that lies across its end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Run {
    /// Counted in the chunk.
    pub(super) groups: Range<usize>,
    /// Bytes of each.
    pub(super) group_bytes: usize,
    page: PageId,
    at: usize,
    /// Of the only group, the part that is in the next page.
    beyond: Option<(PageId, usize)>,
}

impl Run {
    /// The run's bytes; `room` serves where they are in two pages.
    ///
    /// # Safety
    /// Nobody writes these bytes while the result lives.
    pub(super) unsafe fn read<'a>(
        &self,
        pages: &'a Pages,
        room: &'a mut [u8; GROUP_BYTES_MAX],
    ) -> &'a [u8] {
        let (here, beyond) = self.parts();
        // SAFETY: the caller's promise.
        let first = unsafe { pages.bytes(self.page, self.at..self.at + here) };
        let Some((page, len)) = beyond else {
            return first;
        };
        // SAFETY: the caller's promise.
        let second = unsafe { pages.bytes(page, 0..len) };
        room[..here].copy_from_slice(first);
        room[here..here + len].copy_from_slice(second);
        &room[..here + len]
    }

    /// Has `f` write the run's bytes.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes meanwhile.
    pub(super) unsafe fn write<R>(&self, pages: &Pages, f: impl FnOnce(&mut [u8]) -> R) -> R {
        let (here, beyond) = self.parts();
        // SAFETY: the caller's promise.
        let first = unsafe { pages.bytes_mut(self.page, self.at..self.at + here) };
        let Some((page, len)) = beyond else {
            return f(first);
        };
        // SAFETY: the caller's promise.
        let second = unsafe { pages.bytes_mut(page, 0..len) };
        let mut room = [0; GROUP_BYTES_MAX];
        let result = f(&mut room[..here + len]);
        first.copy_from_slice(&room[..here]);
        second.copy_from_slice(&room[here..here + len]);
        result
    }

    /// Bytes in the first page, and what is in the second.
    fn parts(&self) -> (usize, Option<(PageId, usize)>) {
        let bytes = self.groups.len() * self.group_bytes;
        match self.beyond {
            None => (bytes, None),
            Some((page, len)) => (bytes - len, Some((page, len))),
        }
    }
}

/// Some groups of a chunk, run by run.
pub(super) struct Runs<P> {
    pages: P,
    page_bytes: usize,
    group_bytes: usize,
    groups: Range<usize>,
    page: PageId,
    /// Where the next group begins.
    at: usize,
}

impl<P: Iterator<Item = PageId>> Runs<P> {
    /// Groups `groups` of the chunk that has these pages, from its first.
    ///
    /// # Panics
    /// It has too few.
    pub(super) fn new(
        mut pages: P,
        page_bytes: usize,
        group_bytes: usize,
        groups: Range<usize>,
    ) -> Self {
        let start = groups.start * group_bytes;
        let page = pages.nth(start / page_bytes).expect("a page of the chunk");
        Self {
            pages,
            page_bytes,
            group_bytes,
            groups,
            page,
            at: start % page_bytes,
        }
    }
}

impl<P: Iterator<Item = PageId>> Iterator for Runs<P> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if self.groups.is_empty() {
            return None;
        }
        if self.at == self.page_bytes {
            (self.page, self.at) = (self.pages.next().expect("as many pages"), 0);
        }
        let left = self.page_bytes - self.at;
        let (page, at, first) = (self.page, self.at, self.groups.start);
        let (count, beyond) = match left / self.group_bytes {
            0 => {
                let len = self.group_bytes - left;
                (self.page, self.at) = (self.pages.next().expect("as many pages"), len);
                (1, Some((self.page, len)))
            }
            fit => {
                let count = fit.min(self.groups.len());
                self.at += count * self.group_bytes;
                (count, None)
            }
        };
        self.groups.start += count;
        Some(Run {
            groups: first..first + count,
            group_bytes: self.group_bytes,
            page,
            at,
            beyond,
        })
    }
}

/// `groups` of a tensor, chunk by chunk: which chunk, and which groups counted in it.
pub(super) fn chunks(
    groups: Range<usize>,
    per_chunk: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> {
    let mut at = groups.start;
    std::iter::from_fn(move || {
        let chunk = at / per_chunk;
        let base = chunk * per_chunk;
        let end = (base + per_chunk).min(groups.end);
        let part = at - base..end - base;
        (at < groups.end).then(|| {
            at = end;
            (chunk, part)
        })
    })
}

/// Requantizes a chunk in place, page by page: what a page holds goes to the front, then to where it
/// belongs in a page before, whose codes have been read by then. `first` is the number of the chunk's
/// first element.
///
/// # Safety
/// Nobody else reads or writes the chunk's pages meanwhile.
pub(super) unsafe fn shrink_chunk(
    pool: &Pool<'_>,
    pages: &Pages,
    action: Shrink,
    counter: &Counter,
    first: usize,
) {
    let bits = |width| Bits::of(width).expect("only codes shrink");
    let (from, to) = (bits(action.from), bits(action.to));
    let key = counter.shrinking(from, to);
    let page_bytes = pages.page_bytes();
    let per_page = from.elements(page_bytes);
    let chunk = || pool.pages(action.tensor, action.chunk).expect("held");
    let mut targets = chunk();
    let mut target = targets.next().expect("a chunk has a page");
    let mut at = 0;
    for (number, page) in chunk().enumerate() {
        let done = number * per_page;
        let elements = per_page.min(action.elements as usize - done);
        // SAFETY: the caller's promise; the slice ends before the next one is made.
        let codes = unsafe { pages.bytes_mut(page, 0..from.bytes(elements)) };
        shrink(codes, elements, from, to, key, first + done);
        let len = to.bytes(elements);
        if at == page_bytes {
            (target, at) = (targets.next().expect("fewer pages than before"), 0);
        }
        if number > 0 {
            // SAFETY: the caller's promise. Page `number` is another page than the target, which is a
            // page before it: a page is at most half full of what it held.
            let (codes, to) = unsafe {
                (
                    pages.bytes(page, 0..len),
                    pages.bytes_mut(target, at..at + len),
                )
            };
            to.copy_from_slice(codes);
        }
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_follow_each_other_over_pages() {
        let page_bytes = 4096;
        for group_bytes in [1, 24, 96, 192, 256, 320, 1024] {
            let all = 5 * page_bytes / group_bytes;
            for first in [0, 1, 7, all / 2, all - 1] {
                let ids = [4, 0, 7, 2, 9].map(PageId);
                let runs = Runs::new(ids.into_iter(), page_bytes, group_bytes, first..all);
                let mut next = first;
                for run in runs {
                    assert_eq!(run.groups.start, next);
                    next = run.groups.end;
                    let start = run.groups.start * group_bytes;
                    assert_eq!(run.page, ids[start / page_bytes]);
                    assert_eq!(run.at, start % page_bytes);
                    let end = run.at + run.groups.len() * group_bytes;
                    match run.beyond {
                        None => assert!(end <= page_bytes),
                        Some((page, len)) => {
                            assert_eq!(run.groups.len(), 1);
                            assert_eq!(page, ids[start / page_bytes + 1]);
                            assert_eq!(end, page_bytes + len);
                        }
                    }
                }
                assert_eq!(next, all);
            }
        }
    }

    #[test]
    fn groups_are_cut_at_chunks() {
        let cut: Vec<_> = chunks(3..25, 10).collect();
        assert_eq!(cut, [(0, 3..10), (1, 0..10), (2, 0..5)]);
        assert_eq!(chunks(10..20, 10).collect::<Vec<_>>(), [(1, 0..10)]);
        assert_eq!(chunks(7..7, 10).count(), 0);
    }

    #[test]
    fn bytes_go_where_they_come_from() {
        let mut pages = Pages::new(2, Pages::least_bytes()).unwrap();
        let size = pages.page_bytes();
        let run = Run {
            groups: 3..4,
            group_bytes: 40,
            page: PageId(1),
            at: size - 12,
            beyond: Some((PageId(0), 28)),
        };
        let mut room = [0; GROUP_BYTES_MAX];
        let arena = &mut pages;
        // SAFETY: the arena is borrowed exclusively, and one thread uses it.
        unsafe {
            run.write(arena, |bytes| {
                assert_eq!(bytes.len(), 40);
                (0..40).for_each(|i| bytes[i] = i as u8 + 1);
            });
            let bytes = run.read(arena, &mut room);
            assert!(bytes.iter().zip(1..=40).all(|(a, b)| *a == b));
            assert_eq!(arena.bytes(PageId(1), size - 12..size)[11], 12);
            assert_eq!(arena.bytes(PageId(0), 0..28)[0], 13);
        }
    }
}
