//! Memory for a store, for tests and fuzzing.

use leanstream_core::sparse::tables::{
    Bank, Block, Foreseen, Group, Item, Prior, Read, Sizes, Tables, Unit,
};
use leanstream_core::units::SlotId;

/// The tables, owned.
pub struct Owned {
    banks: Vec<Bank>,
    units: Vec<Unit>,
    bits: Vec<u64>,
    priors: Vec<Prior>,
    vacant: Vec<SlotId>,
    blocks: Vec<Block>,
    items: Vec<Item>,
    sorted: Vec<Item>,
    groups: Vec<Group>,
    reads: Vec<Read>,
    foreseen: Vec<Foreseen>,
}

impl Owned {
    /// For `banks`, the first units of which have `priors`; `sizes` is for them, and a stage foresees up to
    /// `foreseen` units.
    pub fn new(banks: Vec<Bank>, priors: Vec<Prior>, sizes: Sizes, foreseen: u32) -> Self {
        Self {
            units: vec![Unit::default(); sizes.units],
            bits: vec![0; sizes.bits],
            priors,
            vacant: vec![SlotId::NONE; sizes.slots],
            blocks: vec![Block::default(); sizes.blocks],
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
            units: &mut self.units,
            bits: &mut self.bits,
            priors: &self.priors,
            vacant: &mut self.vacant,
            blocks: &mut self.blocks,
            items: &mut self.items,
            sorted: &mut self.sorted,
            groups: &mut self.groups,
            reads: &mut self.reads,
            foreseen: &mut self.foreseen,
        }
    }
}
