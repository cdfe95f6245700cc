//! AdamW: Adam with bias correction and decoupled weight decay.
//!
//! Every operation is rounded once, element by element: a step gives the same bits on every instruction set
//! and any number of threads.

use std::ops::Range;

use super::bits8::Block;
use super::moments::{BLOCK, Moments, Store};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, multiversion};
use crate::tune::lent::Lent;
use crate::tune::team::{Sheet, Team};
use leanstream_core::act::codec::{Counter, Key};

/// Parameters of a chunk: whole blocks.
const CHUNK: usize = 32 * BLOCK;

/// Constants of the optimizer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AdamW {
    /// Share of the first moment that a step keeps.
    pub beta1: f32,
    /// Share of the second moment that a step keeps.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Share of a weight that is taken off each step, times the learning rate.
    pub weight_decay: f32,
}

impl Default for AdamW {
    /// The usual ones, without weight decay.
    fn default() -> Self {
        Self {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.0,
        }
    }
}

/// One step of one tensor.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Update {
    /// Learning rate.
    pub rate: f32,
    /// Steps done before: the first is 0.
    pub step: u64,
    /// Gradients are multiplied by it first.
    pub factor: f32,
    /// Seed of the run, from which moments in 8 bits are rounded at random.
    pub seed: u64,
    /// Number of the tensor, for the same.
    pub tensor: u32,
}

impl Default for Update {
    /// The first step at a rate of 0.001.
    fn default() -> Self {
        Self {
            rate: 1e-3,
            step: 0,
            factor: 1.0,
            seed: 0,
            tensor: 0,
        }
    }
}

/// A step's factors, in the order of use.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    gradient: f32,
    keep: f32,
    beta1: f32,
    one_less_beta1: f32,
    beta2: f32,
    one_less_beta2: f32,
    /// One over the root of the second moment's bias.
    root: f32,
    eps: f32,
    /// The learning rate over the first moment's bias.
    rate: f32,
}

impl AdamW {
    /// [`AdamW::step`] of all tensors: `tensors` says of each where it lies in `w` and `g`, and whether its
    /// weights decay. [`Update::tensor`] is the first one's number.
    ///
    /// # Panics
    /// As there; or a tensor reaches beyond `w` or `g`.
    #[allow(clippy::too_many_arguments)]
    pub fn step_all(
        &self,
        team: &Team,
        v: Vector,
        w: &mut [f32],
        g: &[f32],
        moments: &mut [Moments],
        update: Update,
        tensors: impl Iterator<Item = (Range<usize>, bool)>,
    ) {
        for ((at, decays), (number, moments)) in tensors.zip((update.tensor..).zip(moments)) {
            let optimizer = Self {
                weight_decay: if decays { self.weight_decay } else { 0.0 },
                ..*self
            };
            let update = Update {
                tensor: number,
                ..update
            };
            let (w, g) = (&mut w[at.clone()], &g[at]);
            optimizer.step(team, v, w, g, moments, &update);
        }
    }

    /// Moves `w` against its gradient `g`.
    ///
    /// With `g` times [`Update::factor`] and `t = step + 1`: `m = beta1 m + (1 - beta1) g`,
    /// `v = beta2 v + (1 - beta2) g^2`,
    /// `w = w (1 - rate decay) - rate / (1 - beta1^t) m / (sqrt(v / (1 - beta2^t)) + eps)`.
    ///
    /// Shapes: `w`, `g` (n), `moments` of n parameters. Allocates nothing. Gradients are finite, as
    /// [`clip_factor`](super::clip_factor) has made sure.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn step(
        &self,
        team: &Team,
        v: Vector,
        w: &mut [f32],
        g: &[f32],
        moments: &mut Moments,
        update: &Update,
    ) {
        assert_eq!(w.len(), g.len(), "as many gradients as weights");
        assert_eq!(w.len(), moments.len(), "as many moments as weights");
        let factors = self.factors(update);
        match &mut moments.0 {
            Store::F32 { m, v: second } => {
                let sheets = [w, m, second].map(|data| Sheet { data, row: 1 });
                team.rows(sheets, CHUNK, |first, [w, m, second], _| {
                    v.adamw(w, &g[first..first + w.len()], m, second, &factors);
                });
            }
            Store::Bits8 {
                m,
                v: second,
                m_scales,
                v_scales,
            } => {
                let n = w.len();
                let key = rounding(update);
                let (w, m, second) = (Lent::new(w), Lent::new(m), Lent::new(second));
                let scales = [m_scales, v_scales].map(|scales| Lent::new(scales));
                team.each(n.div_ceil(CHUNK), &|chunk, _| {
                    for first in (chunk * CHUNK..n.min((chunk + 1) * CHUNK)).step_by(BLOCK) {
                        let len = BLOCK.min(n - first);
                        let [m_scale, v_scale] = &scales;
                        // SAFETY: the chunk's own blocks.
                        let (w, block) = unsafe {
                            let block = Block {
                                m: m.part(first, len),
                                v: second.part(first, len),
                                m_scale: &mut m_scale.part(first / BLOCK, 1)[0],
                                v_scale: &mut v_scale.part(first / BLOCK, 1)[0],
                            };
                            (w.part(first, len), block)
                        };
                        v.adamw_block(
                            w,
                            &g[first..first + len],
                            block,
                            &factors,
                            key,
                            first as u32,
                        );
                    }
                });
            }
        }
    }

    fn factors(&self, update: &Update) -> Factors {
        let t = (update.step + 1) as f64;
        let bias = |beta: f32| 1.0 - f64::from(beta).powf(t);
        let rate = f64::from(update.rate);
        Factors {
            gradient: update.factor,
            keep: (1.0 - rate * f64::from(self.weight_decay)) as f32,
            beta1: self.beta1,
            one_less_beta1: (1.0 - f64::from(self.beta1)) as f32,
            beta2: self.beta2,
            one_less_beta2: (1.0 - f64::from(self.beta2)) as f32,
            root: (1.0 / bias(self.beta2).sqrt()) as f32,
            eps: self.eps,
            rate: (rate / bias(self.beta1)) as f32,
        }
    }
}

