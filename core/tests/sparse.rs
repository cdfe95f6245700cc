//! The store of sparse layers under a simulated storage: every seed is another machine, and a
//! second account of slots, units and reads checks each decision.

use leanstream_core::port::ReadOutcome;
use leanstream_core::sparse::retain::{Cause, Retain, Rules, Seen};
use leanstream_core::sparse::store::slots_least;
use leanstream_core::sparse::tables::{Bank, Foreseen, Prior, Sizes};
use leanstream_core::sparse::{Choice, Chosen, Counters, Grouping, Reach, Select, Store};
use leanstream_core::stream::{Lost, Worth};
use leanstream_core::units::{Extent, FileId, ReadId};

use tables::Owned;

#[path = "common/tables.rs"]
mod tables;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() % u64::from(n)) as u32
    }
}

/// Keeps by frequency; foreseen units are worth their score.
struct Frequency {
    slack: u8,
}

impl Retain for Frequency {
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth {
        match cause {
            Cause::Foreseen => Worth((seen.score * 200.0) as u8),
            _ => Worth((seen.frequency_log2.exp2() * 250.0) as u8 + 1),
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            reranks: true,
            slack: self.slack,
            speculates: true,
            ..Rules::default()
        }
    }
}

struct Machine {
    seed: u64,
    banks: u32,
    units: u32,
    slots: u32,
    reads: usize,
    align: u32,
    gap: u32,
    /// One read in so many fails, or brings a damaged unit; 0: none.
    fault_every: u32,
    sequence: bool,
    speculates: bool,
    layers: u32,
    slack: u8,
}

