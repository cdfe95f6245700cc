//! A session's start: memory, storage and threads.

use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use leanstream_core::sparse::retain::{LruWindow, Name, Policy};
use leanstream_core::sparse::{Reach, Store};
use leanstream_core::stream::Engine;
use leanstream_core::stream::policy::cyclic::Cyclic;
use leanstream_core::stream::tables::Tables;

use super::{Memory, Options, Session, Stats};
use crate::arena::Arena;
use crate::cpu::Scratch;
use crate::cpu::units::UnitKernels;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::io::{self, Backend};
use crate::pool::Pool;
use crate::run::attend::Attention;
use crate::run::buffers::Buffers;
use crate::run::cells::Cells;
use crate::run::clock::Clock;
use crate::run::compute::Cpu;
use crate::run::gap::{self, Staging};
use crate::run::head::HeadRoom;
use crate::run::lora::LoraRoom;
use crate::run::memory;
use crate::run::meter::Metered;
use crate::run::model::{Info, Weights};
use crate::run::packed::Packed;
use crate::run::pass::{Batch, SCORE_ROWS, Shared, ThreadScratch};
use crate::run::score::Score;
use crate::run::seats::Seats;
use crate::run::stalls::Stalls;
use crate::run::units::UnitRoom;

impl<'m> Session<'m> {
    /// Allocates everything and starts the threads. Nothing is read yet: the first pass does.
    ///
    /// # Errors
    /// What the operating system refuses.
    pub fn start(
        info: &Info,
        weights: Weights,
        memory: &'m mut Memory,
        options: &Options,
    ) -> Result<Self, Error> {
        let Weights {
            matrices,
            embedding,
            steps,
            vectors,
            rope_factors,
            packed,
            lora,
        } = weights;
        let hyper = info.hyper;
        let refused = |what: &'static str| {
            move |error: std::io::Error| Error::io(&info.paths[0], what, error)
        };
        let plan = &memory.plan;
        let threads = options.threads as usize;
        let batch = plan.batch as usize;
        let align = memory.source.align();
        let first_slots = plan.unit_slots();
        let unit_reads = plan.units.map_or(0, |units| units.reads_max);
        let arena = Arc::new(
            Arena::new(plan.slots + u32::from(unit_reads), plan.slot_bytes as usize)
                .map_err(refused("get memory for its weights"))?,
        );
        let io_options = io::Options {
            depth: plan.reads_max + unit_reads,
            stop: Some(options.stop),
            ..options.io
        };
        let storage = Backend::new(Arc::clone(&memory.source), Arc::clone(&arena), &io_options)
            .map_err(|error| refused("start reading it")(std::io::Error::other(error)))?;
        let seats = Arc::new(Seats::new(memory.pieces.len()));
        let first_row_piece = plan.planned + plan.loose;
        let widest = matrices.iter().map(|m| m.cols).max().unwrap_or(0) as usize;
        let tile = if options.score { batch * SCORE_ROWS } else { 0 };
        let rope_factors = rope_factors.map(|id| vectors.get(id).to_vec());
        let kernels = UnitKernels::beside(&options.kernels);
        let mut packed = packed;
        let unit_places = packed.as_ref().map(Packed::unit_places).unwrap_or_default();
        let head = packed.as_mut().and_then(|packed| {
            let (parts, ff) = (packed.take_head()?, packed.ff());
            Some(HeadRoom::new(parts, options.wanted, ff, options.exact))
        });
        let units = packed.zip(plan.units).map(|(packed, plan)| {
            let (slots, bytes) = (plan.slots, plan.slot_bytes as usize);
            let mut room = UnitRoom::new(packed, kernels, slots, bytes, batch, hyper.d as usize);
            room.select = options.select;
            room.in_order = options.without.order;
            room.scores_wanted = options.policy == Name::Refine;
            room
        });
        let (unit_rows, unit_columns) = plan.unit_scratch;
        let shared = Shared {
            attention: Attention::new(
                &hyper,
                options.context,
                plan.batch,
                options.kv_type,
                rope_factors.as_deref(),
            )
            .map_err(|error| Error::model(&info.paths[0], error))?,
            hyper,
            matrices,
            embedding,
            steps,
            vectors,
            seats,
            arena,
            align,
            first_row_piece,
            row_tokens: Cells::new(batch),
            batch: Batch::default(),
            buffers: Buffers::new(&hyper, batch),
            ahead: info.packed.then(|| Buffers::ahead(&hyper)),
            score: Score::new(if options.score { batch } else { 0 }, threads),
            kernels: options.kernels,
            vector: Vector::beside(&options.kernels),
            exact: options.exact,
            units,
            head,
            lora: lora.map(|lora| LoraRoom::new(lora, batch)),
            probe: OnceLock::new(),
            scratch: (0..threads)
                .map(|_| {
                    Mutex::new(ThreadScratch {
                        panel: Scratch::for_cols(widest),
                        attention: vec![0.0; Attention::scratch_floats(&hyper)],
                        tile: vec![0.0; tile],
                        rows: vec![0; unit_rows],
                        columns: vec![0.0; unit_columns],
                    })
                })
                .collect(),
        };
        let pool = Pool::new(threads, memory::STACK_BYTES, Arc::new(shared))
            .map_err(refused("start a thread for it"))?;
        let mut storage = Metered::new(storage);
        let gap = match (options.gap, plan.units) {
            (Some(gap), _) => gap,
            (None, None) => gap::USUAL,
            (None, Some(_)) => {
                let staging = Staging {
                    slot: plan.slots,
                    bytes: plan.slot_bytes,
                    read: plan.reads_max,
                    depth: unit_reads,
                    align,
                };
                gap::measure(&mut storage, &unit_places, staging)
            }
        };
        let mut compute = Cpu::new(pool);
        if options.policy == Name::Oneshot {
            compute.look_once();
        }
        Ok(Self {
            position: 0,
            context: options.context,
            batch: plan.batch,
            paths: info.paths.clone(),
            align,
            unique: Vec::with_capacity(batch),
            gather: Vec::with_capacity(batch),
            watch: Stalls::new(options.stop),
            watched: options.watched.then_some(0),
            clock: Clock::new(),
            seen: Stats::default(),
            storage,
            compute,
            first_read: plan.reads_max,
            first_staging: plan.slots,
            begun: Instant::now(),
            one_by_one: options.one_by_one,
            gap,
            looks: !options.without.looks,
            all_stay: plan.kept() == plan.planned,
            settled: false,
            store: memory.units.as_mut().map(|tables| {
                let reach = Reach {
                    align,
                    window_max: plan.slot_bytes,
                    gap_max: gap,
                    // Bound late: so few that a better estimate finds most of them not started.
                    ahead_max: u32::from(unit_reads / 8).max(1),
                };
                let policy = if options.without.retention {
                    Policy::LruWindow(LruWindow {
                        ahead: !options.without.looks,
                    })
                } else {
                    Policy::new(options.policy, first_slots, tables.priors())
                };
                Store::new(tables.lend(), policy, reach)
            }),
            engine: Engine::new(
                Tables {
                    pieces: &mut memory.pieces,
                    steps: &memory.steps,
                    rows: plan.batch,
                    homes: &mut memory.homes,
                    marks: &mut memory.marks,
                    slots: &mut memory.slots,
                    reads: &mut memory.reads,
                    gather: &mut memory.gather,
                },
                Cyclic::new(plan.shape()),
            ),
        })
    }
}
