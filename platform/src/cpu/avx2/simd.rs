//! Small pieces that several AVX2 kernels share.

use std::arch::x86_64::*;

use super::super::Act;
use super::super::scales::{Halves, Scales};
use super::codes::{Codes, Shape};
use super::matmul::Tile;

/// Halves through F16C.
pub(super) struct F16c;

impl Halves for F16c {
    #[inline(always)]
    unsafe fn widen(halves: [u16; 8]) -> [f32; 8] {
        let mut out = [0f32; 8];
        // SAFETY: both arrays hold one register; the instruction set is the caller's.
        unsafe {
            let wide = _mm256_cvtph_ps(_mm_loadu_si128(halves.as_ptr().cast()));
            _mm256_storeu_ps(out.as_mut_ptr(), wide);
        }
        out
    }
}

/// How bytes are multiplied. Codes of weights are those of [`Codes`], codes of activations are in
/// -127..=127. All sums are exact.
pub(super) trait Dot {
    /// Lane `l`: the sum of products of bytes `4l .. 4l + 4`.
    ///
    /// # Safety
    /// The machine has the instructions, and `w` are codes of shape `S`.
    unsafe fn dot<S: Shape>(w: __m256i, a: __m256i) -> __m256i;

    /// Lane `row` of result `t`: the sum of products of `4 * steps` codes of eight rows and of token
    /// `t`. Register `i` of `w` has codes `4i .. 4i + 4` of each row.
    ///
    /// # Safety
    /// As above; `w` has `steps` registers and each token `4 * steps` codes.
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const __m256i,
        steps: usize,
        tokens: [*const i8; T],
    ) -> [__m256i; T];

    /// [`Tile::all`], compiled for the instruction set.
    ///
    /// # Safety
    /// That of [`Tile::all`].
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>);
}

/// AVX2 alone: two products at a time meet in 16 bits.
pub(super) struct Plain;

impl Dot for Plain {
    #[inline(always)]
    unsafe fn dot<S: Shape>(w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller's. Two products are at most 2 * 128 * 127, which fits 16 bits.
        unsafe {
            let (w, a) = unsigned_first::<S>(w, a);
            _mm256_madd_epi16(_mm256_maddubs_epi16(w, a), _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const __m256i,
        steps: usize,
        tokens: [*const i8; T],
    ) -> [__m256i; T] {
        // Pairs of products that 16 bits hold, as a power of two; at least one.
        let held = i32::from(i16::MAX) / (2 * 127 * i32::from(S::MAX));
        let held = steps.min(1 << held.ilog2());
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [_mm256_setzero_si256(); T];
            for first in (0..steps).step_by(held) {
                let mut narrow = [_mm256_setzero_si256(); T];
                for step in first..first + held {
                    let w = _mm256_load_si256(w.add(step));
                    for (t, narrow) in narrow.iter_mut().enumerate() {
                        let (w, a) = unsigned_first::<S>(w, four_codes(tokens[t], step));
                        *narrow = _mm256_add_epi16(*narrow, _mm256_maddubs_epi16(w, a));
                    }
                }
                for (sum, narrow) in sums.iter_mut().zip(narrow) {
                    let wide = _mm256_madd_epi16(narrow, _mm256_set1_epi16(1));
                    *sum = _mm256_add_epi32(*sum, wide);
                }
            }
            sums
        }
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>) {
        // SAFETY: the caller's.
        unsafe { tile.all::<S, Self>(act) }
    }
}

/// AVX-VNNI: four products at a time meet in 32 bits.
pub(super) struct Vnni;

impl Dot for Vnni {
    #[inline(always)]
    unsafe fn dot<S: Shape>(w: __m256i, a: __m256i) -> __m256i {
        // SAFETY: the caller's.
        unsafe {
            let (w, a) = unsigned_first::<S>(w, a);
            _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), w, a)
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const __m256i,
        steps: usize,
        tokens: [*const i8; T],
    ) -> [__m256i; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [_mm256_setzero_si256(); T];
            for step in 0..steps {
                let w = _mm256_load_si256(w.add(step));
                for (t, sum) in sums.iter_mut().enumerate() {
                    let (w, a) = unsigned_first::<S>(w, four_codes(tokens[t], step));
                    *sum = _mm256_dpbusd_avx_epi32(*sum, w, a);
                }
            }
            sums
        }
    }

    #[target_feature(enable = "avx2,fma,avxvnni")]
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>) {
        // SAFETY: the caller's.
        unsafe { tile.all::<S, Self>(act) }
    }
}

