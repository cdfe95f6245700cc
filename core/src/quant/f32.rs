//! F32: IEEE single precision, little endian.

/// ggml's name.
pub const NAME: &str = "F32";
/// Values in a block.
pub const LEN: usize = 1;
/// Bytes of a block.
pub const BYTES: usize = 4;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    out[0] = f32::from_le_bytes(*block);
}

/// True when the value is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    f32::from_le_bytes(*block).is_finite()
}
