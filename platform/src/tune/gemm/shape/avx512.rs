//! 14 rows of two registers: 28 sums, two registers of columns, one of a row.

use super::Shape;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::avx512::Avx512;
use core::arch::x86_64::*;

impl Shape for Avx512 {
    const ROWS: usize = 14;
    const HALF: usize = 8;
    const VECTORS: usize = 2;
    const DEPTH: usize = 512;
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
                // Quarter `q` of register `i`: four columns of row `4 q + i`.
                let mut rows = [_mm512_setzero_ps(); 4];
                for (i, rows) in rows.iter_mut().enumerate() {
                    let at = |q: usize| _mm_loadu_ps(from.add((4 * q + i) * from_stride + c));
                    let low = _mm512_castps128_ps512(at(0));
                    let low = _mm512_insertf32x4::<1>(low, at(1));
                    let low = _mm512_insertf32x4::<2>(low, at(2));
                    *rows = _mm512_insertf32x4::<3>(low, at(3));
                }
                let [a, b, c0, d] = rows;
                let (ab, ab_high) = (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
                let (cd, cd_high) = (_mm512_unpacklo_ps(c0, d), _mm512_unpackhi_ps(c0, d));
                let double = |v| _mm512_castps_pd(v);
                let columns = [
                    _mm512_unpacklo_pd(double(ab), double(cd)),
                    _mm512_unpackhi_pd(double(ab), double(cd)),
                    _mm512_unpacklo_pd(double(ab_high), double(cd_high)),
                    _mm512_unpackhi_pd(double(ab_high), double(cd_high)),
                ];
                for (j, column) in columns.into_iter().enumerate() {
                    self.store(to.add((c + j) * to_stride), _mm512_castpd_ps(column));
                }
            }
        }
    }
}
