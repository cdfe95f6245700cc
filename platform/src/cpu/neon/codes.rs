//! Unpacking of each quantized format to 32 bytes at a time: the integers `q` of `w = s * q + m`, as
//! signed bytes.

use std::arch::aarch64::*;

use leanstream_core::quant::{iq4_nl, mxfp4};

use super::super::scales::{
    Iq4Nl, Layout, Mxfp4, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
};

/// The integers of a format, 32 at a time.
pub(super) trait Codes: Layout {
    /// What a kernel needs to know of the codes.
    type Shape: Shape;

    /// Codes of group `g` (of 32) of a chunk.
    ///
    /// # Safety
    /// `chunk` points to a chunk that has a group `g`.
    unsafe fn codes(chunk: *const u8, g: usize) -> [int8x16_t; 2];
}

/// What a matrix product needs to know of codes once they are unpacked. Formats share shapes, so that
/// there are fewer products than formats.
pub(super) trait Shape {
    /// True where 16 weights share a scale; otherwise 32 do.
    const SIXTEENS: bool;
    /// True where there are minimums.
    const MINS: bool;
    /// True where codes are from -64 to 64, so that four products with an activation fit 16 bits.
    const SMALL: bool;
}

/// A shape.
pub(super) struct Of<const SIXTEENS: bool, const MINS: bool, const SMALL: bool>;

impl<const SIXTEENS: bool, const MINS: bool, const SMALL: bool> Shape
    for Of<SIXTEENS, MINS, SMALL>
{
    const SIXTEENS: bool = SIXTEENS;
    const MINS: bool = MINS;
    const SMALL: bool = SMALL;
}

/// Fails to compile where a format's shape contradicts its layout.
pub(super) const fn check_shape<F: Codes>() {
    assert!(F::Shape::SIXTEENS == F::SIXTEENS);
    assert!(F::Shape::MINS == F::MINS);
}

macro_rules! codes {
    ($name:ident { $shape:ty } |$chunk:ident, $g:ident| $body:expr) => {
        impl Codes for $name {
            type Shape = $shape;

            #[inline(always)]
            unsafe fn codes($chunk: *const u8, $g: usize) -> [int8x16_t; 2] {
                // SAFETY: the caller's; all reads are inside group `g` as the format lays it out.
                unsafe { $body }
            }
        }
    };
}

codes!(Q4_0 { Of<false, false, true> } |chunk, g| {
    minus(nibbles(chunk.add(g * Self::BYTES + 2)), 8)
});

codes!(Q4_1 { Of<false, true, true> } |chunk, g| {
    minus(nibbles(chunk.add(g * Self::BYTES + 4)), 0)
});

codes!(Q5_0 { Of<false, false, true> } |chunk, g| {
    let block = chunk.add(g * Self::BYTES);
    minus(or(nibbles(block.add(6)), fifth_bits(block.add(2))), 16)
});

codes!(Q5_1 { Of<false, true, true> } |chunk, g| {
    let block = chunk.add(g * Self::BYTES);
    minus(or(nibbles(block.add(8)), fifth_bits(block.add(4))), 0)
});

codes!(Q8_0 { Of<false, false, false> } |chunk, g| {
    minus(load(chunk.add(g * Self::BYTES + 2)), 0)
});

codes!(Iq4Nl { Of<false, false, false> } |chunk, g| {
    look_up(&iq4_nl::VALUES, nibbles(chunk.add(g * Self::BYTES + 2)))
});

codes!(Mxfp4 { Of<false, false, true> } |chunk, g| {
    look_up(&mxfp4::VALUES, nibbles(chunk.add(g * Self::BYTES + 1)))
});

codes!(Q2K { Of<true, true, true> } |chunk, g| {
    let packed = load(chunk.add(16 + 32 * (g / 4)));
    minus(and(right(packed, 2 * (g % 4)), 3), 0)
});

codes!(Q3K { Of<true, false, true> } |chunk, g| {
    let low = and(right(load(chunk.add(32 + 32 * (g / 4))), 2 * (g % 4)), 3);
    let high = and(move_bit(load(chunk), g, 2), 4);
    minus(or(low, high), 4)
});

