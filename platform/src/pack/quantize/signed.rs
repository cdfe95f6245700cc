//! Groups of 16 values as `scale * code` with codes around zero, whose scales are integers with a sign:
//! Q3_K and Q6_K.
//!
//! As for single blocks, of some scales around the largest value the one of least squared error is taken;
//! then, with the block's own scale fixed, the best of the neighbouring integers.

use leanstream_core::quant::{q3_k, q6_k};

use super::{half, round};

/// Values that share a scale.
const GROUP: usize = 16;

/// Where the largest value is put, as shares of the farthest code.
const REACH: [f32; 8] = [1.06, 1.03, 1.0, 0.97, 0.93, 0.88, 0.82, 0.75];

/// Encodes a block of finite values as Q3_K.
pub fn q3_k(values: &[f32; q3_k::LEN], block: &mut [u8; q3_k::BYTES]) {
    let (d, scales, codes) = encode::<4>(values, (-32, 31));
    block.fill(0);
    for (g, scale) in scales.into_iter().enumerate() {
        let scale = (scale + 32) as u8;
        block[96 + g % 8] |= (scale & 0xf) << (4 * (g / 8));
        block[104 + g % 4] |= (scale >> 4) << (2 * (g / 4));
    }
    for (i, code) in codes.into_iter().enumerate() {
        let (run, k, j) = (i / 128, i % 128 / 32, i % 32);
        block[j] |= (code >> 2) << (i / 32);
        block[32 + 32 * run + j] |= (code & 3) << (2 * k);
    }
    block[108..].copy_from_slice(&d);
}

/// Encodes a block of finite values as Q6_K.
pub fn q6_k(values: &[f32; q6_k::LEN], block: &mut [u8; q6_k::BYTES]) {
    let (d, scales, codes) = encode::<32>(values, (-128, 127));
    block.fill(0);
    for (i, code) in codes.into_iter().enumerate() {
        let (run, within) = (i / 128, i % 128);
        block[64 * run + within % 64] |= (code & 0xf) << (4 * (within / 64));
        block[128 + 32 * run + within % 32] |= (code >> 4) << (2 * (within / 32));
    }
    for (byte, scale) in block[192..208].iter_mut().zip(scales) {
        *byte = scale as i8 as u8;
    }
    block[208..].copy_from_slice(&d);
}

/// The block's scale, the groups' within `low..=high`, and codes `0..2 * HALF` (zero is `HALF`).
fn encode<const HALF: i32>(
    values: &[f32; 256],
    (low, high): (i32, i32),
) -> ([u8; 2], [i32; 16], [u8; 256]) {
    let groups = values.as_chunks::<GROUP>().0;
    let mut wanted = [0.0f32; 16];
    for (scale, group) in wanted.iter_mut().zip(groups) {
        *scale = search::<HALF>(group);
    }
    let largest = wanted.iter().fold(
        0.0f32,
        |most, &x| if x.abs() > most.abs() { x } else { most },
    );
    // There is one more step below zero than above.
    let d = half(largest / low as f32);
    let step = d.to_f32();
    let (mut scales, mut codes) = ([0; 16], [0; 256]);
    for (g, group) in groups.iter().enumerate() {
        let near = if step == 0.0 {
            0
        } else {
            (wanted[g] / step).round() as i32
        };
        let mut best = (f32::INFINITY, 0);
        for scale in near.saturating_sub(1).max(low)..=near.saturating_add(1).min(high) {
            let error = error::<HALF>(group, step * scale as f32);
            if error < best.0 {
                best = (error, scale);
            }
        }
        scales[g] = best.1;
        let inverse = inverse(step * best.1 as f32);
        for (to, x) in codes[GROUP * g..].iter_mut().zip(group) {
            *to = (code::<HALF>(*x, inverse) as i32 + HALF) as u8;
        }
    }
    (d.to_le_bytes(), scales, codes)
}

/// The scale of least squared error among those tried, of either sign.
fn search<const HALF: i32>(group: &[f32; GROUP]) -> f32 {
    let largest = group.iter().fold(
        0.0f32,
        |most, &x| if x.abs() > most.abs() { x } else { most },
    );
    let mut best = (error::<HALF>(group, 0.0), 0.0);
    let mut consider = |scale: f32| {
        let error = error::<HALF>(group, scale);
        if error < best.0 {
            best = (error, scale);
        }
        best.1
    };
    for reach in REACH {
        let scale = largest / (reach * HALF as f32);
        consider(scale);
        consider(-scale);
    }
    // Given the codes, the best scale is a projection.
    for _ in 0..2 {
        let inverse = inverse(consider(f32::NAN));
        let (mut xq, mut qq) = (0.0f32, 0.0f32);
        for x in group {
            let q = code::<HALF>(*x, inverse);
            xq += x * q;
            qq += q * q;
        }
        if qq > 0.0 {
            consider(xq / qq);
        }
    }
    best.1
}

fn error<const HALF: i32>(group: &[f32; GROUP], scale: f32) -> f32 {
    let inverse = inverse(scale);
    let mut lanes = [0.0f32; 8];
    for part in group.as_chunks::<8>().0 {
        for (lane, x) in lanes.iter_mut().zip(part) {
            let off = x - scale * code::<HALF>(*x, inverse);
            *lane += off * off;
        }
    }
    lanes.iter().sum()
}

/// The code of `x`, counted from zero.
fn code<const HALF: i32>(x: f32, inverse: f32) -> f32 {
    round((x * inverse).clamp(-HALF as f32, (HALF - 1) as f32))
}

/// One over the scale; 0 where that isn't finite, so that every code is that of zero.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
