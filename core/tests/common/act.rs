//! Any bytes as a page pool and a storm of operations on it, against a second account of what lies where.
//!
//! The account is a memory that holds, instead of bytes, whose and which part each page is. Actions are
//! done on it as a store would do them on bytes.

use leanstream_core::act::Width;
use leanstream_core::act::allot::victim;
use leanstream_core::act::error::PoolError;
use leanstream_core::act::pool::{GROUP_BYTES, Move, Pool, Shrink, TensorId};
use leanstream_core::act::tables::{Chunk, Page, Shape, Sizes, Tables, Tensor};

/// Tables, owned.
pub struct Owned {
    pages: Vec<Page>,
    used: Vec<u64>,
    chunks: Vec<Chunk>,
    tensors: Vec<Tensor>,
}

impl Owned {
    pub fn new(sizes: Sizes) -> Self {
        Self {
            pages: vec![Page::default(); sizes.pages as usize],
            used: vec![0; sizes.words()],
            chunks: vec![Chunk::default(); sizes.chunks as usize],
            tensors: vec![Tensor::default(); sizes.tensors as usize],
        }
    }

    pub fn lend(&mut self) -> Tables<'_> {
        Tables {
            pages: &mut self.pages,
            used: &mut self.used,
            chunks: &mut self.chunks,
            tensors: &mut self.tensors,
        }
    }
}

/// What a page holds: of which tensor, counted over all takes, which chunk, which page of it, and
/// how often the chunk has shrunk.
type Content = (u64, u32, u32, u32);

/// A tensor as the account knows it.
struct Known {
    tensor: TensorId,
    serial: u64,
    shape: Shape,
    /// By chunk: width, and how often it has shrunk.
    chunks: Vec<(Width, u32)>,
}

pub struct Storm<'m> {
    pub pool: Pool<'m>,
    memory: Vec<Option<Content>>,
    /// Latest last.
    known: Vec<Known>,
    serial: u64,
    target: u32,
    peak_pages: u32,
    chunks_max: u32,
    groups_max: u32,
    scattered: bool,
}

impl<'m> Storm<'m> {
    pub fn new(pool: Pool<'m>, sizes: Sizes, groups_max: u32) -> Self {
        Self {
            memory: vec![None; sizes.pages as usize],
            known: Vec::new(),
            serial: 0,
            target: pool.limit(),
            peak_pages: 0,
            chunks_max: sizes.chunks,
            groups_max,
            scattered: false,
            pool,
        }
    }

    fn at(&self, tensor: TensorId) -> Option<usize> {
        self.known.iter().position(|k| k.tensor == tensor)
    }

    fn pages_known(&self) -> u64 {
        let pages = |k: &Known| -> u64 {
            (0..)
                .zip(&k.chunks)
                .map(|(chunk, (width, _))| {
                    u64::from(k.shape.pages_of(chunk, *width, self.pool.page_bytes()))
                })
                .sum()
        };
        self.known.iter().map(pages).sum()
    }

    fn chunks_known(&self) -> u32 {
        self.known.iter().map(|k| k.chunks.len() as u32).sum()
    }

    /// Whether something was released from below, so that entries wait for the tensor above them.
    fn scattered(&self) -> bool {
        self.scattered
    }

    pub fn take(&mut self, tensor: TensorId, shape: Shape, width: Width) -> Result<(), PoolError> {
        let taken = self.pool.take(tensor, shape, width);
        let needed = shape.pages(width, self.pool.page_bytes());
        match taken {
            Ok(()) => {
                assert!(self.at(tensor).is_none());
                self.serial += 1;
                self.known.push(Known {
                    tensor,
                    serial: self.serial,
                    shape,
                    chunks: vec![(width, 0); shape.chunks() as usize],
                });
                for chunk in 0..shape.chunks() {
                    for (page, at) in self.pool.pages(tensor, chunk).unwrap().zip(0..) {
                        assert!(page.0 < self.target, "a new page below what was asked for");
                        let content = (self.serial, chunk, at, 0);
                        let was = self.memory[page.0 as usize].replace(content);
                        assert_eq!(was, None, "page {} was free", page.0);
                    }
                }
            }
            Err(PoolError::Held(_)) => assert!(self.at(tensor).is_some()),
            Err(PoolError::Shape(_)) => assert_eq!(shape.chunks(), 0),
            Err(PoolError::NoRoom {
                pages_needed,
                pages_free,
                ..
            }) => {
                assert_eq!(pages_needed, needed);
                let free = u64::from(self.target).saturating_sub(self.pages_known());
                assert_eq!(u64::from(pages_free), free);
                assert!(needed > free, "refused only when it doesn't fit");
            }
            Err(PoolError::ChunksFull { chunks_max, .. }) => {
                assert_eq!(chunks_max, self.chunks_max);
                assert!(self.scattered() || shape.chunks() > chunks_max - self.chunks_known());
            }
            Err(PoolError::GroupsFull { groups_max, .. }) => {
                assert_eq!(groups_max, self.groups_max);
                let left = groups_max - self.pool.groups_in_use();
                assert!(self.scattered() || shape.groups > left);
            }
            Err(other) => panic!("{other}"),
        }
        self.peak_pages = self.peak_pages.max(self.pool.in_use());
        taken
    }