codes!(Q4K { Of<false, true, true> } |chunk, g| {
    let packed = load(chunk.add(16 + 32 * (g / 2)));
    minus(and(right(packed, 4 * (g % 2)), 0xf), 0)
});

codes!(Q5K { Of<false, true, true> } |chunk, g| {
    let low = and(right(load(chunk.add(48 + 32 * (g / 2))), 4 * (g % 2)), 0xf);
    let high = and(move_bit(load(chunk.add(16)), g, 4), 0x10);
    minus(or(low, high), 0)
});

codes!(Q6K { Of<true, false, true> } |chunk, g| {
    let (run, k) = (g / 4, g % 4);
    let low = and(right(load(chunk.add(64 * run + 32 * (k % 2))), 4 * (k / 2)), 0xf);
    let high = and(move_bit(load(chunk.add(128 + 32 * run)), 2 * k, 4), 0x30);
    minus(or(low, high), 32)
});

#[inline(always)]
unsafe fn load(at: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's.
    unsafe { [vld1q_u8(at), vld1q_u8(at.add(16))] }
}

/// Low nibbles of 16 bytes, then their high nibbles.
#[inline(always)]
unsafe fn nibbles(at: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's.
    unsafe {
        let packed = vld1q_u8(at);
        [vandq_u8(packed, vdupq_n_u8(0xf)), vshrq_n_u8::<4>(packed)]
    }
}

/// 16 in byte `j` where bit `j` of a 32-bit word is set, 0 elsewhere.
#[inline(always)]
unsafe fn fifth_bits(at: *const u8) -> [uint8x16_t; 2] {
    // SAFETY: the caller's.
    unsafe {
        let word = vreinterpretq_u8_u32(vdupq_n_u32(at.cast::<u32>().read_unaligned()));
        let bit = vreinterpretq_u8_u64(vdupq_n_u64(0x8040_2010_0804_0201));
        [0, 2].map(|first| {
            // Byte j / 8 of the word into byte j; then bit j % 8 of it alone.
            let which = vcombine_u8(vdup_n_u8(first), vdup_n_u8(first + 1));
            let set = vtstq_u8(vqtbl1q_u8(word, which), bit);
            vandq_u8(set, vdupq_n_u8(16))
        })
    }
}

#[inline(always)]
unsafe fn look_up(values: &[i8; 16], nibbles: [uint8x16_t; 2]) -> [int8x16_t; 2] {
    // SAFETY: the table has 16 bytes; NEON is part of the architecture.
    unsafe {
        let table = vld1q_s8(values.as_ptr());
        nibbles.map(|n| vqtbl1q_s8(table, n))
    }
}

#[inline(always)]
unsafe fn and(v: [uint8x16_t; 2], mask: u8) -> [uint8x16_t; 2] {
    // SAFETY: NEON is part of the architecture.
    v.map(|v| unsafe { vandq_u8(v, vdupq_n_u8(mask)) })
}

#[inline(always)]
unsafe fn or(a: [uint8x16_t; 2], b: [uint8x16_t; 2]) -> [uint8x16_t; 2] {
    // SAFETY: NEON is part of the architecture.
    unsafe { [vorrq_u8(a[0], b[0]), vorrq_u8(a[1], b[1])] }
}

#[inline(always)]
unsafe fn minus(v: [uint8x16_t; 2], offset: i8) -> [int8x16_t; 2] {
    // SAFETY: NEON is part of the architecture.
    v.map(|v| unsafe { vsubq_s8(vreinterpretq_s8_u8(v), vdupq_n_s8(offset)) })
}

/// Shifts each byte right.
#[inline(always)]
unsafe fn right(v: [uint8x16_t; 2], by: usize) -> [uint8x16_t; 2] {
    // SAFETY: NEON is part of the architecture. With a constant `by` this is one instruction a
    // register.
    v.map(|v| unsafe { vshlq_u8(v, vdupq_n_s8(-(by as i8))) })
}

/// Moves bit `from` of each byte to bit `to`; mask the result.
#[inline(always)]
unsafe fn move_bit(v: [uint8x16_t; 2], from: usize, to: usize) -> [uint8x16_t; 2] {
    // SAFETY: NEON is part of the architecture.
    v.map(|v| unsafe { vshlq_u8(v, vdupq_n_s8(to as i8 - from as i8)) })
}
