//! x86-64 with AVX2, FMA and F16C, and the byte dot product of AVX-VNNI where the machine has it.
//!
//! - `codes`: unpacking, one format an `impl`; scales are in `super::scales`.
//! - `matvec`, `matmul`: int8 activations. `float`: f32 activations.
//! - `simd`: what they share.
//!
//! All inner functions are `#[inline(always)]`, so that they become part of the functions below,
//! which carry the instruction set.

mod codes;
mod float;
mod matmul;
mod matvec;
mod simd;

use std::arch::x86_64::*;

use super::scalar::TINY;
use super::scales::for_format;
use super::{ACT_GROUP, Act, OutTile, RowList, Rows, SUM_GROUP, Scratch, Table};
use codes::Codes;
use simd::{Plain, Vnni};

/// AVX2, FMA and F16C.
pub(super) const TABLE: Table = Table {
    quantize: |x, codes, scales, sums| {
        // SAFETY: the table is reached only where these instructions are.
        unsafe { quantize(x, codes, scales, sums) }
    },
    matvec: |weights, act, exact, out| {
        // SAFETY: the table is reached only where these instructions are.
        unsafe {
            for_format!(weights, exact, F => {
                int8: matvec_plain::<F>(weights, act, out),
                exact: matvec_exact::<F>(weights, act, out),
                float: matvec_float::<F>(weights, act, out),
            })
        }
    },
    matmul: |weights, act, exact, out, scratch| {
        // SAFETY: the table is reached only where these instructions are.
        unsafe {
            for_format!(weights, exact, F => {
                int8: matmul_plain::<F>(weights, act, out, scratch),
                exact: matmul_f32::<float::Quantized<F>>(weights, act, out, scratch),
                float: matmul_f32::<float::Plain<F>>(weights, act, out, scratch),
            })
        }
    },
};

/// The same with AVX-VNNI.
pub(super) const VNNI_TABLE: Table = Table {
    matvec: |weights, act, exact, out| {
        // SAFETY: the table is reached only where these instructions are.
        unsafe {
            for_format!(weights, exact, F => {
                int8: matvec_vnni::<F>(weights, act, out),
                exact: matvec_exact::<F>(weights, act, out),
                float: matvec_float::<F>(weights, act, out),
            })
        }
    },
    matmul: |weights, act, exact, out, scratch| {
        // SAFETY: the table is reached only where these instructions are.
        unsafe {
            for_format!(weights, exact, F => {
                int8: matmul_vnni::<F>(weights, act, out, scratch),
                exact: matmul_f32::<float::Quantized<F>>(weights, act, out, scratch),
                float: matmul_f32::<float::Plain<F>>(weights, act, out, scratch),
            })
        }
    },
    ..TABLE
};

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
    "avx2,fma,f16c": matvec_plain<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        matvec::rows::<F, Plain>;
    "avx2,fma,f16c,avxvnni": matvec_vnni<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        matvec::rows::<F, Vnni>;
    "avx2,fma,f16c": matvec_exact<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        matvec::rows_exact::<F>;
    "avx2,fma,f16c": matvec_float<F: float::Float>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32])
        float::rows::<F>;
    "avx2,fma,f16c": matmul_plain<F: Codes>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        matmul::all::<F, Plain>;
    "avx2,fma,f16c,avxvnni": matmul_vnni<F: Codes>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        matmul::all::<F, Vnni>;
    "avx2,fma,f16c": matmul_f32<S: float::Source>(
        weights: &Rows<'_>, act: &Act<'_>, out: OutTile<'_>, scratch: &mut Scratch)
        float::all::<S>;
}

/// See [`super::Kernels::quantize`].
#[target_feature(enable = "avx2,fma")]
unsafe fn quantize(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    for (((x, codes), scale), sums) in x
        .as_chunks::<ACT_GROUP>()
        .0
        .iter()
        .zip(codes.as_chunks_mut::<ACT_GROUP>().0)
        .zip(scales)
        .zip(sums.as_chunks_mut::<{ ACT_GROUP / SUM_GROUP }>().0)
    {
        let mut eights = [_mm256_setzero_ps(); 4];
        // As integers: without a sign, the bits of floats are ordered as they are, NaN last.
        let mut bits = _mm256_setzero_si256();
        for (i, eight) in eights.iter_mut().enumerate() {
            // SAFETY: four registers make up `x`.
            *eight = unsafe { _mm256_loadu_ps(x.as_ptr().add(8 * i)) };
            let magnitude = _mm256_castps_si256(_mm256_andnot_ps(_mm256_set1_ps(-0.0), *eight));
            bits = _mm256_max_epi32(bits, magnitude);
        }
        let bits = _mm_max_epi32(
            _mm256_castsi256_si128(bits),
            _mm256_extracti128_si256::<1>(bits),
        );
        let bits = _mm_max_epi32(bits, _mm_shuffle_epi32::<0b01_00_11_10>(bits));
        let bits = _mm_max_epi32(bits, _mm_shuffle_epi32::<0b10_11_00_01>(bits));
        let largest = f32::from_bits(_mm_cvtsi128_si32(bits).cast_unsigned());
        *scale = if largest < TINY { 0.0 } else { largest / 127.0 };
        if !(largest >= TINY && largest.is_finite()) {
            *codes = [0; ACT_GROUP];
            *sums = [0; 2];
            continue;
        }
        let inverse = _mm256_set1_ps(127.0 / largest);
        // Rounds to nearest, ties to even.
        let [a, b, c, d] = eights.map(|v| _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse)));
        // Packing works within halves of a register, so that fours come out of order.
        let packed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
        let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        let packed = _mm256_permutevar8x32_epi32(packed, order);
        // SAFETY: 32 codes are one register.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
        // Sums of two, of four, then of each half of the register.
        let twos = _mm256_maddubs_epi16(_mm256_set1_epi8(1), packed);
        let fours = _mm256_madd_epi16(twos, _mm256_set1_epi16(1));
        for (sum, fours) in sums.iter_mut().zip([
            _mm256_castsi256_si128(fours),
            _mm256_extracti128_si256::<1>(fours),
        ]) {
            let eights = _mm_add_epi32(fours, _mm_shuffle_epi32::<0b01_00_11_10>(fours));
            let all = _mm_add_epi32(eights, _mm_shuffle_epi32::<0b10_11_00_01>(eights));
            *sum = _mm_cvtsi128_si32(all) as i16;
        }
    }
}
