//! The codec of saved activations: groups of elements to codes of 1, 2, 4 or 8 bits and back.
//!
//! This is the readable reference. Faster kernels produce the same bits on every instruction set; they
//! share [`meta`] and [`counter`] with it, so that only the loops over elements differ.
//!
//! A group of up to [`GROUP_MAX`] elements has a minimum `m` and a scale `s`, both bf16 and rounded
//! outward *first* ([`Meta`]), so that the grid `m + s q`, `q = 0 ..= B`, `B = 2^bits - 1`, spans the group as
//! it will be decoded. Then each element takes one of its two neighbours on that grid by chance:
//!
//! `q = min(B, floor((x - m) / s + u))`, `u` uniform in `0 .. 1`, so `E[m + s q] = x` and `Var = s^2 p (1 - p)`
//! with `p` the fraction of `(x - m) / s`.
//!
//! `u` has 16 bits and comes from a hash of (seed, step, tensor, element): it depends on neither threads
//! nor the place of pages. `(x - m) / s` is rounded to 2^-16 first, and the sum with `u` is one of integers; so the
//! mean over all `u` is off by no more than that rounding and what f32 costs.
//!
//! - [`counter`]: the hash.
//! - [`grouping`]: how a tensor is cut into groups.
//! - [`meta`]: minimum and scale of a group.
//! - [`pack`]: codes in bytes.
//! - [`shrink`]: fewer bits for what is already quantized, without its values.
//! - [`outlier`]: columns kept apart, so that they don't widen the grids of others.
//! - [`float`]: bf16 and f32 as they are.
//! - [`mask`]: what ReLU and pooling need of their inputs: a bit, two bits.

pub mod counter;
pub mod float;
pub mod grouping;
pub mod mask;
pub mod meta;
pub mod outlier;
pub mod pack;
pub mod shrink;

pub use counter::{Counter, Key};
pub use grouping::{GROUP_MAX, GROUP_MULTIPLE, Grouping};
pub use meta::{Meta, Range};
pub use shrink::shrink;

use super::Width;
use core::fmt;

/// Elements that share a block of 16 random words; see [`counter::word_of`].
pub const BLOCK: usize = 32;

/// Bits of a code: the [`Width`]s that are codes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Bits {
    /// The group's minimum or its maximum.
    One = 1,
    /// 4 levels.
    Two = 2,
    /// 16 levels.
    Four = 4,
    /// 256 levels.
    Eight = 8,
}

impl Bits {
    /// All, fewest first.
    pub const ALL: [Self; 4] = [Self::One, Self::Two, Self::Four, Self::Eight];

    /// Those of a width; none for floats.
    #[must_use]
    pub const fn of(width: Width) -> Option<Self> {
        match width {
            Width::One => Some(Self::One),
            Width::Two => Some(Self::Two),
            Width::Four => Some(Self::Four),
            Width::Eight => Some(Self::Eight),
            Width::Bf16 | Width::F32 => None,
        }
    }

    /// How many.
    #[must_use]
    pub const fn get(self) -> u32 {
        self as u32
    }

    /// `B`, the largest code: steps of the grid.
    #[must_use]
    pub const fn steps(self) -> u32 {
        (1 << self.get()) - 1
    }

    /// Bytes of `elements` codes, a multiple of 8.
    #[must_use]
    pub const fn bytes(self, elements: usize) -> usize {
        elements / 8 * self.get() as usize
    }

    /// Codes in `bytes` bytes.
    #[must_use]
    pub const fn elements(self, bytes: usize) -> usize {
        bytes * 8 / self.get() as usize
    }
}

impl From<Bits> for Width {
    fn from(bits: Bits) -> Self {
        match bits {
            Bits::One => Self::One,
            Bits::Two => Self::Two,
            Bits::Four => Self::Four,
            Bits::Eight => Self::Eight,
        }
    }
}

