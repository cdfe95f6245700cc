//! A simulated machine: virtual time, a storage and a compute backend that are slow, small or broken by
//! seed, both checked by the [`Witness`], under the production loop.

use super::{ALIGN, Memory, Plan, Prng, Witness, piece_at};
use leanstream_core::port::{
    Compute, ComputeEvent, Geometry, ReadCommand, ReadOutcome, Storage, Work,
};
use leanstream_core::stream::policy::cyclic::Shape;
use leanstream_core::stream::{Counters, Engine, Event, Fault, Policy, drive};
use leanstream_core::units::{Piece, PieceId, ReadId, SlotId};
use std::cell::{Cell, RefCell};

/// How the simulated machine behaves.
#[derive(Clone, Copy, Debug)]
pub struct Machine {
    pub reads_max: u16,
    pub latency_us: (u64, u64),
    /// Time that the device gives to one read alone; 0: it serves all at once.
    pub transfer_us: u64,
    pub piece_us: u64,
    /// Works that the backend holds: 1 or 2.
    pub works_max: usize,
    pub fault_permille: u64,
    /// The read, counted from 1, that fails however often it is tried.
    pub fails_at: u64,
    /// Plants a bug: a filled slot gets another piece's bytes.
    pub lies: bool,
}

pub const STEADY: Machine = Machine {
    reads_max: 4,
    latency_us: (80, 200),
    transfer_us: 0,
    piece_us: 20,
    works_max: 2,
    fault_permille: 0,
    fails_at: 0,
    lies: false,
};

/// What storage and compute share: time, and the witness.
struct World {
    machine: Machine,
    now: Cell<u64>,
    turns: Cell<u64>,
    turns_max: u64,
    witness: RefCell<Witness>,
    prng: RefCell<Prng>,
    /// Offsets of all pieces: the identity of their bytes. Rows change between passes.
    offsets: RefCell<Vec<u64>>,
    wait_us: Cell<u64>,
}

struct SimStorage<'w> {
    world: &'w World,
    /// By read id: when it ends and how.
    reads: Vec<Option<(u64, ReadOutcome)>>,
    /// When the device has done all that it was asked.
    device_free: u64,
    /// The piece that can't be read, once chosen by `fails_at`.
    broken: Option<PieceId>,
    /// How often it was tried.
    broken_tries: u32,
    first_row: u32,
    started: u64,
    /// Of these, reads of row pieces.
    rows: u64,
}

struct SimCompute<'w> {
    world: &'w World,
    works: [Option<(u64, Work)>; 2],
    slots: [Vec<SlotId>; 2],
}

impl World {
    fn turn(&self) {
        self.turns.set(self.turns.get() + 1);
        assert!(self.turns.get() < self.turns_max, "no progress");
    }
    fn offset(&self, piece: PieceId) -> u64 {
        self.offsets.borrow()[piece.0 as usize]
    }
}

impl Storage for SimStorage<'_> {
    fn geometry(&self) -> Geometry {
        Geometry {
            align: ALIGN,
            reads_max: self.world.machine.reads_max,
        }
    }
    fn start(&mut self, command: ReadCommand) {
        let world = self.world;
        assert_eq!(
            command.extent.offset,
            world.offset(command.piece),
            "the piece's own extent"
        );
        world.witness.borrow_mut().read_started(command);
        self.started += 1;
        self.rows += u64::from(command.piece.0 >= self.first_row);
        if self.started == world.machine.fails_at {
            self.broken = Some(command.piece);
        }
        let prng = &mut *world.prng.borrow_mut();
        let (least, most) = world.machine.latency_us;
        let mut at = world.now.get() + least + prng.below(most - least + 1);
        if world.machine.transfer_us > 0 {
            at = at.max(self.device_free) + world.machine.transfer_us;
            self.device_free = at;
        }
        let outcome = if self.broken == Some(command.piece) {
            self.broken_tries += 1;
            ReadOutcome::Failed
        } else if prng.permille(world.machine.fault_permille) {
            if prng.below(2) == 0 {
                ReadOutcome::Corrupt
            } else {
                ReadOutcome::Failed
            }
        } else {
            ReadOutcome::Filled
        };
        self.reads[usize::from(command.read.0)] = Some((at, outcome));
    }
    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        let world = self.world;
        world.turn();
        let now = world.now.get();
        let ended = |read: &Option<(u64, ReadOutcome)>| read.is_some_and(|(at, _)| at <= now);
        let index = self.reads.iter().position(ended)?;
        let (_, outcome) = self.reads[index].take()?;
        let read = ReadId(index as u16);
        let filled = outcome == ReadOutcome::Filled;
        let mut witness = world.witness.borrow_mut();
        let command = witness.read_ended(read, filled);
        if world.machine.lies && filled {
            witness.scribble(command.slot);
        }
        Some((read, outcome))
    }
    fn wait(&mut self, timeout_us: u32) {
        let world = self.world;
        let now = world.now.get();
        let next = self.reads.iter().flatten().map(|&(at, _)| at).min();
        let next = next.expect("stuck: nothing is in flight").max(now);
        let until = next.min(now + u64::from(timeout_us));
        world.wait_us.set(world.wait_us.get() + until - now);
        world.now.set(until);
    }
}

