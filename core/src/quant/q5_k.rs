//! Q5_K: 256 values of 5 bits; each 32 have a 6-bit scale `s` and minimum `m`.
//! `value = (d * s) * q - dmin * m`.
//!
//! | bytes   | what |
//! |---------|------|
//! | 0..2    | `d`, half |
//! | 2..4    | `dmin`, half |
//! | 4..16   | scales and minimums, packed as in [`super::q4_k::scale_min`] |
//! | 16..48  | fifth bits: bit `g` of byte `j` belongs to value `32g + j` |
//! | 48..176 | 32 bytes per 64 values: byte `j` holds value `j` (low nibble) and `32 + j` (high nibble) of them |

use super::half_at;
use super::q4_k::scale_min;

/// ggml's name.
pub const NAME: &str = "Q5_K";
/// Values in a block.
pub const LEN: usize = 256;
/// Bytes of a block.
pub const BYTES: usize = 176;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed: &[u8; 12] = block[4..16].try_into().expect("12 bytes");
    let (high, low) = (&block[16..48], &block[48..]);
    for (i, value) in out.iter_mut().enumerate() {
        let (run, k, j) = (i / 64, i % 64 / 32, i % 32);
        let q = low[32 * run + j] >> (4 * k) & 0xf | (high[j] >> (i / 32) & 1) << 4;
        let (s, m) = scale_min(packed, i / 32);
        *value = d * f32::from(s) * f32::from(q) - dmin * f32::from(m);
    }
}

/// True when both super-scales are finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite() && half_at(block, 2).is_finite()
}
