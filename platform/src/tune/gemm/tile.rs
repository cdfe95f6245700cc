//! The register tile: a few packed rows times a few packed columns.

use super::shape::{Shape, WIDTH_MAX};
use crate::cpu::vector::lanes::LANES_MAX;

/// Where a tile's sums go.
#[derive(Clone, Copy)]
pub(super) struct Target {
    /// Element (0, 0).
    pub at: *mut f32,
    pub row_stride: usize,
    pub col_stride: usize,
    /// Rows that there are; the tile's others are dropped.
    pub rows: usize,
    /// Columns that there are, likewise.
    pub cols: usize,
    /// What every sum is multiplied with.
    pub factor: f32,
    /// True where the sums are added to what is there.
    pub add: bool,
}

/// The product of `left` (rows, `L::DEPTH`) and `right` (depth, `L::WIDTH`): each element is a chain of
/// multiply-adds over the depth in order, whatever the tile's size.
///
/// # Safety
/// `left` has as many rows as the tile (they may hold anything past `to.rows`), both have `depth`, and
/// the elements of `to` may be written.
#[inline(always)]
pub(super) unsafe fn tile<L: Shape>(
    l: L,
    left: *const f32,
    right: *const f32,
    depth: usize,
    to: &Target,
) {
    macro_rules! rows {
        ($vectors:literal) => {
            match to.rows {
                1 => sums::<L, 1, $vectors>(l, left, right, depth, to),
                2 => sums::<L, 2, $vectors>(l, left, right, depth, to),
                3 | 4 => sums::<L, 4, $vectors>(l, left, right, depth, to),
                _ if L::ROWS == 6 => sums::<L, 6, $vectors>(l, left, right, depth, to),
                _ if L::ROWS == 8 || L::ROWS > 8 && to.rows <= 8 => {
                    sums::<L, 8, $vectors>(l, left, right, depth, to)
                }
                _ if L::ROWS == 14 => sums::<L, 14, $vectors>(l, left, right, depth, to),
                _ => unreachable!("as many rows as a tile has"),
            }
        };
    }
    // SAFETY: the caller's.
    unsafe {
        if L::VECTORS >= 4 && to.cols > 2 * L::N {
            rows!(4);
        } else if L::VECTORS >= 2 && to.cols > L::N {
            rows!(2);
        } else {
            rows!(1);
        }
    }
}

/// Runs a body for each row `$r` of `$rows`, a constant in each: an index that isn't would move the sums
/// out of their registers, and after every term at that.
macro_rules! rows_of_a_tile {
    (@ $rows:expr, $r:ident $body:block $($n:literal)*) => {
        $(if $n < $rows {
            #[allow(non_upper_case_globals)]
            const $r: usize = $n;
            $body
        })*
    };
    ($rows:expr, $r:ident => $body:block) => {
        rows_of_a_tile!(@ $rows, $r $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13)
    };
}

/// # Safety
/// As [`tile`]'s.
#[inline(always)]
unsafe fn sums<L: Shape, const R: usize, const V: usize>(
    l: L,
    left: *const f32,
    right: *const f32,
    depth: usize,
    to: &Target,
) {
    let mut sums = [[l.splat(0.0); V]; R];
    let (mut left, mut right) = (left, right);
    for _ in 0..depth {
        // SAFETY: the caller's.
        unsafe {
            let mut columns = [l.splat(0.0); V];
            for (v, column) in columns.iter_mut().enumerate() {
                *column = l.load(right.add(v * L::N));
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let row = l.splat(*left.add(r * L::DEPTH));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = l.fma(row, column, *sum);
                }
            }
            left = left.add(1);
            right = right.add(L::WIDTH);
        }
    }
    let factor = l.splat(to.factor);
    if to.cols >= V * L::N && to.col_stride == 1 {
        let mut at = to.at;
        rows_of_a_tile!(R, r => {
            if r < to.rows {
                for (v, &sum) in sums[r].iter().enumerate() {
                    // SAFETY: the row's elements are there.
                    unsafe {
                        let at = at.add(v * L::N);
                        let value = if to.add {
                            l.fma(sum, factor, l.load(at))
                        } else {
                            l.mul(sum, factor)
                        };
                        l.store(at, value);
                    }
                }
            }
            at = at.wrapping_add(to.row_stride);
        });
        return;
    }
    let mut all = [0.0; LANES_MAX * WIDTH_MAX];
    rows_of_a_tile!(R, r => {
        for (v, &sum) in sums[r].iter().enumerate() {
            l.put(&mut all[r * WIDTH_MAX + v * L::N..], sum);
        }
    });
    // SAFETY: the caller's; the sums have room for whole vectors, and their transpose too.
    unsafe {
        if to.row_stride == 1 && to.col_stride != 1 {
            let mut turned = [0.0; WIDTH_MAX * LANES_MAX];
            for r in (0..to.rows).step_by(L::N) {
                for c in (0..V * L::N).step_by(L::N) {
                    let from = all.as_ptr().add(r * WIDTH_MAX + c);
                    let to = turned.as_mut_ptr().add(c * LANES_MAX + r);
                    l.transpose(from, WIDTH_MAX, to, LANES_MAX);
                }
            }
            let to = Target {
                row_stride: to.col_stride,
                col_stride: 1,
                rows: to.cols,
                cols: to.rows,
                ..*to
            };
            scatter(l, turned.as_ptr(), LANES_MAX, &to);
        } else {
            scatter(l, all.as_ptr(), WIDTH_MAX, to);
        }
    }
}

/// Writes the elements that there are of sums (rows, `stride`), with the arithmetic of whole tiles.
///
/// # Safety
/// The elements of `to` may be written; the sums are whole vectors.
#[inline(always)]
unsafe fn scatter<L: Shape>(l: L, sums: *const f32, stride: usize, to: &Target) {
    for row in 0..to.rows {
        for first in (0..to.cols).step_by(L::N) {
            let count = L::N.min(to.cols - first);
            let whole = count == L::N && to.col_stride == 1;
            let mut part = [0.0; LANES_MAX];
            // SAFETY: the caller's.
            unsafe {
                let at = to.at.add(row * to.row_stride + first * to.col_stride);
                let sum = l.load(sums.add(row * stride + first));
                let value = if !to.add {
                    l.mul(sum, l.splat(to.factor))
                } else if whole {
                    l.fma(sum, l.splat(to.factor), l.load(at))
                } else {
                    for (i, old) in part.iter_mut().enumerate().take(count) {
                        *old = *at.add(i * to.col_stride);
                    }
                    l.fma(sum, l.splat(to.factor), l.take(&part))
                };
                if whole {
                    l.store(at, value);
                } else {
                    l.put(&mut part, value);
                    for (i, &new) in part.iter().enumerate().take(count) {
                        *at.add(i * to.col_stride) = new;
                    }
                }
            }
        }
    }
}
