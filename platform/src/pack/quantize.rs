//! Floats to blocks of 32 codes with one scale: Q4_0 for sketches, and Q8_0, Q5_0, Q4_0 for down columns
//! that can't be moved; and to Q2_K.
//!
//! Of a block's possible scales the one with the least squared error is taken: some around the
//! largest value, of both signs (there is one more code below zero than above), then the best scale
//! for the codes that were found.

mod q2_k;

use half::f16;
use leanstream_core::quant::QuantType;

/// Values in a block.
const LEN: usize = 32;

/// Quantizes a row of whole blocks of finite values.
///
/// # Panics
/// When `ty` isn't Q8_0, Q5_0, Q4_0 or Q2_K, or the sizes don't go together.
pub fn quantize(ty: QuantType, row: &[f32], out: &mut [u8]) {
    if ty == QuantType::Q2_K {
        let (values, rest) = row.as_chunks();
        let (blocks, none) = out.as_chunks_mut();
        assert!(rest.is_empty() && none.is_empty() && values.len() == blocks.len());
        for (values, block) in values.iter().zip(blocks) {
            q2_k::encode(values, block);
        }
        return;
    }
    let (values, rest) = row.as_chunks::<LEN>();
    assert!(rest.is_empty(), "{} values aren't whole blocks", row.len());
    let bytes = ty.block_bytes();
    assert_eq!(values.len() * bytes, out.len(), "bytes of {ty}");
    for (values, block) in values.iter().zip(out.chunks_exact_mut(bytes)) {
        match ty {
            QuantType::Q8_0 => q8_0(values, block),
            QuantType::Q5_0 => q5_0(values, block),
            QuantType::Q4_0 => q4_0(values, block),
            _ => panic!("nothing is quantized to {ty}"),
        }
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
    // Adding and taking away 1.5 * 2^23 rounds to an integer, without a call that stops vectorizing.
    const ROUND: f32 = 12_582_912.0;
    ((x * inverse).clamp(-HALF as f32, (HALF - 1) as f32) + ROUND) - ROUND
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

    const TYPES: [QuantType; 3] = [QuantType::Q8_0, QuantType::Q5_0, QuantType::Q4_0];

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
        let types = TYPES.into_iter().chain([QuantType::Q2_K]);
        for (ty, most) in types.zip([0.006, 0.042, 0.084, 0.28]) {
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

    #[test]
    fn extremes_stay_finite() {
        for row in [
            [0.0; 32],
            [f32::MIN_POSITIVE; 32],
            [-1e-30; 32],
            [f32::MAX; 32],
            [1e30; 32],
        ] {
            for ty in TYPES {
                assert!(round_trip(ty, &row).iter().all(|x| x.is_finite()), "{ty}");
            }
            let long = row.repeat(8);
            let back = round_trip(QuantType::Q2_K, &long);
            assert!(back.iter().all(|x| x.is_finite()), "{row:?}: {back:?}");
        }
        assert_eq!(round_trip(QuantType::Q4_0, &[0.0; 32]), [0.0; 32]);
    }
}
