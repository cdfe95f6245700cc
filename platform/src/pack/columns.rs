//! Down columns out of a down matrix: its rows are turned into columns, block by block.
//!
//! A block of the source holds 32 neighbouring *neurons* of one output. Where a block is a scale and
//! integers, the integers of a neuron make its column and the scales go to tables of their own, so
//! that nothing is lost and a column can be read alone. Other formats are decoded and quantized anew.

use leanstream_core::pack::{Down, SCALE_GROUP};
use leanstream_core::quant::{QuantType, decode};

use super::quantize::quantize;

/// Neurons that a step turns at a time where the source has no blocks.
const STEP: usize = 32;

/// The columns of one layer, with room for those of others.
#[derive(Default)]
pub struct Columns {
    /// The columns `(ff, column bytes)`, by source neuron.
    pub bytes: Vec<u8>,
    /// F16 `(ff / 32, d)`: scales of the source's blocks, where columns were moved from blocks.
    pub scales: Vec<u8>,
    /// Minimums likewise.
    pub mins: Vec<u8>,
    /// L2 norm of each column as it is stored `(ff)`.
    pub norms: Vec<f32>,
    /// Sum of squares of what was lost.
    pub lost: f64,
    /// Sum of squares of the source's values.
    pub total: f64,
    /// A step's columns, decoded `(neurons of a step, d)`.
    tile: Vec<f32>,
    /// One of them, quantized and decoded again `(d)`.
    again: Vec<f32>,
}

/// A weight that is no finite number.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotFinite {
    /// Its neuron, in the source's order.
    pub neuron: usize,
}

impl Columns {
    /// Bytes that turning a down matrix takes, beside the matrix.
    pub fn memory_bytes(ty: QuantType, down: Down, d: u32, ff: u32) -> Option<u64> {
        let (d, ff) = (u64::from(d), u64::from(ff));
        let column = u64::from(down.column_bytes(d as u32)?);
        let groups = ff.div_ceil(SCALE_GROUP.into());
        let tables = u64::from(down.has_scales()) + u64::from(down.has_mins());
        let tile = step(ty) as u64 * d + d;
        Some(ff * column + tables * groups * d * 2 + ff * 4 + tile * 4)
    }

    /// Turns `source` `(d rows of ff values of ty)` into columns stored as `down` says.
    ///
    /// # Errors
    /// The first neuron with a weight that isn't finite.
    ///
    /// # Panics
    /// When the sizes don't go together.
    pub fn turn(
        &mut self,
        source: &[u8],
        ty: QuantType,
        down: Down,
        (d, ff): (usize, usize),
    ) -> Result<(), NotFinite> {
        let row_bytes = ty.row_bytes(ff).expect("rows are whole blocks");
        assert_eq!(source.len(), d * row_bytes, "rows of the down matrix");
        let column = down.column_bytes(d as u32).expect("columns can be stored") as usize;
        let tables = |has: bool| {
            if has {
                ff / SCALE_GROUP as usize * d * 2
            } else {
                0
            }
        };
        refill(&mut self.bytes, ff * column);
        refill(&mut self.scales, tables(down.has_scales()));
        refill(&mut self.mins, tables(down.has_mins()));
        self.norms.clear();
        (self.lost, self.total) = (0.0, 0.0);
        let step = step(ty);
        self.tile.resize(step * d, 0.0);
        self.again.resize(d, 0.0);
        let mut values = vec![0.0; step];
        for first in (0..ff).step_by(step) {
            let count = step.min(ff - first);
            let at = ty.row_bytes(first).expect("a step is whole blocks");
            let len = ty.row_bytes(count).expect("a step is whole blocks");
            for row in 0..d {
                let block = &source[row * row_bytes + at..][..len];
                decode(ty, block, &mut values[..count]);
                for (neuron, &value) in values[..count].iter().enumerate() {
                    self.tile[neuron * d + row] = value;
                }
                if down.is_moved() {
                    let columns = &mut self.bytes[first * column..][..count * column];
                    move_block(ty, block, row, columns, column);
                    let place = (first / SCALE_GROUP as usize * d + row) * 2;
                    if down.has_scales() {
                        self.scales[place..place + 2].copy_from_slice(&block[..2]);
                    }
                    if down.has_mins() {
                        self.mins[place..place + 2].copy_from_slice(&block[2..4]);
                    }
                }
            }
            for neuron in 0..count {
                let exact = &self.tile[neuron * d..][..d];
                let square = squares(exact);
                if !square.is_finite() {
                    return Err(NotFinite {
                        neuron: first + neuron,
                    });
                }
                self.total += square;
                let stored = if down.is_moved() {
                    square
                } else {
                    let bytes = &mut self.bytes[(first + neuron) * column..][..column];
                    quantize(down.ty(), exact, bytes);
                    decode(down.ty(), bytes, &mut self.again);
                    let off = exact.iter().zip(&self.again);
                    self.lost += off
                        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
                        .sum::<f64>();
                    squares(&self.again)
                };
                self.norms.push(stored.sqrt() as f32);
            }
        }
        Ok(())
    }
}

