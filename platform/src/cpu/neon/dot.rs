//! How bytes are multiplied: the one thing in which the three instruction sets of AArch64 differ.
//!
//! The intrinsics of the dot product and of the matrix product aren't stable; so both are written as
//! assembly, inside functions that carry the instruction set.

use std::arch::aarch64::*;
use std::arch::asm;

use super::super::Act;
use super::codes::Shape;
use super::matmul::Tile;

/// Sums of products of codes: of weights as [`super::codes::Codes`] has them, of activations in -127..=127. All
/// sums are exact.
pub(super) trait Dot {
    /// Tokens that share the loads of weights in [`Dot::rows`].
    const TOKENS: usize;

    /// Four sums that add up to the products of 16 codes.
    ///
    /// # Safety
    /// The machine has the instructions, and `w` are codes of shape `S`.
    unsafe fn sixteen<S: Shape>(w: int8x16_t, a: int8x16_t) -> int32x4_t;

    /// Four sums that add up to the products of 32 codes.
    ///
    /// # Safety
    /// That of [`Dot::sixteen`].
    unsafe fn thirty_two<S: Shape>(w: [int8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t;

    /// Puts 16 codes of each of eight rows in the order that [`Dot::rows`] wants them in.
    ///
    /// # Safety
    /// None beyond NEON.
    unsafe fn arrange(rows: [int8x16_t; 8]) -> [int8x16_t; 8];

    /// Lane `row` of result `t`: the sum of products of `16 * n` codes of eight rows and token `t`.
    ///
    /// # Safety
    /// That of [`Dot::sixteen`]; `w` points to `n` arrangements, each token to `16 * n` codes.
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const [int8x16_t; 8],
        n: usize,
        tokens: [*const i8; T],
    ) -> [[int32x4_t; 2]; T];

    /// [`Tile::all`], compiled for the instruction set.
    ///
    /// # Safety
    /// That of [`Tile::all`].
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>);
}

/// ARMv8.0: products of 16 bits.
pub(super) struct Widening;

impl Dot for Widening {
    const TOKENS: usize = 2;

    #[inline(always)]
    unsafe fn sixteen<S: Shape>(w: int8x16_t, a: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's. Two products are at most 2 * 128 * 127, which fits 16 bits.
        unsafe { vpaddlq_s16(eight_sums(w, a)) }
    }

    #[inline(always)]
    unsafe fn thirty_two<S: Shape>(w: [int8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe {
            let first = eight_sums(w[0], a[0]);
            if S::SMALL {
                let sums = vmlal_s8(first, vget_low_s8(w[1]), vget_low_s8(a[1]));
                vpaddlq_s16(vmlal_high_s8(sums, w[1], a[1]))
            } else {
                vpadalq_s16(vpaddlq_s16(first), eight_sums(w[1], a[1]))
            }
        }
    }

    #[inline(always)]
    unsafe fn arrange(rows: [int8x16_t; 8]) -> [int8x16_t; 8] {
        rows
    }

    #[inline(always)]
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const [int8x16_t; 8],
        n: usize,
        tokens: [*const i8; T],
    ) -> [[int32x4_t; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut out = [[vdupq_n_s32(0); 2]; T];
            for four in 0..2 {
                let mut sums = [[vdupq_n_s32(0); 4]; T];
                for r in 0..4 {
                    let row = 4 * four + r;
                    for (sums, token) in sums.iter_mut().zip(tokens) {
                        let a0 = vld1q_s8(token);
                        sums[r] = if n == 2 {
                            let a1 = vld1q_s8(token.add(16));
                            Self::thirty_two::<S>([(*w)[row], (*w.add(1))[row]], [a0, a1])
                        } else {
                            Self::sixteen::<S>((*w)[row], a0)
                        };
                    }
                }
                for (out, [a, b, c, d]) in out.iter_mut().zip(sums) {
                    out[four] = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
                }
            }
            out
        }
    }

    #[target_feature(enable = "neon")]
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>) {
        // SAFETY: the caller's.
        unsafe { tile.all::<S, Self>(act) }
    }
}

/// Products of 16 codes in eight lanes, two in each.
#[inline(always)]
unsafe fn eight_sums(w: int8x16_t, a: int8x16_t) -> int16x8_t {
    // SAFETY: NEON is part of the architecture.
    unsafe { vmlal_high_s8(vmull_s8(vget_low_s8(w), vget_low_s8(a)), w, a) }
}

/// ARMv8.2 dot product.
pub(super) struct DotProduct;

impl Dot for DotProduct {
    const TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn sixteen<S: Shape>(w: int8x16_t, a: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe { sdot(vdupq_n_s32(0), w, a) }
    }

