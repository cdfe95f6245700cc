//! A recorded run as replay wants it: for each token and layer the units that were used.

use std::fs;
use std::path::Path;

use leanstream_core::trace::{HAS_RANKS, Importances, Record, SCORE_SCALE, Trace};

use super::kept::{Kept, LAYERS_MAX, Tally};
use crate::error::Error;

/// Lists of units, one for each token and layer.
#[derive(Clone, Debug, Default)]
struct Lists {
    /// Where each begins; one more at the end.
    starts: Vec<usize>,
    units: Vec<u32>,
}

impl Lists {
    fn new() -> Self {
        Self {
            starts: vec![0],
            units: Vec::new(),
        }
    }

    /// Ends the running list.
    fn end(&mut self) {
        self.starts.push(self.units.len());
    }

    fn get(&self, row: usize) -> &[u32] {
        &self.units[self.starts[row]..self.starts[row + 1]]
    }
}

/// What a stage foresaw.
#[derive(Clone, Debug)]
struct Stage {
    number: u8,
    lists: Lists,
}

/// How much of what was used a stage had foreseen.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Recall {
    /// The stage.
    pub stage: u8,
    /// Share of the used units that it named.
    pub mean: f64,
    /// The same for the layer with the least; layers that it never spoke of are left out.
    pub least: f64,
    /// Units that it named, for each used one.
    pub named: f64,
}

/// A run's sets of units.
#[derive(Clone, Debug)]
pub struct Sets {
    /// Of the model.
    pub name: String,
    /// Tokens.
    pub tokens: u32,
    /// Layers.
    pub layers: u32,
    /// Units a layer.
    pub units: u32,
    /// Bytes of a unit, where the trace says it.
    pub unit_bytes: Option<u32>,
    /// Nanoseconds of computing a layer, where the trace says it.
    pub compute_ns: Option<u32>,
    active: Lists,
    /// One for each active unit; empty where none were recorded.
    importance: Vec<u8>,
    /// One for each token, layer and unit; empty where none were recorded.
    scores: Vec<i8>,
    stages: Vec<Stage>,
    kept: Vec<Kept>,
}

impl Sets {
    /// Reads a trace of either form. Of one that has importances alone, the `keep` most important
    /// share of each layer's chunks is what was used.
    ///
    /// # Errors
    /// [`Error::Io`] if the file can't be read, [`Error::Model`] if it is no sound trace.
    pub fn load(path: &Path, keep: f64) -> Result<Self, Error> {
        let file = fs::read(path).map_err(|source| Error::io(path, "read the trace", source))?;
        Self::parse(&file, path, keep)
    }

    /// The same of the bytes of a trace, which came from `path`.
    ///
    /// # Errors
    /// [`Error::Model`] if it is no sound trace.
    pub fn parse(file: &[u8], path: &Path, keep: f64) -> Result<Self, Error> {
        let sets = if Importances::sniff(file) {
            Importances::parse(file).map(|trace| Self::from_importances(&trace, keep))
        } else {
            Trace::parse(file).map(|trace| Self::from_trace(&trace))
        };
        sets.map_err(|error| Error::model(path, error))
    }

    fn from_trace(trace: &Trace<'_>) -> Self {
        let header = trace.header();
        let mut sets = Self {
            name: header.name().to_owned(),
            tokens: header.tokens,
            layers: header.layers,
            units: header.units,
            unit_bytes: Some(header.unit_bytes),
            compute_ns: Some(header.compute_ns).filter(|&ns| ns > 0),
            active: Lists::new(),
            importance: Vec::new(),
            scores: Vec::new(),
            stages: Vec::new(),
            kept: Vec::new(),
        };
        let ranked = header.flags & HAS_RANKS != 0 && header.layers <= LAYERS_MAX;
        let mut tally = ranked.then(|| Tally::new(header.layers, header.units));
        for record in trace.records() {
            match record {
                Record::Layer {
                    active,
                    importance,
                    scores,
                    ..
                } => {
                    sets.active.units.extend(active.iter());
                    sets.active.end();
                    sets.importance.extend(importance);
                    sets.scores.extend(scores.iter().map(|&byte| byte as i8));
                }
                Record::Stage {
                    layer,
                    stage,
                    predicted,
                } => sets.add_stage(layer, stage, predicted.iter()),
                Record::Token { .. } => tally.iter_mut().for_each(Tally::token),
                Record::Ranks { layer, of, ranks } => {
                    tally
                        .iter_mut()
                        .for_each(|tally| tally.ranks(layer, of, ranks));
                }
                Record::Read { .. } => {}
            }
        }
        sets.kept = tally.map(|tally| tally.kept()).unwrap_or_default();
        let rows = sets.tokens as usize * sets.layers as usize;
        for stage in &mut sets.stages {
            while stage.lists.starts.len() <= rows {
                stage.lists.end();
            }
        }
        sets
    }

