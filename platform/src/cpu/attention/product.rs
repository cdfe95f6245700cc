//! The product of a few rows with a block of keys or values, in register tiles.

use super::source::Source;
use crate::cpu::vector::lanes::Lanes;

/// The left-hand matrix: `count` rows, of which the columns `depth.0 .. depth.1` take part.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub at: *const f32,
    pub stride: usize,
    pub count: usize,
    pub depth: (usize, usize),
}

/// `out = a * b`, or `out = factors * out + a * b` row by row where `ADD`. Computes `columns` columns,
/// rounded up to vectors. Each element is a sum over the depth in order.
///
/// # Safety
/// The matrices have the elements, `out` the rows of `a` and the columns; `factors` has LANES_MAX
/// elements where `ADD`.
#[inline(always)]
pub(super) unsafe fn multiply<L: Lanes, B: Source<L>, const ADD: bool>(
    l: L,
    a: Matrix,
    b: B,
    columns: usize,
    out: *mut f32,
    stride: usize,
    factors: *const f32,
) {
    macro_rules! rows {
        ($columns:literal, $column:expr) => {
            match a.count {
                1 => tile::<L, B, 1, $columns, ADD>(l, a, b, $column, out, stride, factors),
                2 => tile::<L, B, 2, $columns, ADD>(l, a, b, $column, out, stride, factors),
                3 => tile::<L, B, 3, $columns, ADD>(l, a, b, $column, out, stride, factors),
                4 => tile::<L, B, 4, $columns, ADD>(l, a, b, $column, out, stride, factors),
                5 => tile::<L, B, 5, $columns, ADD>(l, a, b, $column, out, stride, factors),
                _ => tile::<L, B, 6, $columns, ADD>(l, a, b, $column, out, stride, factors),
            }
        };
    }
    let mut column = 0;
    while column < columns {
        let left = (columns - column).div_ceil(L::N);
        // SAFETY: the caller vouches for the elements.
        unsafe {
            if L::PANEL >= 4 && left >= 4 {
                rows!(4, column);
                column += 4 * L::N;
            } else if L::PANEL >= 2 && left >= 2 {
                rows!(2, column);
                column += 2 * L::N;
            } else {
                rows!(1, column);
                column += L::N;
            }
        }
    }
}

/// One register tile of [`multiply`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn tile<L: Lanes, B: Source<L>, const ROWS: usize, const COLUMNS: usize, const ADD: bool>(
    l: L,
    a: Matrix,
    b: B,
    column: usize,
    out: *mut f32,
    stride: usize,
    factors: *const f32,
) {
    let mut sums = [[l.splat(0.0); COLUMNS]; ROWS];
    // SAFETY: the caller vouches for the elements.
    unsafe {
        if ADD {
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = l.splat(*factors.add(r));
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = l.mul(l.load(out.add(r * stride + column + c * L::N)), factor);
                }
            }
        }
        for k in a.depth.0..a.depth.1 {
            let mut right = [l.splat(0.0); COLUMNS];
            for (c, right) in right.iter_mut().enumerate() {
                *right = b.at(l, k, column + c * L::N);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let left = l.splat(*a.at.add(r * a.stride + k));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = l.fma(left, right, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                l.store(out.add(r * stride + column + c * L::N), *sum);
            }
        }
    }
}
