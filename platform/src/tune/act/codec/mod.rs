//! Kernels of the activation codec, bit for bit as [`leanstream_core::act::codec`] has it, on every instruction set.
//!
//! All are methods of [`Vector`], and work on a [`Run`] of groups: a chunk of the pool, or whatever a producing
//! kernel has just made. A group's range is found in registers while its elements come into L1, and they are quantized
//! and packed from there: one pass over memory. A producer that gathers ranges itself (`extent`,
//! [`Vector::group_ranges`]) saves the first look.

/// The constant of `bits` as a const parameter.
macro_rules! with_bits {
    ($bits:expr, $b:ident => $call:expr) => {
        match $bits {
            Bits::One => {
                const $b: u32 = 1;
                $call
            }
            Bits::Two => {
                const $b: u32 = 2;
                $call
            }
            Bits::Four => {
                const $b: u32 = 4;
                $call
            }
            Bits::Eight => {
                const $b: u32 = 8;
                $call
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod block;
pub(crate) mod extent;
mod floats;
mod masks;
#[cfg(target_arch = "aarch64")]
mod neon;
mod outliers;
mod pages;
mod portable;

use leanstream_core::act::codec::{self, Bits, GROUP_MAX, Grouping, Key, Meta, NotFinite, Range};

pub use outliers::{Apart, put_back};

use crate::cpu::vector::multiversion;
use block::{BLOCK, Block, Draw};
use extent::Extent;
use pages::{Cursor, Writer};

/// Groups whose ranges are found before the first of them is quantized: they stay in L1, 8 KiB of it.
const BATCH: usize = 8;

/// In place of the metadata of a group that has none: a scale of 0, which no group has.
const REFUSED: Meta = Meta::from_bytes([0; 4]);

/// Consecutive groups of one tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Run {
    /// How the tensor's rows are cut.
    pub grouping: Grouping,
    /// Number of the first group in the tensor.
    pub first: usize,
    /// How many.
    pub groups: usize,
}

impl Run {
    /// Where the run's elements lie in the tensor, (rows * cols) floats.
    #[must_use]
    pub const fn elements(&self) -> std::ops::Range<usize> {
        self.grouping.elements(self.first..self.first + self.groups)
    }

    /// Codes of the run, padding included.
    #[must_use]
    pub const fn codes(&self) -> usize {
        self.groups * self.grouping.group()
    }
}

/// How elements become codes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Coding {
    /// Bits of a code.
    pub bits: Bits,
    /// What rounding draws from: the tensor's [`codec::Counter::rounding`].
    pub key: Key,
}

multiversion! {
    /// Quantizes a run of groups.
    ///
    /// Shapes: `x` the run's elements ([`Run::elements`], a slice of the tensor), `metas` (groups), `pages` together at least
    /// [`Run::codes`] codes; they are filled in order, and groups may cross from one to the next.
    ///
    /// # Errors
    /// [`NotFinite`]; `metas` and `pages` then hold some of the groups.
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn quantize(
        run: Run,
        coding: Coding,
        x: &[f32],
        metas: &mut [Meta],
        pages: &mut [&mut [u8]],
    ) -> Result<(), NotFinite> = quantize_body;

    /// [`Vector::quantize`] where the producer knows the groups' ranges. Elements outside of them become their ends.
    ///
    /// Shapes: `ranges` (groups), else the same.
    ///
    /// # Errors
    /// [`NotFinite`], as there.
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn quantize_ranged(
        run: Run,
        coding: Coding,
        x: &[f32],
        ranges: &[Range],
        metas: &mut [Meta],
        pages: &mut [&mut [u8]],
    ) -> Result<(), NotFinite> = quantize_ranged_body;

    /// Joins the ranges of a run's groups to `ranges`: the last pass of a kernel that has just made them.
    /// Start from [`Range::NONE`]; what is not finite makes a range NaN.
    ///
    /// Shapes: `x` the run's elements, `ranges` (groups).
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn group_ranges(run: Run, x: &[f32], ranges: &mut [Range]) = group_ranges_body;

    /// Values of a run of groups that was quantized to `encoded` bits and has `stored` now.
    ///
    /// Shapes: as in [`Vector::quantize`]; `out` are the run's elements.
    ///
    /// # Panics
    /// The lengths disagree, or `stored` is above `encoded`.
    pub fn dequantize(
        run: Run,
        encoded: Bits,
        stored: Bits,
        metas: &[Meta],
        pages: &[&[u8]],
        out: &mut [f32],
    ) = dequantize_body;

    /// Shrinks codes in place, as [`codec::shrink()`]: they move to the front of the pages.
    ///
    /// Shapes: `pages` of a multiple of 32 bytes each, but the last, together at least `elements` codes of `from` bits;
    /// `elements` is a multiple of 8, `first` the number of the first in the tensor, padding counted. `key` is the tensor's
    /// [`codec::Counter::shrinking`].
    ///
    /// # Panics
    /// The lengths disagree, or `to` isn't below `from`.
    pub fn shrink_codes(
        elements: usize,
        from: Bits,
        to: Bits,
        key: Key,
        first: usize,
        pages: &mut [&mut [u8]],
    ) = shrink_body;
}

#[inline(always)]
fn quantize_body<L: Block>(
    l: L,
    run: Run,
    coding: Coding,
    x: &[f32],
    metas: &mut [Meta],
    pages: &mut [&mut [u8]],
) -> Result<(), NotFinite> {
    let to = &mut Writer::new(pages);
    with_bits!(coding.bits, B => quantize_groups::<L, B, false>(l, run, coding.key, x, None, metas, to))
}

#[inline(always)]
fn quantize_ranged_body<L: Block>(
    l: L,
    run: Run,
    coding: Coding,
    x: &[f32],
    ranges: &[Range],
    metas: &mut [Meta],
    pages: &mut [&mut [u8]],
) -> Result<(), NotFinite> {
    assert_eq!(ranges.len(), run.groups, "a range for each group");
    let to = &mut Writer::new(pages);
    with_bits!(coding.bits, B => quantize_groups::<L, B, true>(l, run, coding.key, x, Some(ranges), metas, to))
}

#[inline(always)]
fn quantize_groups<L: Block, const B: u32, const CLAMP: bool>(
    l: L,
    run: Run,
    key: Key,
    x: &[f32],
    ranges: Option<&[Range]>,
    metas: &mut [Meta],
    to: &mut Writer<'_, '_>,
) -> Result<(), NotFinite> {
    assert_eq!(metas.len(), run.groups, "metadata for each group");
    let (bits, group) = (bits::<B>(), run.grouping.group());
    let mut rest = check(&run, x.len(), x);
    let mut at = run.first;
    for (batch, metas) in metas.chunks_mut(BATCH).enumerate() {
        // Finding a range is a chain of dependent steps, and so is making a grid of it; those of several
        // groups go on beside each other.
        let mut found = [Range::NONE; BATCH];
        let found = &mut found[..metas.len()];
        match ranges {
            Some(ranges) => found.copy_from_slice(&ranges[batch * BATCH..][..metas.len()]),
            None => {
                let mut rest = rest;
                for (i, range) in found.iter_mut().enumerate() {
                    let (x, others) = rest.split_at(run.grouping.columns(at + i).len());
                    rest = others;
                    *range = Extent::of(l, x);
                }
            }
        }
        for (meta, range) in metas.iter_mut().zip(&*found) {
            // What isn't finite is found out below, where its element is known.
            *meta = Meta::new(*range, bits).unwrap_or(REFUSED);
        }
        for (meta, range) in metas.iter().zip(&*found) {
            let (x, others) = rest.split_at(run.grouping.columns(at).len());
            rest = others;
            let first = at * group;
            at += 1;
            if *meta == REFUSED {
                let culprit = x.iter().position(|x| !x.is_finite()).unwrap_or(0);
                return Err(NotFinite {
                    element: first + culprit,
                });
            }
            let out = to.begin(bits.bytes(group));
            if meta.is_constant() {
                out.fill(Meta::constant_codes(range.min));
            } else {
                let blocks = x.len() / BLOCK;
                let draw = Draw {
                    key,
                    word: (first / 2) as u32,
                };
                let (grid, codes) = (meta.grid(bits), out.as_mut_ptr());
                // SAFETY: the blocks are within `x`, and so are their codes within those of the group.
                unsafe { l.quantize::<B, CLAMP>(x.as_ptr(), blocks, grid, draw, codes) };
                if BLOCK * blocks < group {
                    codec::quantize_part(x, BLOCK * blocks, group, *meta, bits, key, first, out);
                }
            }
            to.end();
        }
    }
    Ok(())
}

#[inline(always)]
fn group_ranges_body<L: Block>(l: L, run: Run, x: &[f32], ranges: &mut [Range]) {
    assert_eq!(ranges.len(), run.groups, "a range for each group");
    let mut rest = check(&run, x.len(), x);
    for (i, range) in ranges.iter_mut().enumerate() {
        let (x, others) = rest.split_at(run.grouping.columns(run.first + i).len());
        rest = others;
        *range = range.join(Extent::of(l, x));
    }
}

#[inline(always)]
fn dequantize_body<L: Block>(
    l: L,
    run: Run,
    encoded: Bits,
    stored: Bits,
    metas: &[Meta],
    pages: &[&[u8]],
    out: &mut [f32],
) {
    with_bits!(stored, B => dequantize_groups::<L, B>(l, run, encoded, stored, metas, pages, out));
}

#[inline(always)]
fn dequantize_groups<L: Block, const B: u32>(
    l: L,
    run: Run,
    encoded: Bits,
    stored: Bits,
    metas: &[Meta],
    pages: &[&[u8]],
    out: &mut [f32],
) {
    assert_eq!(metas.len(), run.groups, "metadata for each group");
    assert!(stored <= encoded, "codes only shrink");
    let group = run.grouping.group();
    let mut room = [0; GROUP_MAX];
    let mut cursor = Cursor::default();
    let mut rest = check(&run, out.len(), out);
    for (i, meta) in metas.iter().enumerate() {
        let (out, others) = rest.split_at_mut(run.grouping.columns(run.first + i).len());
        rest = others;
        let codes = cursor.read(pages, stored.bytes(group), &mut room);
        if let Some(value) = meta.constant(codes[0]) {
            out.fill(value);
            continue;
        }
        let blocks = out.len() / BLOCK;
        let (base, step) = (meta.base(), meta.step(encoded, stored));
        // SAFETY: the blocks are within `out`, and so are their codes within those of the group.
        unsafe { l.decode::<B>(codes.as_ptr(), blocks, base, step, out.as_mut_ptr()) };
        if BLOCK * blocks < out.len() {
            let codes = &codes[stored.bytes(BLOCK * blocks)..];
            codec::decode(codes, stored, *meta, encoded, &mut out[BLOCK * blocks..]);
        }
    }
}

/// The elements, after a look at their number.
#[inline(always)]
fn check<T>(run: &Run, len: usize, elements: T) -> T {
    assert_eq!(len, run.elements().len(), "the run's elements");
    elements
}

#[inline(always)]
fn shrink_body<L: Block>(
    l: L,
    elements: usize,
    from: Bits,
    to: Bits,
    key: Key,
    first: usize,
    pages: &mut [&mut [u8]],
) {
    match (from, to) {
        (Bits::Eight, Bits::Four) => shrink_pages::<L, 8, 4>(l, elements, key, first, pages),
        (Bits::Eight, Bits::Two) => shrink_pages::<L, 8, 2>(l, elements, key, first, pages),
        (Bits::Eight, Bits::One) => shrink_pages::<L, 8, 1>(l, elements, key, first, pages),
        (Bits::Four, Bits::Two) => shrink_pages::<L, 4, 2>(l, elements, key, first, pages),
        (Bits::Four, Bits::One) => shrink_pages::<L, 4, 1>(l, elements, key, first, pages),
        (Bits::Two, Bits::One) => shrink_pages::<L, 2, 1>(l, elements, key, first, pages),
        _ => panic!("codes only shrink"),
    }
}

#[inline(always)]
fn shrink_pages<L: Block, const FROM: u32, const TO: u32>(
    l: L,
    elements: usize,
    key: Key,
    first: usize,
    pages: &mut [&mut [u8]],
) {
    let (from, to) = (4 * FROM as usize, 4 * TO as usize);
    assert!(elements.is_multiple_of(8), "whole bytes of codes");
    let (whole, part) = (elements / BLOCK, elements % BLOCK);
    let (mut source, mut target) = ((0, 0), (0, 0));
    let mut done = 0;
    while done < whole {
        settle(pages, &mut source);
        settle(pages, &mut target);
        // As many blocks as both pages have.
        let left = |at: (usize, usize), size: usize| (pages[at.0].len() - at.1) / size;
        let blocks = left(source, from).min(left(target, to)).min(whole - done);
        assert!(blocks > 0, "pages hold whole blocks");
        let draw = Draw {
            key,
            word: ((first + done * BLOCK) / 2) as u32,
        };
        let read = pages[source.0].as_ptr().wrapping_add(source.1);
        let write = pages[target.0].as_mut_ptr().wrapping_add(target.1);
        // Both may be in one page, so its address is taken once.
        let read = if source.0 == target.0 {
            write
                .wrapping_sub(target.1)
                .wrapping_add(source.1)
                .cast_const()
        } else {
            read
        };
        // SAFETY: the blocks are in their pages. A block is written where it or one before it was: `to` is less
        // than `from`, and both began at the first page's start.
        unsafe { l.shrink::<FROM, TO>(read, write, blocks, draw) };
        source.1 += blocks * from;
        target.1 += blocks * to;
        done += blocks;
    }
    if part > 0 {
        settle(pages, &mut source);
        settle(pages, &mut target);
        let (from, to) = (FROM as usize * part / 8, TO as usize * part / 8);
        let mut codes = [0; BLOCK];
        codes[..from].copy_from_slice(&pages[source.0][source.1..][..from]);
        codec::shrink(
            &mut codes,
            part,
            bits::<FROM>(),
            bits::<TO>(),
            key,
            first + whole * BLOCK,
        );
        pages[target.0][target.1..][..to].copy_from_slice(&codes[..to]);
    }
}

const fn bits<const B: u32>() -> Bits {
    match B {
        1 => Bits::One,
        2 => Bits::Two,
        4 => Bits::Four,
        _ => Bits::Eight,
    }
}

/// Goes on to the next page at the end of one.
fn settle(pages: &[&mut [u8]], at: &mut (usize, usize)) {
    while at.0 < pages.len() && at.1 == pages[at.0].len() {
        *at = (at.0 + 1, 0);
    }
    assert!(at.0 < pages.len(), "the codes fit into the pages");
}

#[cfg(test)]
mod tests;
