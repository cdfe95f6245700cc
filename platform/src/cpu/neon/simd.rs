//! Small pieces that several NEON kernels share.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::scales::{Halves, Scales};
use super::codes::Codes;

/// Halves through the conversion that every AArch64 has.
pub(super) struct Fcvtl;

impl Halves for Fcvtl {
    #[inline(always)]
    unsafe fn widen(halves: [u16; 8]) -> [f32; 8] {
        let mut out = [0f32; 8];
        // SAFETY: each half of the arrays is one register.
        unsafe {
            for i in 0..2 {
                let wide = widen4(vld1_u16(halves.as_ptr().add(4 * i)));
                vst1q_f32(out.as_mut_ptr().add(4 * i), wide);
            }
        }
        out
    }
}

/// Four halves as singles. (The intrinsic isn't stable in the oldest compiler we support.)
///
/// # Safety
/// None beyond NEON.
#[inline(always)]
pub(super) unsafe fn widen4(halves: uint16x4_t) -> float32x4_t {
    let out: float32x4_t;
    // SAFETY: a register in, a register out.
    unsafe {
        asm!(
            "fcvtl {out:v}.4s, {halves:v}.4h",
            out = lateout(vreg) out,
            halves = in(vreg) halves,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    out
}

/// The weights of group `g` (of 32) of a chunk.
///
/// # Safety
/// That of [`Codes::codes`].
#[inline(always)]
pub(super) unsafe fn decode<F: Codes>(
    chunk: *const u8,
    g: usize,
    scales: &Scales,
) -> [float32x4_t; 8] {
    // SAFETY: the caller's.
    unsafe {
        let mut out = [vdupq_n_f32(0.0); 8];
        for (half, codes) in F::codes(chunk, g).into_iter().enumerate() {
            let group = if F::SIXTEENS { 2 * g + half } else { g };
            let eights = [vmovl_s8(vget_low_s8(codes)), vmovl_high_s8(codes)];
            for (i, eight) in eights.into_iter().enumerate() {
                let fours = [vmovl_s16(vget_low_s16(eight)), vmovl_high_s16(eight)];
                for (j, four) in fours.into_iter().enumerate() {
                    let q = vcvtq_f32_s32(four);
                    out[4 * half + 2 * i + j] = if F::MINS {
                        vfmaq_n_f32(vdupq_n_f32(scales.m[group]), q, scales.s[group])
                    } else {
                        vmulq_n_f32(q, scales.s[group])
                    };
                }
            }
        }
        out
    }
}

/// Transposes four registers: lane `j` of result `i` is lane `i` of `rows[j]`.
///
/// # Safety
/// None beyond NEON.
#[inline(always)]
pub(super) unsafe fn transpose([a, b, c, d]: [int32x4_t; 4]) -> [int32x4_t; 4] {
    // SAFETY: NEON is part of the architecture.
    unsafe {
        let even = [vtrn1q_s32(a, b), vtrn1q_s32(c, d)].map(|v| vreinterpretq_s64_s32(v));
        let odd = [vtrn2q_s32(a, b), vtrn2q_s32(c, d)].map(|v| vreinterpretq_s64_s32(v));
        [
            vzip1q_s64(even[0], even[1]),
            vzip1q_s64(odd[0], odd[1]),
            vzip2q_s64(even[0], even[1]),
            vzip2q_s64(odd[0], odd[1]),
        ]
        .map(|v| vreinterpretq_s32_s64(v))
    }
}
