//! Six rows of two registers: 12 sums, two registers of columns, one of a row.

use super::Shape;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::avx2::Avx2;
use core::arch::x86_64::*;

impl Shape for Avx2 {
    const ROWS: usize = 6;
    const HALF: usize = 4;
    const VECTORS: usize = 2;
    const DEPTH: usize = 256;
    const COLUMNS: usize = 256;

    #[inline(always)]
    unsafe fn transpose(
        self,
        from: *const f32,
        from_stride: usize,
        to: *mut f32,
        to_stride: usize,
    ) {
        for c in (0..Self::N).step_by(4) {
            // SAFETY: the caller vouches for the elements, `self` for the features.
            unsafe {
                // Half `h` of register `i`: four columns of row `4 h + i`.
                let mut rows = [_mm256_setzero_ps(); 4];
                for (i, rows) in rows.iter_mut().enumerate() {
                    let at = |h: usize| _mm_loadu_ps(from.add((4 * h + i) * from_stride + c));
                    *rows = _mm256_set_m128(at(1), at(0));
                }
                let [a, b, c0, d] = rows;
                let (ab, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
                let (cd, cd_high) = (_mm256_unpacklo_ps(c0, d), _mm256_unpackhi_ps(c0, d));
                let columns = [
                    _mm256_shuffle_ps::<0x44>(ab, cd),
                    _mm256_shuffle_ps::<0xee>(ab, cd),
                    _mm256_shuffle_ps::<0x44>(ab_high, cd_high),
                    _mm256_shuffle_ps::<0xee>(ab_high, cd_high),
                ];
                for (j, column) in columns.into_iter().enumerate() {
                    self.store(to.add((c + j) * to_stride), column);
                }
            }
        }
    }
}
