//! Q8_0: 32 values of 8 bits with one scale. `value = d * q`.
//!
//! | bytes | what |
//! |-------|------|
//! | 0..2  | `d`, half |
//! | 2..34 | byte `j` is value `j`, signed |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q8_0";
/// Values in a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 34;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    for (value, &q) in out.iter_mut().zip(&block[2..]) {
        *value = d * f32::from(q as i8);
    }
}

/// True when the scale is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite()
}
