//! Whole-machine simulation: the production loop over a storage and a compute backend that are slow,
//! small or broken by seed. Every slot is poisoned until it is filled, every use of a slot is checked
//! against what it holds, and the loop may not allocate.

mod common;

use common::machine::{self, Machine, Report, Run, STEADY, shape};
use common::ops::{self, Arbitrary};
use common::{Plan, Prng};
use leanstream_core::stream::{Cyclic, Lru, Policy, Worth};
use leanstream_core::units::PieceId;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

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

fn run<P: Policy>(policy: P, run: &Run) -> Report {
    machine::run(policy, run, || ALLOCATIONS.get())
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

const SEEDS: u64 = if cfg!(miri) { 4 } else { 6000 };

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
        // Each pass tries ahead of need and in need, three times each.
        assert!(
            report.broken_tries <= 3 * 6,
            "{} tries",
            report.broken_tries
        );
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
