//! Products of f32 matrices, one side of which may be quantized weights, on all threads.
//!
//! Blocked in the classical way: columns of the right matrix are packed a block at a time (weights are
//! decoded straight into it, so each of them once a product), rows of the left one a few at a time, and
//! register tiles multiply the two.
//!
//! Deterministic: an element is summed over the depth in order, in stretches whose length depends on
//! the depth alone, and each stretch is added to the output as a whole. Threads cut the output, so
//! results are bit-identical for any number of them. Two instruction sets may differ by rounding.

mod block;
mod decode;
mod mat;
mod pack;
mod scratch;
mod shape;
#[cfg(test)]
mod tests;
mod tile;

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cpu::Rows;
use crate::cpu::vector::Vector;
use crate::tune::team::Team;
use block::{Job, Right};

pub use mat::{Mat, MatMut};
pub use scratch::Scratch;

/// Blocks of columns that a thread should find, so that none waits long for another.
const BLOCKS_A_THREAD: usize = 3;

/// Products on one instruction set, with the packing memory of a team's threads.
#[derive(Debug)]
pub struct Products {
    vector: Vector,
    scratch: Box<[Mutex<Scratch>]>,
}

impl Products {
    /// For teams of up to `threads` threads. The only place that allocates.
    #[must_use]
    pub fn new(vector: Vector, threads: usize) -> Self {
        Self {
            vector,
            scratch: (0..threads)
                .map(|_| Mutex::new(Scratch::new(vector)))
                .collect(),
        }
    }

    /// Bytes that [`Products::new`] allocates: for the ledger.
    #[must_use]
    pub fn bytes_for(vector: Vector, threads: usize) -> usize {
        threads * (Scratch::bytes_for(vector) + size_of::<Mutex<Scratch>>())
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        Self::bytes_for(self.vector, self.scratch.len())
    }

    /// The packing memory of a thread, for [`product_in`] inside a chunk of a team. It must be given
    /// back before the thread takes part in a product of all threads.
    pub fn scratch(&self, thread: usize) -> MutexGuard<'_, Scratch> {
        // What a panic left behind is overwritten by whoever comes next.
        self.scratch[thread]
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// `y = x W^T`, or `y += x W^T` where `add`, with `w` (out, in) decoded to f32.
    ///
    /// Shapes: `x` (tokens, in), `y` (tokens, out).
    ///
    /// # Panics
    /// The lengths disagree, or the team has more threads than [`Products::new`] was told.
    pub fn forward(&self, team: &Team, w: Rows<'_>, x: &[f32], y: &mut [f32], add: bool) {
        let (ins, outs) = (w.cols, w.rows());
        let tokens = tokens(x, ins, y, outs);
        let (x, y) = (Mat::new(x, tokens, ins), MatMut::new(y, tokens, outs));
        self.run(team, x, Right::Across(w), 1.0, y, add);
    }

    /// `dx = dy W`, or `dx += dy W` where `add`, with `w` (out, in) decoded to f32.
    ///
    /// Shapes: `dy` (tokens, out), `dx` (tokens, in).
    ///
    /// # Panics
    /// As [`Products::forward`].
    pub fn backward(&self, team: &Team, w: Rows<'_>, dy: &[f32], dx: &mut [f32], add: bool) {
        let (ins, outs) = (w.cols, w.rows());
        let tokens = tokens(dy, outs, dx, ins);
        let (dy, dx) = (Mat::new(dy, tokens, outs), MatMut::new(dx, tokens, ins));
        self.run(team, dy, Right::Along(w), 1.0, dx, add);
    }

    /// [`Products::forward`] where tokens lie apart: a part of a wide matrix' outputs.
    ///
    /// # Panics
    /// As there.
    pub fn forward_at(&self, team: &Team, w: Rows<'_>, x: Mat<'_>, y: MatMut<'_>, add: bool) {
        self.run(team, x, Right::Across(w), 1.0, y, add);
    }

    /// [`Products::backward`] where tokens lie apart.
    ///
    /// # Panics
    /// As there.
    pub fn backward_at(&self, team: &Team, w: Rows<'_>, dy: Mat<'_>, dx: MatMut<'_>, add: bool) {
        self.run(team, dy, Right::Along(w), 1.0, dx, add);
    }

