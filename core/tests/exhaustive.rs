//! Every order in which reads and works can end, on plans small enough to try them all: up to 4 slots
//! and 3 reads. Runs are replayed from the start with one choice changed, until none is left.

mod common;

use common::{Memory, Plan, Witness, piece_at};
use leanstream_core::port::{ComputeEvent, ReadOutcome};
use leanstream_core::stream::policy::cyclic::Shape;
use leanstream_core::stream::{Action, Cyclic, Engine, Event, Fault, Lru, Policy};
use leanstream_core::units::{PieceId, SlotId};

/// The choices of one run, in order: which was taken, of how many.
#[derive(Default)]
struct Choices {
    taken: Vec<(u32, u32)>,
    at: usize,
}

impl Choices {
    fn choose(&mut self, options: u32) -> u32 {
        assert!(options > 0, "stuck: nothing is in flight and nothing to do");
        if self.at == self.taken.len() {
            self.taken.push((0, options));
        }
        let (taken, of) = self.taken[self.at];
        assert_eq!(of, options, "the engine does the same when told the same");
        self.at += 1;
        taken
    }

    /// Moves on to the next run; false when all have been.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((taken, of)) = self.taken.pop() {
            if taken + 1 < of {
                self.taken.push((taken + 1, of));
                return true;
            }
        }
        false
    }
}

#[derive(Clone, Copy)]
struct Setting<'a> {
    counts: &'a [u32],
    loose: u32,
    /// Rows gathered in each pass.
    gathers: u32,
    slots: usize,
    reads: usize,
    passes: u32,
    /// Reads that may fail, whichever they are.
    faults: u32,
    /// Whether the run may be stopped, whenever.
    stops: bool,
    /// Whether events may also come in twos, with no poll between them.
    bursts: bool,
}

#[derive(Default, Debug)]
struct Tally {
    runs: u64,
    finished: u64,
    unreadable: u64,
    stopped: u64,
}

fn explore<P: Policy + Clone>(setting: Setting, policy: impl Fn(&Plan) -> P) -> Tally {
    let plan = Plan::new(setting.counts, setting.loose, setting.gathers);
    let policy = policy(&plan);
    let mut memory = Memory::new(&plan, setting.slots, setting.reads);
    let mut choices = Choices::default();
    let mut tally = Tally::default();
    loop {
        memory.pieces.copy_from_slice(&plan.pieces);
        let mut engine = memory.engine(policy.clone());
        run(&mut engine, &plan, setting, &mut choices, &mut tally);
        tally.runs += 1;
        assert!(tally.runs < 1_000_000, "too many orders to try: {tally:?}");
        if !choices.advance() || cfg!(miri) && tally.runs == 8 {
            return tally;
        }
    }
}

fn run<P: Policy>(
    engine: &mut Engine<'_, P>,
    plan: &Plan,
    setting: Setting,
    choices: &mut Choices,
    tally: &mut Tally,
) {
    let mut witness = Witness::new(plan, setting.slots, setting.reads);
    let (mut faults, mut stops) = (setting.faults, setting.stops);
    let mut events = 0;
    for pass in 0..setting.passes {
        let gather: Vec<PieceId> = (0..setting.gathers)
            .map(|row| {
                let tag = u64::from(1000 + pass * setting.gathers + row);
                engine.set_row(row, piece_at(tag, 1))
            })
            .collect();
        let more = pass + 1 < setting.passes;
        witness.begin(&gather, plan.steps.len());
        engine.handle(Event::Begin {
            gather: &gather,
            next: more.then_some(setting.gathers),
        });
        let mut burst = false;
        let ended = loop {
            let ended = if burst {
                None
            } else {
                act(engine, &mut witness)
            };
            if let Some(ended) = ended {
                break ended;
            }
            events += 1;
            assert!(events < 400, "no progress");
            let flying: Vec<_> = witness.flying().collect();
            let work = witness.running_work();
            let reads = flying.len() as u32;
            let fails = if faults > 0 { reads } else { 0 };
            let (ends, can_stop) = (u32::from(work.is_some()), u32::from(stops));
            let choice = if burst && reads + ends == 0 {
                burst = false;
                continue;
            } else {
                choices.choose(reads + ends + fails + can_stop)
            };
            if choice < reads {
                let read = flying[choice as usize].read;
                witness.read_ended(read, true);
                engine.handle(Event::ReadEnded {
                    read,
                    outcome: ReadOutcome::Filled,
                });
            } else if choice < reads + ends {
                let work = work.unwrap();
                let homes: Vec<SlotId> = engine.homes(work).to_vec();
                witness.work_ended(&homes, |piece| offset(engine, piece));
                engine.handle(Event::Compute(ComputeEvent::Ended(work)));
            } else if choice < reads + ends + fails {
                faults -= 1;
                let read = flying[(choice - reads - ends) as usize].read;
                witness.read_ended(read, false);
                engine.handle(Event::ReadEnded {
                    read,
                    outcome: ReadOutcome::Corrupt,
                });
            } else {
                stops = false;
                engine.stop();
            }
            burst = setting.bursts && !burst && choices.choose(2) == 1;
        };
        assert!(engine.idle());
        match ended {
            Action::Finish => {
                witness.finished();
                tally.finished += 1;
            }
            Action::Halt(fault) => {
                witness.halted();
                match fault {
                    Fault::Unit { .. } => unreachable!("a dense plan has no units"),
                    Fault::Stopped => tally.stopped += 1,
                    Fault::Unreadable { .. } => tally.unreadable += 1,
                }
            }
            other => unreachable!("{other:?} is no end"),
        }
    }
    if setting.faults == 0 {
        assert_eq!(
            engine.counters().rereads,
            0,
            "nothing is read twice for a pass"
        );
    }
}

