//! Whole-machine simulation: the production loop over a storage and a compute backend that are slow,
//! small or broken by seed. Every slot is poisoned until it is filled, every use of a slot is checked
//! against what it holds, and the loop may not allocate.

mod common;

use common::ops::{self, Arbitrary};
use common::{Memory, Plan, Prng, Witness, piece_at};
use leanstream_core::port::{
    Compute, ComputeEvent, Geometry, ReadCommand, ReadOutcome, Storage, Work,
};
use leanstream_core::stream::policy::cyclic::Shape;
use leanstream_core::stream::{Counters, Cyclic, Engine, Event, Fault, Lru, Policy, Worth, drive};
use leanstream_core::units::{Piece, PieceId, ReadId, SlotId};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::{Cell, RefCell};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: forwards to the system allocator unchanged; counting touches no memory it hands out.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's duty is passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's duty is passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// How the simulated machine behaves.
#[derive(Clone, Copy, Debug)]
struct Machine {
    reads_max: u16,
    latency_us: (u64, u64),
    piece_us: u64,
    /// Works that the backend holds: 1 or 2.
    works_max: usize,
    fault_permille: u64,
    /// The read, counted from 1, that fails however often it is tried.
    fails_at: u64,
    /// Plants a bug: a filled slot gets another piece's bytes.
    lies: bool,
}

