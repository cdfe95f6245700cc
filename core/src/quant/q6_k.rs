//! Q6_K: 256 values of 6 bits; each 16 have a signed 8-bit scale `s`.
//! `value = (d * s) * (q - 32)`.
//!
//! | bytes    | what |
//! |----------|------|
//! | 0..128   | low four bits: 64 bytes per 128 values; byte `j` of such a run holds value `j` (low nibble) and `64 + j` (high nibble) of it |
//! | 128..192 | upper two bits: 32 bytes per 128 values; byte `j` of such a run holds value `32k + j` of it in bits `2k..2k+2` |
//! | 192..208 | byte `g`: scale of values `16g ..`, signed |
//! | 208..210 | `d`, half |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q6_K";
/// Values in a block.
pub const LEN: usize = 256;
/// Bytes of a block.
pub const BYTES: usize = 210;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_at(block, 208);
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    for (i, value) in out.iter_mut().enumerate() {
        let (run, within) = (i / 128, i % 128);
        let nibble = low[64 * run + within % 64] >> (4 * (within / 64)) & 0xf;
        let upper = high[32 * run + within % 32] >> (2 * (within / 32)) & 3;
        let scale = d * f32::from(scales[i / 16] as i8);
        *value = scale * (f32::from(nibble | upper << 4) - 32.0);
    }
}

/// True when the super-scale is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 208).is_finite()
}
