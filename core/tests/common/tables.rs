//! Memory for a store, for tests and fuzzing.

use leanstream_core::sparse::tables::{
    Bank, Foreseen, Group, Home, Item, Read, Sizes, Stat, Tables,
};
use leanstream_core::stream::tables::Slot;

/// The tables, owned.
pub struct Owned {
    banks: Vec<Bank>,
    homes: Vec<Home>,
    absent: Vec<u64>,
    stats: Vec<Stat>,
    slots: Vec<Slot>,
    items: Vec<Item>,
    sorted: Vec<Item>,
    groups: Vec<Group>,
    reads: Vec<Read>,
    foreseen: Vec<Foreseen>,
}

impl Owned {
    /// For `banks`, the first units of which have `stats`; `sizes` is for them, and a stage foresees up to
    /// `foreseen` units.
    pub fn new(banks: Vec<Bank>, stats: Vec<Stat>, sizes: Sizes, foreseen: u32) -> Self {
        Self {
            homes: vec![Home::default(); sizes.homes],
            absent: vec![0; sizes.absent],
            stats,
            slots: vec![Slot::default(); sizes.slots],
            items: vec![Item::default(); sizes.items],
            sorted: vec![Item::default(); sizes.items],
            groups: vec![Group::default(); sizes.groups],
            reads: vec![Read::default(); sizes.reads],
            foreseen: vec![Foreseen::default(); foreseen as usize],
            banks,
        }
    }

    /// Lends them.
    pub fn lend(&mut self) -> Tables<'_> {
        Tables {
            banks: &self.banks,
            homes: &mut self.homes,
            absent: &mut self.absent,
            stats: &mut self.stats,
            slots: &mut self.slots,
            items: &mut self.items,
            sorted: &mut self.sorted,
            groups: &mut self.groups,
            reads: &mut self.reads,
            foreseen: &mut self.foreseen,
        }
    }
}
