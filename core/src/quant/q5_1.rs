//! Q5_1: 32 values of 5 bits with a scale and a minimum. `value = d * q + m`.
//!
//! | bytes | what |
//! |-------|------|
//! | 0..2  | `d`, half |
//! | 2..4  | `m`, half |
//! | 4..8  | fifth bits, a 32-bit word: bit `j` belongs to value `j` |
//! | 8..24 | byte `j`: low nibble is value `j`, high nibble is value `j + 16` |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q5_1";
/// Values in a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 24;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    let high = u32::from_le_bytes([block[4], block[5], block[6], block[7]]);
    let fifth = |j: usize| ((high >> j & 1) << 4) as u8;
    for (j, &q) in block[8..].iter().enumerate() {
        out[j] = d * f32::from(q & 0xf | fifth(j)) + m;
        out[j + 16] = d * f32::from(q >> 4 | fifth(j + 16)) + m;
    }
}

/// True when scale and minimum are finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite() && half_at(block, 2).is_finite()
}
