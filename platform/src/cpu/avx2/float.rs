//! f32 activations: float weights, and every quantized format where exact results are asked for.

use std::arch::x86_64::*;

use super::super::scales::{CHUNK, groups_of_a_chunk};
use super::super::{Act, OutTile, RowList, Rows, Scratch};
use super::codes::Codes;
use super::simd::{F16c, decode, sum8, transpose};

/// A format of one value a block.
pub(super) trait Float {
    /// Bytes of a value.
    const BYTES: usize;

    /// Eight values.
    ///
    /// # Safety
    /// The machine has AVX2 and F16C, and there are eight values at `at`.
    unsafe fn eight(at: *const u8) -> __m256;
}

/// F32.
pub(super) struct F32;

impl Float for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn eight(at: *const u8) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
}

/// F16.
pub(super) struct F16;

impl Float for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn eight(at: *const u8) -> __m256 {
        // SAFETY: the caller's.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

/// BF16: the upper half of an F32.
pub(super) struct Bf16;

impl Float for Bf16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn eight(at: *const u8) -> __m256 {
        // SAFETY: the caller's.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
}

/// The last `n` (below eight) values of a row, then zeros.
#[inline(always)]
unsafe fn few<F: Float>(at: *const u8, n: usize) -> __m256 {
    let mut bytes = [0u8; 32];
    // SAFETY: the caller's.
    unsafe {
        at.copy_to_nonoverlapping(bytes.as_mut_ptr(), n * F::BYTES);
        F::eight(bytes.as_ptr())
    }
}

/// `out[row] = weights[row] . act`.
///
/// # Safety
/// The machine has AVX2, FMA and F16C; lengths are as [`super::super::Kernels::matvec`] checks them.
#[inline(always)]
pub(super) unsafe fn rows<F: Float>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        // SAFETY: the caller's.
        *out = unsafe { row_dot::<F>(row.as_ptr(), act.x) };
    }
}

#[inline(always)]
unsafe fn row_dot<F: Float>(row: *const u8, x: &[f32]) -> f32 {
    // SAFETY: a row has as many weights as `x` has values; the instruction set is the caller's.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); 4];
        let mut k = 0;
        while k + 32 <= x.len() {
            for (i, sum) in sums.iter_mut().enumerate() {
                let w = F::eight(row.add((k + 8 * i) * F::BYTES));
                *sum = _mm256_fmadd_ps(w, _mm256_loadu_ps(x.as_ptr().add(k + 8 * i)), *sum);
            }
            k += 32;
        }
        while k + 8 <= x.len() {
            let w = F::eight(row.add(k * F::BYTES));
            sums[0] = _mm256_fmadd_ps(w, _mm256_loadu_ps(x.as_ptr().add(k)), sums[0]);
            k += 8;
        }
        if k < x.len() {
            let w = few::<F>(row.add(k * F::BYTES), x.len() - k);
            let x = few::<F32>(x.as_ptr().add(k).cast(), x.len() - k);
            sums[1] = _mm256_fmadd_ps(w, x, sums[1]);
        }
        let [a, b, c, d] = sums;
        sum8(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)))
    }
}

/// Weights of any format as f32, a chunk at a time.
pub(super) trait Source {
    /// Decodes columns `first .. first + n` of a row into `out`. `first` is a multiple of
    /// [`CHUNK`], and so is `n` except at the end of the row.
    ///
    /// # Safety
    /// The machine has AVX2, FMA and F16C; the row has these columns.
    unsafe fn decode(row: &[u8], first: usize, out: &mut [f32]);
}

/// A float format as a [`Source`].
pub(super) struct Plain<F>(F);

