//! The compute port on the CPU: each step's work as a short sequence of tasks for the pool.
//!
//! `submit` starts the first task, and every `poll` computes one chunk on the calling thread, so
//! that the caller looks at the storage between chunks while the other threads go on.

mod units;
mod waits;

use std::sync::Arc;
use std::time::{Duration, Instant};

use leanstream_core::plan::Op;
use leanstream_core::port::{Compute, ComputeEvent, Work};
use leanstream_core::units::SlotId;

use super::pass::{Order, Phase, Shared, split};
use super::units::{column_chunks, dot_chunks};
use crate::pool::{Job, Pool};
use units::{Ahead, Running, Tracing};
use waits::Waits;

use crate::trace::Recorder;

/// Works that may be queued: one runs, one waits, so that the pool goes on without a turn of the loop.
const WORKS_MAX: usize = 2;

/// Tokens of a chunk in the phases that go token by token.
const TOKENS_PER_CHUNK: u32 = 4;

/// The CPU as a [`Compute`] backend.
pub struct Cpu {
    pool: Pool<Shared>,
    works: [Option<Work>; WORKS_MAX],
    /// What runs now, of the first work or ahead of it.
    running: Option<Step>,
    units: Running,
    ahead: Ahead,
    tracing: Option<Tracing>,
    waits: Waits,
    /// When the phase that runs began.
    since: Instant,
    /// How long choosing and foreseeing units took so far.
    deciding: Duration,
    /// Whether the last poll found that other threads had to be waited for.
    waited: bool,
}

/// A phase that runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Step {
    phase: Phase,
    ahead: bool,
}

impl Cpu {
    /// A backend on `pool`.
    pub fn new(pool: Pool<Shared>) -> Self {
        Self {
            pool,
            works: [None; WORKS_MAX],
            running: None,
            units: Running::default(),
            ahead: Ahead::default(),
            tracing: None,
            waits: Waits::new(),
            since: Instant::now(),
            deciding: Duration::ZERO,
            waited: false,
        }
    }

    /// Shows all decoded tokens to `recorder` from now on.
    pub fn record(&mut self, recorder: Recorder) {
        self.tracing = Some(Tracing::new(recorder, &self.shared().hyper));
    }

    /// The recorder, to tell it more.
    pub fn recorder(&mut self) -> Option<&mut Recorder> {
        self.tracing.as_mut().map(|tracing| &mut tracing.recorder)
    }

    /// Takes the recorder back.
    pub fn end_record(&mut self) -> Option<Recorder> {
        self.tracing.take().map(|tracing| tracing.recorder)
    }

    /// Whether the next layer may be looked at while this one waits: its matrices have to be in
    /// memory, and to stay there.
    pub fn look_ahead(&mut self, may: bool) {
        self.ahead.may = may && self.shared().ahead.is_some();
    }

    /// One look ahead of a layer alone, before anything of the one before is computed.
    pub fn look_once(&mut self) {
        self.ahead.once = true;
    }

    /// Looks ahead that were taken.
    pub fn looks_taken(&self) -> u64 {
        self.waits.looks
    }

    /// How long choosing and foreseeing units took so far.
    pub fn deciding(&self) -> Duration {
        self.deciding
    }

    /// Whether the last poll found nothing to do, since other threads compute.
    pub fn waited(&self) -> bool {
        self.waited
    }

    /// What the threads work on.
    pub fn shared(&self) -> &Arc<Shared> {
        self.pool.job()
    }

    /// The phases of `work`'s step, in order; `from` is the one before.
    fn next_phase(&self, work: Work, from: Option<Phase>) -> Option<Phase> {
        let op = self.shared().steps[work.step.0 as usize].op;
        match (op, from) {
            (Op::Embed, None) => Some(Phase::Embed),
            (Op::Attend { .. }, None) => Some(Phase::Store),
            (Op::Attend { .. }, Some(Phase::Store)) => Some(Phase::Attend),
            (Op::Units { .. } | Op::HeadRows, None) => Some(Phase::Choose),
            (Op::Embed | Op::Attend { .. } | Op::Units { .. } | Op::HeadRows, _) => None,
            (_, None) if work.opens => Some(Phase::Input),
            (_, None | Some(Phase::Input)) => Some(Phase::Rows),
            (Op::Out { .. } | Op::Down { .. }, Some(Phase::Rows)) if work.closes => {
                Some(Phase::Add)
            }
            _ => None,
        }
    }

