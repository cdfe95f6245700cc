//! Four lanes: the NEON that every armv8.0 CPU has.

use core::arch::aarch64::*;

use super::Unpack;
use crate::cpu::vector::lanes::neon::Neon;

/// Four of 16 signed bytes, the `i`-th, as floats.
#[inline(always)]
fn quarter(_: Neon, bytes: int8x16_t, i: usize) -> float32x4_t {
    // SAFETY: the witness says that there is NEON.
    unsafe {
        let eight = match i < 2 {
            true => vmovl_s8(vget_low_s8(bytes)),
            false => vmovl_high_s8(bytes),
        };
        vcvtq_f32_s32(match i % 2 {
            0 => vmovl_s16(vget_low_s16(eight)),
            _ => vmovl_high_s16(eight),
        })
    }
}

/// Bytes below 128 minus `offset`.
#[inline(always)]
fn centred(_: Neon, bytes: uint8x16_t, offset: f32) -> int8x16_t {
    // SAFETY: the witness says that there is NEON.
    unsafe { vsubq_s8(vreinterpretq_s8_u8(bytes), vdupq_n_s8(offset as i8)) }
}

impl Unpack for Neon {
    const RUN: usize = 2;

    #[inline(always)]
    unsafe fn signed(self, from: *const u8, i: usize) -> float32x4_t {
        // SAFETY: the caller vouches for the bytes, `self` for NEON.
        unsafe { quarter(self, vld1q_s8(from.add(i / 4 * 16).cast()), i % 4) }
    }
    #[inline(always)]
    unsafe fn unsigned(self, from: *const u8, i: usize, offset: f32) -> float32x4_t {
        // SAFETY: as in `signed`.
        unsafe {
            let bytes = vld1q_u8(from.add(i / 4 * 16));
            quarter(self, centred(self, bytes, offset), i % 4)
        }
    }
    #[inline(always)]
    unsafe fn nibbles(self, from: *const u8, i: usize, offset: f32) -> float32x4_t {
        // SAFETY: as in `signed`.
        unsafe {
            let pairs = vld1q_u8(from);
            let (low, high) = (vandq_u8(pairs, vdupq_n_u8(15)), vshrq_n_u8::<4>(pairs));
            let bytes = match i < 4 {
                true => vzip1q_u8(low, high),
                false => vzip2q_u8(low, high),
            };
            quarter(self, centred(self, bytes, offset), i % 4)
        }
    }
    #[inline(always)]
    unsafe fn bf16(self, from: *const u8, i: usize) -> float32x4_t {
        // SAFETY: as in `signed`; the halves need no alignment.
        unsafe {
            let halves = vreinterpret_u16_u8(vld1_u8(from.add(8 * i)));
            vreinterpretq_f32_u32(vshll_n_u16::<16>(halves))
        }
    }
    #[inline(always)]
    fn all_below(self, x: [float32x4_t; 4], limit: float32x4_t) -> bool {
        // SAFETY: `self` is a witness of NEON.
        unsafe {
            let [a, b, c, d] = x.map(|x| vcltq_f32(x, limit));
            vminvq_u32(vandq_u32(vandq_u32(a, b), vandq_u32(c, d))) == !0
        }
    }
    #[inline(always)]
    fn not_below(self, x: float32x4_t, limit: float32x4_t) -> u32 {
        // SAFETY: as in `all_below`; four numbers are one register.
        unsafe {
            let bit = vld1q_u32([1, 2, 4, 8].as_ptr());
            vaddvq_u32(vbicq_u32(bit, vcltq_f32(x, limit)))
        }
    }
}
