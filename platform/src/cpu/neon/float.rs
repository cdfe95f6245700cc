//! f32 activations: float weights, and every quantized format where exact results are asked for.

use std::arch::aarch64::*;

use super::super::scales::{CHUNK, groups_of_a_chunk};
use super::super::{Act, OutTile, RowList, Rows, Scratch};
use super::codes::Codes;
use super::simd::{Fcvtl, decode, transpose, widen4};

/// A format of one value a block.
pub(super) trait Float {
    /// Bytes of a value.
    const BYTES: usize;

    /// Four values.
    ///
    /// # Safety
    /// There are four values at `at`.
    unsafe fn four(at: *const u8) -> float32x4_t;
}

/// F32.
pub(super) struct F32;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn four(at: *const u8) -> float32x4_t {
        // SAFETY: the caller's.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(at)) }
    }
}

/// F16.
pub(super) struct F16;

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn four(at: *const u8) -> float32x4_t {
        // SAFETY: the caller's.
        unsafe { widen4(vreinterpret_u16_u8(vld1_u8(at))) }
    }
}

/// BF16: the upper half of an F32.
pub(super) struct Bf16;

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn four(at: *const u8) -> float32x4_t {
        // SAFETY: the caller's.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at)))) }
    }
}

/// The last `n` (below four) values of a row, then zeros.
#[inline(always)]
unsafe fn few<F: Float>(at: *const u8, n: usize) -> float32x4_t {
    let mut bytes = [0u8; 16];
    // SAFETY: the caller's.
    unsafe {
        at.copy_to_nonoverlapping(bytes.as_mut_ptr(), n * F::BYTES);
        F::four(bytes.as_ptr())
    }
}

/// `out[row] = weights[row] . act`.
///
/// # Safety
/// Lengths are as [`super::super::Kernels::matvec`] checks them.
#[inline(always)]
pub(super) unsafe fn rows<F: Float>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        // SAFETY: the caller's.
        *out = unsafe { row_dot::<F>(row.as_ptr(), act.x) };
    }
}

#[inline(always)]
unsafe fn row_dot<F: Float>(row: *const u8, x: &[f32]) -> f32 {
    // SAFETY: a row has as many weights as `x` has values.
    unsafe {
        let mut sums = [vdupq_n_f32(0.0); 4];
        let mut k = 0;
        while k + 16 <= x.len() {
            for (i, sum) in sums.iter_mut().enumerate() {
                let w = F::four(row.add((k + 4 * i) * F::BYTES));
                *sum = vfmaq_f32(*sum, w, vld1q_f32(x.as_ptr().add(k + 4 * i)));
            }
            k += 16;
        }
        while k + 4 <= x.len() {
            let w = F::four(row.add(k * F::BYTES));
            sums[0] = vfmaq_f32(sums[0], w, vld1q_f32(x.as_ptr().add(k)));
            k += 4;
        }
        if k < x.len() {
            let w = few::<F>(row.add(k * F::BYTES), x.len() - k);
            let x = few::<F32>(x.as_ptr().add(k).cast(), x.len() - k);
            sums[1] = vfmaq_f32(sums[1], w, x);
        }
        let [a, b, c, d] = sums;
        vaddvq_f32(vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d)))
    }
}

/// Weights of any format as f32, a chunk at a time.
pub(super) trait Source {
    /// Decodes columns `first .. first + out.len()` of a row. `first` is a multiple of [`CHUNK`], and
    /// so is the length except at the end of the row.
    ///
    /// # Safety
    /// The row has these columns.
    unsafe fn decode(row: &[u8], first: usize, out: &mut [f32]);
}

/// A float format as a [`Source`].
pub(super) struct Plain<F>(F);

