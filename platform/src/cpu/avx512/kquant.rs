//! The formats with super-blocks of 256: a super-block is a chunk, so it is always whole.

use std::arch::x86_64::*;

use super::format::{Format, half_all};

/// The word at `p`.
///
/// # Safety
/// `p` points to four bytes.
#[inline(always)]
unsafe fn word(p: *const u8) -> u32 {
    // SAFETY: four bytes, at any address.
    u32::from_le(unsafe { p.cast::<u32>().read_unaligned() })
}

#[inline(always)]
fn pair(low: u32, high: u32) -> i64 {
    (u64::from(low) | u64::from(high) << 32) as i64
}

/// 32 bytes at `p`, twice.
///
/// # Safety
/// `p` points to 32 bytes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn twice(p: *const u8) -> __m512i {
    // SAFETY: 32 bytes.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(p.cast()) })
}

/// `low` in the first 32 bytes, `high` in the last.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
fn halves_of(low: i8, high: i8) -> __m512i {
    _mm512_mask_mov_epi64(_mm512_set1_epi8(low), 0xf0, _mm512_set1_epi8(high))
}

/// Each 16-bit word shifted right by `low` bits in the first 32 bytes and by `high` in the last.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
fn shift_right(v: __m512i, low: i16, high: i16) -> __m512i {
    let by = _mm512_mask_mov_epi64(_mm512_set1_epi16(low), 0xf0, _mm512_set1_epi16(high));
    _mm512_srlv_epi16(v, by)
}

/// Scales and minima of Q4_K and Q5_K: see [`leanstream_core::quant::q4_k::scale_min`].
///
/// # Safety
/// `block` points to two halves and 12 bytes of packed scales and minima.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
unsafe fn six_bit_scales(block: *const u8) -> (__m512, __m512) {
    // SAFETY: 16 bytes.
    let (d, dmin, a, b, c) = unsafe {
        (
            half_all(block),
            half_all(block.add(2)),
            word(block.add(4)),
            word(block.add(8)),
            word(block.add(12)),
        )
    };
    let scales = pair(
        a & 0x3f3f_3f3f,
        c & 0x0f0f_0f0f | (a >> 6 & 0x0303_0303) << 4,
    );
    let mins = pair(
        b & 0x3f3f_3f3f,
        c >> 4 & 0x0f0f_0f0f | (b >> 6 & 0x0303_0303) << 4,
    );
    let floats = |bytes: i64| {
        let ints = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes));
        _mm512_zextps256_ps512(_mm256_cvtepi32_ps(ints))
    };
    // The lanes without a group are 0 unless the super-scale isn't finite; then so is the result.
    let minus = _mm512_sub_ps(_mm512_setzero_ps(), dmin);
    (
        _mm512_mul_ps(d, floats(scales)),
        _mm512_mul_ps(minus, floats(mins)),
    )
}

/// 2 bits; scale and minimum of 4 bits per 16.
pub(super) struct Q2K;

impl Format for Q2K {
    const BLOCK: usize = 256;
    const BYTES: usize = 84;
    const GROUP: usize = 16;
    const MINS: bool = true;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, _blocks: usize) -> (__m512, __m512) {
        // SAFETY: inside the block.
        let (packed, d, dmin) = unsafe {
            (
                _mm_loadu_si128(chunk.cast()),
                half_all(chunk.add(80)),
                half_all(chunk.add(82)),
            )
        };
        let both = _mm512_cvtepu8_epi32(packed);
        let scales = _mm512_cvtepi32_ps(_mm512_and_si512(both, _mm512_set1_epi32(15)));
        let mins = _mm512_cvtepi32_ps(_mm512_srli_epi32::<4>(both));
        let minus = _mm512_sub_ps(_mm512_setzero_ps(), dmin);
        (_mm512_mul_ps(d, scales), _mm512_mul_ps(minus, mins))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, _whole: bool) -> __m512i {
        // SAFETY: inside the block.
        let v = unsafe { twice(chunk.add(16 + 32 * (j / 2))) };
        let first = (4 * (j % 2)) as i16;
        _mm512_and_si512(shift_right(v, first, first + 2), _mm512_set1_epi8(3))
    }
}

/// 3 bits; signed scale of 6 bits per 16.
pub(super) struct Q3K;

