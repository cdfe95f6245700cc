//! BF16: the upper 16 bits of an IEEE single, little endian.

/// ggml's name.
pub const NAME: &str = "BF16";
/// Values in a block.
pub const LEN: usize = 1;
/// Bytes of a block.
pub const BYTES: usize = 2;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    out[0] = value(block);
}

/// True when the value is finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    value(block).is_finite()
}

fn value(block: &[u8; BYTES]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16)
}
