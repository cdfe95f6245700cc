//! The memory of a store of activations: made once, before the first step, and lent to it.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64};

use leanstream_core::act::Width;
use leanstream_core::act::codec::{Counter, GROUP_MAX, Grouping};
use leanstream_core::act::tables::{self, Chunk, Page, Shape, Tables, Tensor};

use super::pages::Pages;

/// A chunk has at most this many times the elements that a page has bits.
pub(super) const CHUNK_MAX: usize = 8;

/// How a tensor (rows, cols) is cut.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Rows.
    pub rows: usize,
    /// Groups of a row.
    pub grouping: Grouping,
    /// Groups of a chunk, but for the last.
    pub chunk_groups: usize,
}

impl Layout {
    /// Of a tensor (rows, cols) in pages of `page_bytes`.
    ///
    /// A chunk holds whole groups. Where these don't fill the pages, it has up to eight times as
    /// many elements as a page has bits, so that less is left over.
    ///
    /// # Panics
    /// Nothing to save, a page can't hold the longest group, or the tensor has 2^32 elements.
    pub fn of(rows: usize, cols: usize, page_bytes: usize) -> Self {
        assert!(rows > 0, "something to save");
        assert!(
            page_bytes >= 4 * GROUP_MAX,
            "a group is in two pages at most"
        );
        let grouping = Grouping::of(cols);
        let padded = cols
            .checked_next_multiple_of(grouping.group())
            .and_then(|cols| cols.checked_mul(rows));
        assert!(
            padded.is_some_and(|n| n < 1 << 32),
            "fewer than 2^32 elements"
        );
        let layout = |times: usize| Self {
            rows,
            grouping,
            chunk_groups: times * 8 * page_bytes / grouping.group(),
        };
        // Pages by group, whatever the rows: a shorter tensor must not take more chunks than a longer one.
        let pages = |layout: &Self| (layout.chunk_elements() * 2 / 8).div_ceil(page_bytes);
        (1..=CHUNK_MAX)
            .map(layout)
            .min_by(|a, b| (pages(a) * b.chunk_groups).cmp(&(pages(b) * a.chunk_groups)))
            .expect("there are some")
    }

    /// Groups of all rows.
    pub fn groups(&self) -> usize {
        self.grouping.groups(self.rows)
    }

    /// Elements of a chunk, but for the last, padding counted.
    pub(super) fn chunk_elements(&self) -> usize {
        self.chunk_groups * self.grouping.group()
    }

    /// As the pool sees it, at `width`.
    pub fn shape(&self, width: Width) -> Shape {
        let (elements, groups) = if width.is_codes() {
            (self.grouping.padded(self.rows), self.groups())
        } else {
            // Floats need no padding.
            (self.rows * self.grouping.cols(), 0)
        };
        Shape {
            elements: elements as u64,
            chunk_elements: self.chunk_elements() as u32,
            groups: groups as u32,
        }
    }

    /// Pages of `page_bytes` at each of [`Width::ALL`]: what an allotment asks for.
    pub fn pages(&self, page_bytes: usize) -> [u32; 6] {
        Width::ALL.map(|width| self.shape(width).pages(width, page_bytes as u32) as u32)
    }
}

/// How much a store can hold at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Capacity {
    /// Bytes of a page: a multiple of the system's.
    pub page_bytes: usize,
    /// Pages that there can ever be; the limit may be lower.
    pub pages: u32,
    /// Tensor ids are below this.
    pub tensors: u32,
    chunks: usize,
    groups: usize,
    rows: usize,
}

impl Capacity {
    /// Of a store that has room for no tensor yet.
    pub fn new(page_bytes: usize, pages: u32, tensors: u32) -> Self {
        Self {
            page_bytes,
            pages,
            tensors,
            chunks: 0,
            groups: 0,
            rows: 0,
        }
    }

    /// Room for one more tensor (rows, cols) at once.
    #[must_use]
    pub fn and(mut self, rows: usize, cols: usize) -> Self {
        let layout = Layout::of(rows, cols, self.page_bytes);
        self.chunks += layout.groups().div_ceil(layout.chunk_groups);
        self.groups += layout.groups();
        self.rows = self.rows.max(rows);
        self
    }

    /// Bytes of everything but the pages: metadata and tables.
    pub fn bytes(&self) -> u64 {
        let words = self.rows.div_ceil(64);
        let own = [
            (self.groups, size_of::<AtomicU32>()),
            (words, size_of::<AtomicU64>()),
            (self.tensors as usize, size_of::<Entry>()),
        ];
        let own: usize = own.into_iter().map(|(count, bytes)| count * bytes).sum();
        self.tables().bytes() + own as u64
    }

    fn tables(&self) -> tables::Sizes {
        tables::Sizes {
            pages: self.pages,
            chunks: u32::try_from(self.chunks).expect("fewer than 2^32 chunks"),
            tensors: self.tensors,
        }
    }
}

