//! Sparse steps on the CPU: what runs when. A step chooses, computes the groups that are handed
//! over, and ends with their sum; while it waits for units, the next layer is looked at.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leanstream_core::plan::{Hyper, Op};
use leanstream_core::port::Work;
use leanstream_core::sparse::tables::{Foreseen, Item};
use leanstream_core::sparse::{Choice, Delivery, Grouping, Select, UnitEvent, Units};
use leanstream_core::trace::{RANKS_ADDED, RANKS_CHOICE};
use leanstream_core::units::{PieceId, SlotId, StepId};

use super::Cpu;
use crate::run::pass::{Phase, see};
use crate::trace::Recorder;

/// The sparse step that runs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Running {
    event: Option<UnitEvent>,
    /// Groups handed over, computed, and told of.
    pub handed: u32,
    pub computed: u32,
    told: u32,
    /// The groups that are being computed end here.
    pub until: u32,
    settling: bool,
    abandoned: bool,
}

impl Running {
    /// Whether there is something to tell.
    pub fn telling(&self) -> bool {
        self.event.is_some() || self.told < self.computed
    }
}

/// The look at the next layer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ahead {
    /// Whether it is allowed.
    pub may: bool,
    /// What comes next, if one is under way.
    next: Option<(Work, Phase)>,
    /// How many looks of the running layer were due: taken, or not worth it.
    looks: usize,
    /// How long the running look has computed.
    took: Duration,
    /// Whether a layer has one look alone, before anything of it is computed.
    pub once: bool,
}

/// Groups that have to be computed for each look: what is seen gets sharper with them. The first look
/// keeps the storage busy from the start; what it got wrong is dropped by the next.
const LOOKS: &[u32] = &[0, 1, 4];

/// The looks of a recorded run, so that its trace tells what each is worth.
const LOOKS_RECORDED: &[u32] = &[0, 1, 2, 4];

/// A recorder, with what it is shown.
pub(super) struct Tracing {
    pub recorder: Recorder,
    active: Vec<u16>,
    importance: Vec<f32>,
    predicted: Vec<u16>,
    /// Sizes of a layer's units `(ff)`, one of its columns `(d)`, and all columns' norms `(layers, ff)` as far as
    /// they are known. Empty where no ranks are recorded.
    sizes: Vec<f32>,
    column: Vec<f32>,
    norms: Vec<f32>,
}

impl Tracing {
    pub fn new(recorder: Recorder, hyper: &Hyper) -> Self {
        let ff = hyper.ff as usize;
        let ranked = usize::from(recorder.ranked());
        Self {
            recorder,
            sizes: vec![0.0; ranked * ff],
            column: vec![0.0; ranked * hyper.d as usize],
            norms: vec![f32::NAN; ranked * hyper.layers as usize * ff],
            active: Vec::with_capacity(ff),
            importance: Vec::with_capacity(ff),
            predicted: Vec::with_capacity(ff),
        }
    }
}

impl Cpu {
    /// Shows a decoded token's choice to the recorder.
    fn record_choice(&mut self) {
        let bank = self.bank();
        let shared = Arc::clone(self.pool.job());
        let units = bank < shared.head_bank() && !shared.batch.prompt();
        let Some(tracing) = self.tracing.as_mut().filter(|_| units) else {
            return;
        };
        let chosen = shared.unit_room().chosen();
        tracing.active.clear();
        tracing
            .active
            .extend(chosen.iter().map(|unit| unit.index as u16));
        tracing.importance.clear();
        tracing
            .importance
            .extend(chosen.iter().map(|unit| unit.importance));
        let gate = see(&shared.buffers.g, 0..shared.hyper.ff as usize);
        tracing
            .recorder
            .layer(bank, gate, &tracing.active, &tracing.importance);
        if tracing.recorder.ranked() {
            shared.sizes(bank, false, &mut tracing.sizes);
            tracing.recorder.ranks(bank, RANKS_CHOICE, &tracing.sizes);
        }
    }

