//! The store of activations: what the forward pass saves, and the backward pass loads.
//!
//! It performs what the pool decides. Rows are quantized by whichever thread has them at hand; since an
//! element's code depends on its number, the seed, the step and the tensor, the result depends
//! neither on the threads nor on where the pages are.

use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use leanstream_core::act::Width;
use leanstream_core::act::allot::victim;
use leanstream_core::act::codec::{Bits, Counter, Meta, float};
use leanstream_core::act::error::PoolError;
use leanstream_core::act::pool::{PageId, Pool, Shrink, TensorId};

use super::codec;
use super::filling::Filling;
use super::pages::Pages;
use super::place::{Runs, chunks, shrink_chunk};
use super::room::{Entry, Layout, Lent, Room};
use crate::cpu::vector::Vector;
use crate::tune::team::{Sheet, Team};

/// A fork's block has about this many elements: enough to outweigh the fork, few enough for L1.
const BLOCK_ELEMENTS: usize = 8192;

/// Why something could not be saved, or the limit not be kept.
#[derive(Debug)]
pub enum SaveError {
    /// The pool refuses.
    Pool(PoolError),
    /// An element can't be quantized.
    NotFinite {
        /// Of which tensor.
        tensor: TensorId,
        /// Its row.
        row: usize,
        /// Its column; the group's first where only its range is to blame.
        col: usize,
    },
    /// All that is saved is as narrow as it can be, and still too much.
    TooTight {
        /// Pages in use.
        pages_needed: u64,
        /// Pages that were asked for.
        pages: u32,
    },
    /// The system doesn't take the memory back.
    Discard(io::Error),
}

impl fmt::Display for SaveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pool(error) => error.fmt(f),
            Self::NotFinite { tensor, row, col } => write!(
                f,
                "activation {}, row {row}, column {col}: not finite: training has diverged (a lower \
                 --lr may help) or a weight is not finite ('leanstream verify' finds it)",
                tensor.0
            ),
            Self::TooTight {
                pages_needed,
                pages,
            } => write!(
                f,
                "activations take {pages_needed} pages at one bit, the budget leaves {pages}: \
                 recompute, shorten the sequences, or raise the budget"
            ),
            Self::Discard(error) => {
                write!(
                    f,
                    "the system doesn't take back memory of activations: {error}"
                )
            }
        }
    }
}

impl std::error::Error for SaveError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Pool(error) => Some(error),
            Self::Discard(error) => Some(error),
            Self::NotFinite { .. } | Self::TooTight { .. } => None,
        }
    }
}

impl From<PoolError> for SaveError {
    fn from(error: PoolError) -> Self {
        Self::Pool(error)
    }
}

/// What a changed limit took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Change {
    /// Chunks that became narrower.
    pub shrunk: u32,
    /// Pages copied.
    pub moved: u32,
    /// Pages given back to the system.
    pub returned: u32,
}

/// The store. Allocates nothing.
pub struct Saved<'m> {
    pub(super) pool: Pool<'m>,
    pub(super) pages: &'m mut Pages,
    pub(super) metas: &'m [AtomicU32],
    pub(super) claimed: &'m [AtomicU64],
    entries: &'m mut [Option<Entry>],
    pub(super) vector: Vector,
    seed: u64,
    step: u64,
}

/// Groups that are quantized or decoded at once, at most.
pub(super) const RUN_GROUPS: usize = 64;

/// A held tensor, as it is read and written.
#[derive(Clone, Copy)]
pub(super) struct View {
    pub(super) tensor: TensorId,
    pub(super) layout: Layout,
    pub(super) width: Width,
    pub(super) counter: Counter,
    pub(super) first_group: usize,
}

impl<'m> Saved<'m> {
    /// An empty store in `room`, of `limit` pages. Rounding is random by `seed`.
    ///
    /// # Errors
    /// The room has fewer pages.
    pub fn new(room: &'m mut Room, limit: u32, seed: u64) -> Result<Self, PoolError> {
        let Lent {
            pages,
            metas,
            claimed,
            entries,
            tables,
        } = room.lend();
        entries.fill(None);
        let page_bytes = u32::try_from(pages.page_bytes()).expect("pages below 4 GiB");
        Ok(Self {
            pool: Pool::new(page_bytes, limit, metas.len() as u32, tables)?,
            pages,
            metas,
            claimed,
            entries,
            vector: Vector::detect(),
            seed,
            step: 0,
        })
    }

    /// What is saved from now on is rounded by the chance of this step (or micro-batch).
    pub fn begin_step(&mut self, step: u64) {
        self.step = step;
    }

