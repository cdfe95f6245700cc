//! The memory in which one thread packs its blocks.

use super::shape::Sizes;
use crate::cpu::vector::Vector;
use crate::cpu::vector::lanes::LANES_MAX;

/// Floats of one row that are decoded before they are packed: the longest block of any format.
pub(super) const STAGE: usize = 256;

/// A cache line, and the alignment of the widest register.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [f32; 16]);

/// Packing memory of one thread. Made once; products allocate nothing.
#[derive(Debug)]
pub struct Scratch {
    lines: Box<[Line]>,
    sizes: Sizes,
}

/// A scratch, cut. All are aligned to 64 bytes.
pub(super) struct Parts<'a> {
    /// Rows of the left matrix: (rows rounded up to [`LANES_MAX`], depth).
    pub left: &'a mut [f32],
    /// Columns of the right matrix: (panels, depth, width).
    pub right: &'a mut [f32],
    /// Decoded weights: ([`LANES_MAX`], [`STAGE`]), or one row of columns.
    pub stage: &'a mut [f32],
}

impl Scratch {
    /// For products on `vector`, of any size.
    #[must_use]
    pub fn new(vector: Vector) -> Self {
        let sizes = vector.product_sizes();
        Self {
            lines: vec![Line([0.0; 16]); Self::floats(sizes).iter().sum::<usize>() / 16]
                .into_boxed_slice(),
            sizes,
        }
    }

    /// Bytes that [`Scratch::new`] allocates: for the ledger.
    #[must_use]
    pub fn bytes_for(vector: Vector) -> usize {
        Self::floats(vector.product_sizes()).iter().sum::<usize>() * size_of::<f32>()
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lines.len() * size_of::<Line>()
    }

    /// Floats of each part, multiples of 16.
    fn floats(sizes: Sizes) -> [usize; 3] {
        let rows = sizes.rows.next_multiple_of(LANES_MAX);
        let stage = (LANES_MAX * STAGE).max(sizes.columns);
        [rows * sizes.depth, sizes.columns * sizes.depth, stage]
    }

    /// The parts, for blocks of `sizes`.
    pub(super) fn parts(&mut self, sizes: Sizes) -> Parts<'_> {
        assert_eq!(self.sizes, sizes, "scratch of another instruction set");
        let [left, right, _] = Self::floats(sizes);
        let len = self.lines.len() * 16;
        // SAFETY: a line is 16 floats without padding.
        let all =
            unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<f32>(), len) };
        let (left, rest) = all.split_at_mut(left);
        let (right, stage) = rest.split_at_mut(right);
        Parts { left, right, stage }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_aligned_and_as_big_as_the_ledger_says() {
        for vector in Vector::available() {
            let mut scratch = Scratch::new(vector);
            let bytes = scratch.bytes();
            assert_eq!(bytes, Scratch::bytes_for(vector));
            assert!(bytes <= 1 << 20, "{bytes} bytes a thread");
            let parts = scratch.parts(vector.product_sizes());
            let mut held = 0;
            for part in [parts.left, parts.right, parts.stage] {
                assert!(part.as_ptr().addr().is_multiple_of(64));
                held += size_of_val(part);
            }
            assert_eq!(held, bytes);
        }
    }
}
