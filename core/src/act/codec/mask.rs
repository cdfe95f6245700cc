//! What a backward pass needs of some inputs is less than a number: one bit of ReLU's, two of a 2x2
//! pooling's. Exact, and without metadata.

use super::{Bits, pack};

/// One bit an element: whether it is above 0. Bits beyond the last element are 0.
///
/// Shapes: `x` (n), `out` (n / 8, rounded up).
///
/// # Panics
/// The lengths disagree.
pub fn positive(x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), x.len().div_ceil(8), "a bit an element");
    for (out, x) in out.iter_mut().zip(x.chunks(8)) {
        *out = 0;
        for (i, &x) in x.iter().enumerate() {
            *out |= u8::from(x > 0.0) << i;
        }
    }
}

/// ReLU's backward pass: 0 where the element's bit is. Shapes: as in [`positive`].
///
/// # Panics
/// The lengths disagree.
pub fn keep(mask: &[u8], x: &mut [f32]) {
    assert_eq!(mask.len(), x.len().div_ceil(8), "a bit an element");
    for (mask, x) in mask.iter().zip(x.chunks_mut(8)) {
        for (i, x) in x.iter_mut().enumerate() {
            if mask >> i & 1 == 0 {
                *x = 0.0;
            }
        }
    }
}

/// Two bits an index: the winner's place, 0 to 3, in its 2x2 window (row times 2 plus column). Bits beyond
/// the last are 0.
///
/// Shapes: `index` (n), `out` (n / 4, rounded up). Only the lowest two bits of an index count.
///
/// # Panics
/// The lengths disagree.
pub fn pack_places(index: &[u8], out: &mut [u8]) {
    assert_eq!(out.len(), index.len().div_ceil(4), "two bits an index");
    for (out, four) in out.iter_mut().zip(index.chunks(4)) {
        *out = 0;
        for (i, &index) in four.iter().enumerate() {
            *out |= (index & 3) << (2 * i);
        }
    }
}

/// Index number `i` of what [`pack_places`] made.
///
/// # Panics
/// There are fewer.
#[inline]
#[must_use]
pub fn place(packed: &[u8], i: usize) -> u8 {
    pack::get(packed, Bits::Two, i)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_and_places_come_back() {
        for n in [0, 1, 7, 8, 9, 31, 100] {
            let x = |i: usize| [1.0, -1.0, 0.0, -0.0, f32::NAN, 1e-45, f32::INFINITY][i * 5 % 7];
            let mut values = [0.0; 100];
            values.iter_mut().enumerate().for_each(|(i, v)| *v = x(i));
            let mut mask = [0xff; 13];
            positive(&values[..n], &mut mask[..n.div_ceil(8)]);
            let mut dy = [3.0; 100];
            keep(&mask[..n.div_ceil(8)], &mut dy[..n]);
            for (i, dy) in dy[..n].iter().enumerate() {
                assert_eq!(*dy, if x(i) > 0.0 { 3.0 } else { 0.0 });
            }
            let mut index = [0; 100];
            index
                .iter_mut()
                .enumerate()
                .for_each(|(i, v)| *v = (i * 7 / 3 % 4) as u8);
            let mut packed = [0xff; 25];
            pack_places(&index[..n], &mut packed[..n.div_ceil(4)]);
            for (i, index) in index[..n].iter().enumerate() {
                assert_eq!(place(&packed, i), *index);
            }
            if n % 4 != 0 {
                assert_eq!(packed[n / 4] >> (2 * (n % 4)), 0);
            }
        }
    }
}