    pub fn release(&mut self, tensor: TensorId) {
        let Some(at) = self.at(tensor) else {
            assert_eq!(self.pool.release(tensor), Err(PoolError::NotHeld(tensor)));
            return;
        };
        let known = self.known.remove(at);
        self.scattered |= at < self.known.len();
        self.scattered &= !self.known.is_empty();
        let mut pages = 0;
        for chunk in 0..known.shape.chunks() {
            for page in self.pool.pages(tensor, chunk).unwrap() {
                self.memory[page.0 as usize] = None;
                pages += 1;
            }
        }
        assert_eq!(self.pool.release(tensor), Ok(pages));
    }

    pub fn shrink(&mut self, tensor: TensorId, chunk: u32, to: Width) -> Option<Shrink> {
        let shrink = match self.pool.shrink(tensor, chunk, to) {
            Ok(shrink) => shrink,
            Err(error) => {
                let known = self.at(tensor).map(|at| &self.known[at]);
                let width = known.and_then(|k| k.chunks.get(chunk as usize));
                assert!(
                    width.is_none_or(|(width, _)| !width.is_codes() || to >= *width),
                    "{error}"
                );
                return None;
            }
        };
        self.perform(shrink);
        Some(shrink)
    }

    fn perform(&mut self, shrink: Shrink) {
        let at = self.at(shrink.tensor).expect("it is held");
        let known = &mut self.known[at];
        let (width, times) = &mut known.chunks[shrink.chunk as usize];
        assert_eq!(*width, shrink.from);
        let pages: Vec<_> = self
            .pool
            .pages(shrink.tensor, shrink.chunk)
            .unwrap()
            .collect();
        assert_eq!(pages.len(), shrink.pages_from as usize);
        for (page, at) in pages.iter().zip(0..) {
            let memory = &mut self.memory[page.0 as usize];
            assert_eq!(*memory, Some((known.serial, shrink.chunk, at, *times)));
            *memory =
                (at < shrink.pages_to).then_some((known.serial, shrink.chunk, at, *times + 1));
        }
        (*width, *times) = (shrink.to, *times + 1);
        let before = self.pool.in_use();
        self.pool.shrunk(shrink).unwrap();
        assert_eq!(before - self.pool.in_use(), shrink.freed());
        assert_eq!(self.pool.shrunk(shrink), Err(PoolError::Stale), "once");
    }

    pub fn step_move(&mut self) -> Option<Move> {
        let step = self.pool.next_move()?;
        assert!(step.to.0 < self.target && step.from.0 >= self.target);
        let content = self.memory[step.from.0 as usize].take();
        assert!(content.is_some(), "something lies there");
        let was = std::mem::replace(&mut self.memory[step.to.0 as usize], content);
        assert_eq!(was, None, "the place was free");
        self.pool.moved(step).unwrap();
        assert_eq!(self.pool.moved(step), Err(PoolError::Stale), "once");
        Some(step)
    }

    pub fn set_limit(&mut self, pages: u32) {
        match self.pool.set_limit(pages) {
            Ok(()) => self.target = pages,
            Err(_) => assert!(pages > self.memory.len() as u32),
        }
    }

    /// Shrinks by loss until the limit that was asked for can hold. Whether it could.
    pub fn squeeze(&mut self, importance: &[f32]) -> bool {
        while self.pool.excess() > 0 {
            let Some(victim) = victim(&self.pool, importance) else {
                return false;
            };
            let chunks = self.pool.held(victim.tensor).unwrap().shape.chunks();
            let mut freed = 0;
            for chunk in 0..chunks {
                if self.pool.width(victim.tensor, chunk) == Ok(victim.from)
                    && self.pool.excess() > 0
                {
                    let shrink = self.shrink(victim.tensor, chunk, victim.to).unwrap();
                    freed += shrink.freed();
                }
            }
            assert!(freed > 0, "a victim frees something");
        }
        true
    }

    pub fn trim(&mut self) {
        let (limit, freed) = (self.pool.limit(), self.pool.trim());
        assert_eq!(freed.end, limit);
        assert_eq!(freed.start, self.pool.limit());
        for page in freed {
            assert_eq!(
                self.memory[page as usize], None,
                "nothing in use is given back"
            );
        }
        if self.pool.excess() == 0 && self.pool.next_move().is_none() {
            assert_eq!(self.pool.limit(), self.target, "as asked for");
        }
    }

