//! The reference kernels: plain Rust for every block format, through core's decoder.
//!
//! Slow on purpose where that is easier to read; every other instruction set is tested against it.

use leanstream_core::quant::decode;

use super::{ACT_GROUP, Act, OutTile, RowList, Rows, SUM_GROUP, Scratch, Table};

pub(super) const TABLE: Table = Table {
    quantize,
    matvec,
    matmul,
};

/// Weights decoded at a time: the longest block, and a multiple of every other.
const CHUNK: usize = 256;

/// Smallest largest-value of a group that isn't taken for zero: its reciprocal is still finite.
pub(super) const TINY: f32 = 1e-30;

/// See [`super::Kernels::quantize`].
pub(super) fn quantize(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    for (((x, codes), scale), sums) in x
        .chunks_exact(ACT_GROUP)
        .zip(codes.chunks_exact_mut(ACT_GROUP))
        .zip(scales)
        .zip(sums.chunks_exact_mut(ACT_GROUP / SUM_GROUP))
    {
        // Without their sign, the bits of floats are ordered as the floats are, NaN above infinity:
        // unlike `f32::max`, this lets a NaN win.
        let bits = x
            .iter()
            .map(|v| v.to_bits() & 0x7fff_ffff)
            .max()
            .unwrap_or(0);
        let largest = f32::from_bits(bits);
        let inverse = if largest >= TINY && largest.is_finite() {
            127.0 / largest
        } else {
            0.0
        };
        *scale = if largest < TINY { 0.0 } else { largest / 127.0 };
        for (code, v) in codes.iter_mut().zip(x) {
            // A NaN (infinity times 0) becomes code 0.
            *code = (v * inverse).round_ties_even() as i8;
        }
        for (sum, codes) in sums.iter_mut().zip(codes.chunks_exact(SUM_GROUP)) {
            *sum = codes.iter().map(|&c| i16::from(c)).sum();
        }
    }
}

fn matvec(weights: &RowList<'_>, act: &Act<'_>, exact: bool, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        *out = dot(weights, row, act, 0, exact);
    }
}

fn matmul(
    weights: &Rows<'_>,
    act: &Act<'_>,
    exact: bool,
    mut out: OutTile<'_>,
    _scratch: &mut Scratch,
) {
    let weights = RowList::together(weights);
    for (index, row) in weights.iter().enumerate() {
        for token in 0..act.tokens {
            out.put(token, index, dot(&weights, row, act, token, exact));
        }
    }
}

/// One row times one token.
fn dot(weights: &RowList<'_>, row: &[u8], act: &Act<'_>, token: usize, exact: bool) -> f32 {
    let chunk_bytes = CHUNK / weights.ty.block_len() * weights.ty.block_bytes();
    let mut decoded = [0f32; CHUNK];
    let mut total = 0.0;
    for (chunk, bytes) in row.chunks(chunk_bytes).enumerate() {
        let first = token * act.cols + chunk * CHUNK;
        let n = CHUNK.min(act.cols - chunk * CHUNK);
        let w = &mut decoded[..n];
        decode(weights.ty, bytes, w);
        if weights.uses_f32(exact) {
            let x = &act.x[first..first + n];
            total += x.iter().zip(w).map(|(x, w)| x * *w).sum::<f32>();
        } else {
            let codes = act.codes[first..first + n].chunks(ACT_GROUP);
            for (group, (codes, w)) in codes.zip(w.chunks(ACT_GROUP)).enumerate() {
                let sum: f32 = codes.iter().zip(w).map(|(&c, w)| f32::from(c) * *w).sum();
                total += sum * act.scales[first / ACT_GROUP + group];
            }
        }
    }
    total
}
