//! AVX-512 with VNNI: Ice Lake, Zen 4 and later.
//!
//! Every quantized format is seen as unsigned codes `q` with, per group of 16 or 32 weights, a scale
//! `d` and either a zero point `z` or a minimum `m`: `w = d * (q - z)` or `w = d * q + m`
//! ([`format::Format`]). `vpdpbusd` multiplies the codes with the activations' int8 codes; zero point
//! and minimum only need the sums of the activation codes, which are ready.
//!
//! - [`format`], [`kquant`]: the formats.
//! - [`matvec`]: one token; lanes run over columns.
//! - [`matmul`]: many tokens; lanes run over rows, from a panel of decoded codes.
//! - [`float`]: both, with f32 activations.
//! - [`panel`], [`transpose`]: how a product is cut, and how rows become lanes.
//! - [`quantize`]: activations to int8.
//!
//! Functions here are `unsafe` where they need the instruction set or take pointers. The safe entry
//! points below may call them because [`super::Kernels::get`] hands them out only where
//! [`super::Isa::available`] said that this machine has the instruction set.

mod float;
mod format;
mod kquant;
mod matmul;
mod matvec;
mod panel;
mod quantize;
mod transpose;

use leanstream_core::quant::QuantType;

use super::{Act, OutTile, RowList, Rows, Scratch, Table};
use float::{Bf16, F16, F32, Quant};
use format::{Format, Iq4Nl, Mxfp4, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
use kquant::{Q2K, Q3K, Q4K, Q5K, Q6K};

pub(super) const TABLE: Table = Table {
    quantize,
    matvec,
    matmul,
};

fn quantize(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    // SAFETY: this machine has the instruction set (see above) and the lengths were checked.
    unsafe { quantize::quantize(x, codes, scales, sums) }
}

fn matvec(weights: &RowList<'_>, act: &Act<'_>, exact: bool, out: &mut [f32]) {
    let entry = entry(weights.ty);
    let kernel = if exact {
        entry.matvec_f32
    } else {
        entry.matvec
    };
    // SAFETY: this machine has the instruction set (see above) and the lengths were checked.
    unsafe { kernel(weights, act, out) }
}

fn matmul(weights: &Rows<'_>, act: &Act<'_>, exact: bool, out: OutTile<'_>, scratch: &mut Scratch) {
    let entry = entry(weights.ty);
    let kernel = if exact {
        entry.matmul_f32
    } else {
        entry.matmul
    };
    // SAFETY: this machine has the instruction set (see above) and the lengths were checked.
    unsafe { kernel(weights, act, out, scratch) }
}

/// The instances for one weight type; those of a float type are the same with and without `_f32`.
struct Entry {
    matvec: Matvec,
    matmul: Matmul,
    matvec_f32: Matvec,
    matmul_f32: Matmul,
}

type Matvec = unsafe fn(&RowList<'_>, &Act<'_>, &mut [f32]);
type Matmul = unsafe fn(&Rows<'_>, &Act<'_>, OutTile<'_>, &mut Scratch);

const fn quant<F: Format>() -> Entry {
    Entry {
        matvec: matvec::matvec::<F>,
        matmul: matmul::matmul::<F>,
        matvec_f32: float::matvec::<Quant<F>>,
        matmul_f32: float::matmul::<Quant<F>>,
    }
}

const fn float<W: float::Weights>() -> Entry {
    Entry {
        matvec: float::matvec::<W>,
        matmul: float::matmul::<W>,
        matvec_f32: float::matvec::<W>,
        matmul_f32: float::matmul::<W>,
    }
}

const fn entry(ty: QuantType) -> Entry {
    match ty {
        QuantType::F32 => float::<F32>(),
        QuantType::F16 => float::<F16>(),
        QuantType::BF16 => float::<Bf16>(),
        QuantType::Q4_0 => quant::<Q4_0>(),
        QuantType::Q4_1 => quant::<Q4_1>(),
        QuantType::Q5_0 => quant::<Q5_0>(),
        QuantType::Q5_1 => quant::<Q5_1>(),
        QuantType::Q8_0 => quant::<Q8_0>(),
        QuantType::Q2_K => quant::<Q2K>(),
        QuantType::Q3_K => quant::<Q3K>(),
        QuantType::Q4_K => quant::<Q4K>(),
        QuantType::Q5_K => quant::<Q5K>(),
        QuantType::Q6_K => quant::<Q6K>(),
        QuantType::IQ4_NL => quant::<Iq4Nl>(),
        QuantType::MXFP4 => quant::<Mxfp4>(),
    }
}
