//! A small matrix product on one thread, in register tiles: the left factor lies in any order, the right
//! one in rows.

use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::multiversion;

/// Depth of the right factor that stays in the first-level cache.
const DEPTH: usize = 128;
/// Rows of a register tile.
const ROWS: usize = 6;

/// The left factor, (rows, depth).
#[derive(Clone, Copy)]
pub(super) struct Left<'a> {
    pub data: &'a [f32],
    pub rows: usize,
    pub depth: usize,
    /// Floats from a row to the next.
    pub row_stride: usize,
    /// Floats from a column to the next.
    pub depth_stride: usize,
}

/// The right factor, (depth of the left, columns).
#[derive(Clone, Copy)]
pub(super) struct Right<'a> {
    pub data: &'a [f32],
    pub columns: usize,
    /// Floats from a row to the next.
    pub stride: usize,
}

/// The product, (rows, columns).
pub(super) struct Sum<'a> {
    data: &'a mut [f32],
    stride: usize,
}

impl<'a> Sum<'a> {
    /// Rows that are `stride` floats apart.
    pub(super) fn new(data: &'a mut [f32], stride: usize) -> Self {
        Self { data, stride }
    }
}

multiversion! {
    /// `sum = left * right`, or `sum += left * right` if `add`. Each element is a sum over the depth in
    /// order.
    ///
    /// # Panics
    /// A matrix has fewer elements than its sizes say.
    pub(super) fn product(left: Left<'_>, right: Right<'_>, sum: Sum<'_>, add: bool) = body;
}

#[inline(always)]
fn body<L: Lanes>(l: L, left: Left<'_>, right: Right<'_>, sum: Sum<'_>, add: bool) {
    let (rows, depth, columns) = (left.rows, left.depth, right.columns);
    assert!(
        rows > 0 && depth > 0 && columns > 0,
        "something to multiply"
    );
    let last = (rows - 1) * left.row_stride + (depth - 1) * left.depth_stride;
    assert!(last < left.data.len(), "the left factor is whole");
    let reaches = |len: usize, rows: usize, stride: usize| {
        columns <= stride && (rows - 1) * stride + columns <= len
    };
    assert!(
        reaches(right.data.len(), depth, right.stride),
        "the right factor is whole"
    );
    assert!(
        reaches(sum.data.len(), rows, sum.stride),
        "there is room for the product"
    );
    for from in (0..depth).step_by(DEPTH) {
        let mut column = 0;
        while column < columns {
            let vectors = (columns - column) / L::N;
            let (width, part) = if L::PANEL >= 4 && vectors >= 4 {
                (4, 0)
            } else if L::PANEL >= 2 && vectors >= 2 {
                (2, 0)
            } else if vectors >= 1 {
                (1, 0)
            } else {
                (1, columns - column)
            };
            for row in (0..rows).step_by(ROWS) {
                let tile = Tile {
                    // SAFETY: rows, columns and depth are within the factors, as checked above.
                    left: unsafe {
                        left.data
                            .as_ptr()
                            .add(row * left.row_stride + from * left.depth_stride)
                    },
                    row_stride: left.row_stride,
                    depth_stride: left.depth_stride,
                    depth: DEPTH.min(depth - from),
                    // SAFETY: as above.
                    right: unsafe { right.data.as_ptr().add(from * right.stride + column) },
                    right_stride: right.stride,
                    // SAFETY: as above, for the product.
                    sum: unsafe { sum.data.as_mut_ptr().add(row * sum.stride + column) },
                    sum_stride: sum.stride,
                    add: add || from > 0,
                    part,
                };
                let count = ROWS.min(rows - row);
                // SAFETY: the tile is `count` rows and `width` vectors (or the last `part` columns) of
                // the matrices.
                unsafe {
                    match (width, part) {
                        (4, _) => rows_of::<L, 4, false>(l, count, &tile),
                        (2, _) => rows_of::<L, 2, false>(l, count, &tile),
                        (_, 0) => rows_of::<L, 1, false>(l, count, &tile),
                        _ => rows_of::<L, 1, true>(l, count, &tile),
                    }
                }
            }
            column += if part > 0 { part } else { width * L::N };
        }
    }
}

/// A register tile of the product.
struct Tile {
    left: *const f32,
    row_stride: usize,
    depth_stride: usize,
    depth: usize,
    right: *const f32,
    right_stride: usize,
    sum: *mut f32,
    sum_stride: usize,
    add: bool,
    /// Columns, where they are less than a vector.
    part: usize,
}

/// # Safety
/// As for [`tile`], with `count` rows.
#[inline(always)]
unsafe fn rows_of<L: Lanes, const C: usize, const PART: bool>(l: L, count: usize, t: &Tile) {
    // SAFETY: the caller vouches for the rows.
    unsafe {
        match count {
            1 => tile::<L, 1, C, PART>(l, t),
            2 => tile::<L, 2, C, PART>(l, t),
            3 => tile::<L, 3, C, PART>(l, t),
            4 => tile::<L, 4, C, PART>(l, t),
            5 => tile::<L, 5, C, PART>(l, t),
            _ => tile::<L, ROWS, C, PART>(l, t),
        }
    }
}

/// One register tile: `R` rows, `C` vectors or, if `PART`, the first `part` columns of one.
///
/// # Safety
/// The matrices have the tile's elements, and nobody else uses those of the product.
#[inline(always)]
unsafe fn tile<L: Lanes, const R: usize, const C: usize, const PART: bool>(l: L, t: &Tile) {
    let mut sums = [[l.splat(0.0); C]; R];
    // SAFETY: the caller vouches for the elements.
    unsafe {
        if t.add {
            for (r, sums) in sums.iter_mut().enumerate() {
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = load::<L, PART>(l, t.sum.add(r * t.sum_stride + c * L::N), t.part);
                }
            }
        }
        // No sums of products of sizes in the loop: each would be checked for overflow.
        let mut rows = [t.left; R];
        for (r, row) in rows.iter_mut().enumerate() {
            *row = t.left.add(r * t.row_stride);
        }
        let mut from = t.right;
        for _ in 0..t.depth {
            let mut right = [l.splat(0.0); C];
            for (c, right) in right.iter_mut().enumerate() {
                *right = load::<L, PART>(l, from.add(c * L::N), t.part);
            }
            for (row, sums) in rows.iter_mut().zip(&mut sums) {
                let left = l.splat(**row);
                *row = row.wrapping_add(t.depth_stride);
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = l.fma(left, right, *sum);
                }
            }
            from = from.wrapping_add(t.right_stride);
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                let to = t.sum.add(r * t.sum_stride + c * L::N);
                if PART {
                    l.put_part(std::slice::from_raw_parts_mut(to, t.part), *sum);
                } else {
                    l.store(to, *sum);
                }
            }
        }
    }
}

