//! Sixteen lanes: AVX-512 F with BW, DQ and VL.

use core::arch::x86_64::*;
use leanstream_core::act::codec::counter::{FACTORS, SHIFTS};
use leanstream_core::act::codec::meta::Grid;

use super::avx2;
use super::block::{Block, Draw};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::avx512::Avx512;

/// `a ^ b ^ c`.
const XOR_3: i32 = 0x96;

/// The words of sixteen counts, to which `key.add` was added. `xor` is `key.xor` with itself, shifted by the second
/// shift, mixed in: so one operation mixes all three.
///
/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn words(counts: __m512i, xor: __m512i) -> __m512i {
    // SAFETY: the caller vouches for AVX-512.
    unsafe {
        let x = _mm512_xor_si512(counts, _mm512_srli_epi32::<{ SHIFTS[0] }>(counts));
        let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(FACTORS[0].cast_signed()));
        let shifted = _mm512_srli_epi32::<{ SHIFTS[1] }>(x);
        let x = _mm512_ternarylogic_epi32::<XOR_3>(x, shifted, xor);
        let x = _mm512_mullo_epi32(x, _mm512_set1_epi32(FACTORS[1].cast_signed()));
        _mm512_xor_si512(x, _mm512_srli_epi32::<{ SHIFTS[2] }>(x))
    }
}

/// Codes of two bytes, below `2^B` (in 8 bits they saturate), packed to `4 B` bytes: neighbours are joined, then
/// lanes are cut down to their lowest bytes.
///
/// # Safety
/// The CPU has AVX-512 BW, and the bytes at `out` are writable.
#[inline(always)]
unsafe fn pack<const B: u32>(codes: __m512i, out: *mut u8) {
    // SAFETY: the caller vouches for AVX-512 and the bytes.
    unsafe {
        match B {
            8 => _mm256_storeu_si256(out.cast(), _mm512_cvtusepi16_epi8(codes)),
            4 => {
                let pairs = _mm512_or_si512(codes, _mm512_srli_epi32::<12>(codes));
                _mm_storeu_si128(out.cast(), _mm512_cvtepi32_epi8(pairs));
            }
            _ => {
                let pairs = _mm512_or_si512(codes, _mm512_srli_epi32::<14>(codes));
                let fours = _mm512_or_si512(pairs, _mm512_srli_epi64::<28>(pairs));
                _mm_storel_epi64(out.cast(), _mm512_cvtepi64_epi8(fours));
            }
        }
    }
}