impl Compute for SimCompute<'_> {
    fn submit(&mut self, work: Work, slots: &[SlotId]) -> Result<(), Work> {
        let world = self.world;
        let taken = self.works.iter().flatten().count();
        if taken == world.machine.works_max {
            return Err(work);
        }
        world
            .witness
            .borrow_mut()
            .submitted(work, slots, |piece| world.offset(piece));
        let from = self.works.iter().flatten().map(|&(at, _)| at).max();
        let from = from.unwrap_or(0).max(world.now.get());
        let at = from + 1 + u64::from(work.count) * world.machine.piece_us;
        self.works[taken] = Some((at, work));
        self.slots[taken].clear();
        self.slots[taken].extend_from_slice(slots);
        Ok(())
    }
    fn poll(&mut self) -> Option<ComputeEvent> {
        let world = self.world;
        let (at, work) = self.works[0]?;
        // A slice of computing takes a while.
        world
            .now
            .set(world.now.get().max(at.min(world.now.get() + 25)));
        if at > world.now.get() {
            return None;
        }
        world
            .witness
            .borrow_mut()
            .work_ended(&self.slots[0], |piece| world.offset(piece));
        self.works = [self.works[1], None];
        self.slots.swap(0, 1);
        Some(ComputeEvent::Ended(work))
    }
    fn busy(&self) -> bool {
        self.works[0].is_some()
    }
}

/// Stops a pass after some turns of the loop.
struct StopAfter(Option<u64>);

impl drive::Watch for StopAfter {
    fn stop(&mut self) -> bool {
        match &mut self.0 {
            None => false,
            Some(0) => true,
            Some(turns) => {
                *turns -= 1;
                false
            }
        }
    }
}

/// One simulated run.
pub struct Run<'a> {
    pub plan: &'a Plan,
    pub slots: usize,
    pub machine: Machine,
    pub passes: u32,
    /// Least and most rows a pass gathers.
    pub rows: (u32, u32),
    /// Whether it gathers from resident pieces where it can.
    pub tied: bool,
    /// Whether some passes leave out the last step.
    pub skips: bool,
    /// One pass in so many is stopped in the middle; 0: none.
    pub stops: u64,
    pub seed: u64,
}

pub struct Report {
    pub finished: u32,
    pub halted: u32,
    pub stopped: u32,
    pub counters: Counters,
    /// Reads of row pieces.
    pub rows: u64,
    /// Tries of the piece that can't be read.
    pub broken_tries: u32,
    pub us: u64,
    pub wait_us: u64,
}

