//! Saved tensors by channel: before a tensor is quantized, each of its columns is centred and divided
//! by its deviation over the tokens.
//!
//! Some channels of a decoder's activations are hundreds of times as large as others, and keys have a mean
//! that all tokens share. In a group that goes across channels these would take the whole range. With the
//! columns' means and deviations kept beside (two bf16 a column, exactly as they are used), what is
//! quantized is alike in all channels, and rounding stays unbiased, since both steps are undone exactly.

use half::bf16;
use leanstream_core::act::Width;
use leanstream_core::act::pool::TensorId;

use crate::cpu::vector::{Vector, lanes::Lanes, multiversion};
use crate::tune::act::{SaveError, Saved};
use crate::tune::team::{Sheet, Team};
use std::sync::Mutex;

/// Rows that the statistics are taken from, about: any will do, for both steps are undone exactly.
const ROWS: usize = 128;
/// Columns that a chunk of the statistics takes.
const COLUMNS: usize = 64;
/// Floats that a thread normalises at once.
const BLOCK: usize = 8192;

/// The columns' means and deviations of all saved tensors.
pub struct Columns {
    /// Mean, and one over the deviation's inverse: bf16 values as f32, (columns).
    means: Vec<bf16>,
    scales: Vec<bf16>,
    /// By tensor id: its first column.
    starts: Vec<usize>,
    /// One tensor's, as f32: means, deviations, one over them.
    now: [Vec<f32>; 3],
    /// Rows on their way, one a thread.
    rows: Vec<Mutex<Vec<f32>>>,
}

impl Columns {
    /// For tensors of these widths, by id.
    pub fn new(widths: impl Iterator<Item = usize> + Clone, threads: usize) -> Self {
        let mut starts = vec![0];
        for width in widths.clone() {
            starts.push(starts[starts.len() - 1] + width);
        }
        let total = starts[starts.len() - 1];
        let widest = widths.max().unwrap_or(0);
        Self {
            means: vec![bf16::ZERO; total],
            scales: vec![bf16::ONE; total],
            starts,
            now: [(); 3].map(|()| vec![0.0; widest]),
            rows: (0..threads)
                .map(|_| Mutex::new(vec![0.0; BLOCK.max(widest)]))
                .collect(),
        }
    }

    /// Bytes of [`Columns::new`] that are kept from the forward to the backward pass, and of its scratch.
    pub fn bytes(widths: impl Iterator<Item = usize> + Clone, threads: usize) -> (u64, u64) {
        let widest = widths.clone().max().unwrap_or(0);
        let total: usize = widths.clone().sum();
        let kept = total * 2 * size_of::<bf16>() + (widths.count() + 1) * size_of::<usize>();
        let scratch = (3 * widest + threads * BLOCK.max(widest)) * size_of::<f32>();
        (kept as u64, scratch as u64)
    }

    /// Saves `x` (tokens, cols), by columns where it becomes codes.
    ///
    /// # Errors
    /// As [`Saved::save`].
    #[allow(clippy::too_many_arguments)]
    pub fn save(
        &mut self,
        team: &Team,
        v: Vector,
        saved: &mut Saved<'_>,
        tensor: TensorId,
        x: &[f32],
        cols: usize,
        width: Width,
    ) -> Result<(), SaveError> {
        if !width.is_codes() {
            return saved.save(team, tensor, x, cols, width);
        }
        let start = self.starts[tensor.0 as usize];
        let [means, scales, inverses] = &mut self.now;
        let sheets = [means, scales, inverses].map(|data| Sheet {
            data: &mut data[..cols],
            row: 1,
        });
        team.rows(sheets, COLUMNS, |first, [means, scales, inverses], _| {
            v.column_statistics(x, cols, first, means, scales, inverses);
        });
        let [means, scales, inverses] = &self.now;
        for (i, (mean, scale)) in means[..cols].iter().zip(scales).enumerate() {
            self.means[start + i] = bf16::from_f32(*mean);
            self.scales[start + i] = bf16::from_f32(*scale);
        }
        let rows = x.len() / cols;
        let per = (BLOCK / cols).max(1);
        let filling = saved.begin(tensor, rows, cols, width)?;
        team.each(rows.div_ceil(per), &|block, thread| {
            let first = block * per;
            let x = &x[first * cols..(first + per).min(rows) * cols];
            let mut rows = self.rows[thread].lock().expect("a panic ends the run");
            let out = &mut rows[..x.len()];
            for (out, x) in out.chunks_exact_mut(cols).zip(x.chunks_exact(cols)) {
                v.normalise(x, &means[..cols], &inverses[..cols], out);
            }
            filling.put(first, out);
        });
        filling.end()
    }

    /// Loads what was saved so (tokens, cols).
    ///
    /// # Errors
    /// It isn't saved.
    pub fn load(
        &mut self,
        team: &Team,
        v: Vector,
        saved: &Saved<'_>,
        tensor: TensorId,
        out: &mut [f32],
        cols: usize,
    ) -> Result<(), SaveError> {
        let held = saved.pool().held(tensor);
        if !held.is_some_and(|held| held.width.is_codes()) {
            return Ok(saved.load(team, tensor, out)?);
        }
        let start = self.starts[tensor.0 as usize];
        let [means, scales, _] = &mut self.now;
        for i in 0..cols {
            means[i] = self.means[start + i].to_f32();
            scales[i] = self.scales[start + i].to_f32();
        }
        let (means, scales) = (&means[..cols], &scales[..cols]);
        let sheet = Sheet {
            data: out,
            row: cols,
        };
        team.rows([sheet], (BLOCK / cols).max(1), |first, [out], _| {
            saved
                .load_rows(tensor, first, out)
                .expect("it is held, as was just seen");
            for row in out.chunks_exact_mut(cols) {
                v.denormalise(row, means, scales);
            }
        });
        Ok(())
    }

