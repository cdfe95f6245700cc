//! The store's memory, lent in its constructor.

use super::log2::log2;
use super::store::groups_max;
use crate::stream::tables::Slot;
use crate::units::{FileId, SlotId};

/// Units of one size, one after the other on flash: a layer's neurons, or the rows of the head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bank {
    /// Which file of the model.
    pub file: FileId,
    /// First byte of the first unit.
    pub offset: u64,
    /// Bytes of a unit.
    pub unit_bytes: u32,
    /// Number of the first unit, counted over all banks.
    pub first: u32,
    /// Units.
    pub count: u32,
}

/// Everything the store needs, by table.
pub struct Tables<'m> {
    /// In the order in which a pass comes by them; their units are numbered without gaps.
    pub banks: &'m [Bank],
    /// One a unit.
    pub homes: &'m mut [Home],
    /// One for each unit of the first banks: those whose use is counted. Units behind them are kept
    /// by recency alone. What is in it is kept: [`Stat::new`] takes the calibrated prior.
    pub stats: &'m mut [Stat],
    /// One bit a unit.
    pub absent: &'m mut [u64],
    /// One a slot.
    pub slots: &'m mut [Slot],
    /// As many as a choice may have units.
    pub items: &'m mut [Item],
    /// As many again, to sort in.
    pub sorted: &'m mut [Item],
    /// As [`groups_max`](super::store::groups_max) says for the largest choice.
    pub groups: &'m mut [Group],
    /// As many as may be in flight at once, 255 at most; each has a staging slot.
    pub reads: &'m mut [Read],
    /// As many as one stage may foresee.
    pub foreseen: &'m mut [Foreseen],
}

/// How many entries the [`Tables`] have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Of `homes`.
    pub homes: usize,
    /// Of `absent`.
    pub absent: usize,
    /// Of `slots`.
    pub slots: usize,
    /// Of `items` and of `sorted`; of `foreseen` it is enough.
    pub items: usize,
    /// Of `groups`.
    pub groups: usize,
    /// Of `reads`.
    pub reads: usize,
}

impl Sizes {
    /// For `units` units in all banks, of which a choice has up to `choice`, in `slots` slots and with
    /// `reads` reads in flight.
    pub fn new(units: usize, choice: u32, slots: u32, reads: usize) -> Self {
        Self {
            homes: units,
            absent: units.div_ceil(64),
            slots: slots as usize,
            items: choice as usize,
            groups: groups_max(choice) as usize,
            reads,
        }
    }

    /// For banks of which any may be chosen whole.
    pub fn of(banks: &[Bank], slots: u32, reads: usize) -> Self {
        let units = banks.iter().map(|bank| bank.count as usize).sum();
        let choice = banks.iter().map(|bank| bank.count).max().unwrap_or(0);
        Self::new(units, choice, slots, reads)
    }

    /// Bytes of these tables, with `foreseen` as long as `items`.
    pub fn bytes(&self) -> u64 {
        let item = 2 * size_of::<Item>() + size_of::<Foreseen>();
        [
            (self.homes, size_of::<Home>()),
            (self.absent, size_of::<u64>()),
            (self.slots, size_of::<Slot>()),
            (self.items, item),
            (self.groups, size_of::<Group>()),
            (self.reads, size_of::<Read>()),
        ]
        .into_iter()
        .map(|(count, bytes)| count as u64 * bytes as u64)
        .sum()
    }
}

/// Where a unit stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Place {
    /// Not in memory.
    #[default]
    Absent,
    /// A read is bringing it to its slot.
    Filling,
    /// In its slot.
    Resident,
}

/// Whether the layer that runs has chosen a unit and hasn't used it yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Wanted {
    /// It hasn't.
    #[default]
    No,
    /// It has, and the unit was resident.
    Hit,
    /// It has, and the unit was not resident.
    Missed,
}

/// What the store remembers of every unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Home {
    pub(super) slot: u32,
    /// While wanted: its group. While foreseen and not wanted: its worth.
    pub(super) group: u16,
    pub(super) read: u8,
    pub(super) place: Place,
    pub(super) wanted: Wanted,
    /// It was read on speculation and hasn't been used.
    pub(super) foreseen: bool,
    /// A stage foresees it, and no read was started for it.
    pub(super) named: bool,
    pub(super) attempts: u8,
}

const _: () = assert!(size_of::<Home>() <= 12, "there is one for every unit");

impl Default for Home {
    fn default() -> Self {
        Self {
            slot: SlotId::NONE.0,
            group: 0,
            read: 0,
            place: Place::Absent,
            wanted: Wanted::No,
            foreseen: false,
            named: false,
            attempts: 0,
        }
    }
}