    /// Shows what the units of a decoded token's layer added, all groups of which are computed.
    fn record_added(&mut self) {
        let (bank, handed) = (self.bank(), self.units.handed as usize);
        let shared = Arc::clone(self.pool.job());
        let units = bank < shared.head_bank() && !shared.batch.prompt();
        let tracing = self.tracing.as_mut().filter(|_| units);
        let Some(tracing) = tracing.filter(|tracing| tracing.recorder.ranked()) else {
            return;
        };
        let Tracing {
            recorder,
            sizes,
            column,
            norms,
            ..
        } = tracing;
        let norms = &mut norms[bank as usize * sizes.len()..][..sizes.len()];
        if shared.added(bank, handed, norms, column, sizes) {
            recorder.ranks(bank, RANKS_ADDED, sizes);
        }
    }

    /// Shows what a look foresaw.
    fn record_look(&mut self) {
        let bank = self.bank();
        let shared = Arc::clone(self.pool.job());
        if let Some(tracing) = &mut self.tracing {
            let foreseen = shared.unit_room().foreseen();
            tracing.predicted.clear();
            tracing
                .predicted
                .extend(foreseen.iter().map(|unit| unit.index as u16));
            let stage = self.ahead.looks as u8 - 1;
            tracing.recorder.stage(bank + 1, stage, &tracing.predicted);
            if tracing.recorder.ranked() {
                shared.sizes(bank + 1, true, &mut tracing.sizes);
                tracing.recorder.ranks(bank + 1, stage, &tracing.sizes);
            }
        }
    }

    /// Goes on after `phase` of a sparse step.
    pub(super) fn unit_phase(&mut self, phase: Phase, ahead: bool) {
        self.running = None;
        if ahead {
            self.ahead.took += self.since.elapsed();
        }
        match phase {
            _ if ahead => self.ahead.next = self.after(phase),
            Phase::Choose => {
                self.waits.begin();
                self.units = Running {
                    event: Some(UnitEvent::Chosen),
                    abandoned: self.units.abandoned,
                    ..Running::default()
                };
                self.ahead.looks = 0;
                self.ahead.next = None;
                self.record_choice();
                let head = self.bank() == self.shared().head_bank();
                if head && self.shared().unit_room().chosen().is_empty() {
                    // No row is left that could win.
                    self.units.event = None;
                    self.units.settling = true;
                }
            }
            Phase::Dots => {
                let work = self.works[0].expect("a running phase has its work");
                if self.bank() < self.shared().head_bank() {
                    return self.begin(work, Phase::Columns);
                }
                self.units.computed = self.units.until;
            }
            _ => self.units.computed = self.units.until,
        }
        self.go_on();
    }

    /// Starts what comes next of the step, when nothing runs.
    fn go_on(&mut self) {
        if self.running.is_some() {
            return;
        }
        let work = self.works[0].expect("a sparse step runs");
        if self.units.abandoned {
            self.shared().unit_room().set_group_count(0);
        }
        if self.units.abandoned || self.units.settling {
            let more = !self.units.abandoned && self.units.handed > 0;
            self.units = Running::default();
            self.ahead.next = None;
            let phase = if self.bank() < self.shared().head_bank() {
                Phase::Add
            } else if more {
                // The head's next round.
                Phase::Choose
            } else {
                Phase::Last
            };
            self.begin(work, phase);
        } else if self.tracing.is_some() && self.ahead.next.is_none() && self.look_due() {
            // A recorded run looks ahead at every stage, and takes the groups one by one for it.
            self.look();
        } else if let Some((work, phase)) = self.ahead.next.filter(|_| self.tracing.is_some()) {
            self.begin_on(work, phase, true);
        } else if self.units.computed < self.units.handed {
            self.units.until = match self.tracing {
                Some(_) => self.units.computed + 1,
                None => self.units.handed,
            };
            self.begin(work, Phase::Dots);
        } else if let Some((work, phase)) = self.ahead.next {
            self.begin_on(work, phase, true);
        }
    }