    /// Saves `x` as `tensor`, with `width` bits an element.
    ///
    /// Shapes: `x` (rows, cols). Threads take whole rows.
    ///
    /// # Errors
    /// There is no room, or an element isn't finite; then nothing is saved. Floats are saved as they
    /// are.
    ///
    /// # Panics
    /// `x` isn't whole rows, or more of them than the room was made for.
    pub fn save(
        &mut self,
        team: &Team,
        tensor: TensorId,
        x: &[f32],
        cols: usize,
        width: Width,
    ) -> Result<(), SaveError> {
        let rows = x.len() / cols;
        assert_eq!(x.len(), rows * cols, "whole rows");
        let filling = self.begin(tensor, rows, cols, width)?;
        let per = (BLOCK_ELEMENTS / cols).max(1);
        team.each(rows.div_ceil(per), &|block, _| {
            let first = block * per;
            let end = (first + per).min(rows);
            filling.put(first, &x[first * cols..end * cols]);
        });
        filling.end()
    }

    /// Takes room for `tensor` (rows, cols), whose rows are then given by those who compute them.
    ///
    /// # Errors
    /// There is no room.
    ///
    /// # Panics
    /// No rows or columns, or more rows than the room was made for.
    pub fn begin(
        &mut self,
        tensor: TensorId,
        rows: usize,
        cols: usize,
        width: Width,
    ) -> Result<Filling<'_, 'm>, SaveError> {
        let layout = Layout::of(rows, cols, self.pages.page_bytes());
        assert!(
            rows <= 64 * self.claimed.len(),
            "rows as the room was made for"
        );
        self.pool.take(tensor, layout.shape(width), width)?;
        self.entries[tensor.0 as usize] = Some(Entry {
            layout,
            counter: Counter {
                seed: self.seed,
                step: self.step,
                tensor: tensor.0,
            },
        });
        let view = self.view(tensor)?;
        Ok(Filling::new(self, view))
    }

    /// Loads all of `tensor`.
    ///
    /// Shapes: `out` (rows, cols). Threads take whole rows.
    ///
    /// # Errors
    /// It isn't saved.
    ///
    /// # Panics
    /// `out` has another size.
    pub fn load(&self, team: &Team, tensor: TensorId, out: &mut [f32]) -> Result<(), PoolError> {
        let view = self.view(tensor)?;
        let cols = view.layout.grouping.cols();
        assert_eq!(out.len(), view.layout.rows * cols, "as it was saved");
        let per = (BLOCK_ELEMENTS / cols).max(1);
        let sheet = Sheet {
            data: out,
            row: cols,
        };
        team.rows([sheet], per, |first, [out], _| {
            self.decode(&view, first, out)
        });
        Ok(())
    }

    /// Loads the rows of `tensor` from `first` on, on this thread alone: for those that are inside a
    /// fork.
    ///
    /// Shapes: `out` (some rows, cols).
    ///
    /// # Errors
    /// It isn't saved.
    ///
    /// # Panics
    /// `out` isn't whole rows of it.
    pub fn load_rows(
        &self,
        tensor: TensorId,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let view = self.view(tensor)?;
        let cols = view.layout.grouping.cols();
        assert!(
            out.len().is_multiple_of(cols) && first + out.len() / cols <= view.layout.rows,
            "rows of the tensor"
        );
        self.decode(&view, first, out);
        Ok(())
    }

    /// For each row of `tensor` from `first` on, the sum of its groups' squared ranges: what the
    /// importance of a tensor follows from. 0 for floats.
    ///
    /// Shapes: `out` (some rows).
    ///
    /// # Errors
    /// It isn't saved.
    ///
    /// # Panics
    /// It has fewer rows.
    pub fn squared_ranges(
        &self,
        tensor: TensorId,
        first: usize,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let view = self.view(tensor)?;
        let Some(bits) = Bits::of(view.width) else {
            out.fill(0.0);
            return Ok(());
        };
        let per_row = view.layout.grouping.per_row();
        assert!(first + out.len() <= view.layout.rows, "rows of the tensor");
        let start = view.first_group + first * per_row;
        let metas = &self.metas[start..start + out.len() * per_row];
        for (out, metas) in out.iter_mut().zip(metas.chunks_exact(per_row)) {
            *out = metas
                .iter()
                .map(|meta| meta_of(meta).span(bits).powi(2))
                .sum();
        }
        Ok(())
    }

    /// Elements of a group of `tensor`, padding included.
    ///
    /// # Errors
    /// It isn't saved.
    pub fn group(&self, tensor: TensorId) -> Result<usize, PoolError> {
        Ok(self.view(tensor)?.layout.grouping.group())
    }

