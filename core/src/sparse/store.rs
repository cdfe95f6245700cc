//! The state machine of sparse layers. Like the dense engine it touches no bytes and no clock: it is
//! told what a layer chose, which reads and groups have ended, and says what to read and compute.
//!
//! - A layer's [`choose`](Store::choose) names its units with their importance. They are sorted by it
//!   into *groups*; a group is ready when all its units are resident. Group sums are added in a
//!   fixed order by whoever computes, so the order of arrival never changes a result.
//! - Units of the running layer hold their slots until their group has ended.
//! - A read covers one or several wanted units and small gaps between them (`fetch.rs`); units are
//!   copied from its staging slot to slots of their own when it has ended.
//! - [`foresee`](Store::foresee) names units of a layer to come. They are read when nothing demanded
//!   is left to start, each only into a slot of lower worth; a later stage replaces what was not
//!   started yet.

use super::bits;
use super::buckets::{self, Buckets};
use super::choice::{GROUP_MAX, Grouping, STAGES};
use super::counters::Counters;
use super::fetch::Reach;
use super::listed::edge;
use super::retain::{Cause, Retain, Rules};
use super::tables::{Bank, Foreseen, Group, Item, Place, Prior, Read, SETS, Tables, Unit, Wanted};
use super::use_count::{UseCount, faded};
use crate::port::ReadOutcome;
use crate::stream::Lost;
use crate::stream::policy::Worth;
use crate::units::{Extent, ReadId, SlotId};

/// Times that a unit is read for a layer which waits for it.
pub const ATTEMPTS_MAX: u8 = 3;

/// Groups that a bank of `units` may be cut into.
pub fn groups_max(units: u32) -> u32 {
    STAGES.max(units.div_ceil(Grouping::RUN))
}

/// Slots below which a group of a bank of `units` might not fit.
pub fn slots_least(units: u32) -> u32 {
    2 * GROUP_MAX.min(units).max(1)
}

/// A read to start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadRequest {
    /// Names it until it ends; also the number of its staging slot.
    pub read: ReadId,
    /// What to read.
    pub extent: Extent,
}

/// A unit to copy out of a staging slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Delivery {
    /// Its bank.
    pub bank: u32,
    /// Which unit of the bank.
    pub index: u32,
    /// From the start of the staging slot.
    pub skew: u32,
    /// Bytes.
    pub bytes: u32,
    /// Where to.
    pub slot: SlotId,
}

/// Why a pass can't go on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Fault {
    /// Bank of the unit that the layer waits for.
    pub bank: u32,
    /// Which unit of the bank.
    pub index: u32,
    /// How the last of the reads for it ended.
    pub lost: Lost,
}

/// See the [module](self).
pub struct Store<'m, R> {
    pub(super) banks: &'m [Bank],
    pub(super) units: &'m mut [Unit],
    /// Units that the running layer uses and no read brings.
    pub(super) absent: &'m mut [u64],
    /// Resident units that may be evicted.
    pub(super) loose: &'m mut [u64],
    /// Units that were read, or are being read, on speculation, and haven't been used.
    pub(super) ahead: &'m mut [u64],
    /// Units that the last stage foresaw.
    pub(super) likely: &'m mut [u64],
    /// Those that are absent and that no read was started for.
    pub(super) named: &'m mut [u64],
    pub(super) priors: &'m [Prior],
    /// Slots without a unit: the first so many.
    pub(super) vacant: &'m mut [SlotId],
    pub(super) vacant_count: u32,
    pub(super) buckets: Buckets<'m>,
    pub(super) items: &'m mut [Item],
    pub(super) sorted: &'m mut [Item],
    pub(super) groups: &'m mut [Group],
    pub(super) reads: &'m mut [Read],
    pub(super) foreseen: &'m mut [Foreseen],
    pub(super) policy: R,
    pub(super) rules: Rules,
    pub(super) reach: Reach,
    pub(super) counters: Counters,
    uses: UseCount,
    /// The token that runs, from 1.
    pub(super) clock: u32,
    pub(super) protected: u32,
    /// The highest worth of a slot that was taken in this pass.
    pub(super) taken: Worth,
    /// Units listed at it and above are not listed anew while they stay above: what is evicted before
    /// their layer runs again lies below. Above all worths where order counts everywhere.
    pub(super) edge: u16,
    /// Slots that may be taken: the vacant ones, and those whose units are listed and not held.
    pub(super) listed: u32,
    /// Foreseen units on their way.
    pub(super) coming: u32,
    fault: Option<Fault>,

    /// The running layer's bank, its items and groups.
    pub(super) bank: Option<u32>,
    pub(super) grouping: Grouping,
    pub(super) count: u32,
    pub(super) group_count: u32,
    pub(super) group_size: u32,
    /// Groups whose units are all resident and that were not started.
    pub(super) ready: u32,
    pub(super) ended: u32,
    /// Items before it are resident or on their way.
    pub(super) cursor: u32,

    pub(super) ahead_bank: u32,
    pub(super) ahead_count: u32,
    pub(super) ahead_next: u32,
    pub(super) flying: u32,
    /// The first of the reads that are not in flight; their number if all are.
    pub(super) read_free: u8,
    pub(super) flying_ahead: u32,
    /// A batch of reads is being started.
    pub(super) starting: bool,
}