/// An element that can't be quantized: it is NaN or infinite, or its group spans more than f32 holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotFinite {
    /// The element's number in its tensor, padding counted; the group's first where only the group's
    /// range is known or to blame.
    pub element: usize,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "element {} of the activations, or the range of its group, is not finite: training has diverged \
             (a lower --lr may help) or a weight is not finite ('leanstream verify' finds it)",
            self.element
        )
    }
}

impl core::error::Error for NotFinite {}

/// Quantizes one group.
///
/// Shapes: `x` (n), `out` codes of a whole group: `bits.bytes(g)` for a multiple `g >= n` of 8; elements
/// beyond `n` are padding and get code 0. `key` is the tensor's [`Counter::rounding`], `first` the number of
/// the group's first element in the tensor (a multiple of 8; padding counts).
///
/// # Errors
/// [`NotFinite`]; `out` is then as it was.
///
/// # Panics
/// `out` is no whole group for `x`.
pub fn quantize(
    x: &[f32],
    bits: Bits,
    key: Key,
    first: usize,
    out: &mut [u8],
) -> Result<Meta, NotFinite> {
    quantize_ranged(x, Range::of(x), bits, key, first, out)
}

/// [`quantize`] where the producer of `x` knows its range. Elements outside of it become its ends.
///
/// # Errors
/// [`NotFinite`]: the range isn't.
///
/// # Panics
/// As [`quantize`].
pub fn quantize_ranged(
    x: &[f32],
    range: Range,
    bits: Bits,
    key: Key,
    first: usize,
    out: &mut [u8],
) -> Result<Meta, NotFinite> {
    let group = bits.elements(out.len());
    assert!(
        group >= x.len() && group.is_multiple_of(GROUP_MULTIPLE),
        "codes of a whole group"
    );
    let Some(meta) = Meta::new(range, bits) else {
        let culprit = x.iter().position(|x| !x.is_finite()).unwrap_or(0);
        return Err(NotFinite {
            element: first + culprit,
        });
    };
    if meta.is_constant() {
        out.fill(Meta::constant_codes(range.min));
    } else {
        quantize_part(x, 0, group, meta, bits, key, first, out);
    }
    Ok(meta)
}

/// Codes of the elements `from ..` of a group whose [`Meta`] is known and has more than one value: the part
/// of a group that kernels working in whole blocks leave over.
///
/// Shapes: `x` (n), `out` as in [`quantize`], `group` elements with padding; codes of elements before `from`
/// aren't touched.
///
/// # Panics
/// `from` isn't a multiple of 8.
#[expect(clippy::too_many_arguments, reason = "a group, and where it lies")]
pub fn quantize_part(
    x: &[f32],
    from: usize,
    group: usize,
    meta: Meta,
    bits: Bits,
    key: Key,
    first: usize,
    out: &mut [u8],
) {
    let out = &mut out[bits.bytes(from)..bits.bytes(group)];
    let grid = meta.grid(bits);
    out.fill(0);
    for (i, &x) in x.iter().enumerate().skip(from) {
        let u = counter::uniform(key, first, i, group);
        pack::put(out, bits, i - from, grid.code(x, u));
    }
}

/// Values of a group's codes.
///
/// Shapes: `codes` of at least `out.len()` elements. `encoded` are the bits the group was quantized with,
/// `stored` those it has now: fewer if it was shrunk since.
///
/// # Panics
/// Too few codes, or `stored` is above `encoded`.
pub fn decode(codes: &[u8], stored: Bits, meta: Meta, encoded: Bits, out: &mut [f32]) {
    if let Some(value) = meta.constant(codes.first().copied().unwrap_or(0)) {
        out.fill(value);
        return;
    }
    let (base, step) = (meta.base(), meta.step(encoded, stored));
    for (i, out) in out.iter_mut().enumerate() {
        *out = base + step * f32::from(pack::get(codes, stored, i));
    }
}

#[cfg(test)]
mod tests;
