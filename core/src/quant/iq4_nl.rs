//! IQ4_NL: 32 values of 4 bits through a table, with one scale. `value = d * VALUES[q]`.
//!
//! | bytes | what |
//! |-------|------|
//! | 0..2  | `d`, half |
//! | 2..18 | byte `j`: low nibble is value `j`, high nibble is value `j + 16` |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "IQ4_NL";
/// Values in a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 18;

/// What each nibble stands for.
pub const VALUES: [i8; 16] = [
    -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113,
];

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_at(block, 0);
    for (j, &q) in block[2..].iter().enumerate() {
        out[j] = d * f32::from(VALUES[usize::from(q & 0xf)]);
        out[j + 16] = d * f32::from(VALUES[usize::from(q >> 4)]);
    }
}

/// True when the scale is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite()
}
