//! One bit an element: what ReLU's backward pass needs.

use leanstream_core::act::codec::mask;

use super::block::{BLOCK, Block};
use crate::cpu::vector::multiversion;

multiversion! {
    /// Whether elements are above 0, as [`mask::positive`]. Shapes: `x` (n), `out` (n / 8, rounded up).
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn positive_mask(x: &[f32], out: &mut [u8]) = positive_body;

    /// Puts 0 where the element's bit isn't set, as [`mask::keep`]. Shapes: `mask` (n / 8, rounded up), `x` (n).
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn keep_masked(mask: &[u8], x: &mut [f32]) = keep_body;
}

#[inline(always)]
fn positive_body<L: Block>(l: L, x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), x.len().div_ceil(8), "a bit an element");
    let (blocks, rest) = x.as_chunks::<BLOCK>();
    let (words, out) = out.split_at_mut(4 * blocks.len());
    for (x, word) in blocks.iter().zip(words.as_chunks_mut().0) {
        // SAFETY: 32 elements.
        *word = unsafe { l.positive(x.as_ptr()) }.to_le_bytes();
    }
    mask::positive(rest, out);
}

#[inline(always)]
fn keep_body<L: Block>(l: L, mask: &[u8], x: &mut [f32]) {
    assert_eq!(mask.len(), x.len().div_ceil(8), "a bit an element");
    let (blocks, rest) = x.as_chunks_mut::<BLOCK>();
    let (words, mask) = mask.split_at(4 * blocks.len());
    for (x, word) in blocks.iter_mut().zip(words.as_chunks().0) {
        // SAFETY: 32 elements.
        unsafe { l.keep(u32::from_le_bytes(*word), x.as_mut_ptr()) };
    }
    mask::keep(mask, rest);
}
