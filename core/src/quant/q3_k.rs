//! Q3_K: 256 values of 3 bits; each 16 have a 6-bit scale `s`.
//! `value = (d * (s - 32)) * (q - 4)`.
//!
//! | bytes   | what |
//! |---------|------|
//! | 0..32   | third bits: bit `g` of byte `j` belongs to value `32g + j` |
//! | 32..96  | low two bits: 32 bytes per 128 values; byte `j` of such a run holds value `32k + j` of it in bits `2k..2k+2` |
//! | 96..108 | 16 scales of 6 bits, see [`scale`] |
//! | 108..110 | `d`, half |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q3_K";
/// Values in a block.
pub const LEN: usize = 256;
/// Bytes of a block.
pub const BYTES: usize = 110;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_at(block, 108);
    let (high, low) = (&block[..32], &block[32..96]);
    let packed: &[u8; 12] = block[96..108].try_into().expect("12 bytes");
    for (i, value) in out.iter_mut().enumerate() {
        let (run, k, j) = (i / 128, i % 128 / 32, i % 32);
        let q = low[32 * run + j] >> (2 * k) & 3 | (high[j] >> (i / 32) & 1) << 2;
        let scale = d * f32::from(scale(packed, i / 16));
        *value = scale * (f32::from(q) - 4.0);
    }
}

/// Scale `g` (of 16) with its offset taken off: -32..=31.
///
/// The low four bits of scale `g` are a nibble of byte `g % 8` (high nibble for `g >= 8`); the
/// upper two are in byte `8 + g % 4`, at bit `2 * (g / 4)`.
pub fn scale(packed: &[u8; 12], g: usize) -> i8 {
    let low = packed[g % 8] >> (4 * (g / 8)) & 0xf;
    let high = packed[8 + g % 4] >> (2 * (g / 4)) & 3;
    (low | high << 4) as i8 - 32
}

/// True when the super-scale is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 108).is_finite()
}
