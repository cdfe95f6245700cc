//! Passes that run only the first steps of a plan: the batches of a prompt before its last.

use leanstream_core::port::{
    Compute, ComputeEvent, Geometry, ReadCommand, ReadOutcome, Storage, Work,
};
use leanstream_core::stream::policy::cyclic::{Cyclic, Shape};
use leanstream_core::stream::{Engine, Event, Mark, Read, Slot, Step, Tables, drive};
use leanstream_core::units::{Extent, FileId, Piece, PieceId, ReadId, SlotId};

/// Answers in the order of asking, and notes which pieces were read.
#[derive(Default)]
struct Flash {
    queue: Vec<ReadId>,
    pieces: Vec<u32>,
}

impl Storage for Flash {
    fn geometry(&self) -> Geometry {
        Geometry {
            align: 512,
            reads_max: 2,
        }
    }
    fn start(&mut self, command: ReadCommand) {
        self.queue.push(command.read);
        self.pieces.push(command.piece.0);
    }
    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        (!self.queue.is_empty()).then(|| (self.queue.remove(0), ReadOutcome::Filled))
    }
    fn wait(&mut self, _: u32) {}
}

/// Ends work when polled, and notes which steps ran.
#[derive(Default)]
struct Cpu {
    queue: Vec<Work>,
    steps: Vec<u32>,
}

impl Compute for Cpu {
    fn submit(&mut self, work: Work, _: &[SlotId]) -> Result<(), Work> {
        self.queue.push(work);
        if work.closes {
            self.steps.push(work.step.0);
        }
        Ok(())
    }
    fn poll(&mut self) -> Option<ComputeEvent> {
        (!self.queue.is_empty()).then(|| ComputeEvent::Ended(self.queue.remove(0)))
    }
    fn busy(&self) -> bool {
        !self.queue.is_empty()
    }
}

#[test]
fn a_limited_pass_neither_runs_nor_reads_the_rest() {
    let extent = |n: u64| Extent {
        file: FileId(0),
        offset: n * 512,
        len: 512,
    };
    let mut pieces: Vec<Piece> = (0..30)
        .map(|n| Piece {
            extent: extent(n),
            skew: 0,
            bytes: 512,
        })
        .collect();
    let counts = [10, 0, 8, 12];
    let mut first = 0;
    let steps = counts.map(|count| {
        first += count;
        Step {
            first: PieceId(first - count),
            count,
        }
    });
    let mut homes = vec![SlotId::NONE; 30];
    let mut marks = vec![Mark::default(); 30];
    let mut slots = vec![Slot::default(); 9];
    let mut reads = vec![Read::default(); 2];
    let shape = Shape {
        planned: 30,
        loose: 0,
        rows: 0,
        slots: 9,
        reads_max: 2,
    };
    let mut engine = Engine::new(
        Tables {
            pieces: &mut pieces,
            steps: &steps,
            rows: 0,
            homes: &mut homes,
            marks: &mut marks,
            slots: &mut slots,
            reads: &mut reads,
            gather: &mut [],
        },
        Cyclic::new(shape),
    );
    let (mut flash, mut cpu) = (Flash::default(), Cpu::default());
    for (limit, next) in [
        (3, Some(0)),
        (3, Some(0)),
        (4, Some(0)),
        (3, Some(0)),
        (4, None),
    ] {
        let read_before = flash.pieces.len();
        cpu.steps.clear();
        engine.set_steps(limit);
        engine.handle(Event::Begin { gather: &[], next });
        drive::pass(&mut engine, &mut flash, &mut cpu, &mut ()).expect("nothing fails");
        assert_eq!(cpu.steps, (0..limit).collect::<Vec<_>>());
        let read = &flash.pieces[read_before..];
        let of_the_rest = read.iter().filter(|piece| **piece >= 18).count();
        assert_eq!(of_the_rest > 0, limit == 4, "limit {limit}: read {read:?}");
    }
    assert_eq!(engine.counters().passes, 5);
    assert_eq!(engine.counters().rereads, 0);
}
