//! Which slots may be taken, in order of worth. Listing a unit anew costs more than asking for its worth, and leaves
//! a stale entry behind; so a unit whose order can't matter soon stays where it is.

use super::bits;
use super::retain::{Cause, Retain, Rules};
use super::store::Store;
use super::tables::{Bank, Foreseen, Place};
use crate::stream::policy::Worth;
use crate::units::{ReadId, SlotId};

/// Worth of used units whose use isn't counted: so low that they take no slot from a unit that is used
/// now and then. Those that were used again while they stayed outlast those used once, so that a long
/// scan doesn't flush them.
const UNCOUNTED: Worth = Worth(32);
const UNCOUNTED_AGAIN: Worth = Worth(64);

/// The worth from which on order doesn't matter under `rules` when worths up to `taken` are taken.
pub(super) fn edge(rules: &Rules, taken: Worth) -> u16 {
    if rules.slack == 0 {
        return u16::MAX;
    }
    u16::from(taken.0)
}

impl<R: Retain> Store<'_, R> {
    /// Whether the use of `unit` is counted.
    #[inline]
    fn counted(&self, unit: u32) -> bool {
        (unit as usize) < self.priors.len()
    }

    /// What the policy says of `unit`.
    #[inline]
    pub(super) fn worth(&mut self, unit: u32, score: f32, cause: Cause) -> Worth {
        if !self.counted(unit) {
            return match cause {
                Cause::Used { hit: true } => UNCOUNTED_AGAIN,
                _ => UNCOUNTED,
            };
        }
        let prior = match self.rules.by_prior {
            true => self.priors[unit as usize].share(),
            false => f32::NAN,
        };
        let seen = self.units[unit as usize].seen(unit, self.clock, score, prior);
        self.policy.worth(&seen, cause).max(Worth::LEAST)
    }

    /// Reads what is known of a bank's units, so that it is near when decisions ask for it: in order, which a processor
    /// does many times faster than it fetches one entry after the other, each when the code has decided that it needs it.
    #[inline]
    pub(super) fn bring(&self, bank: u32) {
        let Bank { first, count, .. } = self.banks[bank as usize];
        // Of units whose use isn't counted, the head's rows, few are chosen.
        let counted = self.priors.len();
        let units = (first as usize).min(counted)..((first + count) as usize).min(counted);
        let units = &self.units[units];
        // Four entries come at once.
        let seen = units
            .iter()
            .step_by(4)
            .fold(0, |seen, unit| seen ^ unit.slot);
        core::hint::black_box(seen);
    }

    /// Lists a resident unit that isn't listed.
    #[inline]
    pub(super) fn list_unit(&mut self, unit: u32, worth: Worth) {
        bits::put(self.loose, unit, true);
        self.listed += 1;
        self.enter(unit, worth);
    }

    /// Takes a resident unit that may be evicted off the list.
    #[inline]
    pub(super) fn unlist_unit(&mut self, unit: u32) {
        bits::put(self.loose, unit, false);
        self.listed -= 1;
        self.leave(unit);
    }

    /// Keeps a resident unit that the running layer uses from being evicted. Where order may lag behind it stays
    /// listed: it will hardly be listed far from there again.
    #[inline]
    pub(super) fn hold(&mut self, unit: u32) {
        if self.rules.slack > 0 && self.counted(unit) {
            bits::put(self.loose, unit, false);
            self.listed -= 1;
        } else {
            self.unlist_unit(unit);
        }
    }

    /// Lists a unit that was held.
    #[inline]
    pub(super) fn list_again(&mut self, unit: u32, worth: Worth) {
        if self.units[unit as usize].listed == 0 {
            return self.list_unit(unit, worth);
        }
        bits::put(self.loose, unit, true);
        self.listed += 1;
        let (slack, edge) = (self.rules.slack, self.edge);
        if self.units[unit as usize].rank(worth, slack, edge) {
            self.move_unit(unit, worth);
        }
    }

    /// Lists a unit that may be evicted under another worth.
    #[inline]
    pub(super) fn move_unit(&mut self, unit: u32, worth: Worth) {
        self.leave(unit);
        self.enter(unit, worth);
    }

    /// What a unit that is listed under `listed` is worth, if that is more.
    #[inline]
    pub(super) fn risen(&self, unit: u32, listed: Worth) -> Option<Worth> {
        let worth = Worth(self.units[unit as usize].worth);
        (worth > listed).then_some(worth)
    }

    /// Puts a unit into the bucket of its worth, and keeps a capped worth to its cap.
    #[inline]
    fn enter(&mut self, unit: u32, worth: Worth) {
        self.buckets.push(worth, unit, self.units);
        let Some(segment) = self.rules.segment else {
            return;
        };
        if worth != segment.worth {
            return;
        }
        self.protected += 1;
        if self.protected > segment.units_max {
            let oldest = self.buckets.oldest(worth, self.units);
            let oldest = oldest.expect("one was just put into it");
            self.leave(oldest);
            self.buckets.push(segment.below, oldest, self.units);
        }
    }

    /// What was said of a unit's place in the order doesn't hold any more.
    #[inline]
    pub(super) fn leave(&mut self, unit: u32) {
        let listed = &mut self.units[unit as usize].listed;
        if let Some(segment) = self.rules.segment {
            self.protected -= u32::from(*listed == segment.worth.0);
        }
        *listed = 0;
    }

    /// A slot has no unit any more.
    pub(super) fn vacate(&mut self, slot: SlotId) {
        self.vacant[self.vacant_count as usize] = slot;
        self.vacant_count += 1;
        self.listed += 1;
    }

    /// A slot that has no unit.
    #[inline]
    pub(super) fn take_vacant(&mut self) -> Option<SlotId> {
        self.vacant_count = self.vacant_count.checked_sub(1)?;
        self.listed -= 1;
        Some(self.vacant[self.vacant_count as usize])
    }

    /// Forgets that `unit`, which isn't listed, is in memory; the slot it was in.
    pub(super) fn evict(&mut self, unit: u32) -> SlotId {
        if bits::has(self.ahead, unit) {
            bits::put(self.ahead, unit, false);
            let bank = self.banks.partition_point(|bank| bank.first <= unit) - 1;
            self.counters.bytes_redundant += u64::from(self.banks[bank].unit_bytes);
        }
        let entry = &mut self.units[unit as usize];
        let slot = SlotId(entry.slot);
        entry.evict();
        if bits::has(self.likely, unit) && (self.ahead_count as usize) < self.foreseen.len() {
            // It was needed for something surer, and is still likely to be used.
            let index = unit - self.banks[self.ahead_bank as usize].first;
            let score = f32::NAN;
            self.foreseen[self.ahead_count as usize] = Foreseen { index, score };
            self.ahead_count += 1;
            bits::put(self.named, unit, true);
        }
        slot
    }

    /// Gives `slot`, which was taken, to `unit` of the running read.
    pub(super) fn fill(&mut self, unit: u32, slot: SlotId, read: ReadId) {
        let entry = &mut self.units[unit as usize];
        entry.slot = slot.0;
        entry.tag = read.0 as u8;
        entry.set_place(Place::Filling);
    }
}
