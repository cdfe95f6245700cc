//! What the engine itself costs: nanoseconds per piece with a storage and a compute backend that take
//! no time. Run alone on an idle machine: `cargo bench -p leanstream-core --bench engine`.

#[path = "../tests/common/mod.rs"]
mod common;

use common::{Memory, Plan, piece_at};
use leanstream_core::port::{ComputeEvent, ReadOutcome, Work};
use leanstream_core::stream::policy::cyclic::Shape;
use leanstream_core::stream::{Action, Cyclic, Event, Lru, Policy};
use leanstream_core::units::ReadId;
use std::collections::VecDeque;
use std::time::Instant;

const READS_MAX: usize = 32;
const PASSES: u32 = 200;

fn ns_per_piece<P: Policy>(policy: P, plan: &Plan, slots: usize) -> (f64, u64, u64) {
    let mut memory = Memory::new(plan, slots, READS_MAX);
    let mut engine = memory.engine(policy);
    let mut reads: VecDeque<ReadId> = VecDeque::with_capacity(READS_MAX);
    let mut works: VecDeque<Work> = VecDeque::with_capacity(2);
    let mut start = Instant::now();
    let (mut actions, mut before) = (0, 0);
    for pass in 0..PASSES + 3 {
        if pass == 3 {
            start = Instant::now();
            before = engine.counters().reads;
            actions = 0;
        }
        let row = engine.set_row(0, piece_at(1 << 20, 1));
        engine.handle(Event::Begin {
            gather: &[row],
            next: Some(1),
        });
        loop {
            match engine.poll() {
                Some(Action::Read(command)) => reads.push_back(command.read),
                Some(Action::Compute(work)) => works.push_back(work),
                Some(Action::Finish) => break,
                Some(Action::Halt(fault)) => panic!("{fault:?}"),
                None => {
                    if let Some(read) = reads.pop_front() {
                        let outcome = ReadOutcome::Filled;
                        engine.handle(Event::ReadEnded { read, outcome });
                    } else {
                        let work = works.pop_front().expect("something is in flight");
                        engine.handle(Event::Compute(ComputeEvent::Ended(work)));
                    }
                    continue;
                }
            }
            actions += 1;
        }
    }
    let ns = start.elapsed().as_nanos() as f64;
    let pieces = f64::from(PASSES) * f64::from(plan.planned);
    let reads = (engine.counters().reads - before) / u64::from(PASSES);
    (ns / pieces, reads, actions / u64::from(PASSES))
}

fn main() {
    // A 3B model in 256 KiB pieces: 28 layers of 10 steps.
    let mut counts = vec![0];
    for _ in 0..28 {
        counts.extend([0, 22, 8, 8, 0, 22, 0, 56, 56, 56]);
    }
    counts.extend([0, 900]);
    let plan = Plan::new(&counts, 0, 1);
    println!("{} pieces, {} steps", plan.planned, plan.steps.len());
    println!("% slots  policy  ns/piece  reads/pass  actions/pass");
    for percent in [2, 25, 50, 90, 101] {
        let slots = plan.planned * percent / 100;
        let (planned, rows, reads_max) = (plan.planned, 1, READS_MAX as u16);
        let cyclic = Cyclic::new(Shape {
            planned,
            loose: 0,
            rows,
            slots,
            reads_max,
        });
        let (ns, reads, actions) = ns_per_piece(cyclic, &plan, slots as usize);
        println!("{percent:7}  cyclic  {ns:8.1}  {reads:10}  {actions:12}");
        let (ns, reads, actions) = ns_per_piece(Lru, &plan, slots as usize);
        println!("{percent:7}  lru     {ns:8.1}  {reads:10}  {actions:12}");
    }
}