/// Neurons that are turned at a time.
fn step(ty: QuantType) -> usize {
    match ty.block_len() {
        1 => STEP,
        len => len,
    }
}

fn refill(bytes: &mut Vec<u8>, len: usize) {
    bytes.clear();
    bytes.resize(len, 0);
}

/// Sum of squares, in the order of the values.
fn squares(values: &[f32]) -> f64 {
    values.iter().map(|x| f64::from(*x) * f64::from(*x)).sum()
}

/// Moves what a block (or a step of floats) of output `row` holds into the columns of its neurons.
fn move_block(ty: QuantType, block: &[u8], row: usize, columns: &mut [u8], column: usize) {
    match ty {
        QuantType::F32 | QuantType::F16 | QuantType::BF16 => {
            let size = ty.block_bytes();
            for (column, value) in columns
                .chunks_exact_mut(column)
                .zip(block.chunks_exact(size))
            {
                column[row * size..][..size].copy_from_slice(value);
            }
        }
        QuantType::Q4_0 | QuantType::Q4_1 => {
            for (neuron, column) in columns.chunks_exact_mut(column).enumerate() {
                column[row / 2] |= code(ty, block, neuron) << (4 * (row % 2));
            }
        }
        _ => {
            for (neuron, column) in columns.chunks_exact_mut(column).enumerate() {
                column[row] = code(ty, block, neuron);
            }
        }
    }
}

