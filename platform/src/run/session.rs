//! A model that runs: prompt in, logits out, one token after the other.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use leanstream_core::plan::pieces;
use leanstream_core::sparse::retain::{LruWindow, Name, Policy};
use leanstream_core::sparse::{Beside, Reach, Store};
use leanstream_core::stream::policy::cyclic::Cyclic;
use leanstream_core::stream::tables::Tables;
use leanstream_core::stream::{Engine, Event, Fault, drive};
use leanstream_core::units::PieceId;

use super::attend::Attention;
use super::buffers::Buffers;
use super::cells::Cells;
use super::clock::{Clock, Clocked};
use super::compute::Cpu;
use super::gap::{self, Staging};
use super::head::HeadRoom;
use super::lora::LoraRoom;
use super::memory;
use super::meter::Metered;
use super::model::{Info, Weights};
use super::packed::Packed;
use super::pass::{Batch, HeadMode, SCORE_ROWS, Shared, ThreadScratch, own};
use super::probe::Probe;
use super::score::{Score, nll};
use super::seats::Seats;
use super::stalls::Stalls;
use super::units::UnitRoom;
use crate::arena::Arena;
use crate::cpu::Scratch;
use crate::cpu::units::UnitKernels;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::io::{self, Backend};
use crate::pool::Pool;
use crate::trace::Recorder;

pub use super::head::Wanted;
pub use super::kv::KvType;
pub use super::setup::{Memory, Options};
pub use super::stats::Stats;

/// A model with its memory, its storage and its threads.
pub struct Session<'m> {
    engine: Engine<'m, Cyclic>,
    /// The units of a packed model.
    store: Option<Store<'m, Policy>>,
    /// The store's reads and staging slots come after the engine's.
    first_read: u16,
    first_staging: u32,
    begun: Instant,
    /// Whether scored tokens are taken in one at a time, as generated ones are.
    one_by_one: bool,
    gap: u32,
    /// Whether layers are looked ahead of.
    looks: bool,
    /// Whether all pieces stay in memory once read, and whether they have been.
    all_stay: bool,
    settled: bool,
    storage: Metered<Backend>,
    compute: Cpu,
    position: u32,
    context: u32,
    batch: u32,
    paths: Vec<PathBuf>,
    align: u32,
    /// Token ids of the batch, each once, sorted; then the pieces to gather.
    unique: Vec<u32>,
    gather: Vec<PieceId>,
    watch: Stalls,
    /// Decoded tokens, where some of them are watched, and what was seen.
    watched: Option<u64>,
    clock: Clock,
    seen: Stats,
}

