//! Any bytes as sparse layers, a memory and a sequence of events for the store. A second account of
//! slots and reads checks what it decides; whatever happens, each chosen unit is computed once.

#![no_main]

use leanstream_core::port::ReadOutcome;
use leanstream_core::sparse::retain::{Name, Policy};
use leanstream_core::sparse::store::slots_least;
use leanstream_core::sparse::tables::{Bank, Foreseen, Prior, Sizes};
use leanstream_core::sparse::{Choice, Chosen, Grouping, Reach, Select, Store};
use leanstream_core::units::{FileId, ReadId};
use libfuzzer_sys::fuzz_target;
use tables::Owned;

#[path = "../../tests/common/tables.rs"]
mod tables;

struct Bytes<'d>(&'d [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u32 {
        match self.0.split_first() {
            Some((first, rest)) => {
                self.0 = rest;
                u32::from(*first)
            }
            None => 0,
        }
    }

    fn below(&mut self, n: u32) -> u32 {
        (self.next() << 8 | self.next()) % n
    }
}

fuzz_target!(|data: &[u8]| run(&mut Bytes(data)));

fn run(bytes: &mut Bytes<'_>) {
    let units = 1 + bytes.below(400);
    let bank_count = 1 + bytes.below(4);
    let unit_bytes = 4 + 4 * bytes.below(500);
    let align = [1, 512, 4096][bytes.below(3) as usize];
    let banks: Vec<Bank> = (0..bank_count)
        .map(|bank| Bank {
            file: FileId(0),
            offset: u64::from(bank * units) * u64::from(unit_bytes) + 4096,
            unit_bytes,
            first: bank * units,
            count: units,
        })
        .collect();
    let total = (bank_count * units) as usize;
    let slot_count = slots_least(units) + bytes.below(units * bank_count + 1);
    // The store's contract: some units' use is counted, the others' isn't.
    let counted = bytes.below(total as u32 + 1) as usize;
    let priors = vec![Prior::new(0.1); counted];
    let read_count = 1 + bytes.below(20) as usize;
    let sizes = Sizes::of(&banks, slot_count, read_count);
    let mut tables = Owned::new(banks.clone(), priors, sizes, bytes.below(units + 1));
    let window_max = (unit_bytes + 2 * align) + bytes.below(1 << 15);
    let names: Vec<Name> = Name::ALL.into_iter().filter(|n| !n.needs_oracle()).collect();
    let name = names[bytes.below(names.len() as u32) as usize];
    let policy = Policy::new(name, slot_count, std::iter::repeat_n(0.1, total));
    let reach = Reach {
        align,
        window_max,
        gap_max: bytes.below(1 << 14),
        ahead_max: 1 + bytes.below(8),
    };
    let mut store = Store::new(
        tables.lend(),
        policy,
        reach,
    );
    let mut held: Vec<Option<(u32, u32)>> = vec![None; slot_count as usize];
    let mut flying: Vec<(ReadId, u64)> = Vec::new();
    for layer in 0..1 + bytes.below(12) {
        let bank = layer % bank_count;
        if bank == 0 {
            store.begin(1 + bytes.below(300));
        }
        let dense = bytes.next();
        let chosen: Vec<Chosen> = (0..units)
            .filter(|_| dense > 250 || bytes.next() % 4 == 1)
            .map(|index| Chosen {
                index,
                importance: (index * 37 % 101) as f32,
                share: (index % 3) as f32 / 2.0,
            })
            .collect();
        let select = match bytes.next() {
            0..=200 => Select::All,
            other => Select::Top((other - 200) as f32 / 55.0),
        };
        let grouping = if bytes.next() % 3 == 0 {
            Grouping::Sequence
        } else {
            Grouping::Importance
        };
        store.choose(Choice {
            bank,
            chosen: &chosen,
            scores: None,
            grouping,
            select,
        });
        let mut done = vec![false; units as usize];
        let mut running: Vec<(u32, Vec<u32>)> = Vec::new();
        let mut faults = 0;
        while !store.settled() {
            if store.fault().is_some() || bytes.next() == 255 {
                // Given up: what flies still ends, and nothing is computed any more.
                store.abandon();
                running.clear();
                break;
            }
            while let Some(request) = store.poll_read() {
                assert!(request.extent.len <= window_max && flying.len() < read_count);
                assert!(flying.iter().all(|f| f.0 != request.read));
                flying.push((request.read, request.extent.offset));
            }
            while let Some(group) = store.poll_group() {
                let items = store.items(group);
                for item in items {
                    let home = held[item.slot.0 as usize];
                    assert_eq!(home, Some((bank, item.index)), "a group is in its slots");
                    assert!(!std::mem::replace(&mut done[item.index as usize], true));
                }
                running.push((group, items.iter().map(|item| item.slot.0).collect()));
            }
            match bytes.next() % 3 {
                0 if !running.is_empty() => {
                    let (group, _) = running.swap_remove(bytes.below(running.len() as u32) as usize);
                    store.group_ended(group);
                }
                1 => {
                    let next = (bank + 1) % bank_count;
                    let step = 1 + bytes.below(5) as usize;
                    let likely = (0..units).step_by(step).map(|index| Foreseen {
                        index,
                        score: 2.0,
                    });
                    store.foresee(next, likely);
                }
                _ if !flying.is_empty() => {
                    let (read, offset) = flying.swap_remove(bytes.below(flying.len() as u32) as usize);
                    let outcome = match bytes.next() {
                        250.. if faults < 2 => ReadOutcome::Failed,
                        _ => ReadOutcome::Filled,
                    };
                    faults += u32::from(outcome == ReadOutcome::Failed);
                    let damaged = bytes.next() > 252;
                    store.read_ended(read, outcome, |delivery| {
                        let at = banks[delivery.bank as usize].offset
                            + u64::from(delivery.index) * u64::from(unit_bytes);
                        assert_eq!(offset + u64::from(delivery.skew), at);
                        assert!(
                            running.iter().all(|(_, slots)| !slots.contains(&delivery.slot.0)),
                            "nobody computes with the slot"
                        );
                        held[delivery.slot.0 as usize] =
                            (!damaged).then_some((delivery.bank, delivery.index));
                        !damaged
                    });
                }
                _ if running.is_empty() => {
                    assert!(!flying.is_empty() || store.settled() || store.fault().is_some(), "it goes on");
                }
                _ => {}
            }
        }
        if store.settled() {
            assert!(running.is_empty());
            store.finish();
            if matches!(select, Select::All) {
                assert!(chosen.iter().all(|unit| done[unit.index as usize]));
            }
        }
    }
}
