//! Resident units in order of worth: a bucket queue, one bucket a level of worth, with lazy deletion.
//!
//! A unit that is listed anew is written to the end of another bucket; where it stood it stays written until that
//! entry is come by, and is known to be stale by what the [`Unit`] says of itself. So listing is one write beside
//! others of late, and looking for the least is reading entries that stand one after the other, where linked lists
//! would ask memory for both neighbours of a unit in each of them.
//!
//! A bucket is a chain of blocks. When no block is left, stale entries are dropped from all buckets: there are three
//! times as many entries as slots, so that two for each slot were written since the last time.

use super::tables::Unit;
use crate::stream::policy::Worth;

/// Entries of a block.
const ENTRIES: usize = 11;
const NONE: u32 = u32::MAX;
const LEVELS: usize = 256;
/// Entries for each slot: more take memory from units, fewer are looked through more often.
const PER_SLOT: usize = 3;

/// Entries of one bucket, one after the other: a cache line.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub struct Block {
    units: [u32; ENTRIES],
    /// The block that was begun before it.
    older: u32,
    /// The block that was begun after it; of an unused one, another unused one.
    newer: u32,
    tags: [u8; ENTRIES],
}

const _: () = assert!(size_of::<Block>() == 64, "a block is a cache line");

impl Default for Block {
    fn default() -> Self {
        Self {
            units: [0; ENTRIES],
            older: NONE,
            newer: NONE,
            tags: [0; ENTRIES],
        }
    }
}

impl Block {
    /// Whether entry `at` is what its unit says of itself, in the bucket of level `level`.
    #[inline]
    fn is_live(&self, at: usize, level: usize, units: &[Unit]) -> bool {
        units[self.units[at] as usize].is_listed(level, self.tags[at])
    }

    /// Which of its entries are what their units say of themselves, in the bucket of level `level`: a bit each.
    #[inline]
    fn live(&self, level: usize, units: &[Unit]) -> u16 {
        (0..ENTRIES).fold(0, |live, at| {
            live | u16::from(self.is_live(at, level, units)) << at
        })
    }
}

/// Blocks for the units of `slots` slots.
pub(super) const fn blocks(slots: usize) -> usize {
    // One of each bucket may hold a single entry.
    LEVELS + (PER_SLOT * slots).div_ceil(ENTRIES)
}

/// Bytes of blocks that a slot adds, at most.
pub(super) const BYTES: usize = (PER_SLOT * size_of::<Block>()).div_ceil(ENTRIES);

/// A bucket: where its oldest and its newest entry are.
#[derive(Clone, Copy, Debug)]
struct Bucket {
    oldest: u32,
    newest: u32,
    /// The first entry of the oldest block.
    first: u8,
    /// Behind the last entry of the newest block.
    end: u8,
}

impl Bucket {
    /// Its newest block is said to be full, so that the next entry begins one.
    const EMPTY: Self = Self {
        oldest: NONE,
        newest: NONE,
        first: 0,
        end: ENTRIES as u8,
    };

    /// The entries of one of its blocks.
    #[inline]
    fn range(&self, block: u32) -> core::ops::Range<usize> {
        let first = if block == self.oldest { self.first } else { 0 };
        let end = match block == self.newest {
            true => self.end,
            false => ENTRIES as u8,
        };
        usize::from(first)..usize::from(end)
    }
}

/// See the [module](self).
pub(super) struct Buckets<'m> {
    blocks: &'m mut [Block],
    buckets: [Bucket; LEVELS],
    /// Buckets that have a block.
    occupied: [u64; LEVELS / 64],
    unused: u32,
    /// The block whose units were asked for last.
    near: u32,
}

impl<'m> Buckets<'m> {
    /// Without an entry.
    pub fn new(blocks: &'m mut [Block]) -> Self {
        assert!(blocks.len() < NONE as usize, "blocks are numbered");
        let mut unused = NONE;
        for (number, block) in (0..).zip(&mut *blocks) {
            *block = Block {
                newer: unused,
                ..Block::default()
            };
            unused = number;
        }
        Self {
            blocks,
            buckets: [Bucket::EMPTY; LEVELS],
            occupied: [0; LEVELS / 64],
            unused,
            near: NONE,
        }
    }

    /// Lists `unit` last under `worth`: in its bucket's end, and in what it says of itself. What was written of
    /// it before is stale.
    #[inline]
    pub fn push(&mut self, worth: Worth, unit: u32, units: &mut [Unit]) {
        let tag = units[unit as usize].list(worth);
        let level = usize::from(worth.0);
        if usize::from(self.buckets[level].end) == ENTRIES {
            self.extend(level, units);
        }
        let Bucket { newest, end, .. } = self.buckets[level];
        let block = &mut self.blocks[newest as usize];
        block.units[usize::from(end)] = unit;
        block.tags[usize::from(end)] = tag;
        self.buckets[level].end = end + 1;
    }