impl<'m, R: Retain> Store<'m, R> {
    /// The tables are the whole memory of the store.
    ///
    /// # Panics
    /// If the tables don't fit together, or a staging slot can't hold a unit.
    pub fn new(tables: Tables<'m>, policy: R, reach: Reach) -> Self {
        let Tables {
            banks,
            units: entries,
            priors,
            bits,
            vacant,
            blocks,
            items,
            sorted,
            groups,
            reads,
            foreseen,
        } = tables;
        let mut units = 0;
        let mut largest = 0;
        for bank in banks {
            assert_eq!(bank.first, units, "banks number their units without gaps");
            units += bank.count;
            largest = largest.max(bank.count.min(items.len() as u32));
            assert!(
                u64::from(bank.unit_bytes) + 2 * u64::from(reach.align)
                    <= u64::from(reach.window_max),
                "a staging slot holds a unit"
            );
        }
        assert!(
            reach.align.is_power_of_two(),
            "alignments are powers of two"
        );
        assert_eq!(entries.len(), units as usize, "one entry a unit");
        assert!(priors.len() <= entries.len(), "one prior a unit at most");
        assert!(sorted.len() >= items.len(), "room to sort in");
        assert!(
            groups.len() >= groups_max(largest) as usize && groups.len() <= usize::from(u16::MAX),
            "room for all groups of a choice"
        );
        assert!(
            !reads.is_empty() && reads.len() <= usize::from(u8::MAX),
            "reads are numbered by bytes"
        );
        assert!(
            vacant.len() >= slots_least(largest) as usize,
            "too few slots for a group"
        );
        assert!(
            blocks.len() >= buckets::blocks(vacant.len()),
            "room to list every slot"
        );
        let words = entries.len().div_ceil(64);
        assert!(bits.len() >= SETS * words, "a bit a unit in each set");
        entries.fill(Unit::default());
        for (entry, prior) in entries.iter_mut().zip(priors) {
            *entry = Unit::new(*prior);
        }
        bits.fill(0);
        let (absent, bits) = bits.split_at_mut(words);
        let (loose, bits) = bits.split_at_mut(words);
        let (ahead, bits) = bits.split_at_mut(words);
        let (likely, named) = bits.split_at_mut(words);
        reads.fill(Read::default());
        for (next, read) in (1..=u8::MAX).zip(&mut *reads) {
            read.next = next;
        }
        // Those of the lowest numbers go first.
        for (number, slot) in (0..).zip(vacant.iter_mut().rev()) {
            *slot = SlotId(number);
        }
        let slots = vacant.len() as u32;
        let rules = policy.rules();
        let edge = edge(&rules, Worth::EMPTY);
        Self {
            banks,
            units: entries,
            absent,
            loose,
            ahead,
            likely,
            named,
            priors,
            vacant,
            vacant_count: slots,
            buckets: Buckets::new(blocks),
            items,
            sorted,
            groups,
            reads,
            foreseen,
            policy,
            rules,
            reach,
            counters: Counters::default(),
            uses: UseCount::new(),
            clock: 0,
            protected: 0,
            taken: Worth::EMPTY,
            edge,
            listed: slots,
            coming: 0,
            fault: None,
            bank: None,
            grouping: Grouping::Importance,
            count: 0,
            group_count: 0,
            group_size: 1,
            ready: 0,
            ended: 0,
            cursor: 0,
            ahead_bank: 0,
            ahead_count: 0,
            ahead_next: 0,
            flying: 0,
            read_free: 0,
            flying_ahead: 0,
            starting: false,
        }
    }

    /// Totals since the store was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Reads in flight.
    pub fn reads_flying(&self) -> u32 {
        self.flying
    }

    /// Whether unit `index` of `bank` is in memory.
    pub fn resident(&self, bank: u32, index: u32) -> bool {
        let unit = self.banks[bank as usize].first + index;
        self.units[unit as usize].place() == Place::Resident
    }

