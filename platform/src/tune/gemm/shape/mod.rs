//! What a product needs of an instruction set besides its [`Lanes`]: the register tile, the sizes of
//! the blocks, and a transpose. One ISA a file.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::cpu::vector::lanes::{LANES_MAX, Lanes};

/// Most floats of a register tile's row.
pub(super) const WIDTH_MAX: usize = 32;

/// Sizes that suit an instruction set. All powers of 2 but `ROWS`.
pub(super) trait Shape: Lanes {
    /// Rows of a register tile.
    const ROWS: usize;
    /// Twice as many rows are better done in two than as a whole tile and a small rest.
    const HALF: usize;
    /// Vectors of a row of a register tile.
    const VECTORS: usize;
    /// Terms summed in registers before they reach memory; a multiple of 256.
    const DEPTH: usize;
    /// Columns of the right matrix that are packed at once; a multiple of 256.
    const COLUMNS: usize;

    /// Floats of a tile's row.
    const WIDTH: usize = Self::VECTORS * Self::N;

    /// `to[j * to_stride + i] = from[i * from_stride + j]` for `i` and `j` below `N`.
    ///
    /// # Safety
    /// These elements are readable and writable.
    unsafe fn transpose(self, from: *const f32, from_stride: usize, to: *mut f32, to_stride: usize);
}

/// What the memory of a thread must hold, in floats.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    /// Rows of a register tile.
    pub rows: usize,
    /// Columns of a register tile.
    pub width: usize,
    /// Terms of a block.
    pub depth: usize,
    /// Columns of a block.
    pub columns: usize,
}

crate::cpu::vector::multiversion! {
    /// The sizes of this instruction set's products.
    pub(crate) fn product_sizes() -> Sizes = sizes_body;
}

#[inline(always)]
fn sizes_body<L: Shape>(_: L) -> Sizes {
    const {
        assert!(L::ROWS <= LANES_MAX && L::WIDTH <= WIDTH_MAX);
        assert!(L::DEPTH.is_multiple_of(256) && L::COLUMNS.is_multiple_of(256));
    }
    Sizes {
        rows: L::ROWS,
        width: L::WIDTH,
        depth: L::DEPTH,
        columns: L::COLUMNS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::Vector;

    crate::cpu::vector::multiversion! {
        fn transposed(from: &[f32], from_stride: usize, to: &mut [f32], to_stride: usize) -> usize
            = transposed_body;
    }

    #[inline(always)]
    fn transposed_body<L: Shape>(
        l: L,
        from: &[f32],
        from_stride: usize,
        to: &mut [f32],
        to_stride: usize,
    ) -> usize {
        assert!(from.len() > 15 * from_stride + 15 && to.len() > 15 * to_stride + 15);
        // SAFETY: the slices were just checked.
        unsafe { l.transpose(from.as_ptr(), from_stride, to.as_mut_ptr(), to_stride) };
        L::N
    }

    #[test]
    fn rows_become_columns() {
        let from: Vec<f32> = (0..19 * 16).map(|i| i as f32).collect();
        for v in Vector::available() {
            let mut to = vec![-1.0; 21 * 16];
            let n = v.transposed(&from, 19, &mut to, 21);
            for i in 0..16 {
                for j in 0..16 {
                    let want = if i < n && j < n {
                        from[i * 19 + j]
                    } else {
                        -1.0
                    };
                    assert_eq!(to[j * 21 + i], want, "{v:?} {i} {j}");
                }
            }
        }
    }
}
