//! f32 activations: float weights, and the exact path of quantized ones.
//!
//! Decoded weights equal the reference decoder's bit for bit; products are fused into f32 sums.

use std::arch::x86_64::*;
use std::marker::PhantomData;

use super::super::{Act, OutTile, RowList, Rows, SCRATCH_COLS, Scratch};
use super::format::{CHUNK, Format};
use super::panel::{steps, tiles};
use super::transpose::{reduce, transpose};

/// Weights that come out as f32.
pub(super) trait Weights {
    /// Bytes of [`CHUNK`] weights.
    const CHUNK_BYTES: usize;
    /// What is decoded once a chunk.
    type Chunk;

    /// # Safety
    /// `chunk` points to `n` weights, at most [`CHUNK`].
    unsafe fn open(chunk: *const u8, n: usize) -> Self::Chunk;

    /// Weights `64 j ..` of a chunk of `n`; those past the end are any numbers.
    ///
    /// # Safety
    /// `chunk` points to `n` weights, more than `64 j`; `open` comes from there.
    unsafe fn values(chunk: *const u8, open: &Self::Chunk, j: usize, n: usize) -> [__m512; 4];
}

/// A quantized format, decoded.
pub(super) struct Quant<F>(PhantomData<F>);

impl<F: Format> Weights for Quant<F> {
    const CHUNK_BYTES: usize = F::CHUNK_BYTES;
    type Chunk = (__m512, __m512);

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn open(chunk: *const u8, n: usize) -> Self::Chunk {
        // SAFETY: as the caller's.
        unsafe { F::scales(chunk, n / F::BLOCK) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn values(
        chunk: *const u8,
        &(scales, mins): &Self::Chunk,
        j: usize,
        n: usize,
    ) -> [__m512; 4] {
        // SAFETY: as the caller's.
        let codes = unsafe { F::codes(chunk, j, 64 * j + 64 <= n) };
        let parts = [
            _mm512_castsi512_si128(codes),
            _mm512_extracti32x4_epi32::<1>(codes),
            _mm512_extracti32x4_epi32::<2>(codes),
            _mm512_extracti32x4_epi32::<3>(codes),
        ];
        let mut values = [_mm512_setzero_ps(); 4];
        for i in 0..4 {
            let q = _mm512_sub_epi32(
                _mm512_cvtepu8_epi32(parts[i]),
                _mm512_set1_epi32(i32::from(F::ZERO)),
            );
            let group = _mm512_set1_epi32(((64 * j + 16 * i) / F::GROUP) as i32);
            let scale = _mm512_permutexvar_ps(group, scales);
            values[i] = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(q));
            if F::MINS {
                values[i] = _mm512_add_ps(values[i], _mm512_permutexvar_ps(group, mins));
            }
        }
        values
    }
}

/// Which of the 16 weights from `first` on are among `n`.
#[inline(always)]
fn there(first: usize, n: usize) -> __mmask16 {
    ((1u32 << n.saturating_sub(first).min(16)) - 1) as u16
}

/// A float type: `$load` makes 16 f32 of `$bytes` bytes each, where the mask has a bit.
macro_rules! float_weights {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, |$p:ident, $mask:ident| $load:expr) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Weights for $name {
            const CHUNK_BYTES: usize = CHUNK * $bytes;
            type Chunk = ();

            #[inline]
            unsafe fn open(_chunk: *const u8, _n: usize) {}

            #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
            #[inline]
            unsafe fn values(chunk: *const u8, _open: &(), j: usize, n: usize) -> [__m512; 4] {
                let mut values = [_mm512_setzero_ps(); 4];
                for (i, value) in values.iter_mut().enumerate() {
                    let first = 64 * j + 16 * i;
                    let $mask = there(first, n);
                    let $p = chunk.wrapping_add(first * $bytes);
                    // SAFETY: the mask lets through what is there.
                    *value = unsafe { $load };
                }
                values
            }
        }
    };
}

float_weights!(
    /// IEEE single.
    F32, 4, |p, mask| _mm512_maskz_loadu_ps(mask, p.cast())
);
float_weights!(
    /// IEEE half.
    F16, 2, |p, mask| _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p.cast()))
);
float_weights!(
    /// The upper half of an IEEE single.
    Bf16, 2, |p, mask| {
        let wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }
);

