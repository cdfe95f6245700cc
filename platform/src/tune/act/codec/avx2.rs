//! Eight lanes: AVX2. Codes pass through 32 bytes in order, which AVX-512 shares.

use core::arch::x86_64::*;
use leanstream_core::act::codec::counter::{FACTORS, SHIFTS};
use leanstream_core::act::codec::meta::Grid;

use super::block::{Block, Draw, Ratio};
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::avx2::Avx2;

/// The words of eight counts, to which `key.add` was added.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn words(counts: __m256i, xor: __m256i) -> __m256i {
    // SAFETY: the caller vouches for AVX2.
    unsafe {
        let x = _mm256_xor_si256(counts, _mm256_srli_epi32::<{ SHIFTS[0] as i32 }>(counts));
        let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(FACTORS[0].cast_signed()));
        let x = _mm256_xor_si256(x, xor);
        let x = _mm256_xor_si256(x, _mm256_srli_epi32::<{ SHIFTS[1] as i32 }>(x));
        let x = _mm256_mullo_epi32(x, _mm256_set1_epi32(FACTORS[1].cast_signed()));
        _mm256_xor_si256(x, _mm256_srli_epi32::<{ SHIFTS[2] as i32 }>(x))
    }
}

/// The first eight counts of a draw.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn counts(draw: Draw) -> __m256i {
    let first = draw.key.add.wrapping_add(draw.word).cast_signed();
    // SAFETY: the caller vouches for AVX2.
    unsafe {
        _mm256_add_epi32(
            _mm256_set1_epi32(first),
            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
        )
    }
}

/// Codes of one byte, below `2^B`, packed to `4 B` bytes.
///
/// # Safety
/// The CPU has AVX2, and the bytes at `out` are writable.
#[inline(always)]
pub(super) unsafe fn pack<const B: u32>(codes: __m256i, out: *mut u8) {
    // SAFETY: the caller vouches for AVX2 and the bytes.
    unsafe {
        match B {
            8 => _mm256_storeu_si256(out.cast(), codes),
            4 => {
                // Low byte plus 16 times the next, in 16-bit lanes; then their low bytes.
                let pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x1001));
                let halves = _mm256_packus_epi16(pairs, pairs);
                let packed = _mm256_permute4x64_epi64::<0b10_00>(halves);
                _mm_storeu_si128(out.cast(), _mm256_castsi256_si128(packed));
            }
            2 => {
                let pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi16(0x0401));
                let fours = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x0010_0001));
                let low = _mm256_set1_epi32(0x0c08_0400);
                let packed = _mm256_shuffle_epi8(fours, low);
                let halves = [
                    _mm256_castsi256_si128(packed),
                    _mm256_extracti128_si256::<1>(packed),
                ]
                .map(|half| _mm_cvtsi128_si32(half).to_le_bytes());
                out.cast::<[[u8; 4]; 2]>().write(halves);
            }
            _ => {
                // The sign bits of bytes, from the lowest bits.
                let bits = _mm256_movemask_epi8(_mm256_slli_epi16::<7>(codes));
                out.cast::<[u8; 4]>().write(bits.to_le_bytes());
            }
        }
    }
}

/// The inverse of [`pack`].
///
/// # Safety
/// The CPU has AVX2, and the bytes at `from` are readable.
#[inline(always)]
unsafe fn unpack<const B: u32>(from: *const u8) -> __m256i {
    // SAFETY: the caller vouches for AVX2 and the bytes.
    unsafe {
        match B {
            8 => _mm256_loadu_si256(from.cast()),
            4 => {
                let pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128(from.cast()));
                let both = _mm256_or_si256(pairs, _mm256_slli_epi16::<4>(pairs));
                _mm256_and_si256(both, _mm256_set1_epi8(15))
            }
            _ => {
                let fours = _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast()));
                let pairs = _mm256_or_si256(fours, _mm256_slli_epi32::<12>(fours));
                let all = _mm256_or_si256(pairs, _mm256_slli_epi32::<6>(pairs));
                _mm256_and_si256(all, _mm256_set1_epi8(3))
            }
        }
    }
}

/// [`Block::shrink`] on 256-bit vectors.
///
/// # Safety
/// The CPU has AVX2; else as [`Block::shrink`].
#[inline(always)]
pub(super) unsafe fn shrink<const FROM: u32, const TO: u32>(
    from: *const u8,
    to: *mut u8,
    blocks: usize,
    draw: Draw,
) {
    let ratio = const { Ratio::of(FROM, TO) };
    // SAFETY: the caller vouches for AVX2 and the bytes.
    unsafe {
        let xor = _mm256_set1_epi32(draw.key.xor.cast_signed());
        let by = _mm256_set1_epi16(ratio.ratio.cast_signed());
        let bias = _mm256_set1_epi16(ratio.bias.cast_signed());
        let factor = _mm256_set1_epi16(ratio.factor.cast_signed());
        let shrunk = |codes: __m128i, words: __m256i| {
            let r = _mm256_mulhi_epu16(words, by);
            let sum = _mm256_add_epi16(_mm256_cvtepu8_epi16(codes), r);
            _mm256_mulhi_epu16(_mm256_add_epi16(sum, bias), factor)
        };
        let mut counts = counts(draw);
        for block in 0..blocks {
            let codes = unpack::<FROM>(from.add(4 * FROM as usize * block));
            // Halves of words are 16-bit lanes in the order of elements.
            let low = shrunk(_mm256_castsi256_si128(codes), words(counts, xor));
            counts = _mm256_add_epi32(counts, _mm256_set1_epi32(8));
            let high = shrunk(_mm256_extracti128_si256::<1>(codes), words(counts, xor));
            counts = _mm256_add_epi32(counts, _mm256_set1_epi32(8));
            let mixed = _mm256_packus_epi16(low, high);
            let codes = _mm256_permute4x64_epi64::<0b11_01_10_00>(mixed);
            pack::<TO>(codes, to.add(4 * TO as usize * block));
        }
    }
}

