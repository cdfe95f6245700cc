//! Fewer bits for codes, from the codes alone: `255 = 17 * 15`, `15 = 5 * 3`, `3 = 3 * 1`, so the coarser grid
//! is part of the finer one.
//!
//! `q' = floor((q + r) / k)`, `r` uniform in `0 .. k`. With `q = floor(t + u)` that is `floor((t + u + r) / k)`, and
//! `(u + r) / k` is uniform in `0 .. 1`: what quantizing to the coarser grid at once would have drawn. Minimum, scale
//! and the bits they were made for stay.

use super::{Bits, Key, pack};

/// `k`: how many steps of the finer grid are one of the coarser.
#[inline]
#[must_use]
pub const fn ratio(from: Bits, to: Bits) -> u32 {
    from.steps() / to.steps()
}

/// `r`: from 16 random bits to `0 .. ratio`. As 2^16 leaves 1 over when divided by 3, 5, 15, 17, 85 or
/// 255, one of the numbers comes once more in 2^16 than the others.
#[inline]
#[must_use]
pub const fn offset(random: u32, ratio: u32) -> u32 {
    (random * ratio) >> 16
}

/// The coarser code of `code`, with `r` uniform in `0 .. ratio`.
#[inline]
#[must_use]
pub const fn shrunk(code: u8, ratio: u32, r: u32) -> u8 {
    ((code as u32 + r) / ratio) as u8
}

/// Shrinks codes in place, from `from` to `to` bits: they move to the front.
///
/// Shapes: `codes` of `elements` elements, a multiple of 8; nothing needs to know of groups. `key` is
/// [`super::Counter::shrinking`] with the same bits; `first` is the number of the first element in the tensor, a multiple
/// of 8.
///
/// Element `i` draws the lower half of word `(first + i) / 2` if `i` is even, else the upper.
///
/// # Panics
/// `to` isn't below `from`, or there are fewer codes.
pub fn shrink(codes: &mut [u8], elements: usize, from: Bits, to: Bits, key: Key, first: usize) {
    assert!(to < from, "codes only shrink");
    assert!(
        elements.is_multiple_of(8) && from.bytes(elements) <= codes.len(),
        "as many codes"
    );
    let ratio = ratio(from, to);
    for eight in 0..elements / 8 {
        // All are read before the first is written: the new codes lie in front of these or in place of them.
        let mut new = [0; 8];
        for i in 0..8 {
            let at = 8 * eight + i;
            let r = offset(random(key, first + at), ratio);
            let code = shrunk(pack::get(codes, from, at), ratio, r);
            pack::put(&mut new, to, i, code);
        }
        let bytes = to.get() as usize;
        codes[eight * bytes..][..bytes].copy_from_slice(&new[..bytes]);
    }
}

/// 16 random bits for the element with this number.
#[inline]
fn random(key: Key, element: usize) -> u32 {
    let word = key.word((element / 2) as u32);
    if element % 2 == 1 {
        word >> 16
    } else {
        word & 0xffff
    }
}
