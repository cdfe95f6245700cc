//! Unpacking of each quantized format to 32 bytes at a time.
//!
//! A byte is the integer `q` of `w = s * q + m` plus [`Codes::OFFSET`]. Offsets make codes
//! unsigned, which is what the byte multiplication of AVX2 wants of one side; what they add to a
//! sum is taken off again through the sums of the activations.

use std::arch::x86_64::*;

use leanstream_core::quant::{iq4_nl, mxfp4};

use super::super::scales::{
    Iq4Nl, Layout, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};

/// The integers of a format, 32 at a time.
pub(super) trait Codes: Layout {
    /// What has been added to `q`.
    const OFFSET: i8 = 0;
    /// What a kernel needs to know of the codes.
    type Shape: Shape;

    /// Codes of group `g` (of 32) of a chunk.
    ///
    /// # Safety
    /// The machine has AVX2, and `chunk` points to a chunk that has a group `g`.
    unsafe fn codes(chunk: *const u8, g: usize) -> __m256i;
}

/// What a matrix product needs to know of codes once they are unpacked. Formats share shapes, so that
/// there are fewer products than formats.
pub(super) trait Shape {
    /// True where codes are signed bytes; otherwise they are 0..=[`Shape::MAX`].
    const SIGNED: bool;
    /// Largest absolute value of a code.
    const MAX: u8;
    /// True where 16 weights share a scale; otherwise 32 do.
    const SIXTEENS: bool;
    /// True where a code 0 may stand for something else than 0: there is a minimum or an offset.
    const MINS: bool;
}

/// Codes from -128 to 127, a scale per 32.
pub(super) struct Signed;

impl Shape for Signed {
    const SIGNED: bool = true;
    const MAX: u8 = 128;
    const SIXTEENS: bool = false;
    const MINS: bool = false;
}

/// Codes from 0 to at most `MAX`, with minimums or an offset.
pub(super) struct Unsigned<const SIXTEENS: bool, const MAX: u8>;

impl<const SIXTEENS: bool, const MAX: u8> Shape for Unsigned<SIXTEENS, MAX> {
    const SIGNED: bool = false;
    const MAX: u8 = MAX;
    const SIXTEENS: bool = SIXTEENS;
    const MINS: bool = true;
}

/// Fails to compile where a format's shape contradicts its layout.
pub(super) const fn check_shape<F: Codes>() {
    assert!(F::Shape::SIXTEENS == F::SIXTEENS);
    assert!(F::Shape::MINS == (F::MINS || F::OFFSET != 0));
}

macro_rules! codes {
    ($name:ident { $($consts:tt)* } |$chunk:ident, $g:ident| $body:expr) => {
        impl Codes for $name {
            $($consts)*
            #[inline(always)]
            unsafe fn codes($chunk: *const u8, $g: usize) -> __m256i {
                // SAFETY: the caller's; all reads are inside group `g` as the format lays it out.
                unsafe { $body }
            }
        }
    };
}

codes!(Q4_0 { const OFFSET: i8 = 8; type Shape = Unsigned<false, 15>; } |chunk, g| {
    nibbles(chunk.add(g * Self::BYTES + 2))
});

codes!(Q4_1 { type Shape = Unsigned<false, 15>; } |chunk, g| {
    nibbles(chunk.add(g * Self::BYTES + 4))
});

codes!(Q5_0 { const OFFSET: i8 = 16; type Shape = Unsigned<false, 31>; } |chunk, g| {
    let block = chunk.add(g * Self::BYTES);
    _mm256_or_si256(nibbles(block.add(6)), fifth_bits(block.add(2)))
});

codes!(Q5_1 { type Shape = Unsigned<false, 31>; } |chunk, g| {
    let block = chunk.add(g * Self::BYTES);
    _mm256_or_si256(nibbles(block.add(8)), fifth_bits(block.add(4)))
});

codes!(Q8_0 { type Shape = Signed; } |chunk, g| {
    load(chunk.add(g * Self::BYTES + 2))
});

codes!(Iq4Nl { type Shape = Signed; } |chunk, g| {
    look_up(&iq4_nl::VALUES, nibbles(chunk.add(g * Self::BYTES + 2)))
});

codes!(Mxfp4 { const OFFSET: i8 = 12; type Shape = Unsigned<false, 31>; } |chunk, g| {
    look_up(&MXFP4_PLUS_12, nibbles(chunk.add(g * Self::BYTES + 1)))
});