    /// The least worth that a unit is listed under, and the one that was listed last under it, or first.
    #[inline]
    pub fn least(&mut self, newest_first: bool, units: &[Unit]) -> Option<(Worth, u32)> {
        loop {
            let word = self.occupied.iter().position(|&word| word != 0)?;
            let level = word * 64 + self.occupied[word].trailing_zeros() as usize;
            let worth = Worth(level as u8);
            let found = match newest_first {
                true => self.newest(worth, units),
                false => self.oldest(worth, units),
            };
            if let Some(unit) = found {
                return Some((worth, unit));
            }
        }
    }

    /// The unit that was listed last under `worth`. Newer entries are dropped: they are stale.
    #[inline]
    fn newest(&mut self, worth: Worth, units: &[Unit]) -> Option<u32> {
        let level = usize::from(worth.0);
        loop {
            let bucket = self.buckets[level];
            if bucket.newest == NONE {
                return None;
            }
            self.bring(self.blocks[bucket.newest as usize].older, units);
            let block = &self.blocks[bucket.newest as usize];
            let mut entries = bucket.range(bucket.newest).rev();
            if let Some(at) = entries.find(|&at| block.is_live(at, level, units)) {
                self.buckets[level].end = at as u8 + 1;
                return Some(block.units[at]);
            }
            self.buckets[level].newest = block.older;
            self.buckets[level].end = ENTRIES as u8;
            self.drop_block(level, bucket.newest);
        }
    }

    /// The unit that was listed first under `worth`. Older entries are dropped: they are stale.
    #[inline]
    pub fn oldest(&mut self, worth: Worth, units: &[Unit]) -> Option<u32> {
        let level = usize::from(worth.0);
        loop {
            let bucket = self.buckets[level];
            if bucket.oldest == NONE {
                return None;
            }
            self.bring(self.blocks[bucket.oldest as usize].newer, units);
            let block = &self.blocks[bucket.oldest as usize];
            let mut entries = bucket.range(bucket.oldest);
            if let Some(at) = entries.find(|&at| block.is_live(at, level, units)) {
                self.buckets[level].first = at as u8;
                return Some(block.units[at]);
            }
            self.buckets[level].oldest = block.newer;
            self.buckets[level].first = 0;
            self.drop_block(level, bucket.oldest);
        }
    }

    /// Asks for what is known of a block's units, all at once: its turn comes soon.
    #[inline]
    fn bring(&mut self, block: u32, units: &[Unit]) {
        if self.near == block {
            return;
        }
        self.near = block;
        if let Some(block) = self.blocks.get(block as usize) {
            let near = |near, &unit| near ^ units[unit as usize].slot;
            core::hint::black_box(block.units.iter().fold(0, near));
        }
    }

    /// Block `block`, at one end of the bucket of `level`, isn't used any more.
    fn drop_block(&mut self, level: usize, block: u32) {
        let Block { older, newer, .. } = self.blocks[block as usize];
        if let Some(older) = self.blocks.get_mut(older as usize) {
            older.newer = NONE;
        }
        if let Some(newer) = self.blocks.get_mut(newer as usize) {
            newer.older = NONE;
        }
        if older == NONE && newer == NONE {
            self.buckets[level] = Bucket::EMPTY;
            self.occupied[level / 64] &= !(1 << (level % 64));
        }
        self.blocks[block as usize].newer = self.unused;
        self.unused = block;
    }

    /// Makes room for an entry of level `level`.
    #[cold]
    fn extend(&mut self, level: usize, units: &[Unit]) {
        if self.unused == NONE {
            self.drop_stale(units);
            if usize::from(self.buckets[level].end) < ENTRIES {
                return;
            }
        }
        let block = self.unused;
        let bucket = &mut self.buckets[level];
        let older = bucket.newest;
        (bucket.newest, bucket.end) = (block, 0);
        match self.blocks.get_mut(older as usize) {
            Some(older) => older.newer = block,
            None => (bucket.oldest, bucket.first) = (block, 0),
        }
        let begun = &mut self.blocks[block as usize];
        self.unused = begun.newer;
        (begun.older, begun.newer) = (older, NONE);
        self.occupied[level / 64] |= 1 << (level % 64);
    }

    /// Drops stale entries from all buckets.
    fn drop_stale(&mut self, units: &[Unit]) {
        for level in 0..LEVELS {
            if self.buckets[level].newest != NONE {
                self.drop_stale_of(level, units);
            }
        }
    }

