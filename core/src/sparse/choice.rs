//! What a layer chose, and how it is cut into groups.

use super::bits;
use super::retain::{Cause, Retain};
use super::store::Store;
use super::tables::{Bank, Group, Item, Place};
use crate::stream::policy::Worth;
use crate::units::SlotId;

/// Groups by importance that a layer is cut into.
pub const STAGES: u32 = 8;

/// Units of a group, at most, so that few slots are enough.
pub const GROUP_MAX: u32 = 256;

/// One unit that a layer uses.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Chosen {
    /// Which unit of the bank; strictly increasing over a choice.
    pub index: u32,
    /// Expected size of what it adds to the layer's output; not negative.
    pub importance: f32,
    /// Share of the pass's tokens that use it (1 when one token is decoded).
    pub share: f32,
}

/// How a choice is cut into groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grouping {
    /// By importance into [`STAGES`] groups (more, when they would be larger than [`GROUP_MAX`]),
    /// which may be computed in any order.
    Importance,
    /// In the order of the bank, in runs, computed in that order: prompt batches.
    Sequence,
}

impl Grouping {
    /// Units of a run.
    pub const RUN: u32 = 64;
}

/// Which chosen units are used.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Select {
    /// All.
    All,
    /// The resident ones, and of the others those among this share of the most important.
    Top(f32),
}

/// What a layer chose.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'c> {
    /// Which bank.
    pub bank: u32,
    /// The units.
    pub chosen: &'c [Chosen],
    /// The gate's output by unit of the bank, in units of its root mean square, where known.
    pub scores: Option<&'c [f32]>,
    /// How to cut it.
    pub grouping: Grouping,
    /// Which to use.
    pub select: Select,
}

