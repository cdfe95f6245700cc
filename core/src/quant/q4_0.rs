//! Q4_0: 32 values of 4 bits with one scale. `value = d * (q - 8)`.
//!
//! | bytes | what |
//! |-------|------|
//! | 0..2  | `d`, half |
//! | 2..18 | byte `j`: low nibble is value `j`, high nibble is value `j + 16` |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q4_0";
/// Values in a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 18;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    for (j, &q) in block[2..].iter().enumerate() {
        out[j] = d * (f32::from(q & 0xf) - 8.0);
        out[j + 16] = d * (f32::from(q >> 4) - 8.0);
    }
}

/// True when the scale is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite()
}