    /// Adds what a stage names of a `layer` of the token that runs. Said twice, the first counts.
    fn add_stage(&mut self, layer: u32, stage: u8, units: impl Iterator<Item = u32>) {
        let layers = self.layers as usize;
        let token = (self.active.starts.len() - 1) / layers;
        let row = token * layers + layer as usize;
        let at = match self.stages.iter().position(|known| known.number >= stage) {
            Some(at) if self.stages[at].number == stage => at,
            at => {
                let at = at.unwrap_or(self.stages.len());
                let lists = Lists::new();
                let number = stage;
                self.stages.insert(at, Stage { number, lists });
                at
            }
        };
        let lists = &mut self.stages[at].lists;
        while lists.starts.len() <= row {
            lists.end();
        }
        if lists.starts.len() == row + 1 {
            lists.units.extend(units);
            lists.end();
        }
    }

    fn from_importances(trace: &Importances<'_>, keep: f64) -> Self {
        let kept = ((f64::from(trace.chunks) * keep).round() as usize).min(trace.chunks as usize);
        let mut active = Lists::new();
        let mut importance = Vec::new();
        let mut order: Vec<u32> = Vec::new();
        for token in 0..trace.tokens {
            for layer in 0..trace.layers {
                let levels = trace.layer(token, layer);
                order.clear();
                order.extend(0..trace.chunks);
                order.sort_by_key(|&chunk| std::cmp::Reverse(levels[chunk as usize]));
                order.truncate(kept);
                order.sort_unstable();
                importance.extend(order.iter().map(|&chunk| levels[chunk as usize]));
                active.units.extend(&order);
                active.end();
            }
        }
        Self {
            name: format!("chunks of {} neurons", trace.chunk_neurons),
            tokens: trace.tokens,
            layers: trace.layers,
            units: trace.chunks,
            unit_bytes: None,
            compute_ns: None,
            active,
            importance,
            scores: Vec::new(),
            stages: Vec::new(),
            kept: Vec::new(),
        }
    }

    fn row(&self, token: u32, layer: u32) -> usize {
        assert!(token < self.tokens && layer < self.layers);
        token as usize * self.layers as usize + layer as usize
    }

    /// Units that a layer used, lowest first.
    pub fn active(&self, token: u32, layer: u32) -> &[u32] {
        self.active.get(self.row(token, layer))
    }

    /// Their importance, in the same order; 1 where none was recorded.
    pub fn importance(&self, token: u32, layer: u32) -> impl Iterator<Item = f32> + '_ {
        let row = self.row(token, layer);
        let (from, to) = (self.active.starts[row], self.active.starts[row + 1]);
        (from..to).map(|at| match self.importance.get(at) {
            Some(&level) => ((f32::from(level) - 100.0) / 12.0).exp2(),
            None => 1.0,
        })
    }

    /// Puts the gate's scores of all of a layer's units into `out`; false where none were recorded.
    pub fn scores(&self, token: u32, layer: u32, out: &mut Vec<f32>) -> bool {
        if self.scores.is_empty() {
            return false;
        }
        let units = self.units as usize;
        let scores = &self.scores[self.row(token, layer) * units..][..units];
        out.clear();
        out.extend(scores.iter().map(|&score| f32::from(score) / SCORE_SCALE));
        true
    }

    /// Forgets what stages foresaw, so that retention stands alone.
    pub fn forget_stages(&mut self) {
        self.stages.clear();
    }

    /// What stage `number` named of a layer.
    pub fn foreseen(&self, number: u8, token: u32, layer: u32) -> &[u32] {
        let row = self.row(token, layer);
        self.stages
            .iter()
            .find(|stage| stage.number == number)
            .map_or(&[], |stage| stage.lists.get(row))
    }

    /// Share of tokens before `end` that used each unit, all layers' units in order.
    pub fn frequencies(&self, end: u32) -> Vec<f32> {
        let mut counts = vec![0u32; self.layers as usize * self.units as usize];
        for token in 0..end {
            for layer in 0..self.layers {
                for unit in self.active(token, layer) {
                    counts[(layer * self.units + unit) as usize] += 1;
                }
            }
        }
        let share = |count: u32| count as f32 / end.max(1) as f32;
        counts.into_iter().map(share).collect()
    }

    /// Of the units that matter most, what each stage named; empty where the trace has no ranks.
    pub fn kept(&self) -> &[Kept] {
        &self.kept
    }

    /// What each stage was worth.
    pub fn recall(&self) -> Vec<Recall> {
        self.stages
            .iter()
            .map(|stage| {
                let (mut all, mut least) = ([0u64; 3], 1.0f64);
                for layer in 0..self.layers {
                    // Used, of these named, named.
                    let mut counts = [0u64; 3];
                    for token in 0..self.tokens {
                        let used = self.active(token, layer);
                        let named = stage.lists.get(self.row(token, layer));
                        let both = named.iter().filter(|n| used.binary_search(n).is_ok());
                        counts[1] += both.count() as u64;
                        counts[0] += used.len() as u64;
                        counts[2] += named.len() as u64;
                    }
                    if counts[2] > 0 && counts[0] > 0 {
                        least = least.min(counts[1] as f64 / counts[0] as f64);
                        all = std::array::from_fn(|i| all[i] + counts[i]);
                    }
                }
                let used = all[0].max(1) as f64;
                Recall {
                    stage: stage.number,
                    mean: all[1] as f64 / used,
                    least,
                    named: all[2] as f64 / used,
                }
            })
            .collect()
    }
}