/// The key of a step's random roundings, apart from those of saved activations.
fn rounding(update: &Update) -> Key {
    const APART: u64 = 0x6164_616d_7738_6269;
    let counter = Counter {
        seed: update.seed ^ APART,
        step: update.step,
        tensor: update.tensor,
    };
    counter.rounding()
}

multiversion! {
    fn adamw(w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], f: &Factors) = body;
    fn adamw_block(
        w: &mut [f32],
        g: &[f32],
        block: Block<'_>,
        f: &Factors,
        key: Key,
        first: u32,
    ) = block_body;
}

#[inline(always)]
fn body<L: Lanes>(_: L, w: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], f: &Factors) {
    let moments = m.iter_mut().zip(v);
    for ((w, g), (m, v)) in w.iter_mut().zip(g).zip(moments) {
        let g = g * f.gradient;
        *m = f.beta1 * *m + f.one_less_beta1 * g;
        *v = f.beta2 * *v + f.one_less_beta2 * (g * g);
        *w = *w * f.keep - f.rate * *m / (v.sqrt() * f.root + f.eps);
    }
}

#[inline(always)]
fn block_body<L: Lanes>(
    l: L,
    w: &mut [f32],
    g: &[f32],
    mut block: Block<'_>,
    f: &Factors,
    key: Key,
    first: u32,
) {
    let (mut m, mut v) = ([0.0; BLOCK], [0.0; BLOCK]);
    block.decode(&mut m, &mut v);
    let n = w.len();
    body(l, w, g, &mut m[..n], &mut v[..n], f);
    block.encode(&m, &v, key, first);
}

#[cfg(test)]
mod tests {
    use super::super::moments::Precision;
    use super::*;
    use crate::cpu::vector::testing::Random;
    use crate::tune::ops::testing::{every_machine, same_bits, wide};

    const USUAL: AdamW = AdamW {
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-6,
        weight_decay: 0.1,
    };

    /// What `torch.optim.AdamW` makes in f64 of weights 0.5, -1.25, 2, 0.001 with the constants above and a
    /// rate of 0.01, where gradient `i` of step `t` is `sin(1 + 1.7 i + 0.9 t) * 10^-i`; after the steps
    /// 1, 2 and 10.
    const TABLE: [(u64, [f64; 4]); 3] = [
        (
            1,
            [
                0.489500011884,
                -1.258749766022,
                2.007998949251,
                0.010944403673,
            ],
        ),
        (
            2,
            [
                0.478999800850,
                -1.256790834436,
                2.015935735500,
                0.005573362806,
            ],
        ),
        (
            10,
            [
                0.457379180279,
                -1.228803159020,
                2.013699874343,
                -0.016085044046,
            ],
        ),
    ];