    /// Starts `phase` of `work`.
    fn begin(&mut self, work: Work, phase: Phase) {
        self.begin_on(work, phase, false);
    }

    /// Starts `phase` of `work` on the batch's activations, or on those ahead.
    fn begin_on(&mut self, work: Work, phase: Phase, ahead: bool) {
        let shared = Arc::clone(self.pool.job());
        let step = &shared.steps[work.step.0 as usize];
        let tokens = shared.batch.tokens() as u32;
        let mut order = Order {
            phase,
            step: work.step.0,
            ahead,
            first: work.first.0,
            split: TOKENS_PER_CHUNK,
        };
        let chunks = match phase {
            // A tied embedding's piece or a row of it: little work, and seldom more than one.
            Phase::Embed => work.count,
            Phase::Attend => {
                let Op::Attend { layer, .. } = step.op else {
                    unreachable!("only attention attends")
                };
                shared.attention.units(&shared, layer) as u32
            }
            Phase::Rows => {
                let rows = step
                    .linears
                    .iter()
                    .flatten()
                    .map(|linear| shared.matrices[linear.matrix.0 as usize].rows_per_piece)
                    .max()
                    .expect("a step with pieces has matrices");
                order.split = split(work.count, rows, self.pool.threads() as u32);
                work.count * order.split
            }
            Phase::Choose | Phase::Foresee | Phase::Last => 1,
            Phase::Peek => {
                order.split = self.units.computed;
                1
            }
            Phase::Dots | Phase::Columns => {
                (order.first, order.split) = (self.units.computed, self.units.until);
                let room = shared.unit_room();
                let items = room.item_range(order.first as usize..order.split as usize);
                if phase == Phase::Dots {
                    let prompt = shared.batch.prompt() && step.op != Op::HeadRows;
                    dot_chunks(items.len(), prompt)
                } else {
                    column_chunks(shared.hyper.d as usize, self.pool.threads()).0
                }
            }
            Phase::Input if shared.one_logit(step) => 1,
            Phase::Input | Phase::Store | Phase::Add => tokens.div_ceil(TOKENS_PER_CHUNK),
        };
        let decides = matches!(phase, Phase::Choose | Phase::Foresee);
        if ahead || decides {
            self.since = Instant::now();
        }
        let task = order.task(chunks);
        if chunks == 1 {
            // Done before another thread has heard of it, and what it writes is needed here.
            shared.run(task, 0, 0);
        } else {
            self.pool.begin(task);
        }
        if decides {
            self.deciding += self.since.elapsed();
        }
        self.running = Some(Step { phase, ahead });
    }
}

impl Compute for Cpu {
    fn submit(&mut self, work: Work, slots: &[SlotId]) -> Result<(), Work> {
        let free = self.works.iter_mut().find(|slot| slot.is_none());
        *free.ok_or(work)? = Some(work);
        self.pool.job().seats.set(work.first, slots);
        if self.running.is_none() {
            let phase = self.next_phase(work, None).expect("every work has a phase");
            self.begin(work, phase);
        }
        Ok(())
    }

    fn poll(&mut self) -> Option<ComputeEvent> {
        self.waited = false;
        let Step { phase, ahead } = self.running?;
        if self.pool.step() {
            return None;
        }
        if !self.pool.ended() {
            self.waited = true;
            std::hint::spin_loop();
            return None;
        }
        let work = self.works[0].expect("a running phase has its work");
        if ahead || matches!(phase, Phase::Choose | Phase::Dots | Phase::Columns) {
            self.unit_phase(phase, ahead);
            return None;
        }
        if let Some(next) = self.next_phase(work, Some(phase)) {
            self.begin(work, next);
            return None;
        }
        self.works = [self.works[1].take(), None];
        self.running = None;
        if let Some(next) = self.works[0] {
            let phase = self.next_phase(next, None).expect("every work has a phase");
            self.begin(next, phase);
        }
        Some(ComputeEvent::Ended(work))
    }

    fn busy(&self) -> bool {
        self.running.is_some() || self.units.telling()
    }
}
