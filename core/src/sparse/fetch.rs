//! What the store reads next: demanded units in the order of their groups, then foreseen ones.

use super::bits;
use super::listed::edge;
use super::retain::{Cause, Retain};
use super::store::{ReadRequest, Store};
use super::tables::{Bank, Read, Wanted};
use crate::stream::policy::Worth;
use crate::units::{Extent, ReadId, SlotId};

/// How far one read reaches.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reach {
    /// Alignment of offsets and lengths, a power of two.
    pub align: u32,
    /// Bytes of a staging slot.
    pub window_max: u32,
    /// Unwanted bytes that it pays to read rather than to start another read.
    pub gap_max: u32,
    /// Speculative reads in flight, at most: late binding.
    pub ahead_max: u32,
}

/// The queue's depth is refilled in so many steps.
const BATCHES: u32 = 4;

/// By how many levels a foreseen unit has to be worth more than the one it displaces.
const HYSTERESIS: u8 = 4;

impl<R: Retain> Store<'_, R> {
    pub(super) fn next_read(&mut self) -> Option<ReadRequest> {
        // Started in batches: what starting costs (a system call, a knock at the device) is shared.
        let depth = self.reads.len() as u32;
        let free = depth - self.flying;
        if self.flying > 0 && !self.starting && free < depth.div_ceil(BATCHES) {
            return None;
        }
        let next = self.next_of(free);
        self.starting = next.is_some();
        next
    }

    fn next_of(&mut self, free: u32) -> Option<ReadRequest> {
        if free == 0 {
            return None;
        }
        let read = ReadId(u16::from(self.read_free));
        if let Some(bank) = self.bank {
            let first = self.banks[bank as usize].first;
            while self.cursor < self.count {
                let index = self.items[self.cursor as usize].index;
                if bits::has(self.absent, first + index) {
                    return self.start(read, bank, index, None);
                }
                self.cursor += 1;
            }
        }
        while self.ahead_next < self.ahead_count && self.flying_ahead < self.reach.ahead_max {
            let foreseen = self.foreseen[self.ahead_next as usize];
            let bank = self.ahead_bank;
            let unit = self.banks[bank as usize].first + foreseen.index;
            if !bits::has(self.named, unit) {
                self.ahead_next += 1;
                continue;
            }
            let worth = self.worth(unit, foreseen.score, Cause::Foreseen);
            if let Some(request) = self.start(read, bank, foreseen.index, Some(worth)) {
                self.ahead_next += 1;
                return Some(request);
            }
            // What comes behind is less likely still.
            self.ahead_next = self.ahead_count;
        }
        None
    }

    /// Whether `unit`, which is absent and wanted or named, may join a read for a unit of `group` (or one for
    /// foreseen units).
    fn joins(&self, unit: u32, group: u16, ahead: Option<Worth>) -> bool {
        // Units of later groups leave a group's worth of slots: whichever group comes first always
        // finds room, so that it ends and makes more.
        ahead.is_some() || self.units[unit as usize].group == group || self.listed > self.group_size
    }

    /// The units that a read looks for: those that are wanted, or those that are foreseen.
    fn sought(&self, ahead: Option<Worth>) -> &[u64] {
        match ahead {
            None => self.absent,
            Some(_) => self.named,
        }
    }

    /// Starts a read around unit `index`, if there is a slot for it.
    fn start(
        &mut self,
        read: ReadId,
        bank: u32,
        index: u32,
        ahead: Option<Worth>,
    ) -> Option<ReadRequest> {
        let Bank {
            file,
            offset,
            unit_bytes,
            first: bank_first,
            count,
        } = self.banks[bank as usize];
        let slot = self.take(ahead)?;
        let group = self.units[(bank_first + index) as usize].group;
        self.claim(bank_first + index, slot, read, ahead);
        let align = u64::from(self.reach.align);
        let bytes = u64::from(unit_bytes);
        let window_max = u64::from(self.reach.window_max);
        let from = |index: u32| (offset + u64::from(index) * bytes) & !(align - 1);
        let to = |index: u32| (offset + (u64::from(index) + 1) * bytes).next_multiple_of(align);
        let reach = self.reach.gap_max / unit_bytes + 1;
        let (mut first, mut last) = (index, index);
        // Upwards, then downwards: each wanted unit that the window still covers joins. Upwards those that
        // end in it,
        let window_end = (from(first) + window_max) & !(align - 1);
        let end = count.min(((window_end - offset) / bytes) as u32);
        let mut next = bank_first + index + 1;
        loop {
            let end = bank_first + end.min(last.saturating_add(reach).saturating_add(1));
            let found = bits::lowest(self.sought(ahead), next, end);
            let Some(unit) = found else { break };
            if self.joins(unit, group, ahead) {
                let Some(slot) = self.take(ahead) else { break };
                self.claim(unit, slot, read, ahead);
                last = unit - bank_first;
            }
            next = unit + 1;
        }
        // downwards those that begin in it.
        let window_start = to(last).saturating_sub(window_max).next_multiple_of(align);
        let least = window_start.saturating_sub(offset).div_ceil(bytes) as u32;
        let mut next = bank_first + index;
        loop {
            let least = bank_first + least.max(first.saturating_sub(reach));
            let found = bits::highest(self.sought(ahead), least, next);
            let Some(unit) = found else { break };
            if self.joins(unit, group, ahead) {
                let Some(slot) = self.take(ahead) else { break };
                self.claim(unit, slot, read, ahead);
                first = unit - bank_first;
            }
            next = unit;
        }
        let start = from(first);
        let len = (to(last) - start) as u32;
        self.read_free = self.reads[usize::from(read.0)].next;
        self.reads[usize::from(read.0)] = Read {
            bank,
            first,
            count: last - first + 1,
            offset: start,
            bytes: len,
            flying: true,
            speculative: ahead.is_some(),
            next: 0,
        };
        self.flying += 1;
        self.flying_ahead += u32::from(ahead.is_some());
        self.counters.reads += 1;
        Some(ReadRequest {
            read,
            extent: Extent {
                file,
                offset: start,
                len,
            },
        })
    }

    fn claim(&mut self, unit: u32, slot: SlotId, read: ReadId, ahead: Option<Worth>) {
        self.fill(unit, slot, read);
        bits::put(self.absent, unit, false);
        bits::put(self.named, unit, false);
        if let Some(worth) = ahead {
            bits::put(self.ahead, unit, true);
            self.units[unit as usize].group = u16::from(worth.0);
            self.coming += 1;
            self.counters.foreseen += 1;
        }
    }

    /// The least worthy slot: any for a demanded unit, one of clearly lower worth for a foreseen one.
    fn take(&mut self, ahead: Option<Worth>) -> Option<SlotId> {
        if let Some(slot) = self.take_vacant() {
            return Some(slot);
        }
        let newest_first = self.rules.newest_first;
        loop {
            let (least, unit) = self.buckets.least(newest_first, self.units)?;
            if let Some(worth) = ahead
                && least.0 > worth.0.saturating_sub(HYSTERESIS)
            {
                return None;
            }
            if self.units[unit as usize].wanted() != Wanted::No {
                self.leave(unit);
                continue;
            }
            if let Some(risen) = self.risen(unit, least) {
                self.move_unit(unit, risen);
                continue;
            }
            self.unlist_unit(unit);
            if least > self.taken {
                self.taken = least;
                self.edge = self.edge.max(edge(&self.rules, least));
            }
            return Some(self.evict(unit));
        }
    }
}
