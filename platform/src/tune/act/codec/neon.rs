//! Four lanes: the NEON that every armv8.0 CPU has.

use core::arch::aarch64::*;
use leanstream_core::act::codec::counter::{FACTORS, SHIFTS};
use leanstream_core::act::codec::meta::Grid;

use super::block::{Block, Draw, Ratio};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::neon::Neon;

/// The words of four counts, to which `key.add` was added.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn words(counts: uint32x4_t, xor: uint32x4_t) -> uint32x4_t {
    // SAFETY: the caller vouches for NEON.
    unsafe {
        let x = veorq_u32(counts, vshrq_n_u32::<{ SHIFTS[0] as i32 }>(counts));
        let x = veorq_u32(vmulq_u32(x, vdupq_n_u32(FACTORS[0])), xor);
        let x = veorq_u32(x, vshrq_n_u32::<{ SHIFTS[1] as i32 }>(x));
        let x = vmulq_u32(x, vdupq_n_u32(FACTORS[1]));
        veorq_u32(x, vshrq_n_u32::<{ SHIFTS[2] as i32 }>(x))
    }
}

/// The first four counts of a draw.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn counts(draw: Draw) -> uint32x4_t {
    let first = draw.key.add.wrapping_add(draw.word);
    // SAFETY: the caller vouches for NEON.
    unsafe { vaddq_u32(vdupq_n_u32(first), vld1q_u32([0, 1, 2, 3].as_ptr())) }
}

/// Codes of one byte, below `2^B`, packed to `4 B` bytes: neighbours are joined, the second shifted
/// up, until all bits of bytes are used.
///
/// # Safety
/// The CPU has NEON, and the bytes at `out` are writable.
#[inline(always)]
unsafe fn pack<const B: u32>(a: uint8x16_t, b: uint8x16_t, out: *mut u8) {
    // SAFETY: the caller vouches for NEON and the bytes.
    unsafe {
        let (even, odd) = (vuzp1q_u8(a, b), vuzp2q_u8(a, b));
        match B {
            8 => {
                vst1q_u8(out, a);
                vst1q_u8(out.add(16), b);
            }
            4 => vst1q_u8(out, vsliq_n_u8::<4>(even, odd)),
            2 => {
                let pairs = vsliq_n_u8::<2>(even, odd);
                let (low, high) = (vget_low_u8(pairs), vget_high_u8(pairs));
                let fours = vsli_n_u8::<4>(vuzp1_u8(low, high), vuzp2_u8(low, high));
                vst1_u8(out, fours);
            }
            _ => {
                let pairs = vsliq_n_u8::<1>(even, odd);
                let (low, high) = (vget_low_u8(pairs), vget_high_u8(pairs));
                let fours = vsli_n_u8::<2>(vuzp1_u8(low, high), vuzp2_u8(low, high));
                let eights = vsli_n_u8::<4>(vuzp1_u8(fours, fours), vuzp2_u8(fours, fours));
                let all = vget_lane_u32::<0>(vreinterpret_u32_u8(eights));
                out.cast::<[u8; 4]>().write(all.to_le_bytes());
            }
        }
    }
}

/// The inverse of [`pack`].
///
/// # Safety
/// The CPU has NEON, and the bytes at `from` are readable.
#[inline(always)]
unsafe fn unpack<const B: u32>(from: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller vouches for NEON and the bytes.
    unsafe {
        match B {
            8 => [vld1q_u8(from), vld1q_u8(from.add(16))],
            4 => {
                let pairs = vld1q_u8(from);
                let low = vandq_u8(pairs, vdupq_n_u8(15));
                let high = vshrq_n_u8::<4>(pairs);
                [vzip1q_u8(low, high), vzip2q_u8(low, high)]
            }
            2 => {
                let fours = vld1_u8(from);
                let mask = vdup_n_u8(15);
                let (low, high) = (vand_u8(fours, mask), vshr_n_u8::<4>(fours));
                let pairs = vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
                let low = vandq_u8(pairs, vdupq_n_u8(3));
                let high = vshrq_n_u8::<2>(pairs);
                [vzip1q_u8(low, high), vzip2q_u8(low, high)]
            }
            _ => {
                let all = u32::from_le_bytes(from.cast::<[u8; 4]>().read());
                let bytes = vreinterpretq_u8_u32(vdupq_n_u32(all));
                let bit = vld1_u8([1, 2, 4, 8, 16, 32, 64, 128].as_ptr());
                let bit = vcombine_u8(bit, bit);
                let which = vcombine_u8(vdup_n_u8(0), vdup_n_u8(1));
                [which, vaddq_u8(which, vdupq_n_u8(2))].map(|which| {
                    let set = vtstq_u8(vqtbl1q_u8(bytes, which), bit);
                    vandq_u8(set, vdupq_n_u8(1))
                })
            }
        }
    }
}

