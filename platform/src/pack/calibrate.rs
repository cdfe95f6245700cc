//! Calibration: the model reads a text, and a probe counts which neurons are active and how strong
//! they are.
//!
//! With ReLU a neuron is active when its gate is positive. SiLU and GELU leave none at zero, so there
//! a neuron is active when its importance `|act(gate) * up| * |down column|` is above the median of
//! its layer in that token. The first token of each context isn't counted: models park attention
//! there, and its activations are like no other's.
//!
//! Sums are integers, so that they don't depend on which thread comes first.

use std::cell::RefCell;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use leanstream_core::plan::{Activation, Hyper, Op};
use leanstream_core::quant::decode;

use super::layout::Layer;
use super::order::{SAMPLE, WORDS};
use super::source::{PART, Source};
use crate::budget::held;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::run::memory::{self, Request};
use crate::run::model::{Info, Weights};
use crate::run::probe::Probe;
use crate::run::session::{Memory, Options, Session};
use crate::text;

/// What is read when the user gives no text.
pub const TEXT: &str = include_str!("calibration.txt");

/// Tokens of a context; the text is cut into such.
const CONTEXT: u32 = 512;

/// Strengths are summed in units of `2^-SHIFT`.
const SHIFT: u32 = 20;

/// The context that calibration needs of a session.
pub fn context(hyper: &Hyper) -> u32 {
    CONTEXT.min(hyper.context).max(2)
}

/// What was seen of one layer.
#[derive(Clone, Default, Debug)]
pub struct Seen {
    /// Tokens in which each neuron was active `(ff)`.
    pub active: Vec<u32>,
    /// Mean of `|up . x|` in them; over all tokens where there were none `(ff)`. 1 without a gate.
    pub strength: Vec<f32>,
    /// Sampled tokens in which each was active `(ff, WORDS)`; empty when they weren't asked for.
    pub bits: Vec<u64>,
}

/// What a text showed.
pub struct Calibration {
    /// Tokens that were counted.
    pub tokens: u32,
    /// By layer.
    pub layers: Vec<Seen>,
}

/// What calibration needs.
pub struct Calibrate<'a> {
    /// The model's files.
    pub source: &'a Source,
    /// Where its matrices are.
    pub layers: &'a [Layer],
    /// The model.
    pub info: &'a Info,
    /// How it is run: with a context of [`context`].
    pub options: &'a Options,
    /// What it reads.
    pub text: &'a [u8],
    /// Keeps the bits for co-activation.
    pub sampled: bool,
}

/// The least budget in which [`calibrate`] runs the model.
///
/// # Errors
/// A file that can't be opened for reading.
pub fn least_budget(
    info: &Info,
    weights: &Weights,
    options: &Options,
    sampled: bool,
) -> Result<u64, Error> {
    let own = u64::from(info.hyper.layers) * Sums::bytes(info.hyper.ff, sampled);
    let request = options.request(held() + own, options.open(info)?.align());
    let nothing = Request {
        budget: 0,
        ..request
    };
    match memory::plan(info, weights, &nothing) {
        Err(Error::Budget { least, .. }) => Ok(least),
        Err(error) => Err(error),
        Ok(_) => Ok(0),
    }
}

/// Runs the model over a text. `passed` hears of tokens, done and all.
///
/// # Errors
/// A text without tokens, a budget that is too small, what stops a run.
pub fn calibrate(
    this: &Calibrate<'_>,
    mut weights: Weights,
    mut passed: impl FnMut(usize, usize),
) -> Result<Calibration, Error> {
    let Calibrate {
        source,
        layers,
        info,
        options,
        text,
        sampled,
    } = *this;
    let mut tokens = Vec::new();
    let plain = text::Options {
        add_special: false,
        parse_special: false,
    };
    info.tokenizer.encode(text, plain, &mut tokens);
    if tokens.len() < 2 {
        return Err(Error::Usage(
            "the text for --calibrate has less than two tokens; give a longer one, or --calibrate none".into(),
        ));
    }
    let norms = layers
        .iter()
        .map(|layer| column_norms(source, layer, &info.hyper))
        .collect::<Result<Vec<_>, _>>()?;
    let before = held();
    let downs = (0u32..)
        .zip(&weights.steps)
        .filter(|(_, step)| matches!(step.op, Op::Down { .. }));
    let watcher = Arc::new(Watcher {
        act: info.hyper.act,
        vector: Vector::beside(&options.kernels),
        steps: downs.map(|(number, _)| number).collect(),
        norms,
        sums: layers
            .iter()
            .map(|_| Mutex::new(Sums::new(info.hyper.ff as usize, sampled)))
            .collect(),
        counted: AtomicU32::new(0),
        skip: AtomicU32::new(0),
    });
    let own = layers.len() as u64 * Sums::bytes(info.hyper.ff, sampled);
    let mut memory = Memory::new(info, &mut weights, options, before + own)?;
    let batch = memory.plan.batch as usize;
    let mut session = Session::start(info, weights, &mut memory, options)?;
    session.attach(Arc::clone(&watcher) as Arc<dyn Probe>);
    let bos = info.tokenizer.bos().filter(|_| info.tokenizer.add_bos());
    let body = options.context as usize - usize::from(bos.is_some());
    let mut done = 0;
    for part in tokens.chunks(body) {
        session.reset();
        let context: Vec<u32> = bos.into_iter().chain(part.iter().copied()).collect();
        for (index, batch) in context.chunks(batch).enumerate() {
            let skipped = u32::from(index == 0);
            watcher.skip.store(skipped, Ordering::Relaxed);
            session.prompt(batch, true)?;
            let counted = batch.len() as u32 - skipped;
            watcher.counted.fetch_add(counted, Ordering::Relaxed);
        }
        done += part.len();
        passed(done, tokens.len());
    }
    // Ends the threads, which hold the watcher too.
    drop(session);
    let tokens = watcher.counted.load(Ordering::Relaxed);
    let gated = info.hyper.act.gated();
    let seen = |sums: &Mutex<Sums>| {
        let mut sums = sums.lock().expect("no panic");
        std::mem::take(&mut *sums).seen(tokens, gated)
    };
    Ok(Calibration {
        tokens,
        layers: watcher.sums.iter().map(seen).collect(),
    })
}