codes!(Q2K { type Shape = Unsigned<true, 7>; } |chunk, g| {
    let packed = load(chunk.add(16 + 32 * (g / 4)));
    _mm256_and_si256(right(packed, 2 * (g % 4)), _mm256_set1_epi8(3))
});

codes!(Q3K { const OFFSET: i8 = 4; type Shape = Unsigned<true, 7>; } |chunk, g| {
    let low = right(load(chunk.add(32 + 32 * (g / 4))), 2 * (g % 4));
    let high = move_bit(load(chunk), g, 2);
    _mm256_or_si256(
        _mm256_and_si256(low, _mm256_set1_epi8(3)),
        _mm256_and_si256(high, _mm256_set1_epi8(4)),
    )
});

codes!(Q4K { type Shape = Unsigned<false, 15>; } |chunk, g| {
    let packed = load(chunk.add(16 + 32 * (g / 2)));
    _mm256_and_si256(right(packed, 4 * (g % 2)), _mm256_set1_epi8(0xf))
});

codes!(Q5K { type Shape = Unsigned<false, 31>; } |chunk, g| {
    let low = right(load(chunk.add(48 + 32 * (g / 2))), 4 * (g % 2));
    let high = move_bit(load(chunk.add(16)), g, 4);
    _mm256_or_si256(
        _mm256_and_si256(low, _mm256_set1_epi8(0xf)),
        _mm256_and_si256(high, _mm256_set1_epi8(0x10)),
    )
});

codes!(Q6K { const OFFSET: i8 = 32; type Shape = Unsigned<true, 63>; } |chunk, g| {
    let (run, k) = (g / 4, g % 4);
    let low = right(load(chunk.add(64 * run + 32 * (k % 2))), 4 * (k / 2));
    let high = move_bit(load(chunk.add(128 + 32 * run)), 2 * k, 4);
    _mm256_or_si256(
        _mm256_and_si256(low, _mm256_set1_epi8(0xf)),
        _mm256_and_si256(high, _mm256_set1_epi8(0x30)),
    )
});

/// [`mxfp4::VALUES`] plus 12.
const MXFP4_PLUS_12: [i8; 16] = {
    let mut values = mxfp4::VALUES;
    let mut i = 0;
    while i < 16 {
        values[i] += 12;
        i += 1;
    }
    values
};

#[inline(always)]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let packed = _mm_loadu_si128(at.cast());
        let both = _mm256_set_m128i(_mm_srli_epi16::<4>(packed), packed);
        _mm256_and_si256(both, _mm256_set1_epi8(0xf))
    }
}

/// 16 in byte `j` where bit `j` of a 32-bit word is set, 0 elsewhere.
#[inline(always)]
unsafe fn fifth_bits(at: *const u8) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        let word = _mm256_set1_epi32(at.cast::<i32>().read_unaligned());
        // Byte j / 8 of the word into byte j; then bit j % 8 of it alone.
        let spread = _mm256_shuffle_epi8(
            word,
            _mm256_set_epi64x(
                0x0303_0303_0303_0303,
                0x0202_0202_0202_0202,
                0x0101_0101_0101_0101,
                0,
            ),
        );
        let bit = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64.cast_signed());
        let set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
        _mm256_and_si256(set, _mm256_set1_epi8(16))
    }
}

#[inline(always)]
unsafe fn look_up(values: &[i8; 16], nibbles: __m256i) -> __m256i {
    // SAFETY: the table has 16 bytes; the instruction set is the caller's.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast()));
        _mm256_shuffle_epi8(table, nibbles)
    }
}

/// Shifts each byte right, but for bits that come in from its neighbour: mask the result.
#[inline(always)]
unsafe fn right(v: __m256i, by: usize) -> __m256i {
    // SAFETY: the caller's. With a constant `by` this is one instruction.
    unsafe { _mm256_srl_epi16(v, _mm_cvtsi32_si128(by as i32)) }
}

/// Moves bit `from` of each byte to bit `to`; mask the result.
#[inline(always)]
unsafe fn move_bit(v: __m256i, from: usize, to: usize) -> __m256i {
    // SAFETY: the caller's.
    unsafe {
        if from >= to {
            right(v, from - to)
        } else {
            _mm256_sll_epi16(v, _mm_cvtsi32_si128((to - from) as i32))
        }
    }
}
