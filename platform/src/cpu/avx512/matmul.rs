//! Many tokens times quantized rows, int8 activations.
//!
//! A panel has `V` = 1 or 2 vectors of 16 rows. Shapes inside it, for a block of columns:
//! codes (columns / 4, V, 16 rows, 4), scales and minima (groups, V, 16 rows).

use std::arch::x86_64::*;

use super::super::{Act, OutTile, Rows, SCRATCH_COLS, Scratch};
use super::format::{CHUNK, Format};
use super::panel::{steps, tiles};
use super::transpose::transpose;

/// Rows of a panel, at most.
const ROWS: usize = 32;
/// Tokens of a tile, at most: 12 integer and 12 float sums stay in registers.
const TOKENS: usize = 6;
/// Columns of a block.
const COLS: usize = SCRATCH_COLS;

/// What the tile needs to know of its tokens' block of columns, besides the codes.
#[repr(C, align(64))]
struct Tokens {
    /// Activation scale of 32 columns.
    scales: [[f32; COLS / 32]; TOKENS],
    /// Per group of the format: minus zero point times sum of codes (i32), or, where there are
    /// minima, scale times sum of codes (f32, as its bits).
    offsets: [[i32; COLS / 16]; TOKENS],
}

/// The parts of the scratch memory.
struct Panel {
    codes: *mut u8,
    scales: *mut f32,
    mins: *mut f32,
    tokens: *mut Tokens,
}

impl Panel {
    /// Lays the parts out for a matrix of `cols` columns.
    fn new(scratch: &mut Scratch, cols: usize) -> Self {
        let cols = cols.next_multiple_of(CHUNK).min(COLS);
        let (codes, scales) = (ROWS * cols, ROWS * cols / 16 * size_of::<f32>());
        let memory = scratch.as_mut_slice();
        let needed = codes + 2 * scales + size_of::<Tokens>();
        assert!(needed <= memory.len(), "{needed} bytes of scratch");
        let start = memory.as_mut_ptr();
        // `wrapping_add`, though all of these are inside.
        Self {
            codes: start,
            scales: start.wrapping_add(codes).cast(),
            mins: start.wrapping_add(codes + scales).cast(),
            tokens: start.wrapping_add(codes + 2 * scales).cast(),
        }
    }
}