impl<F: Float> Source for Plain<F> {
    #[inline(always)]
    unsafe fn decode(row: &[u8], first: usize, out: &mut [f32]) {
        let row = row[first * F::BYTES..].as_ptr();
        for (i, out) in out.chunks_mut(4).enumerate() {
            // SAFETY: the caller's.
            unsafe {
                let at = row.add(4 * i * F::BYTES);
                if out.len() == 4 {
                    vst1q_f32(out.as_mut_ptr(), F::four(at));
                } else {
                    let mut four = [0f32; 4];
                    vst1q_f32(four.as_mut_ptr(), few::<F>(at, out.len()));
                    out.copy_from_slice(&four[..out.len()]);
                }
            }
        }
    }
}

/// A quantized format as a [`Source`].
pub(super) struct Quantized<F>(F);

impl<F: Codes> Source for Quantized<F> {
    #[inline(always)]
    unsafe fn decode(row: &[u8], first: usize, out: &mut [f32]) {
        let row = &row[first / CHUNK * F::CHUNK_BYTES..];
        for (chunk, out) in row.chunks(F::CHUNK_BYTES).zip(out.chunks_mut(CHUNK)) {
            // SAFETY: the caller's; `out` has whole groups, as the chunk has.
            unsafe {
                let scales = F::scales::<Fcvtl>(chunk);
                groups_of_a_chunk!(out.len() / 32, g => {
                    let w = decode::<F>(chunk.as_ptr(), g, &scales);
                    for (i, w) in w.into_iter().enumerate() {
                        vst1q_f32(out.as_mut_ptr().add(32 * g + 4 * i), w);
                    }
                });
            }
        }
    }
}

/// Rows of a panel.
const ROWS: usize = 8;
/// Columns of a panel.
const BLOCK: usize = CHUNK;
/// Tokens that share each load of a panel.
const TOKENS: usize = 4;

/// `out[token * stride + row] = weights[row] . act[token]`: as `matmul.rs` does it, with panels of
/// decoded weights, (column, row).
///
/// # Safety
/// Lengths are as [`super::super::Kernels::matmul`] checks them.
#[inline(always)]
pub(super) unsafe fn all<S: Source>(
    weights: &Rows<'_>,
    act: &Act<'_>,
    mut out: OutTile<'_>,
    scratch: &mut Scratch,
) {
    let row_bytes = weights.row_bytes();
    let panel = scratch.as_mut_slice();
    assert!(panel.len() >= BLOCK * ROWS * 4, "a panel fits the scratch");
    let panel = panel.as_mut_ptr().cast::<f32>();
    let stride = out.stride();
    for (p, rows) in weights.bytes.chunks(ROWS * row_bytes).enumerate() {
        for first in (0..act.cols).step_by(BLOCK) {
            let cols = BLOCK.min(act.cols - first);
            // SAFETY: the panel has room; `out` has an element for each row and token; the rest is
            // the caller's.
            unsafe {
                pack::<S>(rows, row_bytes, first, cols, panel);
                let tile = Tile {
                    panel,
                    cols,
                    first,
                    rows: rows.len() / row_bytes,
                    out: out.as_mut_ptr().add(p * ROWS),
                    stride,
                };
                tile.all(act);
            }
        }
    }
}

/// Decodes `cols` columns from `first` on of up to eight rows; missing rows become zeros.
#[inline(always)]
unsafe fn pack<S: Source>(
    rows: &[u8],
    row_bytes: usize,
    first: usize,
    cols: usize,
    panel: *mut f32,
) {
    let mut decoded = [[0f32; BLOCK]; 4];
    for half in 0..ROWS / 4 {
        for (r, decoded) in decoded.iter_mut().enumerate() {
            let at = (4 * half + r) * row_bytes;
            match rows.get(at..at + row_bytes) {
                // SAFETY: the caller's.
                Some(row) => unsafe { S::decode(row, first, &mut decoded[..cols]) },
                None => decoded.fill(0.0),
            }
        }
        for k in (0..cols).step_by(4) {
            // SAFETY: `k + 4` is at most BLOCK, for which both sides have room.
            unsafe {
                let mut four = [vdupq_n_s32(0); 4];
                for (four, decoded) in four.iter_mut().zip(&decoded) {
                    *four = vld1q_s32(decoded.as_ptr().add(k).cast());
                }
                for (i, column) in transpose(four).into_iter().enumerate() {
                    let at = panel.add((k + i) * ROWS + 4 * half);
                    vst1q_s32(at.cast(), column);
                }
            }
        }
    }
}

