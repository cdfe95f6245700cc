//! Floats as they are, for comparison: bf16 rounded to nearest, f32 exactly. Little endian.

/// The bf16 nearest to `x`, ties to even; NaN stays NaN. The upper half of an f32.
#[inline]
#[must_use]
pub const fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    // It wraps for some NaNs only, which aren't rounded. Without branches it is fast in vectors.
    let near = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    let bits = if x.is_nan() { bits | 0x40_0000 } else { near };
    (bits >> 16) as u16
}

/// A bf16 on either side of `x`, the farther the less likely: `random` is uniform in `0 .. 2^16`, and the mean
/// over it is `x`. NaN stays NaN, and what is finite stays so.
#[inline]
#[must_use]
pub const fn to_bf16_by_chance(x: f32, random: u32) -> u16 {
    if x.is_nan() {
        return to_bf16(x);
    }
    let near = ((x.to_bits() + (random & 0xffff)) >> 16) as u16;
    // Past the largest number there is only infinity.
    near - (x.is_finite() && near & 0x7fff == 0x7f80) as u16
}

/// The value of a bf16.
#[inline]
#[must_use]
pub const fn from_bf16(x: u16) -> f32 {
    f32::from_bits((x as u32) << 16)
}

/// Shapes: `x` (n), `out` (2 n).
///
/// # Panics
/// The lengths disagree.
pub fn encode_bf16(x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), 2 * x.len(), "two bytes an element");
    let (out, _) = out.as_chunks_mut::<2>();
    for (out, &x) in out.iter_mut().zip(x) {
        *out = to_bf16(x).to_le_bytes();
    }
}

/// Shapes: `bytes` (2 n), `out` (n).
///
/// # Panics
/// The lengths disagree.
pub fn decode_bf16(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len(), "two bytes an element");
    let (bytes, _) = bytes.as_chunks::<2>();
    for (out, bytes) in out.iter_mut().zip(bytes) {
        *out = from_bf16(u16::from_le_bytes(*bytes));
    }
}

/// Shapes: `x` (n), `out` (4 n).
///
/// # Panics
/// The lengths disagree.
pub fn encode_f32(x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), 4 * x.len(), "four bytes an element");
    let (out, _) = out.as_chunks_mut::<4>();
    for (out, x) in out.iter_mut().zip(x) {
        *out = x.to_le_bytes();
    }
}

/// Shapes: `bytes` (4 n), `out` (n).
///
/// # Panics
/// The lengths disagree.
pub fn decode_f32(bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 4 * out.len(), "four bytes an element");
    let (bytes, _) = bytes.as_chunks::<4>();
    for (out, bytes) in out.iter_mut().zip(bytes) {
        *out = f32::from_le_bytes(*bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bf16_is_the_field_s() {
        let mut bits = 0u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(bits);
            let want = half::bf16::from_f32(x);
            assert_eq!(to_bf16(x), want.to_bits(), "{x:e}");
            assert_eq!(from_bf16(to_bf16(x)).to_bits(), want.to_f32().to_bits());
        }
    }

    #[test]
    fn chance_has_the_right_mean_over_all_of_it() {
        for x in [1.0f32, 1.001, -1.2345, 3.3e-5, -7.0e8, 1e-40] {
            let sum: f64 = (0..1 << 16)
                .map(|r| f64::from(from_bf16(to_bf16_by_chance(x, r))))
                .sum();
            assert_eq!(sum / 65536.0, f64::from(x));
        }
        assert!(from_bf16(to_bf16_by_chance(f32::NAN, 7)).is_nan());
        assert_eq!(
            from_bf16(to_bf16_by_chance(f32::INFINITY, 0xffff)),
            f32::INFINITY
        );
        for x in [f32::MAX, f32::MIN] {
            assert!(from_bf16(to_bf16_by_chance(x, 0xffff)).is_finite());
        }
    }

    #[test]
    fn bytes_and_back() {
        let x = [1.5, -2.25, 0.1, f32::MAX];
        let (mut two, mut four) = ([0; 8], [0; 16]);
        encode_bf16(&x, &mut two);
        encode_f32(&x, &mut four);
        let mut out = [0.0; 4];
        decode_f32(&four, &mut out);
        assert_eq!(out, x);
        decode_bf16(&two, &mut out);
        assert_eq!(out[..2], x[..2]);
        assert_eq!(out[2], half::bf16::from_f32(0.1).to_f32());
        assert_eq!(two[..2], [0xc0, 0x3f]);
    }
}
