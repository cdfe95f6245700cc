//! Block formats of GGUF tensors: one format a file, each with its size and the readable decode
//! that every faster kernel is checked against.
//!
//! A row of a matrix is a whole number of blocks; a block holds [`QuantType::block_len`] values in
//! [`QuantType::block_bytes`] bytes. Numbers are little endian and blocks have no alignment.
//! Layouts are ggml's (`ggml-common.h`), results equal `gguf.quants.dequantize` exactly.
//!
//! To add a format: one file with `LEN`, `BYTES`, `decode_block` and `finite`, one line in the
//! table below, one in [`QuantType::ALL`], and golden vectors (`core/tests/golden/make_quant.py`).

pub mod bf16;
pub mod f16;
pub mod f32;
pub mod iq4_nl;
pub mod mxfp4;
pub mod q2_k;
pub mod q3_k;
pub mod q4_0;
pub mod q4_1;
pub mod q4_k;
pub mod q5_0;
pub mod q5_1;
pub mod q5_k;
pub mod q6_k;
pub mod q8_0;

use core::fmt;

/// How a tensor's values are stored. The number is ggml's type id, as it stands in a GGUF file.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u32)]
// The variants keep ggml's names, so that a reader can search for either.
#[allow(non_camel_case_types)]
pub enum QuantType {
    /// IEEE single.
    F32 = 0,
    /// IEEE half.
    F16 = 1,
    /// 4 bits, one scale per 32.
    Q4_0 = 2,
    /// 4 bits, scale and minimum per 32.
    Q4_1 = 3,
    /// 5 bits, one scale per 32.
    Q5_0 = 6,
    /// 5 bits, scale and minimum per 32.
    Q5_1 = 7,
    /// 8 bits, one scale per 32.
    Q8_0 = 8,
    /// 2 bits, 4-bit scales and minimums per 16, super-block of 256.
    Q2_K = 10,
    /// 3 bits, 6-bit scales per 16, super-block of 256.
    Q3_K = 11,
    /// 4 bits, 6-bit scales and minimums per 32, super-block of 256.
    Q4_K = 12,
    /// 5 bits, 6-bit scales and minimums per 32, super-block of 256.
    Q5_K = 13,
    /// 6 bits, 8-bit scales per 16, super-block of 256.
    Q6_K = 14,
    /// 4 bits through a table of 16 values, one scale per 32.
    IQ4_NL = 20,
    /// Upper half of an IEEE single.
    BF16 = 30,
    /// 4-bit floats (E2M1) with a power-of-two scale (E8M0) per 32.
    MXFP4 = 39,
}

/// Evaluates to the value of `$f`, where `$m` is the module of the type's format. The one table of
/// formats.
macro_rules! per_format {
    ($ty:expr, $m:ident => $f:expr) => {
        per_format!(@ $ty, $m, $f;
            F32 f32, F16 f16, BF16 bf16,
            Q4_0 q4_0, Q4_1 q4_1, Q5_0 q5_0, Q5_1 q5_1, Q8_0 q8_0,
            Q2_K q2_k, Q3_K q3_k, Q4_K q4_k, Q5_K q5_k, Q6_K q6_k,
            IQ4_NL iq4_nl, MXFP4 mxfp4)
    };
    (@ $ty:expr, $m:ident, $f:expr; $($variant:ident $module:ident),*) => {
        match $ty {
            $(QuantType::$variant => {
                use $module as $m;
                $f
            })*
        }
    };
}

impl QuantType {
    /// Every supported type, by ascending ggml id.
    pub const ALL: [Self; 15] = [
        Self::F32,
        Self::F16,
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2_K,
        Self::Q3_K,
        Self::Q4_K,
        Self::Q5_K,
        Self::Q6_K,
        Self::IQ4_NL,
        Self::BF16,
        Self::MXFP4,
    ];

    /// The type with this ggml id; `None` when it isn't supported.
    pub const fn from_ggml(id: u32) -> Option<Self> {
        let mut i = 0;
        while i < Self::ALL.len() {
            if Self::ALL[i] as u32 == id {
                return Some(Self::ALL[i]);
            }
            i += 1;
        }
        None
    }

    /// ggml's name, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        per_format!(self, m => m::NAME)
    }

    /// Values in a block.
    pub const fn block_len(self) -> usize {
        per_format!(self, m => m::LEN)
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        per_format!(self, m => m::BYTES)
    }

    /// Bytes of a row of `cols` values; `None` when blocks don't divide the row or the size
    /// overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if cols.is_multiple_of(self.block_len()) {
            (cols / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }
}

impl fmt::Display for QuantType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Decodes whole blocks: `bytes` (blocks x `block_bytes`) to `out` (blocks x `block_len`).
///
/// # Panics
/// When `bytes` isn't whole blocks or `out` isn't exactly as long as what they hold.
pub fn decode(ty: QuantType, bytes: &[u8], out: &mut [f32]) {
    per_format!(ty, m => each_block(bytes, out, m::decode_block));
}

/// A block whose scale is infinite or not a number: damage, or a quantizer's bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BadBlock {
    /// Which block, counted from 0 within the bytes that were checked.
    pub index: usize,
}

/// Looks for blocks whose scales aren't finite: every value decoded from them would poison a sum.
///
/// # Errors
/// The first such block. F32, F16 and BF16 have blocks of one value, so it is the value's index.
///
/// # Panics
/// When `bytes` isn't whole blocks.
pub fn check(ty: QuantType, bytes: &[u8]) -> Result<(), BadBlock> {
    per_format!(ty, m => first_bad(bytes, m::finite))
}