impl<F: Float> Source for Plain<F> {
    #[inline(always)]
    unsafe fn decode(row: &[u8], first: usize, out: &mut [f32]) {
        let row = row[first * F::BYTES..].as_ptr();
        for (i, out) in out.chunks_mut(8).enumerate() {
            // SAFETY: the caller's.
            unsafe {
                let at = row.add(8 * i * F::BYTES);
                if out.len() == 8 {
                    _mm256_storeu_ps(out.as_mut_ptr(), F::eight(at));
                } else {
                    let mut eight = [0f32; 8];
                    _mm256_storeu_ps(eight.as_mut_ptr(), few::<F>(at, out.len()));
                    out.copy_from_slice(&eight[..out.len()]);
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
                let scales = F::scales::<F16c>(chunk);
                groups_of_a_chunk!(out.len() / 32, g => {
                    let w = decode::<F>(chunk.as_ptr(), g, &scales);
                    for (i, w) in w.into_iter().enumerate() {
                        _mm256_storeu_ps(out.as_mut_ptr().add(32 * g + 8 * i), w);
                    }
                });
            }
        }
    }
}

/// Rows of a panel.
const ROWS: usize = 16;
/// Columns of a panel.
const BLOCK: usize = CHUNK;
/// Tokens that share each load of a panel.
const TOKENS: usize = 4;

/// `out[token * stride + row] = weights[row] . act[token]`: as `matmul.rs` does it, with panels of
/// decoded weights, (column, row).
///
/// # Safety
/// The machine has AVX2, FMA and F16C; lengths are as [`super::super::Kernels::matmul`] checks them.
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
            // SAFETY: the panel has room, and is aligned for any register; `out` has an element for
            // each row and token; the rest is the caller's.
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

/// Decodes `cols` columns from `first` on of up to 16 rows; missing rows become zeros.
#[inline(always)]
unsafe fn pack<S: Source>(
    rows: &[u8],
    row_bytes: usize,
    first: usize,
    cols: usize,
    panel: *mut f32,
) {
    let mut decoded = [[0f32; BLOCK]; 8];
    for half in 0..ROWS / 8 {
        for (r, decoded) in decoded.iter_mut().enumerate() {
            let at = (8 * half + r) * row_bytes;
            match rows.get(at..at + row_bytes) {
                // SAFETY: the caller's.
                Some(row) => unsafe { S::decode(row, first, &mut decoded[..cols]) },
                None => decoded.fill(0.0),
            }
        }
        for k in (0..cols).step_by(8) {
            // SAFETY: `k + 8` is at most BLOCK, for which both sides have room; the instruction set
            // is the caller's.
            unsafe {
                let mut eight = [_mm256_setzero_si256(); 8];
                for (eight, decoded) in eight.iter_mut().zip(&decoded) {
                    *eight = _mm256_loadu_si256(decoded.as_ptr().add(k).cast());
                }
                for (i, column) in transpose(eight).into_iter().enumerate() {
                    let at = panel.add((k + i) * ROWS + 8 * half);
                    _mm256_store_si256(at.cast(), column);
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
    /// Rows that there are, of 16.
    rows: usize,
    /// Element (token 0, first row).
    out: *mut f32,
    stride: usize,
}

impl Tile {
    /// [`Tile::run`] for every token, a few at a time. Compiled once, for all formats.
    #[target_feature(enable = "avx2,fma")]
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
            let mut totals = [[_mm256_setzero_ps(); 2]; T];
            for t in 0..T {
                x[t] = x[t].add((token + t) * act.cols + self.first);
                if self.first > 0 {
                    let mut lanes = [0f32; ROWS];
                    let at = self.out.add((token + t) * self.stride);
                    at.copy_to_nonoverlapping(lanes.as_mut_ptr(), self.rows);
                    totals[t] = [
                        _mm256_loadu_ps(lanes.as_ptr()),
                        _mm256_loadu_ps(lanes.as_ptr().add(8)),
                    ];
                }
            }
            for k in 0..self.cols {
                let w = [
                    _mm256_load_ps(self.panel.add(k * ROWS)),
                    _mm256_load_ps(self.panel.add(k * ROWS + 8)),
                ];
                for t in 0..T {
                    let x = _mm256_broadcast_ss(&*x[t].add(k));
                    totals[t][0] = _mm256_fmadd_ps(w[0], x, totals[t][0]);
                    totals[t][1] = _mm256_fmadd_ps(w[1], x, totals[t][1]);
                }
            }
            for (t, total) in totals.iter().enumerate() {
                let mut lanes = [0f32; ROWS];
                _mm256_storeu_ps(lanes.as_mut_ptr(), total[0]);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(8), total[1]);
                let at = self.out.add((token + t) * self.stride);
                at.copy_from_nonoverlapping(lanes.as_ptr(), self.rows);
            }
        }
    }
}
