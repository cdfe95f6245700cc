//! Batch normalisation: over all pixels of a batch, each channel alone. `y = xhat * gamma + beta`, where
//! `xhat = (x - mean) * rstd` and `rstd = 1 / sqrt(variance + eps)`.
//!
//! `xhat` and `rstd` are what the backward pass needs. Sums go over blocks of rows of a fixed size, then
//! over blocks in f64, so that they depend neither on threads nor on how many pixels there are. Rows are
//! pixels, columns channels.

use super::lanes::{get, set};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, multiversion};
use crate::tune::lent::Lent;
use crate::tune::team::{Sheet, Team};

/// Floats of a block.
const BLOCK_FLOATS: usize = 8192;

/// Rows of a block.
fn block_rows(channels: usize) -> usize {
    (BLOCK_FLOATS / channels).max(1)
}

/// Floats that sums over `rows` rows are computed in.
#[must_use]
pub fn scratch_floats(rows: usize, channels: usize) -> usize {
    rows.div_ceil(block_rows(channels)) * 2 * channels
}

/// Each channel's mean and variance (of the batch itself, not of what it is drawn from).
///
/// Shapes: `x` (rows, channels), `mean`, `variance` (channels), `scratch` of [`scratch_floats`].
///
/// # Panics
/// The lengths disagree, or there are no rows.
pub fn statistics(
    team: &Team,
    v: Vector,
    x: &[f32],
    scratch: &mut [f32],
    mean: &mut [f32],
    variance: &mut [f32],
) {
    let channels = mean.len();
    let per = block_rows(channels);
    let rows = blocks(team, x, channels, scratch, |x, out| {
        let (mean, square) = out.split_at_mut(channels);
        v.block_moments(x, mean, square);
    });
    assert!(rows > 0, "statistics of something");
    assert_eq!(variance.len(), channels, "a variance for each mean");
    for (channel, (mean, variance)) in mean.iter_mut().zip(variance).enumerate() {
        // Chan's way of joining means and squared deviations.
        let (mut count, mut all, mut square) = (0.0, 0.0, 0.0);
        for (block, sums) in scratch.chunks_exact(2 * channels).enumerate() {
            if block * per >= rows {
                break;
            }
            let more = per.min(rows - block * per) as f64;
            let apart = f64::from(sums[channel]) - all;
            all += apart * more / (count + more);
            square +=
                f64::from(sums[channels + channel]) + apart * apart * count * more / (count + more);
            count += more;
        }
        *mean = all as f32;
        *variance = (square / count) as f32;
    }
}

/// Runs `f(rows of a block, its sums)` for each block; returns how many rows there are.
fn blocks(
    team: &Team,
    x: &[f32],
    channels: usize,
    scratch: &mut [f32],
    f: impl Fn(&[f32], &mut [f32]) + Sync,
) -> usize {
    let (rows, per) = (x.len() / channels, block_rows(channels));
    assert_eq!(x.len(), rows * channels, "whole rows");
    let scratch = Lent::new(&mut scratch[..scratch_floats(rows, channels)]);
    team.each(rows.div_ceil(per), &|block, _| {
        // SAFETY: each block has its own sums.
        let out = unsafe { scratch.part(block * 2 * channels, 2 * channels) };
        let first = block * per * channels;
        f(&x[first..x.len().min(first + per * channels)], out);
    });
    rows
}

/// `x` becomes `xhat`. Shapes: `x` (rows, channels), `mean`, `rstd` (channels).
///
/// # Panics
/// The lengths disagree.
pub fn normalize(team: &Team, v: Vector, x: &mut [f32], mean: &[f32], rstd: &[f32]) {
    assert_eq!(mean.len(), rstd.len(), "a factor for each mean");
    each_block(team, x, mean.len(), |_, x| v.normalize_rows(x, mean, rstd));
}

/// `x` becomes `x * factor + term`, by channel. Shapes: `x` (rows, channels), `factor`, `term` (channels).
///
/// # Panics
/// The lengths disagree.
pub fn affine(team: &Team, v: Vector, x: &mut [f32], factor: &[f32], term: &[f32]) {
    assert_eq!(factor.len(), term.len(), "a term for each factor");
    each_block(team, x, factor.len(), |_, x| v.affine_rows(x, factor, term));
}

