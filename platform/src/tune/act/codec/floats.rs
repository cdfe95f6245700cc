//! bf16, for what isn't to be quantized.

use leanstream_core::act::codec::float;

use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::multiversion;

multiversion! {
    /// bf16 nearest to `x`, little endian, ties to even. Shapes: `x` (n), `out` (2 n).
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn to_bf16(x: &[f32], out: &mut [u8]) = to_body;

    /// Values of bf16. Shapes: `bytes` (2 n), `out` (n).
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn from_bf16(bytes: &[u8], out: &mut [f32]) = from_body;
}

// Integer operations element by element: plain loops are vectorised with whatever features the
// caller carries.

#[inline(always)]
fn to_body<L: Lanes>(_: L, x: &[f32], out: &mut [u8]) {
    assert_eq!(out.len(), 2 * x.len(), "two bytes an element");
    let (out, _) = out.as_chunks_mut::<2>();
    for (out, &x) in out.iter_mut().zip(x) {
        *out = float::to_bf16(x).to_le_bytes();
    }
}

#[inline(always)]
fn from_body<L: Lanes>(_: L, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), 2 * out.len(), "two bytes an element");
    let (bytes, _) = bytes.as_chunks::<2>();
    for (out, bytes) in out.iter_mut().zip(bytes) {
        *out = float::from_bf16(u16::from_le_bytes(*bytes));
    }
}