/// What the store knows of a saved tensor beyond the pool.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Entry {
    pub(super) layout: Layout,
    pub(super) counter: Counter,
}

/// The memory. Lend it to [`Saved::new`](super::Saved::new).
pub struct Room {
    pub(super) pages: Pages,
    pub(super) metas: Box<[AtomicU32]>,
    pub(super) claimed: Box<[AtomicU64]>,
    pub(super) entries: Box<[Option<Entry>]>,
    table_pages: Box<[Page]>,
    used: Box<[u64]>,
    chunks: Box<[Chunk]>,
    tensors: Box<[Tensor]>,
}

/// A room's parts, lent.
pub(super) struct Lent<'m> {
    pub(super) pages: &'m mut Pages,
    pub(super) metas: &'m [AtomicU32],
    pub(super) claimed: &'m [AtomicU64],
    pub(super) entries: &'m mut [Option<Entry>],
    pub(super) tables: Tables<'m>,
}

impl Room {
    /// Memory for `capacity`. Pages use none until they are written.
    ///
    /// # Errors
    /// The kernel's refusal to map the pages.
    ///
    /// # Panics
    /// There are no pages, or they are no multiple of the system's.
    pub fn new(capacity: Capacity) -> io::Result<Self> {
        let sizes = capacity.tables();
        let words = capacity.rows.div_ceil(64);
        Ok(Self {
            pages: Pages::new(capacity.pages, capacity.page_bytes)?,
            metas: (0..capacity.groups).map(|_| AtomicU32::new(0)).collect(),
            claimed: (0..words).map(|_| AtomicU64::new(0)).collect(),
            entries: vec![None; sizes.tensors as usize].into(),
            table_pages: vec![Page::default(); sizes.pages as usize].into(),
            used: vec![0; sizes.words()].into(),
            chunks: vec![Chunk::default(); sizes.chunks as usize].into(),
            tensors: vec![Tensor::default(); sizes.tensors as usize].into(),
        })
    }

    pub(super) fn lend(&mut self) -> Lent<'_> {
        Lent {
            pages: &mut self.pages,
            metas: &self.metas,
            claimed: &self.claimed,
            entries: &mut self.entries,
            tables: Tables {
                pages: &mut self.table_pages,
                used: &mut self.used,
                chunks: &mut self.chunks,
                tensors: &mut self.tensors,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_fill_their_pages() {
        // 576 columns are 3 groups of 192, of which 170 2/3 fill a page at one bit.
        let layout = Layout::of(512, 576, 4096);
        assert_eq!(layout.chunk_groups, 512);
        assert_eq!(layout.pages(4096), [9, 18, 36, 72, 144, 288]);
        for (cols, pages) in [(192, 3), (1536, 24), (640, 10), (2048, 32), (960, 16)] {
            assert_eq!(Layout::of(512, cols, 4096).pages(4096)[0], pages, "{cols}");
        }
        // Little is lost where nothing fits.
        for rows in [1, 7, 100, 511] {
            for cols in [8, 100, 576, 648, 1000, 1536, 11008] {
                for page_bytes in [4096, 16384, 65536] {
                    let layout = Layout::of(rows, cols, page_bytes);
                    let bits = layout.grouping.padded(rows) as u64;
                    let least = bits.div_ceil(8 * page_bytes as u64);
                    let took = u64::from(layout.pages(page_bytes)[0]);
                    assert!(
                        took <= least + 1 + least / 40,
                        "{rows} {cols} {took} {least}"
                    );
                }
            }
        }
    }

    /// What has room for the longest sequence has room for all.
    #[test]
    fn shorter_tensors_take_no_more() {
        for cols in [8, 100, 192, 576, 648, 960, 1000, 1536, 2048, 11008] {
            let mut before = ([0; 6], 0, 0);
            for rows in 1..=600 {
                let layout = Layout::of(rows, cols, 4096);
                let room = Capacity::new(4096, 1, 1).and(rows, cols);
                let pages = layout.pages(4096);
                let fits = before
                    .0
                    .iter()
                    .zip(pages)
                    .all(|(before, now)| *before <= now);
                assert!(
                    fits && before.1 <= room.chunks,
                    "{rows} of {cols}: {before:?} {pages:?}"
                );
                assert!(before.2 <= room.groups);
                before = (pages, room.chunks, room.groups);
            }
        }
    }

    #[test]
    fn capacities_add_up() {
        let none = Capacity::new(4096, 100, 3);
        let one = none.and(512, 576);
        assert_eq!((one.chunks, one.groups, one.rows), (3, 1536, 512));
        let two = one.and(10, 8);
        assert_eq!((two.chunks, two.groups, two.rows), (4, 1546, 512));
        let more = 1536 * 4 + 8 * 8 + 3 * size_of::<Chunk>() as u64;
        assert_eq!(one.bytes() - none.bytes(), more);
    }
}
