//! The store's memory, lent in its constructor.

use super::buckets;
pub use super::buckets::Block;
use super::log2::log2;
use super::retain::Seen;
use super::store::groups_max;
use super::use_count::faded;
use crate::stream::policy::Worth;
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
    pub units: &'m mut [Unit],
    /// One for each unit of the first banks: those whose use is counted. Units behind them are kept
    /// by recency alone.
    pub priors: &'m [Prior],
    /// Sets of units, [`SETS`] bits for each.
    pub bits: &'m mut [u64],
    /// One a slot.
    pub vacant: &'m mut [SlotId],
    /// As [`Sizes`] says for so many slots.
    pub blocks: &'m mut [Block],
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

/// Sets of units that a store keeps.
pub const SETS: usize = 5;

/// How many entries the [`Tables`] have.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Sizes {
    /// Of `units`.
    pub units: usize,
    /// Of `bits`.
    pub bits: usize,
    /// Of `vacant`: slots.
    pub slots: usize,
    /// Of `blocks`.
    pub blocks: usize,
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
            units,
            bits: SETS * units.div_ceil(64),
            slots: slots as usize,
            blocks: buckets::blocks(slots as usize),
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

    /// Bytes that a slot adds to these tables, at most.
    pub const SLOT: u64 = (size_of::<SlotId>() + buckets::BYTES) as u64;

    /// Bytes of these tables, with `foreseen` as long as `items`.
    pub fn bytes(&self) -> u64 {
        let item = 2 * size_of::<Item>() + size_of::<Foreseen>();
        [
            (self.units, size_of::<Unit>()),
            (self.bits, size_of::<u64>()),
            (self.slots, size_of::<SlotId>()),
            (self.blocks, size_of::<Block>()),
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
    Absent = 0,
    /// A read is bringing it to its slot.
    Filling = 1,
    /// In its slot.
    Resident = 2,
}

/// Whether the layer that runs has chosen a unit and hasn't used it yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Wanted {
    /// It hasn't.
    #[default]
    No = 0,
    /// It has, and the unit was resident.
    Hit = 1,
    /// It has, and the unit was not resident.
    Missed = 2,
}

/// What the store remembers of every unit: a quarter of a cache line, for units are asked for in no order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(align(16))]
pub struct Unit {
    pub(super) slot: u32,
    /// The token that used it last; 0: none.
    pub(super) used: u32,
    /// log2 of the decayed share of tokens that use it, at the time of `used`, in the fixed point of
    /// [`to_fixed_log`].
    pub(super) log: u16,
    /// While wanted: its group. While foreseen and not wanted: its worth.
    pub(super) group: u16,
    /// The worth that its slot is listed under; 0: under none.
    pub(super) listed: u8,
    /// The worth that it has: at least the one it is listed under, but for the policy's slack.
    pub(super) worth: u8,
    /// The read that brings it; once it is in memory, which of its listings is the latest.
    pub(super) tag: u8,
    /// Its [`Place`] in bits 0 and 1, [`Wanted`] in bits 2 and 3, times that reading it failed above them.
    state: u8,
}

const _: () = assert!(size_of::<Unit>() == 16, "there is one for every unit");

impl Default for Unit {
    fn default() -> Self {
        Self::new(Prior::default())
    }
}

impl Unit {
    /// An absent unit.
    pub(super) fn new(prior: Prior) -> Self {
        Self {
            slot: SlotId::NONE.0,
            used: 0,
            log: to_fixed_log(prior.share()),
            group: 0,
            listed: 0,
            worth: 0,
            tag: 0,
            state: 0,
        }
    }

    #[inline]
    pub(super) fn place(&self) -> Place {
        match self.state & 3 {
            0 => Place::Absent,
            1 => Place::Filling,
            _ => Place::Resident,
        }
    }

    #[inline]
    pub(super) fn set_place(&mut self, place: Place) {
        self.state = self.state & !3 | place as u8;
    }

    #[inline]
    pub(super) fn wanted(&self) -> Wanted {
        match self.state >> 2 & 3 {
            0 => Wanted::No,
            1 => Wanted::Hit,
            _ => Wanted::Missed,
        }
    }

    #[inline]
    pub(super) fn set_wanted(&mut self, wanted: Wanted) {
        self.state = self.state & !0xc | (wanted as u8) << 2;
    }

    /// Its layer has chosen it.
    #[inline]
    pub(super) fn choose(&mut self, group: u16) {
        self.group = group;
        let place = self.place();
        let wanted = match place {
            Place::Resident => Wanted::Hit,
            _ => Wanted::Missed,
        };
        self.state = place as u8 | (wanted as u8) << 2;
    }

    /// Reading it has failed; how often that was since it was chosen, 15 at most.
    pub(super) fn fail(&mut self) -> u8 {
        if self.state < 0xf0 {
            self.state += 0x10;
        }
        self.state >> 4
    }