/// The byte multiplications want their first side unsigned: signed weights give their sign away.
#[inline(always)]
unsafe fn unsigned_first<S: Shape>(w: __m256i, a: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller's.
    unsafe {
        if S::SIGNED {
            (_mm256_abs_epi8(w), _mm256_sign_epi8(a, w))
        } else {
            (w, a)
        }
    }
}

/// Codes `4 * step ..` of a token, in all lanes.
#[inline(always)]
unsafe fn four_codes(token: *const i8, step: usize) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_set1_epi32(token.add(4 * step).cast::<i32>().read_unaligned()) }
}

/// The weights of group `g` (of 32) of a chunk.
///
/// # Safety
/// That of [`Codes::codes`], with FMA.
#[inline(always)]
pub(super) unsafe fn decode<F: Codes>(chunk: *const u8, g: usize, scales: &Scales) -> [__m256; 4] {
    // SAFETY: the caller's.
    unsafe {
        let codes = F::codes(chunk, g);
        let (low, high) = (
            _mm256_castsi256_si128(codes),
            _mm256_extracti128_si256::<1>(codes),
        );
        let eights = [
            low,
            _mm_srli_si128::<8>(low),
            high,
            _mm_srli_si128::<8>(high),
        ];
        let mut out = [_mm256_setzero_ps(); 4];
        for (i, (out, eight)) in out.iter_mut().zip(eights).enumerate() {
            let group = if F::SIXTEENS { 2 * g + i / 2 } else { g };
            let wide = if F::Shape::SIGNED {
                _mm256_cvtepi8_epi32(eight)
            } else {
                _mm256_cvtepu8_epi32(eight)
            };
            let q = _mm256_sub_epi32(wide, _mm256_set1_epi32(i32::from(F::OFFSET)));
            let s = _mm256_set1_ps(scales.s[group]);
            let q = _mm256_cvtepi32_ps(q);
            *out = if F::MINS {
                _mm256_fmadd_ps(q, s, _mm256_set1_ps(scales.m[group]))
            } else {
                _mm256_mul_ps(q, s)
            };
        }
        out
    }
}

/// Sum of eight lanes, in an order that never changes.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn sum8(v: __m256) -> f32 {
    // SAFETY: the caller's.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        let one = _mm_add_ss(two, _mm_movehdup_ps(two));
        _mm_cvtss_f32(one)
    }
}

/// Transposes eight registers of eight 32-bit lanes: lane `j` of result `i` is lane `i` of `rows[j]`.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: the caller's.
    unsafe {
        let mut pairs = rows;
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
        }
        let mut fours = pairs;
        for i in 0..2 {
            let [a, b, c, d] = [
                pairs[4 * i],
                pairs[4 * i + 1],
                pairs[4 * i + 2],
                pairs[4 * i + 3],
            ];
            fours[4 * i] = _mm256_unpacklo_epi64(a, c);
            fours[4 * i + 1] = _mm256_unpackhi_epi64(a, c);
            fours[4 * i + 2] = _mm256_unpacklo_epi64(b, d);
            fours[4 * i + 3] = _mm256_unpackhi_epi64(b, d);
        }
        let mut out = fours;
        for i in 0..4 {
            out[i] = _mm256_permute2x128_si256::<0x20>(fours[i], fours[i + 4]);
            out[i + 4] = _mm256_permute2x128_si256::<0x31>(fours[i], fours[i + 4]);
        }
        out
    }
}