/// Does what the engine asks until it asks for nothing more; how the pass ended, if it did.
fn act<P: Policy>(engine: &mut Engine<'_, P>, witness: &mut Witness) -> Option<Action> {
    loop {
        match engine.poll()? {
            Action::Read(command) => witness.read_started(command),
            Action::Compute(work) => {
                let homes = engine.homes(work).to_vec();
                witness.submitted(work, &homes, |piece| offset(engine, piece));
            }
            end => return Some(end),
        }
    }
}

fn offset<P: Policy>(engine: &Engine<'_, P>, piece: PieceId) -> u64 {
    engine.piece(piece).extent.offset
}

fn cyclic(setting: &Setting) -> impl Fn(&Plan) -> Cyclic {
    let (slots, reads_max) = (setting.slots as u32, setting.reads as u16);
    move |plan| {
        let Plan {
            planned,
            loose,
            rows,
            ..
        } = *plan;
        // The least ring that leaves something to keep.
        Cyclic::with_ring(
            Shape {
                planned,
                loose,
                rows,
                slots,
                reads_max,
            },
            2,
        )
    }
}

const PLAIN: Setting = Setting {
    counts: &[0, 2, 0, 3],
    loose: 0,
    gathers: 1,
    slots: 3,
    reads: 2,
    passes: 2,
    faults: 0,
    stops: false,
    bursts: false,
};

/// How many orders there were.
fn all_finish(setting: Setting) -> u64 {
    let mut runs = 0;
    for tally in [
        explore(setting, cyclic(&setting)),
        explore(setting, |_| Lru),
    ] {
        assert_eq!(tally.finished, tally.runs * u64::from(setting.passes));
        runs += tally.runs;
    }
    runs
}

#[test]
fn every_order_finishes() {
    let mut runs = 0;
    for slots in 1..=2 {
        for reads in 1..=2 {
            runs += all_finish(Setting {
                slots,
                reads,
                ..PLAIN
            });
        }
    }
    // With more slots fewer pieces will do: the orders grow as a factorial.
    for slots in 3..=4 {
        runs += all_finish(Setting {
            slots,
            counts: &[0, 1, 2],
            ..PLAIN
        });
        runs += all_finish(Setting {
            slots,
            reads: 3,
            passes: 1,
            ..PLAIN
        });
    }
    println!("{runs} orders tried");
    assert!(cfg!(miri) || runs > 50_000, "{runs} orders to try");
}

#[test]
fn every_order_of_gathering_finishes() {
    let mut runs = 0;
    for slots in 1..=4 {
        let setting = Setting {
            counts: &[0, 3],
            gathers: 4,
            slots,
            passes: 1,
            ..PLAIN
        };
        runs += all_finish(setting);
        runs += all_finish(Setting {
            reads: 3,
            gathers: 3,
            ..setting
        });
        runs += all_finish(Setting {
            gathers: 2,
            passes: 2,
            loose: 1,
            counts: &[0, 2],
            ..setting
        });
    }
    println!("{runs} orders tried");
    assert!(cfg!(miri) || runs > 50_000, "{runs} orders to try");
}

#[test]
fn every_order_in_bursts_finishes() {
    for slots in 2..=4 {
        let runs = all_finish(Setting {
            counts: &[0, 2, 2],
            slots,
            passes: 1,
            bursts: true,
            ..PLAIN
        });
        println!("{runs} orders tried");
    }
}

#[test]
fn every_order_with_faults_ends() {
    for slots in 1..=3 {
        let setting = Setting {
            counts: &[0, 2, 1],
            slots,
            passes: 1,
            faults: 3,
            ..PLAIN
        };
        let tally = explore(setting, cyclic(&setting));
        assert_eq!(tally.finished + tally.unreadable, tally.runs);
        assert!(
            cfg!(miri) || tally.finished > 0 && tally.unreadable > 0,
            "both happen: {tally:?}"
        );
    }
}

#[test]
fn every_moment_to_stop_drains() {
    for slots in 1..=3 {
        let setting = Setting {
            counts: &[0, 2, 1],
            slots,
            faults: 1,
            stops: true,
            ..PLAIN
        };
        let tally = explore(setting, cyclic(&setting));
        assert_eq!(tally.finished + tally.stopped, tally.runs * 2);
        assert!(cfg!(miri) || tally.stopped > 0, "some are stopped");
    }
}
