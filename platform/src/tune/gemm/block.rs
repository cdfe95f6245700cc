//! One block of a product: some rows of the output times some columns, on one thread.

use std::ops::Range;

use super::mat::{Mat, MatMut};
use super::pack;
use super::scratch::{Parts, Scratch};
use super::shape::{Shape, Sizes};
use super::tile::{Target, tile};
use crate::cpu::Rows;

/// The right-hand matrix, (depth, columns).
#[derive(Clone, Copy)]
pub(super) enum Right<'a> {
    /// Floats.
    Floats(Mat<'a>),
    /// The transpose of weights.
    Across(Rows<'a>),
    /// Weights.
    Along(Rows<'a>),
}

/// A whole product, of which threads compute disjoint blocks.
pub(super) struct Job<'a> {
    left: Mat<'a>,
    right: Right<'a>,
    out: Out,
    rows: usize,
    cols: usize,
    depth: usize,
    /// Terms that are summed in registers: depends on the depth alone.
    step: usize,
    /// Columns of a block are a multiple of this.
    unit: usize,
    alpha: f32,
    add: bool,
    sizes: Sizes,
}

/// The output's place. Whoever makes one answers for it.
#[derive(Clone, Copy)]
struct Out {
    at: *mut f32,
    row_stride: usize,
    col_stride: usize,
}

// SAFETY: threads write disjoint blocks, by the contract of `Job::new`.
unsafe impl Sync for Out {}

impl<'a> Job<'a> {
    /// `out = alpha * left * right`, or plus what is there. Checks every length.
    ///
    /// # Safety
    /// Blocks of the job that are computed at the same time are disjoint.
    pub(super) unsafe fn new(
        left: Mat<'a>,
        right: Right<'a>,
        alpha: f32,
        out: MatMut<'a>,
        add: bool,
        sizes: Sizes,
    ) -> Self {
        left.check();
        out.check();
        let (depth, cols, step_unit, unit) = match right {
            Right::Floats(b) => {
                b.check();
                (b.rows, b.cols, 16, 1)
            }
            Right::Across(w) => (w.cols, w.rows(), w.ty.block_len().max(16), 1),
            Right::Along(w) => (w.rows(), w.cols, 16, w.ty.block_len()),
        };
        assert_eq!(left.cols, depth, "both sides have the same depth");
        assert_eq!(out.rows, left.rows, "as many rows out as in");
        assert_eq!(out.cols, cols, "as many columns out as in");
        let blocks = depth.div_ceil(sizes.depth).max(1);
        Self {
            left,
            right,
            out: Out {
                at: out.data.as_mut_ptr(),
                row_stride: out.row_stride,
                col_stride: out.col_stride,
            },
            rows: left.rows,
            cols,
            depth,
            step: depth
                .div_ceil(blocks)
                .next_multiple_of(step_unit)
                .max(step_unit),
            unit: unit.max(sizes.width),
            alpha,
            add,
            sizes,
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// Columns of a block are a multiple of this, but for the last.
    pub(super) fn unit(&self) -> usize {
        self.unit
    }

    pub(super) fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// The product, or its transpose where that is faster.
    ///
    /// Outputs are written along their rows. But where there are few columns, packing a left matrix
    /// across its own rows costs more than writing across the output's.
    pub(super) fn turned(
        a: Mat<'a>,
        b: Mat<'a>,
        out: MatMut<'a>,
        sizes: Sizes,
    ) -> (Mat<'a>, Mat<'a>, MatMut<'a>) {
        let (across, along) = (
            out.col_stride != 1 && out.row_stride == 1,
            out.col_stride == 1,
        );
        let (a, b, out) = if across {
            (b.t(), a.t(), out.t())
        } else {
            (a, b, out)
        };
        let few = out.cols <= 2 * sizes.width && 2 * out.cols <= out.rows;
        if few && (across || along) && a.row_stride == 1 && a.col_stride != 1 {
            (b.t(), a.t(), out.t())
        } else {
            (a, b, out)
        }
    }
}

crate::cpu::vector::multiversion! {
    /// The elements of the job in `rows` and `cols`, which starts at a multiple of the job's unit.
    pub(super) fn product_block(job: &Job<'_>, rows: Range<usize>, cols: Range<usize>, scratch: &mut Scratch)
        = block;
}

#[inline(always)]
fn block<L: Shape>(
    l: L,
    job: &Job<'_>,
    rows: Range<usize>,
    cols: Range<usize>,
    scratch: &mut Scratch,
) {
    assert!(rows.end <= job.rows && cols.end <= job.cols && cols.len() <= L::COLUMNS);
    let Parts { left, right, stage } = scratch.parts(job.sizes);
    if job.depth == 0 && !job.add {
        for row in rows.clone() {
            for col in cols.clone() {
                // SAFETY: inside the output.
                unsafe { *job.at(row, col) = 0.0 };
            }
        }
    }
    for start in (0..job.depth).step_by(job.step) {
        let depth = start..job.depth.min(start + job.step);
        match &job.right {
            // SAFETY: the job was checked, and so were rows and columns.
            Right::Floats(b) => unsafe { pack::right(l, b, depth.clone(), cols.clone(), right) },
            Right::Across(w) => {
                pack::weights_across(l, w, depth.clone(), cols.clone(), stage, right);
            }
            Right::Along(w) => {
                pack::weights_along(l, w, depth.clone(), cols.clone(), stage, right);
            }
        }
        let mut row = rows.start;
        while row < rows.end {
            let count = match rows.end - row {
                some if some <= L::ROWS => some,
                some if some <= 2 * L::HALF => L::HALF,
                _ => L::ROWS,
            };
            // SAFETY: as above.
            unsafe { pack::left(l, &job.left, row..row + count, depth.clone(), left) };
            for (p, col) in cols.clone().step_by(L::WIDTH).enumerate() {
                // SAFETY: packed above; the output's elements are there.
                unsafe {
                    let to = Target {
                        at: job.at(row, col),
                        row_stride: job.out.row_stride,
                        col_stride: job.out.col_stride,
                        rows: count,
                        cols: L::WIDTH.min(cols.end - col),
                        factor: job.alpha,
                        add: job.add || start > 0,
                    };
                    let panel = right.as_ptr().add(p * pack::panel::<L>(depth.len()));
                    tile(l, left.as_ptr(), panel, depth.len(), &to);
                }
            }
            row += count;
        }
    }
}

impl Job<'_> {
    /// Address of an element of the output.
    ///
    /// # Safety
    /// There is one.
    #[inline(always)]
    unsafe fn at(&self, row: usize, col: usize) -> *mut f32 {
        // SAFETY: the caller's.
        unsafe {
            self.out
                .at
                .add(row * self.out.row_stride + col * self.out.col_stride)
        }
    }
}