    fn looks(&self) -> &'static [u32] {
        match self.tracing {
            Some(_) => LOOKS_RECORDED,
            None => LOOKS,
        }
    }

    /// Whether the groups that are computed allow another look.
    fn look_due(&self) -> bool {
        let groups = self.looks().get(self.ahead.looks);
        let more = self.ahead.looks == 0 || !self.ahead.once;
        self.ahead.may
            && more
            && groups.is_some_and(|groups| self.units.computed >= *groups)
            && self.bank() + 1 < self.shared().head_bank()
    }

    /// Looks that were due are not due again.
    fn pass_looks(&mut self) {
        let computed = self.units.computed;
        let passed = self.looks()[self.ahead.looks..]
            .iter()
            .take_while(|groups| **groups <= computed);
        self.ahead.looks += passed.count();
    }

    /// Begins a look at the next layer.
    fn look(&mut self) {
        self.pass_looks();
        self.ahead.took = Duration::ZERO;
        let work = self.works[0].expect("a sparse step runs");
        let work = self.whole_step(work.step.0);
        self.ahead.next = Some((work, Phase::Peek));
        self.begin_on(work, Phase::Peek, true);
    }

    /// What follows a phase of the look ahead; its end is an event.
    fn after(&mut self, phase: Phase) -> Option<(Work, Phase)> {
        let (work, _) = self.ahead.next.expect("a look is under way");
        match phase {
            Phase::Foresee => {
                self.waits.looked(self.ahead.took);
                self.record_look();
                self.units.event = Some(UnitEvent::Foreseen);
                return None;
            }
            Phase::Peek => {}
            _ => {
                if let Some(phase) = self.next_phase(work, Some(phase)) {
                    return Some((work, phase));
                }
            }
        }
        let work = self.whole_step(work.step.0 + 1);
        let sparse = matches!(
            self.shared().steps[work.step.0 as usize].op,
            Op::Units { .. }
        );
        let phase = if sparse {
            Phase::Foresee
        } else {
            self.next_phase(work, None).expect("every step has a phase")
        };
        Some((work, phase))
    }

    /// A step as one work over all its pieces.
    fn whole_step(&self, step: u32) -> Work {
        let shared = self.shared();
        let matrices = shared.steps[step as usize].linears.iter().flatten();
        let mut matrices = matrices.map(|l| &shared.matrices[l.matrix.0 as usize]);
        let (first, mut count) = match matrices.next() {
            Some(matrix) => (matrix.first, matrix.piece_count()),
            None => (PieceId(0), 0),
        };
        count += matrices.map(|matrix| matrix.piece_count()).sum::<u32>();
        Work {
            step: StepId(step),
            first,
            count,
            opens: true,
            closes: true,
        }
    }

    /// The bank of the running sparse step: its layer, or the head's behind them.
    fn bank(&self) -> u32 {
        let shared = self.shared();
        let work = self.works[0].expect("a sparse step runs");
        match shared.steps[work.step.0 as usize].op {
            Op::Units { layer, .. } => layer,
            Op::HeadRows => shared.head_bank(),
            other => unreachable!("{other:?} has no units"),
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
        let head = self.bank() == shared.head_bank();
        let prompt = shared.batch.prompt() && !head;
        let whole = prompt || head;
        Choice {
            bank: self.bank(),
            chosen: room.chosen(),
            scores: if whole { None } else { room.scores() },
            grouping: if prompt || (room.in_order && !head) {
                Grouping::Sequence
            } else {
                Grouping::Importance
            },
            select: if whole { Select::All } else { room.select },
        }
    }

    fn group(&mut self, number: u32, items: &[Item]) {
        let handed = self.units.handed as usize;
        self.shared().unit_room().hand_over(handed, number, items);
        self.waits.ready(Instant::now());
        self.units.handed += 1;
        self.go_on();
    }

    fn settle(&mut self, groups: u32) {
        self.waits.settle();
        self.record_added();
        self.shared().unit_room().set_group_count(groups);
        self.units.settling = true;
        self.go_on();
    }

    fn abandon(&mut self) {
        let Some(work) = self.works[0] else { return };
        let op = self.shared().steps[work.step.0 as usize].op;
        let adds = self.running.is_some_and(|running| {
            matches!(running.phase, Phase::Add | Phase::Last) && !running.ahead
        });
        if matches!(op, Op::Units { .. } | Op::HeadRows) && !adds {
            self.units.abandoned = true;
            self.go_on();
        }
    }

    fn idle(&mut self, missing: u32) {
        if self.ahead.next.is_some() || self.running.is_some() || !self.look_due() {
            return;
        }
        if self.waits.pays(missing, Instant::now()) {
            self.look();
        } else {
            self.pass_looks();
        }
    }

    fn foreseen(&self) -> (u32, &[Foreseen]) {
        (self.bank() + 1, self.shared().unit_room().foreseen())
    }

    fn deliver(&mut self, staging: SlotId, delivery: Delivery) -> bool {
        let shared = self.shared();
        let staged = shared.arena.bytes(staging);
        shared.unit_room().deliver(delivery, &staged)
    }
}