/// The integer of value `j` of a block, as the block stores it.
fn code(ty: QuantType, block: &[u8], j: usize) -> u8 {
    let nibble = |from: usize| {
        let byte = block[from + j % 16];
        if j < 16 { byte & 0xf } else { byte >> 4 }
    };
    let fifth = |from: usize| (block[from + j / 8] >> (j % 8) & 1) << 4;
    match ty {
        QuantType::Q8_0 => block[2 + j],
        QuantType::Q4_0 => nibble(2),
        QuantType::Q4_1 => nibble(4),
        QuantType::Q5_0 => nibble(6) | fifth(2),
        QuantType::Q5_1 => nibble(8) | fifth(4),
        _ => unreachable!("{ty} has no integers that can be moved"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::blocks::{Rng, Source};
    use half::f16;

    const D: usize = 64;
    const FF: usize = 256;

    fn matrix(ty: QuantType) -> (Vec<u8>, Vec<f32>) {
        let mut bytes = vec![0; D * ty.row_bytes(FF).unwrap()];
        Source::new(ty, 0.1, Rng::new(7, ty.name())).fill(&mut bytes);
        let mut values = vec![0.0; D * FF];
        decode(ty, &bytes, &mut values);
        (bytes, values)
    }

    /// What a reader of the format makes of value `row` of a moved column.
    fn moved(columns: &Columns, ty: QuantType, neuron: usize, row: usize) -> f32 {
        let column = Down::moved(ty).unwrap().column_bytes(D as u32).unwrap() as usize;
        let column = &columns.bytes[neuron * column..][..column];
        let half = |from: &[u8]| {
            let at = (neuron / 32 * D + row) * 2;
            f16::from_le_bytes([from[at], from[at + 1]]).to_f32()
        };
        let nibble = f32::from(column[row / 2 % column.len()] >> (4 * (row % 2)) & 0xf);
        match ty {
            QuantType::Q8_0 => half(&columns.scales) * f32::from(column[row] as i8),
            QuantType::Q4_0 => half(&columns.scales) * (nibble - 8.0),
            QuantType::Q4_1 => half(&columns.scales) * nibble + half(&columns.mins),
            QuantType::Q5_0 => half(&columns.scales) * (f32::from(column[row]) - 16.0),
            QuantType::Q5_1 => half(&columns.scales) * f32::from(column[row]) + half(&columns.mins),
            _ => {
                let mut value = [0.0];
                let size = ty.block_bytes();
                decode(ty, &column[row * size..][..size], &mut value);
                value[0]
            }
        }
    }

    #[test]
    fn moving_loses_nothing() {
        let mut columns = Columns::default();
        for ty in QuantType::ALL {
            let Some(down) = Down::moved(ty) else {
                continue;
            };
            let (bytes, values) = matrix(ty);
            columns.turn(&bytes, ty, down, (D, FF)).unwrap();
            assert_eq!(columns.lost, 0.0);
            for neuron in 0..FF {
                let mut squares = 0.0;
                for row in 0..D {
                    let want = values[row * FF + neuron];
                    let got = moved(&columns, ty, neuron, row);
                    assert_eq!(got.to_bits(), want.to_bits(), "{ty} {neuron} {row}");
                    squares += f64::from(want).powi(2);
                }
                assert_eq!(columns.norms[neuron], squares.sqrt() as f32);
            }
        }
    }

    #[test]
    fn what_is_quantized_anew_is_near() {
        let mut columns = Columns::default();
        for ty in [QuantType::Q4_K, QuantType::Q6_K, QuantType::IQ4_NL] {
            assert_eq!(Down::moved(ty), None);
            let (bytes, values) = matrix(ty);
            for (to, most) in [(QuantType::Q8_0, 0.01), (QuantType::Q4_0, 0.12)] {
                let down = Down::rows(to).unwrap();
                columns.turn(&bytes, ty, down, (D, FF)).unwrap();
                let column = down.column_bytes(D as u32).unwrap() as usize;
                let (mut lost, mut total) = (0.0, 0.0);
                let mut back = [0.0; D];
                for neuron in 0..FF {
                    decode(to, &columns.bytes[neuron * column..][..column], &mut back);
                    for (row, &got) in back.iter().enumerate() {
                        let want = f64::from(values[row * FF + neuron]);
                        lost += (want - f64::from(got)).powi(2);
                        total += want * want;
                    }
                }
                assert!(
                    (lost / total).sqrt() < most,
                    "{ty} to {to}: {}",
                    lost / total
                );
                assert!((columns.lost - lost).abs() < 1e-9 * total);
                assert!((columns.total - total).abs() < 1e-9 * total);
            }
        }
    }

    #[test]
    fn damage_is_found() {
        let (mut bytes, _) = matrix(QuantType::Q8_0);
        let row = QuantType::Q8_0.row_bytes(FF).unwrap();
        bytes[3 * row + 34..][..2].copy_from_slice(&f16::NAN.to_le_bytes());
        let down = Down::moved(QuantType::Q8_0).unwrap();
        let error = Columns::default().turn(&bytes, QuantType::Q8_0, down, (D, FF));
        assert_eq!(error, Err(NotFinite { neuron: 32 }));
    }
}
