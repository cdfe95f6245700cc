//! Q2_K: 256 values of 2 bits; each 16 have a 4-bit scale `s` and minimum `m`.
//! `value = (d * s) * q - dmin * m`.
//!
//! | bytes  | what |
//! |--------|------|
//! | 0..16  | byte `g`: `s` (low nibble) and `m` (high nibble) of values `16g ..` |
//! | 16..80 | 2-bit values: 32 bytes per 128 values; byte `j` of such a run holds value `32k + j` of it in bits `2k..2k+2` |
//! | 80..82 | `d`, half |
//! | 82..84 | `dmin`, half |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q2_K";
/// Values in a block.
pub const LEN: usize = 256;
/// Bytes of a block.
pub const BYTES: usize = 84;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    let (scales, qs) = (&block[..16], &block[16..80]);
    for (i, value) in out.iter_mut().enumerate() {
        let (run, k, j) = (i / 128, i % 128 / 32, i % 32);
        let q = qs[32 * run + j] >> (2 * k) & 3;
        let scale = d * f32::from(scales[i / 16] & 0xf);
        let min = dmin * f32::from(scales[i / 16] >> 4);
        *value = scale * f32::from(q) - min;
    }
}

/// True when both super-scales are finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 80).is_finite() && half_at(block, 82).is_finite()
}