    /// Everything that must hold at any moment.
    pub fn check(&self) {
        let pool = &self.pool;
        let used = self.memory.iter().flatten().count();
        assert_eq!(used as u64, self.pages_known());
        assert_eq!(used as u32, pool.in_use());
        assert!(pool.in_use() <= pool.limit(), "never above the limit");
        let past = &self.memory[pool.limit() as usize..];
        assert!(past.iter().all(Option::is_none), "nothing past the limit");
        assert_eq!(pool.excess(), pool.in_use().saturating_sub(self.target));
        assert!(pool.limit() >= pool.target());
        assert_eq!(pool.peak().pages, self.peak_pages);
        let latest: Vec<_> = self.known.iter().rev().map(|k| k.tensor).collect();
        assert!(pool.tensors().eq(latest));

        let mut groups: Vec<(u32, u32)> = Vec::new();
        for known in &self.known {
            let held = pool.held(known.tensor).expect("held");
            assert_eq!(held.shape, known.shape);
            let mut pages = 0;
            for (chunk, (width, times)) in (0..).zip(&known.chunks) {
                assert_eq!(pool.width(known.tensor, chunk), Ok(*width));
                let mut count = 0;
                for (page, at) in pool.pages(known.tensor, chunk).unwrap().zip(0..) {
                    let content = (known.serial, chunk, at, *times);
                    assert_eq!(self.memory[page.0 as usize], Some(content));
                    count += 1;
                }
                assert_eq!(
                    count,
                    known.shape.pages_of(chunk, *width, pool.page_bytes())
                );
                pages += count;
            }
            assert_eq!(pages, held.pages);
            groups.push((held.first_group, held.first_group + known.shape.groups));
        }
        let sum: u32 = self.known.iter().map(|k| k.shape.groups).sum();
        assert_eq!(pool.groups_in_use(), sum);
        assert!(groups.is_sorted_by(|a, b| a.1 <= b.0), "{groups:?}");
        assert!(groups.last().is_none_or(|last| last.1 <= self.groups_max));
        let bytes =
            u64::from(pool.in_use()) * u64::from(pool.page_bytes()) + u64::from(sum) * GROUP_BYTES;
        assert_eq!(pool.bytes_in_use(), bytes);
        assert!(pool.peak().bytes >= bytes);
    }
}

struct Bytes<'d>(&'d [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u32 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                u32::from(*first)
            }
            None => 0,
        }
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() << 8 | self.next()) % n
    }

    fn width(&mut self) -> Width {
        Width::ALL[self.next() as usize % 6]
    }
}

/// Runs the storm that `data` describes.
pub fn run(data: &[u8]) {
    let bytes = &mut Bytes(data);
    let sizes = Sizes {
        pages: bytes.below(400),
        chunks: bytes.below(60),
        tensors: 1 + bytes.below(9),
    };
    let groups_max = bytes.below(300);
    let page_bytes = 8 << bytes.below(4);
    let limit = bytes.below(sizes.pages + 1);
    let importance: Vec<f32> = (0..sizes.tensors).map(|_| bytes.next() as f32).collect();
    let mut owned = Owned::new(sizes);
    let pool = Pool::new(page_bytes, limit, groups_max, owned.lend()).unwrap();
    let mut storm = Storm::new(pool, sizes, groups_max);
    storm.check();
    while !bytes.0.is_empty() {
        let tensor = TensorId(bytes.below(sizes.tensors));
        match bytes.next() % 10 {
            0..=3 => {
                let chunk_elements = bytes.below(16 * page_bytes);
                let shape = Shape {
                    elements: u64::from(bytes.below(1 + 6 * chunk_elements)),
                    chunk_elements,
                    groups: bytes.below(40),
                };
                let _ = storm.take(tensor, shape, bytes.width());
            }
            4 => match storm.known.last().map(|k| k.tensor) {
                Some(latest) if bytes.next() < 200 => storm.release(latest),
                _ => storm.release(tensor),
            },
            5 => {
                let to = bytes.width();
                storm.shrink(tensor, bytes.below(8), to);
            }
            6 => storm.set_limit(bytes.below(sizes.pages + 3)),
            7 => {
                storm.squeeze(&importance);
            }
            8 => {
                for _ in 0..bytes.next() {
                    if storm.step_move().is_none() {
                        break;
                    }
                }
            }
            _ => storm.trim(),
        }
        storm.check();
    }
    // The way out: down to nothing.
    storm.set_limit(0);
    if !storm.squeeze(&importance) {
        while let Some(known) = storm.known.last() {
            storm.release(known.tensor);
            storm.check();
        }
    }
    storm.trim();
    assert_eq!((storm.pool.limit(), storm.pool.in_use()), (0, 0));
    assert_eq!(storm.pool.groups_in_use(), 0);
    storm.set_limit(sizes.pages);
    if sizes.chunks > 0 && sizes.pages > 0 {
        // All entries have come back.
        let shape = Shape {
            elements: u64::from(sizes.chunks.min(sizes.pages)),
            chunk_elements: 1,
            groups: groups_max,
        };
        storm.take(TensorId(0), shape, Width::One).unwrap();
    }
    storm.check();
}
