//! An interpreter of bytes as a plan, a memory and a sequence of events, in any order that the engine's
//! contract allows: for the fuzzer, and for a test that feeds it chance.

use super::{Memory, Plan, Prng, Witness, piece_at};
use leanstream_core::port::{ComputeEvent, ReadOutcome};
use leanstream_core::stream::policy::cyclic::Shape;
use leanstream_core::stream::{Action, Cyclic, Engine, Event, Lru, Policy, Worth};
use leanstream_core::units::{PieceId, SlotId};

/// The bytes that are left; zeros behind them.
struct Bytes<'d>(&'d [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u32 {
        match self.0.split_first() {
            None => 0,
            Some((&first, rest)) => {
                self.0 = rest;
                u32::from(first)
            }
        }
    }

    /// `0..n`
    fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }
}

/// Ranks by chance but always the same: what the engine promises may not depend on a sane policy.
#[derive(Clone, Copy)]
pub struct Arbitrary {
    pub seed: u64,
    pub loose: u32,
}

impl Policy for Arbitrary {
    fn used(&self, piece: PieceId) -> Worth {
        Worth((Prng::new(self.seed ^ u64::from(piece.0)).next() >> 20) as u8)
    }

    fn loose(&self) -> u32 {
        self.loose
    }
}

/// Runs `data`; panics if the engine does what it must not.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes(data);
    let gathers = bytes.below(3) > 0;
    let mut counts = vec![];
    if gathers {
        counts.push(0);
    }
    for _ in 0..1 + bytes.below(6) {
        counts.push(bytes.below(7));
    }
    let (loose, rows) = if gathers {
        (bytes.below(4), 1 + bytes.below(5))
    } else {
        (0, 0)
    };
    let plan = Plan::new(&counts, loose, rows);
    let slots = 1 + bytes.below(plan.pieces.len() as u32 + 2);
    let reads = 1 + bytes.below(6);
    let mut memory = Memory::new(&plan, slots as usize, reads as usize);
    match bytes.below(3) {
        0 => drive(memory.engine(Lru), &plan, slots, reads, bytes),
        1 => {
            let seed = u64::from(bytes.next());
            drive(
                memory.engine(Arbitrary { seed, loose }),
                &plan,
                slots,
                reads,
                bytes,
            );
        }
        _ => {
            let (planned, reads_max) = (plan.planned, reads as u16);
            let shape = Shape {
                planned,
                loose,
                rows,
                slots,
                reads_max,
            };
            let cyclic = Cyclic::with_ring(shape, 1 + bytes.below(slots));
            drive(memory.engine(cyclic), &plan, slots, reads, bytes);
        }
    }
}

fn drive<P: Policy>(mut engine: Engine<P>, plan: &Plan, slots: u32, reads: u32, mut bytes: Bytes) {
    let engine = &mut engine;
    let mut witness = Witness::new(plan, slots as usize, reads as usize);
    let mut tag = 1 << 20;
    while !bytes.0.is_empty() {
        let op = bytes.next();
        match op % 8 {
            0 if engine.idle() => begin(engine, plan, &mut witness, &mut bytes, &mut tag),
            // The loop need not take all actions before it tells the next event.
            0..=2 => {
                poll(engine, &mut witness);
            }
            3 => while poll(engine, &mut witness) {},
            4..=5 => end_read(engine, &mut witness, op / 8, true),
            6 => match op / 8 {
                0 => engine.stop(),
                n => end_read(engine, &mut witness, n, n % 2 == 1),
            },
            _ => end_work(engine, &mut witness),
        }
        witness.agrees(|piece| engine.slot_of(piece), |piece| offset(engine, piece));
    }
    // Whatever was going on, it can be brought to an end and the memory given back.
    engine.stop();
    for _ in 0..1000 {
        while poll(engine, &mut witness) {}
        if engine.idle() && engine.reads_flying() == 0 {
            break;
        }
        end_work(engine, &mut witness);
        end_read(engine, &mut witness, 0, true);
    }
    witness.halted();
    assert!(engine.idle() && engine.reads_flying() == 0, "it drains");
}

fn begin<P: Policy>(
    engine: &mut Engine<P>,
    plan: &Plan,
    witness: &mut Witness,
    bytes: &mut Bytes,
    tag: &mut u64,
) {
    let mut gather = vec![];
    let mut row = 0;
    for _ in 0..bytes.below(plan.rows + 1) {
        let any = PieceId(bytes.below(plan.first_row().max(1)));
        let resident = any.0 < plan.first_row() && engine.slot_of(any).is_some();
        if resident && !gather.contains(&any) {
            gather.push(any);
        } else {
            *tag += 1;
            gather.push(engine.set_row(row, piece_at(*tag, 1)));
            row += 1;
        }
    }
    let next = bytes.below(plan.rows + 2).checked_sub(1);
    let limit = plan.steps.len() as u32 - bytes.below(2).min(plan.steps.len() as u32 - 1);
    witness.begin(&gather, limit as usize);
    engine.set_steps(limit);
    engine.handle(Event::Begin {
        gather: &gather,
        next,
    });
}

/// Whether there was anything to do.
fn poll<P: Policy>(engine: &mut Engine<P>, witness: &mut Witness) -> bool {
    match engine.poll() {
        None => return false,
        Some(Action::Read(command)) => witness.read_started(command),
        Some(Action::Compute(work)) => {
            let homes: Vec<SlotId> = engine.homes(work).to_vec();
            witness.submitted(work, &homes, |piece| offset(engine, piece));
        }
        Some(Action::Finish) => witness.finished(),
        Some(Action::Halt(_)) => witness.halted(),
    }
    true
}

fn end_read<P: Policy>(engine: &mut Engine<P>, witness: &mut Witness, which: u32, filled: bool) {
    let flying: Vec<_> = witness.flying().collect();
    if flying.is_empty() {
        return;
    }
    let read = flying[which as usize % flying.len()].read;
    witness.read_ended(read, filled);
    let outcome = if filled {
        ReadOutcome::Filled
    } else {
        ReadOutcome::Failed
    };
    engine.handle(Event::ReadEnded { read, outcome });
}

fn end_work<P: Policy>(engine: &mut Engine<P>, witness: &mut Witness) {
    let Some(work) = witness.running_work() else {
        return;
    };
    let homes: Vec<SlotId> = engine.homes(work).to_vec();
    witness.work_ended(&homes, |piece| offset(engine, piece));
    engine.handle(Event::Compute(ComputeEvent::Ended(work)));
}

fn offset<P: Policy>(engine: &Engine<P>, piece: PieceId) -> u64 {
    engine.piece(piece).extent.offset
}
