//! Six rows of four registers: 24 sums, four registers of columns, one of a row.

use super::Shape;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::neon::Neon;
use core::arch::aarch64::*;

impl Shape for Neon {
    const ROWS: usize = 6;
    const HALF: usize = 4;
    const VECTORS: usize = 4;
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
        // SAFETY: the caller vouches for the elements, `self` for NEON.
        unsafe {
            let row = |i: usize| self.load(from.add(i * from_stride));
            let (a, b, c, d) = (row(0), row(1), row(2), row(3));
            let double = |v| vreinterpretq_f64_f32(v);
            let (ab, ab_odd) = (double(vtrn1q_f32(a, b)), double(vtrn2q_f32(a, b)));
            let (cd, cd_odd) = (double(vtrn1q_f32(c, d)), double(vtrn2q_f32(c, d)));
            let columns = [
                vtrn1q_f64(ab, cd),
                vtrn1q_f64(ab_odd, cd_odd),
                vtrn2q_f64(ab, cd),
                vtrn2q_f64(ab_odd, cd_odd),
            ];
            for (j, column) in columns.into_iter().enumerate() {
                self.store(to.add(j * to_stride), vreinterpretq_f32_f64(column));
            }
        }
    }
}