    #[inline(always)]
    unsafe fn thirty_two<S: Shape>(w: [int8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe { sdot(sdot(vdupq_n_s32(0), w[0], a[0]), w[1], a[1]) }
    }

    /// Register `2 * i + half`: codes `4i .. 4i + 4` of rows `4 * half ..`.
    #[inline(always)]
    unsafe fn arrange(rows: [int8x16_t; 8]) -> [int8x16_t; 8] {
        // SAFETY: NEON is part of the architecture.
        unsafe {
            let rows = rows.map(|row| vreinterpretq_s32_s8(row));
            let [a, b, c, d, e, f, g, h] = rows;
            let low = super::simd::transpose([a, b, c, d]);
            let high = super::simd::transpose([e, f, g, h]);
            let order = [
                low[0], high[0], low[1], high[1], low[2], high[2], low[3], high[3],
            ];
            order.map(|v| vreinterpretq_s8_s32(v))
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const [int8x16_t; 8],
        n: usize,
        tokens: [*const i8; T],
    ) -> [[int32x4_t; 2]; T] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[vdupq_n_s32(0); 2]; T];
            for i in 0..n {
                let w = &*w.add(i);
                let a = tokens.map(|token| vld1q_s8(token.add(16 * i)));
                for half in 0..2 {
                    for (sums, a) in sums.iter_mut().zip(a) {
                        let sum = &mut sums[half];
                        *sum = sdot_lane::<0>(*sum, w[half], a);
                        *sum = sdot_lane::<1>(*sum, w[2 + half], a);
                        *sum = sdot_lane::<2>(*sum, w[4 + half], a);
                        *sum = sdot_lane::<3>(*sum, w[6 + half], a);
                    }
                }
            }
            sums
        }
    }

    #[target_feature(enable = "neon,dotprod")]
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>) {
        // SAFETY: the caller's.
        unsafe { tile.all::<S, Self>(act) }
    }
}

/// ARMv8.6 int8 matrix product, next to the dot product.
pub(super) struct MatrixProduct;

impl Dot for MatrixProduct {
    const TOKENS: usize = 4;

    #[inline(always)]
    unsafe fn sixteen<S: Shape>(w: int8x16_t, a: int8x16_t) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe { DotProduct::sixteen::<S>(w, a) }
    }

    #[inline(always)]
    unsafe fn thirty_two<S: Shape>(w: [int8x16_t; 2], a: [int8x16_t; 2]) -> int32x4_t {
        // SAFETY: the caller's.
        unsafe { DotProduct::thirty_two::<S>(w, a) }
    }

    /// Register `4 * i + p`: codes `8i .. 8i + 8` of row `2p`, then of row `2p + 1`.
    #[inline(always)]
    unsafe fn arrange(rows: [int8x16_t; 8]) -> [int8x16_t; 8] {
        // SAFETY: NEON is part of the architecture.
        unsafe {
            let mut out = rows;
            for p in 0..4 {
                [out[p], out[4 + p]] = zip8(rows[2 * p], rows[2 * p + 1]);
            }
            out
        }
    }

    #[inline(always)]
    unsafe fn rows<S: Shape, const T: usize>(
        w: *const [int8x16_t; 8],
        n: usize,
        tokens: [*const i8; T],
    ) -> [[int32x4_t; 2]; T] {
        // SAFETY: the caller's. A token that has no partner is its own.
        unsafe {
            // [pair of tokens][pair of rows]: (first token, both rows), (second token, both rows).
            let mut sums = [[vdupq_n_s32(0); 4]; T];
            let pairs = T.div_ceil(2);
            for i in 0..n {
                let w = &*w.add(i);
                for (pair, sums) in sums[..pairs].iter_mut().enumerate() {
                    let second = (2 * pair + 1).min(T - 1);
                    let a = zip8(
                        vld1q_s8(tokens[2 * pair].add(16 * i)),
                        vld1q_s8(tokens[second].add(16 * i)),
                    );
                    for (p, sum) in sums.iter_mut().enumerate() {
                        *sum = smmla(*sum, a[0], w[p]);
                        *sum = smmla(*sum, a[1], w[4 + p]);
                    }
                }
            }
            let mut out = [[vdupq_n_s32(0); 2]; T];
            for (t, out) in out.iter_mut().enumerate() {
                let fours = sums[t / 2].map(|v| vreinterpretq_s64_s32(v));
                *out = [0, 1].map(|half| {
                    let (a, b) = (fours[2 * half], fours[2 * half + 1]);
                    vreinterpretq_s32_s64(if t % 2 == 0 {
                        vzip1q_s64(a, b)
                    } else {
                        vzip2q_s64(a, b)
                    })
                });
            }
            out
        }
    }

    #[target_feature(enable = "neon,dotprod,i8mm")]
    unsafe fn tile<S: Shape>(tile: &Tile, act: &Act<'_>) {
        // SAFETY: the caller's.
        unsafe { tile.all::<S, Self>(act) }
    }
}

/// First halves of `a` and `b`, then second halves.
#[inline(always)]
unsafe fn zip8(a: int8x16_t, b: int8x16_t) -> [int8x16_t; 2] {
    // SAFETY: NEON is part of the architecture.
    unsafe {
        let (a, b) = (vreinterpretq_s64_s8(a), vreinterpretq_s64_s8(b));
        [
            vreinterpretq_s8_s64(vzip1q_s64(a, b)),
            vreinterpretq_s8_s64(vzip2q_s64(a, b)),
        ]
    }
}

/// Adds to each lane of `sum` the products of its four bytes.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: registers in, a register out.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Adds to each lane of `sum` the products of its four bytes of `a` and bytes `4 * LANE ..` of `b`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot_lane<const LANE: i32>(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: registers in, a register out.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {a:v}.16b, {b:v}.4b[{lane}]",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            lane = const LANE,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}

/// Adds to lane `2i + j` of `sum` the products of eight bytes from `8i` on of `a`, `8j` on of `b`.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut sum: int32x4_t, a: int8x16_t, b: int8x16_t) -> int32x4_t {
    // SAFETY: registers in, a register out.
    unsafe {
        asm!(
            "smmla {sum:v}.4s, {a:v}.16b, {b:v}.16b",
            sum = inout(vreg) sum,
            a = in(vreg) a,
            b = in(vreg) b,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sum
}
