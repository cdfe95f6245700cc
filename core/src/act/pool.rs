//! Which pages hold which chunk of which tensor. The bytes are elsewhere.
//!
//! ```text
//! take ------> pages of a tensor, all chunks at one width
//! shrink ----> Shrink: requantize a chunk in place; shrunk() gives back the rest of its pages
//! set_limit -> fewer pages at once, or: shrink until excess() is 0, do each next_move(), then trim()
//! release ---> every page at once
//! ```
//!
//! Actions are planned from `&self` and change nothing until they are reported as done, so a caller may
//! plan several, do them on several threads, and report them one after the other. Pages are chained,
//! not contiguous: there is no fragmentation, and any free page serves any chunk.

use super::Width;
use super::error::PoolError;
use super::tables::{Chunk, NONE, Page, PageSet, Run, Shape, Sizes, Tables, Tensor, index};

/// Number of a page, from 0 below the limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageId(pub u32);

/// Number of a saved tensor; the caller gives it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TensorId(pub u32);

/// Requantize the codes of `chunk` in place; they then lie in the first `pages_to` of its pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shrink {
    /// Whose chunk.
    pub tensor: TensorId,
    /// Which, from 0.
    pub chunk: u32,
    /// Its width now.
    pub from: Width,
    /// Narrower codes.
    pub to: Width,
    /// Elements in it.
    pub elements: u32,
    /// Pages that it has now.
    pub pages_from: u32,
    /// Pages that it keeps.
    pub pages_to: u32,
}

impl Shrink {
    /// Pages that it gives back.
    pub fn freed(&self) -> u32 {
        self.pages_from - self.pages_to
    }
}

/// Copy page `from`, which lies past the limit to come, to the free page `to`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Move {
    /// In use.
    pub from: PageId,
    /// Free, and below.
    pub to: PageId,
}

/// What a held tensor is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Held {
    /// As it was taken.
    pub shape: Shape,
    /// As it was taken; chunks may be narrower.
    pub width: Width,
    /// Pages that it has now.
    pub pages: u32,
    /// Its first entry of the metadata slab.
    pub first_group: u32,
}

/// The pool. Pages in use never number more than [`Pool::limit`], nor do their numbers reach it.
pub struct Pool<'m> {
    pages: &'m mut [Page],
    used: PageSet<'m>,
    chunks: &'m mut [Chunk],
    tensors: &'m mut [Tensor],
    page_bytes: u32,
    groups_max: u32,
    /// As asked for.
    target: u32,
    /// Pages at or past it were never used, or their memory was given back.
    limit: u32,
    in_use: u32,
    /// Tensor on top of both stacks.
    top: u32,
    chunk_end: u32,
    group_end: u32,
    groups_in_use: u32,
    peak: Peak,
}

/// High-water marks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Peak {
    /// Pages.
    pub pages: u32,
    /// Metadata entries.
    pub groups: u32,
    /// Of pages and metadata at the same time, an entry being 4 bytes.
    pub bytes: u64,
}

/// Bytes of an entry of the metadata slab: two bf16.
pub const GROUP_BYTES: u64 = 4;

impl<'m> Pool<'m> {
    /// An empty pool of `limit` pages of `page_bytes` bytes, with a metadata slab of `groups_max`
    /// entries.
    ///
    /// # Errors
    /// [`PoolError::Beyond`]: fewer pages in the table than `limit`.
    ///
    /// # Panics
    /// `page_bytes` is no multiple of 8, or the bit set is too short for the pages.
    pub fn new(
        page_bytes: u32,
        limit: u32,
        groups_max: u32,
        tables: Tables<'m>,
    ) -> Result<Self, PoolError> {
        assert!(page_bytes > 0 && page_bytes.is_multiple_of(8));
        let Tables {
            pages,
            used,
            chunks,
            tensors,
        } = tables;
        let sizes = Sizes {
            pages: u32::try_from(pages.len()).expect("fewer than 2^32 pages"),
            chunks: u32::try_from(chunks.len()).expect("fewer than 2^32 chunks"),
            tensors: u32::try_from(tensors.len()).expect("fewer than 2^32 tensors"),
        };
        assert!(used.len() >= sizes.words(), "a bit for each page");
        pages.fill(Page::default());
        chunks.fill(Chunk::default());
        tensors.fill(Tensor::default());
        let mut pool = Self {
            used: PageSet::new(used),
            pages,
            chunks,
            tensors,
            page_bytes,
            groups_max,
            target: 0,
            limit: 0,
            in_use: 0,
            top: NONE,
            chunk_end: 0,
            group_end: 0,
            groups_in_use: 0,
            peak: Peak::default(),
        };
        pool.set_limit(limit)?;
        Ok(pool)
    }

