//! How well looks ahead name the units that matter most, of models that use all of them.

use leanstream_core::trace::{RANKS_ADDED, RANKS_CHOICE, STAGES_MAX};

/// Shares of a layer's units that are kept, in 256ths: 30% and 50%.
pub const SHARES: [u16; 2] = [77, 128];

/// Units that are named for each kept one, in quarters.
pub const NAMED: [u16; 2] = [4, 5];

/// Layers that are counted at most: no model has as many, and a damaged header can say anything.
pub const LAYERS_MAX: u32 = 1024;

/// Who names units: the stages, and the exact gate behind them.
const NAMERS: usize = STAGES_MAX as usize + 1;

/// Kept units and those of them that were named.
type Counts = [[[u64; 2]; NAMED.len()]; SHARES.len()];

/// Of the units that are kept of a layer, the share that was named beforehand.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Kept {
    /// The stage; `None`: the exact gate, when its layer's turn has come.
    pub stage: Option<u8>,
    /// Share of the layer's units that are kept.
    pub share: f64,
    /// Units named for each kept one.
    pub named: f64,
    /// The share of those kept by the exact gate (what `--keep` goes by): on average, and in the layer with the
    /// least.
    pub chosen: [f64; 2],
    /// The same of those that add most to the layer's output; not of layers that were not computed whole.
    pub added: Option<[f64; 2]>,
}

/// Counts ranks as they come.
#[derive(Clone, Debug)]
pub struct Tally {
    layers: usize,
    units: usize,
    /// The running token's ranks by namer `(layers, NAMERS, units)`; valid where `have` says so.
    ranks: Vec<u8>,
    have: Vec<[bool; NAMERS]>,
    /// `(layers, NAMERS)`, against the choice and against what was added.
    counts: Vec<[Counts; 2]>,
}

impl Tally {
    /// Nothing counted, for so many layers of so many units.
    pub fn new(layers: u32, units: u32) -> Self {
        let (layers, units) = (layers as usize, units as usize);
        Self {
            layers,
            units,
            ranks: vec![0; layers * NAMERS * units],
            have: vec![[false; NAMERS]; layers],
            counts: vec![[Counts::default(); 2]; layers * NAMERS],
        }
    }

    /// A token begins.
    pub fn token(&mut self) {
        self.have.fill([false; NAMERS]);
    }

    /// Takes in ranks of a layer, by whom.
    pub fn ranks(&mut self, layer: u32, of: u8, ranks: &[u8]) {
        let layer = layer as usize;
        if of == RANKS_ADDED {
            return self.count(layer, 1, ranks);
        }
        let namer = usize::from(of);
        self.have[layer][namer] = true;
        let at = (layer * NAMERS + namer) * self.units;
        self.ranks[at..at + self.units].copy_from_slice(ranks);
        if of == RANKS_CHOICE {
            self.count(layer, 0, ranks);
        }
    }

    /// Compares what was named with what `truth` keeps.
    fn count(&mut self, layer: usize, against: usize, truth: &[u8]) {
        for namer in 0..NAMERS {
            if !self.have[layer][namer] {
                continue;
            }
            let row = layer * NAMERS + namer;
            let named = &self.ranks[row * self.units..][..self.units];
            let counts = &mut self.counts[row][against];
            for (share, counts) in SHARES.into_iter().zip(counts) {
                for (quarters, counts) in NAMED.into_iter().zip(counts) {
                    let most = share * quarters / 4;
                    for (truth, named) in truth.iter().zip(named) {
                        let kept = u16::from(*truth) < share;
                        counts[0] += u64::from(kept);
                        counts[1] += u64::from(kept && u16::from(*named) < most);
                    }
                }
            }
        }
    }

    /// What came of it: by stage, share and number named; the exact gate comes last.
    pub fn kept(&self) -> Vec<Kept> {
        let mut all = Vec::new();
        for namer in 0..NAMERS {
            for (s, share) in SHARES.into_iter().enumerate() {
                for (n, quarters) in NAMED.into_iter().enumerate() {
                    let recall = |against: usize| {
                        let counts = (0..self.layers)
                            .map(|layer| self.counts[layer * NAMERS + namer][against][s][n])
                            .filter(|[kept, _]| *kept > 0);
                        let least = counts
                            .clone()
                            .map(|[kept, named]| named as f64 / kept as f64)
                            .reduce(f64::min)?;
                        let sum = counts.fold([0; 2], |a, b| [a[0] + b[0], a[1] + b[1]]);
                        Some([sum[1] as f64 / sum[0] as f64, least])
                    };
                    if let Some(chosen) = recall(0) {
                        all.push(Kept {
                            stage: (namer + 1 < NAMERS).then_some(namer as u8),
                            share: f64::from(share) / 256.0,
                            named: f64::from(quarters) / 4.0,
                            chosen,
                            added: recall(1),
                        });
                    }
                }
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 256 units of one layer: the choice keeps the first ones, a stage is off by a shift, and what was
    /// added by another.
    #[test]
    fn what_was_named_is_compared_with_what_is_kept() {
        let shifted = |by: u8| {
            (0..=255u8)
                .map(|unit| unit.wrapping_add(by))
                .collect::<Vec<_>>()
        };
        let mut tally = Tally::new(2, 256);
        assert!(tally.kept().is_empty());
        tally.token();
        tally.ranks(1, 2, &shifted(10));
        tally.ranks(1, RANKS_CHOICE, &shifted(0));
        tally.ranks(1, RANKS_ADDED, &shifted(20));
        // The stage said nothing of this token.
        tally.token();
        tally.ranks(1, RANKS_CHOICE, &shifted(0));
        let kept = tally.kept();
        assert_eq!(kept.len(), 2 * SHARES.len() * NAMED.len());
        let first = kept[0];
        assert_eq!((first.stage, first.named), (Some(2), 1.0));
        // Units 0..77 are kept. The stage names 246..256 and 0..67.
        assert_eq!(first.chosen, [67.0 / 77.0; 2]);
        // 236..256 and 0..57 added most: the stage has all but ten.
        assert_eq!(first.added, Some([67.0 / 77.0; 2]));
        assert_eq!(kept[1].named, 1.25);
        assert_eq!(kept[1].chosen, [1.0; 2]);
        let gate = kept[4];
        assert_eq!((gate.stage, gate.chosen), (None, [1.0; 2]));
        assert_eq!(gate.added, Some([57.0 / 77.0; 2]));
    }
}