/// A panel and where its results go.
struct Tile {
    panel: *const f32,
    cols: usize,
    /// The panel's first column.
    first: usize,
    /// Rows that there are, of eight.
    rows: usize,
    /// Element (token 0, first row).
    out: *mut f32,
    stride: usize,
}

impl Tile {
    /// [`Tile::run`] for every token, a few at a time. Compiled once, for all formats.
    #[target_feature(enable = "neon")]
    unsafe fn all(&self, act: &Act<'_>) {
        let mut token = 0;
        // SAFETY: the caller's.
        unsafe {
            while token + TOKENS <= act.tokens {
                self.run::<TOKENS>(act, token);
                token += TOKENS;
            }
            while token < act.tokens {
                self.run::<1>(act, token);
                token += 1;
            }
        }
    }

    /// Adds the panel's part of `T` tokens from `token` on to the output; the first panel sets it.
    #[inline(always)]
    unsafe fn run<const T: usize>(&self, act: &Act<'_>, token: usize) {
        // SAFETY: the caller's; only rows that there are are touched.
        unsafe {
            let mut x = [act.x.as_ptr(); T];
            let mut totals = [[vdupq_n_f32(0.0); 2]; T];
            for t in 0..T {
                x[t] = x[t].add((token + t) * act.cols + self.first);
                if self.first > 0 {
                    let mut lanes = [0f32; ROWS];
                    let at = self.out.add((token + t) * self.stride);
                    at.copy_to_nonoverlapping(lanes.as_mut_ptr(), self.rows);
                    totals[t] = [vld1q_f32(lanes.as_ptr()), vld1q_f32(lanes.as_ptr().add(4))];
                }
            }
            let mut k = 0;
            while k + 4 <= self.cols {
                let x = x.map(|x| vld1q_f32(x.add(k)));
                self.column::<T, 0>(k, x, &mut totals);
                self.column::<T, 1>(k, x, &mut totals);
                self.column::<T, 2>(k, x, &mut totals);
                self.column::<T, 3>(k, x, &mut totals);
                k += 4;
            }
            while k < self.cols {
                let x = x.map(|x| vld1q_dup_f32(x.add(k)));
                self.column::<T, 0>(k, x, &mut totals);
                k += 1;
            }
            for (t, total) in totals.iter().enumerate() {
                let mut lanes = [0f32; ROWS];
                vst1q_f32(lanes.as_mut_ptr(), total[0]);
                vst1q_f32(lanes.as_mut_ptr().add(4), total[1]);
                let at = self.out.add((token + t) * self.stride);
                at.copy_from_nonoverlapping(lanes.as_ptr(), self.rows);
            }
        }
    }

    /// Adds column `k + LANE`, whose activations are in that lane.
    #[inline(always)]
    unsafe fn column<const T: usize, const LANE: i32>(
        &self,
        k: usize,
        x: [float32x4_t; T],
        totals: &mut [[float32x4_t; 2]; T],
    ) {
        // SAFETY: the caller's.
        unsafe {
            let at = self.panel.add((k + LANE as usize) * ROWS);
            let w = [vld1q_f32(at), vld1q_f32(at.add(4))];
            for (total, x) in totals.iter_mut().zip(x) {
                total[0] = vfmaq_laneq_f32::<LANE>(total[0], w[0], x);
                total[1] = vfmaq_laneq_f32::<LANE>(total[1], w[1], x);
            }
        }
    }
}