    /// Takes pages for all chunks of `tensor` at `width`, and its metadata entries.
    ///
    /// # Errors
    /// The tensor is held, its shape is impossible, or something doesn't suffice for it.
    pub fn take(&mut self, tensor: TensorId, shape: Shape, width: Width) -> Result<(), PoolError> {
        if self.entry(tensor)?.held {
            return Err(PoolError::Held(tensor));
        }
        let count = shape.chunks();
        if count == 0 {
            return Err(PoolError::Shape(tensor));
        }
        let pages_needed = shape.pages(width, self.page_bytes);
        let pages_free = self.target.saturating_sub(self.in_use);
        if pages_needed > u64::from(pages_free) {
            return Err(PoolError::NoRoom {
                tensor,
                pages_needed,
                pages_free,
            });
        }
        let chunks_max = self.chunks.len() as u32;
        if count > chunks_max - self.chunk_end {
            return Err(PoolError::ChunksFull { tensor, chunks_max });
        }
        if shape.groups > self.groups_max - self.group_end {
            let groups_max = self.groups_max;
            return Err(PoolError::GroupsFull { tensor, groups_max });
        }

        for chunk in 0..count {
            let at = self.chunk_end + chunk;
            let mut last = NONE;
            for _ in 0..shape.pages_of(chunk, width, self.page_bytes) {
                let page = self.used.take().0;
                assert!(page < self.target, "pages below the limit are free");
                self.pages[page as usize] = Page {
                    next: NONE,
                    chunk: at,
                };
                self.link(at, last, page);
                last = page;
            }
            self.chunks[at as usize].width = width;
        }
        let pages = pages_needed as u32;
        let run = |first| Run { base: first, first };
        self.tensors[index(tensor)] = Tensor {
            held: true,
            width,
            shape,
            pages,
            below: self.top,
            above: NONE,
            chunks: run(self.chunk_end),
            groups: run(self.group_end),
        };
        if self.top != NONE {
            self.tensors[self.top as usize].above = tensor.0;
        }
        self.top = tensor.0;
        self.chunk_end += count;
        self.group_end += shape.groups;
        self.groups_in_use += shape.groups;
        self.in_use += pages;
        self.note_peak();
        Ok(())
    }

    /// Gives back everything of `tensor`, and returns how many pages. Backward passes release in
    /// reverse order; in any other order, entries of the chunk table and of the metadata slab are free
    /// again only with the tensor that was taken next.
    ///
    /// # Errors
    /// It isn't held.
    pub fn release(&mut self, tensor: TensorId) -> Result<u32, PoolError> {
        let entry = *self.held_entry(tensor)?;
        let chunks = entry.chunks.first..entry.chunks.first + entry.shape.chunks();
        for chunk in chunks {
            let first = self.chunks[chunk as usize].first;
            self.free_chain(first);
        }
        if entry.above == NONE {
            self.top = entry.below;
            self.chunk_end = entry.chunks.base;
            self.group_end = entry.groups.base;
        } else {
            let above = &mut self.tensors[entry.above as usize];
            above.chunks.base = entry.chunks.base;
            above.groups.base = entry.groups.base;
            above.below = entry.below;
        }
        if entry.below != NONE {
            self.tensors[entry.below as usize].above = entry.above;
        }
        self.groups_in_use -= entry.shape.groups;
        self.tensors[index(tensor)].held = false;
        Ok(entry.pages)
    }