/// See [`super::super::Kernels::matvec`]: f32 sums, each lane every 16th column.
///
/// # Safety
/// The lengths were checked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn matvec<W: Weights>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        let mut sums = [_mm512_setzero_ps(); 4];
        for (index, cols) in steps(act.cols, CHUNK).enumerate() {
            // SAFETY: a chunk of this row and its activations.
            unsafe {
                let chunk = row.as_ptr().add(index * W::CHUNK_BYTES);
                let x = act.x.as_ptr().add(cols.start);
                if cols.len() == CHUNK {
                    dot::<W>(chunk, x, CHUNK, &mut sums);
                } else {
                    dot::<W>(chunk, x, cols.len(), &mut sums);
                }
            }
        }
        let [a, b, c, d] = sums;
        *out = reduce(_mm512_add_ps(_mm512_add_ps(a, b), _mm512_add_ps(c, d)));
    }
}

/// # Safety
/// `chunk` and `x` point to `n` weights and activations.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn dot<W: Weights>(chunk: *const u8, x: *const f32, n: usize, sums: &mut [__m512; 4]) {
    // SAFETY: as the caller's; the mask lets through what is there.
    unsafe {
        let open = W::open(chunk, n);
        for j in 0..n.div_ceil(64) {
            let values = W::values(chunk, &open, j, n);
            for i in 0..4 {
                let first = 64 * j + 16 * i;
                let mask = there(first, n);
                let x = _mm512_maskz_loadu_ps(mask, x.wrapping_add(first));
                sums[i] = _mm512_mask3_fmadd_ps(values[i], x, sums[i], mask);
            }
        }
    }
}

/// Rows of a panel, at most.
const ROWS: usize = 32;
/// Tokens of a tile, at most: 24 sums stay in registers.
const TOKENS: usize = 12;
/// Columns of a block: as many bytes as the int8 panel may take.
const COLS: usize = SCRATCH_COLS / 2;

/// See [`super::super::Kernels::matmul`]. The panel is f32, (columns, V, 16 rows).
///
/// # Safety
/// The lengths were checked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn matmul<W: Weights>(
    weights: &Rows<'_>,
    act: &Act<'_>,
    mut out: OutTile<'_>,
    scratch: &mut Scratch,
) {
    let memory = scratch.as_mut_slice();
    let needed = ROWS * act.cols.next_multiple_of(64).min(COLS) * size_of::<f32>();
    assert!(needed <= memory.len(), "{needed} bytes of scratch");
    let panel = memory.as_mut_ptr().cast::<f32>();
    let row_bytes = weights.row_bytes();
    for rows in steps(weights.rows(), ROWS) {
        let source = Source {
            first: weights.bytes.as_ptr().wrapping_add(rows.start * row_bytes),
            row_bytes,
            rows: rows.len(),
        };
        let start = out.as_mut_ptr().wrapping_add(rows.start);
        // SAFETY: `source` are these rows; `start` is where their outputs begin.
        unsafe {
            if rows.len() > 16 {
                pass::<W, 2>(&source, act, start, out.stride(), panel);
            } else {
                pass::<W, 1>(&source, act, start, out.stride(), panel);
            }
        }
    }
}

/// The rows of one panel.
struct Source {
    first: *const u8,
    row_bytes: usize,
    rows: usize,
}

/// All columns and tokens for the rows of one panel.
///
/// # Safety
/// `source` has more than `16 (V - 1)` and at most `16 V` rows, `out` has room for them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pass<W: Weights, const V: usize>(
    source: &Source,
    act: &Act<'_>,
    out: *mut f32,
    stride: usize,
    panel: *mut f32,
) {
    let last = source.rows - 16 * (V - 1);
    for cols in steps(act.cols, COLS) {
        // SAFETY: columns of these rows; the panel has room for a block of columns.
        unsafe { pack::<W, V>(source, cols.start, cols.len(), panel) };
        for tokens in tiles(act.tokens, TOKENS) {
            // SAFETY: tokens and columns of `act`, and their outputs.
            unsafe {
                let at = At {
                    x: act.x.as_ptr().add(tokens.start * act.cols + cols.start),
                    x_stride: act.cols,
                    cols: cols.len(),
                    out: out.add(tokens.start * stride),
                    stride,
                    last_rows: ((1u32 << last) - 1) as u16,
                    first: cols.start == 0,
                };
                match tokens.len() {
                    1 => tile::<V, 1>(panel, &at),
                    2 => tile::<V, 2>(panel, &at),
                    3 => tile::<V, 3>(panel, &at),
                    4 => tile::<V, 4>(panel, &at),
                    5 => tile::<V, 5>(panel, &at),
                    6 => tile::<V, 6>(panel, &at),
                    7 => tile::<V, 7>(panel, &at),
                    8 => tile::<V, 8>(panel, &at),
                    9 => tile::<V, 9>(panel, &at),
                    10 => tile::<V, 10>(panel, &at),
                    11 => tile::<V, 11>(panel, &at),
                    _ => tile::<V, TOKENS>(panel, &at),
                }
            }
        }
    }
}

