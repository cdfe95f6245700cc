//! A recorded run in the shape of a larger model: which units its layers use, how much they matter
//! and what is foreseen of them come from a trace, while reads and arithmetic are the model's own. For
//! benchmarks of sizes that have no real weights at hand; what the model says means nothing.
//!
//! The trace's units are in pack order, the most often used first, and each stands for as many
//! neighbouring units of the model: unit `u` is copy `u % copies` of neuron `u / copies`. Every copy
//! reads the trace at another time, so copies of a neuron are as often active as it, and one by one.
//! All layers of a token have the same times, so that what a stage foresaw goes with what was used.
//! Layers beyond the trace's begin again at its second one (the first is like no other, and nothing
//! foresees it), at other times.
//!
//! The first half of the trace is all that is known beforehand, in place of a calibration; the run
//! goes through the second half, and through it again when it ends.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use leanstream_core::sparse::Chosen;
use leanstream_core::sparse::retain::Refine;
use leanstream_core::sparse::tables::Foreseen;
use leanstream_core::trace::{HAS_IMPORTANCE, HAS_SCORES, Record, SCORE_SCALE, Trace};

use crate::error::Error;

/// Units of a model that one recorded unit can stand for.
pub const COPIES_MAX: u32 = 64;

/// Recorded looks ahead, by how many eighths of the layer before were computed.
const STAGES: [u32; 4] = [0, 1, 2, 4];

/// A byte tells what a neuron did: whether it was used, and in the bits below which stages named it.
const USED: u8 = 1 << STAGES.len();

/// A trace as a larger model uses it.
pub struct Shape {
    name: String,
    copies: usize,
    /// Of the trace.
    layers: usize,
    units: usize,
    /// Of the half that is known beforehand, and of the one that is played.
    known: usize,
    tokens: usize,
    /// What each neuron did `(tokens, layers, units)`.
    marks: Vec<u8>,
    /// How much it mattered; valid where it was used.
    levels: Vec<u8>,
    /// Its gate's pre-activation.
    scores: Vec<i8>,
    /// Importance by level.
    sizes: Vec<f32>,
    /// Of the other half `(layers, units)`: share of tokens that used a neuron, and its mean
    /// importance in them.
    priors: Vec<f32>,
    means: Vec<f32>,
    /// What [`Refine`] makes of being named by a stage.
    trusts: [f32; STAGES.len()],
    /// Tokens begun.
    begun: AtomicU32,
    /// The stage of the look that is under way.
    stage: AtomicU32,
}

/// Where a unit's doings are recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Recorded {
    /// The trace's token.
    pub token: u32,
    /// Its layer.
    pub layer: u32,
    /// Its unit.
    pub unit: u32,
}

impl Shape {
    /// Reads the trace at `path` for a model of `ff` units a layer. Holds the whole file meanwhile.
    ///
    /// # Errors
    /// [`Error::Io`] if it can't be read, [`Error::Model`] if it is no sound trace, [`Error::Usage`] if
    /// its units can't stand for the model's.
    pub fn load(path: &Path, ff: u32) -> Result<Self, Error> {
        let file = fs::read(path).map_err(|source| Error::io(path, "read the trace", source))?;
        let trace = Trace::parse(&file).map_err(|error| Error::model(path, error))?;
        let header = trace.header();
        let refuse = |why: String| Err(Error::Usage(format!("--trace {}: {why}", path.display())));
        let copies = ff / header.units;
        if !ff.is_multiple_of(header.units) || !(1..=COPIES_MAX).contains(&copies) {
            return refuse(format!(
                "its layers have {} units, which can't stand for {ff}: the model's must be 1 to {COPIES_MAX} times as many",
                header.units
            ));
        }
        // With both of them the tables are smaller than the file.
        if header.flags & (HAS_IMPORTANCE | HAS_SCORES) != HAS_IMPORTANCE | HAS_SCORES {
            return refuse(
                "it has no importances or no scores; record it with leanstream trace".into(),
            );
        }
        if header.tokens < 2 {
            return refuse("one half is for statistics and one to run; it needs two tokens".into());
        }
        Ok(Self::of(&trace, copies as usize))
    }