    /// `c = alpha a b`, or `c += alpha a b` where `add`.
    ///
    /// Shapes: `a` (m, k), `b` (k, n), `c` (m, n). Fastest where one of `c`'s strides is 1, and one of
    /// each other's.
    ///
    /// # Panics
    /// Shapes disagree, a matrix reaches beyond its slice, elements of `c` overlap, or the team has
    /// more threads than [`Products::new`] was told.
    pub fn product(
        &self,
        team: &Team,
        a: Mat<'_>,
        b: Mat<'_>,
        alpha: f32,
        c: MatMut<'_>,
        add: bool,
    ) {
        let (a, b, c) = Job::turned(a, b, c, self.vector.product_sizes());
        self.run(team, a, Right::Floats(b), alpha, c, add);
    }

    fn run(
        &self,
        team: &Team,
        left: Mat<'_>,
        right: Right<'_>,
        alpha: f32,
        out: MatMut<'_>,
        add: bool,
    ) {
        assert!(
            team.threads() <= self.scratch.len(),
            "packing memory of {} threads for a team of {}",
            self.scratch.len(),
            team.threads()
        );
        // SAFETY: the blocks of a grid are disjoint.
        let job = unsafe { Job::new(left, right, alpha, out, add, self.vector.product_sizes()) };
        let grid = Grid::new(&job, team.threads());
        team.each(grid.blocks(), &|index, thread| {
            let (rows, cols) = grid.block(index);
            self.vector
                .product_block(&job, rows, cols, &mut self.scratch(thread));
        });
    }
}

/// [`Products::product`] on the calling thread alone, with its own `scratch`: for tiles inside a chunk
/// of a team. Bit-identical to it.
///
/// # Panics
/// As there, or `scratch` was made for another instruction set.
pub fn product_in(
    vector: Vector,
    scratch: &mut Scratch,
    a: Mat<'_>,
    b: Mat<'_>,
    alpha: f32,
    c: MatMut<'_>,
    add: bool,
) {
    let sizes = vector.product_sizes();
    let (a, b, c) = Job::turned(a, b, c, sizes);
    // SAFETY: one block after the other.
    let job = unsafe { Job::new(a, Right::Floats(b), alpha, c, add, sizes) };
    let grid = Grid::new(&job, 1);
    for index in 0..grid.blocks() {
        let (rows, cols) = grid.block(index);
        vector.product_block(&job, rows, cols, scratch);
    }
}

/// Tokens of `x` (tokens, ins) and `y` (tokens, outs).
fn tokens(x: &[f32], ins: usize, y: &[f32], outs: usize) -> usize {
    let tokens = x.len() / ins;
    assert_eq!(x.len(), tokens * ins, "whole tokens in");
    assert_eq!(y.len(), tokens * outs, "as many tokens out as in");
    tokens
}

/// How the output is cut. Changes no result: only who computes what.
struct Grid {
    rows: usize,
    cols: usize,
    rows_a_block: usize,
    cols_a_block: usize,
}

impl Grid {
    fn new(job: &Job<'_>, threads: usize) -> Self {
        let (rows, cols, sizes) = (job.rows(), job.cols(), job.sizes());
        let wanted = if threads == 1 {
            1
        } else {
            BLOCKS_A_THREAD * threads
        };
        let cols_a_block = cols
            .div_ceil(wanted)
            .next_multiple_of(job.unit())
            .min(sizes.columns)
            .max(1);
        // Too few columns for all threads: cut the rows too, though each part decodes for itself.
        let parts = wanted.div_ceil(cols.div_ceil(cols_a_block).max(1));
        let least = 8 * sizes.rows;
        let rows_a_block = rows.div_ceil(parts).max(least).next_multiple_of(sizes.rows);
        Self {
            rows,
            cols,
            rows_a_block,
            cols_a_block,
        }
    }

    fn blocks(&self) -> usize {
        self.rows.div_ceil(self.rows_a_block) * self.cols.div_ceil(self.cols_a_block)
    }

    fn block(&self, index: usize) -> (Range<usize>, Range<usize>) {
        let across = self.cols.div_ceil(self.cols_a_block);
        let cut = |i: usize, size: usize, end: usize| i * size..end.min((i + 1) * size);
        (
            cut(index / across, self.rows_a_block, self.rows),
            cut(index % across, self.cols_a_block, self.cols),
        )
    }
}