const STEADY: Machine = Machine {
    reads_max: 4,
    latency_us: (80, 200),
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
    /// The piece that can't be read, once chosen by `fails_at`.
    broken: Option<PieceId>,
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
            align: common::ALIGN,
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
        let at = world.now.get() + least + prng.below(most - least + 1);
        let outcome = if self.broken == Some(command.piece) {
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
struct Run<'a> {
    plan: &'a Plan,
    slots: usize,
    machine: Machine,
    passes: u32,
    /// Least and most rows a pass gathers.
    rows: (u32, u32),
    /// Whether it gathers from resident pieces where it can.
    tied: bool,
    /// Whether some passes leave out the last step.
    skips: bool,
    /// One pass in so many is stopped in the middle; 0: none.
    stops: u64,
    seed: u64,
}

struct Report {
    finished: u32,
    halted: u32,
    stopped: u32,
    counters: Counters,
    /// Reads of row pieces.
    rows: u64,
    us: u64,
    wait_us: u64,
}

fn run<P: Policy>(policy: P, run: &Run) -> Report {
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
        broken: None,
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
        us: 0,
        wait_us: 0,
    };
    let mut tag = 1 << 20;
    let before = ALLOCATIONS.get();
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
    assert_eq!(ALLOCATIONS.get(), before, "the loop allocated");
    report.counters = engine.counters();
    report.rows = storage.rows;
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

fn shape(plan: &Plan, slots: usize, reads_max: u16) -> Shape {
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

fn random_plan(prng: &mut Prng) -> Plan {
    let mut counts = vec![];
    for _ in 0..1 + prng.below(12) {
        let count = if prng.below(3) == 0 {
            0
        } else {
            prng.below(12) as u32
        };
        counts.push(count);
    }
    let (mut loose, mut rows) = (0, 0);
    if prng.below(3) > 0 {
        counts.insert(0, 0);
        rows = 1 + prng.below(9) as u32;
        loose = prng.below(6) as u32;
    }
    Plan::new(&counts, loose, rows)
}

fn sweep(seeds: std::ops::Range<u64>, faults: bool, stops: bool) -> (u32, u32, u32) {
    let (mut finished, mut halted, mut stopped) = (0, 0, 0);
    for seed in seeds {
        let mut prng = Prng::new(seed);
        let plan = random_plan(&mut prng);
        let slots = 1 + prng.below(2 + plan.pieces.len() as u64) as usize;
        let latency = 1 + prng.below(300);
        let machine = Machine {
            reads_max: 1 + prng.below(8) as u16,
            latency_us: (latency, latency + prng.below(500)),
            piece_us: prng.below(200),
            works_max: 1 + prng.below(2) as usize,
            fault_permille: if faults { prng.below(400) } else { 0 },
            ..STEADY
        };
        let run_ = Run {
            plan: &plan,
            slots,
            machine,
            passes: 4,
            rows: (0, plan.rows),
            tied: true,
            skips: seed % 2 == 0,
            stops: if stops { 3 } else { 0 },
            seed,
        };
        let report = match seed % 3 {
            0 => run(Lru, &run_),
            1 => run(
                Arbitrary {
                    seed,
                    loose: plan.loose,
                },
                &run_,
            ),
            _ => run(Cyclic::new(shape(&plan, slots, machine.reads_max)), &run_),
        };
        if !faults {
            assert_eq!(report.halted, 0, "seed {seed}");
            assert_eq!(report.counters.retries, 0);
            assert_eq!(report.counters.rereads, 0, "seed {seed}");
            if !stops {
                assert_eq!(report.finished, 4);
            }
        }
        // A pass that is stopped may have opened a step and computed none of it.
        assert!(stops || faults || report.counters.hits <= report.counters.pieces);
        finished += report.finished;
        halted += report.halted;
        stopped += report.stopped;
    }
    (finished, halted, stopped)
}

const SEEDS: u64 = if cfg!(miri) { 12 } else { 6000 };

#[test]
fn random_machines_finish_every_pass() {
    sweep(0..SEEDS, false, false);
}

#[test]
fn random_faults_are_retried_or_halt_cleanly() {
    let (finished, halted, _) = sweep(0..SEEDS, true, false);
    assert!(
        cfg!(miri) || finished > 1000 && halted > 1000,
        "{finished} {halted}: both happen"
    );
}

#[test]
fn a_stopped_engine_drains_and_runs_again() {
    let (finished, _, stopped) = sweep(0..SEEDS, true, true);
    assert!(
        cfg!(miri) || finished > 1000 && stopped > 1000,
        "{finished} {stopped}: both happen"
    );
}

/// Any order of events that the contract allows, from chance: what the fuzzer does with more patience.
#[test]
fn random_operations_keep_the_accounts() {
    let mut data = [0; 300];
    for seed in 0..2 * SEEDS {
        let mut prng = Prng::new(seed ^ 0xf022);
        data.fill_with(|| prng.below(256) as u8);
        let len = 20 + prng.below(280) as usize;
        ops::run(&data[..len]);
    }
}

/// One slot is enough for any plan, and so is one read.
#[test]
fn one_slot_is_enough() {
    let plan = Plan::new(&[0, 5, 0, 3, 7], 4, 6);
    let machine = Machine {
        reads_max: 1,
        ..STEADY
    };
    let one = Run {
        plan: &plan,
        slots: 1,
        machine,
        passes: 3,
        rows: (0, 6),
        tied: true,
        skips: false,
        stops: 0,
        seed: 7,
    };
    assert_eq!(run(Lru, &one).finished, 3);
    assert_eq!(run(Cyclic::new(shape(&plan, 1, 1)), &one).finished, 3);
    assert_eq!(
        run(
            Lru,
            &Run {
                machine: STEADY,
                ..one
            }
        )
        .finished,
        3
    );
}

/// In a steady state exactly the pieces that are not kept are read, each once, whatever the latencies,
/// and read-ahead across the end of a pass takes nothing from it.
#[test]
fn steady_reads_are_what_is_not_kept() {
    let plan = Plan::new(&[0, 9, 0, 14, 3, 0, 0, 30, 8], 0, 1);
    for slots in 4..plan.planned as usize + 3 {
        for reads_max in [1, 3, 8] {
            let cyclic = Cyclic::new(shape(&plan, slots, reads_max));
            let machine = Machine {
                reads_max,
                ..STEADY
            };
            let long = Run {
                plan: &plan,
                slots,
                machine,
                passes: 8,
                rows: (1, 1),
                tied: false,
                skips: false,
                stops: 0,
                seed: 3,
            };
            let short = Run { passes: 4, ..long };
            let (long, short) = (run(cyclic, &long), run(cyclic, &short));
            let planned = |report: &Report| report.counters.reads - report.rows;
            let missing = u64::from(plan.planned - cyclic.kept());
            let four = planned(&long) - planned(&short);
            if slots == plan.planned as usize {
                // Only the row is in the way: it takes one piece's slot, and gives it back.
                assert_eq!(four, 4, "{reads_max} reads");
            } else {
                assert_eq!(four, 4 * missing, "{slots} slots, {reads_max} reads");
            }
            assert_eq!(long.counters.rereads, 0);
            assert_eq!(long.counters.pieces, 8 * (u64::from(plan.planned) + 1));
        }
    }
}

/// Read n fails for good: n = 1, 2, 3 ... until a run makes fewer reads. Each run halts or, if the
/// piece was kept or not needed any more, finishes; all of them drain.
#[test]
fn every_read_may_be_the_one_that_fails() {
    let plan = Plan::new(&[0, 4, 0, 6, 5], 3, 4);
    let mut halts = 0;
    for fails_at in 1.. {
        let machine = Machine { fails_at, ..STEADY };
        let linear = Run {
            plan: &plan,
            slots: 9,
            machine,
            passes: 3,
            rows: (0, 4),
            tied: true,
            skips: false,
            stops: 0,
            seed: 11,
        };
        let report = run(Cyclic::new(shape(&plan, 9, 4)), &linear);
        halts += report.halted;
        if report.counters.reads < fails_at {
            assert_eq!(report.finished, 3);
            assert!(fails_at > 30, "there were reads to fail");
            break;
        }
    }
    assert!(halts > 30, "{halts}");
}

/// The canary: a world that lies about its bytes has to be caught, or the checks check nothing.
#[test]
#[should_panic(expected = "wrong bytes")]
fn canary_wrong_bytes_are_caught() {
    let plan = Plan::new(&[0, 4, 6], 0, 2);
    let machine = Machine {
        lies: true,
        ..STEADY
    };
    run(
        Lru,
        &Run {
            plan: &plan,
            slots: 5,
            machine,
            passes: 2,
            rows: (0, 2),
            tied: true,
            skips: false,
            stops: 0,
            seed: 1,
        },
    );
}

/// Keeps the first pieces of the plan instead of spreading the kept ones over it.
struct Front(u32);

impl Policy for Front {
    fn used(&self, piece: PieceId) -> Worth {
        if piece.0 < self.0 {
            Worth::MOST
        } else {
            Worth::LEAST
        }
    }
}

/// Reading a quarter of the pieces while all are computed is hidden when the quarter is spread over
/// the plan, and is not when it comes at once: the reason for spreading.
#[test]
fn spread_reads_hide_behind_computing() {
    let plan = Plan::new(&[0, 100, 100, 100, 100], 0, 1);
    let (slots, reads_max) = (316, 4);
    // Four reads of 120 us in flight bring a piece each 30 us; computing one takes 20 us.
    let machine = Machine {
        latency_us: (120, 120),
        reads_max,
        ..STEADY
    };
    let long = Run {
        plan: &plan,
        slots,
        machine,
        passes: 6,
        rows: (1, 1),
        tied: false,
        skips: false,
        stops: 0,
        seed: 5,
    };
    let short = Run { passes: 2, ..long };
    // Time that four passes of the steady state spend waiting.
    let cyclic = Cyclic::new(shape(&plan, slots, reads_max));
    let spread = run(cyclic, &long).wait_us - run(cyclic, &short).wait_us;
    let kept = cyclic.kept();
    let front = run(Front(kept), &long).wait_us - run(Front(kept), &short).wait_us;
    // The row that a pass begins with can't be read before the pass is asked for.
    assert_eq!(spread, 4 * 120);
    assert!(front > 4 * spread, "{front}");
}
