//! Root-mean-square normalisation, of tokens or of heads: `y = xhat * weight`, where `xhat = x * rstd` and
//! `rstd = 1 / sqrt(mean(x^2) + eps)`.
//!
//! `xhat` and `rstd` are what the backward pass needs; `xhat * weight` ([`scale_columns`]) is also the
//! input of the linears that follow. A row is a token (n = d) or a head of one (n = head_dim).

use super::arith::flat;
use super::{CHUNK_COLUMNS, rows_per_chunk};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, multiversion};
use crate::tune::team::{Sheet, Team};

/// Forward. The bits of `y` are those of [`Vector::rms_norm`].
///
/// Shapes: `x`, `y`, `xhat` (rows, n), `weight` (n), `rstd` (rows).
///
/// # Panics
/// The lengths disagree.
#[allow(clippy::too_many_arguments)]
pub fn rms_norm(
    team: &Team,
    v: Vector,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    y: &mut [f32],
    xhat: &mut [f32],
    rstd: &mut [f32],
) {
    let n = weight.len();
    assert_eq!(x.len(), y.len(), "as many outputs as inputs");
    let sheets = [rows(y, n), rows(xhat, n), flat(rstd)];
    team.rows(sheets, rows_per_chunk(n), |first, [y, xhat, rstd], _| {
        let x = &x[first * n..first * n + y.len()];
        for (i, rstd) in rstd.iter_mut().enumerate() {
            let row = i * n..(i + 1) * n;
            let xhat = &mut xhat[row.clone()];
            xhat.copy_from_slice(&x[row.clone()]);
            *rstd = norm_row(v, xhat, weight, eps, &mut y[row]);
        }
    });
}

/// [`rms_norm`] where nobody needs the input any more: `x` becomes `xhat`.
///
/// # Panics
/// The lengths disagree.
pub fn rms_norm_in_place(
    team: &Team,
    v: Vector,
    x: &mut [f32],
    weight: &[f32],
    eps: f32,
    y: &mut [f32],
    rstd: &mut [f32],
) {
    let n = weight.len();
    let sheets = [rows(y, n), rows(x, n), flat(rstd)];
    team.rows(sheets, rows_per_chunk(n), |_, [y, x, rstd], _| {
        for (i, rstd) in rstd.iter_mut().enumerate() {
            let row = i * n..(i + 1) * n;
            *rstd = norm_row(v, &mut x[row.clone()], weight, eps, &mut y[row]);
        }
    });
}

/// Backward: `dx = rstd * (g - xhat * mean(g * xhat))` with `g = dy * weight`, added to what `dx` holds if
/// `add`.
///
/// Shapes: `xhat`, `dy`, `dx` (rows, n), `rstd` (rows), `weight` (n).
///
/// # Panics
/// The lengths disagree.
#[allow(clippy::too_many_arguments)]
pub fn rms_norm_backward(
    team: &Team,
    v: Vector,
    xhat: &[f32],
    rstd: &[f32],
    weight: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    add: bool,
) {
    let n = weight.len();
    assert_eq!(xhat.len(), dx.len(), "as many inputs as gradients");
    assert_eq!(dy.len(), dx.len(), "as many outputs as gradients");
    assert_eq!(rstd.len() * n, dx.len(), "one factor a row");
    team.rows([rows(dx, n)], rows_per_chunk(n), |first, [dx], _| {
        for (i, dx) in dx.chunks_exact_mut(n).enumerate() {
            let row = (first + i) * n..(first + i + 1) * n;
            let (xhat, dy) = (&xhat[row.clone()], &dy[row]);
            v.norm_back(xhat, rstd[first + i], weight, dy, dx, add);
        }
    });
}

/// The weight's gradient: `dweight[i] += sum over rows of dy[row][i] * xhat[row][i]`, in the order of the
/// rows.
///
/// Shapes: `xhat`, `dy` (rows, n), `dweight` (n).
///
/// # Panics
/// The lengths disagree.
pub fn rms_norm_weight_gradient(
    team: &Team,
    v: Vector,
    xhat: &[f32],
    dy: &[f32],
    dweight: &mut [f32],
) {
    let n = dweight.len();
    assert_eq!(xhat.len(), dy.len(), "as many inputs as gradients");
    assert!(dy.len().is_multiple_of(n), "whole rows");
    team.rows([flat(dweight)], CHUNK_COLUMNS, |first, [dweight], _| {
        let columns = first..first + dweight.len();
        for (xhat, dy) in xhat.chunks_exact(n).zip(dy.chunks_exact(n)) {
            v.add_products(dweight, &xhat[columns.clone()], &dy[columns.clone()]);
        }
    });
}

/// `out[row][i] = x[row][i] * weight[i]`: a norm's output from its saved `xhat`.
///
/// Shapes: `x`, `out` (rows, n), `weight` (n).
///
/// # Panics
/// The lengths disagree.
pub fn scale_columns(team: &Team, v: Vector, x: &[f32], weight: &[f32], out: &mut [f32]) {
    let n = weight.len();
    assert_eq!(x.len(), out.len(), "as many outputs as inputs");
    team.rows([rows(out, n)], rows_per_chunk(n), |first, [out], _| {
        for (i, out) in out.chunks_exact_mut(n).enumerate() {
            let row = (first + i) * n;
            out.copy_from_slice(&x[row..row + n]);
            v.mul_assign(out, weight);
        }
    });
}

fn rows(data: &mut [f32], row: usize) -> Sheet<'_> {
    Sheet { data, row }
}