/// `x` becomes `x * factor`, by channel. Shapes: `x` (rows, channels), `factor` (channels).
///
/// # Panics
/// The lengths disagree.
pub fn scale(team: &Team, v: Vector, x: &mut [f32], factor: &[f32]) {
    each_block(team, x, factor.len(), |_, x| v.scale_rows(x, factor));
}

/// The gradients of `gamma` and `beta`: sums of `dy * xhat` and of `dy`. They replace what was there.
///
/// Shapes: `dy`, `xhat` (rows, channels), `dgamma`, `dbeta` (channels), `scratch` of [`scratch_floats`].
///
/// # Panics
/// The lengths disagree.
pub fn gradients(
    team: &Team,
    v: Vector,
    dy: &[f32],
    xhat: &[f32],
    scratch: &mut [f32],
    dgamma: &mut [f32],
    dbeta: &mut [f32],
) {
    let channels = dgamma.len();
    assert_eq!(dy.len(), xhat.len(), "as many gradients as outputs");
    assert_eq!(dbeta.len(), channels, "as many terms as factors");
    let (rows, per) = (dy.len() / channels, block_rows(channels));
    assert_eq!(dy.len(), rows * channels, "whole rows");
    let used = scratch_floats(rows, channels);
    let lent = Lent::new(&mut scratch[..used]);
    team.each(rows.div_ceil(per), &|block, _| {
        // SAFETY: each block has its own sums.
        let out = unsafe { lent.part(block * 2 * channels, 2 * channels) };
        let rows = block * per * channels..dy.len().min((block + 1) * per * channels);
        let (products, sums) = out.split_at_mut(channels);
        v.gradient_sums(&dy[rows.clone()], &xhat[rows], products, sums);
    });
    let total = |at: usize| -> f32 {
        let sums = scratch[..used].chunks_exact(2 * channels);
        sums.map(|sums| f64::from(sums[at])).sum::<f64>() as f32
    };
    for channel in 0..channels {
        dgamma[channel] = total(channel);
        dbeta[channel] = total(channels + channel);
    }
}

/// `dy` becomes `dx = gamma * rstd * (dy - dbeta / rows - xhat * dgamma / rows)`.
///
/// Shapes: `dy`, `xhat` (rows, channels), the others (channels), of which `dgamma` and `dbeta` are
/// [`gradients`]'.
///
/// # Panics
/// The lengths disagree.
#[expect(clippy::too_many_arguments, reason = "what the formula has")]
pub fn backward(
    team: &Team,
    v: Vector,
    dy: &mut [f32],
    xhat: &[f32],
    gamma: &[f32],
    rstd: &[f32],
    dgamma: &[f32],
    dbeta: &[f32],
) {
    let channels = gamma.len();
    assert_eq!(dy.len(), xhat.len(), "as many gradients as outputs");
    assert!(
        [rstd, dgamma, dbeta].iter().all(|x| x.len() == channels),
        "one of each a channel"
    );
    let share = 1.0 / (dy.len() / channels) as f32;
    let factors = Factors {
        gamma,
        rstd,
        dgamma,
        dbeta,
    };
    each_block(team, dy, channels, |first, dy| {
        let xhat = &xhat[first * channels..first * channels + dy.len()];
        v.norm_backward_rows(dy, xhat, &factors, share);
    });
}

fn each_block(team: &Team, x: &mut [f32], channels: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    let sheet = Sheet {
        data: x,
        row: channels,
    };
    team.rows([sheet], block_rows(channels), |first, [x], _| f(first, x));
}

/// What [`backward`] multiplies with, (channels) each.
#[derive(Clone, Copy)]
struct Factors<'a> {
    gamma: &'a [f32],
    rstd: &'a [f32],
    dgamma: &'a [f32],
    dbeta: &'a [f32],
}