    /// A pass over `tokens` tokens begins.
    ///
    /// # Panics
    /// While a layer runs.
    pub fn begin(&mut self, tokens: u32) {
        assert!(self.bank.is_none(), "layers end before the next pass");
        self.clock = self.clock.saturating_add(tokens);
        self.uses.begin(tokens);
        self.edge = edge(&self.rules, self.taken);
        self.taken = Worth::EMPTY;
    }

    /// Units of a layer to come, likeliest first; replaces what earlier stages foresaw and no read
    /// was started for. More than the table holds are left out.
    pub fn foresee(&mut self, bank: u32, units: impl Iterator<Item = Foreseen>) {
        self.forget_ahead();
        self.ahead_bank = bank;
        if !self.rules.speculates {
            return;
        }
        let first = self.banks[bank as usize].first;
        self.bring(bank);
        let mut count = 0;
        for unit in units.take(self.foreseen.len()) {
            let number = first + unit.index;
            let absent = self.units[number as usize].place() == Place::Absent;
            self.foreseen[count] = unit;
            count += usize::from(absent);
            self.named[number as usize / 64] |= u64::from(absent) << (number % 64);
            bits::put(self.likely, number, true);
        }
        self.ahead_count = count as u32;
    }

    pub(super) fn forget_ahead(&mut self) {
        // Units of one bank at a time are foreseen.
        let Some(&Bank { first, count, .. }) = self.banks.get(self.ahead_bank as usize) else {
            return;
        };
        let words = first as usize / 64..(first + count).div_ceil(64) as usize;
        self.named[words.clone()].fill(0);
        self.likely[words].fill(0);
        self.ahead_next = 0;
        self.ahead_count = 0;
    }

    /// The next read to start, if one is wanted and may be.
    pub fn poll_read(&mut self) -> Option<ReadRequest> {
        self.next_read()
    }

    /// A read has ended. `deliver` copies a unit and says whether its checksum holds.
    ///
    /// # Panics
    /// If the read isn't in flight.
    pub fn read_ended(
        &mut self,
        read: ReadId,
        outcome: ReadOutcome,
        mut deliver: impl FnMut(Delivery) -> bool,
    ) {
        let Read {
            bank,
            first,
            count,
            offset,
            bytes,
            flying,
            speculative,
            ..
        } = self.reads[usize::from(read.0)];
        assert!(flying, "only a read in flight ends");
        let ended = &mut self.reads[usize::from(read.0)];
        ended.flying = false;
        ended.next = self.read_free;
        self.read_free = read.0 as u8;
        self.flying -= 1;
        self.flying_ahead -= u32::from(speculative);
        let filled = outcome == ReadOutcome::Filled;
        if filled {
            self.counters.bytes_read += u64::from(bytes);
        } else {
            self.counters.failed += 1;
        }
        let Bank {
            file,
            offset: bank_offset,
            unit_bytes,
            first: bank_first,
            ..
        } = self.banks[bank as usize];
        let lost = match outcome {
            ReadOutcome::Failed => Lost::Unread(Extent {
                file,
                offset,
                len: bytes,
            }),
            ReadOutcome::Filled | ReadOutcome::Corrupt => Lost::Damaged,
        };
        for index in first..first + count {
            let unit = bank_first + index;
            let entry = self.units[unit as usize];
            if entry.place() != Place::Filling || u16::from(entry.tag) != read.0 {
                continue;
            }
            self.coming -= u32::from(bits::has(self.ahead, unit));
            let slot = SlotId(entry.slot);
            let delivery = Delivery {
                bank,
                index,
                skew: (bank_offset + u64::from(index) * u64::from(unit_bytes) - offset) as u32,
                bytes: unit_bytes,
                slot,
            };
            if filled && deliver(delivery) {
                self.counters.bytes_units += u64::from(unit_bytes);
                self.arrived(unit);
            } else {
                self.counters.corrupt += u64::from(filled);
                self.lost(bank, index, slot, lost);
            }
        }
    }

    fn arrived(&mut self, unit: u32) {
        let entry = &mut self.units[unit as usize];
        entry.set_place(Place::Resident);
        let group = entry.group;
        if entry.wanted() != Wanted::No {
            let group = &mut self.groups[usize::from(group)];
            group.missing -= 1;
            self.ready += u32::from(group.missing == 0);
        } else {
            self.list_unit(unit, Worth(group as u8).max(Worth::LEAST));
        }
    }

    fn lost(&mut self, bank: u32, index: u32, slot: SlotId, lost: Lost) {
        let unit = self.banks[bank as usize].first + index;
        self.vacate(slot);
        bits::put(self.ahead, unit, false);
        let entry = &mut self.units[unit as usize];
        entry.set_place(Place::Absent);
        entry.slot = SlotId::NONE.0;
        if entry.wanted() != Wanted::No {
            bits::put(self.absent, unit, true);
            if entry.fail() >= ATTEMPTS_MAX {
                self.fault = Some(Fault { bank, index, lost });
            }
            self.cursor = 0;
        }
    }

