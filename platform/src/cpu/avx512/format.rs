//! What a block format looks like to the kernels, and the formats with blocks of 32.
//!
//! A *chunk* is [`CHUNK`] weights of one row, or what is left of it: blocks of 32 may end a row
//! early, so a chunk has a number of blocks.

use std::arch::x86_64::*;

use leanstream_core::quant::{iq4_nl, mxfp4};

/// Weights of a chunk: one super-block, or eight blocks of 32.
pub(super) const CHUNK: usize = 256;

/// A block format as codes, scales and either a zero point or minima.
pub(super) trait Format {
    /// Weights a block.
    const BLOCK: usize = 32;
    /// Bytes of a block.
    const BYTES: usize;
    /// Weights that share a scale: 16 or 32.
    const GROUP: usize = 32;
    /// Taken off every code. 0 where there are minima.
    const ZERO: u8 = 0;
    /// True where every group has a minimum.
    const MINS: bool = false;

    /// Bytes of a whole chunk.
    const CHUNK_BYTES: usize = CHUNK / Self::BLOCK * Self::BYTES;
    /// Groups of a whole chunk.
    const GROUPS: usize = CHUNK / Self::GROUP;

    /// Scale and minimum of each group, one a lane. Lanes without a group are 0, and so are minima
    /// that the format doesn't have.
    ///
    /// # Safety
    /// `chunk` points to `blocks` whole blocks, at least one and at most a chunk's.
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512);

    /// The codes of weights `64 j .. 64 j + 64`, one a byte. Where `!whole`, only the first 32 are
    /// there; the others come out as any codes.
    ///
    /// # Safety
    /// `chunk` points to the blocks that hold these weights.
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i;
}

/// The half at `p` as its bits.
///
/// # Safety
/// `p` points to two bytes.
#[inline(always)]
pub(super) unsafe fn half_bits(p: *const u8) -> u64 {
    // SAFETY: two bytes, at any address.
    u64::from(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() }))
}

/// The half at `p` in all lanes.
///
/// # Safety
/// `p` points to two bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) unsafe fn half_all(p: *const u8) -> __m512 {
    // SAFETY: as the caller's.
    let bits = unsafe { half_bits(p) };
    _mm512_cvtph_ps(_mm256_set1_epi16(bits as i16))
}

/// The halves at `p`, `p + stride`, ..., `blocks` of up to eight of them, in the low lanes.
///
/// # Safety
/// Each points to two bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn halves(p: *const u8, stride: usize, blocks: usize) -> __m512 {
    let bits = if blocks == 8 {
        // SAFETY: all eight are there.
        let four = |i: usize| unsafe {
            half_bits(p.add(i * stride))
                | half_bits(p.add((i + 1) * stride)) << 16
                | half_bits(p.add((i + 2) * stride)) << 32
                | half_bits(p.add((i + 3) * stride)) << 48
        };
        _mm_set_epi64x(four(4) as i64, four(0) as i64)
    } else {
        let (mut low, mut high) = (0, 0);
        for i in 0..blocks.min(4) {
            // SAFETY: `i < blocks`.
            low |= unsafe { half_bits(p.add(i * stride)) } << (16 * i);
        }
        for i in 4..blocks {
            // SAFETY: `i < blocks`.
            high |= unsafe { half_bits(p.add(i * stride)) } << (16 * (i - 4));
        }
        _mm_set_epi64x(high as i64, low as i64)
    };
    _mm512_zextps256_ps512(_mm256_cvtph_ps(bits))
}

/// Offset of the second block of a pair; a half pair reads its first block twice.
#[inline(always)]
fn second(bytes: usize, whole: bool) -> usize {
    if whole { bytes } else { 0 }
}

/// Two blocks' nibbles in the order of their weights: low nibbles of 16 bytes, then the high ones.
///
/// # Safety
/// `a` and `b` point to 16 bytes each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn nibbles(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: 16 bytes each.
    let (a, b) = unsafe { (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast())) };
    let twice = _mm512_mask_broadcast_i32x4(_mm512_broadcast_i32x4(a), 0xff00, b);
    // The second and fourth 16 bytes hold the high nibbles.
    let shifted = _mm512_mask_srli_epi16::<4>(twice, 0xff00_ff00, twice);
    _mm512_and_si512(shifted, _mm512_set1_epi8(15))
}

/// Nibbles and a fifth bit, bit `i` of the words at `high_a` and `high_b`.
///
/// # Safety
/// `a` and `b` point to a word with the fifth bits and 16 bytes of nibbles each.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn five_bits(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: four bytes, then 16, in each.
    let (low, high_a, high_b) = unsafe {
        (
            nibbles(a.add(4), b.add(4)),
            u32::from_le(a.cast::<u32>().read_unaligned()),
            u32::from_le(b.cast::<u32>().read_unaligned()),
        )
    };
    let fifth = u64::from(high_a) | u64::from(high_b) << 32;
    _mm512_mask_add_epi8(low, fifth, low, _mm512_set1_epi8(16))
}

/// 4 bits, scale.
pub(super) struct Q4_0;

impl Format for Q4_0 {
    const BYTES: usize = 18;
    const ZERO: u8 = 8;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with a half.
        (
            unsafe { halves(chunk, Self::BYTES, blocks) },
            _mm512_setzero_ps(),
        )
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: inside the blocks.
        unsafe {
            let a = chunk.add(2 * j * Self::BYTES + 2);
            nibbles(a, a.add(second(Self::BYTES, whole)))
        }
    }
}