multiversion! {
    fn block_moments(x: &[f32], mean: &mut [f32], square: &mut [f32]) = moments_body;
    fn normalize_rows(x: &mut [f32], mean: &[f32], rstd: &[f32]) = normalize_body;
    fn affine_rows(x: &mut [f32], factor: &[f32], term: &[f32]) = affine_body;
    fn scale_rows(x: &mut [f32], factor: &[f32]) = scale_body;
    fn gradient_sums(dy: &[f32], xhat: &[f32], products: &mut [f32], sums: &mut [f32]) = sums_body;
    fn norm_backward_rows(dy: &mut [f32], xhat: &[f32], factors: &Factors<'_>, share: f32) = backward_body;
}

#[inline(always)]
fn moments_body<L: Lanes>(l: L, x: &[f32], mean: &mut [f32], square: &mut [f32]) {
    let n = mean.len();
    let share = l.splat(1.0 / (x.len() / n) as f32);
    for at in (0..n).step_by(L::N) {
        let part = at..n.min(at + L::N);
        let mut sum = l.splat(0.0);
        for row in x.chunks_exact(n) {
            sum = l.add(sum, get(l, &row[part.clone()]));
        }
        let middle = l.mul(sum, share);
        let mut sum = l.splat(0.0);
        for row in x.chunks_exact(n) {
            let apart = l.sub(get(l, &row[part.clone()]), middle);
            sum = l.fma(apart, apart, sum);
        }
        set(l, &mut mean[part.clone()], middle);
        set(l, &mut square[part], sum);
    }
}

#[inline(always)]
fn normalize_body<L: Lanes>(l: L, x: &mut [f32], mean: &[f32], rstd: &[f32]) {
    let n = mean.len();
    for at in (0..n).step_by(L::N) {
        let part = at..n.min(at + L::N);
        let (mean, rstd) = (get(l, &mean[part.clone()]), get(l, &rstd[part.clone()]));
        for row in x.chunks_exact_mut(n) {
            let row = &mut row[part.clone()];
            let hat = l.mul(l.sub(get(l, row), mean), rstd);
            set(l, row, hat);
        }
    }
}

#[inline(always)]
fn affine_body<L: Lanes>(l: L, x: &mut [f32], factor: &[f32], term: &[f32]) {
    let n = factor.len();
    for at in (0..n).step_by(L::N) {
        let part = at..n.min(at + L::N);
        let (factor, term) = (get(l, &factor[part.clone()]), get(l, &term[part.clone()]));
        for row in x.chunks_exact_mut(n) {
            let row = &mut row[part.clone()];
            let y = l.fma(get(l, row), factor, term);
            set(l, row, y);
        }
    }
}

#[inline(always)]
fn scale_body<L: Lanes>(l: L, x: &mut [f32], factor: &[f32]) {
    let n = factor.len();
    for at in (0..n).step_by(L::N) {
        let part = at..n.min(at + L::N);
        let factor = get(l, &factor[part.clone()]);
        for row in x.chunks_exact_mut(n) {
            let row = &mut row[part.clone()];
            let y = l.mul(get(l, row), factor);
            set(l, row, y);
        }
    }
}

#[inline(always)]
fn sums_body<L: Lanes>(l: L, dy: &[f32], xhat: &[f32], products: &mut [f32], sums: &mut [f32]) {
    let n = sums.len();
    for at in (0..n).step_by(L::N) {
        let part = at..n.min(at + L::N);
        let (mut product, mut sum) = (l.splat(0.0), l.splat(0.0));
        for (dy, xhat) in dy.chunks_exact(n).zip(xhat.chunks_exact(n)) {
            let dy = get(l, &dy[part.clone()]);
            product = l.fma(dy, get(l, &xhat[part.clone()]), product);
            sum = l.add(sum, dy);
        }
        set(l, &mut products[part.clone()], product);
        set(l, &mut sums[part], sum);
    }
}

#[inline(always)]
fn backward_body<L: Lanes>(l: L, dy: &mut [f32], xhat: &[f32], factors: &Factors<'_>, share: f32) {
    let Factors {
        gamma,
        rstd,
        dgamma,
        dbeta,
    } = *factors;
    let n = gamma.len();
    let share = l.splat(share);
    for at in (0..n).step_by(L::N) {
        let part = at..n.min(at + L::N);
        let of = |x: &[f32]| get(l, &x[part.clone()]);
        let factor = l.mul(of(gamma), of(rstd));
        let (slope, middle) = (l.mul(of(dgamma), share), l.mul(of(dbeta), share));
        for (dy, xhat) in dy.chunks_exact_mut(n).zip(xhat.chunks_exact(n)) {
            let dy = &mut dy[part.clone()];
            let rest = l.sub(l.sub(get(l, dy), middle), l.mul(of(xhat), slope));
            set(l, dy, l.mul(rest, factor));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::Random;
    use crate::tune::images::reference;
    use crate::tune::ops::testing::{agree, differences, every_machine, same_bits, weighted, wide};

    const EPS: f32 = 1e-3;

    /// `y`, `dx`, `dgamma`, `dbeta`, mean and variance.
    fn both(
        team: &Team,
        v: Vector,
        x: &[f32],
        gamma: &[f32],
        beta: &[f32],
        dy: &[f32],
    ) -> [Vec<f32>; 6] {
        let n = gamma.len();
        let mut scratch = vec![f32::NAN; scratch_floats(x.len() / n, n)];
        let [mut mean, mut variance, mut dgamma, mut dbeta] = [(); 4].map(|()| vec![f32::NAN; n]);
        statistics(team, v, x, &mut scratch, &mut mean, &mut variance);
        let rstd: Vec<f32> = variance.iter().map(|s| 1.0 / (s + EPS).sqrt()).collect();
        let mut xhat = x.to_vec();
        normalize(team, v, &mut xhat, &mean, &rstd);
        let mut y = xhat.clone();
        scale(team, v, &mut y, gamma);
        affine(team, v, &mut y, &vec![1.0; n], beta);
        let mut whole = xhat.clone();
        affine(team, v, &mut whole, gamma, beta);
        agree(&y, &wide(&whole), 1e-6, "in one and in two");
        gradients(team, v, dy, &xhat, &mut scratch, &mut dgamma, &mut dbeta);
        let mut dx = dy.to_vec();
        backward(team, v, &mut dx, &xhat, gamma, &rstd, &dgamma, &dbeta);
        [y, dx, dgamma, dbeta, mean, variance]
    }

    #[test]
    fn forward_and_its_gradients() {
        every_machine(|team, v| {
            let mut random = Random(3);
            for (rows, n) in [(2, 1), (5, 3), (7, 16), (6, 19), (40, 40)] {
                // Far from 0, so that means matter.
                let mut x = random.floats(rows * n, 1.0);
                x.iter_mut().for_each(|x| *x += 5.0);
                let (gamma, beta) = (random.floats(n, 2.0), random.floats(n, 2.0));
                let dy = random.floats(rows * n, 1.0);
                let [y, dx, dgamma, dbeta, ..] = both(team, v, &x, &gamma, &beta, &dy);
                let (x, gamma, beta) = (wide(&x), wide(&gamma), wide(&beta));
                let eps = f64::from(EPS);
                let f = |x: &[f64], gamma: &[f64], beta: &[f64]| {
                    reference::batch_norm(x, gamma, beta, eps)
                };
                agree(&y, &f(&x, &gamma, &beta), 1e-5, "y");
                let want = differences(&x, |x| weighted(&f(x, &gamma, &beta), &dy));
                agree(&dx, &want, 3e-5, "dx");
                let want = differences(&gamma, |gamma| weighted(&f(&x, gamma, &beta), &dy));
                agree(&dgamma, &want, 1e-5, "dgamma");
                let want = differences(&beta, |beta| weighted(&f(&x, &gamma, beta), &dy));
                agree(&dbeta, &want, 1e-5, "dbeta");
            }
        });
    }

    #[test]
    fn statistics_of_many_pixels_far_from_zero() {
        every_machine(|team, v| {
            let (rows, n) = (30_000, 3);
            let mut random = Random(4);
            let x: Vec<f32> = (0..rows * n)
                .map(|i| 1000.0 * (i % n) as f32 + random.unit())
                .collect();
            let mut scratch = vec![f32::NAN; scratch_floats(rows, n)];
            let (mut mean, mut variance) = ([0.0; 3], [0.0; 3]);
            statistics(team, v, &x, &mut scratch, &mut mean, &mut variance);
            for channel in 0..n {
                let column = || x.iter().skip(channel).step_by(n).map(|x| f64::from(*x));
                let middle = column().sum::<f64>() / rows as f64;
                let square = column().map(|x| (x - middle).powi(2)).sum::<f64>() / rows as f64;
                assert!((f64::from(mean[channel]) - middle).abs() < 1e-6 * (1.0 + middle));
                let off = (f64::from(variance[channel]) - square).abs() / square;
                assert!(off < 1e-4, "{off}");
            }
        });
    }

    #[test]
    fn threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(5);
            let (rows, n) = (5000, 24);
            let (x, dy) = (random.floats(rows * n, 1.0), random.floats(rows * n, 1.0));
            let (gamma, beta) = (random.floats(n, 2.0), random.floats(n, 2.0));
            both(team, v, &x, &gamma, &beta, &dy).concat()
        });
    }
}
