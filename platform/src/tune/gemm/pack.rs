//! Packing: rows of the left matrix and columns of the right one to where a tile wants them.
//!
//! What lies past the last row or column of a packed block is whatever was there before: tiles compute
//! with it and drop the result.

use std::ops::Range;

use super::decode::decode;
use super::mat::Mat;
use super::scratch::STAGE;
use super::shape::Shape;
use crate::cpu::Rows;
use crate::cpu::vector::lanes::LANES_MAX;

/// Rows `rows` and columns `depth` of `a` to `to` (rows, `L::DEPTH`).
///
/// # Safety
/// `a` was checked and has them; `to` has [`LANES_MAX`] rows, and both are no more than a tile's.
#[inline(always)]
pub(super) unsafe fn left<L: Shape>(
    l: L,
    a: &Mat<'_>,
    rows: Range<usize>,
    depth: Range<usize>,
    to: &mut [f32],
) {
    assert!(to.len() >= LANES_MAX * L::DEPTH && rows.len() <= LANES_MAX);
    assert!(depth.len() <= L::DEPTH);
    let (count, depth_len) = (rows.len(), depth.len());
    let to = to.as_mut_ptr();
    // SAFETY: the caller's, and the lengths were just checked.
    unsafe {
        let from = element(a, rows.start, depth.start);
        if a.col_stride == 1 {
            for r in 0..count {
                copy(
                    l,
                    from.add(r * a.row_stride),
                    to.add(r * L::DEPTH),
                    depth_len,
                );
            }
            return;
        }
        // Whole blocks of a transpose, where the matrix has that many rows.
        let whole = if a.row_stride == 1 && rows.start + count.next_multiple_of(L::N) <= a.rows {
            depth_len - depth_len % L::N
        } else {
            0
        };
        for k in (0..whole).step_by(L::N) {
            for r in (0..count).step_by(L::N) {
                let from = from.add(r + k * a.col_stride);
                l.transpose(from, a.col_stride, to.add(r * L::DEPTH + k), L::DEPTH);
            }
        }
        for r in 0..count {
            for k in whole..depth_len {
                *to.add(r * L::DEPTH + k) = *from.add(r * a.row_stride + k * a.col_stride);
            }
        }
    }
}

/// Floats of one packed panel of columns.
#[inline(always)]
pub(super) fn panel<L: Shape>(depth: usize) -> usize {
    depth.next_multiple_of(LANES_MAX) * L::WIDTH
}

/// Panics unless `right` has room for a block.
#[inline(always)]
fn check_room<L: Shape>(depth: usize, cols: usize, right: &[f32]) {
    assert!(
        right.len() >= cols.div_ceil(L::WIDTH) * panel::<L>(depth),
        "room for {cols} columns of {depth}"
    );
}

/// Rows `depth` and columns `cols` of `b` to `to` (panels, depth, `L::WIDTH`).
///
/// # Safety
/// `b` was checked and has them.
#[inline(always)]
pub(super) unsafe fn right<L: Shape>(
    l: L,
    b: &Mat<'_>,
    depth: Range<usize>,
    cols: Range<usize>,
    to: &mut [f32],
) {
    let (depth_len, count) = (depth.len(), cols.len());
    check_room::<L>(depth_len, count, to);
    let to = to.as_mut_ptr();
    for (p, first) in (0..count).step_by(L::WIDTH).enumerate() {
        let there = L::WIDTH.min(count - first);
        // SAFETY: the caller's, and the room was just checked.
        unsafe {
            let to = to.add(p * panel::<L>(depth_len));
            let from = element(b, depth.start, cols.start + first);
            if b.col_stride == 1 {
                for k in 0..depth_len {
                    copy(l, from.add(k * b.row_stride), to.add(k * L::WIDTH), there);
                }
                continue;
            }
            let whole = if b.row_stride == 1 {
                (there - there % L::N, depth_len - depth_len % L::N)
            } else {
                (0, 0)
            };
            for n in (0..whole.0).step_by(L::N) {
                for k in (0..whole.1).step_by(L::N) {
                    let from = from.add(n * b.col_stride + k);
                    l.transpose(from, b.col_stride, to.add(k * L::WIDTH + n), L::WIDTH);
                }
            }
            for n in 0..there {
                let done = if n < whole.0 { whole.1 } else { 0 };
                for k in done..depth_len {
                    *to.add(k * L::WIDTH + n) = *from.add(k * b.row_stride + n * b.col_stride);
                }
            }
        }
    }
}