/// Runs it; returns the counters and a hash of what was computed, in the order of groups.
fn run(machine: &Machine) -> (Counters, u64) {
    let mut random = Random(machine.seed);
    // What is chosen must not depend on the machine, only on the seed.
    let mut choices = Random(machine.seed ^ 0xabcd);
    let unit_bytes = 40 + random.below(3) * 500;
    let banks: Vec<Bank> = (0..machine.banks)
        .map(|bank| Bank {
            file: FileId(0),
            offset: 4096 + u64::from(bank) * u64::from(machine.units * unit_bytes + 777),
            unit_bytes,
            first: bank * machine.units,
            count: machine.units,
        })
        .collect();
    let window = 16 << 10;
    let priors = vec![Prior::new(0.2); (machine.banks * machine.units) as usize];
    let sizes = Sizes::of(&banks, machine.slots, machine.reads);
    let mut tables = Owned::new(banks.clone(), priors, sizes, machine.units);
    let mut store = Store::new(
        tables.lend(),
        Frequency {
            slack: machine.slack,
        },
        Reach {
            align: machine.align,
            window_max: window,
            gap_max: machine.gap,
            ahead_max: 3,
        },
    );
    // The witness: which unit's bytes each slot holds, and which reads are in flight.
    let mut held: Vec<Option<(u32, u32)>> = vec![None; machine.slots as usize];
    let mut flying: Vec<(ReadId, u64, u32)> = Vec::new();
    let mut computed = 0u64;
    let mut faults = 0;
    for layer in 0..machine.layers {
        let bank = layer % machine.banks;
        if bank == 0 {
            store.begin(1);
        }
        let mut chosen = Vec::new();
        for index in 0..machine.units {
            let hot = index < machine.units / 4;
            let draw = choices.below(100);
            if draw < if hot { 60 } else { 10 } {
                chosen.push(Chosen {
                    index,
                    importance: choices.below(1000) as f32,
                    share: 1.0,
                });
            }
        }
        store.choose(Choice {
            bank,
            chosen: &chosen,
            scores: None,
            grouping: if machine.sequence {
                Grouping::Sequence
            } else {
                Grouping::Importance
            },
            select: Select::All,
        });
        let hits = chosen
            .iter()
            .filter(|c| store.resident(bank, c.index))
            .count();
        let mut done = vec![Vec::new(); store.group_count() as usize];
        let mut running: Vec<u32> = Vec::new();
        let mut turns = 0;
        let mut stage = false;
        while !store.settled() {
            turns += 1;
            assert!(turns < 100_000, "no progress, seed {}", machine.seed);
            assert_eq!(store.fault(), None, "faults are seldom enough");
            while let Some(request) = store.poll_read() {
                assert!(
                    request.extent.len <= window,
                    "the window fits its staging slot"
                );
                assert_eq!(request.extent.offset % u64::from(machine.align), 0);
                assert_eq!(request.extent.len % machine.align, 0);
                assert!(
                    flying.iter().all(|f| f.0 != request.read),
                    "a read is one at a time"
                );
                flying.push((request.read, request.extent.offset, request.extent.len));
                assert!(flying.len() <= machine.reads);
            }
            while let Some(group) = store.poll_group() {
                for item in store.items(group) {
                    assert_eq!(
                        held[item.slot.0 as usize],
                        Some((bank, item.index)),
                        "a group's units are in their slots"
                    );
                }
                done[group as usize] = store.items(group).iter().map(|i| i.index).collect();
                running.push(group);
            }
            // Something happens: a group ends, a read ends, a stage foresees.
            if machine.speculates && !stage && random.below(4) == 0 {
                stage = true;
                let next = (bank + 1) % machine.banks;
                store.foresee(
                    next,
                    (0..machine.units / 3).map(|index| Foreseen { index, score: 0.9 }),
                );
            } else if !running.is_empty() && (flying.is_empty() || random.below(2) == 0) {
                let group = running.swap_remove(random.below(running.len() as u32) as usize);
                for item in store.items(group) {
                    assert_eq!(
                        held[item.slot.0 as usize],
                        Some((bank, item.index)),
                        "and stay there until it has ended"
                    );
                }
                store.group_ended(group);
            } else if !flying.is_empty() {
                let (read, offset, len) =
                    flying.swap_remove(random.below(flying.len() as u32) as usize);
                let fails = machine.fault_every > 0 && random.below(machine.fault_every) == 0;
                let damaged = machine.fault_every > 0 && random.below(machine.fault_every) == 0;
                let outcome = if fails {
                    ReadOutcome::Failed
                } else {
                    ReadOutcome::Filled
                };
                faults += u32::from(fails || damaged);
                store.read_ended(read, outcome, |delivery| {
                    assert!(!fails, "nothing is delivered from a failed read");
                    let at = banks[delivery.bank as usize].offset
                        + u64::from(delivery.index * unit_bytes);
                    assert_eq!(offset + u64::from(delivery.skew), at, "bytes of the unit");
                    assert!(delivery.skew + delivery.bytes <= len, "within the window");
                    let mut computed = done.iter().flatten();
                    let again = delivery.bank == bank && computed.any(|i| *i == delivery.index);
                    // The next layer is another one, unless there is but one.
                    assert!(
                        !again || machine.banks == 1,
                        "what is computed isn't read again"
                    );
                    held[delivery.slot.0 as usize] =
                        (!damaged).then_some((delivery.bank, delivery.index));
                    !damaged
                });
            }
        }
        assert!(running.is_empty());
        store.finish();
        let mut all: Vec<u32> = done.iter().flatten().copied().collect();
        for index in &all {
            computed = (computed ^ u64::from(*index)).wrapping_mul(0x100_0000_01b3);
        }
        all.sort_unstable();
        assert_eq!(
            all,
            chosen.iter().map(|c| c.index).collect::<Vec<_>>(),
            "each chosen unit is computed once"
        );
        assert!(hits <= chosen.len());
    }
    let counters = store.counters();
    if machine.fault_every > 0 {
        assert_eq!(counters.failed + counters.corrupt > 0, faults > 0);
    }
    (counters, computed)
}

fn machine(seed: u64) -> Machine {
    let mut random = Random(seed);
    let units = [8, 64, 300, 700][random.below(4) as usize];
    let banks = 1 + random.below(5);
    let least = slots_least(units);
    Machine {
        seed,
        banks,
        units,
        slots: least + random.below(banks * units),
        reads: 1 + random.below(20) as usize,
        align: [512, 4096][random.below(2) as usize],
        gap: [0, 100, 4096][random.below(3) as usize],
        fault_every: 0,
        sequence: random.below(4) == 0,
        speculates: random.below(2) == 0,
        layers: 40,
        slack: [0, 1, 40][random.below(3) as usize],
    }
}

