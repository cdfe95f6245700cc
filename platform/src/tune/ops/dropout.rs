//! Dropout by a counter: which elements go is a function of seed, step, tensor and element, so that the
//! backward pass, or a forward pass that is computed again, drops the same ones and nothing is saved.

use super::CHUNK_FLOATS;
use super::arith::flat;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, multiversion};
use crate::tune::team::Team;
use leanstream_core::act::codec::{Counter, Key};

/// What is dropped.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    /// Share of the elements that become 0, at least 0 and below 1; the others are divided by what is left.
    pub share: f32,
    /// Names the mask. Saved activations may have the same counter: the bits differ.
    pub counter: Counter,
}

/// Forward and backward: `out[i] = x[i] / (1 - share)`, or 0 where it is dropped; added to what `out`
/// holds if `add`. Shapes: both (n).
///
/// # Panics
/// The lengths differ, or the share isn't in `0 .. 1`.
pub fn dropout(team: &Team, v: Vector, mask: Dropout, x: &[f32], out: &mut [f32], add: bool) {
    const APART: u64 = 0x6472_6f70_6f75_7400;
    assert_eq!(x.len(), out.len(), "as many outputs as inputs");
    assert!((0.0..1.0).contains(&mask.share), "a share below 1");
    let counter = Counter {
        seed: mask.counter.seed ^ APART,
        ..mask.counter
    };
    let share = f64::from(mask.share);
    let draw = Draw {
        key: counter.rounding(),
        limit: (share * 4_294_967_296.0) as u32,
        factor: (1.0 / (1.0 - share)) as f32,
    };
    team.rows([flat(out)], CHUNK_FLOATS, |first, [out], _| {
        v.drop(&x[first..first + out.len()], out, draw, first as u32, add);
    });
}

/// Elements that are drawn at a time.
const BLOCK: usize = 256;

/// How elements are drawn.
#[derive(Clone, Copy)]
struct Draw {
    key: Key,
    /// Elements whose word is below it are dropped.
    limit: u32,
    /// What the others are multiplied by.
    factor: f32,
}

multiversion! {
    fn drop(x: &[f32], out: &mut [f32], draw: Draw, first: u32, add: bool) = body;
}

#[inline(always)]
fn body<L: Lanes>(_: L, x: &[f32], out: &mut [f32], draw: Draw, first: u32, add: bool) {
    // Words, factors and products by turns, each a loop over an array: vectors.
    let (mut words, mut factors) = ([0; BLOCK], [0.0; BLOCK]);
    let mut count = first;
    for (x, out) in x.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
        for (i, word) in words.iter_mut().enumerate() {
            *word = draw.key.word(count.wrapping_add(i as u32));
        }
        for (factor, word) in factors.iter_mut().zip(&words) {
            *factor = if *word < draw.limit { 0.0 } else { draw.factor };
        }
        for ((out, x), factor) in out.iter_mut().zip(x).zip(&factors) {
            let kept = x * factor;
            *out = if add { *out + kept } else { kept };
        }
        count = count.wrapping_add(BLOCK as u32);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::same_bits;
    use super::*;
    use crate::cpu::vector::testing::Random;

    const MASK: Dropout = Dropout {
        share: 0.3,
        counter: Counter {
            seed: 1,
            step: 2,
            tensor: 3,
        },
    };

    fn ones(mask: Dropout, len: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; len];
        let team = Team::new(2).unwrap();
        dropout(
            &team,
            Vector::detect(),
            mask,
            &vec![1.0; len],
            &mut out,
            false,
        );
        out
    }

    #[test]
    fn a_share_goes_and_the_rest_makes_up_for_it() {
        let n = 200_000;
        let out = ones(MASK, n);
        let dropped = out.iter().filter(|x| **x == 0.0).count() as f64 / n as f64;
        // Five standard deviations.
        assert!((dropped - 0.3).abs() < 5.0 * (0.21 / n as f64).sqrt());
        assert!(out.iter().all(|x| *x == 0.0 || *x == 1.0 / 0.7));
        assert_eq!(ones(Dropout { share: 0.0, ..MASK }, 1000), [1.0; 1000]);
    }

    #[test]
    fn each_counter_has_a_mask_of_its_own() {
        let Counter { seed, step, tensor } = MASK.counter;
        let others = [
            Counter {
                seed: seed + 1,
                step,
                tensor,
            },
            Counter {
                seed,
                step: step + 1,
                tensor,
            },
            Counter {
                seed,
                step,
                tensor: tensor + 1,
            },
        ];
        let first = ones(MASK, 20_000);
        for counter in others {
            let other = ones(Dropout { counter, ..MASK }, 20_000);
            let same = first.iter().zip(&other).filter(|(a, b)| a == b).count();
            // 0.3^2 + 0.7^2 of them are by chance.
            assert!((same as f64 / 20_000.0 - 0.58).abs() < 0.02, "{same}");
        }
    }

    #[test]
    fn backward_drops_the_same_and_threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(52);
            let (x, before) = (random.floats(30_001, 1.0), random.floats(30_001, 1.0));
            let (mut y, mut sum) = (vec![f32::NAN; x.len()], before.clone());
            dropout(team, v, MASK, &x, &mut y, false);
            dropout(team, v, MASK, &x, &mut sum, true);
            let mask = ones(MASK, x.len());
            for i in 0..x.len() {
                assert_eq!(y[i] == 0.0, mask[i] == 0.0);
                assert_eq!(sum[i], before[i] + y[i]);
            }
            [y, sum].concat()
        });
    }

    #[test]
    #[should_panic(expected = "a share below 1")]
    fn all_of_it() {
        ones(Dropout { share: 1.0, ..MASK }, 1);
    }
}
