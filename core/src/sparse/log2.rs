//! Logarithms without a math library: ranks need an order and a scale, not the last bit.

/// log2 of `x`, within 0.0002 and never falling where `x` rises; the smallest normal number stands
/// for everything below it, zero and NaN included.
#[inline]
pub(super) fn log2(x: f32) -> f32 {
    let bits = x.max(f32::MIN_POSITIVE).to_bits();
    let exponent = (bits >> 23) as i32 - 127;
    let mantissa = f32::from_bits((bits & 0x007f_ffff) | 0x3f80_0000);
    // ln(m) = 2 (s + s^3/3 + s^5/5 + ...) with s = (m-1)/(m+1), which is at most 1/3.
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let series = s * (1.0 + square * (1.0 / 3.0 + square * (0.2 + square * (1.0 / 7.0))));
    exponent as f32 + series * (2.0 * core::f32::consts::LOG2_E)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logarithms_are_close_and_in_order() {
        let mut before = f32::NEG_INFINITY;
        let mut x = 1e-6f32;
        while x < 1e6 {
            let near = log2(x);
            assert!((near - x.log2()).abs() < 2e-4, "log2({x}) = {near}");
            assert!(near >= before, "log2 falls at {x}");
            before = near;
            x *= 1.003;
        }
        for power in -100..100i32 {
            assert_eq!(log2(2f32.powi(power)), power as f32);
            let below = f32::from_bits(2f32.powi(power).to_bits() - 1);
            assert!(log2(below) <= power as f32, "falls at 2^{power}");
        }
        assert_eq!(log2(0.0), -126.0);
        assert_eq!(log2(f32::NAN), -126.0);
        assert_eq!(log2(-1.0), -126.0);
    }
}