/// Decodes columns `start .. start + cols` of all rows of `source` into the panel. Lanes without a
/// row repeat the last one.
///
/// # Safety
/// The rows have these columns and `start` is a multiple of [`CHUNK`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
unsafe fn pack<W: Weights, const V: usize>(
    source: &Source,
    start: usize,
    cols: usize,
    panel: *mut f32,
) {
    for (index, chunk) in steps(cols, CHUNK).enumerate() {
        let offset = (start / CHUNK + index) * W::CHUNK_BYTES;
        let n = chunk.len();
        for v in 0..V {
            let row = |r: usize| {
                let row = (16 * v + r).min(source.rows - 1);
                source.first.wrapping_add(row * source.row_bytes + offset)
            };
            // SAFETY: this chunk of each row; the panel has room for a multiple of 64 columns.
            unsafe {
                let open: [W::Chunk; 16] = std::array::from_fn(|r| W::open(row(r), n));
                for j in 0..n.div_ceil(64) {
                    let mut rows = [[_mm512_setzero_si512(); 16]; 4];
                    for r in 0..16 {
                        let values = W::values(row(r), &open[r], j, n);
                        for i in 0..4 {
                            rows[i][r] = _mm512_castps_si512(values[i]);
                        }
                    }
                    for (i, rows) in rows.iter().enumerate() {
                        let first = index * CHUNK + 64 * j + 16 * i;
                        for (c, column) in transpose(rows).into_iter().enumerate() {
                            let to = panel.add(((first + c) * V + v) * 16);
                            _mm512_store_si512(to.cast(), column);
                        }
                    }
                }
            }
        }
    }
}

/// Where a tile reads activations and writes sums.
struct At {
    /// Activation of the first token and column.
    x: *const f32,
    /// Floats between tokens.
    x_stride: usize,
    cols: usize,
    /// Output of the first token and row.
    out: *mut f32,
    stride: usize,
    /// Which lanes of the last vector are rows.
    last_rows: __mmask16,
    /// True for the first block of columns: there is nothing to add to yet.
    first: bool,
}

/// `T` tokens times the panel.
///
/// # Safety
/// The panel is filled for `at.cols`; `at` has `T` tokens and room for their sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
// Indices say which row vector and token, in several arrays at once.
#[allow(clippy::needless_range_loop)]
unsafe fn tile<const V: usize, const T: usize>(panel: *const f32, at: &At) {
    let mut sums = [[_mm512_setzero_ps(); T]; V];
    let x: [*const f32; T] = std::array::from_fn(|t| at.x.wrapping_add(t * at.x_stride));
    for col in 0..at.cols {
        // SAFETY: a column of the panel and of each token.
        unsafe {
            let mut w = [_mm512_setzero_ps(); V];
            for (v, w) in w.iter_mut().enumerate() {
                *w = _mm512_load_ps(panel.add((col * V + v) * 16));
            }
            for t in 0..T {
                let x = _mm512_set1_ps(*x[t].add(col));
                for v in 0..V {
                    sums[v][t] = _mm512_fmadd_ps(w[v], x, sums[v][t]);
                }
            }
        }
    }
    for v in 0..V {
        let rows = if v + 1 == V { at.last_rows } else { !0 };
        for t in 0..T {
            // SAFETY: the mask lets through what is in the output.
            unsafe {
                let to = at.out.add(t * at.stride + 16 * v);
                let mut sum = sums[v][t];
                if !at.first {
                    sum = _mm512_add_ps(_mm512_maskz_loadu_ps(rows, to), sum);
                }
                _mm512_mask_storeu_ps(to, rows, sum);
            }
        }
    }
}
