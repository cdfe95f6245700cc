//! Floats to Q2_K, for sketches of gates that are of four bits already.
//!
//! Each 16 values get the range of least squared error among narrowed ones around their smallest and
//! largest; then, with the super-block's two scales fixed, the best of the neighbouring 4-bit scales and
//! minimums.

use half::f16;
use leanstream_core::quant::q2_k::{BYTES, LEN};

use super::half;

/// Values that share a scale and a minimum.
const GROUP: usize = 16;

/// Encodes a block of finite values.
pub fn encode(values: &[f32; LEN], block: &mut [u8; BYTES]) {
    let groups = values.as_chunks::<GROUP>().0;
    let mut ranges = [(0.0f32, 0.0f32); LEN / GROUP];
    for (range, group) in ranges.iter_mut().zip(groups) {
        *range = narrowed(group);
    }
    let largest = |pick: fn(&(f32, f32)) -> f32| ranges.iter().map(pick).fold(0.0, f32::max);
    let (d, dmin) = (half(largest(|r| r.0) / 15.0), half(largest(|r| r.1) / 15.0));
    block.fill(0);
    for (index, (group, (scale, min))) in groups.iter().zip(ranges).enumerate() {
        let (s, m) = integers(group, (near(scale, d), near(min, dmin)), (d, dmin));
        block[index] = s | m << 4;
        let (scale, min) = (d.to_f32() * f32::from(s), dmin.to_f32() * f32::from(m));
        for (i, x) in group.iter().enumerate() {
            let i = index * GROUP + i;
            let (run, k, j) = (i / 128, i % 128 / 32, i % 32);
            block[16 + 32 * run + j] |= (code(*x, scale, min) as u8) << (2 * k);
        }
    }
    block[80..82].copy_from_slice(&d.to_le_bytes());
    block[82..84].copy_from_slice(&dmin.to_le_bytes());
}

/// Scale and minimum of least error.
fn narrowed(group: &[f32; GROUP]) -> (f32, f32) {
    let low = group.iter().copied().fold(0.0, f32::min);
    let high = group.iter().copied().fold(0.0, f32::max);
    let (scale, min) = ((high / 3.0 - low / 3.0), -low);
    let mut best = (f32::INFINITY, (scale, min));
    for step in 0..=10 {
        let share = 0.5 + 0.05 * step as f32;
        let (scale, min) = (scale * share, min * share);
        let error = error(group, scale, min);
        if error < best.0 {
            best = (error, (scale, min));
        }
    }
    best.1
}

/// The 4-bit scale and minimum of least error, around those near.
fn integers(group: &[f32; GROUP], near: (u8, u8), (d, dmin): (f16, f16)) -> (u8, u8) {
    let mut best = (f32::INFINITY, near);
    for s in near.0.saturating_sub(1)..=(near.0 + 1).min(15) {
        for m in near.1.saturating_sub(1)..=(near.1 + 1).min(15) {
            let (scale, min) = (d.to_f32() * f32::from(s), dmin.to_f32() * f32::from(m));
            let error = error(group, scale, min);
            if error < best.0 {
                best = (error, (s, m));
            }
        }
    }
    best.1
}

fn near(x: f32, step: f16) -> u8 {
    // Where the step is zero, so are all.
    let step = step.to_f32();
    if step > 0.0 {
        (x / step).round().min(15.0) as u8
    } else {
        0
    }
}

fn error(group: &[f32; GROUP], scale: f32, min: f32) -> f32 {
    let square = |x: f32| x * x;
    let off = |x: &f32| square(x - (scale * code(*x, scale, min) - min));
    group.iter().map(off).sum()
}

fn code(x: f32, scale: f32, min: f32) -> f32 {
    if scale > 0.0 {
        ((x + min) / scale).clamp(0.0, 3.0).round_ties_even()
    } else {
        0.0
    }
}