    fn of(trace: &Trace<'_>, copies: usize) -> Self {
        let header = trace.header();
        let (layers, units) = (header.layers as usize, header.units as usize);
        let known = header.tokens as usize / 2;
        let tokens = header.tokens as usize - known;
        let row = layers * units;
        let mut marks = vec![0; (tokens + 1) * row];
        let mut levels = vec![0; tokens * row];
        let mut scores = Vec::with_capacity(tokens * row);
        let sizes: Vec<f32> = (0..=255u8)
            .map(|q| match q {
                0 => 0.0,
                q => ((f32::from(q) - 100.0) / 12.0).exp2(),
            })
            .collect();
        let mut counts = vec![0u32; row];
        let mut sums = vec![0.0f32; row];
        let (mut named, mut right) = ([0u64; STAGES.len()], [0u64; STAGES.len()]);
        // Stages that have named units of each layer in this token, a bit each.
        let mut said = vec![0u8; layers];
        let mut token = 0;
        for record in trace.records() {
            // The tokens of the first half share the room behind those of the second.
            let at = |layer: u32| {
                let token: usize = token;
                let place = (token - 1).checked_sub(known).unwrap_or(tokens);
                place * row + layer as usize * units
            };
            match record {
                Record::Token { .. } => {
                    token += 1;
                    said.fill(0);
                    marks[tokens * row..].fill(0);
                }
                Record::Stage {
                    layer,
                    stage,
                    predicted,
                } => {
                    // Said twice, the first counts.
                    let stage = usize::from(stage);
                    if stage < STAGES.len() && said[layer as usize] >> stage & 1 == 0 {
                        said[layer as usize] |= 1 << stage;
                        let marks = &mut marks[at(layer)..][..units];
                        predicted
                            .iter()
                            .for_each(|unit| marks[unit as usize] |= 1 << stage);
                    }
                }
                Record::Layer {
                    layer,
                    active,
                    importance,
                    scores: recorded,
                } => {
                    let at = at(layer);
                    let marks = &mut marks[at..][..units];
                    // A look that was not had saw what the one before it saw.
                    for stage in 1..STAGES.len() {
                        if said[layer as usize] >> stage & 1 == 0 {
                            for mark in &mut *marks {
                                *mark |= (*mark >> (stage - 1) & 1) << stage;
                            }
                        }
                    }
                    for (unit, &level) in active.iter().zip(importance) {
                        marks[unit as usize] |= USED;
                        if token <= known {
                            let place = layer as usize * units + unit as usize;
                            counts[place] += 1;
                            sums[place] += sizes[usize::from(level)];
                        } else {
                            levels[at + unit as usize] = level;
                        }
                    }
                    if token > known {
                        scores.extend(recorded.iter().map(|&score| score as i8));
                        continue;
                    }
                    for stage in 0..STAGES.len() {
                        let by = |wanted: u8| {
                            marks.iter().filter(|m| **m & wanted == wanted).count() as u64
                        };
                        named[stage] += by(1 << stage);
                        right[stage] += by(1 << stage | USED);
                    }
                }
                Record::Read { .. } | Record::Ranks { .. } => {}
            }
        }
        marks.truncate(tokens * row);
        marks.shrink_to_fit();
        let mut means = Vec::with_capacity(row);
        for (sums, counts) in sums.chunks_exact(units).zip(counts.chunks_exact(units)) {
            // Of a neuron that was never used nothing is known but its layer.
            let all = sums.iter().sum::<f32>() / counts.iter().sum::<u32>().max(1) as f32;
            let mean = |(sum, count): (&f32, &u32)| match count {
                0 => all,
                count => sum / *count as f32,
            };
            means.extend(sums.iter().zip(counts).map(mean));
        }
        Self {
            name: header.name().to_owned(),
            copies,
            layers,
            units,
            known,
            tokens,
            marks,
            levels,
            scores,
            sizes,
            priors: counts.iter().map(|&n| n as f32 / known as f32).collect(),
            means,
            trusts: std::array::from_fn(|stage| {
                Refine::score_of(right[stage] as f32 / named[stage].max(1) as f32)
            }),
            begun: AtomicU32::new(0),
            stage: AtomicU32::new(0),
        }
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        let floats = self.sizes.capacity() + self.priors.capacity() + self.means.capacity();
        (self.marks.capacity() + self.levels.capacity() + self.scores.capacity() + floats * 4)
            as u64
    }

    /// Name of the model that was recorded.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Units of the model that a recorded one stands for.
    pub fn copies(&self) -> u32 {
        self.copies as u32
    }

    /// Tokens of the half that is played, before it begins again.
    pub fn tokens(&self) -> u32 {
        self.tokens as u32
    }

    /// Share of the first half's tokens that used a unit of the model's `layer`.
    pub fn prior(&self, layer: u32, unit: u32) -> f32 {
        self.priors[self.neuron(layer, unit)]
    }