    /// Gives back everything of `tensor`.
    ///
    /// # Errors
    /// It isn't saved.
    pub fn release(&mut self, tensor: TensorId) -> Result<(), PoolError> {
        self.pool.release(tensor)?;
        self.entries[tensor.0 as usize] = None;
        Ok(())
    }

    /// Gives back everything: the step is over, or given up.
    pub fn clear(&mut self) {
        loop {
            let latest = self.pool.tensors().next();
            let Some(tensor) = latest else { break };
            self.release(tensor).expect("it is held");
        }
    }

    /// Makes all of `tensor` at most `to` wide. What is as narrow, or floats, stays.
    ///
    /// # Errors
    /// It isn't saved.
    ///
    /// # Panics
    /// `to` isn't codes.
    pub fn narrow(&mut self, team: &Team, tensor: TensorId, to: Width) -> Result<u32, PoolError> {
        assert!(to.is_codes(), "floats are not made of codes");
        let mut shrunk = 0;
        for from in Width::CODES.into_iter().filter(|&from| from > to) {
            shrunk += self.shrink(team, tensor, from, to, u32::MAX)?;
        }
        Ok(shrunk)
    }

    /// Asks for `pages` pages. For fewer than are in use, saved tensors shrink, what costs least for
    /// each freed page first; then pages move below the limit, and the rest is given back to the system.
    /// `importance` is by tensor id.
    ///
    /// # Errors
    /// The room has fewer; or even one bit is too much ([`SaveError::TooTight`]): then release what can
    /// be recomputed, and [`Saved::settle`].
    pub fn set_limit(
        &mut self,
        team: &Team,
        pages: u32,
        importance: &[f32],
    ) -> Result<Change, SaveError> {
        self.pool.set_limit(pages)?;
        self.settle(team, importance)
    }

    /// Reaches the limit that was asked for, as [`Saved::set_limit`] does.
    ///
    /// # Errors
    /// As there.
    pub fn settle(&mut self, team: &Team, importance: &[f32]) -> Result<Change, SaveError> {
        let mut change = Change::default();
        let room = self.make_room(team, 0, importance);
        if let Ok(shrunk) = room {
            change.shrunk = shrunk;
            while let Some(step) = self.pool.next_move() {
                self.pages.copy(step.from, step.to);
                self.pool.moved(step)?;
                change.moved += 1;
            }
        }
        let tail = self.pool.trim();
        change.returned = tail.end - tail.start;
        self.pages.discard(tail).map_err(SaveError::Discard)?;
        room.map(|_| change)
    }

    /// Shrinks saved tensors until `pages` more are free below the limit. How many chunks it took.
    ///
    /// # Errors
    /// [`SaveError::TooTight`]: all are as narrow as they can be; they stay so.
    pub fn make_room(
        &mut self,
        team: &Team,
        pages: u32,
        importance: &[f32],
    ) -> Result<u32, SaveError> {
        let mut shrunk = 0;
        loop {
            let needed = u64::from(self.pool.in_use()) + u64::from(pages);
            let target = self.pool.target();
            if needed <= u64::from(target) {
                return Ok(shrunk);
            }
            let Some(victim) = victim(&self.pool, importance) else {
                return Err(SaveError::TooTight {
                    pages_needed: needed,
                    pages: target,
                });
            };
            let excess = u32::try_from(needed - u64::from(target)).unwrap_or(u32::MAX);
            shrunk += self.shrink(team, victim.tensor, victim.from, victim.to, excess)?;
        }
    }