/// As [`right`] for the transpose of weights: columns `depth` of the rows `rows`.
///
/// Both ends of `depth` are ends of blocks.
#[inline(always)]
pub(super) fn weights_across<L: Shape>(
    l: L,
    w: &Rows<'_>,
    depth: Range<usize>,
    rows: Range<usize>,
    stage: &mut [f32],
    to: &mut [f32],
) {
    let (depth_len, count) = (depth.len(), rows.len());
    check_room::<L>(depth_len, count, to);
    assert!(stage.len() >= L::N * STAGE, "room for decoded rows");
    let row_bytes = w.row_bytes();
    for first in (0..count).step_by(L::N) {
        let there = L::N.min(count - first);
        let start = first / L::WIDTH * panel::<L>(depth_len) + first % L::WIDTH;
        for k in (0..depth_len).step_by(STAGE) {
            let len = STAGE.min(depth_len - k);
            for (r, out) in stage.chunks_exact_mut(STAGE).enumerate().take(there) {
                let row = &w.bytes[(rows.start + first + r) * row_bytes..][..row_bytes];
                decode(l, w.ty, row, depth.start + k, &mut out[..len]);
            }
            for i in (0..len).step_by(L::N) {
                // SAFETY: a stage row has STAGE floats, of which `i + N` are at most all; the panel's
                // depth was rounded up to whole vectors.
                unsafe {
                    let to = to.as_mut_ptr().add(start + (k + i) * L::WIDTH);
                    l.transpose(stage.as_ptr().add(i), STAGE, to, L::WIDTH);
                }
            }
        }
    }
}

/// As [`right`] for weights: columns `cols` of the rows `depth`.
///
/// Both ends of `cols` are ends of blocks.
#[inline(always)]
pub(super) fn weights_along<L: Shape>(
    l: L,
    w: &Rows<'_>,
    depth: Range<usize>,
    cols: Range<usize>,
    stage: &mut [f32],
    to: &mut [f32],
) {
    let (depth_len, count) = (depth.len(), cols.len());
    check_room::<L>(depth_len, count, to);
    assert!(
        stage.len() >= count.next_multiple_of(L::WIDTH),
        "room for a decoded row"
    );
    let row_bytes = w.row_bytes();
    for k in 0..depth_len {
        let row = &w.bytes[(depth.start + k) * row_bytes..][..row_bytes];
        decode(l, w.ty, row, cols.start, &mut stage[..count]);
        for (p, first) in (0..count).step_by(L::WIDTH).enumerate() {
            // SAFETY: both sides have room for whole panels.
            unsafe {
                let to = to
                    .as_mut_ptr()
                    .add(p * panel::<L>(depth_len) + k * L::WIDTH);
                let from = stage.as_ptr().add(first);
                for v in (0..L::WIDTH).step_by(L::N) {
                    l.store(to.add(v), l.load(from.add(v)));
                }
            }
        }
    }
}

/// Address of an element.
///
/// # Safety
/// There is one.
#[inline(always)]
unsafe fn element(a: &Mat<'_>, row: usize, col: usize) -> *const f32 {
    // SAFETY: the caller's.
    unsafe { a.data.as_ptr().add(row * a.row_stride + col * a.col_stride) }
}

/// Copies `len` floats.
///
/// # Safety
/// Both sides have them.
#[inline(always)]
unsafe fn copy<L: Shape>(l: L, from: *const f32, to: *mut f32, len: usize) {
    let whole = len - len % L::N;
    // SAFETY: the caller's.
    unsafe {
        for i in (0..whole).step_by(L::N) {
            l.store(to.add(i), l.load(from.add(i)));
        }
        for i in whole..len {
            *to.add(i) = *from.add(i);
        }
    }
}
