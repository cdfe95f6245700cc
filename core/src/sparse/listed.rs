//! Which slots may be taken, in order of worth. Listing a unit anew costs more than asking for its worth, for
//! its neighbours in both lists lie anywhere in memory; so a unit whose order can't matter soon stays where it
//! is.

use super::bits;
use super::retain::{Cause, Retain};
use super::store::Store;
use super::tables::{Bank, Foreseen, Place};
use crate::stream::policy::Worth;
use crate::units::{PieceId, ReadId, SlotId};

/// Worth of used units whose use isn't counted: so low that they take no slot from a unit that is used
/// now and then. Those that were used again while they stayed outlast those used once, so that a long
/// scan doesn't flush them.
const UNCOUNTED: Worth = Worth(32);
const UNCOUNTED_AGAIN: Worth = Worth(64);

/// Levels above the highest worth that was taken lately from which on order doesn't matter.
const EDGE: u8 = 8;

/// The worth from which on order doesn't matter to `policy` when worths up to `taken` are taken.
pub(super) fn edge(policy: &impl Retain, taken: Worth) -> u16 {
    if policy.slack() == 0 {
        return u16::MAX;
    }
    u16::from(taken.0) + u16::from(EDGE)
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
        let prior = match self.policy.by_prior() {
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

    /// Lists the slot of a resident unit that is in no list.
    #[inline]
    pub(super) fn list_unit(&mut self, unit: u32, slot: SlotId, worth: Worth) {
        let entry = &mut self.units[unit as usize];
        (entry.listed, entry.worth) = (worth.0, worth.0);
        bits::put(self.loose, unit, true);
        self.list(slot, worth);
    }

    /// Takes the slot of a resident unit that may be evicted out of its list.
    #[inline]
    pub(super) fn unlist_unit(&mut self, unit: u32, slot: SlotId) {
        self.units[unit as usize].listed = 0;
        bits::put(self.loose, unit, false);
        self.unlist(slot);
    }

    /// Keeps the slot of a resident unit that the running layer uses from being taken. Where order may lag
    /// behind it stays in its list: it will hardly be listed far from it again.
    #[inline]
    pub(super) fn hold(&mut self, unit: u32, slot: SlotId) {
        if self.policy.slack() > 0 && self.counted(unit) {
            bits::put(self.loose, unit, false);
            self.listed -= 1;
        } else {
            self.unlist_unit(unit, slot);
        }
    }

    /// Takes a slot out of its list that is in one although it is held.
    pub(super) fn let_go(&mut self, unit: u32, slot: SlotId) {
        let entry = &mut self.units[unit as usize];
        if entry.listed != 0 {
            entry.listed = 0;
            self.queue.remove(slot);
        }
    }

    /// Lists the slot of a unit that was held.
    #[inline]
    pub(super) fn list_again(&mut self, unit: u32, slot: SlotId, worth: Worth) {
        if self.units[unit as usize].listed == 0 {
            return self.list_unit(unit, slot, worth);
        }
        bits::put(self.loose, unit, true);
        self.listed += 1;
        let (slack, edge) = (self.policy.slack(), self.edge);
        if self.units[unit as usize].rank(worth, slack, edge) {
            self.move_unit(unit, slot, worth);
        }
    }

    /// Lists the slot of a unit that may be evicted under another worth.
    #[inline]
    pub(super) fn move_unit(&mut self, unit: u32, slot: SlotId, worth: Worth) {
        let entry = &mut self.units[unit as usize];
        (entry.listed, entry.worth) = (worth.0, worth.0);
        self.unlist(slot);
        self.list(slot, worth);
    }

    /// What a unit that is listed under `listed` is worth, if that is more.
    #[inline]
    pub(super) fn risen(&self, unit: u32, listed: Worth) -> Option<Worth> {
        let worth = Worth(self.units[unit as usize].worth);
        (worth > listed).then_some(worth)
    }

    /// Lists a slot, and keeps a capped worth to its cap.
    #[inline]
    pub(super) fn list(&mut self, slot: SlotId, worth: Worth) {
        self.queue.push(slot, worth);
        self.listed += 1;
        let Some(segment) = self.policy.segment() else {
            return;
        };
        if worth != segment.worth {
            return;
        }
        self.protected += 1;
        if self.protected > segment.units_max {
            let oldest = self.queue.first(worth).expect("it was just listed");
            self.unlist(oldest);
            self.queue.push(oldest, segment.below);
            self.listed += 1;
            let unit = self.queue.piece(oldest).expect("it has a worth");
            let entry = &mut self.units[unit.0 as usize];
            (entry.listed, entry.worth) = (segment.below.0, segment.below.0);
        }
    }

    #[inline]
    pub(super) fn unlist(&mut self, slot: SlotId) {
        if let Some(segment) = self.policy.segment() {
            self.protected -= u32::from(self.queue.worth(slot) == Some(segment.worth));
        }
        self.queue.remove(slot);
        self.listed -= 1;
    }

    /// Forgets that `unit` is in memory. Its slot is in no list.
    pub(super) fn evict(&mut self, unit: u32) {
        if bits::has(self.ahead, unit) {
            bits::put(self.ahead, unit, false);
            let bank = self.banks.partition_point(|bank| bank.first <= unit) - 1;
            self.counters.bytes_redundant += u64::from(self.banks[bank].unit_bytes);
        }
        let entry = &mut self.units[unit as usize];
        self.queue.set_piece(SlotId(entry.slot), None);
        entry.evict();
        if bits::has(self.likely, unit) && (self.ahead_count as usize) < self.foreseen.len() {
            // It was needed for something surer, and is still likely to be used.
            let index = unit - self.banks[self.ahead_bank as usize].first;
            let score = f32::NAN;
            self.foreseen[self.ahead_count as usize] = Foreseen { index, score };
            self.ahead_count += 1;
            bits::put(self.named, unit, true);
        }
    }

    /// Gives `slot`, which is in no list, to `unit` of the running read.
    pub(super) fn fill(&mut self, unit: u32, slot: SlotId, read: ReadId) {
        self.queue.set_piece(slot, Some(PieceId(unit)));
        let entry = &mut self.units[unit as usize];
        entry.slot = slot.0;
        entry.read = read.0 as u8;
        entry.set_place(Place::Filling);
    }
}