#[test]
fn every_machine_computes_what_was_chosen() {
    for seed in 0..400 {
        run(&machine(seed));
    }
}

#[test]
fn faults_change_no_result() {
    for seed in 0..150 {
        let calm = machine(seed);
        let storm = Machine {
            fault_every: 300,
            ..machine(seed)
        };
        assert_eq!(run(&calm).1, run(&storm).1, "seed {seed}");
    }
}

/// A failing device used to be told as a damaged file: what the last try met is what is told.
#[test]
fn a_fault_says_how_the_last_read_ended() {
    #[derive(Clone, Copy)]
    enum Try {
        Unread,
        Corrupt,
        BadChecksum,
    }
    use Try::{BadChecksum, Corrupt, Unread};
    for tries in [
        [Unread, Unread, Unread],
        [BadChecksum, Corrupt, Unread],
        [Unread, Unread, BadChecksum],
        [Unread, Unread, Corrupt],
        [BadChecksum, BadChecksum, BadChecksum],
    ] {
        let banks = [Bank {
            file: FileId(3),
            offset: 8192,
            unit_bytes: 100,
            first: 0,
            count: 200,
        }];
        let sizes = Sizes::of(&banks, slots_least(200), 2);
        let mut tables = Owned::new(banks.to_vec(), vec![Prior::new(0.2); 200], sizes, 8);
        let reach = Reach {
            align: 512,
            window_max: 4096,
            gap_max: 0,
            ahead_max: 1,
        };
        let mut store = Store::new(tables.lend(), Frequency { slack: 0 }, reach);
        store.begin(1);
        store.choose(Choice {
            bank: 0,
            chosen: &[Chosen {
                index: 150,
                importance: 1.0,
                share: 1.0,
            }],
            scores: None,
            grouping: Grouping::Importance,
            select: Select::All,
        });
        for outcome in tries {
            assert_eq!(store.fault(), None, "three tries are made");
            let request = store.poll_read().expect("a read for the unit");
            let outcome = match outcome {
                Unread => ReadOutcome::Failed,
                Corrupt => ReadOutcome::Corrupt,
                BadChecksum => ReadOutcome::Filled,
            };
            store.read_ended(request.read, outcome, |_| false);
        }
        let lost = match tries[2] {
            Unread => Lost::Unread(Extent {
                file: FileId(3),
                offset: 8192 + 150 * 100 / 512 * 512,
                len: 512,
            }),
            Corrupt | BadChecksum => Lost::Damaged,
        };
        let fault = store.fault().expect("it is given up");
        assert_eq!((fault.bank, fault.index, fault.lost), (0, 150, lost));
    }
}

#[test]
fn memory_and_order_of_reads_change_no_result() {
    for seed in 0..60 {
        let one = machine(seed);
        let other = Machine {
            slots: one.banks * one.units + 600,
            reads: 3,
            align: 512,
            gap: 1000,
            speculates: !one.speculates,
            ..machine(seed)
        };
        assert_eq!(run(&one).1, run(&other).1, "seed {seed}");
    }
}

#[test]
fn what_fits_is_read_once() {
    let all = Machine {
        slots: 3 * 300 + slots_least(300),
        banks: 3,
        units: 300,
        // As many as are numbered by bytes.
        reads: 255,
        speculates: false,
        sequence: false,
        gap: 0,
        align: 512,
        fault_every: 0,
        layers: 200,
        slack: 0,
        seed: 1,
    };
    let (counters, _) = run(&all);
    assert!(counters.misses() <= 900, "{counters:?}");
}

#[test]
fn what_no_eviction_comes_near_stays_where_it_is() {
    let machine = |slack| Machine {
        slots: 3 * 300,
        banks: 5,
        units: 300,
        reads: 8,
        speculates: false,
        sequence: false,
        gap: 0,
        align: 512,
        fault_every: 0,
        layers: 500,
        slack,
        seed: 1,
    };
    let (all, computed) = run(&machine(0));
    let (some, same) = run(&machine(1));
    assert_eq!(computed, same);
    assert!(
        some.moved * 3 < all.moved,
        "{} of {}",
        some.moved,
        all.moved
    );
    assert!(some.misses() * 50 <= all.misses() * 51, "{some:?} {all:?}");
}
