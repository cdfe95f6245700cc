//! The compute port on the CPU: each step's work as a short sequence of tasks for the pool.
//!
//! `submit` starts the first task, and every `poll` computes one chunk on the calling thread, so
//! that the caller looks at the storage between chunks while the other threads go on.

use std::sync::Arc;

use leanstream_core::plan::Op;
use leanstream_core::port::{Compute, ComputeEvent, Work};
use leanstream_core::sparse::tables::{Foreseen, Item};
use leanstream_core::sparse::{Choice, Delivery, Grouping, Select, UnitEvent, Units};
use leanstream_core::units::SlotId;

use super::pass::{Order, Phase, Shared, split};
use super::units::{column_chunks, dot_chunks};
use crate::pool::Pool;

/// Works that may be queued: one runs, one waits, so that the pool goes on without a turn of the loop.
const WORKS_MAX: usize = 2;

/// Tokens of a chunk in the phases that go token by token.
const TOKENS_PER_CHUNK: u32 = 4;

/// The CPU as a [`Compute`] backend.
pub struct Cpu {
    pool: Pool<Shared>,
    works: [Option<Work>; WORKS_MAX],
    /// Phase of the first work that runs now.
    running: Option<Phase>,
    units: Running,
}

/// A sparse step that runs.
#[derive(Clone, Copy, Debug, Default)]
struct Running {
    event: Option<UnitEvent>,
    /// Groups handed over, computed, and told of.
    handed: u32,
    computed: u32,
    told: u32,
    /// The groups that are being computed end here.
    until: u32,
    abandoned: bool,
}

impl Cpu {
    /// A backend on `pool`.
    pub fn new(pool: Pool<Shared>) -> Self {
        Self {
            pool,
            works: [None; WORKS_MAX],
            running: None,
            units: Running::default(),
        }
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
            (Op::Units { .. }, None) => Some(Phase::Choose),
            (Op::Embed | Op::Attend { .. } | Op::Units { .. }, _) => None,
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
        let shared = Arc::clone(self.pool.job());
        let step = &shared.steps[work.step.0 as usize];
        let tokens = shared.batch.tokens() as u32;
        let mut order = Order {
            phase,
            step: work.step.0,
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
            Phase::Choose => 1,
            Phase::Dots | Phase::Columns => {
                (order.first, order.split) = (self.units.computed, self.units.until);
                let room = shared.unit_room();
                let items = room.item_range(order.first as usize..order.split as usize);
                if phase == Phase::Dots {
                    dot_chunks(items.len(), shared.batch.prompt())
                } else {
                    column_chunks(shared.hyper.d as usize, self.pool.threads()).0
                }
            }
            Phase::Input if shared.one_logit(step) => 1,
            Phase::Input | Phase::Store | Phase::Add => tokens.div_ceil(TOKENS_PER_CHUNK),
        };
        self.pool.begin(order.task(chunks));
        self.running = Some(phase);
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
        let phase = self.running?;
        if self.pool.step() || !self.pool.ended() {
            std::hint::spin_loop();
            return None;
        }
        let work = self.works[0].expect("a running phase has its work");
        if matches!(phase, Phase::Choose | Phase::Dots | Phase::Columns) && self.unit_phase(phase) {
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
        self.running.is_some() || self.units.told < self.units.computed
    }
}

impl Cpu {
    /// Goes on after `phase` of a sparse step; false when the step ends.
    fn unit_phase(&mut self, phase: Phase) -> bool {
        self.running = None;
        match phase {
            Phase::Choose => {
                self.units = Running {
                    event: Some(UnitEvent::Chosen),
                    abandoned: self.units.abandoned,
                    ..Running::default()
                };
            }
            Phase::Dots => {
                let work = self.works[0].expect("a running phase has its work");
                self.begin(work, Phase::Columns);
                return true;
            }
            _ => self.units.computed = self.units.until,
        }
        if self.units.abandoned {
            self.units = Running::default();
            return false;
        }
        self.next_groups();
        true
    }

    /// Starts what has been handed over since.
    fn next_groups(&mut self) {
        if self.running.is_none() && self.units.computed < self.units.handed {
            self.units.until = self.units.handed;
            let work = self.works[0].expect("groups belong to a step");
            self.begin(work, Phase::Dots);
        }
    }
}

impl Units for Cpu {
    fn poll_units(&mut self) -> Option<UnitEvent> {
        if let Some(event) = self.units.event.take() {
            return Some(event);
        }
        if self.units.told == self.units.computed {
            return None;
        }
        let number = self.shared().unit_room().number(self.units.told as usize);
        self.units.told += 1;
        Some(UnitEvent::GroupEnded(number))
    }

    fn choice(&self) -> Choice<'_> {
        let shared = self.shared();
        let room = shared.unit_room();
        let work = self.works[0].expect("a sparse step runs");
        let Op::Units { layer, .. } = shared.steps[work.step.0 as usize].op else {
            unreachable!("only sparse steps choose")
        };
        let prompt = shared.batch.prompt();
        Choice {
            bank: layer,
            chosen: room.chosen(),
            scores: if prompt { None } else { room.scores() },
            grouping: if prompt {
                Grouping::Sequence
            } else {
                Grouping::Importance
            },
            select: if prompt { Select::All } else { room.select },
        }
    }

    fn group(&mut self, number: u32, items: &[Item]) {
        let handed = self.units.handed;
        self.shared()
            .unit_room()
            .hand_over(handed as usize, number, items);
        self.units.handed += 1;
        self.next_groups();
    }

    fn settle(&mut self, groups: u32) {
        self.shared().unit_room().set_group_count(groups);
        self.units = Running::default();
        let work = self.works[0].expect("a sparse step runs");
        self.begin(work, Phase::Add);
    }

    fn abandon(&mut self) {
        let Some(work) = self.works[0] else { return };
        let op = self.shared().steps[work.step.0 as usize].op;
        if !matches!(op, Op::Units { .. }) || self.running == Some(Phase::Add) {
            return;
        }
        if self.running.is_none() {
            // The step waits for units that won't come.
            self.shared().unit_room().set_group_count(0);
            self.units = Running::default();
            self.begin(work, Phase::Add);
        } else {
            self.units.abandoned = true;
        }
    }

    fn idle(&mut self, _groups_left: u32) {}

    fn foreseen(&self) -> (u32, &[Foreseen]) {
        (0, &[])
    }

    fn deliver(&mut self, staging: SlotId, delivery: Delivery) -> bool {
        let shared = self.shared();
        let staged = shared.arena.bytes(staging);
        shared.unit_room().deliver(delivery, &staged)
    }
}
