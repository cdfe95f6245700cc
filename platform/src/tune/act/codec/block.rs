//! What an instruction set provides: whole blocks of 32 elements. One ISA a file; the loops over groups
//! are written once, over this.

use leanstream_core::act::codec::counter::Key;
use leanstream_core::act::codec::meta::Grid;

use crate::cpu::vector::lanes::Lanes;

pub(super) use leanstream_core::act::codec::BLOCK;

/// Where the random words of a run of blocks begin: each block takes the next 16.
#[derive(Clone, Copy)]
pub(super) struct Draw {
    pub key: Key,
    pub word: u32,
}

/// A division by the ratio of two grids as a multiplication: `v / ratio = (v + bias) factor / 2^16` for every sum
/// of a code and an offset.
#[derive(Clone, Copy)]
pub(super) struct Ratio {
    pub ratio: u16,
    pub factor: u16,
    pub bias: u16,
}

impl Ratio {
    pub(super) const fn of(from: u32, to: u32) -> Self {
        let ratio = ((1 << from) - 1) / ((1 << to) - 1);
        // Sums reach 2 * 255 - 1 here, for which the factor above 2^16 / 255 is too coarse.
        let (factor, bias) = if ratio == 255 {
            (256, 1)
        } else {
            ((1u32 << 16).div_ceil(ratio), 0)
        };
        Self {
            ratio: ratio as u16,
            factor: factor as u16,
            bias,
        }
    }
}

/// Blocks of 32 elements, bit for bit as [`leanstream_core::act::codec`] has them. Codes of `B` bits take `4 B` bytes
/// a block.
pub(super) trait Block: Lanes {
    /// Codes of `blocks` blocks.
    ///
    /// With `CLAMP`, elements that the grid doesn't span become its ends, and NaN becomes 0. Without, the caller has seen
    /// that there are none: no place is below 0 then, and none above `B` once it is rounded to 2^-16, but in 8
    /// bits, where saturation while packing turns 256 to 255.
    ///
    /// # Safety
    /// `x .. x + 32 blocks` is readable, `out .. out + 4 B blocks` is writable.
    unsafe fn quantize<const B: u32, const CLAMP: bool>(
        self,
        x: *const f32,
        blocks: usize,
        grid: Grid,
        draw: Draw,
        out: *mut u8,
    );

    /// `base + step * code` of each.
    ///
    /// # Safety
    /// `from .. from + 4 B blocks` is readable, `out .. out + 32 blocks` is writable.
    unsafe fn decode<const B: u32>(
        self,
        from: *const u8,
        blocks: usize,
        base: f32,
        step: f32,
        out: *mut f32,
    );

    /// Codes of `FROM` bits to fewer, `TO`. A block is read before it is written.
    ///
    /// # Safety
    /// `from .. from + 4 FROM blocks` is readable, `to .. to + 4 TO blocks` is writable. They may overlap, if no block
    /// is written over one that is still to be read.
    unsafe fn shrink<const FROM: u32, const TO: u32>(
        self,
        from: *const u8,
        to: *mut u8,
        blocks: usize,
        draw: Draw,
    );

    /// Bit `i` is set where element `i` of 32 is above 0.
    ///
    /// # Safety
    /// `x .. x + 32` is readable.
    unsafe fn positive(self, x: *const f32) -> u32;

    /// Puts 0 where the element's bit isn't set.
    ///
    /// # Safety
    /// `x .. x + 32` is readable and writable.
    unsafe fn keep(self, bits: u32, x: *mut f32);
}

#[cfg(test)]
mod tests {
    use super::*;
    use leanstream_core::act::codec::Bits;
    use leanstream_core::act::codec::shrink::{ratio, shrunk};

    #[test]
    fn multiplying_divides() {
        for from in Bits::ALL {
            for to in Bits::ALL.into_iter().filter(|&to| to < from) {
                let magic = Ratio::of(from.get(), to.get());
                assert_eq!(u32::from(magic.ratio), ratio(from, to));
                for code in 0..=from.steps() {
                    for r in 0..ratio(from, to) {
                        let product = (code + r + u32::from(magic.bias)) * u32::from(magic.factor);
                        let want = shrunk(code as u8, ratio(from, to), r);
                        assert_eq!(product >> 16, u32::from(want), "{from:?} {to:?} {code} {r}");
                    }
                }
            }
        }
    }
}
