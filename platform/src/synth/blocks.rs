//! Random blocks of every format, written as bytes: no weight is ever quantized, codes are drawn
//! directly and scales chosen so that the decoded values have a given spread and a mean near 0.

use half::{bf16, f16};
use leanstream_core::quant::QuantType;

/// Random bits: SplitMix64, which every seed suits.
#[derive(Clone)]
pub struct Rng(u64);

impl Rng {
    /// The stream called `name` under `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        // FNV-1a, stirred with the seed.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut stirred = Self(seed);
        Self(stirred.bits() ^ hash)
    }

    /// 64 of them.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Nearly normal with mean 0 and deviation 1: four uniform values summed.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum = (0..4)
            .map(|i| (bits >> (16 * i) & 0xffff) as i32)
            .sum::<i32>()
            - 2 * 0xffff;
        // 65536 * sqrt(4 / 12).
        sum as f32 / 37_837.226
    }

    /// Random bytes.
    pub fn fill(&mut self, out: &mut [u8]) {
        let (words, rest) = out.as_chunks_mut::<8>();
        for word in words {
            *word = self.bits().to_le_bytes();
        }
        let last = self.bits().to_le_bytes();
        rest.copy_from_slice(&last[..rest.len()]);
    }
}

/// An endless row of blocks.
pub struct Source {
    ty: QuantType,
    std: f32,
    rng: Rng,
    /// Scales to draw from, with the minimum that centres each: halves, as bits.
    scales: [([u8; 2], [u8; 2]); 64],
    /// MXFP4: the lower of two exponents.
    exponent: u8,
}

impl Source {
    /// Blocks of `ty` whose values spread by about `std`.
    pub fn new(ty: QuantType, std: f32, mut rng: Rng) -> Self {
        // The root mean square of value / scale under the draws below, and for formats with a
        // minimum what it must be per scale.
        let (rms, minimum) = match ty {
            QuantType::F32 | QuantType::F16 | QuantType::BF16 => (1.0, 0.0),
            QuantType::Q4_0 => (4.64, 0.0),
            QuantType::Q4_1 => (4.61, -7.5),
            QuantType::Q5_0 => (9.25, 0.0),
            QuantType::Q5_1 => (9.23, -15.5),
            QuantType::Q8_0 => (73.6, 0.0),
            QuantType::Q2_K => (13.2, 1.5),
            QuantType::Q3_K => (43.3, 0.0),
            QuantType::Q4_K => (223.0, 7.5),
            QuantType::Q5_K => (447.0, 15.5),
            QuantType::Q6_K => (1366.0, 0.0),
            QuantType::IQ4_NL => (67.4, 0.0),
            QuantType::MXFP4 => (5.85, 0.0),
        };
        let unit = std / rms;
        let mut scales = [([0; 2], [0; 2]); 64];
        for (i, (scale, least)) in scales.iter_mut().enumerate() {
            let jitter = || (i as f32 - 31.5) / 128.0;
            let mut value = unit * (1.0 + jitter());
            // Codes of symmetric formats reach one further down than up: scales of both signs,
            // which real quantizers write too, take the mean back to 0.
            if minimum == 0.0 && rng.bits() & 1 == 1 {
                value = -value;
            }
            *scale = f16::from_f32(value).to_le_bytes();
            // Not quite the centre, so that a wrong minimum can't hide.
            let off = 1.0 + ((i * 37 % 64) as f32 - 31.5) / 512.0;
            *least = f16::from_f32(value * minimum * off).to_le_bytes();
        }
        // The exponent of a power of two not above `unit`, biased by 128: E2M1 codes count halves.
        let exponent = (unit.to_bits() >> 23) as u8 + 1;
        Self {
            ty,
            std,
            rng,
            scales,
            exponent,
        }
    }

