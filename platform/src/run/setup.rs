//! How a model is to run, and the tables of the engine and the store, planned and filled in before
//! anything large is allocated.

use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use leanstream_core::plan::pieces;
use leanstream_core::sparse::Select;
use leanstream_core::sparse::retain::Name;
use leanstream_core::stream::tables::{Mark, Read, Slot, Step};
use leanstream_core::units::{Extent, FileId, Piece, PieceId, SlotId};

use super::head::Wanted;
use super::kv::KvType;
use super::memory::{self, MemoryPlan, Request};
use super::model::{Info, Weights};
use super::sparse::UnitTables;
use crate::cpu::Kernels;
use crate::error::Error;
use crate::io::{self, Direct, Source};

/// Parts of the sparse scheme that can be left out, to see what each does.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Without {
    /// Units are read and computed as they stand in the file, not by importance and arrival.
    pub order: bool,
    /// Nothing is read before its layer's gate is known.
    pub looks: bool,
    /// What was used last stays.
    pub retention: bool,
}

/// How a model is to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// Bytes the process may hold.
    pub budget: u64,
    /// Positions of the KV cache: prompt and generated tokens together.
    pub context: u32,
    /// Tokens of the longest prompt; a larger batch would be wasted.
    pub prompt: u32,
    /// Largest prompt batch; `None` lets the budget decide.
    pub batch: Option<u32>,
    /// Whether [`Session::score`] will be called.
    pub score: bool,
    /// Whether it takes tokens in one at a time: what a sparse mode costs shows only then, for
    /// batches use every unit.
    pub one_by_one: bool,
    /// Compute threads, at least 1.
    pub threads: u32,
    /// Type of the KV cache.
    pub kv_type: KvType,
    /// f32 activations instead of int8.
    pub exact: bool,
    /// Matrix kernels.
    pub kernels: Kernels,
    /// Whether to read past the page cache.
    pub direct: Direct,
    /// Reads in flight, or as many as the device needs.
    pub queue_depth: Option<u16>,
    /// Of which logits use is made, where a sketched head can leave out the others.
    pub wanted: Wanted,
    /// Which chosen units of a packed model are used.
    pub select: Select,
    /// Which of its units stay in memory.
    pub policy: Name,
    /// Parts of the sparse scheme that are left out, to see what they do.
    pub without: Without,
    /// Unwanted bytes between two units that are read rather than left out; `None` measures what the
    /// device is best at.
    pub gap: Option<u32>,
    /// Whether to watch how long some passes decide, for [`Stats::decided`](super::stats::Stats::decided).
    pub watched: bool,
    /// How to read; its depth is taken from the plan.
    pub io: io::Options,
    /// The signal that asks to stop, 0 while there is none.
    pub stop: &'static AtomicI32,
}

impl Options {
    /// Opens the model's files for reading.
    ///
    /// # Errors
    /// A file that can't be opened so.
    pub fn open(&self, info: &Info) -> Result<Source, Error> {
        Source::open(&info.paths, self.direct).map_err(|error| {
            Error::io(
                &info.paths[0],
                "open it for reading",
                std::io::Error::other(error),
            )
        })
    }

    /// What is asked of the memory plan by a process that holds `held` bytes, where reads are
    /// aligned to `align`.
    pub fn request(&self, held: u64, align: u32) -> Request {
        Request {
            budget: self.budget,
            held,
            context: self.context,
            prompt: self.prompt,
            batch: self.batch,
            score: self.score,
            threads: self.threads,
            kv_type: self.kv_type,
            wanted: self.wanted,
            align,
            queue_depth: self.queue_depth,
        }
    }
}

/// The tables that the engine works in, and the plan they were made for.
pub struct Memory {
    /// Who holds what.
    pub plan: MemoryPlan,
    /// What it was planned from.
    pub request: Request,
    pub(super) source: Arc<Source>,
    pub(super) pieces: Vec<Piece>,
    pub(super) steps: Vec<Step>,
    pub(super) homes: Vec<SlotId>,
    pub(super) marks: Vec<Mark>,
    pub(super) slots: Vec<Slot>,
    pub(super) reads: Vec<Read>,
    pub(super) gather: Vec<PieceId>,
    pub(super) units: Option<UnitTables>,
}

impl Memory {
    /// Plans the memory of a run and cuts the model's matrices into pieces; the arena, the cache and
    /// the activations are not allocated yet.
    ///
    /// # Errors
    /// A budget that is too small, or a file that can't be opened for reading.
    pub fn new(
        info: &Info,
        weights: &mut Weights,
        options: &Options,
        held: u64,
    ) -> Result<Self, Error> {
        let source = options.open(info)?;
        let align = source.align();
        let request = options.request(held, align);
        let plan = memory::plan(info, weights, &request)?;
        let mut pieces = Vec::with_capacity((plan.planned + plan.loose + plan.batch) as usize);
        let steps = cut(weights, info.hyper.tied, &plan, align, &mut pieces);
        let blank = Piece {
            extent: Extent {
                file: FileId(0),
                offset: 0,
                len: 0,
            },
            skew: 0,
            bytes: 0,
        };
        pieces.resize(pieces.len() + plan.batch as usize, blank);
        Ok(Self {
            source: Arc::new(source),
            homes: vec![SlotId::NONE; pieces.len()],
            marks: vec![Mark::default(); pieces.len()],
            slots: vec![Slot::default(); plan.slots as usize],
            reads: vec![Read::default(); usize::from(plan.reads_max)],
            gather: vec![PieceId(0); plan.batch as usize],
            units: weights
                .packed
                .as_mut()
                .zip(plan.units)
                .map(|(packed, plan)| UnitTables::new(packed, &plan)),
            pieces,
            steps,
            plan,
            request,
        })
    }
}

/// Cuts every matrix and appends its pieces, the steps' first, then those of no step.
fn cut(
    weights: &mut Weights,
    tied: bool,
    plan: &MemoryPlan,
    align: u32,
    pieces: &mut Vec<Piece>,
) -> Vec<Step> {
    let mut append = |weights: &mut Weights, index: usize| {
        let matrix = &mut weights.matrices[index];
        matrix.first = PieceId(pieces.len() as u32);
        matrix.rows_per_piece = pieces::rows_per_piece(matrix, plan.slot_bytes, align)
            .expect("the slot was chosen for it");
        let count = matrix.piece_count();
        pieces.extend((0..count).map(|index| pieces::piece(matrix, index, align)));
        count
    };
    let mut steps = Vec::with_capacity(weights.steps.len());
    let mut next = 0;
    for step in 0..weights.steps.len() {
        let linears = weights.steps[step].linears;
        let count = linears
            .iter()
            .flatten()
            .map(|l| append(weights, l.matrix.0 as usize))
            .sum();
        steps.push(Step {
            first: PieceId(next),
            count,
        });
        next += count;
    }
    assert_eq!(next, plan.planned, "the plan counted the pieces");
    if !tied {
        let embedding = weights.embedding.0 as usize;
        assert_eq!(
            append(weights, embedding),
            plan.loose,
            "the plan counted the pieces"
        );
    }
    steps
}