/// One of so many decoded tokens is watched.
const WATCHED: u64 = 8;

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

    /// Shows `probe` every feed-forward network from now on.
    ///
    /// # Panics
    /// When there is one already.
    pub fn attach(&mut self, probe: Arc<dyn Probe>) {
        let taken = self.compute.shared().probe.set(probe).is_err();
        assert!(!taken, "a session has one probe");
    }

    /// Shows what every decoded token uses to `recorder`; see [`Session::end_record`].
    pub fn record(&mut self, recorder: Recorder) {
        self.compute.record(recorder);
    }

    /// Takes the recorder back.
    pub fn end_record(&mut self) -> Option<Recorder> {
        self.compute.end_record()
    }

    /// Tokens that are in the KV cache.
    pub fn position(&self) -> u32 {
        self.position
    }

    /// Positions of the KV cache.
    pub fn context(&self) -> u32 {
        self.context
    }

    /// Forgets all tokens. What was read stays.
    pub fn reset(&mut self) {
        self.position = 0;
    }

    /// Says what the sampler will do to the logits that come next, before the call that computes them:
    /// those of `changed` are divided by `penalty` (multiplied where negative). Without a word the last
    /// holds; the whole head doesn't need it.
    pub fn expect(&mut self, penalty: f32, changed: &[u32]) {
        if let Some(head) = &self.compute.shared().head {
            head.expect(penalty, changed.iter().copied());
        }
    }

    /// Takes in prompt tokens, in batches.
    ///
    /// Returns the logits that follow the last one `(vocab)`.
    ///
    /// # Errors
    /// A read that fails for good, a stop, or a context that is full.
    pub fn prompt(&mut self, tokens: &[u32], next: bool) -> Result<&mut [f32], Error> {
        assert!(!tokens.is_empty(), "a prompt has a token");
        let batch = self.batch as usize;
        let count = tokens.len().div_ceil(batch);
        for (index, part) in tokens.chunks(batch).enumerate() {
            let last = index + 1 == count;
            let mode = if last { HeadMode::Last } else { HeadMode::None };
            self.pass(part, true, mode, !last || next)?;
        }
        Ok(self.logits())
    }

    /// Takes in one token; returns the logits that follow it `(vocab)`. `next`: another will follow.
    ///
    /// # Errors
    /// As [`Session::prompt`].
    pub fn decode(&mut self, token: u32, next: bool) -> Result<&mut [f32], Error> {
        let now = self.begun.elapsed().as_micros() as u64;
        if let Some(recorder) = self.compute.recorder() {
            recorder.token(now);
        }
        self.pass(&[token], false, HeadMode::Last, next)?;
        Ok(self.logits())
    }

    /// Takes in tokens and gives `each` the negative log-likelihood of `targets[i]`, in order;
    /// `u32::MAX` as a target is passed by.
    ///
    /// # Errors
    /// As [`Session::prompt`].
    pub fn score(
        &mut self,
        tokens: &[u32],
        targets: &[u32],
        mut each: impl FnMut(f64),
    ) -> Result<(), Error> {
        assert_eq!(tokens.len(), targets.len(), "one target a token");
        if self.compute.shared().head.is_some() {
            return Err(Error::Usage(
                "scoring needs every logit: leave out --head, or give --head full".into(),
            ));
        }
        if self.one_by_one {
            for (&token, &target) in tokens.iter().zip(targets) {
                if target == u32::MAX {
                    self.pass(&[token], false, HeadMode::None, true)?;
                } else {
                    self.pass(&[token], false, HeadMode::Last, true)?;
                    each(nll(self.logits(), target));
                }
            }
            return Ok(());
        }
        let batch = self.batch as usize;
        for (part, wanted) in tokens.chunks(batch).zip(targets.chunks(batch)) {
            let score = &self.compute.shared().score;
            score.begin(wanted);
            let mode = if wanted.iter().all(|t| *t == u32::MAX) {
                HeadMode::None
            } else {
                HeadMode::Score
            };
            self.pass(part, true, mode, true)?;
            let score = &self.compute.shared().score;
            for (token, _) in wanted.iter().enumerate().filter(|(_, t)| **t != u32::MAX) {
                each(score.nll(token));
            }
        }
        Ok(())
    }

    /// Between tokens: keeps the storage busy with what the next one needs.
    pub fn pump(&mut self) {
        let Self {
            engine,
            storage,
            compute,
            ..
        } = self;
        match &mut self.store {
            None => drive::pump(engine, storage),
            Some(store) => {
                let mut beside = Beside::new(store, self.first_read, self.first_staging);
                drive::pump_beside(engine, storage, compute, &mut beside);
            }
        }
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        let head = self.compute.shared().head.as_ref();
        let (head_rows, heads) = head.map_or((0, 0), HeadRoom::counts);
        Stats {
            head_rows,
            heads,
            counters: self.engine.counters(),
            units: self.store.as_ref().map(Store::counters).unwrap_or_default(),
            stalled: self.watch.total,
            io_busy: self.storage.busy(),
            looks: self.compute.looks_taken(),
            ..self.seen
        }
    }

    /// Unwanted bytes between two units that are read rather than left out.
    pub fn gap(&self) -> u32 {
        self.gap
    }

    /// The storage beneath, for its own report.
    pub fn storage(&self) -> &Backend {
        self.storage.inner()
    }

    /// Something that the user should hear once about the storage, if there is something new.
    pub fn take_notice(&mut self) -> Option<io::Notice> {
        self.storage.inner_mut().take_notice()
    }

    fn logits(&self) -> &mut [f32] {
        let logits = &self.compute.shared().buffers.logits;
        own(logits, 0..logits.len())
    }

    fn pass(
        &mut self,
        tokens: &[u32],
        prompt: bool,
        mode: HeadMode,
        next: bool,
    ) -> Result<(), Error> {
        let count = tokens.len() as u32;
        if self.context - self.position < count {
            return Err(Error::Runtime(format!(
                "the context of {} tokens is full; ask for a longer one with -c",
                self.context
            )));
        }
        let shared = Arc::clone(self.compute.shared());
        if let Some(bad) = tokens.iter().find(|token| **token >= shared.hyper.vocab) {
            return Err(Error::Runtime(format!(
                "token {bad} is outside the vocabulary of {}",
                shared.hyper.vocab
            )));
        }
        own(&shared.buffers.tokens, 0..tokens.len()).copy_from_slice(tokens);
        shared.batch.set(count, self.position, prompt, mode);
        shared
            .attention
            .turn_to(self.position as usize, tokens.len());
        let steps = shared.steps.len() as u32;
        // The head is the last step; a sketched one the last two.
        let head_steps = match &shared.head {
            Some(head) => {
                head.begin();
                2
            }
            None => 1,
        };
        self.engine.set_steps(if mode == HeadMode::None {
            steps - head_steps
        } else {
            steps
        });
        self.gather(&shared, tokens);
        self.engine.handle(Event::Begin {
            gather: &self.gather,
            next: next.then_some(1),
        });
        let watched = match &mut self.watched {
            Some(tokens) if !prompt => {
                *tokens += 1;
                *tokens % WATCHED == 1
            }
            _ => false,
        };
        let (begun, deciding) = (Instant::now(), self.compute.deciding());
        let Self {
            engine,
            storage,
            compute,
            watch,
            clock,
            ..
        } = self;
        clock.begin(watched);
        let clocked = &mut Clocked {
            port: storage,
            clock,
        };
        match &mut self.store {
            None => drive::pass(
                engine,
                clocked,
                &mut Clocked {
                    port: compute,
                    clock,
                },
                watch,
            ),
            Some(store) => {
                store.begin(count);
                compute.look_ahead(self.settled && !prompt && self.looks);
                let mut beside = Beside::new(store, self.first_read, self.first_staging);
                let compute = &mut Clocked {
                    port: compute,
                    clock,
                };
                drive::pass_beside(engine, clocked, compute, watch, &mut beside)
            }
        }
        .map_err(|fault| self.fault(fault))?;
        let decided = self.clock.end();
        if watched {
            self.seen.watched += 1;
            self.seen.watched_time += begun.elapsed();
            self.seen.decided += decided + (self.compute.deciding() - deciding);
        }
        self.settled |= self.all_stay && mode != HeadMode::None;
        self.position += count;
        Ok(())
    }

    /// Which pieces hold the embedding rows of `tokens`: resident ones of the matrix, or single rows.
    fn gather(&mut self, shared: &Shared, tokens: &[u32]) {
        self.unique.clear();
        self.unique.extend_from_slice(tokens);
        self.unique.sort_unstable();
        self.unique.dedup();
        self.gather.clear();
        let matrix = &shared.matrices[shared.embedding.0 as usize];
        let mut rows = 0;
        for &token in &self.unique {
            let piece = PieceId(matrix.first.0 + token / matrix.rows_per_piece);
            if self.engine.slot_of(piece).is_some() {
                // Sorted tokens: those of one piece follow each other.
                if self.gather.last() != Some(&piece) {
                    self.gather.push(piece);
                }
                continue;
            }
            own(&shared.row_tokens, rows as usize..rows as usize + 1)[0] = token;
            self.gather.push(
                self.engine
                    .set_row(rows, pieces::row(matrix, token, self.align)),
            );
            rows += 1;
        }
    }

    fn fault(&self, fault: Fault) -> Error {
        match fault {
            Fault::Unit {
                bank,
                index,
                attempts,
            } => {
                let unit = if bank < self.compute.shared().head_bank() {
                    format!("unit {index} of layer {bank}")
                } else {
                    format!("row {index} of the head")
                };
                Error::model(
                    &self.paths[0],
                    format_args!(
                        "{unit} could not be read in {attempts} tries, or its checksum is wrong; check the file with \
                         leanstream verify"
                    ),
                )
            }
            Fault::Stopped => Error::Signal(self.watch.stop.load(Ordering::Relaxed)),
            Fault::Unreadable { piece, attempts } => {
                let extent = self.engine.piece(piece).extent;
                let storage = self.storage();
                let reason = storage
                    .reason(&extent)
                    .map_or_else(String::new, |error| format!(": {error}"));
                Error::Io {
                    path: self.paths[usize::from(extent.file.0)].clone(),
                    what: "read its weights",
                    source: std::io::Error::other(format!(
                        "{} bytes at {} failed {attempts} times{reason}",
                        extent.len, extent.offset
                    )),
                }
            }
        }
    }
}
