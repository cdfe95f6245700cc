//! F16: IEEE half precision, little endian.

use super::half_at;

/// ggml's name.
pub const NAME: &str = "F16";
/// Values in a block.
pub const LEN: usize = 1;
/// Bytes of a block.
pub const BYTES: usize = 2;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    out[0] = half_at(block, 0);
}

/// True when the value is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite()
}
