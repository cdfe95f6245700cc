//! Eight lanes in plain Rust: what runs where no better ISA is known, and the reading of the others.

use super::Lanes;
use half::f16;

/// No feature needed.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 8] {
    core::array::from_fn(f)
}

impl Lanes for Portable {
    const N: usize = 8;
    const PANEL: usize = 1;
    type V = [f32; 8];

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 8] {
        [x; 8]
    }
    #[inline(always)]
    fn add(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn fma(self, a: [f32; 8], b: [f32; 8], c: [f32; 8]) -> [f32; 8] {
        // Not `mul_add`: without the instruction that is a library call per lane.
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn max(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: [f32; 8], b: [f32; 8]) -> [f32; 8] {
        each(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn round(self, a: [f32; 8]) -> [f32; 8] {
        // Adding 1.5 * 2^23 leaves no room for a fraction: the FPU rounds it away, ties to even.
        const SHIFT: f32 = 12_582_912.0;
        each(|i| (a[i] + SHIFT) - SHIFT)
    }
    #[inline(always)]
    fn pow2(self, n: [f32; 8]) -> [f32; 8] {
        // The biased exponent appears in the low bits of `n + 2^23`; no cast, which would saturate
        // and cost a compare per lane.
        each(|i| f32::from_bits((n[i] + 8_388_735.0).to_bits() << 23))
    }
    #[inline(always)]
    fn where_less(self, a: [f32; 8], b: [f32; 8], yes: [f32; 8], no: [f32; 8]) -> [f32; 8] {
        each(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }
    #[inline(always)]
    fn sum(self, a: [f32; 8]) -> f32 {
        let four = [a[0] + a[4], a[1] + a[5], a[2] + a[6], a[3] + a[7]];
        (four[0] + four[2]) + (four[1] + four[3])
    }
    #[inline(always)]
    fn top(self, a: [f32; 8]) -> f32 {
        a.iter().fold(a[0], |m, &x| if m > x { m } else { x })
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> [f32; 8] {
        // SAFETY: the caller vouches for the floats.
        unsafe { from.cast::<[f32; 8]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: [f32; 8]) {
        // SAFETY: as in `load`.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> [f32; 8] {
        // SAFETY: as in `load`.
        let bits = unsafe { from.cast::<[u16; 8]>().read_unaligned() };
        each(|i| f16_to_f32(bits[i]))
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, v: [f32; 8]) {
        let bits: [u16; 8] = core::array::from_fn(|i| f16::from_f32_const(v[i]).to_bits());
        // SAFETY: as in `load`.
        unsafe { to.cast::<[u16; 8]>().write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> [f32; 8] {
        // SAFETY: as in `load`.
        let bytes = unsafe { from.cast::<[i8; 8]>().read_unaligned() };
        each(|i| f32::from(bytes[i]))
    }
}

/// Half to single without branches, so that a loop of it vectorises: the bits are moved to where a
/// float has them, and one exact multiplication by 2^112 repairs the exponent's bias, subnormals
/// included. Infinity and NaN (exponent all ones) get the rest of their exponent put back.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let rest = u32::from(bits & 0x7fff) << 13;
    let small = f32::from_bits(rest) * f32::from_bits((127 + 112) << 23);
    let special = if rest >= 0x0f80_0000 { 0x7f80_0000 } else { 0 };
    f32::from_bits(small.to_bits() | special | sign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_float_widens_as_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            let ours = f16_to_f32(bits);
            let theirs = f16::from_bits(bits).to_f32();
            if theirs.is_nan() {
                assert!(ours.is_nan(), "{bits:#06x}");
            } else {
                assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:#06x}");
            }
        }
    }
}
