//! Cross-entropy over a tile of logits: a few tokens, the whole vocabulary, in place.
//!
//! The caller computes the logits of some tokens, turns them into their gradients here, multiplies those
//! back through the head, and uses the tile again: all logits of a sequence never exist at once.

use super::arith::flat;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, exp_lanes, multiversion};
use crate::tune::team::{Sheet, Team};

/// A token without a target: its loss and its gradient are 0.
pub const MASKED: u32 = u32::MAX;

/// Rows of logits become their gradients times `weight`.
///
/// With `z = cap * tanh(logit / cap)` where `cap > 0`, else the logit itself: `losses[t]` becomes
/// `log(sum e^z) - z[target]`, and each logit `weight * (softmax(z) - [target]) * dz/dlogit`. Usually
/// `weight` is 1 over the number of targets in the batch. [`MASKED`] rows get 0 for both.
///
/// Shapes: `logits` (tokens, vocab), `targets`, `losses` (tokens).
///
/// # Panics
/// The lengths disagree, or a target is beyond the vocabulary.
#[allow(clippy::too_many_arguments)]
pub fn cross_entropy(
    team: &Team,
    v: Vector,
    logits: &mut [f32],
    vocab: usize,
    targets: &[u32],
    weight: f32,
    cap: f32,
    losses: &mut [f32],
) {
    assert_eq!(targets.len(), losses.len(), "a loss for each target");
    assert_eq!(logits.len(), targets.len() * vocab, "logits of each token");
    let sheet = Sheet {
        data: logits,
        row: vocab,
    };
    team.rows([sheet, flat(losses)], 1, |token, [logits, loss], _| {
        let target = targets[token];
        if target == MASKED {
            logits.fill(0.0);
            loss[0] = 0.0;
            return;
        }
        assert!((target as usize) < vocab, "a target of the vocabulary");
        loss[0] = row(v, logits, target as usize, weight, cap);
    });
}

/// The sum of losses, in order.
pub fn loss_sum(losses: &[f32]) -> f64 {
    losses.iter().map(|loss| f64::from(*loss)).sum()
}

/// One row; its loss.
fn row(v: Vector, z: &mut [f32], target: usize, weight: f32, cap: f32) -> f32 {
    if cap > 0.0 {
        v.softcap(z, cap);
    }
    let top = v.max(z);
    let wanted = z[target];
    if cap > 0.0 {
        let sum = v.exp_sum(z, top);
        v.capped_gradient(z, top, weight / sum, 1.0 / cap);
        let slope = 1.0 - (wanted / cap).powi(2);
        z[target] -= weight * slope;
        f64::from(sum).ln() as f32 + (top - wanted)
    } else {
        let sum = v.exp_all(z, top);
        v.scale(z, weight / sum);
        z[target] -= weight;
        f64::from(sum).ln() as f32 + (top - wanted)
    }
}

multiversion! {
    /// `sum(e^(z - top))`.
    fn exp_sum(z: &[f32], top: f32) -> f32 = exp_sum_body;
    /// The same, and `z` becomes `e^(z - top)`.
    fn exp_all(z: &mut [f32], top: f32) -> f32 = exp_all_body;
    /// `z` becomes `e^(z - top) * factor * (1 - (z / cap)^2)`; `down` is `1 / cap`.
    fn capped_gradient(z: &mut [f32], top: f32, factor: f32, down: f32) = capped_body;
}

#[inline(always)]
fn exp_sum_body<L: Lanes>(l: L, z: &[f32], top: f32) -> f32 {
    let top = l.splat(top);
    let mut sums = [l.splat(0.0); 4];
    let whole = z.len() - z.len() % L::N;
    for (turn, i) in (0..whole).step_by(L::N).enumerate() {
        sums[turn % 4] = l.add(sums[turn % 4], exp_lanes(l, l.sub(l.take(&z[i..]), top)));
    }
    if whole < z.len() {
        let rest = l.take_part(&z[whole..], f32::NEG_INFINITY);
        sums[1] = l.add(sums[1], exp_lanes(l, l.sub(rest, top)));
    }
    l.sum(l.add(l.add(sums[0], sums[2]), l.add(sums[1], sums[3])))
}

#[inline(always)]
fn exp_all_body<L: Lanes>(l: L, z: &mut [f32], top: f32) -> f32 {
    let top = l.splat(top);
    let mut sums = [l.splat(0.0); 4];
    let whole = z.len() - z.len() % L::N;
    for (turn, i) in (0..whole).step_by(L::N).enumerate() {
        let e = exp_lanes(l, l.sub(l.take(&z[i..]), top));
        sums[turn % 4] = l.add(sums[turn % 4], e);
        l.put(&mut z[i..], e);
    }
    if whole < z.len() {
        let rest = l.take_part(&z[whole..], f32::NEG_INFINITY);
        let e = exp_lanes(l, l.sub(rest, top));
        sums[1] = l.add(sums[1], e);
        l.put_part(&mut z[whole..], e);
    }
    l.sum(l.add(l.add(sums[0], sums[2]), l.add(sums[1], sums[3])))
}

