//! The store of a packed model's units, with the tables that it works in.

use leanstream_core::sparse::store::groups_max;
use leanstream_core::sparse::tables::{Bank, Foreseen, Group, Home, Item, Read, Stat, Tables};
use leanstream_core::stream::tables::Slot;

use super::memory::UnitPlan;
use super::packed::Packed;

/// The store's memory.
pub struct UnitTables {
    banks: Vec<Bank>,
    homes: Vec<Home>,
    stats: Vec<Stat>,
    slots: Vec<Slot>,
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
        Self {
            homes: vec![Home::default(); packed.units()],
            stats: packed.take_stats(),
            slots: vec![Slot::default(); plan.slots as usize],
            items: vec![Item::default(); ff],
            sorted: vec![Item::default(); ff],
            groups: vec![Group::default(); groups_max(ff as u32) as usize],
            reads: vec![Read::default(); usize::from(plan.reads_max)],
            foreseen: vec![Foreseen::default(); ff],
            banks,
        }
    }

    /// Bytes of all but the slots' table, and the stats, which the model was charged for.
    pub fn bytes(layers: u64, ff: u64, head_rows: u64) -> u64 {
        let each = 2 * size_of::<Item>() + size_of::<Foreseen>();
        let units = (layers * ff + head_rows) * size_of::<Home>() as u64;
        let groups = u64::from(groups_max(ff as u32)) * size_of::<Group>() as u64;
        units
            + ff * each as u64
            + groups
            + (layers + 1) * size_of::<Bank>() as u64
            + 256 * size_of::<Read>() as u64
    }

    /// The share of calibration tokens that used each unit.
    pub fn priors(&self) -> impl Iterator<Item = f32> + Clone {
        self.stats.iter().map(Stat::prior)
    }

    /// Lends them.
    pub fn lend(&mut self) -> Tables<'_> {
        Tables {
            banks: &self.banks,
            homes: &mut self.homes,
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