fn each_block<const BYTES: usize, const LEN: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode_block: fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let (blocks, rest) = bytes.as_chunks::<BYTES>();
    let (values, spare) = out.as_chunks_mut::<LEN>();
    assert!(
        rest.is_empty(),
        "{} bytes aren't whole blocks of {BYTES}",
        bytes.len()
    );
    assert!(
        spare.is_empty() && values.len() == blocks.len(),
        "{} blocks decode to {LEN} values each",
        blocks.len()
    );
    for (block, values) in blocks.iter().zip(values) {
        decode_block(block, values);
    }
}

fn first_bad<const BYTES: usize>(
    bytes: &[u8],
    finite: fn(&[u8; BYTES]) -> bool,
) -> Result<(), BadBlock> {
    let (blocks, rest) = bytes.as_chunks::<BYTES>();
    assert!(
        rest.is_empty(),
        "{} bytes aren't whole blocks of {BYTES}",
        bytes.len()
    );
    match blocks.iter().position(|block| !finite(block)) {
        Some(index) => Err(BadBlock { index }),
        None => Ok(()),
    }
}

/// The half at `at` (bytes) as a single.
fn half_at(block: &[u8], at: usize) -> f32 {
    half::f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_ggmls() {
        // (id, name, values, bytes) as in ggml's type traits.
        let table = [
            (0, "F32", 1, 4),
            (1, "F16", 1, 2),
            (2, "Q4_0", 32, 18),
            (3, "Q4_1", 32, 20),
            (6, "Q5_0", 32, 22),
            (7, "Q5_1", 32, 24),
            (8, "Q8_0", 32, 34),
            (10, "Q2_K", 256, 84),
            (11, "Q3_K", 256, 110),
            (12, "Q4_K", 256, 144),
            (13, "Q5_K", 256, 176),
            (14, "Q6_K", 256, 210),
            (20, "IQ4_NL", 32, 18),
            (30, "BF16", 1, 2),
            (39, "MXFP4", 32, 17),
        ];
        assert_eq!(table.len(), QuantType::ALL.len());
        for ((id, name, len, bytes), ty) in table.into_iter().zip(QuantType::ALL) {
            assert_eq!(QuantType::from_ggml(id), Some(ty));
            assert_eq!((ty as u32, ty.name()), (id, name));
            assert_eq!((ty.block_len(), ty.block_bytes()), (len, bytes), "{name}");
        }
        for unknown in [4, 5, 9, 15, 16, 38, 40, u32::MAX] {
            assert_eq!(QuantType::from_ggml(unknown), None);
        }
    }

    #[test]
    fn rows_are_whole_blocks() {
        assert_eq!(QuantType::Q4_K.row_bytes(512), Some(288));
        assert_eq!(QuantType::Q4_K.row_bytes(511), None);
        assert_eq!(QuantType::F32.row_bytes(3), Some(12));
        assert_eq!(QuantType::F32.row_bytes(usize::MAX), None);
        assert_eq!(QuantType::Q8_0.row_bytes(usize::MAX - 31), None);
    }

    #[test]
    fn check_names_the_block() {
        // Where each format keeps numbers that must be finite, and one bad pattern for them.
        const INF: [u8; 2] = [0x00, 0x7c];
        const NAN: [u8; 2] = [0x01, 0xfe];
        let places: [(QuantType, &[usize], &[u8]); 17] = [
            (QuantType::F32, &[0], &[0, 0, 0x80, 0x7f]),
            (QuantType::F32, &[0], &[1, 0, 0x80, 0xff]),
            (QuantType::F16, &[0], &INF),
            (QuantType::F16, &[0], &NAN),
            (QuantType::BF16, &[0], &[0x80, 0xff]),
            (QuantType::Q4_0, &[0], &INF),
            (QuantType::Q4_1, &[0, 2], &NAN),
            (QuantType::Q5_0, &[0], &INF),
            (QuantType::Q5_1, &[0, 2], &INF),
            (QuantType::Q8_0, &[0], &NAN),
            (QuantType::Q2_K, &[80, 82], &INF),
            (QuantType::Q3_K, &[108], &INF),
            (QuantType::Q4_K, &[0, 2], &NAN),
            (QuantType::Q5_K, &[0, 2], &INF),
            (QuantType::Q6_K, &[208], &INF),
            (QuantType::IQ4_NL, &[0], &INF),
            (QuantType::MXFP4, &[0], &[0xff]),
        ];
        for (ty, offsets, bad) in places {
            for &at in offsets {
                let mut bytes = [0x11u8; 3 * 210];
                let bytes = &mut bytes[..3 * ty.block_bytes()];
                assert_eq!(check(ty, bytes), Ok(()), "{ty}");
                let start = 2 * ty.block_bytes() + at;
                bytes[start..start + bad.len()].copy_from_slice(bad);
                assert_eq!(check(ty, bytes), Err(BadBlock { index: 2 }), "{ty} at {at}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "whole blocks")]
    fn partial_blocks_are_refused() {
        decode(QuantType::Q8_0, &[0; 35], &mut [0.0; 32]);
    }

    #[test]
    #[should_panic(expected = "values each")]
    fn a_short_output_is_refused() {
        decode(QuantType::Q8_0, &[0; 68], &mut [0.0; 32]);
    }
}
