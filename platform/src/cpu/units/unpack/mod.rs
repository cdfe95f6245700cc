//! Integers of a column as vectors of floats, and comparisons that yield bits: what the kernels of
//! this room need beyond [`Lanes`]. One ISA a file.
//!
//! Columns are seen in groups of 32 elements, which are `32 / N` vectors. Functions take the address
//! of the group and the number of the vector, so that an ISA may load more than one vector at once:
//! callers unroll, and the compiler merges the loads.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

use crate::cpu::vector::lanes::Lanes;

/// Elements of a group.
pub(super) const GROUP: usize = 32;

/// See the module.
pub(super) trait Unpack: Lanes {
    /// Groups whose sums stay in registers while columns go by: 8, 2 or 1.
    const RUN: usize;

    /// Vector `i` of 32 signed bytes.
    ///
    /// # Safety
    /// `from .. from + 32` is readable and `i < 32 / N`.
    unsafe fn signed(self, from: *const u8, i: usize) -> Self::V;
    /// Vector `i` of 32 bytes below 128, minus `offset` (a whole number below 128).
    ///
    /// # Safety
    /// As [`Unpack::signed`].
    unsafe fn unsigned(self, from: *const u8, i: usize, offset: f32) -> Self::V;
    /// Vector `i` of 32 nibbles, element 2k in the low half of byte k, minus `offset` (a whole
    /// number below 128).
    ///
    /// # Safety
    /// `from .. from + 16` is readable and `i < 32 / N`.
    unsafe fn nibbles(self, from: *const u8, i: usize, offset: f32) -> Self::V;
    /// Vector `i` of 32 BF16: the upper halves of floats.
    ///
    /// # Safety
    /// `from .. from + 64` is readable and `i < 32 / N`.
    unsafe fn bf16(self, from: *const u8, i: usize) -> Self::V;

    /// True if every lane of every vector is below `limit`, none of them NaN.
    fn all_below(self, x: [Self::V; 4], limit: Self::V) -> bool;
    /// Bit `i` is set unless lane `i` is below `limit`; NaN isn't.
    fn not_below(self, x: Self::V, limit: Self::V) -> u32;

    /// See [`super::UnitKernels::positives`]; `index` is as long as `g`.
    #[inline(always)]
    fn positives(self, g: &[f32], index: &mut [u16]) -> usize {
        positives_from(g, index, 0, 0)
    }
}

/// The rest of [`Unpack::positives`]: elements from `first`, of which `count` have been found before.
#[inline(always)]
fn positives_from(g: &[f32], index: &mut [u16], first: usize, mut count: usize) -> usize {
    for (i, &g) in g.iter().enumerate().skip(first) {
        // Written in any case and kept only if the count moves on: no branch to mispredict.
        index[count] = i as u16;
        count += usize::from(g > 0.0);
    }
    count
}