    /// What `tensor` is, if it is held.
    pub fn held(&self, tensor: TensorId) -> Option<Held> {
        let entry = self.tensors.get(index(tensor)).filter(|t| t.held)?;
        Some(Held {
            shape: entry.shape,
            width: entry.width,
            pages: entry.pages,
            first_group: entry.groups.first,
        })
    }

    /// All that is held, latest first: the order in which a backward pass releases.
    pub fn tensors(&self) -> impl Iterator<Item = TensorId> {
        let mut at = self.top;
        core::iter::from_fn(move || {
            let tensor = (at != NONE).then_some(TensorId(at))?;
            at = self.tensors[at as usize].below;
            Some(tensor)
        })
    }

    /// The width of a chunk now.
    ///
    /// # Errors
    /// The tensor isn't held, or has no such chunk.
    pub fn width(&self, tensor: TensorId, chunk: u32) -> Result<Width, PoolError> {
        Ok(self.chunks[self.chunk(tensor, chunk)?].width)
    }

    /// The pages of a chunk, in the order of its bytes.
    ///
    /// # Errors
    /// The tensor isn't held, or has no such chunk.
    pub fn pages(
        &self,
        tensor: TensorId,
        chunk: u32,
    ) -> Result<impl Iterator<Item = PageId>, PoolError> {
        let mut at = self.chunks[self.chunk(tensor, chunk)?].first;
        Ok(core::iter::from_fn(move || {
            let page = (at != NONE).then_some(PageId(at))?;
            at = self.pages[at as usize].next;
            Some(page)
        }))
    }

    /// What has to be done for `chunk` to become codes of width `to`. Report it with
    /// [`Pool::shrunk`].
    ///
    /// # Errors
    /// There is no such chunk, or `to` isn't narrower.
    pub fn shrink(&self, tensor: TensorId, chunk: u32, to: Width) -> Result<Shrink, PoolError> {
        let from = self.width(tensor, chunk)?;
        if !from.is_codes() || to >= from {
            return Err(PoolError::NotNarrower { from, to });
        }
        let shape = self.tensors[index(tensor)].shape;
        Ok(Shrink {
            tensor,
            chunk,
            from,
            to,
            elements: shape.elements_of(chunk),
            pages_from: shape.pages_of(chunk, from, self.page_bytes),
            pages_to: shape.pages_of(chunk, to, self.page_bytes),
        })
    }

    /// The chunk is requantized: its last pages are free.
    ///
    /// # Errors
    /// [`PoolError::Stale`]: it isn't the chunk that it was.
    pub fn shrunk(&mut self, shrink: Shrink) -> Result<(), PoolError> {
        if self.shrink(shrink.tensor, shrink.chunk, shrink.to) != Ok(shrink) {
            return Err(PoolError::Stale);
        }
        let at = self.chunk(shrink.tensor, shrink.chunk)?;
        self.chunks[at].width = shrink.to;
        let mut last = self.chunks[at].first;
        for _ in 1..shrink.pages_to {
            last = self.pages[last as usize].next;
        }
        let rest = core::mem::replace(&mut self.pages[last as usize].next, NONE);
        self.free_chain(rest);
        self.tensors[index(shrink.tensor)].pages -= shrink.freed();
        Ok(())
    }

    /// Asks for `pages` pages. More are there at once. Fewer are reached with [`Pool::trim`]; until
    /// then nothing can be taken that would not fit below the new limit.
    ///
    /// # Errors
    /// [`PoolError::Beyond`]: the table has fewer.
    pub fn set_limit(&mut self, pages: u32) -> Result<(), PoolError> {
        let pages_max = self.pages.len() as u32;
        if pages > pages_max {
            return Err(PoolError::Beyond { pages, pages_max });
        }
        self.target = pages;
        self.limit = self.limit.max(pages);
        Ok(())
    }

    /// Pages that have to be given back by shrinking or releasing before the limit that was asked for
    /// can hold.
    pub fn excess(&self) -> u32 {
        self.in_use.saturating_sub(self.target)
    }

