//! The head in two planes: a sketch of 4 bits a weight, how far each of its rows is off at most, and
//! the exact rows as units.

use std::thread;

use leanstream_core::quant::{QuantType, decode};

use super::layout::Head;
use super::quantize::quantize;
use super::source::{PART, Source};
use super::{seal, write_error};
use crate::error::Error;
use crate::gguf_write::Writer;

/// Writes the sketch and returns the error of each row `(vocab)`, rounded up. `passed` hears of every
/// part.
///
/// # Errors
/// What can't be read or written, or a row that isn't finite.
pub fn sketch(
    source: &Source,
    head: &Head,
    threads: usize,
    writer: &mut Writer,
    mut passed: impl FnMut(usize),
) -> Result<Vec<f32>, Error> {
    let d = head.row_bytes / head.ty.block_bytes() * head.ty.block_len();
    let coarse_bytes = QuantType::Q4_0
        .row_bytes(d)
        .expect("checked for the layout");
    let rows = head.rows.bytes as usize / head.row_bytes;
    let rows_a_part = (PART / head.row_bytes).max(threads);
    let mut errors = vec![0.0; rows];
    let mut exact = vec![0; rows_a_part * head.row_bytes];
    let mut coarse = vec![0; rows_a_part * coarse_bytes];
    for (part, errors) in errors.chunks_mut(rows_a_part).enumerate() {
        let exact = &mut exact[..errors.len() * head.row_bytes];
        let coarse = &mut coarse[..errors.len() * coarse_bytes];
        source.read(
            &head.rows,
            (part * rows_a_part * head.row_bytes) as u64,
            exact,
        )?;
        let share = errors.len().div_ceil(threads);
        thread::scope(|scope| {
            let jobs = exact
                .chunks(share * head.row_bytes)
                .zip(coarse.chunks_mut(share * coarse_bytes))
                .zip(errors.chunks_mut(share));
            for ((exact, coarse), errors) in jobs {
                scope.spawn(move || sketch_rows(head.ty, d, exact, coarse, errors));
            }
        });
        if let Some(bad) = errors.iter().position(|error| !error.is_finite()) {
            return Err(Error::model(
                source.path(),
                format_args!(
                    "row {} of {} holds a weight that is no finite number; the file is damaged: download it again",
                    part * rows_a_part + bad,
                    head.rows.name
                ),
            ));
        }
        writer.write(coarse).map_err(write_error)?;
        passed(exact.len());
    }
    Ok(errors)
}

/// Bytes that [`sketch`] takes.
pub fn memory_bytes(head: &Head, threads: usize) -> u64 {
    let rows = head.rows.bytes / head.row_bytes as u64;
    let part = (PART + threads * head.row_bytes) as u64;
    // Errors; exact rows, coarse ones (never larger than Q8_0's), two decoded rows a thread.
    let decoded = head.row_bytes * 64 * threads;
    rows * 4 + 3 * part + decoded as u64
}

fn sketch_rows(ty: QuantType, d: usize, exact: &[u8], coarse: &mut [u8], errors: &mut [f32]) {
    let (mut row, mut again) = (vec![0.0; d], vec![0.0; d]);
    let pairs = exact
        .chunks_exact(exact.len() / errors.len())
        .zip(coarse.chunks_exact_mut(coarse.len() / errors.len()));
    for ((exact, coarse), error) in pairs.zip(errors) {
        decode(ty, exact, &mut row);
        quantize(QuantType::Q4_0, &row, coarse);
        decode(QuantType::Q4_0, coarse, &mut again);
        *error = distance_up(&row, &again);
    }
}

/// The L2 distance of two rows, rounded up to a single.
fn distance_up(a: &[f32], b: &[f32]) -> f32 {
    let squares = a.iter().zip(b).map(|(a, b)| {
        let off = f64::from(*a) - f64::from(*b);
        off * off
    });
    // Each of the sum's steps is off by 2^-53 at most, and the root halves that.
    let sum: f64 = squares.sum();
    let bound = sum.sqrt() * (1.0 + (a.len() as f64 + 4.0) * f64::EPSILON);
    let single = bound as f32;
    if f64::from(single) < bound {
        single.next_up()
    } else {
        single
    }
}

/// Writes the exact rows as units. `passed` hears of every part.
///
/// # Errors
/// What can't be read or written.
pub fn units(
    source: &Source,
    head: &Head,
    writer: &mut Writer,
    mut passed: impl FnMut(usize),
) -> Result<(), Error> {
    let mut unit = vec![0; head.crc_at + leanstream_core::pack::CRC_BYTES as usize];
    let rows = head.rows.bytes / head.row_bytes as u64;
    let rows_a_part = (PART / head.row_bytes).max(1) as u64;
    let mut exact = Vec::new();
    for first in (0..rows).step_by(rows_a_part as usize) {
        let count = rows_a_part.min(rows - first);
        exact.resize(count as usize * head.row_bytes, 0);
        source.read(&head.rows, first * head.row_bytes as u64, &mut exact)?;
        for row in exact.chunks_exact(head.row_bytes) {
            unit[..head.row_bytes].copy_from_slice(row);
            seal(&mut unit, head.crc_at);
            writer.write(&unit).map_err(write_error)?;
        }
        passed(exact.len());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::blocks::{Rng, Source as Blocks};

    /// The error is a bound in exact arithmetic, and a tight one.
    #[test]
    fn errors_are_bounds() {
        const D: usize = 256;
        const ROWS: usize = 40;
        for ty in [QuantType::Q8_0, QuantType::F16, QuantType::Q6_K] {
            let mut exact = vec![0; ROWS * ty.row_bytes(D).unwrap()];
            Blocks::new(ty, 0.3, Rng::new(3, ty.name())).fill(&mut exact);
            let row_bytes = exact.len() / ROWS;
            let mut coarse = vec![0; ROWS * QuantType::Q4_0.row_bytes(D).unwrap()];
            let coarse_bytes = coarse.len() / ROWS;
            let mut errors = [0.0; ROWS];
            sketch_rows(ty, D, &exact, &mut coarse, &mut errors);
            let (mut row, mut again) = ([0.0; D], [0.0; D]);
            for (i, error) in errors.into_iter().enumerate() {
                decode(ty, &exact[i * row_bytes..][..row_bytes], &mut row);
                let coarse = &coarse[i * coarse_bytes..][..coarse_bytes];
                decode(QuantType::Q4_0, coarse, &mut again);
                let off = row.iter().zip(&again);
                let norm = off
                    .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
                    .sum::<f64>()
                    .sqrt();
                assert!(norm <= f64::from(error), "{ty} {i}: {norm} > {error}");
                assert!(f64::from(error) < norm * 1.000_001, "{ty} {i}: {error}");
            }
        }
        assert_eq!(distance_up(&[1.0; 4], &[1.0; 4]), 0.0);
    }
}
