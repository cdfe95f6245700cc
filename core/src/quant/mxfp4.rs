//! MXFP4: 32 floats of 4 bits (E2M1) with a shared power of two (E8M0), OCP Microscaling v1.0.
//! `value = half_scale(e) * VALUES[q]`.
//!
//! | bytes | what |
//! |-------|------|
//! | 0     | `e`, the exponent with a bias of 127; 255 means not a number |
//! | 1..17 | byte `j`: low nibble is value `j`, high nibble is value `j + 16` |

/// ggml's name.
pub const NAME: &str = "MXFP4";
/// Values in a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 17;

/// Twice what each nibble stands for, which makes whole numbers of 0.5 and 1.5.
pub const VALUES: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Decodes one block. A scale of 255 decodes as the next power of two, as ggml does; [`finite`]
/// is what refuses it.
pub fn decode_block(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = half_scale(block[0]);
    for (j, &q) in block[1..].iter().enumerate() {
        out[j] = d * f32::from(VALUES[usize::from(q & 0xf)]);
        out[j + 16] = d * f32::from(VALUES[usize::from(q >> 4)]);
    }
}

/// Half of the scale `2^(e - 127)`, exactly; it makes up for [`VALUES`] being doubled.
pub fn half_scale(e: u8) -> f32 {
    match e {
        // 2^-128 and 2^-127 are subnormal: a lone bit in the mantissa.
        0 | 1 => f32::from_bits(0x0020_0000 << e),
        _ => f32::from_bits(u32::from(e - 1) << 23),
    }
}

/// True when the scale is a number.
pub fn finite(block: &[u8; BYTES]) -> bool {
    block[0] != 255
}
