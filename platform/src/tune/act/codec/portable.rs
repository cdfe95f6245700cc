//! Plain Rust, on core's reference.

use leanstream_core::act::codec::{Bits, meta::Grid, pack, shrink};

use super::block::{BLOCK, Block, Draw};
use crate::cpu::vector::lanes::portable::Portable;

const fn bits(b: u32) -> Bits {
    match b {
        1 => Bits::One,
        2 => Bits::Two,
        4 => Bits::Four,
        _ => Bits::Eight,
    }
}

impl Block for Portable {
    #[inline(always)]
    unsafe fn quantize<const B: u32, const CLAMP: bool>(
        self,
        x: *const f32,
        blocks: usize,
        grid: Grid,
        draw: Draw,
        out: *mut u8,
    ) {
        for block in 0..blocks {
            // SAFETY: the caller vouches for the elements and the bytes of their codes.
            let (x, out) = unsafe {
                let out = out.add(4 * B as usize * block);
                (
                    std::slice::from_raw_parts(x.add(BLOCK * block), BLOCK),
                    std::slice::from_raw_parts_mut(out, 4 * B as usize),
                )
            };
            let mut codes = [0; BLOCK];
            for i in 0..BLOCK / 2 {
                let count = draw.word.wrapping_add((BLOCK / 2 * block + i) as u32);
                let word = draw.key.word(count);
                codes[i] = grid.code(x[i], word & 0xffff);
                codes[BLOCK / 2 + i] = grid.code(x[BLOCK / 2 + i], word >> 16);
            }
            out.fill(0);
            for (i, code) in codes.into_iter().enumerate() {
                pack::put(out, bits(B), i, code);
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
        // SAFETY: the caller vouches for both.
        let (from, out) = unsafe {
            (
                std::slice::from_raw_parts(from, 4 * B as usize * blocks),
                std::slice::from_raw_parts_mut(out, BLOCK * blocks),
            )
        };
        for (i, out) in out.iter_mut().enumerate() {
            *out = base + step * f32::from(pack::get(from, bits(B), i));
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
        let mut codes = [0; BLOCK];
        let codes = &mut codes[..4 * FROM as usize];
        for block in 0..blocks {
            // SAFETY: the caller vouches for the bytes; they are copied, so the two may overlap.
            unsafe {
                from.add(block * codes.len())
                    .copy_to_nonoverlapping(codes.as_mut_ptr(), codes.len());
            }
            let word = draw.word.wrapping_add((block * BLOCK / 2) as u32);
            // Words are counted in 32 bits, which this keeps.
            let first = 2 * word as usize;
            shrink(codes, BLOCK, bits(FROM), bits(TO), draw.key, first);
            let new = 4 * TO as usize;
            // SAFETY: as above.
            unsafe {
                codes
                    .as_ptr()
                    .copy_to_nonoverlapping(to.add(block * new), new);
            }
        }
    }
    #[inline(always)]
    unsafe fn positive(self, x: *const f32) -> u32 {
        // SAFETY: the caller vouches for 32 elements.
        let x = unsafe { std::slice::from_raw_parts(x, BLOCK) };
        x.iter()
            .enumerate()
            .fold(0, |bits, (i, &x)| bits | u32::from(x > 0.0) << i)
    }
    #[inline(always)]
    unsafe fn keep(self, bits: u32, x: *mut f32) {
        // SAFETY: as in `positive`.
        let x = unsafe { std::slice::from_raw_parts_mut(x, BLOCK) };
        for (i, x) in x.iter_mut().enumerate() {
            if bits >> i & 1 == 0 {
                *x = 0.0;
            }
        }
    }
}