    /// The pool: its limit, what is in use, who holds what.
    pub fn pool(&self) -> &Pool<'m> {
        &self.pool
    }

    /// The most bytes that pages in use and metadata came to at once: `act_peak_bytes`.
    pub fn peak_bytes(&self) -> u64 {
        self.pool.peak().bytes
    }

    /// The peak begins anew.
    pub fn reset_peak(&mut self) {
        self.pool.reset_peak();
    }

    /// Bytes of the pages that are in memory now.
    ///
    /// # Errors
    /// The kernel doesn't say.
    pub fn resident_bytes(&self) -> io::Result<usize> {
        self.pages.resident_bytes()
    }

    pub(super) fn view(&self, tensor: TensorId) -> Result<View, PoolError> {
        let held = self.pool.held(tensor).ok_or(PoolError::NotHeld(tensor))?;
        let entry = self.entries[tensor.0 as usize].expect("what is held has an entry");
        Ok(View {
            tensor,
            layout: entry.layout,
            width: held.width,
            counter: entry.counter,
            first_group: held.first_group as usize,
        })
    }

    /// Shrinks the first chunks of `tensor` that are `from` wide, until `pages` are freed.
    fn shrink(
        &mut self,
        team: &Team,
        tensor: TensorId,
        from: Width,
        to: Width,
        pages: u32,
    ) -> Result<u32, PoolError> {
        let view = self.view(tensor)?;
        let all = view.layout.shape(view.width).chunks();
        let (mut end, mut freed) = (0, 0);
        while end < all && freed < pages {
            if self.pool.width(tensor, end)? == from {
                freed += self.pool.shrink(tensor, end, to)?.freed();
            }
            end += 1;
        }
        let saved = &*self;
        team.each(end as usize, &|chunk, _| {
            if let Some(shrink) = saved.planned(tensor, chunk as u32, from, to) {
                let first = chunk * view.layout.chunk_elements();
                let (pool, pages) = (&saved.pool, &*saved.pages);
                // SAFETY: the store is borrowed exclusively by the caller, and no other chunk of this
                // fork has these pages.
                unsafe { shrink_chunk(saved.vector, pool, pages, shrink, &view.counter, first) };
            }
        });
        let mut shrunk = 0;
        for chunk in 0..end {
            if let Some(shrink) = self.planned(tensor, chunk, from, to) {
                self.pool.shrunk(shrink)?;
                shrunk += 1;
            }
        }
        Ok(shrunk)
    }

    fn planned(&self, tensor: TensorId, chunk: u32, from: Width, to: Width) -> Option<Shrink> {
        let shrink = self.pool.shrink(tensor, chunk, to).ok()?;
        (shrink.from == from).then_some(shrink)
    }

    /// Where units of one chunk are: groups of codes, or floats.
    pub(super) fn runs(
        &self,
        view: &View,
        chunk: usize,
        units: Range<usize>,
    ) -> Runs<impl Iterator<Item = PageId>> {
        let width = self.pool.width(view.tensor, chunk as u32).expect("held");
        let (unit, units_max) = if width.is_codes() {
            (view.layout.grouping.group(), RUN_GROUPS)
        } else {
            (1, usize::MAX)
        };
        let unit_bytes = unit * width.bits() as usize / 8;
        let pages = self.pool.pages(view.tensor, chunk as u32).expect("held");
        Runs::new(pages, self.pages.page_bytes(), unit_bytes, units, units_max)
    }

    /// Values of rows from `first` on. Shapes: `out` (some rows, cols).
    fn decode(&self, view: &View, first: usize, out: &mut [f32]) {
        match Bits::of(view.width) {
            Some(encoded) => self.decode_codes(view, encoded, first, out),
            None => self.decode_floats(view, first, out),
        }
    }

    fn decode_codes(&self, view: &View, encoded: Bits, first: usize, out: &mut [f32]) {
        let grouping = view.layout.grouping;
        let rows = out.len() / grouping.cols();
        let groups = grouping.groups(first)..grouping.groups(first + rows);
        let start = first * grouping.cols();
        for (chunk, groups) in chunks(groups, view.layout.chunk_groups) {
            let width = self.pool.width(view.tensor, chunk as u32).expect("held");
            let stored = Bits::of(width).expect("codes shrink to codes");
            let base = chunk * view.layout.chunk_groups;
            for run in self.runs(view, chunk, groups) {
                // SAFETY: who writes pages borrows the store exclusively, or is a `Filling`, which
                // does too.
                let codes = unsafe { run.read(self.pages) };
                let run = codec::Run {
                    grouping,
                    first: base + run.units.start,
                    groups: run.units.len(),
                };
                let mut metas = [Meta::default(); RUN_GROUPS];
                let metas = &mut metas[..run.groups];
                for (meta, slab) in metas
                    .iter_mut()
                    .zip(&self.metas[view.first_group + run.first..])
                {
                    *meta = meta_of(slab);
                }
                let at = run.elements();
                let out = &mut out[at.start - start..at.end - start];
                self.vector
                    .dequantize(run, encoded, stored, metas, &codes, out);
            }
        }
    }

    fn decode_floats(&self, view: &View, first: usize, out: &mut [f32]) {
        let start = first * view.layout.grouping.cols();
        let mut rest = out;
        for (chunk, units) in chunks(start..start + rest.len(), view.layout.chunk_elements()) {
            for run in self.runs(view, chunk, units) {
                // SAFETY: as above.
                for bytes in unsafe { run.read(self.pages) } {
                    let count = bytes.len() * 8 / view.width.bits() as usize;
                    let (out, others) = std::mem::take(&mut rest).split_at_mut(count);
                    rest = others;
                    match view.width {
                        Width::Bf16 => self.vector.from_bf16(bytes, out),
                        _ => float::decode_f32(bytes, out),
                    }
                }
            }
        }
    }
}

fn meta_of(slab: &AtomicU32) -> Meta {
    Meta::from_bytes(slab.load(Ordering::Relaxed).to_le_bytes())
}
