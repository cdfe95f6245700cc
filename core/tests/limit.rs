//! Passes that run only the first steps of a plan: the batches of a prompt before its last.

mod common;

use common::{Memory, Plan};
use leanstream_core::port::{
    Compute, ComputeEvent, Geometry, ReadCommand, ReadOutcome, Storage, Work,
};
use leanstream_core::stream::policy::cyclic::{Cyclic, Shape};
use leanstream_core::stream::{Event, drive};
use leanstream_core::units::{ReadId, SlotId};

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

const STEPS: [u32; 4] = [10, 0, 8, 12];
/// Pieces before the last step.
const BODY: u32 = 18;

fn cyclic(plan: &Plan, slots: u32) -> Cyclic {
    let Plan {
        planned,
        loose,
        rows,
        ..
    } = *plan;
    Cyclic::new(Shape {
        planned,
        loose,
        rows,
        slots,
        reads_max: 2,
    })
}

#[test]
fn a_limited_pass_neither_runs_nor_reads_the_rest() {
    let plan = Plan::new(&STEPS, 0, 0);
    let mut memory = Memory::new(&plan, 9, 2);
    let mut engine = memory.engine(cyclic(&plan, 9));
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
        let of_the_rest = read.iter().filter(|piece| **piece >= BODY).count();
        assert_eq!(of_the_rest > 0, limit == 4, "limit {limit}: read {read:?}");
    }
    assert_eq!(engine.counters().passes, 5);
    assert_eq!(engine.counters().rereads, 0);
}

/// Between passes read-ahead goes by the pieces that the last pass left out. If the next one uses them,
/// they have to be read ahead all the same, not only when their step opens.
#[test]
fn what_was_left_out_is_read_ahead_when_it_is_used_again() {
    let plan = Plan::new(&STEPS, 0, 0);
    let mut memory = Memory::new(&plan, 30, 2);
    let mut engine = memory.engine(cyclic(&plan, 30));
    let (mut flash, mut cpu) = (Flash::default(), Cpu::default());
    engine.set_steps(3);
    engine.handle(Event::Begin {
        gather: &[],
        next: Some(0),
    });
    drive::pass(&mut engine, &mut flash, &mut cpu, &mut ()).expect("nothing fails");
    drive::pump(&mut engine, &mut flash);
    assert_eq!(flash.pieces.len(), BODY as usize);
    let before = engine.counters().hits;
    engine.set_steps(4);
    engine.handle(Event::Begin {
        gather: &[],
        next: None,
    });
    drive::pass(&mut engine, &mut flash, &mut cpu, &mut ()).expect("nothing fails");
    assert!(
        engine.counters().hits - before > u64::from(BODY),
        "some came in time"
    );
}
