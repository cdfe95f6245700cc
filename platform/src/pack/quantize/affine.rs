//! Groups of values as `scale * code + base`: Q4_1 and Q5_1, and Q4_K and Q5_K, whose scales and bases are
//! integers of 6 bits themselves.
//!
//! Of ranges around the smallest and largest value, each bettered twice by the line that fits its own
//! codes best, the one of least squared error is taken.

use half::f16;
use leanstream_core::quant::{q4_k, q5_k};

use super::half;

/// How much the range is narrowed at first, as shares of it.
const INSETS: [f32; 6] = [-0.02, 0.0, 0.03, 0.06, 0.1, 0.15];

/// Values that share a scale and a base.
const GROUP: usize = 32;

/// Largest scale and base of a group within a block of 256.
const STEPS: u8 = 63;

/// A line: `scale * code + base`, codes from 0 to `TOP`.
#[derive(Clone, Copy)]
struct Line {
    scale: f32,
    base: f32,
}

/// Scale, base and codes from 0 to `TOP` for a block with halves of its own.
pub fn block<const TOP: u8>(values: &[f32; GROUP]) -> (f16, f16, [u8; GROUP]) {
    // Judged as it is stored.
    let stored = |line: Line| Line {
        scale: half(line.scale).to_f32(),
        base: half(line.base).to_f32(),
    };
    let line = fit::<TOP>(values, f32::INFINITY, stored);
    (
        f16::from_f32(line.scale),
        f16::from_f32(line.base),
        values.map(|x| code::<TOP>(x, line)),
    )
}

/// Encodes a block of finite values as Q4_K.
pub fn q4_k(values: &[f32; q4_k::LEN], block: &mut [u8; q4_k::BYTES]) {
    let (head, codes) = super_block::<15>(values);
    block[..16].copy_from_slice(&head);
    block[16..].fill(0);
    for (i, code) in codes.into_iter().enumerate() {
        let (run, k, j) = (i / 64, i % 64 / 32, i % 32);
        block[16 + 32 * run + j] |= code << (4 * k);
    }
}

/// Encodes a block of finite values as Q5_K.
pub fn q5_k(values: &[f32; q5_k::LEN], block: &mut [u8; q5_k::BYTES]) {
    let (head, codes) = super_block::<31>(values);
    block[..16].copy_from_slice(&head);
    block[16..].fill(0);
    for (i, code) in codes.into_iter().enumerate() {
        let (run, k, j) = (i / 64, i % 64 / 32, i % 32);
        block[16 + j] |= (code >> 4) << (i / 32);
        block[48 + 32 * run + j] |= (code & 0xf) << (4 * k);
    }
}

/// Both halves and the packed scales and minimums, then the codes.
fn super_block<const TOP: u8>(values: &[f32; 256]) -> ([u8; 16], [u8; 256]) {
    let groups = values.as_chunks::<GROUP>().0;
    let mut lines = [Line {
        scale: 0.0,
        base: 0.0,
    }; 8];
    for (line, group) in lines.iter_mut().zip(groups) {
        *line = fit::<TOP>(group, 0.0, |line| line);
    }
    let largest = |pick: fn(&Line) -> f32| lines.iter().map(pick).fold(0.0, f32::max);
    let step = |largest: f32| half(largest / f32::from(STEPS));
    let (d, dmin) = (step(largest(|l| l.scale)), step(largest(|l| -l.base)));
    let mut head = [0; 16];
    head[..2].copy_from_slice(&d.to_le_bytes());
    head[2..4].copy_from_slice(&dmin.to_le_bytes());
    let mut codes = [0; 256];
    for (g, (group, line)) in groups.iter().zip(lines).enumerate() {
        let (scale, min, line) = integers::<TOP>(group, line, (d.to_f32(), dmin.to_f32()));
        if g < 4 {
            head[4 + g] |= scale;
            head[8 + g] |= min;
        } else {
            head[8 + g] |= scale & 0xf | (min & 0xf) << 4;
            head[g] |= scale >> 4 << 6;
            head[4 + g] |= min >> 4 << 6;
        }
        for (code, x) in codes[GROUP * g..].iter_mut().zip(group) {
            *code = self::code::<TOP>(*x, line);
        }
    }
    (head, codes)
}

