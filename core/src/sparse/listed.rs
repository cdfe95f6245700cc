//! Which slots may be taken, in order of worth. Listing a unit anew costs more than asking for its worth, for
//! its neighbours in both lists lie anywhere in memory; so a unit whose order can't matter soon stays where it
//! is.

use super::retain::{Cause, Retain, Seen};
use super::store::{AGES, Store};
use super::tables::{Home, Mark, Place, from_fixed, from_fixed_log};
use crate::stream::policy::Worth;
use crate::units::{PieceId, ReadId, SlotId};

/// log2 of what is left of a frequency after a token: of `1 - RHO`.
const RHO_LOG2: f32 = -0.045_803_69;

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
    /// What the policy says of `unit`.
    #[inline]
    pub(super) fn worth(&mut self, unit: u32, score: f32, cause: Cause) -> Worth {
        let Some(stat) = self.stats.get(unit as usize) else {
            return match cause {
                Cause::Used { hit: true } => UNCOUNTED_AGAIN,
                _ => UNCOUNTED,
            };
        };
        let age = match stat.used {
            0 => u32::MAX,
            used => self.clock - used,
        };
        let since = if stat.used == 0 { 0 } else { age };
        let faded = since.min(AGES as u32 - 1) as f32 * RHO_LOG2;
        let seen = Seen {
            unit,
            frequency_log2: from_fixed_log(stat.log) + faded,
            age,
            score,
            prior: from_fixed(stat.prior),
            next: u32::MAX,
        };
        let worth = self.policy.worth(&seen, cause);
        Worth(worth.0.max(Worth::LEAST.0))
    }

    /// Lists the slot of a resident unit.
    #[inline]
    pub(super) fn list_unit(&mut self, unit: u32, slot: SlotId, worth: Worth) {
        if let Some(stat) = self.stats.get_mut(unit as usize) {
            (stat.listed, stat.mark) = (worth.0, Mark::Plain);
        }
        self.list(slot, worth);
    }

    /// Takes the slot of a resident unit out of its list.
    #[inline]
    pub(super) fn unlist_unit(&mut self, unit: u32, slot: SlotId) {
        if let Some(stat) = self.stats.get_mut(unit as usize) {
            stat.mark = Mark::Out;
        }
        self.unlist(slot);
    }

    /// Keeps the slot of a resident unit that the running layer uses from being taken.
    #[inline]
    pub(super) fn hold(&mut self, unit: u32, slot: SlotId) {
        if let Some(stat) = self.stats.get_mut(unit as usize)
            && u16::from(stat.listed) >= self.edge
        {
            stat.mark = Mark::Held;
            self.listed -= 1;
        } else {
            self.unlist_unit(unit, slot);
        }
    }

    /// Takes a slot out of its list that is in one although it is held.
    pub(super) fn let_go(&mut self, unit: u32, slot: SlotId) {
        if let Some(stat) = self.stats.get_mut(unit as usize)
            && stat.mark == Mark::Held
        {
            stat.mark = Mark::Out;
            self.queue.remove(slot);
        }
    }

    pub(super) fn mark_ahead(&mut self, unit: u32, foreseen: bool) {
        if let Some(stat) = self.stats.get_mut(unit as usize)
            && foreseen
        {
            stat.mark = Mark::Ahead;
        }
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
            if let Some(stat) = self.stats.get_mut(unit.0 as usize) {
                stat.listed = segment.below.0;
            }
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
        let home = &mut self.homes[unit as usize];
        if home.foreseen {
            let bank = self.banks.partition_point(|bank| bank.first <= unit) - 1;
            self.counters.bytes_redundant += u64::from(self.banks[bank].unit_bytes);
        }
        self.queue.set_piece(SlotId(home.slot), None);
        *home = Home::default();
    }

    /// Gives `slot`, which is in no list, to `unit` of the running read.
    pub(super) fn fill(&mut self, unit: u32, slot: SlotId, read: ReadId) {
        self.queue.set_piece(slot, Some(PieceId(unit)));
        let home = &mut self.homes[unit as usize];
        home.slot = slot.0;
        home.read = read.0 as u8;
        home.place = Place::Filling;
    }
}
