//! Floats to the block formats: for sketches, for down columns that can't be moved, and for matrices into
//! which an adapter is merged.
//!
//! Of a block's possible scales the one with the least squared error is taken. Here: blocks of 32 with
//! one scale, which try some around the largest value, of both signs (there is one more code below zero
//! than above), then the best scale for the codes that were found.

mod affine;
mod q2_k;
mod signed;

use half::{bf16, f16};
use leanstream_core::quant::QuantType;

/// Values in a block.
const LEN: usize = 32;

/// What matrices become whose own type nothing is quantized to.
pub const INSTEAD: QuantType = QuantType::Q8_0;

/// Whether [`quantize`] knows a type.
pub fn encodes(ty: QuantType) -> bool {
    !matches!(ty, QuantType::IQ4_NL | QuantType::MXFP4)
}

/// Quantizes a row of whole blocks of finite values. Values that are beyond F16 become infinite there;
/// in the block formats they become the largest there are.
///
/// # Panics
/// When `ty` isn't one that it [`encodes`], or the sizes don't go together.
pub fn quantize(ty: QuantType, row: &[f32], out: &mut [u8]) {
    match ty {
        QuantType::F32 => each(row, out, |[x], to| *to = x.to_le_bytes()),
        QuantType::F16 => each(row, out, |[x], to| *to = f16::from_f32(*x).to_le_bytes()),
        QuantType::BF16 => each(row, out, |[x], to| *to = bf16::from_f32(*x).to_le_bytes()),
        QuantType::Q8_0 => each(row, out, |values, block: &mut [u8; 34]| q8_0(values, block)),
        QuantType::Q5_0 => each(row, out, |values, block: &mut [u8; 22]| q5_0(values, block)),
        QuantType::Q4_0 => each(row, out, |values, block: &mut [u8; 18]| q4_0(values, block)),
        QuantType::Q5_1 => each(row, out, q5_1),
        QuantType::Q4_1 => each(row, out, q4_1),
        QuantType::Q2_K => each(row, out, q2_k::encode),
        QuantType::Q3_K => each(row, out, signed::q3_k),
        QuantType::Q4_K => each(row, out, affine::q4_k),
        QuantType::Q5_K => each(row, out, affine::q5_k),
        QuantType::Q6_K => each(row, out, signed::q6_k),
        QuantType::IQ4_NL | QuantType::MXFP4 => panic!("nothing is quantized to {ty}"),
    }
}

/// Encodes block after block.
fn each<const VALUES: usize, const BYTES: usize>(
    row: &[f32],
    out: &mut [u8],
    encode: fn(&[f32; VALUES], &mut [u8; BYTES]),
) {
    let (values, rest) = row.as_chunks();
    let (blocks, none) = out.as_chunks_mut();
    assert!(
        rest.is_empty() && none.is_empty() && values.len() == blocks.len(),
        "{} values and {} bytes aren't the same whole blocks",
        row.len(),
        out.len()
    );
    for (values, block) in values.iter().zip(blocks) {
        encode(values, block);
    }
}

fn q8_0(values: &[f32; LEN], block: &mut [u8]) {
    let largest = values.iter().fold(0.0f32, |most, x| most.max(x.abs()));
    let scale = half(largest / 127.0);
    let inverse = inverse(scale);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    for (code, x) in block[2..].iter_mut().zip(values) {
        *code = (x * inverse).clamp(-127.0, 127.0).round_ties_even() as i8 as u8;
    }
}

fn q5_0(values: &[f32; LEN], block: &mut [u8]) {
    let (scale, codes) = search::<16>(values);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    let high = (0..LEN).fold(0u32, |high, j| high | u32::from(codes[j] >> 4) << j);
    block[2..6].copy_from_slice(&high.to_le_bytes());
    for j in 0..LEN / 2 {
        block[6 + j] = codes[j] & 0xf | codes[j + 16] << 4;
    }
}

fn q4_0(values: &[f32; LEN], block: &mut [u8]) {
    let (scale, codes) = search::<8>(values);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    for j in 0..LEN / 2 {
        block[2 + j] = codes[j] | codes[j + 16] << 4;
    }
}

fn q5_1(values: &[f32; LEN], block: &mut [u8; 24]) {
    let (scale, base, codes) = affine::block::<31>(values);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    block[2..4].copy_from_slice(&base.to_le_bytes());
    let high = (0..LEN).fold(0u32, |high, j| high | u32::from(codes[j] >> 4) << j);
    block[4..8].copy_from_slice(&high.to_le_bytes());
    for j in 0..LEN / 2 {
        block[8 + j] = codes[j] & 0xf | codes[j + 16] << 4;
    }
}