    /// Its mean importance in those tokens.
    pub fn mean(&self, layer: u32, unit: u32) -> f32 {
        self.means[self.neuron(layer, unit)]
    }

    fn neuron(&self, layer: u32, unit: u32) -> usize {
        self.layer(layer).0 * self.units + unit as usize / self.copies
    }

    /// Where the trace has what `unit` of the model's `layer` does in the `token`-th token of a run.
    pub fn recorded(&self, token: u32, layer: u32, unit: u32) -> Recorded {
        let (layer, round) = self.layer(layer);
        let copy = unit as usize % self.copies;
        Recorded {
            token: (self.known + self.time(token, round, copy)) as u32,
            layer: layer as u32,
            unit: unit / self.copies as u32,
        }
    }

    /// The trace's layer for the model's, and how often the trace's were gone through before it.
    fn layer(&self, layer: u32) -> (usize, usize) {
        match (layer as usize).checked_sub(self.layers) {
            None => (layer as usize, 0),
            Some(beyond) => {
                let others = self.layers - 1;
                match others {
                    0 => (0, beyond + 1),
                    others => (1 + beyond % others, 1 + beyond / others),
                }
            }
        }
    }

    /// Which token of the played half a copy reads.
    fn time(&self, token: u32, round: usize, copy: usize) -> usize {
        let apart = (self.tokens / self.copies).max(1);
        (token as usize + copy * apart + round * (apart / 2 + 1)) % self.tokens
    }

    /// Where each copy's row of the tables begins, for the running token.
    fn rows(&self, layer: u32) -> [usize; COPIES_MAX as usize] {
        let token = self.begun.load(Ordering::Relaxed) - 1;
        let (layer, round) = self.layer(layer);
        let mut rows = [0; COPIES_MAX as usize];
        for (copy, row) in rows[..self.copies].iter_mut().enumerate() {
            *row = (self.time(token, round, copy) * self.layers + layer) * self.units;
        }
        rows
    }

    /// The units that `layer` uses, in order, into `chosen`, and every unit's score into `scores`, where
    /// somebody wants it; how many units there are. The first layer begins a token.
    pub fn choose(&self, layer: u32, chosen: &mut [Chosen], scores: Option<&mut [f32]>) -> usize {
        if layer == 0 {
            self.begun.fetch_add(1, Ordering::Relaxed);
        }
        let rows = self.rows(layer);
        let rows = &rows[..self.copies];
        let mut count = 0;
        for unit in 0..self.units {
            for (copy, row) in rows.iter().enumerate() {
                if self.marks[row + unit] & USED != 0 {
                    chosen[count] = Chosen {
                        index: (unit * self.copies + copy) as u32,
                        importance: self.sizes[usize::from(self.levels[row + unit])],
                        share: 1.0,
                    };
                    count += 1;
                }
            }
        }
        if let Some(scores) = scores {
            for (unit, scores) in scores.chunks_exact_mut(self.copies).enumerate() {
                for (score, row) in scores.iter_mut().zip(rows) {
                    *score = f32::from(self.scores[row + unit]) * (1.0 / SCORE_SCALE);
                }
            }
        }
        count
    }

    /// A look ahead begins, with `computed` of the running layer's `chosen` units.
    pub fn look(&self, computed: usize, chosen: usize) {
        let eighths = (8 * computed + chosen / 2) / chosen.max(1);
        let passed = STAGES.iter().filter(|&&stage| stage as usize <= eighths);
        self.stage
            .store(passed.count() as u32 - 1, Ordering::Relaxed);
    }

    /// What that look foresees of `layer`, in the order of flash, since the trace doesn't say which is
    /// likeliest; how many units there are, and how many of them are likely: recorded looks name a
    /// quarter more.
    pub fn foresee(&self, layer: u32, foreseen: &mut [Foreseen]) -> (usize, usize) {
        let stage = self.stage.load(Ordering::Relaxed) as usize;
        let rows = self.rows(layer);
        let mut count = 0;
        for unit in 0..self.units {
            for (copy, row) in rows[..self.copies].iter().enumerate() {
                if self.marks[row + unit] >> stage & 1 == 1 {
                    foreseen[count] = Foreseen {
                        index: (unit * self.copies + copy) as u32,
                        score: self.trusts[stage],
                    };
                    count += 1;
                }
            }
        }
        (count, (4 * count).div_ceil(5))
    }
}