impl Block for Avx512 {
    #[inline(always)]
    unsafe fn quantize<const B: u32, const CLAMP: bool>(
        self,
        x: *const f32,
        blocks: usize,
        grid: Grid,
        draw: Draw,
        out: *mut u8,
    ) {
        let first = draw.key.add.wrapping_add(draw.word).cast_signed();
        let xor = (draw.key.xor ^ draw.key.xor >> SHIFTS[1]).cast_signed();
        // SAFETY: the caller vouches for the memory, `self` for the features.
        unsafe {
            let (base, inverse) = (self.splat(grid.base), self.splat(grid.inverse));
            let (zero, top) = (self.splat(0.0), self.splat(grid.top));
            let xor = _mm512_set1_epi32(xor);
            // 2^16 times the place on the grid, `u` included.
            let place = |x: *const f32, u: __m512i| {
                let at = self.mul(self.sub(self.load(x), base), inverse);
                let at = if CLAMP {
                    self.min(self.max(at, zero), top)
                } else {
                    at
                };
                _mm512_add_epi32(_mm512_cvtps_epi32(at), u)
            };
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            // The upper halves of 16 lanes: 1, 3, 5 and so on.
            let upper = _mm512_add_epi32(
                _mm512_slli_epi32::<18>(lanes),
                _mm512_add_epi32(
                    _mm512_slli_epi32::<2>(lanes),
                    _mm512_set1_epi32(0x0003_0001),
                ),
            );
            // ... of one vector, then of another.
            let upper = _mm512_and_si512(upper, _mm512_set1_epi16(63));
            let mut counts = _mm512_add_epi32(_mm512_set1_epi32(first), lanes);
            for block in 0..blocks {
                let x = x.add(32 * block);
                let out = out.add(4 * B as usize * block);
                let words = words(counts, xor);
                counts = _mm512_add_epi32(counts, _mm512_set1_epi32(16));
                let a = place(x, _mm512_and_si512(words, _mm512_set1_epi32(0xffff)));
                let b = place(x.add(16), _mm512_srli_epi32::<16>(words));
                if B == 1 {
                    // Code 1 is 2^16 and above.
                    let one = _mm512_set1_epi32(1 << 16);
                    let low = u32::from(_mm512_cmpge_epi32_mask(a, one));
                    let high = u32::from(_mm512_cmpge_epi32_mask(b, one));
                    out.cast::<[u8; 4]>()
                        .write((low | high << 16).to_le_bytes());
                } else {
                    pack::<B>(_mm512_permutex2var_epi16(a, upper, b), out);
                }
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
            // Products of steps and codes are exact, so that one rounding or two are the same.
            let value = |codes| self.fma(_mm512_cvtepi32_ps(codes), by, low);
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            // Looking up heeds the four lowest bits, so bits of the next codes needn't be cleared.
            let mask = if B < 4 { (1 << B) - 1 } else { 15 };
            let table = value(_mm512_and_si512(lanes, _mm512_set1_epi32(mask)));
            for block in 0..blocks {
                let from = from.add(4 * B as usize * block);
                let out = out.add(32 * block);
                let word = |i: usize| i32::from_le_bytes(from.add(4 * i).cast::<[u8; 4]>().read());
                match B {
                    8 => {
                        for i in 0..2 {
                            let bytes = _mm_loadu_si128(from.add(16 * i).cast());
                            self.store(out.add(16 * i), value(_mm512_cvtepu8_epi32(bytes)));
                        }
                    }
                    4 => {
                        let all = _mm512_broadcast_i32x4(_mm_loadu_si128(from.cast()));
                        let by = _mm512_and_si512(lanes, _mm512_set1_epi32(7));
                        let by = _mm512_slli_epi32::<2>(by);
                        // Eight lanes of one word of eight codes, eight of the next.
                        let mut which = _mm512_srli_epi32::<3>(lanes);
                        for i in 0..2 {
                            let eights = _mm512_permutexvar_epi32(which, all);
                            let codes = _mm512_srlv_epi32(eights, by);
                            self.store(out.add(16 * i), _mm512_permutexvar_ps(codes, table));
                            which = _mm512_add_epi32(which, _mm512_set1_epi32(2));
                        }
                    }
                    2 => {
                        let by = _mm512_slli_epi32::<1>(lanes);
                        for i in 0..2 {
                            let codes = _mm512_srlv_epi32(_mm512_set1_epi32(word(i)), by);
                            self.store(out.add(16 * i), _mm512_permutexvar_ps(codes, table));
                        }
                    }
                    _ => {
                        // As in the other branches: the upper end is `base + step * 1`.
                        let high = self.fma(self.splat(1.0), by, low);
                        let all = word(0).cast_unsigned();
                        self.store(out, _mm512_mask_blend_ps(all as u16, low, high));
                        let upper = (all >> 16) as u16;
                        self.store(out.add(16), _mm512_mask_blend_ps(upper, low, high));
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
        // SAFETY: the caller vouches for the bytes, `self` for the features, AVX2 among them.
        unsafe { avx2::shrink::<FROM, TO>(from, to, blocks, draw) }
    }
    #[inline(always)]
    unsafe fn positive(self, x: *const f32) -> u32 {
        // SAFETY: the caller vouches for 32 elements, `self` for the features.
        unsafe {
            let half = |x| _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.load(x), self.splat(0.0));
            u32::from(half(x)) | u32::from(half(x.add(16))) << 16
        }
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, x: *mut f32) {
        // SAFETY: as in `positive`.
        unsafe {
            self.store(x, _mm512_maskz_mov_ps(bits as u16, self.load(x)));
            let next = x.add(16);
            self.store(
                next,
                _mm512_maskz_mov_ps((bits >> 16) as u16, self.load(next)),
            );
        }
    }
}