/// 4 bits, scale and minimum.
pub(super) struct Q4_1;

impl Format for Q4_1 {
    const BYTES: usize = 20;
    const MINS: bool = true;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with two halves.
        unsafe {
            (
                halves(chunk, Self::BYTES, blocks),
                halves(chunk.add(2), Self::BYTES, blocks),
            )
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: inside the blocks.
        unsafe {
            let a = chunk.add(2 * j * Self::BYTES + 4);
            nibbles(a, a.add(second(Self::BYTES, whole)))
        }
    }
}

/// 5 bits, scale.
pub(super) struct Q5_0;

impl Format for Q5_0 {
    const BYTES: usize = 22;
    const ZERO: u8 = 16;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with a half.
        (
            unsafe { halves(chunk, Self::BYTES, blocks) },
            _mm512_setzero_ps(),
        )
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: inside the blocks.
        unsafe {
            let a = chunk.add(2 * j * Self::BYTES + 2);
            five_bits(a, a.add(second(Self::BYTES, whole)))
        }
    }
}

/// 5 bits, scale and minimum.
pub(super) struct Q5_1;

impl Format for Q5_1 {
    const BYTES: usize = 24;
    const MINS: bool = true;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with two halves.
        unsafe {
            (
                halves(chunk, Self::BYTES, blocks),
                halves(chunk.add(2), Self::BYTES, blocks),
            )
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: inside the blocks.
        unsafe {
            let a = chunk.add(2 * j * Self::BYTES + 4);
            five_bits(a, a.add(second(Self::BYTES, whole)))
        }
    }
}

/// 8 bits, scale. Its signed codes become unsigned ones with a zero point of 128.
pub(super) struct Q8_0;

impl Format for Q8_0 {
    const BYTES: usize = 34;
    const ZERO: u8 = 128;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with a half.
        (
            unsafe { halves(chunk, Self::BYTES, blocks) },
            _mm512_setzero_ps(),
        )
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: inside the blocks.
        let (a, b) = unsafe {
            let a = chunk.add(2 * j * Self::BYTES + 2);
            let b = a.add(second(Self::BYTES, whole));
            (_mm256_loadu_si256(a.cast()), _mm256_loadu_si256(b.cast()))
        };
        let signed = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
        _mm512_xor_si512(signed, _mm512_set1_epi8(-128))
    }
}

/// `values + zero` as unsigned bytes, for a lookup inside 16 bytes.
const fn table(values: [i8; 16], zero: u8) -> [u8; 16] {
    let mut table = [0; 16];
    let mut i = 0;
    while i < 16 {
        table[i] = (values[i] as i16 + zero as i16) as u8;
        i += 1;
    }
    table
}

/// `table[code]` for each byte below 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
fn lookup(table: &[u8; 16], codes: __m512i) -> __m512i {
    // SAFETY: 16 bytes.
    let table = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
    _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes)
}

/// 4 bits through a table, scale.
pub(super) struct Iq4Nl;

impl Iq4Nl {
    const TABLE: [u8; 16] = table(iq4_nl::VALUES, Self::ZERO);
}

impl Format for Iq4Nl {
    const BYTES: usize = 18;
    const ZERO: u8 = 128;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with a half.
        (
            unsafe { halves(chunk, Self::BYTES, blocks) },
            _mm512_setzero_ps(),
        )
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: as Q4_0's.
        lookup(&Self::TABLE, unsafe { Q4_0::codes(chunk, j, whole) })
    }
}

/// 4-bit floats through a table of their doubles, power-of-two scale.
pub(super) struct Mxfp4;

impl Mxfp4 {
    const TABLE: [u8; 16] = table(mxfp4::VALUES, Self::ZERO);
}

impl Format for Mxfp4 {
    const BYTES: usize = 17;
    const ZERO: u8 = 12;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, blocks: usize) -> (__m512, __m512) {
        // SAFETY: every block starts with its exponent.
        let exponent = |i: usize| u64::from(unsafe { *chunk.add(i * Self::BYTES) }) << (8 * i);
        let mut exponents = 0;
        if blocks == 8 {
            // Spelled out, so that it is no loop.
            exponents |= exponent(0) | exponent(1) | exponent(2) | exponent(3);
            exponents |= exponent(4) | exponent(5) | exponent(6) | exponent(7);
        } else {
            for i in 0..blocks {
                exponents |= exponent(i);
            }
        }
        let e = _mm512_cvtepu8_epi32(_mm_cvtsi64_si128(exponents as i64));
        // As `mxfp4::half_scale`: 2^(e - 128), whose lowest two are subnormal.
        let power = _mm512_cvtepi32_ps(_mm512_sub_epi32(e, _mm512_set1_epi32(128)));
        let there = 0xff_u16 >> (8 - blocks);
        let scales = _mm512_maskz_scalef_ps(there, _mm512_set1_ps(1.0), power);
        (scales, _mm512_setzero_ps())
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, whole: bool) -> __m512i {
        // SAFETY: inside the blocks.
        let codes = unsafe {
            let a = chunk.add(2 * j * Self::BYTES + 1);
            nibbles(a, a.add(second(Self::BYTES, whole)))
        };
        lookup(&Self::TABLE, codes)
    }
}
