//! Eight lanes in plain Rust.

use super::Unpack;
use crate::cpu::vector::lanes::portable::Portable;

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; 8] {
    std::array::from_fn(f)
}

impl Unpack for Portable {
    const RUN: usize = 1;

    #[inline(always)]
    unsafe fn signed(self, from: *const u8, i: usize) -> [f32; 8] {
        // SAFETY: the caller vouches for the bytes.
        let codes = unsafe { from.add(8 * i).cast::<[i8; 8]>().read_unaligned() };
        each(|k| f32::from(codes[k]))
    }
    #[inline(always)]
    unsafe fn unsigned(self, from: *const u8, i: usize, offset: f32) -> [f32; 8] {
        // SAFETY: as in `signed`.
        let codes = unsafe { from.add(8 * i).cast::<[u8; 8]>().read_unaligned() };
        each(|k| f32::from(codes[k]) - offset)
    }
    #[inline(always)]
    unsafe fn nibbles(self, from: *const u8, i: usize, offset: f32) -> [f32; 8] {
        // SAFETY: as in `signed`.
        let pairs = unsafe { from.add(4 * i).cast::<[u8; 4]>().read_unaligned() };
        each(|k| f32::from(pairs[k / 2] >> (k % 2 * 4) & 15) - offset)
    }
    #[inline(always)]
    unsafe fn bf16(self, from: *const u8, i: usize) -> [f32; 8] {
        // SAFETY: as in `signed`.
        let halves = unsafe { from.add(16 * i).cast::<[[u8; 2]; 8]>().read_unaligned() };
        each(|k| f32::from_bits(u32::from(u16::from_le_bytes(halves[k])) << 16))
    }
    #[inline(always)]
    fn all_below(self, x: [[f32; 8]; 4], limit: [f32; 8]) -> bool {
        // No early exit: that would keep the compiler from using vectors.
        let mut below = true;
        for x in x {
            for k in 0..8 {
                below &= x[k] < limit[k];
            }
        }
        below
    }
    #[inline(always)]
    fn not_below(self, x: [f32; 8], limit: [f32; 8]) -> u32 {
        (0..8).fold(0, |bits, k| {
            let below = x[k] < limit[k];
            bits | u32::from(!below) << k
        })
    }
}