impl<R: Retain> Store<'_, R> {
    /// A layer has chosen. Its groups follow by [`poll_group`](Self::poll_group).
    ///
    /// # Panics
    /// While another layer runs.
    pub fn choose(&mut self, choice: Choice<'_>) {
        assert!(self.bank.is_none(), "one layer at a time");
        let Bank {
            first, unit_bytes, ..
        } = self.banks[choice.bank as usize];
        self.bank = Some(choice.bank);
        self.grouping = choice.grouping;
        if self.ahead_bank == choice.bank {
            self.forget_ahead();
        }
        self.counters.chosen += choice.chosen.len() as u64;
        self.bring(choice.bank);
        self.sort(&choice);
        self.select(first, choice.select);
        let size = match choice.grouping {
            Grouping::Importance => self.count.div_ceil(STAGES).clamp(1, GROUP_MAX),
            Grouping::Sequence => Grouping::RUN,
        };
        self.group_size = size;
        self.group_count = self.count.div_ceil(size);
        self.ended = 0;
        self.cursor = 0;
        for group in 0..self.group_count {
            self.groups[group as usize] = Group {
                first: group * size,
                end: ((group + 1) * size).min(self.count),
                ..Group::default()
            };
        }
        // So many may hold their slots that one group's missing units find room beside them and beside
        // what is on its way.
        let mut pins = (self.vacant.len() as u32).saturating_sub(size + self.coming);
        for group in 0..self.group_count {
            let Group {
                first: from, end, ..
            } = self.groups[group as usize];
            let mut missing = 0;
            for item in from..end {
                let unit = first + self.items[item as usize].index;
                let mut place = self.units[unit as usize].place();
                if place == Place::Resident && pins == 0 {
                    self.unlist_unit(unit);
                    let slot = self.evict(unit);
                    self.vacate(slot);
                    place = Place::Absent;
                }
                let entry = &mut self.units[unit as usize];
                entry.choose(group as u16);
                if place == Place::Resident {
                    self.hold(unit);
                    pins -= 1;
                } else {
                    missing += 1;
                    bits::put(self.absent, unit, place == Place::Absent);
                    self.counters.late += u64::from(place == Place::Filling);
                }
            }
            self.groups[group as usize].missing = missing;
            self.ready += u32::from(missing == 0);
            self.counters.hits += u64::from(end - from - missing);
            self.counters.bytes_missed += u64::from(missing) * u64::from(unit_bytes);
        }
        self.pass_by(choice.bank, choice.scores);
    }

    /// Puts the choice into `items`, most important first where groups go by it.
    fn sort(&mut self, choice: &Choice<'_>) {
        let Choice { chosen, bank, .. } = *choice;
        let units = self.banks[bank as usize].count;
        assert!(chosen.len() <= self.items.len(), "room for the choice");
        self.count = chosen.len() as u32;
        let mut before = None;
        for chosen in chosen {
            assert!(
                before < Some(chosen.index) && chosen.index < units,
                "units are chosen in order, each once"
            );
            before = Some(chosen.index);
        }
        let item = |chosen: &Chosen| Item {
            index: chosen.index,
            slot: SlotId::NONE,
            importance: chosen.importance,
            share: chosen.share,
        };
        if choice.grouping == Grouping::Sequence {
            for (place, chosen) in self.items.iter_mut().zip(chosen) {
                *place = item(chosen);
            }
            return;
        }
        // A counting sort by eighths of an octave below the largest: exact enough for an order, the
        // same on every machine, and linear. The bits of floats that aren't negative are in order.
        let key = |importance: f32| importance.max(0.0).to_bits() >> 20;
        let most = chosen.iter().map(|c| key(c.importance)).max().unwrap_or(0);
        let place = |importance: f32| (most - key(importance)).min(255) as usize;
        let mut starts = [0u32; 257];
        for chosen in chosen {
            starts[place(chosen.importance) + 1] += 1;
        }
        for bucket in 0..256 {
            starts[bucket + 1] += starts[bucket];
        }
        for chosen in chosen {
            let start = &mut starts[place(chosen.importance)];
            self.items[*start as usize] = item(chosen);
            *start += 1;
        }
    }

    /// Leaves out what isn't to be used.
    fn select(&mut self, first: u32, select: Select) {
        let Select::Top(share) = select else { return };
        let top = (self.count as f32 * share.clamp(0.0, 1.0)) as u32;
        let mut kept = 0;
        for item in 0..self.count {
            let entry = self.items[item as usize];
            let place = self.units[(first + entry.index) as usize].place();
            if item < top || place != Place::Absent {
                self.sorted[kept as usize] = entry;
                kept += 1;
            }
        }
        self.counters.skipped += u64::from(self.count - kept);
        self.items[..kept as usize].copy_from_slice(&self.sorted[..kept as usize]);
        self.count = kept;
    }

    /// Ranks the units of a bank that its layer did not choose.
    fn pass_by(&mut self, bank: u32, scores: Option<&[f32]>) {
        let all_fit = self.vacant.len() >= self.units.len();
        let rerank = self.rules.reranks && !all_fit;
        let Bank {
            first,
            count,
            unit_bytes,
            ..
        } = self.banks[bank as usize];
        // Units whose use isn't counted are neither foreseen nor ranked by anything but their use.
        let end = (first + count).min(self.priors.len() as u32);
        let mut moved = [(0u32, Worth::EMPTY); 64];
        let mut from = first;
        while from < end {
            let to = (from / 64 * 64 + 64).min(end);
            let word = from as usize / 64;
            let mask = (u64::MAX << (from % 64)) & (u64::MAX >> (63 - (to - 1) % 64));
            let loose = self.loose[word] & mask;
            let in_vain = loose & self.ahead[word];
            self.ahead[word] &= !in_vain;
            self.counters.bytes_redundant +=
                u64::from(in_vain.count_ones()) * u64::from(unit_bytes);
            let asked = if rerank { loose } else { in_vain };
            self.pass_word(word as u32 * 64, asked, first, scores, &mut moved);
            from = to;
        }
    }

    /// Ranks those units from `base` on whose bits are set.
    #[inline]
    fn pass_word(
        &mut self,
        base: u32,
        asked: u64,
        first: u32,
        scores: Option<&[f32]>,
        moved: &mut [(u32, Worth); 64],
    ) {
        // Which of them move is found without branches: it can't be predicted.
        let (edge, slack) = (self.edge, self.rules.slack);
        let mut moves = 0;
        let mut left = asked;
        while left != 0 {
            let unit = base + left.trailing_zeros();
            left &= left - 1;
            let score = scores.map_or(f32::NAN, |scores| scores[(unit - first) as usize]);
            let worth = self.worth(unit, score, Cause::Passed);
            moved[moves % 64] = (unit, worth);
            moves += usize::from(self.units[unit as usize].rank(worth, slack, edge));
        }
        for &(unit, worth) in &moved[..moves] {
            self.counters.moved += 1;
            self.move_unit(unit, worth);
        }
    }
}