/// L2 norms of the source's down columns `(ff)`.
fn column_norms(source: &Source, layer: &Layer, hyper: &Hyper) -> Result<Vec<f32>, Error> {
    let (region, ty) = &layer.down;
    let ff = hyper.ff as usize;
    let row_bytes = region.bytes as usize / hyper.d as usize;
    let rows_a_part = (PART / row_bytes).max(1);
    let mut squares = vec![0.0f64; ff];
    let mut row = vec![0.0; ff];
    let mut bytes = vec![0; rows_a_part * row_bytes];
    let mut at = 0;
    while at < region.bytes {
        let len = (bytes.len() as u64).min(region.bytes - at) as usize;
        source.read(region, at, &mut bytes[..len])?;
        for bytes in bytes[..len].chunks_exact(row_bytes) {
            decode(*ty, bytes, &mut row);
            for (sum, x) in squares.iter_mut().zip(&row) {
                *sum += f64::from(*x) * f64::from(*x);
            }
        }
        at += len as u64;
    }
    Ok(squares.iter().map(|sum| sum.sqrt() as f32).collect())
}

/// Counts of one layer.
#[derive(Default)]
struct Sums {
    active: Vec<u32>,
    /// Of `|up . x|` when active.
    strength: Vec<u64>,
    /// Of `|up . x|` in every token.
    overall: Vec<u64>,
    bits: Vec<u64>,
}

impl Sums {
    fn new(ff: usize, sampled: bool) -> Self {
        Self {
            active: vec![0; ff],
            strength: vec![0; ff],
            overall: vec![0; ff],
            bits: vec![0; if sampled { ff * WORDS } else { 0 }],
        }
    }

    fn bytes(ff: u32, sampled: bool) -> u64 {
        let bits = if sampled { WORDS as u64 * 8 } else { 0 };
        u64::from(ff) * (20 + bits)
    }

    fn seen(self, tokens: u32, gated: bool) -> Seen {
        let mean = |sum: u64, count: u32| {
            let unit = f64::from(1u32 << SHIFT);
            (sum as f64 / unit / f64::from(count.max(1))) as f32
        };
        let strength = (0..self.active.len()).map(|neuron| match self.active[neuron] {
            _ if !gated => 1.0,
            0 => mean(self.overall[neuron], tokens),
            count => mean(self.strength[neuron], count),
        });
        Seen {
            strength: strength.collect(),
            active: self.active,
            bits: self.bits,
        }
    }
}

struct Watcher {
    act: Activation,
    vector: Vector,
    /// Numbers of the layers' steps, ascending.
    steps: Vec<u32>,
    /// Norms of the layers' columns.
    norms: Vec<Vec<f32>>,
    sums: Vec<Mutex<Sums>>,
    /// Tokens counted before the running batch.
    counted: AtomicU32,
    /// Tokens at the running batch's start that aren't counted.
    skip: AtomicU32,
}

