//! Q4_K: 256 values of 4 bits; each 32 have a 6-bit scale `s` and minimum `m`.
//! `value = (d * s) * q - dmin * m`.
//!
//! | bytes   | what |
//! |---------|------|
//! | 0..2    | `d`, half |
//! | 2..4    | `dmin`, half |
//! | 4..16   | 8 scales and 8 minimums of 6 bits, see [`scale_min`] |
//! | 16..144 | 32 bytes per 64 values: byte `j` holds value `j` (low nibble) and `32 + j` (high nibble) of them |

use super::half_at;

/// ggml's name.
pub const NAME: &str = "Q4_K";
/// Values in a block.
pub const LEN: usize = 256;
/// Bytes of a block.
pub const BYTES: usize = 144;

/// Decodes one block.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed: &[u8; 12] = block[4..16].try_into().expect("12 bytes");
    let qs = &block[16..];
    for (i, value) in out.iter_mut().enumerate() {
        let (run, k, j) = (i / 64, i % 64 / 32, i % 32);
        let q = qs[32 * run + j] >> (4 * k) & 0xf;
        let (s, m) = scale_min(packed, i / 32);
        *value = d * f32::from(s) * f32::from(q) - dmin * f32::from(m);
    }
}

/// Scale and minimum of group `g` (of 8), 0..=63 each. Q5_K packs them the same way.
///
/// Groups 0..4: bytes `g` and `4 + g`, low six bits. Groups 4..8: low four bits are the nibbles of
/// byte `4 + g` (scale low, minimum high), upper two are the top bits of bytes `g - 4` and `g`.
pub fn scale_min(packed: &[u8; 12], g: usize) -> (u8, u8) {
    if g < 4 {
        (packed[g] & 63, packed[4 + g] & 63)
    } else {
        let scale = packed[4 + g] & 0xf | packed[g - 4] >> 6 << 4;
        let min = packed[4 + g] >> 4 | packed[g] >> 6 << 4;
        (scale, min)
    }
}

/// True when both super-scales are finite.
pub fn finite(block: &[u8; BYTES]) -> bool {
    half_at(block, 0).is_finite() && half_at(block, 2).is_finite()
}