impl Block for Avx2 {
    #[inline(always)]
    unsafe fn quantize<const B: u32, const CLAMP: bool>(
        self,
        x: *const f32,
        blocks: usize,
        grid: Grid,
        draw: Draw,
        out: *mut u8,
    ) {
        // SAFETY: the caller vouches for the memory, `self` for the features.
        unsafe {
            let (base, inverse) = (self.splat(grid.base), self.splat(grid.inverse));
            let (zero, top) = (self.splat(0.0), self.splat(grid.top));
            let xor = _mm256_set1_epi32(draw.key.xor.cast_signed());
            let code = |x: *const f32, u: __m256i| {
                let at = self.mul(self.sub(self.load(x), base), inverse);
                let at = if CLAMP {
                    self.min(self.max(at, zero), top)
                } else {
                    at
                };
                _mm256_srli_epi32::<16>(_mm256_add_epi32(_mm256_cvtps_epi32(at), u))
            };
            let lower = |words| _mm256_and_si256(words, _mm256_set1_epi32(0xffff));
            let mut counts = counts(draw);
            for block in 0..blocks {
                let x = x.add(32 * block);
                let a = words(counts, xor);
                counts = _mm256_add_epi32(counts, _mm256_set1_epi32(8));
                let b = words(counts, xor);
                counts = _mm256_add_epi32(counts, _mm256_set1_epi32(8));
                let first = _mm256_packus_epi32(code(x, lower(a)), code(x.add(8), lower(b)));
                let second = _mm256_packus_epi32(
                    code(x.add(16), _mm256_srli_epi32::<16>(a)),
                    code(x.add(24), _mm256_srli_epi32::<16>(b)),
                );
                // Packing works within 128 bits: the fours are 0 2 4 6 and 1 3 5 7. It saturates.
                let mixed = _mm256_packus_epi16(first, second);
                let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
                let codes = _mm256_permutevar8x32_epi32(mixed, order);
                pack::<B>(codes, out.add(4 * B as usize * block));
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
            let value = |codes| self.fma(_mm256_cvtepi32_ps(codes), by, low);
            // Looking up heeds the three lowest bits, so bits of the next code needn't be cleared.
            let table = |mask| {
                let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                value(_mm256_and_si256(lanes, _mm256_set1_epi32(mask)))
            };
            let look_up =
                |table, all, by| _mm256_permutevar8x32_ps(table, _mm256_srlv_epi32(all, by));
            for block in 0..blocks {
                let from = from.add(4 * B as usize * block);
                let out = out.add(32 * block);
                let word = |i: usize| {
                    let bytes = from.add(4 * i).cast::<[u8; 4]>().read();
                    _mm256_set1_epi32(i32::from_le_bytes(bytes))
                };
                match B {
                    8 => {
                        for i in 0..4 {
                            let bytes = _mm_loadl_epi64(from.add(8 * i).cast());
                            self.store(out.add(8 * i), value(_mm256_cvtepu8_epi32(bytes)));
                        }
                    }
                    4 => {
                        let by = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
                        for i in 0..4 {
                            let codes = _mm256_srlv_epi32(word(i), by);
                            let codes = _mm256_and_si256(codes, _mm256_set1_epi32(15));
                            self.store(out.add(8 * i), value(codes));
                        }
                    }
                    2 => {
                        let table = table(3);
                        let by = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
                        let next = _mm256_setr_epi32(16, 18, 20, 22, 24, 26, 28, 30);
                        for i in 0..2 {
                            let all = word(i);
                            self.store(out.add(16 * i), look_up(table, all, by));
                            self.store(out.add(16 * i + 8), look_up(table, all, next));
                        }
                    }
                    _ => {
                        let table = table(1);
                        let all = word(0);
                        let mut by = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
                        for i in 0..4 {
                            self.store(out.add(8 * i), look_up(table, all, by));
                            by = _mm256_add_epi32(by, _mm256_set1_epi32(8));
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
        // SAFETY: the caller vouches for the bytes, `self` for the features.
        unsafe { shrink::<FROM, TO>(from, to, blocks, draw) }
    }
    #[inline(always)]
    unsafe fn positive(self, x: *const f32) -> u32 {
        (0..4).fold(0, |bits, i| {
            // SAFETY: the caller vouches for 32 elements, `self` for the features.
            let eight = unsafe {
                let x = self.load(x.add(8 * i));
                _mm256_movemask_ps(_mm256_cmp_ps::<_CMP_GT_OQ>(x, self.splat(0.0)))
            };
            bits | eight.cast_unsigned() << (8 * i)
        })
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, x: *mut f32) {
        // SAFETY: as in `positive`.
        unsafe {
            let all = _mm256_set1_epi32(bits.cast_signed());
            let mut bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            for i in 0..4 {
                let set = _mm256_cmpeq_epi32(_mm256_and_si256(all, bit), bit);
                let kept = _mm256_and_ps(self.load(x.add(8 * i)), _mm256_castsi256_ps(set));
                self.store(x.add(8 * i), kept);
                bit = _mm256_slli_epi32::<8>(bit);
            }
        }
    }
}