    /// What a policy is told of it, as number `unit`, while token `clock` runs.
    #[inline]
    pub(super) fn seen(&self, unit: u32, clock: u32, score: f32, prior: f32) -> Seen {
        let (age, since) = match self.used {
            0 => (u32::MAX, 0),
            used => (clock - used, clock - used),
        };
        Seen {
            unit,
            frequency_log2: from_fixed_log(faded(self.log, since)),
            age,
            score,
            prior,
            next: u32::MAX,
        }
    }

    /// Whether this listing of it is the latest, and holds.
    #[inline]
    pub(super) fn is_listed(&self, level: usize, tag: u8) -> bool {
        (usize::from(self.listed) == level) & (self.tag == tag)
    }

    /// It is listed under `worth`; a number for that listing.
    #[inline]
    pub(super) fn list(&mut self, worth: Worth) -> u8 {
        (self.listed, self.worth) = (worth.0, worth.0);
        self.tag = self.tag.wrapping_add(1);
        self.tag
    }

    /// Notes what it is worth now; whether it, which is listed, has to be listed anew. Where order may lag
    /// behind (`slack`), a unit whose worth has risen stays where it is until its turn to be evicted comes; so does one whose
    /// worth has fallen a little, and one that is still above everything that is evicted before its layer
    /// runs again (from `edge` on).
    #[inline]
    pub(super) fn rank(&mut self, worth: Worth, slack: u8, edge: u16) -> bool {
        self.worth = worth.0;
        let fallen = self.listed.saturating_sub(slack) > worth.0;
        let far = u16::from(worth.0) >= edge;
        let differs = self.listed != worth.0;
        (fallen & !far) | (differs & (slack == 0))
    }

    /// It isn't in memory any more.
    #[inline]
    pub(super) fn evict(&mut self) {
        (self.slot, self.listed, self.state) = (SlotId::NONE.0, 0, 0);
    }
}

/// The share of the calibration's tokens that used a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Prior(u16);

impl Prior {
    /// The nearest to `share` (0 to 1).
    pub fn new(share: f32) -> Self {
        Self(to_fixed(share))
    }

    /// The share.
    #[inline]
    pub fn share(&self) -> f32 {
        from_fixed(self.0)
    }
}

/// A share as 65535ths.
#[inline]
fn to_fixed(share: f32) -> u16 {
    // The cast saturates, and makes 0 of NaN.
    (share * 65535.0 + 0.5) as u16
}

/// 65535ths as a share.
#[inline]
fn from_fixed(fixed: u16) -> f32 {
    f32::from(fixed) * (1.0 / 65535.0)
}

/// log2 of what counts as never, far below a 65535th.
const LOG_LEAST: f32 = -32.0;
/// Steps of an octave.
pub(super) const LOG_STEPS: f32 = 2048.0;

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
        assert_eq!((sizes.units, sizes.items, sizes.slots), (730, 700, 600));
        assert_eq!(sizes.groups, groups_max(700) as usize);
        let none = Sizes::new(0, 1, 0, 0).bytes();
        let one = Sizes::new(1, 1, 0, 0).bytes();
        assert_eq!(
            one - none,
            (size_of::<Unit>() + SETS * size_of::<u64>()) as u64
        );
        let slots = Sizes::new(1, 1, 1000, 0).bytes() - one;
        assert!((900 * Sizes::SLOT..=1000 * Sizes::SLOT).contains(&slots));
        assert_eq!(Sizes::of(&[], 0, 0).items, 0);
    }

    #[test]
    fn a_unit_knows_its_state() {
        let mut unit = Unit::new(Prior::new(0.5));
        let log = unit.log;
        assert_eq!((unit.place(), unit.wanted()), (Place::Absent, Wanted::No));
        unit.choose(700);
        assert_eq!(
            (unit.place(), unit.wanted()),
            (Place::Absent, Wanted::Missed)
        );
        for failed in 1..=20 {
            assert_eq!(unit.fail(), failed.min(15));
        }
        assert_eq!(
            (unit.place(), unit.wanted()),
            (Place::Absent, Wanted::Missed)
        );
        for place in [
            Place::Filling,
            Place::Resident,
            Place::Absent,
            Place::Resident,
        ] {
            unit.set_place(place);
            assert_eq!((unit.place(), unit.wanted()), (place, Wanted::Missed));
        }
        unit.choose(1);
        assert_eq!(
            (unit.wanted(), unit.group, unit.fail()),
            (Wanted::Hit, 1, 1)
        );
        unit.set_wanted(Wanted::No);
        assert_eq!((unit.place(), unit.wanted()), (Place::Resident, Wanted::No));
        unit.evict();
        assert_eq!((unit.place(), unit.wanted()), (Place::Absent, Wanted::No));
        assert_eq!((unit.slot, unit.log), (SlotId::NONE.0, log));
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