#[inline(always)]
fn capped_body<L: Lanes>(l: L, z: &mut [f32], top: f32, factor: f32, down: f32) {
    let constants = (l.splat(top), l.splat(factor), l.splat(down));
    let whole = z.len() - z.len() % L::N;
    for i in (0..whole).step_by(L::N) {
        let gradient = capped_lanes(l, l.take(&z[i..]), constants);
        l.put(&mut z[i..], gradient);
    }
    if whole < z.len() {
        let gradient = capped_lanes(l, l.take_part(&z[whole..], 0.0), constants);
        l.put_part(&mut z[whole..], gradient);
    }
}

/// No closure: one would lack the instruction set's features.
#[inline(always)]
fn capped_lanes<L: Lanes>(l: L, z: L::V, (top, factor, down): (L::V, L::V, L::V)) -> L::V {
    let share = l.mul(exp_lanes(l, l.sub(z, top)), factor);
    let tanh = l.mul(z, down);
    l.mul(share, l.sub(l.splat(1.0), l.mul(tanh, tanh)))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{agree, differences, every_machine, same_bits, wide};
    use super::*;
    use crate::cpu::vector::testing::Random;

    /// The loss of one row in double precision.
    fn reference(logits: &[f64], target: usize, cap: f32) -> f64 {
        let cap = f64::from(cap);
        let z = |x: f64| if cap > 0.0 { cap * (x / cap).tanh() } else { x };
        let sum: f64 = logits.iter().map(|x| z(*x).exp()).sum();
        sum.ln() - z(logits[target])
    }

    #[test]
    fn losses_and_gradients() {
        let weight = 0.25;
        every_machine(|team, v| {
            let mut random = Random(10);
            for cap in [0.0, 3.0, 30.0] {
                for vocab in [2, 5, 7, 16, 33, 100] {
                    let targets = [0, MASKED, vocab as u32 - 1, vocab as u32 / 2];
                    let logits = random.floats(targets.len() * vocab, 8.0);
                    let (mut d, mut losses) = (logits.clone(), vec![f32::NAN; targets.len()]);
                    cross_entropy(team, v, &mut d, vocab, &targets, weight, cap, &mut losses);
                    let rows = logits.chunks_exact(vocab).zip(d.chunks_exact(vocab));
                    for (token, (logits, d)) in rows.enumerate() {
                        if targets[token] == MASKED {
                            assert_eq!((losses[token], d), (0.0, &vec![0.0; vocab][..]));
                            continue;
                        }
                        let (z, target) = (wide(logits), targets[token] as usize);
                        let loss = |z: &[f64]| f64::from(weight) * reference(z, target, cap);
                        let want = reference(&z, target, cap);
                        assert!((f64::from(losses[token]) - want).abs() < 4e-6, "loss");
                        // A share near 1 less 1 keeps few digits.
                        agree(d, &differences(&z, loss), 1e-4, "dlogits");
                    }
                    let sum: f64 = losses.iter().map(|loss| f64::from(*loss)).sum();
                    assert_eq!(loss_sum(&losses), sum);
                }
            }
        });
    }

    #[test]
    fn a_wide_row_with_large_logits() {
        every_machine(|team, v| {
            let mut random = Random(11);
            let mut logits = random.floats(49_152, 40.0);
            let want = {
                let top = logits.iter().copied().fold(f32::MIN, f32::max);
                let e = |x: &f32| (f64::from(*x) - f64::from(top)).exp();
                logits.iter().map(e).sum::<f64>().ln() + f64::from(top) - f64::from(logits[77])
            };
            let mut loss = [0.0];
            cross_entropy(team, v, &mut logits, 49_152, &[77], 1.0, 0.0, &mut loss);
            assert!((f64::from(loss[0]) - want).abs() < 1e-5);
            assert!(wide(&logits).iter().sum::<f64>().abs() < 1e-5);
        });
    }

    #[test]
    #[should_panic(expected = "a chunk panicked")]
    fn a_target_beyond_the_vocabulary() {
        let (mut logits, mut loss) = ([0.0; 4], [0.0]);
        let team = Team::new(1).unwrap();
        let v = Vector::detect();
        cross_entropy(&team, v, &mut logits, 4, &[4], 1.0, 0.0, &mut loss);
    }

    #[test]
    fn threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(12);
            let (vocab, tokens) = (1003, 40);
            let mut logits = random.floats(tokens * vocab, 9.0);
            let targets: Vec<u32> = (0..tokens as u32).map(|token| token * 7).collect();
            let mut losses = vec![0.0; tokens];
            cross_entropy(
                team,
                v,
                &mut logits,
                vocab,
                &targets,
                1.0,
                20.0,
                &mut losses,
            );
            [logits, losses].concat()
        });
    }
}
