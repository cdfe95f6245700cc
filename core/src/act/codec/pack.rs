//! Codes in bytes: element `i` of `b` bits is in byte `i b / 8`, from bit `i b % 8` up.

use super::Bits;

/// Code number `i`.
///
/// # Panics
/// There are fewer.
#[inline]
#[must_use]
pub fn get(codes: &[u8], bits: Bits, i: usize) -> u8 {
    let at = i * bits.get() as usize;
    codes[at / 8] >> (at % 8) & bits.steps() as u8
}

/// Sets code number `i`, which was 0.
///
/// # Panics
/// There are fewer.
#[inline]
pub fn put(codes: &mut [u8], bits: Bits, i: usize, code: u8) {
    let at = i * bits.get() as usize;
    codes[at / 8] |= code << (at % 8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lowest_bits_first() {
        let mut four = [0; 2];
        for (i, code) in [1, 2, 3, 15].into_iter().enumerate() {
            put(&mut four, Bits::Four, i, code);
            assert_eq!(get(&four, Bits::Four, i), code);
        }
        assert_eq!(four, [0x21, 0xf3]);
        let mut two = [0; 1];
        for (i, code) in [3, 0, 1, 2].into_iter().enumerate() {
            put(&mut two, Bits::Two, i, code);
            assert_eq!(get(&two, Bits::Two, i), code);
        }
        assert_eq!(two, [0b10_01_00_11]);
        let mut one = [0; 2];
        put(&mut one, Bits::One, 9, 1);
        assert_eq!(one, [0, 2]);
    }
}
