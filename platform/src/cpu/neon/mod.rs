//! AArch64: plain NEON as of ARMv8.0, and two levels that multiply bytes faster.
//!
//! - `dot`: products of bytes, in which the three levels differ.
//! - `codes`: unpacking, one format an `impl`; scales are in `super::scales`.
//! - `matvec`, `matmul`: int8 activations. `float`: f32 activations.
//! - `simd`: what they share.
//!
//! All inner functions are `#[inline(always)]`, so that they become part of the functions below,
//! which carry the instruction set.

mod codes;
mod dot;
mod float;
mod matmul;
mod matvec;
mod simd;

use std::arch::aarch64::*;

use super::scalar::TINY;
use super::scales::for_format;
use super::{ACT_GROUP, Act, OutTile, RowList, Rows, SUM_GROUP, Scratch, Table};
use codes::Codes;
use dot::{DotProduct, MatrixProduct, Widening};

/// A table whose int8 kernels are `$matvec` and `$matmul`.
macro_rules! table {
    ($matvec:ident, $matmul:ident) => {
        Table {
            quantize,
            matvec: |weights, act, exact, out| {
                // SAFETY: the table is reached only where these instructions are.
                unsafe {
                    for_format!(weights, exact, F => {
                        int8: $matvec::<F>(weights, act, out),
                        exact: matvec_exact::<F>(weights, act, out),
                        float: matvec_float::<F>(weights, act, out),
                    })
                }
            },
            matmul: |weights, act, exact, out, scratch| {
                // SAFETY: the table is reached only where these instructions are.
                unsafe {
                    for_format!(weights, exact, F => {
                        int8: $matmul::<F>(weights, act, out, scratch),
                        exact: matmul_f32::<float::Quantized<F>>(weights, act, out, scratch),
                        float: matmul_f32::<float::Plain<F>>(weights, act, out, scratch),
                    })
                }
            },
        }
    };
}

/// ARMv8.0.
pub(super) const TABLE: Table = table!(matvec_widening, matmul_widening);
/// With the dot product.
pub(super) const DOT_TABLE: Table = table!(matvec_dot, matmul_dot);
/// With the int8 matrix product, and the dot product for one token.
pub(super) const I8MM_TABLE: Table = table!(matvec_dot, matmul_i8mm);

/// Functions that carry an instruction set, around an inner one that doesn't.
macro_rules! entries {
    ($($features:literal: $name:ident<$f:ident: $bound:path>($($arg:ident: $ty:ty),*) $inner:expr;)*) => {
        $(
            #[target_feature(enable = $features)]
            unsafe fn $name<$f: $bound>($($arg: $ty),*) {
                // SAFETY: the caller answers for the instruction set, and for the lengths.
                unsafe { $inner($($arg),*) }
            }
        )*
    };
}

entries! {
    "neon": matvec_widening<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        matvec::rows::<F, Widening>;
    "neon,dotprod": matvec_dot<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        matvec::rows::<F, DotProduct>;
    "neon": matvec_exact<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        matvec::rows_exact::<F>;
    "neon": matvec_float<F: float::Float>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        float::rows::<F>;
    "neon": matmul_widening<F: Codes>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        matmul::all::<F, Widening>;
    "neon,dotprod": matmul_dot<F: Codes>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        matmul::all::<F, DotProduct>;
    "neon,dotprod,i8mm": matmul_i8mm<F: Codes>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        matmul::all::<F, MatrixProduct>;
    "neon": matmul_f32<S: float::Source>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        float::all::<S>;
}

/// See [`super::Kernels::quantize`].
fn quantize(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    for (((x, codes), scale), sums) in x
        .as_chunks::<ACT_GROUP>()
        .0
        .iter()
        .zip(codes.as_chunks_mut::<ACT_GROUP>().0)
        .zip(scales)
        .zip(sums.as_chunks_mut::<{ ACT_GROUP / SUM_GROUP }>().0)
    {
        // SAFETY: eight registers make up `x`, two make up `codes`.
        unsafe {
            let mut fours = [vdupq_n_f32(0.0); 8];
            // As integers: without a sign, the bits of floats are ordered as they are, NaN last.
            let mut bits = vdupq_n_u32(0);
            for (i, four) in fours.iter_mut().enumerate() {
                *four = vld1q_f32(x.as_ptr().add(4 * i));
                bits = vmaxq_u32(bits, vreinterpretq_u32_f32(vabsq_f32(*four)));
            }
            let largest = f32::from_bits(vmaxvq_u32(bits));
            *scale = if largest < TINY { 0.0 } else { largest / 127.0 };
            if !(largest >= TINY && largest.is_finite()) {
                *codes = [0; ACT_GROUP];
                *sums = [0; 2];
                continue;
            }
            let inverse = 127.0 / largest;
            for half in 0..2 {
                let mut eights = [vdup_n_s8(0); 2];
                for (i, eight) in eights.iter_mut().enumerate() {
                    let [a, b] = [0, 1].map(|j| {
                        let v = fours[4 * half + 2 * i + j];
                        // Rounds to nearest, ties to even.
                        vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(v, inverse)))
                    });
                    *eight = vqmovn_s16(vcombine_s16(a, b));
                }
                let sixteen = vcombine_s8(eights[0], eights[1]);
                vst1q_s8(codes.as_mut_ptr().add(16 * half), sixteen);
                sums[half] = vaddlvq_s8(sixteen);
            }
        }
    }
}