fn q4_1(values: &[f32; LEN], block: &mut [u8; 20]) {
    let (scale, base, codes) = affine::block::<15>(values);
    block[..2].copy_from_slice(&scale.to_le_bytes());
    block[2..4].copy_from_slice(&base.to_le_bytes());
    for j in 0..LEN / 2 {
        block[4 + j] = codes[j] | codes[j + 16] << 4;
    }
}

/// The scale and the codes `0..2 * HALF` (zero is `HALF`) of least squared error among those tried.
fn search<const HALF: i32>(values: &[f32; LEN]) -> (f16, [u8; LEN]) {
    // Where the largest value is put, as shares of HALF.
    const REACH: [f32; 7] = [1.03, 1.0, 0.96, 0.92, 0.87, 0.82, 0.76];
    let largest = values.iter().fold(
        0.0f32,
        |most, &x| if x.abs() > most.abs() { x } else { most },
    );
    let consider = |best: &mut (f32, f16), scale: f16| {
        let error = error::<HALF>(values, scale);
        if error < best.0 {
            *best = (error, scale);
        }
    };
    let mut best = (f32::INFINITY, half(0.0));
    consider(&mut best, half(0.0));
    for reach in REACH {
        let scale = largest / (reach * HALF as f32);
        consider(&mut best, half(scale));
        consider(&mut best, half(-scale));
    }
    // Given the codes, the best scale is a projection.
    let (mut xq, mut qq) = (0.0f32, 0.0f32);
    let inverse = inverse(best.1);
    for x in values {
        let q = code::<HALF>(*x, inverse);
        xq += x * q;
        qq += q * q;
    }
    if qq > 0.0 {
        consider(&mut best, half(xq / qq));
    }
    let inverse = self::inverse(best.1);
    (
        best.1,
        values.map(|x| (code::<HALF>(x, inverse) as i32 + HALF) as u8),
    )
}