/// Runs it. `allocations` counts those of this thread so far: the loop may make none.
pub fn run<P: Policy>(policy: P, run: &Run, allocations: fn() -> u64) -> Report {
    let Run {
        plan,
        slots,
        machine,
        passes,
        seed,
        ..
    } = *run;
    let reads_max = usize::from(machine.reads_max);
    let mut memory = Memory::new(plan, slots, reads_max);
    let mut engine = memory.engine(policy);
    let mut prng = Prng::new(seed);
    let world = World {
        machine,
        now: Cell::new(0),
        turns: Cell::new(0),
        // Every read and every work takes a bounded number of turns.
        turns_max: (u64::from(passes) + 1) * (plan.pieces.len() as u64 + 20) * 400,
        witness: RefCell::new(Witness::new(plan, slots, reads_max)),
        prng: RefCell::new(Prng::new(seed ^ 0x5eed)),
        offsets: RefCell::new(
            plan.pieces
                .iter()
                .map(|piece| piece.extent.offset)
                .collect(),
        ),
        wait_us: Cell::new(0),
    };
    let mut storage = SimStorage {
        world: &world,
        reads: vec![None; reads_max],
        device_free: 0,
        broken: None,
        broken_tries: 0,
        first_row: plan.first_row(),
        started: 0,
        rows: 0,
    };
    let room = || Vec::with_capacity(plan.pieces.len());
    let mut compute = SimCompute {
        world: &world,
        works: [None; 2],
        slots: [room(), room()],
    };
    let mut gather: Vec<PieceId> = Vec::with_capacity(plan.pieces.len());
    let mut report = Report {
        finished: 0,
        halted: 0,
        stopped: 0,
        counters: Counters::default(),
        rows: 0,
        broken_tries: 0,
        us: 0,
        wait_us: 0,
    };
    let mut tag = 1 << 20;
    let before = allocations();
    for pass in 0..passes {
        choose_gather(&mut engine, run, &mut prng, &world, &mut tag, &mut gather);
        let more = pass + 1 < passes;
        let next = more.then(|| prng.between(run.rows));
        let all = plan.steps.len() as u32;
        let skips = run.skips && prng.below(2) == 0;
        let limit = if skips && all > 1 { all - 1 } else { all };
        engine.set_steps(limit);
        world.witness.borrow_mut().begin(&gather, limit as usize);
        engine.handle(Event::Begin {
            gather: &gather,
            next,
        });
        let stops = run.stops > 0 && prng.below(run.stops) == 0;
        let mut watch = StopAfter(stops.then(|| prng.below(60)));
        match drive::pass(&mut engine, &mut storage, &mut compute, &mut watch) {
            Ok(()) => {
                report.finished += 1;
                world.witness.borrow_mut().finished();
            }
            Err(fault) => {
                world.witness.borrow_mut().halted();
                match fault {
                    Fault::Unit { .. } => unreachable!("a dense plan has no units"),
                    Fault::Stopped => report.stopped += 1,
                    Fault::Unreadable { attempts, .. } => {
                        assert_eq!(attempts, 3);
                        report.halted += 1;
                    }
                }
            }
        }
        assert!(engine.idle());
        // Sampling takes a while, in which read-ahead goes on.
        for _ in 0..prng.below(4) {
            drive::pump(&mut engine, &mut storage);
            world.now.set(world.now.get() + 50);
        }
    }
    drive::drain(&mut engine, &mut storage);
    world.witness.borrow_mut().halted();
    assert_eq!(allocations(), before, "the loop allocated");
    report.counters = engine.counters();
    report.rows = storage.rows;
    report.broken_tries = storage.broken_tries;
    report.us = world.now.get();
    report.wait_us = world.wait_us.get();
    report
}

/// As the run loop does: resident pieces of the table where there are any, rows otherwise.
fn choose_gather<P: Policy>(
    engine: &mut Engine<'_, P>,
    run: &Run,
    prng: &mut Prng,
    world: &World,
    tag: &mut u64,
    gather: &mut Vec<PieceId>,
) {
    gather.clear();
    if run.plan.steps[0].count > 0 {
        return;
    }
    for _ in 0..prng.between(run.rows) {
        let any = PieceId(prng.below(u64::from(run.plan.first_row().max(1))) as u32);
        if run.tied
            && any.0 < run.plan.first_row()
            && engine.slot_of(any).is_some()
            && !gather.contains(&any)
        {
            gather.push(any);
            continue;
        }
        let row = gather
            .iter()
            .filter(|piece| piece.0 >= run.plan.first_row())
            .count() as u32;
        let piece: Piece = piece_at(*tag, 1);
        *tag += 1;
        let id = engine.set_row(row, piece);
        world.offsets.borrow_mut()[id.0 as usize] = piece.extent.offset;
        gather.push(id);
    }
}

pub fn shape(plan: &Plan, slots: usize, reads_max: u16) -> Shape {
    let Plan {
        planned,
        loose,
        rows,
        ..
    } = *plan;
    Shape {
        planned,
        loose,
        rows,
        slots: slots as u32,
        reads_max,
    }
}