/// One row, `x` becoming `xhat`; its factor.
fn norm_row(v: Vector, x: &mut [f32], weight: &[f32], eps: f32, y: &mut [f32]) -> f32 {
    let rstd = 1.0 / (v.dot(x, x) / x.len() as f32 + eps).sqrt();
    v.scale(x, rstd);
    y.copy_from_slice(x);
    v.mul_assign(y, weight);
    rstd
}

multiversion! {
    fn norm_back(xhat: &[f32], rstd: f32, weight: &[f32], dy: &[f32], dx: &mut [f32], add: bool) = back_body;
    fn add_products(sum: &mut [f32], x: &[f32], y: &[f32]) = add_products_body;
}

#[inline(always)]
fn back_body<L: Lanes>(
    l: L,
    xhat: &[f32],
    rstd: f32,
    weight: &[f32],
    dy: &[f32],
    dx: &mut [f32],
    add: bool,
) {
    let n = weight.len();
    let whole = n - n % L::N;
    let mut sums = [l.splat(0.0); 2];
    for (turn, i) in (0..whole).step_by(L::N).enumerate() {
        let g = l.mul(l.take(&dy[i..]), l.take(&weight[i..]));
        sums[turn % 2] = l.fma(g, l.take(&xhat[i..]), sums[turn % 2]);
    }
    let mut mean = l.sum(l.add(sums[0], sums[1]));
    for i in whole..n {
        mean += dy[i] * weight[i] * xhat[i];
    }
    mean /= n as f32;
    for i in 0..n {
        let change = rstd * (dy[i] * weight[i] - xhat[i] * mean);
        dx[i] = if add { dx[i] + change } else { change };
    }
}

#[inline(always)]
fn add_products_body<L: Lanes>(_: L, sum: &mut [f32], x: &[f32], y: &[f32]) {
    for (sum, (x, y)) in sum.iter_mut().zip(x.iter().zip(y)) {
        *sum += x * y;
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{agree, differences, every_machine, same_bits, weighted, wide};
    use super::*;
    use crate::cpu::vector::testing::Random;

    const EPS: f32 = 1e-2;

    /// Forward in double precision, (rows, n).
    fn reference(x: &[f64], weight: &[f64]) -> Vec<f64> {
        let row = |x: &[f64]| -> Vec<f64> {
            let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
            let root = (mean + f64::from(EPS)).sqrt();
            x.iter().zip(weight).map(|(x, w)| x / root * w).collect()
        };
        x.chunks_exact(weight.len()).flat_map(row).collect()
    }

    #[test]
    fn forward_is_that_of_a_run_and_backward_is_its_gradient() {
        every_machine(|team, v| {
            let mut random = Random(3);
            for (count, n) in [(1, 1), (3, 5), (2, 16), (5, 33), (70, 64), (2, 130)] {
                let x = random.floats(count * n, 0.3);
                let weight = random.floats(n, 2.0);
                let dy = random.floats(count * n, 1.0);
                let (mut y, mut xhat) = (vec![f32::NAN; count * n], vec![f32::NAN; count * n]);
                let mut rstd = vec![f32::NAN; count];
                rms_norm(team, v, &x, &weight, EPS, &mut y, &mut xhat, &mut rstd);
                let mut plain = x.clone();
                v.rms_norm_rows(&mut plain, &weight, EPS);
                assert_eq!(y, plain);
                let (mut again, mut changed) = (vec![f32::NAN; count * n], x.clone());
                let mut factors = vec![f32::NAN; count];
                rms_norm_in_place(
                    team,
                    v,
                    &mut changed,
                    &weight,
                    EPS,
                    &mut again,
                    &mut factors,
                );
                assert_eq!((&again, &changed, &factors), (&y, &xhat, &rstd));
                scale_columns(team, v, &xhat, &weight, &mut again);
                assert_eq!(again, y);

                let mut dx = vec![f32::NAN; count * n];
                rms_norm_backward(team, v, &xhat, &rstd, &weight, &dy, &mut dx, false);
                let (x, w) = (wide(&x), wide(&weight));
                let want = differences(&x, |x| weighted(&reference(x, &w), &dy));
                agree(&dx, &want, 2e-5, "dx");
                let before = random.floats(count * n, 1.0);
                let mut sum = before.clone();
                rms_norm_backward(team, v, &xhat, &rstd, &weight, &dy, &mut sum, true);
                for i in 0..sum.len() {
                    assert_eq!(sum[i], before[i] + dx[i]);
                }
                let mut dweight = vec![0.0; n];
                rms_norm_weight_gradient(team, v, &xhat, &dy, &mut dweight);
                let want = differences(&w, |w| weighted(&reference(&x, w), &dy));
                agree(&dweight, &want, 2e-5, "dweight");
            }
        });
    }

    #[test]
    fn threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(4);
            let (count, n) = (300, 150);
            let [x, dy] = [(); 2].map(|()| random.floats(count * n, 1.0));
            let weight = random.floats(n, 2.0);
            let [mut y, mut xhat, mut dx] = [(); 3].map(|()| vec![0.0; count * n]);
            let (mut rstd, mut dweight) = (vec![0.0; count], vec![0.0; n]);
            rms_norm(team, v, &x, &weight, EPS, &mut y, &mut xhat, &mut rstd);
            rms_norm_backward(team, v, &xhat, &rstd, &weight, &dy, &mut dx, false);
            rms_norm_weight_gradient(team, v, &xhat, &dy, &mut dweight);
            [y, xhat, dx, rstd, dweight].concat()
        });
    }
}