/// Whether and why a unit is listed; bits of their own, so that several can be looked for at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Mark {
    /// It isn't.
    #[default]
    Out = 0,
    /// Since it was used or passed by.
    Plain = 1,
    /// Since it was foreseen; it hasn't been used.
    Ahead = 2,
    /// The running layer has chosen it. It will hardly be listed far from where it is, so it stays there, and
    /// must not be taken.
    Held = 4,
}

/// How often a unit is used, and what ranking all resident units of a layer needs beside it: that goes
/// over this table alone.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// The token that used it last; 0: none.
    pub(super) used: u32,
    /// log2 of `frequency`, in the fixed point of [`to_fixed_log`].
    pub(super) log: u16,
    /// The worth that its slot is listed under, if it is.
    pub(super) listed: u8,
    pub(super) mark: Mark,
    /// Decayed share of tokens at the time of `used`, in 65535ths.
    pub(super) frequency: u16,
    pub(super) prior: u16,
}

const _: () = assert!(size_of::<Stat>() <= 12, "there is one for every unit");

impl Stat {
    /// A unit that `prior` of the calibration's tokens used (0 to 1).
    pub fn new(prior: f32) -> Self {
        let prior = to_fixed(prior);
        Self {
            used: 0,
            log: to_fixed_log(from_fixed(prior)),
            listed: 0,
            mark: Mark::Out,
            frequency: prior,
            prior,
        }
    }

    /// The share of the calibration's tokens.
    pub fn prior(&self) -> f32 {
        from_fixed(self.prior)
    }
}

/// A share as 65535ths.
#[inline]
pub(super) fn to_fixed(share: f32) -> u16 {
    // The cast saturates, and makes 0 of NaN.
    (share * 65535.0 + 0.5) as u16
}

/// 65535ths as a share.
#[inline]
pub(super) fn from_fixed(fixed: u16) -> f32 {
    f32::from(fixed) * (1.0 / 65535.0)
}

/// log2 of what counts as never, far below a 65535th.
const LOG_LEAST: f32 = -32.0;
/// Steps of an octave.
const LOG_STEPS: f32 = 2048.0;

/// log2 of a share from 0 to 1, in 2048ths above -32.
#[inline]
pub(super) fn to_fixed_log(share: f32) -> u16 {
    // The cast saturates: 1 has the log of the number before it.
    ((log2(share) - LOG_LEAST) * LOG_STEPS + 0.5) as u16
}

/// log2 of a share from [`to_fixed_log`].
#[inline]
pub(super) fn from_fixed_log(fixed: u16) -> f32 {
    f32::from(fixed) * (1.0 / LOG_STEPS) + LOG_LEAST
}

/// A unit that the running layer uses.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Item {
    /// Which unit of its bank.
    pub index: u32,
    /// Where it is; valid from the start of its group on.
    pub slot: SlotId,
    pub(super) importance: f32,
    pub(super) share: f32,
}

impl Default for Item {
    fn default() -> Self {
        Self {
            index: 0,
            slot: SlotId::NONE,
            importance: 0.0,
            share: 0.0,
        }
    }
}

/// Items that are computed together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Group {
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) missing: u32,
    pub(super) started: bool,
    pub(super) ended: bool,
}

/// A read that may be in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Read {
    pub(super) bank: u32,
    /// Units `first .. first + count` of the bank lie wholly within it.
    pub(super) first: u32,
    pub(super) count: u32,
    /// Where in the file it begins.
    pub(super) offset: u64,
    pub(super) bytes: u32,
    pub(super) flying: bool,
    pub(super) speculative: bool,
    /// While it isn't in flight: the next such read.
    pub(super) next: u8,
}

/// A unit that a stage foresees.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Foreseen {
    /// Which unit of its bank.
    pub index: u32,
    /// The stage's estimate of the gate, as [`Seen::score`](super::retain::Seen::score).
    pub score: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_from_the_banks() {
        let bank = |first, count| Bank {
            file: FileId(0),
            offset: 0,
            unit_bytes: 8,
            first,
            count,
        };
        let sizes = Sizes::of(&[bank(0, 700), bank(700, 30)], 600, 5);
        assert_eq!(sizes, Sizes::new(730, 700, 600, 5));
        assert_eq!((sizes.homes, sizes.items, sizes.slots), (730, 700, 600));
        assert_eq!(sizes.groups, groups_max(700) as usize);
        let none = Sizes::new(0, 1, 0, 0).bytes();
        let one = Sizes::new(1, 1, 0, 0).bytes();
        assert_eq!(one - none, (size_of::<Home>() + size_of::<u64>()) as u64);
        assert_eq!(Sizes::of(&[], 0, 0).items, 0);
    }

    #[test]
    fn logarithms_keep_what_a_worth_can_show() {
        assert_eq!(to_fixed_log(0.0), 0);
        for share in [1.0, 0.5, 0.123, 1e-3, 1.0 / 65535.0] {
            let log = from_fixed_log(to_fixed_log(share));
            assert!((log - share.log2()).abs() < 1e-3, "of {share}: {log}");
        }
    }
}