    /// Fills `out` (whole blocks) with the next blocks.
    pub fn fill(&mut self, out: &mut [u8]) {
        match self.ty {
            QuantType::F32 => self.each::<4>(out, |s, b| {
                *b = (s.std * s.rng.normal()).to_le_bytes();
            }),
            QuantType::F16 => self.each::<2>(out, |s, b| {
                *b = f16::from_f32(s.std * s.rng.normal()).to_le_bytes();
            }),
            QuantType::BF16 => self.each::<2>(out, |s, b| {
                *b = bf16::from_f32(s.std * s.rng.normal()).to_le_bytes();
            }),
            // Scale, codes.
            QuantType::Q4_0 | QuantType::IQ4_NL => self.each::<18>(out, |s, b| {
                s.rng.fill(b);
                b[..2].copy_from_slice(&s.scale().0);
            }),
            QuantType::Q5_0 => self.each::<22>(out, |s, b| {
                s.rng.fill(b);
                b[..2].copy_from_slice(&s.scale().0);
            }),
            // Scale, minimum, codes.
            QuantType::Q4_1 => self.each::<20>(out, |s, b| {
                s.rng.fill(b);
                s.scale_and_minimum(&mut b[..4]);
            }),
            QuantType::Q5_1 => self.each::<24>(out, |s, b| {
                s.rng.fill(b);
                s.scale_and_minimum(&mut b[..4]);
            }),
            QuantType::Q8_0 => self.each::<34>(out, |s, b| {
                s.rng.fill(b);
                // No quantizer writes -128.
                b[2..]
                    .iter_mut()
                    .for_each(|code| *code = (*code).max(1) ^ 0x80);
                b[..2].copy_from_slice(&s.scale().0);
            }),
            // Scales and minimums of 4 bits, codes, scale, minimum.
            QuantType::Q2_K => self.each::<84>(out, |s, b| {
                s.rng.fill(b);
                for pair in &mut b[..16] {
                    let scale = 8 | (*pair & 7);
                    let minimum = scale ^ (*pair >> 3 & 1);
                    *pair = scale | minimum << 4;
                }
                s.scale_and_minimum(&mut b[80..]);
            }),
            // High bits, low bits, scales, scale.
            QuantType::Q3_K => self.each::<110>(out, |s, b| {
                s.rng.fill(b);
                b[108..].copy_from_slice(&s.scale().0);
            }),
            // Scale, minimum, packed scales and minimums of 6 bits, codes.
            QuantType::Q4_K => self.each::<144>(out, |s, b| {
                s.rng.fill(b);
                pack_scales(&mut b[4..16]);
                s.scale_and_minimum(&mut b[..4]);
            }),
            QuantType::Q5_K => self.each::<176>(out, |s, b| {
                s.rng.fill(b);
                pack_scales(&mut b[4..16]);
                s.scale_and_minimum(&mut b[..4]);
            }),
            // Low bits, high bits, scales of 8 bits, scale.
            QuantType::Q6_K => self.each::<210>(out, |s, b| {
                s.rng.fill(b);
                b[208..].copy_from_slice(&s.scale().0);
            }),
            // Exponent, codes.
            QuantType::MXFP4 => self.each::<17>(out, |s, b| {
                s.rng.fill(b);
                b[0] = s.exponent + (b[0] & 1);
            }),
        }
    }

    fn each<const N: usize>(&mut self, out: &mut [u8], block: impl Fn(&mut Self, &mut [u8; N])) {
        let (blocks, rest) = out.as_chunks_mut::<N>();
        assert!(
            rest.is_empty(),
            "{} bytes aren't whole blocks of {N}",
            out.len()
        );
        for bytes in blocks {
            block(self, bytes);
        }
    }

    fn scale(&mut self) -> ([u8; 2], [u8; 2]) {
        self.scales[(self.rng.bits() >> 58) as usize]
    }

    fn scale_and_minimum(&mut self, to: &mut [u8]) {
        let (scale, minimum) = self.scale();
        to[..2].copy_from_slice(&scale);
        to[2..].copy_from_slice(&minimum);
    }
}

/// Turns 12 random bytes into the 6-bit scales and minimums of 8 sub-blocks as Q4_K and Q5_K pack
/// them: scales of 32 to 63, and minimums that match them but for the last bit.
fn pack_scales(bytes: &mut [u8]) {
    let mut scales = [0; 8];
    let mut minimums = [0; 8];
    for i in 0..8 {
        scales[i] = 32 | (bytes[i] & 31);
        minimums[i] = scales[i] ^ (bytes[i] >> 7);
    }
    for i in 0..4 {
        bytes[i] = scales[i] | (scales[i + 4] >> 4) << 6;
        bytes[i + 4] = minimums[i] | (minimums[i + 4] >> 4) << 6;
        bytes[i + 8] = scales[i + 4] & 15 | (minimums[i + 4] & 15) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leanstream_core::quant;

    #[test]
    fn every_format_has_the_spread_that_was_asked_for() {
        for ty in QuantType::ALL {
            for std in [0.018f32, 0.0625] {
                let blocks = 65_536 / ty.block_len();
                let mut bytes = vec![0; blocks * ty.block_bytes()];
                Source::new(ty, std, Rng::new(7, "spread")).fill(&mut bytes);
                assert_eq!(quant::check(ty, &bytes), Ok(()), "{ty}");
                let mut values = vec![0.0; blocks * ty.block_len()];
                quant::decode(ty, &bytes, &mut values);
                let n = values.len() as f64;
                let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
                let square = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
                let ratio = square.sqrt() / f64::from(std);
                // MXFP4's scales are powers of two, so its spread is known to a factor.
                let tolerance = if ty == QuantType::MXFP4 { 0.6 } else { 0.05 };
                assert!((ratio - 1.0).abs() < tolerance, "{ty} at {std}: {ratio}");
                assert!(
                    mean.abs() < 0.05 * f64::from(std),
                    "{ty} at {std}: mean {mean}"
                );
            }
        }
    }

    #[test]
    fn a_stream_is_cut_anywhere_between_blocks() {
        for ty in QuantType::ALL {
            let block = ty.block_bytes();
            let mut whole = vec![0; 6 * block];
            Source::new(ty, 0.1, Rng::new(1, "cut")).fill(&mut whole);
            let mut parts = vec![0; 6 * block];
            let mut source = Source::new(ty, 0.1, Rng::new(1, "cut"));
            let (head, tail) = parts.split_at_mut(block);
            source.fill(head);
            source.fill(tail);
            assert_eq!(whole, parts, "{ty}");
        }
    }

    #[test]
    fn names_and_seeds_give_other_streams() {
        let first = |seed, name| Rng::new(seed, name).bits();
        assert_ne!(first(1, "a"), first(1, "b"));
        assert_ne!(first(1, "a"), first(2, "a"));
    }
}
