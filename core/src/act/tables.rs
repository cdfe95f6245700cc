//! The pool's memory, lent in its constructor, and the shape of what it holds.

use super::Width;
use super::pool::{PageId, TensorId};

/// No entry of a table.
pub(super) const NONE: u32 = u32::MAX;

/// How a tensor is cut into groups and chunks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Elements stored, with those that only fill up the last group of a row.
    pub elements: u64,
    /// Elements of each chunk but the last, which has what is left.
    pub chunk_elements: u32,
    /// Groups, each with its minimum and scale: entries of the metadata slab. 0 for floats.
    pub groups: u32,
}

impl Shape {
    /// Chunks. 0 when there is nothing to save, or too much to count.
    pub fn chunks(&self) -> u32 {
        self.elements
            .checked_div(u64::from(self.chunk_elements))
            .and_then(|_| {
                let chunks = self.elements.div_ceil(u64::from(self.chunk_elements));
                u32::try_from(chunks).ok()
            })
            .unwrap_or(0)
    }

    /// Elements of chunk `chunk`; 0 past the last.
    pub fn elements_of(&self, chunk: u32) -> u32 {
        let before = u64::from(chunk) * u64::from(self.chunk_elements);
        let left = self.elements.saturating_sub(before);
        left.min(u64::from(self.chunk_elements)) as u32
    }

    /// Pages of `page_bytes` that chunk `chunk` takes at `width`.
    pub fn pages_of(&self, chunk: u32, width: Width, page_bytes: u32) -> u32 {
        pages(self.elements_of(chunk), width, page_bytes)
    }

    /// Pages of `page_bytes` that all chunks take at `width`.
    pub fn pages(&self, width: Width, page_bytes: u32) -> u64 {
        let chunks = self.chunks();
        if chunks == 0 {
            return 0;
        }
        let whole = u64::from(pages(self.chunk_elements, width, page_bytes));
        let last = u64::from(self.pages_of(chunks - 1, width, page_bytes));
        u64::from(chunks - 1) * whole + last
    }
}

/// Pages of `page_bytes` for `elements` at `width`.
fn pages(elements: u32, width: Width, page_bytes: u32) -> u32 {
    let bits = u64::from(elements) * u64::from(width.bits());
    // At most 2^32 * 32 / 8 bytes, in pages of 8 bytes or more.
    bits.div_ceil(8 * u64::from(page_bytes)) as u32
}

/// Everything the pool needs, by table. What is in them doesn't matter.
pub struct Tables<'m> {
    /// One for each page that there can ever be.
    pub pages: &'m mut [Page],
    /// One bit for each page: [`Sizes::words`] words.
    pub used: &'m mut [u64],
    /// One for each chunk that may be held at once.
    pub chunks: &'m mut [Chunk],
    /// One for each tensor id.
    pub tensors: &'m mut [Tensor],
}

/// How many entries the [`Tables`] have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Of `pages`.
    pub pages: u32,
    /// Of `chunks`.
    pub chunks: u32,
    /// Of `tensors`.
    pub tensors: u32,
}

impl Sizes {
    /// Words of `used`.
    pub fn words(&self) -> usize {
        (self.pages as usize).div_ceil(64)
    }

    /// Bytes of these tables.
    pub fn bytes(&self) -> u64 {
        [
            (self.pages as usize, size_of::<Page>()),
            (self.words(), size_of::<u64>()),
            (self.chunks as usize, size_of::<Chunk>()),
            (self.tensors as usize, size_of::<Tensor>()),
        ]
        .into_iter()
        .map(|(count, bytes)| count as u64 * bytes as u64)
        .sum()
    }
}

/// A page: whose it is, and which comes after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Page {
    /// The next page of the same chunk.
    pub(super) next: u32,
    /// Entry of the chunk table.
    pub(super) chunk: u32,
}

const _: () = assert!(size_of::<Page>() <= 8, "there is one for every page");

impl Default for Page {
    fn default() -> Self {
        Self {
            next: NONE,
            chunk: NONE,
        }
    }
}

/// A chunk: its first page, and how wide its elements are now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Chunk {
    pub(super) first: u32,
    pub(super) width: Width,
}

impl Default for Chunk {
    fn default() -> Self {
        Self {
            first: NONE,
            width: Width::One,
        }
    }
}

/// A tensor: its shape, and where its entries of the other tables are.
///
/// Chunks and groups are stacks. A tensor that is released from within a stack leaves its entries to
/// the tensor above it, and they are free when that one goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tensor {
    pub(super) held: bool,
    /// When it was taken; chunks may be narrower now.
    pub(super) width: Width,
    pub(super) shape: Shape,
    pub(super) pages: u32,
    pub(super) below: u32,
    pub(super) above: u32,
    pub(super) chunks: Run,
    pub(super) groups: Run,
}