impl Format for Q3K {
    const BLOCK: usize = 256;
    const BYTES: usize = 110;
    const GROUP: usize = 16;
    const ZERO: u8 = 4;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, _blocks: usize) -> (__m512, __m512) {
        // SAFETY: inside the block.
        let (a, b, high, d) = unsafe {
            (
                word(chunk.add(96)),
                word(chunk.add(100)),
                word(chunk.add(104)),
                half_all(chunk.add(108)),
            )
        };
        // See `q3_k::scale`.
        let low_bits = 0x0f0f_0f0f;
        let high_bits = |k: u32| (high >> (2 * k) & 0x0303_0303) << 4;
        let first = pair(a & low_bits | high_bits(0), b & low_bits | high_bits(1));
        let last = pair(
            a >> 4 & low_bits | high_bits(2),
            b >> 4 & low_bits | high_bits(3),
        );
        let ints = _mm512_cvtepu8_epi32(_mm_set_epi64x(last, first));
        let scales = _mm512_cvtepi32_ps(_mm512_sub_epi32(ints, _mm512_set1_epi32(32)));
        (_mm512_mul_ps(d, scales), _mm512_setzero_ps())
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, _whole: bool) -> __m512i {
        // SAFETY: inside the block.
        let (high, v) = unsafe { (twice(chunk), twice(chunk.add(32 + 32 * (j / 2)))) };
        let first = (4 * (j % 2)) as i16;
        let low = _mm512_and_si512(shift_right(v, first, first + 2), _mm512_set1_epi8(3));
        let third = _mm512_test_epi8_mask(high, halves_of(1 << (2 * j), (2u8 << (2 * j)) as i8));
        _mm512_mask_add_epi8(low, third, low, _mm512_set1_epi8(4))
    }
}

/// 4 bits; scale and minimum of 6 bits per 32.
pub(super) struct Q4K;

impl Format for Q4K {
    const BLOCK: usize = 256;
    const BYTES: usize = 144;
    const MINS: bool = true;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, _blocks: usize) -> (__m512, __m512) {
        // SAFETY: the block starts with them.
        unsafe { six_bit_scales(chunk) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, _whole: bool) -> __m512i {
        // SAFETY: inside the block.
        let v = unsafe { twice(chunk.add(16 + 32 * j)) };
        let shifted = _mm512_mask_srli_epi16::<4>(v, 0xffff_0000, v);
        _mm512_and_si512(shifted, _mm512_set1_epi8(15))
    }
}

/// 5 bits; scale and minimum of 6 bits per 32.
pub(super) struct Q5K;

impl Format for Q5K {
    const BLOCK: usize = 256;
    const BYTES: usize = 176;
    const MINS: bool = true;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, _blocks: usize) -> (__m512, __m512) {
        // SAFETY: the block starts with them.
        unsafe { six_bit_scales(chunk) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, _whole: bool) -> __m512i {
        // SAFETY: inside the block.
        let (high, v) = unsafe { (twice(chunk.add(16)), twice(chunk.add(48 + 32 * j))) };
        let shifted = _mm512_mask_srli_epi16::<4>(v, 0xffff_0000, v);
        let low = _mm512_and_si512(shifted, _mm512_set1_epi8(15));
        let fifth = _mm512_test_epi8_mask(high, halves_of(1 << (2 * j), (2u8 << (2 * j)) as i8));
        _mm512_mask_add_epi8(low, fifth, low, _mm512_set1_epi8(16))
    }
}

/// 6 bits; signed scale of 8 bits per 16.
pub(super) struct Q6K;

impl Format for Q6K {
    const BLOCK: usize = 256;
    const BYTES: usize = 210;
    const GROUP: usize = 16;
    const ZERO: u8 = 32;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn scales(chunk: *const u8, _blocks: usize) -> (__m512, __m512) {
        // SAFETY: inside the block.
        let (scales, d) = unsafe {
            (
                _mm_loadu_si128(chunk.add(192).cast()),
                half_all(chunk.add(208)),
            )
        };
        let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales));
        (_mm512_mul_ps(d, scales), _mm512_setzero_ps())
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
    #[inline]
    unsafe fn codes(chunk: *const u8, j: usize, _whole: bool) -> __m512i {
        // SAFETY: inside the block.
        let (low, high) = unsafe {
            (
                _mm512_loadu_si512(chunk.add(64 * (j / 2)).cast()),
                twice(chunk.add(128 + 32 * (j / 2))),
            )
        };
        let low = if j.is_multiple_of(2) {
            low
        } else {
            _mm512_srli_epi16::<4>(low)
        };
        // Bring the upper two bits to bits 4 and 5, from bits 0, 2, 4 or 6. A rotation of the
        // 16-bit words by 4, 2, 0 or -2 does it: neighbours' bits are masked off.
        let left = _mm512_slli_epi16::<4>(high);
        let high = if j.is_multiple_of(2) {
            _mm512_mask_slli_epi16::<2>(left, 0xffff_0000, high)
        } else {
            _mm512_mask_srli_epi16::<2>(high, 0xffff_0000, high)
        };
        // (low & 15) | (high & 48)
        let low = _mm512_and_si512(low, _mm512_set1_epi8(15));
        _mm512_ternarylogic_epi32::<0xf8>(low, high, _mm512_set1_epi8(48))
    }
}