impl Block for Neon {
    #[inline(always)]
    unsafe fn quantize<const B: u32, const CLAMP: bool>(
        self,
        x: *const f32,
        blocks: usize,
        grid: Grid,
        draw: Draw,
        out: *mut u8,
    ) {
        // SAFETY: the caller vouches for the memory, `self` for NEON.
        unsafe {
            let (base, inverse) = (self.splat(grid.base), self.splat(grid.inverse));
            let (zero, top) = (self.splat(0.0), self.splat(grid.top));
            let xor = vdupq_n_u32(draw.key.xor);
            let code = |x: *const f32, u: uint32x4_t| {
                let at = self.mul(self.sub(self.load(x), base), inverse);
                let at = if CLAMP {
                    self.min(self.max(at, zero), top)
                } else {
                    at
                };
                vshrn_n_u32::<16>(vaddq_u32(vcvtnq_u32_f32(at), u))
            };
            let mut counts = counts(draw);
            for block in 0..blocks {
                let x = x.add(32 * block);
                let (mut low, mut high) = ([vdup_n_u16(0); 4], [vdup_n_u16(0); 4]);
                for i in 0..4 {
                    let words = words(counts, xor);
                    counts = vaddq_u32(counts, vdupq_n_u32(4));
                    low[i] = code(x.add(4 * i), vandq_u32(words, vdupq_n_u32(0xffff)));
                    high[i] = code(x.add(16 + 4 * i), vshrq_n_u32::<16>(words));
                }
                let bytes = |four: [uint16x4_t; 4]| {
                    // Saturating.
                    let first = vqmovn_u16(vcombine_u16(four[0], four[1]));
                    vqmovn_high_u16(first, vcombine_u16(four[2], four[3]))
                };
                pack::<B>(bytes(low), bytes(high), out.add(4 * B as usize * block));
            }
        }
    }
    #[inline(always)]
    unsafe fn decode<const B: u32>(
        self,
        from: *const u8,
        blocks: usize,
        base: f32,
        step: f32,
        out: *mut f32,
    ) {
        // SAFETY: as in `quantize`.
        unsafe {
            let (low, by) = (self.splat(base), self.splat(step));
            for block in 0..blocks {
                let out = out.add(32 * block);
                for (i, codes) in unpack::<B>(from.add(4 * B as usize * block))
                    .iter()
                    .enumerate()
                {
                    let halves = [vmovl_u8(vget_low_u8(*codes)), vmovl_high_u8(*codes)];
                    for (j, half) in halves.into_iter().enumerate() {
                        let quarters = [vmovl_u16(vget_low_u16(half)), vmovl_high_u16(half)];
                        for (k, codes) in quarters.into_iter().enumerate() {
                            // Products of steps and codes are exact: one rounding or two are the same.
                            let value = self.fma(vcvtq_f32_u32(codes), by, low);
                            self.store(out.add(16 * i + 8 * j + 4 * k), value);
                        }
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn shrink<const FROM: u32, const TO: u32>(
        self,
        from: *const u8,
        to: *mut u8,
        blocks: usize,
        draw: Draw,
    ) {
        let ratio = const { Ratio::of(FROM, TO) };
        // SAFETY: as in `quantize`.
        unsafe {
            let xor = vdupq_n_u32(draw.key.xor);
            // The upper halves of products: `a * b / 2^16`.
            let upper = |a: uint16x8_t, by: u16| {
                let low = vmull_n_u16(vget_low_u16(a), by);
                let high = vmull_high_n_u16(a, by);
                vshrn_high_n_u32::<16>(vshrn_n_u32::<16>(low), high)
            };
            let mut counts = counts(draw);
            for block in 0..blocks {
                let mut shrunk = unpack::<FROM>(from.add(4 * FROM as usize * block));
                for codes in &mut shrunk {
                    let halves = [vmovl_u8(vget_low_u8(*codes)), vmovl_high_u8(*codes)];
                    let [low, high] = halves.map(|codes| {
                        // Halves of words are 16-bit lanes in the order of elements.
                        let random = vreinterpretq_u16_u32(words(counts, xor));
                        counts = vaddq_u32(counts, vdupq_n_u32(4));
                        let sum = vaddq_u16(codes, upper(random, ratio.ratio));
                        let sum = vaddq_u16(sum, vdupq_n_u16(ratio.bias));
                        vmovn_u16(upper(sum, ratio.factor))
                    });
                    *codes = vcombine_u8(low, high);
                }
                pack::<TO>(shrunk[0], shrunk[1], to.add(4 * TO as usize * block));
            }
        }
    }
    #[inline(always)]
    unsafe fn positive(self, x: *const f32) -> u32 {
        (0..8).fold(0, |bits, i| {
            // SAFETY: the caller vouches for 32 elements, `self` for NEON.
            let four = unsafe {
                let set = vcgtzq_f32(self.load(x.add(4 * i)));
                vaddvq_u32(vandq_u32(set, vld1q_u32([1, 2, 4, 8].as_ptr())))
            };
            bits | four << (4 * i)
        })
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, x: *mut f32) {
        // SAFETY: as in `positive`.
        unsafe {
            let all = vdupq_n_u32(bits);
            let mut bit = vld1q_u32([1, 2, 4, 8].as_ptr());
            for i in 0..8 {
                let at = x.add(4 * i);
                let set = vtstq_u32(all, bit);
                let kept = vandq_u32(vreinterpretq_u32_f32(self.load(at)), set);
                self.store(at, vreinterpretq_f32_u32(kept));
                bit = vshlq_n_u32::<4>(bit);
            }
        }
    }
}