/// Entries of a stack: `base ..` are this tensor's to give back, `first ..` those that it uses.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Run {
    pub(super) base: u32,
    pub(super) first: u32,
}

impl Default for Tensor {
    fn default() -> Self {
        Self {
            held: false,
            width: Width::One,
            shape: Shape {
                elements: 0,
                chunk_elements: 0,
                groups: 0,
            },
            pages: 0,
            below: NONE,
            above: NONE,
            chunks: Run::default(),
            groups: Run::default(),
        }
    }
}

/// The pages in use, one bit each. The lowest free page is always taken first, so that the tail stays
/// free and can be given back.
pub(super) struct PageSet<'m> {
    words: &'m mut [u64],
    /// Every page below it is in use.
    full: u32,
    /// No page from it on is in use.
    end: u32,
}

impl<'m> PageSet<'m> {
    pub(super) fn new(words: &'m mut [u64]) -> Self {
        words.fill(0);
        Self {
            words,
            full: 0,
            end: 0,
        }
    }

    /// The lowest free page, marked as used. There must be one.
    pub(super) fn take(&mut self) -> PageId {
        let page = self.lowest_free();
        self.words[page.0 as usize / 64] |= 1 << (page.0 % 64);
        self.full = page.0 + 1;
        self.end = self.end.max(page.0 + 1);
        page
    }

    /// Marks `page` as free.
    pub(super) fn give(&mut self, page: PageId) {
        let (word, bit) = (&mut self.words[page.0 as usize / 64], 1 << (page.0 % 64));
        assert!(*word & bit != 0, "page {} is given back once", page.0);
        *word &= !bit;
        self.full = self.full.min(page.0);
        if page.0 + 1 == self.end {
            self.end = self.end_below(page.0);
        }
    }

    /// The page after the highest one in use: 0 when none is.
    pub(super) fn end(&self) -> u32 {
        self.end
    }

    /// The lowest free page; a number past the last when all are in use.
    pub(super) fn lowest_free(&self) -> PageId {
        let mut word = self.full as usize / 64;
        while word < self.words.len() && self.words[word] == u64::MAX {
            word += 1;
        }
        let bit = self.words.get(word).map_or(0, |bits| bits.trailing_ones());
        PageId(word as u32 * 64 + bit)
    }

    /// The page after the highest one in use of those below `page`.
    fn end_below(&self, page: u32) -> u32 {
        let mut word = (page as usize).div_ceil(64);
        while word > 0 {
            word -= 1;
            let bits = self.words[word];
            if bits != 0 {
                return word as u32 * 64 + 64 - bits.leading_zeros();
            }
        }
        0
    }
}

/// A saved tensor's number as an index.
pub(super) fn index(tensor: TensorId) -> usize {
    tensor.0 as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_of_eight_pages_of_elements_takes_a_page_a_bit() {
        let shape = Shape {
            elements: 3 * 32768 + 5,
            chunk_elements: 32768,
            groups: 0,
        };
        assert_eq!(shape.chunks(), 4);
        for width in Width::ALL {
            assert_eq!(shape.pages_of(0, width, 4096), width.bits());
            assert_eq!(shape.pages_of(3, width, 4096), 1);
            assert_eq!(shape.pages_of(4, width, 4096), 0);
            assert_eq!(shape.pages(width, 4096), u64::from(3 * width.bits() + 1));
        }
        assert_eq!(shape.elements_of(3), 5);
        let (none, odd) = (
            Shape {
                chunk_elements: 0,
                ..shape
            },
            Shape {
                elements: u64::MAX,
                chunk_elements: 1,
                ..shape
            },
        );
        assert_eq!((none.chunks(), odd.chunks()), (0, 0));
        assert_eq!(none.pages(Width::F32, 4096), 0);
    }

    #[test]
    fn the_lowest_page_is_taken_and_the_end_is_known() {
        let mut words = [u64::MAX; 3];
        let mut set = PageSet::new(&mut words);
        for page in 0..130 {
            assert_eq!(set.take(), PageId(page));
        }
        assert_eq!(set.end(), 130);
        for page in [129, 127, 128, 3] {
            set.give(PageId(page));
        }
        assert_eq!(set.end(), 127);
        assert_eq!(set.take(), PageId(3));
        assert_eq!(set.take(), PageId(127));
        for page in 0..128 {
            set.give(PageId(page));
        }
        assert_eq!((set.end(), set.lowest_free()), (0, PageId(0)));
    }

    #[test]
    fn bytes_of_the_tables() {
        let sizes = Sizes {
            pages: 65,
            chunks: 0,
            tensors: 0,
        };
        assert_eq!((sizes.words(), sizes.bytes()), (2, 65 * 8 + 16));
    }
}
