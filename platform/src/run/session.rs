//! A model that runs: prompt in, logits out, one token after the other.

mod start;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use leanstream_core::plan::pieces;
use leanstream_core::sparse::retain::Policy;
use leanstream_core::sparse::{Beside, Store};
use leanstream_core::stream::policy::cyclic::Cyclic;
use leanstream_core::stream::{Engine, Event, Fault, Lost, drive};
use leanstream_core::units::{Extent, PieceId};

use super::clock::{Clock, Clocked};
use super::compute::Cpu;
use super::head::HeadRoom;
use super::meter::Metered;
use super::pass::{HeadMode, Shared, own};
use super::probe::Probe;
use super::score::nll;
use super::stalls::Stalls;
use crate::error::Error;
use crate::io::{self, Backend};
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

impl Session<'_> {
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
                lost,
            } => {
                let unit = if bank < self.compute.shared().head_bank() {
                    format!("unit {index} of layer {bank}")
                } else {
                    format!("row {index} of the head")
                };
                match lost {
                    Lost::Unread(extent) => self.unread(&extent, attempts, &format!(" for {unit}")),
                    Lost::Damaged => Error::model(
                        &self.paths[0],
                        format_args!(
                            "{unit} could not be read whole in {attempts} tries: its checksum is wrong; check the file with \
                             leanstream verify"
                        ),
                    ),
                }
            }
            Fault::Stopped => Error::Signal(self.watch.stop.load(Ordering::Relaxed)),
            Fault::Unreadable { piece, attempts } => {
                self.unread(&self.engine.piece(piece).extent, attempts, "")
            }
        }
    }

    /// A device that fails, in the words of the operating system.
    fn unread(&self, extent: &Extent, attempts: u8, purpose: &str) -> Error {
        let reason = self
            .storage()
            .reason(extent)
            .map_or_else(String::new, |error| format!(": {error}"));
        Error::Io {
            path: self.paths[usize::from(extent.file.0)].clone(),
            what: "read its weights",
            source: std::io::Error::other(format!(
                "{} bytes at {}{purpose} failed {attempts} times{reason}",
                extent.len, extent.offset
            )),
        }
    }
}
