//! Rows of the embedding for tokens, and the gradient of the rows.

use super::{CHUNK_COLUMNS, rows_per_chunk};
use crate::cpu::Rows;
use crate::cpu::vector::Vector;
use crate::tune::lent::Lent;
use crate::tune::team::{Sheet, Team};
use leanstream_core::quant;

/// `x[t] = factor * table[tokens[t]]`, the bits of a run.
///
/// Shapes: `table` (vocab, d), `tokens` (tokens), `x` (tokens, d).
///
/// # Panics
/// The lengths disagree, or a token is beyond the table.
pub fn embed(team: &Team, v: Vector, table: &Rows<'_>, tokens: &[u32], factor: f32, x: &mut [f32]) {
    let bytes = table.row_bytes();
    rows_of(team, v, tokens, factor, x, table.cols, |token, x| {
        quant::decode(table.ty, &table.bytes[token * bytes..][..bytes], x);
    });
}

/// [`embed`] from a table of floats.
///
/// # Panics
/// As there.
pub fn embed_floats(
    team: &Team,
    v: Vector,
    table: &[f32],
    tokens: &[u32],
    factor: f32,
    x: &mut [f32],
) {
    if tokens.is_empty() {
        return;
    }
    let d = x.len() / tokens.len();
    rows_of(team, v, tokens, factor, x, d, |token, x| {
        x.copy_from_slice(&table[token * d..][..d]);
    });
}

/// The table's gradient: `dtable[tokens[t]] += factor * dx[t]`, in the order of the tokens.
///
/// Shapes: `tokens` (tokens), `dx` (tokens, d), `dtable` (vocab, d).
///
/// # Panics
/// The lengths disagree, or a token is beyond the table.
pub fn embed_backward(
    team: &Team,
    v: Vector,
    tokens: &[u32],
    dx: &[f32],
    factor: f32,
    dtable: &mut [f32],
) {
    if tokens.is_empty() {
        return;
    }
    let d = dx.len() / tokens.len();
    assert_eq!(dx.len(), tokens.len() * d, "a gradient for each token");
    assert!(d > 0 && dtable.len().is_multiple_of(d), "whole rows");
    let dtable = Lent::new(dtable);
    team.each(d.div_ceil(CHUNK_COLUMNS), &|chunk, _| {
        let first = chunk * CHUNK_COLUMNS;
        let len = CHUNK_COLUMNS.min(d - first);
        for (token, dx) in tokens.iter().zip(dx.chunks_exact(d)) {
            // SAFETY: a chunk writes its own columns, one token after the other.
            let row = unsafe { dtable.part(*token as usize * d + first, len) };
            v.add_scaled(row, factor, &dx[first..first + len]);
        }
    });
}

fn rows_of(
    team: &Team,
    v: Vector,
    tokens: &[u32],
    factor: f32,
    x: &mut [f32],
    d: usize,
    row: impl Fn(usize, &mut [f32]) + Sync,
) {
    assert_eq!(x.len(), tokens.len() * d, "a row for each token");
    let sheet = Sheet { data: x, row: d };
    team.rows([sheet], rows_per_chunk(d), |first, [x], _| {
        for (token, x) in tokens[first..].iter().zip(x.chunks_exact_mut(d)) {
            row(*token as usize, x);
            if factor != 1.0 {
                v.scale(x, factor);
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{every_machine, same_bits};
    use super::*;
    use crate::cpu::vector::testing::Random;
    use leanstream_core::quant::QuantType;

    const TOKENS: [u32; 6] = [3, 0, 3, 6, 1, 3];

    #[test]
    fn rows_go_out_and_their_gradients_come_back() {
        let d = 70;
        every_machine(|team, v| {
            let mut random = Random(50);
            let table = random.floats(7 * d, 1.0);
            let bytes: Vec<u8> = table.iter().flat_map(|x| x.to_le_bytes()).collect();
            let rows = Rows {
                ty: QuantType::F32,
                cols: d,
                bytes: &bytes,
            };
            let mut x = vec![f32::NAN; TOKENS.len() * d];
            embed(team, v, &rows, &TOKENS, 1.5, &mut x);
            for (t, token) in TOKENS.into_iter().enumerate() {
                for i in 0..d {
                    assert_eq!(x[t * d + i], 1.5 * table[token as usize * d + i]);
                }
            }
            let mut again = vec![f32::NAN; TOKENS.len() * d];
            embed_floats(team, v, &table, &TOKENS, 1.5, &mut again);
            assert_eq!(again, x);
            let dx = random.floats(x.len(), 1.0);
            let mut dtable = vec![1.0; table.len()];
            embed_backward(team, v, &TOKENS, &dx, 1.5, &mut dtable);
            for (index, got) in dtable.iter().enumerate() {
                let mut want = 1.0;
                for (t, token) in TOKENS.into_iter().enumerate() {
                    if token as usize == index / d {
                        want += 1.5 * dx[t * d + index % d];
                    }
                }
                assert_eq!(*got, want);
            }
        });
    }

    #[test]
    fn threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(51);
            let tokens: Vec<u32> = (0..200).map(|t| t * t % 11).collect();
            let dx = random.floats(200 * 130, 1.0);
            let mut dtable = vec![0.0; 11 * 130];
            embed_backward(team, v, &tokens, &dx, 1.0, &mut dtable);
            dtable
        });
    }

    #[test]
    #[should_panic(expected = "a chunk panicked")]
    fn a_token_beyond_the_table() {
        let team = Team::new(1).unwrap();
        embed_backward(&team, Vector::detect(), &[2], &[1.0], 1.0, &mut [0.0; 2]);
    }
}
