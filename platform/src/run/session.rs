//! A model that runs: prompt in, logits out, one token after the other.

use std::path::PathBuf;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use leanstream_core::plan::pieces;
use leanstream_core::sparse::retain::{Name, Policy};
use leanstream_core::sparse::{Beside, Reach, Select, Store};
use leanstream_core::stream::policy::cyclic::Cyclic;
use leanstream_core::stream::tables::{Mark, Read, Slot, Step, Tables};
use leanstream_core::stream::{Engine, Event, Fault, drive};
use leanstream_core::units::{Extent, FileId, Piece, PieceId, SlotId};

use super::attend::Attention;
use super::buffers::Buffers;
use super::cells::Cells;
use super::compute::Cpu;
use super::head::HeadRoom;
use super::memory::{self, MemoryPlan, Request};
use super::meter::Metered;
use super::model::{Info, Weights};
use super::pass::{Batch, HeadMode, SCORE_ROWS, Shared, ThreadScratch, own};
use super::probe::Probe;
use super::score::Score;
use super::seats::Seats;
use super::sparse::UnitTables;
use super::units::UnitRoom;
use crate::arena::Arena;
use crate::cpu::units::UnitKernels;
use crate::cpu::vector::Vector;
use crate::cpu::{Kernels, Scratch};
use crate::error::Error;
use crate::io::{self, Backend, Direct, Source};
use crate::pool::Pool;
use crate::trace::Recorder;

pub use super::head::Wanted;
pub use super::kv::KvType;
pub use super::stats::Stats;

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
    /// Unwanted bytes between two units that are read rather than left out.
    pub gap: u32,
    /// How to read; its depth is taken from the plan.
    pub io: io::Options,
    /// The signal that asks to stop, 0 while there is none.
    pub stop: &'static AtomicI32,
}

/// The tables that the engine works in, and the plan they were made for.
pub struct Memory {
    /// Who holds what.
    pub plan: MemoryPlan,
    /// What it was planned from.
    pub request: Request,
    source: Arc<Source>,
    pieces: Vec<Piece>,
    steps: Vec<Step>,
    homes: Vec<SlotId>,
    marks: Vec<Mark>,
    slots: Vec<Slot>,
    reads: Vec<Read>,
    gather: Vec<PieceId>,
    units: Option<UnitTables>,
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
        let source = Source::open(&info.paths, options.direct).map_err(|error| {
            Error::io(
                &info.paths[0],
                "open it for reading",
                std::io::Error::other(error),
            )
        })?;
        let align = source.align();
        let request = Request {
            budget: options.budget,
            held,
            context: options.context,
            prompt: options.prompt,
            batch: options.batch,
            score: options.score,
            threads: options.threads,
            kv_type: options.kv_type,
            wanted: options.wanted,
            align,
            queue_depth: options.queue_depth,
        };
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
}

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
        } = weights;
        let hyper = info.hyper;
        let refused = |what: &'static str| {
            move |error: std::io::Error| Error::io(&info.paths[0], what, error)
        };
        let plan = &memory.plan;
        let threads = options.threads as usize;
        let batch = plan.batch as usize;
        let align = memory.source.align();
        let first_slots = plan.units.map_or(0, |units| units.slots);
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
        let head = packed.as_mut().and_then(|packed| {
            let (parts, ff) = (packed.take_head()?, packed.ff());
            Some(HeadRoom::new(parts, options.wanted, ff, options.exact))
        });
        let units = packed.zip(plan.units).map(|(packed, plan)| {
            let (slots, bytes) = (plan.slots, plan.slot_bytes as usize);
            let mut room = UnitRoom::new(packed, kernels, slots, bytes, batch, hyper.d as usize);
            room.select = options.select;
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
            ahead: plan.units.map(|_| Buffers::ahead(&hyper)),
            score: Score::new(if options.score { batch } else { 0 }, threads),
            kernels: options.kernels,
            vector: Vector::beside(&options.kernels),
            exact: options.exact,
            units,
            head,
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
        Ok(Self {
            position: 0,
            context: options.context,
            batch: plan.batch,
            paths: info.paths.clone(),
            align,
            unique: Vec::with_capacity(batch),
            gather: Vec::with_capacity(batch),
            watch: Stalls {
                stop: options.stop,
                since: None,
                total: Duration::ZERO,
            },
            storage: Metered::new(storage),
            compute: Cpu::new(pool),
            first_read: plan.reads_max,
            first_staging: plan.slots,
            begun: Instant::now(),
            one_by_one: options.one_by_one,
            all_stay: plan.kept() == plan.planned,
            settled: false,
            store: memory.units.as_mut().map(|tables| {
                let reach = Reach {
                    align,
                    window_max: plan.slot_bytes,
                    gap_max: options.gap,
                    // Bound late: so few that a better estimate finds most of them not started.
                    ahead_max: u32::from(unit_reads / 8).max(1),
                };
                let policy = Policy::new(options.policy, first_slots, tables.priors());
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
                let mut beside = Beside {
                    store,
                    first_read: self.first_read,
                    first_staging: self.first_staging,
                    stopped: false,
                };
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
        }
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
        let Self {
            engine,
            storage,
            compute,
            watch,
            ..
        } = self;
        match &mut self.store {
            None => drive::pass(engine, storage, compute, watch),
            Some(store) => {
                store.begin(count);
                compute.look_ahead(self.settled && !prompt);
                let mut beside = Beside {
                    store,
                    first_read: self.first_read,
                    first_staging: self.first_staging,
                    stopped: false,
                };
                drive::pass_beside(engine, storage, compute, watch, &mut beside)
            }
        }
        .map_err(|fault| self.fault(fault))?;
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
                let unit = if bank < self.compute.shared().hyper.layers {
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

/// Negative log-likelihood of a token.
fn nll(logits: &[f32], token: u32) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - most)
}

/// Times the waits and carries the stop flag.
struct Stalls {
    /// Number of the signal that asks to stop, or 0.
    stop: &'static AtomicI32,
    since: Option<Instant>,
    total: Duration,
}

impl drive::Watch for Stalls {
    fn stop(&mut self) -> bool {
        self.stop.load(Ordering::Relaxed) != 0
    }

    fn stalls(&mut self) {
        self.since = Some(Instant::now());
    }

    fn resumes(&mut self) {
        if let Some(since) = self.since.take() {
            self.total += since.elapsed();
        }
    }
}