/// See [`super::super::Kernels::matmul`].
///
/// # Safety
/// The lengths were checked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn matmul<F: Format>(
    weights: &Rows<'_>,
    act: &Act<'_>,
    mut out: OutTile<'_>,
    scratch: &mut Scratch,
) {
    let panel = Panel::new(scratch, act.cols);
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
                pass::<F, 2>(&source, act, start, out.stride(), &panel);
            } else {
                pass::<F, 1>(&source, act, start, out.stride(), &panel);
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
unsafe fn pass<F: Format, const V: usize>(
    source: &Source,
    act: &Act<'_>,
    out: *mut f32,
    stride: usize,
    panel: &Panel,
) {
    let last = source.rows - 16 * (V - 1);
    for cols in steps(act.cols, COLS) {
        // SAFETY: columns of these rows; the panel has room for a block of columns.
        unsafe { pack::<F, V>(source, cols.start, cols.len(), panel) };
        for tokens in tiles(act.tokens, TOKENS) {
            // SAFETY: tokens and columns of `act`, at most `TOKENS` and `COLS` of them.
            unsafe {
                for t in 0..tokens.len() {
                    prepare::<F>(act, tokens.start + t, cols.start, cols.len(), panel, t);
                }
                let at = At {
                    codes: act.codes.as_ptr().add(tokens.start * act.cols + cols.start),
                    code_stride: act.cols,
                    groups: cols.len() / 32,
                    out: out.add(tokens.start * stride),
                    stride,
                    last_rows: ((1u32 << last) - 1) as u16,
                    first: cols.start == 0,
                };
                match tokens.len() {
                    1 => tile::<F, V, 1>(panel, &at),
                    2 => tile::<F, V, 2>(panel, &at),
                    3 => tile::<F, V, 3>(panel, &at),
                    4 => tile::<F, V, 4>(panel, &at),
                    5 => tile::<F, V, 5>(panel, &at),
                    _ => tile::<F, V, TOKENS>(panel, &at),
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
unsafe fn pack<F: Format, const V: usize>(
    source: &Source,
    start: usize,
    cols: usize,
    panel: &Panel,
) {
    for (index, chunk) in steps(cols, CHUNK).enumerate() {
        let offset = (start / CHUNK + index) * F::CHUNK_BYTES;
        for v in 0..V {
            let row = |r: usize| {
                let row = (16 * v + r).min(source.rows - 1);
                source.first.wrapping_add(row * source.row_bytes + offset)
            };
            let (mut scales, mut mins) =
                ([_mm512_setzero_si512(); 16], [_mm512_setzero_si512(); 16]);
            for r in 0..16 {
                // SAFETY: the blocks of this chunk.
                let (d, m) = unsafe { F::scales(row(r), chunk.len() / F::BLOCK) };
                (scales[r], mins[r]) = (_mm512_castps_si512(d), _mm512_castps_si512(m));
            }
            let at = (index * F::GROUPS * V + v) * 16;
            // SAFETY: the panel has room for a block of columns.
            unsafe {
                store(
                    &transpose(&scales)[..F::GROUPS],
                    panel.scales.add(at).cast(),
                    V,
                );
                if F::MINS {
                    store(&transpose(&mins)[..F::GROUPS], panel.mins.add(at).cast(), V);
                }
            }
            for j in 0..chunk.len().div_ceil(64) {
                let whole = 64 * j + 64 <= chunk.len();
                let mut codes = [_mm512_setzero_si512(); 16];
                for (r, codes) in codes.iter_mut().enumerate() {
                    // SAFETY: the blocks with these 64 or 32 weights.
                    *codes = unsafe { F::codes(row(r), j, whole) };
                }
                let at = ((index * CHUNK / 4 + 16 * j) * V + v) * 64;
                // SAFETY: the panel has room for a block of columns, rounded up to whole chunks.
                unsafe { store(&transpose(&codes), panel.codes.add(at).cast(), V) };
            }
        }
    }
}

/// # Safety
/// `to` is aligned and has room for `vectors`, `step` vectors apart.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn store(vectors: &[__m512i], to: *mut __m512i, step: usize) {
    for (i, &vector) in vectors.iter().enumerate() {
        // SAFETY: as the caller's.
        unsafe { _mm512_store_si512(to.add(i * step), vector) };
    }
}

/// Fills token `t` of [`Tokens`] for columns `start .. start + cols` of `token`.
///
/// # Safety
/// `act` has them, and `start` is a multiple of [`COLS`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn prepare<F: Format>(
    act: &Act<'_>,
    token: usize,
    start: usize,
    cols: usize,
    panel: &Panel,
    t: usize,
) {
    let first = token * act.cols + start;
    for part in steps(cols, 512) {
        let (groups, at) = (part.len() / 32, first + part.start);
        // SAFETY: the masks let through what is there; `Tokens` has room for a block of columns.
        unsafe {
            let scales = _mm512_maskz_loadu_ps(
                ((1u32 << groups) - 1) as u16,
                act.scales.as_ptr().add(at / 32),
            );
            let sums = _mm512_maskz_loadu_epi16(
                ((1u64 << (2 * groups)) - 1) as u32,
                act.sums.as_ptr().add(at / 16),
            );
            let to = &mut *panel.tokens;
            _mm512_storeu_ps(to.scales[t].as_mut_ptr().add(part.start / 32), scales);
            let to = to.offsets[t].as_mut_ptr().add(part.start / F::GROUP);
            if F::GROUP == 32 {
                let pairs = _mm512_madd_epi16(sums, _mm512_set1_epi16(1));
                _mm512_storeu_si512(to.cast(), offsets::<F>(pairs, scales));
            } else {
                let lanes = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
                let low = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(sums));
                let high = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(sums));
                let low_scales = _mm512_permutexvar_ps(lanes, scales);
                let lanes = _mm512_add_epi32(lanes, _mm512_set1_epi32(8));
                let high_scales = _mm512_permutexvar_ps(lanes, scales);
                _mm512_storeu_si512(to.cast(), offsets::<F>(low, low_scales));
                _mm512_storeu_si512(to.add(16).cast(), offsets::<F>(high, high_scales));
            }
        }
    }
}

/// [`Tokens::offsets`] of 16 groups.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
fn offsets<F: Format>(sums: __m512i, scales: __m512) -> __m512i {
    if F::MINS {
        _mm512_castps_si512(_mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales))
    } else {
        _mm512_mullo_epi32(sums, _mm512_set1_epi32(-i32::from(F::ZERO)))
    }
}

/// Where a tile reads activations and writes sums.
struct At {
    /// Codes of the first token and column.
    codes: *const i8,
    /// Codes between tokens.
    code_stride: usize,
    /// Groups of 32 columns.
    groups: usize,
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
/// Panel and tokens are filled for `at.groups`; `at` has `T` tokens and room for their sums.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
// Indices say which row vector and token, in several arrays at once.
#[allow(clippy::needless_range_loop)]
unsafe fn tile<F: Format, const V: usize, const T: usize>(panel: &Panel, at: &At) {
    let mut sums = [[_mm512_setzero_ps(); T]; V];
    let mut weights: *const u8 = panel.codes;
    let (mut scales, mut mins): (*const f32, *const f32) = (panel.scales, panel.mins);
    let mut codes: [*const i8; T] =
        std::array::from_fn(|t| at.codes.wrapping_add(t * at.code_stride));
    let tokens: *const Tokens = panel.tokens;
    for group in 0..at.groups {
        for part in 0..32 / F::GROUP {
            let group_of_format = group * (32 / F::GROUP) + part;
            // SAFETY: all of this group is in the panel, in `Tokens` and in the activations.
            unsafe {
                let offset = |t: usize| {
                    (&raw const (*tokens).offsets[t])
                        .cast::<i32>()
                        .add(group_of_format)
                };
                let scale = |t: usize| *(&raw const (*tokens).scales[t]).cast::<f32>().add(group);
                let mut dots = [[_mm512_setzero_si512(); T]; V];
                if !F::MINS {
                    for t in 0..T {
                        for dots in &mut dots {
                            dots[t] = _mm512_set1_epi32(*offset(t));
                        }
                    }
                }
                let mut here = F::GROUP * part;
                for k in 0..F::GROUP / 4 {
                    if F::GROUP == 32 {
                        here = opaque(here);
                    }
                    let mut w = [_mm512_setzero_si512(); V];
                    for (v, w) in w.iter_mut().enumerate() {
                        *w = _mm512_load_si512(weights.add((k * V + v) * 64).cast());
                    }
                    for t in 0..T {
                        let p = codes[t].add(here + 4 * k);
                        let a = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
                        for v in 0..V {
                            dots[v][t] = _mm512_dpbusd_epi32(dots[v][t], w[v], a);
                        }
                    }
                }
                weights = weights.add(F::GROUP / 4 * V * 64);
                for v in 0..V {
                    let d = _mm512_load_ps(scales.add(16 * v));
                    for t in 0..T {
                        let by = _mm512_mul_ps(d, _mm512_set1_ps(scale(t)));
                        sums[v][t] =
                            _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[v][t]), by, sums[v][t]);
                    }
                }
                scales = scales.add(16 * V);
                if F::MINS {
                    for v in 0..V {
                        let m = _mm512_load_ps(mins.add(16 * v));
                        for t in 0..T {
                            let by = _mm512_set1_ps(*offset(t).cast::<f32>());
                            sums[v][t] = _mm512_fmadd_ps(m, by, sums[v][t]);
                        }
                    }
                    mins = mins.add(16 * V);
                }
            }
        }
        for codes in &mut codes {
            *codes = codes.wrapping_add(32);
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

/// `n`, in a way that the compiler can't look through: it may not move what depends on the result
/// ahead. Left alone, it loads the activations of all eight steps first and has no registers left.
#[inline(always)]
fn opaque(mut n: usize) -> usize {
    // SAFETY: does nothing.
    unsafe {
        std::arch::asm!("/* {0} */", inout(reg) n, options(pure, nomem, nostack, preserves_flags))
    };
    n
}