    /// [`Block::live`] of a block, if there is one.
    #[inline]
    fn live(&self, block: u32, level: usize, units: &[Unit]) -> u16 {
        let block = self.blocks.get(block as usize);
        block.map_or(0, |block| block.live(level, units))
    }

    fn drop_stale_of(&mut self, level: usize, units: &[Unit]) {
        let bucket = self.buckets[level];
        let (mut to, mut end) = (bucket.oldest, 0);
        let mut from = bucket.oldest;
        let mut live = self.live(from, level, units);
        while from != NONE {
            let block = self.blocks[from as usize];
            // One block ahead of its turn: what is known of its units is far away.
            let live_next = self.live(block.newer, level, units);
            for at in bucket.range(from).filter(|at| live >> at & 1 != 0) {
                if end == ENTRIES {
                    (to, end) = (self.blocks[to as usize].newer, 0);
                }
                let kept = &mut self.blocks[to as usize];
                kept.units[end] = block.units[at];
                kept.tags[end] = block.tags[at];
                end += 1;
            }
            (from, live) = (block.newer, live_next);
        }
        self.buckets[level].first = 0;
        while self.buckets[level].newest != to {
            let last = self.buckets[level].newest;
            self.buckets[level].newest = self.blocks[last as usize].older;
            self.drop_block(level, last);
        }
        self.buckets[level].end = end as u8;
        if end == 0 {
            self.drop_block(level, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u32) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 32) as u32 % n
        }
    }

    /// What is listed: under which worth (0: not at all), and when.
    type Model = [(u8, u32); 200];

    fn least_of(model: &Model, newest_first: bool) -> Option<(Worth, u32)> {
        let listed = (0..).zip(model).filter(|(_, (worth, _))| *worth > 0);
        let order = |(_, (worth, time)): &(u32, &(u8, u32))| match newest_first {
            true => (*worth, u32::MAX - time),
            false => (*worth, *time),
        };
        let (unit, (worth, _)) = listed.min_by_key(order)?;
        Some((Worth(*worth), unit))
    }

    /// Lists, moves and takes at random, in as little memory as there may be.
    fn is_an_order(newest_first: bool, levels: u32, seed: u64) {
        const SLOTS: u32 = 50;
        let mut random = Random(seed);
        let mut blocks = [Block::default(); blocks(SLOTS as usize)];
        // No more than there have to be.
        let blocks = &mut blocks[..(levels + (2 * SLOTS).div_ceil(ENTRIES as u32)) as usize];
        let mut buckets = Buckets::new(blocks);
        let mut units = [Unit::default(); 200];
        let mut model: Model = [(0, 0); 200];
        let (mut listed, mut taken) = (0, 0);
        for time in 0..20_000 {
            let unit = random.below(200);
            let worth = Worth(1 + random.below(levels) as u8);
            let is_listed = units[unit as usize].listed != 0;
            if is_listed || listed < SLOTS {
                listed += u32::from(!is_listed);
                model[unit as usize] = (worth.0, time);
                buckets.push(worth, unit, &mut units);
            }
            if random.below(4) == 0 {
                let least = buckets.least(newest_first, &units);
                assert_eq!(least, least_of(&model, newest_first));
                if let Some((_, unit)) = least {
                    model[unit as usize] = (0, 0);
                    units[unit as usize].evict();
                    (listed, taken) = (listed - 1, taken + 1);
                }
            }
        }
        assert!(taken > 1000, "{taken} taken");
    }

    #[test]
    fn lowest_worth_first_then_by_time() {
        for seed in 1..20 {
            for newest_first in [true, false] {
                is_an_order(newest_first, 1, seed);
                is_an_order(newest_first, 7, seed);
                is_an_order(newest_first, 255, seed);
            }
        }
    }

    #[test]
    fn what_is_stale_makes_room() {
        let mut blocks = [Block::default(); blocks(3)];
        let mut buckets = Buckets::new(&mut blocks);
        let mut units = [Unit::default(); 3];
        buckets.push(Worth(9), 2, &mut units);
        for round in 0..10_000u32 {
            for unit in 0..2 {
                let worth = Worth((10 + (round + unit) % 240) as u8);
                buckets.push(worth, unit, &mut units);
            }
        }
        assert_eq!(buckets.least(true, &units), Some((Worth(9), 2)));
        units[2].evict();
        let levels = [0, 1].map(|unit| units[unit].listed);
        let (worth, unit) = buckets.least(true, &units).unwrap();
        assert_eq!(worth.0, *levels.iter().min().unwrap());
        assert_eq!(worth.0, levels[unit as usize]);
    }
}
