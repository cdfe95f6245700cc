//! The tables that the store of a packed model's units works in.

use leanstream_core::sparse::tables::{
    Bank, Block, Foreseen, Group, Item, Prior, Read, Sizes, Tables, Unit,
};
use leanstream_core::units::SlotId;

use super::memory::UnitPlan;
use super::packed::Packed;

/// The store's memory.
pub struct UnitTables {
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

impl UnitTables {
    /// Tables for `packed` under `plan`. Takes over what the calibration found.
    pub fn new(packed: &mut Packed, plan: &UnitPlan) -> Self {
        let ff = packed.ff();
        let layers = packed
            .layers()
            .iter()
            .enumerate()
            .map(|(layer, packed)| Bank {
                file: packed.units.file,
                offset: packed.units.offset,
                unit_bytes: packed.unit_bytes,
                first: (layer * ff) as u32,
                count: packed.count,
            });
        let head = packed.head().map(|head| Bank {
            file: head.units.file,
            offset: head.units.offset,
            unit_bytes: head.unit_bytes,
            first: (packed.layers().len() * ff) as u32,
            count: head.count,
        });
        let mut banks = Vec::with_capacity(packed.layers().len() + 1);
        banks.extend(layers.chain(head));
        let (units, reads) = (packed.units(), usize::from(plan.reads_max));
        let sizes = Sizes::new(units, ff as u32, plan.slots, reads);
        Self::of(banks, packed.take_priors(), sizes)
    }

    /// Tables of these sizes for `banks`, the first units of which have `priors`.
    pub fn of(banks: Vec<Bank>, priors: Vec<Prior>, sizes: Sizes) -> Self {
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
            foreseen: vec![Foreseen::default(); sizes.items],
            banks,
        }
    }

    /// Bytes of all but the slots' table, and the priors, which the model was charged for.
    pub fn bytes(layers: u64, ff: u64, head_rows: u64) -> u64 {
        let sizes = Sizes::new((layers * ff + head_rows) as usize, ff as u32, 0, 256);
        sizes.bytes() + (layers + 1) * size_of::<Bank>() as u64
    }

    /// The share of calibration tokens that used each unit.
    pub fn priors(&self) -> impl Iterator<Item = f32> + Clone {
        self.priors.iter().map(Prior::share)
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