    /// The mean of the squared deviations of a tensor's columns: what noise of 1 in what was quantized is
    /// in the tensor itself.
    pub fn mean_square(&self, tensor: TensorId) -> f32 {
        let at = tensor.0 as usize;
        let scales = &self.scales[self.starts[at]..self.starts[at + 1]];
        let sum: f32 = scales.iter().map(|scale| scale.to_f32().powi(2)).sum();
        sum / scales.len().max(1) as f32
    }
}

multiversion! {
    /// Means, deviations and their inverses of some columns of some rows of `x` (rows, cols), rounded to bf16 before
    /// the next is made of the last, so that all three agree with what is kept.
    fn column_statistics(
        x: &[f32],
        cols: usize,
        first: usize,
        means: &mut [f32],
        scales: &mut [f32],
        inverses: &mut [f32],
    ) = statistics_body;
    /// `out = (x - mean) * inverse`. Shapes: all (n).
    fn normalise(x: &[f32], means: &[f32], inverses: &[f32], out: &mut [f32]) = normalise_body;
    /// `x = x * scale + mean`. Shapes: all (n).
    fn denormalise(x: &mut [f32], means: &[f32], scales: &[f32]) = denormalise_body;
}

#[inline(always)]
fn statistics_body<L: Lanes>(
    _: L,
    x: &[f32],
    cols: usize,
    first: usize,
    means: &mut [f32],
    scales: &mut [f32],
    inverses: &mut [f32],
) {
    let every = (x.len() / cols / ROWS).max(1) * cols;
    let rows = || x.chunks(every).map(|rows| &rows[..cols]);
    let count = rows().count() as f32;
    let columns = first..first + means.len();
    means.fill(0.0);
    for row in rows() {
        for (mean, x) in means.iter_mut().zip(&row[columns.clone()]) {
            *mean += x;
        }
    }
    for mean in &mut *means {
        *mean = bf16::from_f32(*mean / count).to_f32();
    }
    scales.fill(0.0);
    for row in rows() {
        let row = row[columns.clone()].iter().zip(&*means);
        for (scale, (x, mean)) in scales.iter_mut().zip(row) {
            *scale += (x - mean) * (x - mean);
        }
    }
    for (scale, inverse) in scales.iter_mut().zip(inverses) {
        let deviation = bf16::from_f32((*scale / count).sqrt()).to_f32();
        // A column that doesn't vary is its mean; what isn't finite is found when it is quantized.
        *scale = if deviation > 1e-30 { deviation } else { 1.0 };
        *inverse = 1.0 / *scale;
    }
}

#[inline(always)]
fn normalise_body<L: Lanes>(_: L, x: &[f32], means: &[f32], inverses: &[f32], out: &mut [f32]) {
    let factors = means.iter().zip(inverses);
    for ((out, x), (mean, inverse)) in out.iter_mut().zip(x).zip(factors) {
        *out = (x - mean) * inverse;
    }
}

#[inline(always)]
fn denormalise_body<L: Lanes>(_: L, x: &mut [f32], means: &[f32], scales: &[f32]) {
    for (x, (mean, scale)) in x.iter_mut().zip(means.iter().zip(scales)) {
        *x = *x * scale + mean;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::Random;
    use crate::tune::act::{Capacity, Room};

    /// A tensor with channels of very different sizes and means.
    fn uneven(rows: usize, cols: usize) -> Vec<f32> {
        let mut random = Random(5);
        (0..rows * cols)
            .map(|i| {
                let column = i % cols;
                let size = [1.0, 0.01, 100.0][column % 3];
                size * (random.unit() + (column % 5) as f32)
            })
            .collect()
    }

    #[test]
    fn each_channel_is_as_exact_as_the_others_and_rounding_is_unbiased() {
        let (rows, cols) = (300, 96);
        let x = uneven(rows, cols);
        let team = Team::new(2).expect("threads");
        let v = Vector::detect();
        let mut sums = vec![0.0f64; x.len()];
        let mut out = vec![0.0; x.len()];
        const SEEDS: u64 = 64;
        for seed in 0..SEEDS {
            let mut room = Room::new(Capacity::new(4096, 64, 1).and(rows, cols)).expect("memory");
            let mut saved = Saved::new(&mut room, 64, seed).expect("pages");
            let mut columns = Columns::new(std::iter::once(cols), 2);
            let id = TensorId(0);
            columns
                .save(&team, v, &mut saved, id, &x, cols, Width::Four)
                .expect("it fits");
            columns
                .load(&team, v, &saved, id, &mut out, cols)
                .expect("it is saved");
            sums.iter_mut()
                .zip(&out)
                .for_each(|(sum, x)| *sum += f64::from(*x));
        }
        for column in 0..cols {
            let size = f64::from([1.0f32, 0.01, 100.0][column % 3]);
            let at = |row: usize| row * cols + column;
            let worst = (0..rows)
                .map(|row| f64::from(out[at(row)] - x[at(row)]).abs())
                .fold(0.0, f64::max);
            // A step of 15 over a range of about 3.5 deviations of 0.58, and the room of rounding up.
            assert!(worst < 0.4 * size, "column {column}: {worst}");
            let bias = (0..rows)
                .map(|row| sums[at(row)] / SEEDS as f64 - f64::from(x[at(row)]))
                .sum::<f64>()
                / rows as f64;
            assert!(bias.abs() < 0.005 * size, "column {column}: {bias}");
        }
    }
}