    /// What has to be copied next, so that the pages past the limit that was asked for come free:
    /// none while there is an excess, and none when they are. Report it with [`Pool::moved`].
    pub fn next_move(&self) -> Option<Move> {
        let end = self.used.end();
        (end > self.target && self.excess() == 0).then(|| Move {
            from: PageId(end - 1),
            to: self.used.lowest_free(),
        })
    }

    /// The page is copied.
    ///
    /// # Errors
    /// [`PoolError::Stale`]: it isn't what [`Pool::next_move`] says now.
    pub fn moved(&mut self, done: Move) -> Result<(), PoolError> {
        if self.next_move() != Some(done) {
            return Err(PoolError::Stale);
        }
        let (from, to) = (done.from.0, self.used.take().0);
        assert_eq!(to, done.to.0);
        let page = self.pages[from as usize];
        self.pages[to as usize] = page;
        let mut before = NONE;
        let mut at = self.chunks[page.chunk as usize].first;
        while at != from {
            (before, at) = (at, self.pages[at as usize].next);
        }
        self.link(page.chunk, before, to);
        self.used.give(done.from);
        Ok(())
    }

    /// Lowers the limit as far as it has been asked for and nothing is in use. The memory of the
    /// pages in the result is to be given back to the system; it is empty when there is none.
    pub fn trim(&mut self) -> core::ops::Range<u32> {
        let before = self.limit;
        self.limit = self.target.max(self.used.end());
        self.limit..before
    }

    /// Pages that the pool may use now: more than asked for until [`Pool::trim`].
    pub fn limit(&self) -> u32 {
        self.limit
    }

    /// Pages that were asked for.
    pub fn target(&self) -> u32 {
        self.target
    }

    /// Pages in use.
    pub fn in_use(&self) -> u32 {
        self.in_use
    }

    /// Metadata entries in use.
    pub fn groups_in_use(&self) -> u32 {
        self.groups_in_use
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> u32 {
        self.page_bytes
    }

    /// Pages in use and the metadata entries in use, in bytes.
    pub fn bytes_in_use(&self) -> u64 {
        u64::from(self.in_use) * u64::from(self.page_bytes)
            + u64::from(self.groups_in_use) * GROUP_BYTES
    }

    /// High-water marks since the start or [`Pool::reset_peak`].
    pub fn peak(&self) -> Peak {
        self.peak
    }

    /// High-water marks begin anew from what is in use.
    pub fn reset_peak(&mut self) {
        self.peak = Peak::default();
        self.note_peak();
    }

    fn note_peak(&mut self) {
        self.peak = Peak {
            pages: self.peak.pages.max(self.in_use),
            groups: self.peak.groups.max(self.groups_in_use),
            bytes: self.peak.bytes.max(self.bytes_in_use()),
        };
    }

    /// Makes `page` the one after `before` in `chunk`, or its first.
    fn link(&mut self, chunk: u32, before: u32, page: u32) {
        if before == NONE {
            self.chunks[chunk as usize].first = page;
        } else {
            self.pages[before as usize].next = page;
        }
    }

    fn free_chain(&mut self, first: u32) {
        let mut at = first;
        while at != NONE {
            self.used.give(PageId(at));
            self.in_use -= 1;
            at = core::mem::take(&mut self.pages[at as usize]).next;
        }
    }

    fn entry(&self, tensor: TensorId) -> Result<&Tensor, PoolError> {
        let tensors = self.tensors.len() as u32;
        let unknown = PoolError::Unknown { tensor, tensors };
        self.tensors.get(index(tensor)).ok_or(unknown)
    }

    fn held_entry(&self, tensor: TensorId) -> Result<&Tensor, PoolError> {
        let entry = self.entry(tensor)?;
        entry
            .held
            .then_some(entry)
            .ok_or(PoolError::NotHeld(tensor))
    }

    /// Entry of the chunk table.
    fn chunk(&self, tensor: TensorId, chunk: u32) -> Result<usize, PoolError> {
        let entry = self.held_entry(tensor)?;
        let chunks = entry.shape.chunks();
        if chunk >= chunks {
            return Err(PoolError::NoChunk {
                tensor,
                chunk,
                chunks,
            });
        }
        Ok((entry.chunks.first + chunk) as usize)
    }
}
