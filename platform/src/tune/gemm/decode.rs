//! Weights to floats, a piece of a row at a time. Equal to core's scalar decode bit for bit.
//!
//! The common formats are plain loops over fixed arrays, which the compiler turns into vector code of
//! the instruction set it inlines them into; the rest go through core.

use leanstream_core::quant::{self, QuantType, q4_k};

use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::lanes::portable::f16_to_f32;

/// Values `first .. first + out.len()` of a row. Both ends are ends of blocks.
#[inline(always)]
pub(super) fn decode<L: Lanes>(l: L, ty: QuantType, row: &[u8], first: usize, out: &mut [f32]) {
    let (len, bytes) = (ty.block_len(), ty.block_bytes());
    let row = &row[first / len * bytes..][..out.len() / len * bytes];
    match ty {
        QuantType::F32 => each(row, out, f32_value),
        QuantType::F16 => halves(l, row, out),
        QuantType::BF16 => each(row, out, bf16_value),
        QuantType::Q4_0 => each(row, out, q4_0),
        QuantType::Q4_1 => each(row, out, q4_1),
        QuantType::Q5_0 => each(row, out, q5_0),
        QuantType::Q5_1 => each(row, out, q5_1),
        QuantType::Q8_0 => each(row, out, q8_0),
        QuantType::Q4_K => each(row, out, q4_k),
        QuantType::Q5_K => each(row, out, q5_k),
        QuantType::Q6_K => each(row, out, q6_k),
        _ => quant::decode(ty, row, out),
    }
}

#[inline(always)]
fn each<const BYTES: usize, const LEN: usize>(
    row: &[u8],
    out: &mut [f32],
    block: impl Fn(&[u8; BYTES], &mut [f32; LEN]),
) {
    let values = out.as_chunks_mut::<LEN>().0;
    for (bytes, values) in row.as_chunks::<BYTES>().0.iter().zip(values) {
        block(bytes, values);
    }
}

#[inline(always)]
fn half_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

#[inline(always)]
fn f32_value(bytes: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*bytes);
}

#[inline(always)]
fn bf16_value(bytes: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*bytes)) << 16);
}

#[inline(always)]
fn halves<L: Lanes>(l: L, row: &[u8], out: &mut [f32]) {
    let whole = out.len() - out.len() % L::N;
    for i in (0..whole).step_by(L::N) {
        // SAFETY: `N` halves from `i` on are in the row, and their bytes in the machine's order, which
        // is the file's on every processor this runs on.
        let v = unsafe { l.load_f16(row[2 * i..][..2 * L::N].as_ptr().cast()) };
        l.put(&mut out[i..], v);
    }
    for (i, out) in out.iter_mut().enumerate().skip(whole) {
        *out = half_at(row, 2 * i);
    }
}

#[inline(always)]
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for j in 0..16 {
        let q = block[2 + j];
        out[j] = d * (f32::from(q & 0xf) - 8.0);
        out[j + 16] = d * (f32::from(q >> 4) - 8.0);
    }
}

#[inline(always)]
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for j in 0..16 {
        let q = block[4 + j];
        out[j] = d * f32::from(q & 0xf) + m;
        out[j + 16] = d * f32::from(q >> 4) + m;
    }
}

#[inline(always)]
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for (out, q) in out.iter_mut().zip(five_bits(block, 2)) {
        *out = d * (f32::from(q) - 16.0);
    }
}

#[inline(always)]
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (out, q) in out.iter_mut().zip(five_bits(block, 4)) {
        *out = d * f32::from(q) + m;
    }
}

/// Codes of a block whose fifth bits are the word at `at`, before the nibbles.
#[inline(always)]
fn five_bits(block: &[u8], at: usize) -> [u8; 32] {
    let high = u32::from_le_bytes(block[at..][..4].try_into().expect("a word"));
    let nibbles: &[u8; 16] = block[at + 4..][..16].try_into().expect("16 bytes");
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = nibbles[j] & 0xf;
        q[j + 16] = nibbles[j] >> 4;
    }
    for (j, q) in q.iter_mut().enumerate() {
        *q |= ((high >> j & 1) << 4) as u8;
    }
    q
}

#[inline(always)]
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let d = half_at(block, 0);
    for j in 0..32 {
        out[j] = d * f32::from(block[2 + j] as i8);
    }
}

#[inline(always)]
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    runs(block, &block[16..], out, |_, q| q);
}

#[inline(always)]
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let high: &[u8; 32] = block[16..48].try_into().expect("32 bytes");
    runs(block, &block[48..], out, |(g, j), q| {
        q | (high[j] >> g & 1) << 4
    });
}

/// Q4_K and Q5_K: eight groups of 32 with scale and minimum. `code` makes a code of a group's index, a
/// value's in the group, and its nibble.
#[inline(always)]
fn runs(
    block: &[u8],
    nibbles: &[u8],
    out: &mut [f32; 256],
    code: impl Fn((usize, usize), u8) -> u8,
) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let packed: &[u8; 12] = block[4..16].try_into().expect("12 bytes");
    for (g, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let nibbles: &[u8; 32] = nibbles[16 * (g - g % 2)..][..32]
            .try_into()
            .expect("32 bytes");
        let (s, m) = q4_k::scale_min(packed, g);
        let (s, m) = (d * f32::from(s), dmin * f32::from(m));
        for (j, out) in out.iter_mut().enumerate() {
            let nibble = nibbles[j] >> (4 * (g % 2)) & 0xf;
            *out = s * f32::from(code((g, j), nibble)) - m;
        }
    }
}

#[inline(always)]
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = half_at(block, 208);
    // Groups of 16 with one scale each; eight of them make a run.
    for (g, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let (run, k, half) = (g / 8, g % 8 / 2, g % 2);
        let low = &block[64 * run + 32 * (k % 2) + 16 * half..][..16];
        let high = &block[128 + 32 * run + 16 * half..][..16];
        let scale = d * f32::from(block[192 + g] as i8);
        for j in 0..16 {
            let nibble = low[j] >> (4 * (k / 2)) & 0xf;
            let upper = high[j] >> (2 * k) & 3;
            out[j] = scale * (f32::from(nibble | upper << 4) - 32.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::Vector;

    crate::cpu::vector::multiversion! {
        fn decoded(ty: QuantType, row: &[u8], first: usize, out: &mut [f32]) = decode;
    }

    #[test]
    fn every_format_equals_the_reference() {
        let mut random = 1u32;
        for ty in QuantType::ALL {
            let (len, blocks) = (ty.block_len(), if ty.block_len() == 1 { 77 } else { 5 });
            let row: Vec<u8> = (0..blocks * ty.block_bytes())
                .map(|_| {
                    random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (random >> 24) as u8
                })
                .collect();
            let mut want = vec![0.0; blocks * len];
            quant::decode(ty, &row, &mut want);
            for v in Vector::available() {
                for first in [0, 1, blocks - 1] {
                    let mut got = vec![0.0; (blocks - first) * len];
                    v.decoded(ty, &row, first * len, &mut got);
                    for (got, want) in got.iter().zip(&want[first * len..]) {
                        let same = got.to_bits() == want.to_bits();
                        assert!(same || got.is_nan() && want.is_nan(), "{v:?} {ty}");
                    }
                }
            }
        }
    }
}