/// Squared error of the block under `scale`.
fn error<const HALF: i32>(values: &[f32; LEN], scale: f16) -> f32 {
    let inverse = inverse(scale);
    let scale = scale.to_f32();
    let mut lanes = [0.0f32; 8];
    for part in values.as_chunks::<8>().0 {
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

/// To the nearest integer, of numbers that are far below 2^22.
fn round(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds, without a call that stops vectorizing.
    const ROUND: f32 = 12_582_912.0;
    (x + ROUND) - ROUND
}

/// As a half, at most the largest finite one.
fn half(x: f32) -> f16 {
    f16::from_f32(x.clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

/// One over the scale; 0 where that isn't finite, so that every code is that of zero.
fn inverse(scale: f16) -> f32 {
    let inverse = 1.0 / scale.to_f32();
    if inverse.is_finite() { inverse } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::blocks::Rng;
    use leanstream_core::quant::decode;

    /// What normal values lose in each type, at most and, within a factor of two, at least.
    const LOSSES: [(QuantType, f64); 11] = [
        (QuantType::BF16, 0.002),
        (QuantType::F16, 0.0003),
        (QuantType::Q8_0, 0.006),
        (QuantType::Q6_K, 0.022),
        (QuantType::Q5_0, 0.042),
        (QuantType::Q5_1, 0.04),
        (QuantType::Q5_K, 0.04),
        (QuantType::Q4_0, 0.084),
        (QuantType::Q4_1, 0.08),
        (QuantType::Q4_K, 0.08),
        (QuantType::Q3_K, 0.18),
    ];

    fn types() -> impl Iterator<Item = QuantType> {
        QuantType::ALL.into_iter().filter(|ty| encodes(*ty))
    }

    fn round_trip(ty: QuantType, row: &[f32]) -> Vec<f32> {
        let mut bytes = vec![0; ty.row_bytes(row.len()).unwrap()];
        quantize(ty, row, &mut bytes);
        let mut back = vec![0.0; row.len()];
        decode(ty, &bytes, &mut back);
        back
    }

    fn loss(row: &[f32], back: &[f32]) -> f64 {
        let square = |x: f32| f64::from(x) * f64::from(x);
        let off: f64 = row.iter().zip(back).map(|(a, b)| square(a - b)).sum();
        (off / row.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
    }

    /// The relative losses that these widths have on normal values; a wrong nibble order or sign
    /// would make them near 1.
    #[test]
    fn normal_values_lose_little() {
        let row = normal();
        for (ty, most) in LOSSES.into_iter().chain([(QuantType::Q2_K, 0.28)]) {
            let loss = loss(&row, &round_trip(ty, &row));
            assert!(loss < most && loss > most / 2.0, "{ty}: {loss}");
        }
    }

    /// The search is worth its time: a scale that takes the largest value to the last code loses more.
    #[test]
    fn searching_beats_the_largest_value() {
        let row = normal();
        let mut plain = Vec::new();
        for values in row.as_chunks::<32>().0 {
            let largest = values
                .iter()
                .copied()
                .max_by(|a, b| a.abs().total_cmp(&b.abs()));
            let scale = half(largest.unwrap() / -8.0);
            let inverse = inverse(scale);
            plain.extend(values.map(|x| scale.to_f32() * code::<8>(x, inverse)));
        }
        let (searched, plain) = (
            loss(&row, &round_trip(QuantType::Q4_0, &row)),
            loss(&row, &plain),
        );
        assert!(searched < 0.96 * plain, "{searched} {plain}");
    }

    fn normal() -> Vec<f32> {
        let mut rng = Rng::new(1, "normal");
        (0..32 * 400).map(|_| 0.02 * rng.normal()).collect()
    }

    #[test]
    fn what_a_block_can_hold_comes_back() {
        let row: Vec<f32> = (0..32).map(|i| 0.25 * (i % 16 - 8) as f32).collect();
        for ty in [QuantType::Q5_0, QuantType::Q4_0] {
            assert_eq!(round_trip(ty, &row), row, "{ty}");
        }
        let row: Vec<f32> = (0..32)
            .map(|i| 0.5 * (i * 8 - 127).min(127) as f32)
            .collect();
        assert_eq!(round_trip(QuantType::Q8_0, &row), row);
    }

    /// Every scale and minimum that a block of 2 bits can hold, with all its codes.
    #[test]
    fn what_a_super_block_can_hold_comes_back() {
        let row: Vec<f32> = (0..256)
            .map(|i| {
                let (group, code) = (i / 16, i % 4);
                0.5 * (15 - group) as f32 * code as f32 - 0.25 * group as f32
            })
            .collect();
        assert_eq!(round_trip(QuantType::Q2_K, &row), row);
    }

    /// The same with a base, in blocks of their own.
    #[test]
    fn what_a_block_with_a_base_can_hold_comes_back() {
        for (ty, top) in [(QuantType::Q4_1, 15), (QuantType::Q5_1, 31)] {
            for base in [-3.0, 0.25, 5.0] {
                let row: Vec<f32> = (0..32)
                    .map(|i| base + 0.25 * (i * 7 % (top + 1)) as f32)
                    .collect();
                assert_eq!(round_trip(ty, &row), row, "{ty} {base}");
            }
        }
    }

    #[test]
    fn what_larger_blocks_can_hold_comes_back() {
        for (ty, top) in [(QuantType::Q4_K, 15), (QuantType::Q5_K, 31)] {
            let row: Vec<f32> = (0..256)
                .map(|i| {
                    let (group, code) = (i / 32, i * 7 % (top + 1));
                    0.5 * (63 - 8 * group) as f32 * code as f32 - 0.25 * (7 + 8 * group) as f32
                })
                .collect();
            assert_eq!(round_trip(ty, &row), row, "{ty}");
        }
        for (ty, low, half) in [(QuantType::Q3_K, -32, 4), (QuantType::Q6_K, -128, 32)] {
            let row: Vec<f32> = (0..256)
                .map(|i| {
                    let (group, code) = (i / 16, i % 16 * (2 * half - 1) / 15 - half);
                    0.5 * (low + 3 * group) as f32 * code as f32
                })
                .collect();
            assert_eq!(round_trip(ty, &row), row, "{ty}");
        }
    }

    #[test]
    fn extremes_stay_finite() {
        for row in [
            [0.0; 32],
            [f32::MIN_POSITIVE; 32],
            [-1e-30; 32],
            [f32::MAX; 32],
            [-f32::MAX; 32],
            [1e30; 32],
            std::array::from_fn(|i| if i % 2 == 0 { f32::MAX } else { -f32::MAX }),
        ] {
            let long = row.repeat(8);
            // Plain floats of 16 bits have no largest value to fall back on.
            for ty in types().filter(|ty| !matches!(ty, QuantType::F16 | QuantType::BF16)) {
                let back = round_trip(ty, &long);
                assert!(back.iter().all(|x| x.is_finite()), "{ty} {row:?}: {back:?}");
            }
        }
        for ty in types() {
            assert_eq!(round_trip(ty, &[0.0; 256]), [0.0; 256], "{ty}");
        }
    }
}
