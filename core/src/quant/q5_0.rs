//! Q5_0: 32 values of 5 bits with one scale. `value = d * (q - 16)`.
//!
//! | bytes | what |
//! |-------|------|
//! | 0..2  | `d`, half |
//! | 2..6  | fifth bits, a 32-bit word: bit `j` belongs to value `j` |
//! | 6..22 | byte `j`: low nibble is value `j`, high nibble is value `j + 16` |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q5_0";
/// Values in a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 22;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    let high = u32::from_le_bytes([block[2], block[3], block[4], block[5]]);
    let fifth = |j: usize| ((high >> j & 1) << 4) as u8;
    for (j, &q) in block[6..].iter().enumerate() {
        out[j] = d * (f32::from(q & 0xf | fifth(j)) - 16.0);
        out[j + 16] = d * (f32::from(q >> 4 | fifth(j + 16)) - 16.0);
    }
}

/// True when the scale is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite()
}