thread_local! {
    /// Activated products and importances of one token.
    static SCRATCH: RefCell<(Vec<f32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl Probe for Watcher {
    fn activations(&self, step: u32, token: usize, gate: &[f32], up: &[f32]) {
        let skip = self.skip.load(Ordering::Relaxed);
        let (Ok(layer), Some(token)) = (
            self.steps.binary_search(&step),
            (token as u32).checked_sub(skip),
        ) else {
            return;
        };
        let place = (self.counted.load(Ordering::Relaxed) + token) as usize;
        SCRATCH.with_borrow_mut(|(importance, sorted)| {
            let threshold = self.judge(layer, gate, up, importance, sorted);
            let mut sums = self.sums[layer].lock().expect("a panic ends the run");
            let Sums {
                active,
                strength,
                overall,
                bits,
            } = &mut *sums;
            for (neuron, &importance) in importance.iter().enumerate() {
                let up = up.get(neuron).map_or(0, |x| fixed(x.abs()));
                overall[neuron] = overall[neuron].saturating_add(up);
                if importance > threshold {
                    active[neuron] += 1;
                    strength[neuron] = strength[neuron].saturating_add(up);
                    if !bits.is_empty() && place < SAMPLE {
                        bits[neuron * WORDS + place / 64] |= 1 << (place % 64);
                    }
                }
            }
        });
    }
}

impl Watcher {
    /// Fills `importance`; those above what is returned are active.
    fn judge(
        &self,
        layer: usize,
        gate: &[f32],
        up: &[f32],
        importance: &mut Vec<f32>,
        sorted: &mut Vec<f32>,
    ) -> f32 {
        importance.clear();
        importance.extend_from_slice(gate);
        match self.act {
            // The gate itself decides, whatever it is multiplied by.
            Activation::Relu | Activation::ReluSquared => return 0.0,
            Activation::Silu => self.vector.silu_mul(importance, up),
            Activation::Gelu => self.vector.gelu_tanh_mul(importance, up),
        }
        for (x, norm) in importance.iter_mut().zip(&self.norms[layer]) {
            *x = x.abs() * norm;
        }
        sorted.clear();
        sorted.extend_from_slice(importance);
        let middle = sorted.len() / 2;
        *sorted.select_nth_unstable_by(middle, f32::total_cmp).1
    }
}

/// In units of `2^-SHIFT`; what isn't finite saturates.
fn fixed(x: f32) -> u64 {
    (f64::from(x) * f64::from(1u32 << SHIFT)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::Kernels;

    fn watcher(act: Activation, norms: &[f32], sampled: bool) -> Watcher {
        Watcher {
            act,
            vector: Vector::beside(&Kernels::detect()),
            steps: vec![5],
            norms: vec![norms.to_vec()],
            sums: vec![Mutex::new(Sums::new(norms.len(), sampled))],
            counted: AtomicU32::new(0),
            skip: AtomicU32::new(1),
        }
    }

    fn take(watcher: &Watcher, tokens: u32, gated: bool) -> Seen {
        std::mem::take(&mut *watcher.sums[0].lock().unwrap()).seen(tokens, gated)
    }

    #[test]
    fn positive_gates_are_active() {
        let watcher = watcher(Activation::Relu, &[1.0; 4], true);
        // Not counted: the first token, another step.
        watcher.activations(5, 0, &[1.0; 4], &[100.0; 4]);
        watcher.activations(4, 1, &[1.0; 4], &[100.0; 4]);
        watcher.activations(5, 1, &[0.5, -1.0, 0.0, 2.0], &[2.0, 3.0, 4.0, 0.0]);
        watcher.activations(5, 2, &[0.5, -1.0, -0.1, -2.0], &[-3.0, 5.0, -4.0, 7.0]);
        let seen = take(&watcher, 2, true);
        assert_eq!(seen.active, [2, 0, 0, 1]);
        assert_eq!(seen.strength, [2.5, 4.0, 4.0, 0.0]);
        let bits: Vec<u64> = seen.bits.iter().step_by(WORDS).copied().collect();
        assert_eq!(bits, [3, 0, 0, 1]);
    }

    #[test]
    fn without_a_gate_the_column_alone_is_strong() {
        let watcher = watcher(Activation::ReluSquared, &[1.0; 2], false);
        watcher.activations(5, 1, &[3.0, -3.0], &[]);
        let seen = take(&watcher, 1, false);
        assert_eq!((seen.active, seen.strength), (vec![1, 0], vec![1.0, 1.0]));
    }

    #[test]
    fn the_stronger_half_is_active() {
        // Norms count: neuron 1 has the largest product, and the least column.
        let watcher = watcher(Activation::Silu, &[1.0, 1e-3, 1.0, 1.0, 1.0], false);
        watcher.activations(
            5,
            1,
            &[4.0, 9.0, -1.0, 3.0, 0.1],
            &[1.0, 9.0, 1.0, -2.0, 0.1],
        );
        assert_eq!(take(&watcher, 1, true).active, [1, 0, 0, 1, 0]);
    }

    #[test]
    fn nothing_overflows() {
        let watcher = watcher(Activation::Relu, &[1.0; 2], false);
        for _ in 0..3 {
            watcher.activations(5, 1, &[1.0, f32::NAN], &[f32::INFINITY, f32::NAN]);
        }
        let seen = take(&watcher, 3, true);
        assert_eq!(seen.active, [3, 0]);
        assert!(seen.strength[0] > 1e12);
    }
}
