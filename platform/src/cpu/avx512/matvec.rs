//! One token times quantized rows, int8 activations.

use std::arch::x86_64::*;

use super::super::{Act, RowList};
use super::format::{CHUNK, Format};
use super::transpose::reduce;

/// See [`super::super::Kernels::matvec`].
///
/// Row after row: the memory is read in order, which is what keeps its prefetchers going. Several
/// rows at once would share the preparation of activations, and run at a quarter of the speed.
///
/// # Safety
/// The lengths were checked.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn matvec<F: Format>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    let (chunks, left) = (act.cols / CHUNK, act.cols % CHUNK);
    for (row, out) in weights.iter().zip(out) {
        let mut state = State::new();
        let mut p = row.as_ptr();
        for chunk in 0..chunks {
            // SAFETY: a whole chunk of activations and of the row.
            unsafe {
                let prepared = Prepared::whole::<F>(act, chunk);
                state.whole::<F>(p, &prepared);
                p = p.add(F::CHUNK_BYTES);
            }
        }
        if left > 0 {
            // SAFETY: what is left of the activations and of the row.
            unsafe {
                let prepared = Prepared::part::<F>(act, chunks, left);
                state.part::<F>(p, left, &prepared);
            }
        }
        *out = state.sum();
    }
}

/// The activations of a chunk.
struct Prepared {
    codes: *const i8,
    /// Scale of each group of the weights' format.
    scales: __m512,
    /// Scale times sum of the codes of each group, times minus the zero point if there is one.
    sums: __m512,
}

impl Prepared {
    /// # Safety
    /// The activations have a whole chunk `chunk`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn whole<F: Format>(act: &Act<'_>, chunk: usize) -> Self {
        // SAFETY: 8 scales, 16 sums.
        let (codes, scales, sums) = unsafe {
            (
                act.codes.as_ptr().add(chunk * CHUNK),
                _mm256_loadu_ps(act.scales.as_ptr().add(chunk * 8)),
                _mm256_loadu_si256(act.sums.as_ptr().add(chunk * 16).cast()),
            )
        };
        Self::from::<F>(codes, scales, sums)
    }

    /// # Safety
    /// The activations have `left` (a multiple of 32) columns of chunk `chunk`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn part<F: Format>(act: &Act<'_>, chunk: usize, left: usize) -> Self {
        let (scales, sums) = ((1u32 << (left / 32)) - 1, (1u32 << (left / 16)) - 1);
        // SAFETY: the masks let through what is there.
        let (codes, scales, sums) = unsafe {
            (
                act.codes.as_ptr().add(chunk * CHUNK),
                _mm256_maskz_loadu_ps(scales as u8, act.scales.as_ptr().add(chunk * 8)),
                _mm256_maskz_loadu_epi16(sums as u16, act.sums.as_ptr().add(chunk * 16)),
            )
        };
        Self::from::<F>(codes, scales, sums)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    fn from<F: Format>(codes: *const i8, scales: __m256, sums: __m256i) -> Self {
        let (scales, sums) = if F::GROUP == 32 {
            let pairs = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
            (
                _mm512_zextps256_ps512(scales),
                _mm512_zextsi256_si512(pairs),
            )
        } else {
            let both = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            let scales = _mm512_permutexvar_ps(both, _mm512_zextps256_ps512(scales));
            (scales, _mm512_cvtepi16_epi32(sums))
        };
        let sums = _mm512_cvtepi32_ps(sums);
        let sums = if F::MINS {
            sums
        } else {
            _mm512_mul_ps(sums, _mm512_set1_ps(-f32::from(F::ZERO)))
        };
        Self {
            codes,
            scales,
            sums: _mm512_mul_ps(scales, sums),
        }
    }
}

/// Sums of a row so far.
struct State {
    /// Products of codes, each lane 4 neighbouring columns of each 64; two to shorten the chain.
    products: [__m512; 2],
    /// Zero points or minima times activations, each lane a group.
    offsets: __m512,
}

impl State {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    fn new() -> Self {
        Self {
            products: [_mm512_setzero_ps(); 2],
            offsets: _mm512_setzero_ps(),
        }
    }

    /// # Safety
    /// `p` points to a whole chunk of weights, `prepared` belongs to a whole chunk.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn whole<F: Format>(&mut self, p: *const u8, prepared: &Prepared) {
        // SAFETY: all blocks of a chunk.
        let scales = unsafe { F::scales(p, CHUNK / F::BLOCK) };
        let scales = self.offsets::<F>(scales, prepared);
        for j in 0..CHUNK / 64 {
            // SAFETY: 64 weights, 64 activations.
            unsafe {
                let codes = F::codes(p, j, true);
                let act = _mm512_loadu_si512(prepared.codes.add(64 * j).cast());
                self.products::<F>(j, codes, act, scales);
            }
        }
    }

    /// # Safety
    /// `p` points to `left` weights, `prepared` belongs to `left` activations.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn part<F: Format>(&mut self, p: *const u8, left: usize, prepared: &Prepared) {
        // SAFETY: the blocks that are left.
        let scales = unsafe { F::scales(p, left / F::BLOCK) };
        let scales = self.offsets::<F>(scales, prepared);
        for j in 0..left.div_ceil(64) {
            // SAFETY: 64 weights and 64 activations, or 32 of both.
            unsafe {
                let whole = 64 * j + 64 <= left;
                let there = if whole { !0 } else { 0xffff_ffff };
                let codes = F::codes(p, j, whole);
                let act = _mm512_maskz_loadu_epi8(there, prepared.codes.add(64 * j));
                self.products::<F>(j, codes, act, scales);
            }
        }
    }

    /// Adds zero points or minima; returns the product of both scales.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    fn offsets<F: Format>(&mut self, (scales, mins): (__m512, __m512), p: &Prepared) -> __m512 {
        let by = if F::MINS { mins } else { scales };
        self.offsets = _mm512_fmadd_ps(by, p.sums, self.offsets);
        _mm512_mul_ps(scales, p.scales)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    fn products<F: Format>(&mut self, j: usize, codes: __m512i, act: __m512i, scales: __m512) {
        let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes, act);
        // Lane `i` holds columns `4 i ..` of the 64, so 8 or 4 lanes belong to a group.
        let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        let group = if F::GROUP == 32 {
            let first = _mm512_set1_epi32(2 * j as i32);
            _mm512_add_epi32(_mm512_srli_epi32::<3>(lanes), first)
        } else {
            let first = _mm512_set1_epi32(4 * j as i32);
            _mm512_add_epi32(_mm512_srli_epi32::<2>(lanes), first)
        };
        let scale = _mm512_permutexvar_ps(group, scales);
        let sum = &mut self.products[j % 2];
        *sum = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *sum);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    fn sum(self) -> f32 {
        let [a, b] = self.products;
        reduce(_mm512_add_ps(_mm512_add_ps(a, b), self.offsets))
    }
}
