//! Eight lanes: AVX2 with FMA and F16C.

use core::arch::x86_64::*;

use super::{Unpack, positives_from};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::avx2::Avx2;

/// For each set of eight lanes, their numbers in order.
static LANES_OF: [[u8; 8]; 256] = {
    let mut all = [[0; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut lane, mut n) = (0, 0);
        while lane < 8 {
            if set >> lane & 1 == 1 {
                all[set][n] = lane;
                n += 1;
            }
            lane += 1;
        }
        set += 1;
    }
    all
};

impl Unpack for Avx2 {
    const RUN: usize = 2;

    #[inline(always)]
    unsafe fn signed(self, from: *const u8, i: usize) -> __m256 {
        // SAFETY: the caller vouches for the bytes, `self` for the features.
        unsafe { self.load_i8(from.add(8 * i).cast()) }
    }
    #[inline(always)]
    unsafe fn unsigned(self, from: *const u8, i: usize, offset: f32) -> __m256 {
        // SAFETY: as in `signed`.
        unsafe {
            let bytes = _mm_loadl_epi64(from.add(8 * i).cast());
            let codes = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
            _mm256_sub_ps(codes, _mm256_set1_ps(offset))
        }
    }
    #[inline(always)]
    unsafe fn nibbles(self, from: *const u8, i: usize, offset: f32) -> __m256 {
        // SAFETY: as in `signed`.
        unsafe {
            let all = _mm256_set1_epi32(from.add(4 * i).cast::<i32>().read_unaligned());
            let by = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
            let codes = _mm256_and_si256(_mm256_srlv_epi32(all, by), _mm256_set1_epi32(15));
            _mm256_sub_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(offset))
        }
    }
    #[inline(always)]
    unsafe fn bf16(self, from: *const u8, i: usize) -> __m256 {
        // SAFETY: as in `signed`.
        unsafe {
            let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16 * i).cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }
    #[inline(always)]
    fn all_below(self, x: [__m256; 4], limit: __m256) -> bool {
        // SAFETY: `self` is a witness of the features.
        unsafe {
            let [a, b, c, d] = x.map(|x| _mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit));
            let any = _mm256_or_ps(_mm256_or_ps(a, b), _mm256_or_ps(c, d));
            _mm256_movemask_ps(any) == 0
        }
    }
    #[inline(always)]
    fn not_below(self, x: __m256, limit: __m256) -> u32 {
        // SAFETY: as in `all_below`.
        let bits = unsafe { _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit)) };
        bits.cast_unsigned()
    }
    #[inline(always)]
    fn positives(self, g: &[f32], index: &mut [u16]) -> usize {
        assert!(index.len() >= g.len(), "room for every index");
        let (eights, _) = g.as_chunks::<8>();
        let mut count = 0;
        for (k, g) in eights.iter().enumerate() {
            // SAFETY: `self` is a witness of the features. Up to `8 * k` indices have been found in
            // as many elements, so there is room for 8 more.
            unsafe {
                let positive = _mm256_cmp_ps::<_CMP_GT_OQ>(self.take(g), _mm256_setzero_ps());
                let set = _mm256_movemask_ps(positive).cast_unsigned();
                let lanes = _mm_loadl_epi64(LANES_OF[set as usize].as_ptr().cast());
                let first = _mm_set1_epi16((8 * k) as i16);
                let found = _mm_add_epi16(_mm_cvtepu8_epi16(lanes), first);
                _mm_storeu_si128(index.as_mut_ptr().add(count).cast(), found);
                count += set.count_ones() as usize;
            }
        }
        positives_from(g, index, 8 * eights.len(), count)
    }
}