    /// The next group that is ready, as a number and a range of [`items`](Self::items).
    pub fn poll_group(&mut self) -> Option<u32> {
        if self.ready == 0 {
            return None;
        }
        let range = match self.grouping {
            Grouping::Importance => 0..self.group_count,
            Grouping::Sequence => self.ended..self.group_count.min(self.ended + 1),
        };
        for number in range {
            let group = &mut self.groups[number as usize];
            if group.missing > 0 || group.started {
                continue;
            }
            group.started = true;
            self.ready -= 1;
            let bank = self.bank.expect("groups belong to a layer");
            let first = self.banks[bank as usize].first;
            for item in &mut self.items[group.first as usize..group.end as usize] {
                item.slot = SlotId(self.units[(first + item.index) as usize].slot);
            }
            return Some(number);
        }
        None
    }

    /// Groups of the running layer.
    pub fn group_count(&self) -> u32 {
        self.group_count
    }

    /// Units of a group, in the order in which their results are added.
    pub fn items(&self, group: u32) -> &[Item] {
        let group = &self.groups[group as usize];
        &self.items[group.first as usize..group.end as usize]
    }

    /// A group has been computed; its units may go.
    ///
    /// # Panics
    /// If it wasn't started.
    pub fn group_ended(&mut self, number: u32) {
        let Group {
            first,
            end,
            started,
            ended,
            ..
        } = self.groups[number as usize];
        assert!(started && !ended, "only a started group ends");
        self.groups[number as usize].ended = true;
        self.ended += 1;
        let bank = self.bank.expect("groups belong to a layer");
        let bank_first = self.banks[bank as usize].first;
        for item in first..end {
            self.release(bank_first, item);
        }
    }

    /// Counts the use of an item's unit, of the bank that begins with unit `first`, and lists it again.
    #[inline]
    fn release(&mut self, first: u32, item: u32) {
        let Item { index, share, .. } = self.items[item as usize];
        let unit = first + index;
        self.counters.foreseen_used += u64::from(bits::has(self.ahead, unit));
        bits::put(self.ahead, unit, false);
        let entry = &mut self.units[unit as usize];
        let used = entry.used;
        let hit = entry.wanted() == Wanted::Hit;
        entry.set_wanted(Wanted::No);
        if share > 0.0 {
            let age = match used {
                0 => self.uses.tokens(),
                used => self.clock - used,
            };
            entry.log = self.uses.used(faded(entry.log, age), share);
            entry.used = self.clock;
        }
        let worth = self.worth(unit, f32::NAN, Cause::Used { hit });
        self.list_again(unit, worth);
    }

    /// Groups of the running layer that have not ended.
    pub fn groups_left(&self) -> u32 {
        self.group_count - self.ended
    }

    /// Units that the running layer's groups wait for.
    pub fn missing(&self) -> u32 {
        let groups = &self.groups[..self.group_count as usize];
        groups.iter().map(|group| group.missing).sum()
    }

    /// Whether every group of the running layer has ended.
    pub fn settled(&self) -> bool {
        self.bank.is_some() && self.ended == self.group_count
    }

    /// The layer is done.
    ///
    /// # Panics
    /// If it isn't [`settled`](Self::settled).
    pub fn finish(&mut self) {
        assert!(self.settled(), "a layer ends with its last group");
        self.bank = None;
        self.count = 0;
        self.cursor = 0;
        self.group_count = 0;
        self.ready = 0;
        self.ended = 0;
    }

    /// Why the running layer can't go on, once a unit that it waits for can't be read.
    pub fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// Gives up the running layer, if there is one, and all that was foreseen. No group may be being
    /// computed. Reads in flight still end.
    pub fn abandon(&mut self) {
        self.forget_ahead();
        self.fault = None;
        if let Some(bank) = self.bank {
            let first = self.banks[bank as usize].first;
            for group in 0..self.group_count as usize {
                let Group {
                    first: from,
                    end,
                    ended,
                    ..
                } = self.groups[group];
                for item in from..if ended { from } else { end } {
                    let unit = first + self.items[item as usize].index;
                    bits::put(self.absent, unit, false);
                    let entry = &mut self.units[unit as usize];
                    entry.set_wanted(Wanted::No);
                    entry.group = u16::from(Worth::LEAST.0);
                    if entry.place() == Place::Resident {
                        self.leave(unit);
                        self.list_unit(unit, Worth::LEAST);
                    }
                }
            }
        }
        self.ended = self.group_count;
        if self.bank.is_some() {
            self.finish();
        }
    }
}
