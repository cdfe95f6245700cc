//! Four rows of one array of eight floats.

use super::Shape;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::portable::Portable;

impl Shape for Portable {
    const ROWS: usize = 4;
    const HALF: usize = 2;
    const VECTORS: usize = 1;
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
        for j in 0..Self::N {
            for i in 0..Self::N {
                // SAFETY: the caller vouches for the elements.
                unsafe { *to.add(j * to_stride + i) = *from.add(i * from_stride + j) };
            }
        }
    }
}
