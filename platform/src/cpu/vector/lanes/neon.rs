//! Four lanes: the NEON that every armv8.0 CPU has.

use super::Lanes;
use core::arch::aarch64::*;

/// Witness of NEON, which every aarch64 target of ours has.
#[derive(Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    /// # Safety
    /// The CPU has NEON.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(())
    }
}

impl Lanes for Neon {
    const N: usize = 4;
    const PANEL: usize = 4;
    type V = float32x4_t;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        // SAFETY: `self` is a witness of NEON.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vaddq_f32(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vsubq_f32(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vdivq_f32(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vmaxq_f32(a, b) }
    }
    #[inline(always)]
    fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vminq_f32(a, b) }
    }
    #[inline(always)]
    fn round(self, a: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vrndnq_f32(a) }
    }
    #[inline(always)]
    fn pow2(self, n: float32x4_t) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe {
            let biased = vaddq_s32(vcvtq_s32_f32(n), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
        }
    }
    #[inline(always)]
    fn where_less(
        self,
        a: float32x4_t,
        b: float32x4_t,
        yes: float32x4_t,
        no: float32x4_t,
    ) -> float32x4_t {
        // SAFETY: as in `splat`.
        unsafe { vbslq_f32(vcltq_f32(a, b), yes, no) }
    }
    #[inline(always)]
    fn sum(self, a: float32x4_t) -> f32 {
        // SAFETY: as in `splat`.
        unsafe { vaddvq_f32(a) }
    }
    #[inline(always)]
    fn top(self, a: float32x4_t) -> f32 {
        // SAFETY: as in `splat`.
        unsafe { vmaxvq_f32(a) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> float32x4_t {
        // SAFETY: the caller vouches for the bytes, `self` for NEON.
        unsafe { vld1q_f32(from) }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: float32x4_t) {
        // SAFETY: as in `load`.
        unsafe { vst1q_f32(to, v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16) -> float32x4_t {
        // SAFETY: as in `load`.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))) }
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, v: float32x4_t) {
        // SAFETY: as in `load`.
        unsafe { vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32(v))) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8) -> float32x4_t {
        // SAFETY: as in `load`; four bytes are read as one unaligned word.
        unsafe {
            let four = vcreate_s8(u64::from(from.cast::<u32>().read_unaligned()));
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))))
        }
    }
}
