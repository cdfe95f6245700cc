//! What a budget costs: pieces read in each pass, by policy, as a committed table. A change of the
//! engine or of a ranking shows here as a diff.

mod common;
#[path = "common/tables.rs"]
mod tables;
#[path = "budget/units.rs"]
mod units;

use common::{Memory, Plan, piece_at};
use leanstream_core::port::{ComputeEvent, ReadOutcome, Work};
use leanstream_core::stream::policy::cyclic::Shape;
use leanstream_core::stream::{Action, Cyclic, Event, Lru, Policy};
use leanstream_core::units::{PieceId, ReadId};
use std::collections::VecDeque;
use std::fmt::Write;

/// A Llama-like model whose output matrix is its embedding, cut into pieces of at most `slot` bytes.
struct Model {
    name: &'static str,
    layers: u32,
    width: u64,
    kv_width: u64,
    hidden: u64,
    vocabulary: u64,
    /// Bytes of a row's block of 32 weights, times 8.
    block_bytes_x8: u64,
    slot: u64,
}

const MODELS: [Model; 2] = [
    Model {
        name: "SmolLM2-135M-like, Q8_0, 128 KiB slots",
        layers: 30,
        width: 576,
        kv_width: 192,
        hidden: 1536,
        vocabulary: 49152,
        block_bytes_x8: 34 * 8,
        slot: 128 << 10,
    },
    Model {
        name: "3B-like, Q4_K, 256 KiB slots",
        layers: 28,
        width: 3072,
        kv_width: 1024,
        hidden: 8192,
        vocabulary: 128_256,
        block_bytes_x8: 18 * 8,
        slot: 256 << 10,
    },
];

impl Model {
    fn plan(&self) -> Plan {
        let matrix = |rows: u64, cols: u64| {
            let row = cols / 32 * self.block_bytes_x8 / 8;
            // A piece is widened to the alignment at both ends.
            let rows_a_piece = (self.slot - 8192) / row;
            rows.div_ceil(rows_a_piece) as u32
        };
        let (d, kv, f) = (self.width, self.kv_width, self.hidden);
        // Gather, then in each layer: norm; q, k, v; attention; output; norm; gate, up; down.
        let mut counts = vec![0];
        for _ in 0..self.layers {
            counts.extend([
                0,
                matrix(d, d),
                matrix(kv, d),
                matrix(kv, d),
                0,
                matrix(d, d),
            ]);
            counts.extend([0, matrix(f, d), matrix(f, d), matrix(d, f)]);
        }
        counts.extend([0, matrix(self.vocabulary, d)]);
        Plan::new(&counts, 0, 1)
    }
}

/// Which of the two sides is always the faster one.
#[derive(Clone, Copy)]
enum Fast {
    Storage,
    Compute,
}

/// Reads of planned pieces per pass in the steady state, and reads of any piece that had been read
/// for the same pass before.
fn reads_per_pass<P: Policy>(policy: P, plan: &Plan, slots: usize, fast: Fast) -> (u64, u64) {
    const WARM: u32 = 3;
    const PASSES: u32 = 2;
    let mut memory = Memory::new(plan, slots, READS_MAX);
    let mut engine = memory.engine(policy);
    let mut reads: VecDeque<ReadId> = VecDeque::new();
    let mut works: VecDeque<Work> = VecDeque::new();
    let mut before = 0;
    for pass in 0..WARM + PASSES {
        if pass == WARM {
            before = engine.counters().reads;
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
                    let read = match fast {
                        Fast::Storage => !reads.is_empty(),
                        Fast::Compute => works.is_empty(),
                    };
                    if read {
                        let read = reads.pop_front().expect("something is in flight");
                        let outcome = ReadOutcome::Filled;
                        engine.handle(Event::ReadEnded { read, outcome });
                    } else {
                        let work = works.pop_front().expect("something is in flight");
                        engine.handle(Event::Compute(ComputeEvent::Ended(work)));
                    }
                }
            }
        }
    }
    let counters = engine.counters();
    let rows = u64::from(PASSES);
    let reads = counters.reads - before - rows;
    assert_eq!(reads % u64::from(PASSES), 0, "the state is steady");
    (reads / u64::from(PASSES), counters.rereads)
}

/// What `READS_MAX` and `PERCENT` are in the table.
const READS_MAX: usize = 32;
const PERCENT: [u64; 10] = [1, 10, 25, 50, 75, 90, 95, 98, 99, 100];

fn table() -> String {
    let mut table = String::new();
    for model in &MODELS {
        let plan = model.plan();
        let planned = plan.planned;
        writeln!(table, "{}: {planned} pieces, {READS_MAX} reads", model.name).unwrap();
        writeln!(
            table,
            "    % slots  ring | lru  cyclic  N-(S-R)   N-S | longest gap"
        )
        .unwrap();
        // In percent of all pieces, and at last with room for the row.
        let budgets = PERCENT
            .iter()
            .map(|percent| u64::from(planned) * percent / 100);
        for slots in budgets.chain([u64::from(planned) + 1]) {
            let (loose, rows) = (0, 1);
            let (slots, reads_max) = (slots as u32, READS_MAX as u16);
            let cyclic = Cyclic::new(Shape {
                planned,
                loose,
                rows,
                slots,
                reads_max,
            });
            let slots = slots as usize;
            let (lru_reads, _) = reads_per_pass(Lru, &plan, slots, Fast::Storage);
            let (reads, rereads) = reads_per_pass(cyclic, &plan, slots, Fast::Storage);
            assert_eq!(rereads, 0, "a pass reads nothing twice");
            let slow = reads_per_pass(cyclic, &plan, slots, Fast::Compute);
            assert_eq!((reads, 0), slow, "reads don't depend on who is faster");
            let missing = planned - cyclic.kept();
            let gap = longest_gap(&cyclic, planned);
            if cyclic.kept() > 0 {
                assert!(
                    gap <= missing.div_ceil(cyclic.kept()),
                    "the kept are spread evenly"
                );
            }
            if slots != planned as usize {
                assert_eq!(reads, u64::from(missing), "each missing piece is read once");
            }
            let percent = (slots as u64 * 100).div_ceil(u64::from(planned));
            let ring = cyclic.ring();
            let floor = u64::from(planned).saturating_sub(slots as u64);
            writeln!(
                table,
                "{percent:5} {slots:5} {ring:5} | {lru_reads:4}  {reads:5}    {missing:5} {floor:5} | {gap}"
            )
            .unwrap();
        }
    }
    table
}

/// The most consecutive pieces, around the cycle, that are not kept.
fn longest_gap(cyclic: &Cyclic, planned: u32) -> u32 {
    let (mut gap, mut longest) = (0, 0);
    for piece in 0..2 * planned {
        gap = if cyclic.keeps(PieceId(piece % planned)) {
            0
        } else {
            gap + 1
        };
        longest = longest.max(gap);
    }
    longest.min(planned)
}

#[test]
fn reads_by_budget_and_policy_are_as_committed() {
    let (now, committed) = (table(), include_str!("golden/budget.txt"));
    assert!(
        now == committed,
        "core/tests/golden/budget.txt no longer says what the engine does; review and commit:\n{now}"
    );
}

#[test]
fn absent_units_by_budget_and_policy_are_as_committed() {
    let (now, committed) = (units::table(), include_str!("golden/budget_units.txt"));
    assert!(
        now == committed,
        "core/tests/golden/budget_units.txt no longer says what the policies do; review and commit:\n{now}"
    );
}
