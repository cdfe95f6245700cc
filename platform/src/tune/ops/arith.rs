//! Sums, factors and biases.

use super::{CHUNK_COLUMNS, CHUNK_FLOATS, rows_per_chunk};
use crate::cpu::vector::Vector;
use crate::tune::team::{Sheet, Team};

/// `x[i] += y[i]`: residual sums, and gradients that accumulate. Shapes: both (n).
///
/// # Panics
/// The lengths differ.
pub fn add(team: &Team, v: Vector, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "as many terms on both sides");
    team.rows([flat(x)], CHUNK_FLOATS, |first, [x], _| {
        v.add_assign(x, &y[first..first + x.len()]);
    });
}

/// `x[i] *= factor`. Shapes: `x` (n).
pub fn scale(team: &Team, v: Vector, x: &mut [f32], factor: f32) {
    team.rows([flat(x)], CHUNK_FLOATS, |_, [x], _| v.scale(x, factor));
}

/// `x[i] = value`. Shapes: `x` (n).
pub fn fill(team: &Team, x: &mut [f32], value: f32) {
    team.rows([flat(x)], CHUNK_FLOATS, |_, [x], _| x.fill(value));
}

/// Adds `bias` to every row. Shapes: `x` (rows, n), `bias` (n).
///
/// # Panics
/// `x` isn't whole rows.
pub fn add_bias(team: &Team, v: Vector, x: &mut [f32], bias: &[f32]) {
    let sheet = Sheet {
        data: x,
        row: bias.len(),
    };
    team.rows([sheet], rows_per_chunk(bias.len()), |_, [x], _| {
        x.chunks_exact_mut(bias.len())
            .for_each(|row| v.add_assign(row, bias));
    });
}

/// The gradient of a bias: `dbias[i] += sum over rows of dy[row][i]`, in the order of the rows.
/// Shapes: `dy` (rows, n), `dbias` (n).
///
/// # Panics
/// `dy` isn't whole rows.
pub fn bias_gradient(team: &Team, v: Vector, dy: &[f32], dbias: &mut [f32]) {
    let n = dbias.len();
    assert!(dy.len().is_multiple_of(n), "whole rows");
    team.rows([flat(dbias)], CHUNK_COLUMNS, |first, [dbias], _| {
        for row in dy.chunks_exact(n) {
            v.add_assign(dbias, &row[first..first + dbias.len()]);
        }
    });
}

/// Floats without rows.
pub(super) fn flat(data: &mut [f32]) -> Sheet<'_> {
    Sheet { data, row: 1 }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{every_machine, same_bits};
    use super::*;
    use crate::cpu::vector::testing::Random;

    #[test]
    fn sums_factors_and_fills() {
        every_machine(|team, v| {
            let mut random = Random(1);
            let (x, y) = (random.floats(20_001, 1.0), random.floats(20_001, 1.0));
            let mut z = x.clone();
            add(team, v, &mut z, &y);
            scale(team, v, &mut z, 0.5);
            for i in 0..x.len() {
                assert_eq!(z[i], (x[i] + y[i]) * 0.5);
            }
            fill(team, &mut z, 3.0);
            assert!(z.iter().all(|z| *z == 3.0));
        });
    }

    #[test]
    fn biases_join_rows_and_gather_their_gradient() {
        same_bits(|team, v| {
            let mut random = Random(2);
            let (rows, n) = (130, 77);
            let (x, bias) = (random.floats(rows * n, 1.0), random.floats(n, 1.0));
            let mut y = x.clone();
            add_bias(team, v, &mut y, &bias);
            let mut gradient = vec![1.0; n];
            bias_gradient(team, v, &x, &mut gradient);
            for i in 0..n {
                let column = || (0..rows).map(|row| x[row * n + i]);
                assert_eq!(gradient[i], column().fold(1.0, |sum, x| sum + x));
                for row in 0..rows {
                    assert_eq!(y[row * n + i], x[row * n + i] + bias[i]);
                }
            }
            gradient
        });
    }
}
