//! Sixteen lanes: AVX-512 F with BW, DQ and VL.

use core::arch::x86_64::*;

use super::{Unpack, positives_from};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::avx512::Avx512;

impl Unpack for Avx512 {
    const RUN: usize = 8;

    #[inline(always)]
    unsafe fn signed(self, from: *const u8, i: usize) -> __m512 {
        // SAFETY: the caller vouches for the bytes, `self` for the features.
        unsafe { self.load_i8(from.add(16 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn unsigned(self, from: *const u8, i: usize, offset: f32) -> __m512 {
        // SAFETY: as in `signed`.
        unsafe {
            let bytes = _mm_loadu_si128(from.add(16 * i).cast());
            let codes = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
            _mm512_sub_ps(codes, _mm512_set1_ps(offset))
        }
    }
    #[inline(always)]
    unsafe fn nibbles(self, from: *const u8, i: usize, offset: f32) -> __m512 {
        // SAFETY: as in `signed`.
        unsafe {
            let eights = from.add(8 * i).cast::<i32>();
            // Eight lanes of the first eight nibbles, eight of the next.
            let low = _mm512_set1_epi32(eights.read_unaligned());
            let all = _mm512_mask_set1_epi32(low, 0xff00, eights.add(1).read_unaligned());
            let by = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            // Looking up only heeds the four lowest bits, and does the subtraction too.
            let nibbles = _mm512_srlv_epi32(all, by);
            let table = _mm512_setr_ps(
                0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0,
                15.0,
            );
            _mm512_permutexvar_ps(nibbles, _mm512_sub_ps(table, _mm512_set1_ps(offset)))
        }
    }
    #[inline(always)]
    unsafe fn bf16(self, from: *const u8, i: usize) -> __m512 {
        // SAFETY: as in `signed`.
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.add(32 * i).cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    fn all_below(self, [a, b, c, d]: [__m512; 4], limit: __m512) -> bool {
        // SAFETY: `self` is a witness of the features.
        unsafe {
            // Each comparison only looks where all before it were true.
            let m = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, limit);
            let m = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(m, b, limit);
            let m = _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(m, c, limit);
            _mm512_mask_cmp_ps_mask::<_CMP_LT_OQ>(m, d, limit) == !0
        }
    }
    #[inline(always)]
    fn not_below(self, x: __m512, limit: __m512) -> u32 {
        // SAFETY: as in `all_below`.
        u32::from(unsafe { _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit) })
    }
    #[inline(always)]
    fn positives(self, g: &[f32], index: &mut [u16]) -> usize {
        assert!(index.len() >= g.len(), "room for every index");
        let (sixteens, _) = g.as_chunks::<16>();
        let mut count = 0;
        // SAFETY: `self` is a witness of the features. Up to `16 * k` indices have been found in as
        // many elements, so there is room for 16 more.
        unsafe {
            let mut at = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            for g in sixteens {
                let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.take(g), _mm512_setzero_ps());
                let found = _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(positive, at));
                _mm256_storeu_si256(index.as_mut_ptr().add(count).cast(), found);
                count += positive.count_ones() as usize;
                at = _mm512_add_epi32(at, _mm512_set1_epi32(16));
            }
        }
        positives_from(g, index, 16 * sixteens.len(), count)
    }
}