/// The integer scale and minimum of least error near `line`.
fn integers<const TOP: u8>(
    group: &[f32; GROUP],
    line: Line,
    (d, dmin): (f32, f32),
) -> (u8, u8, Line) {
    let near = |x: f32, step: f32| {
        let x = if step > 0.0 { x / step } else { 0.0 };
        x.round().clamp(0.0, f32::from(STEPS)) as u8
    };
    let around = |x: u8| x.saturating_sub(1)..=(x + 1).min(STEPS);
    let mut best = (f32::INFINITY, (0, 0, line));
    for scale in around(near(line.scale, d)) {
        for min in around(near(-line.base, dmin)) {
            let line = Line {
                scale: d * f32::from(scale),
                base: -(dmin * f32::from(min)),
            };
            let error = error::<TOP>(group, line);
            if error < best.0 {
                best = (error, (scale, min, line));
            }
        }
    }
    best.1
}

/// The line of least error, with a base of at most `base_max`; `stored` is what will be left of it.
fn fit<const TOP: u8>(group: &[f32; GROUP], base_max: f32, stored: impl Fn(Line) -> Line) -> Line {
    let low = group
        .iter()
        .copied()
        .fold(f32::INFINITY, f32::min)
        .min(base_max);
    let high = group
        .iter()
        .copied()
        .fold(f32::NEG_INFINITY, f32::max)
        .max(low);
    let flat = stored(Line {
        scale: 0.0,
        base: low,
    });
    let mut best = (error::<TOP>(group, flat), flat);
    for inset in INSETS {
        // Halves first: the difference may be beyond what a single holds.
        let (low, high) = (
            low * (1.0 - 0.5 * inset) + high * (0.5 * inset),
            high * (1.0 - 0.5 * inset) + low * (0.5 * inset),
        );
        let mut line = stored(Line {
            scale: high / f32::from(TOP) - low / f32::from(TOP),
            base: low.min(base_max),
        });
        for _ in 0..3 {
            let error = error::<TOP>(group, line);
            if error < best.0 {
                best = (error, line);
            }
            line = stored(regress::<TOP>(group, line, base_max));
        }
    }
    best.1
}

/// The line that fits the codes under `line` best.
fn regress<const TOP: u8>(group: &[f32; GROUP], line: Line, base_max: f32) -> Line {
    let n = GROUP as f32;
    let inverse = inverse(line.scale);
    let mut lanes = [[0.0f32; 8]; 4];
    for part in group.as_chunks::<8>().0 {
        for (lane, value) in part.iter().enumerate() {
            let code = near::<TOP>(*value, line, inverse);
            lanes[0][lane] += code;
            lanes[1][lane] += code * code;
            lanes[2][lane] += value;
            lanes[3][lane] += value * code;
        }
    }
    let [q, qq, x, xq] = lanes.map(|lanes| lanes.iter().sum::<f32>());
    let determinant = n * qq - q * q;
    let (scale, base) = if determinant > 0.0 {
        let scale = (n * xq - q * x) / determinant;
        (scale, (x - scale * q) / n)
    } else {
        (line.scale, line.base)
    };
    if base <= base_max {
        Line { scale, base }
    } else {
        let scale = if qq > 0.0 {
            (xq - base_max * q) / qq
        } else {
            line.scale
        };
        Line {
            scale,
            base: base_max,
        }
    }
}

/// Squared error; infinite for a line that has no codes.
fn error<const TOP: u8>(group: &[f32; GROUP], line: Line) -> f32 {
    if !(line.scale >= 0.0 && line.scale.is_finite() && line.base.is_finite()) {
        return f32::INFINITY;
    }
    let inverse = inverse(line.scale);
    let mut lanes = [0.0f32; 8];
    for part in group.as_chunks::<8>().0 {
        for (lane, x) in lanes.iter_mut().zip(part) {
            let off = x - (line.scale * near::<TOP>(*x, line, inverse) + line.base);
            *lane += off * off;
        }
    }
    lanes.iter().sum()
}

fn code<const TOP: u8>(x: f32, line: Line) -> u8 {
    near::<TOP>(x, line, inverse(line.scale)) as u8
}

fn near<const TOP: u8>(x: f32, line: Line, inverse: f32) -> f32 {
    super::round(((x - line.base) * inverse).clamp(0.0, f32::from(TOP)))
}

/// One over the scale; 0 where that isn't finite, so that every code is 0.
fn inverse(scale: f32) -> f32 {
    let inverse = 1.0 / scale;
    if inverse.is_finite() { inverse } else { 0.0 }
}
