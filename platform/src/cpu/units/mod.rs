//! Kernels of the sparse path: what is done to single neurons rather than to whole matrices.
//!
//! [`UnitKernels`] is the handle; every operation is a method of it, one family a file:
//! - `add`: down columns times activations, added to the residual ([`UnitKernels::columns_add`]);
//! - `panel`: the same for prompt batches, over columns that were decoded once;
//! - `dots`: products of scattered rows with one activation ([`UnitKernels::rows_dot`]);
//! - `pick`: which neurons are active, which rows of the head can still win.
//!
//! `column` says what a column is, `kind` how 32 elements of each kind are added, `unpack` how each
//! instruction set makes vectors of them.
//!
//! Deterministic: on one instruction set equal inputs give equal bits, whatever the alignment, the
//! thread, or the cut into ranges and calls. Two instruction sets may differ by rounding. Nothing
//! here allocates. Lengths that disagree are programmer errors and panic.

mod add;
mod column;
mod dots;
mod kind;
mod panel;
mod pick;
mod unpack;

pub use column::{Column, Columns, Stored, Term};

use super::Kernels;
use super::vector::Vector;

/// The kernels of one instruction set. A small `Copy` value: give each thread its own.
#[derive(Clone, Copy, Debug)]
pub struct UnitKernels {
    kernels: Kernels,
    vector: Vector,
}

impl UnitKernels {
    /// Those that go with these matrix kernels.
    #[must_use]
    pub fn beside(kernels: &Kernels) -> Self {
        Self {
            kernels: *kernels,
            vector: Vector::beside(kernels),
        }
    }

    /// All that this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Kernels::available().map(|kernels| Self::beside(&kernels))
    }

    /// The matrix kernels these go with.
    #[must_use]
    pub fn kernels(&self) -> Kernels {
        self.kernels
    }
}