    #[test]
    fn the_same_as_pytorch() {
        every_machine(|team, v| {
            let mut w = [0.5, -1.25, 2.0, 0.001];
            let mut moments = Moments::new(Precision::F32, 4);
            for step in 0..10 {
                let slope = |i: usize| (1.0 + 1.7 * i as f64 + 0.9 * step as f64).sin();
                // Half of each gradient, doubled by the factor.
                let g = [0, 1, 2, 3].map(|i| (slope(i) * 0.1f64.powi(i as i32) / 2.0) as f32);
                let update = Update {
                    rate: 0.01,
                    step,
                    factor: 2.0,
                    ..Update::default()
                };
                USUAL.step(team, v, &mut w, &g, &mut moments, &update);
                for (steps, wanted) in TABLE {
                    if steps == step + 1 {
                        for (w, want) in w.iter().zip(wanted) {
                            assert!((f64::from(*w) - want).abs() < 4e-7, "{steps}: {w} {want}");
                        }
                    }
                }
            }
        });
    }

    /// Steps of the definition in double precision.
    fn reference(w: &mut [f64], gradients: &[Vec<f32>], rate: f64) {
        let (mut m, mut s) = (vec![0.0; w.len()], vec![0.0; w.len()]);
        let [beta1, beta2] = [USUAL.beta1, USUAL.beta2].map(f64::from);
        for (t, g) in (1..).zip(gradients) {
            for i in 0..w.len() {
                let g = f64::from(g[i]);
                m[i] = beta1 * m[i] + (1.0 - beta1) * g;
                s[i] = beta2 * s[i] + (1.0 - beta2) * g * g;
                let first = m[i] / (1.0 - beta1.powi(t));
                let second = s[i] / (1.0 - beta2.powi(t));
                w[i] -= rate * f64::from(USUAL.weight_decay) * w[i];
                w[i] -= rate * first / (second.sqrt() + f64::from(USUAL.eps));
            }
        }
    }

    /// Steps over random gradients; weights after them.
    fn run(
        team: &Team,
        v: Vector,
        precision: Precision,
        w: &[f32],
        gradients: &[Vec<f32>],
        rate: f32,
    ) -> Vec<f32> {
        let mut w = w.to_vec();
        let mut moments = Moments::new(precision, w.len());
        for (step, g) in gradients.iter().enumerate() {
            let update = Update {
                rate,
                step: step as u64,
                seed: 7,
                tensor: 3,
                ..Update::default()
            };
            USUAL.step(team, v, &mut w, g, &mut moments, &update);
        }
        w
    }

    /// Weights and gradients whose sizes differ by up to a thousand from one to the next.
    fn problem(n: usize, steps: usize) -> (Vec<f32>, Vec<Vec<f32>>) {
        let mut random = Random(42);
        let w = random.floats(n, 1.0);
        let mut gradients = || -> Vec<f32> {
            let size = |i: usize| 10.0f32.powi(-((i % 4) as i32));
            let g = random.floats(n, 1.0);
            g.iter()
                .enumerate()
                .map(|(i, g)| (g + 0.3) * size(i))
                .collect()
        };
        (w, (0..steps).map(|_| gradients()).collect())
    }

    #[test]
    fn follows_double_precision_and_eight_bits_follow_it() {
        let (w, gradients) = problem(10_007, 30);
        let mut want = wide(&w);
        reference(&mut want, &gradients, 0.01);
        every_machine(|team, v| {
            let got = run(team, v, Precision::F32, &w, &gradients, 0.01);
            for (got, want) in got.iter().zip(&want) {
                assert!((f64::from(*got) - want).abs() < 2e-6);
            }
            let got = run(team, v, Precision::Bits8, &w, &gradients, 0.01);
            // Every fourth has large gradients; the least are a thousandth of them.
            for (every, limit) in [(4, 0.05), (1, 0.25)] {
                let (mut off, mut moved) = (0.0, 0.0);
                for i in (0..w.len()).step_by(every) {
                    off += (f64::from(got[i]) - want[i]).powi(2);
                    moved += (f64::from(w[i]) - want[i]).powi(2);
                }
                let share = (off / moved).sqrt();
                assert!(share < limit, "{share} of the way off");
            }
        });
    }

    #[test]
    fn neither_threads_nor_instruction_sets_matter() {
        let (w, gradients) = problem(20_003, 3);
        let all = |team: &Team, v| {
            [Precision::F32, Precision::Bits8]
                .map(|precision| run(team, v, precision, &w, &gradients, 0.01))
                .concat()
        };
        let want = all(&Team::new(1).unwrap(), Vector::detect());
        same_bits(|team, v| {
            let got = all(team, v);
            assert!(got == want, "{v:?}");
            got
        });
    }

    #[test]
    fn a_tensor_without_parameters() {
        let team = Team::new(1).unwrap();
        for precision in [Precision::F32, Precision::Bits8] {
            run(&team, Vector::detect(), precision, &[], &[vec![]], 0.1);
        }
    }
}