/// A vector or, if `PART`, the first `part` floats of one.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn load<L: Lanes, const PART: bool>(l: L, at: *const f32, part: usize) -> L::V {
    // SAFETY: the caller vouches for the floats.
    unsafe {
        if PART {
            l.take_part(std::slice::from_raw_parts(at, part), 0.0)
        } else {
            l.load(at)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::Vector;
    use crate::cpu::vector::testing::{Random, close};

    #[test]
    fn matches_double_precision_in_every_form() {
        let mut random = Random(20);
        for v in Vector::available() {
            for (rows, depth, columns) in [(1, 1, 1), (5, 3, 16), (7, 129, 37), (13, 300, 70)] {
                for down in [false, true] {
                    for add in [false, true] {
                        let (row_stride, depth_stride) =
                            if down { (1, rows + 2) } else { (depth + 1, 1) };
                        let (a, b) = (
                            random.floats((rows + 2) * (depth + 2), 1.0),
                            random.floats(depth * (columns + 3), 1.0),
                        );
                        let stride = columns + 1;
                        let before = random.floats(rows * stride, 1.0);
                        let mut got = before.clone();
                        let left = Left {
                            data: &a,
                            rows,
                            depth,
                            row_stride,
                            depth_stride,
                        };
                        let right = Right {
                            data: &b,
                            columns,
                            stride: columns + 3,
                        };
                        v.product(left, right, Sum::new(&mut got, stride), add);
                        for i in 0..rows * stride {
                            let (row, column) = (i / stride, i % stride);
                            if column == columns {
                                assert_eq!(got[i], before[i], "between rows");
                                continue;
                            }
                            let term = |k: usize| {
                                let a = a[row * row_stride + k * depth_stride];
                                f64::from(a) * f64::from(b[k * (columns + 3) + column])
                            };
                            let start = if add { f64::from(before[i]) } else { 0.0 };
                            let want = (0..depth).fold(start, |sum, k| sum + term(k));
                            close(got[i], want, 0.0, 2e-7 * (depth as f64 + 4.0));
                        }
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "the right factor is whole")]
    fn sizes_are_checked() {
        let left = Left {
            data: &[0.0; 8],
            rows: 2,
            depth: 4,
            row_stride: 4,
            depth_stride: 1,
        };
        let right = Right {
            data: &[0.0; 15],
            columns: 4,
            stride: 4,
        };
        let mut sum = [0.0; 8];
        Vector::detect().product(left, right, Sum::new(&mut sum, 4), false);
    }
}
