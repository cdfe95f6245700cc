//! One position of one head, into the two block formats.

use half::f16;

use super::{BLOCK, GROUP};
use crate::cpu::vector::lanes::{LANES_MAX, Lanes};
use crate::cpu::vector::{Vector, multiversion};

/// One half float of a block.
///
/// # Safety
/// `block` is aligned to 2 and has element `at`.
pub(super) unsafe fn half_at(block: *const u8, at: usize) -> f32 {
    // SAFETY: the caller vouches for the element.
    f16::from_bits(unsafe { block.cast::<u16>().add(at).read() }).to_f32()
}

/// Into f16 blocks.
///
/// # Safety
/// `keys` and `values` are f16 blocks for heads of `k.len()`, whose `slot` is the caller's alone.
pub(super) unsafe fn store_f16(
    vector: Vector,
    keys: *mut u8,
    values: *mut u8,
    slot: usize,
    k: &[f32],
    v: &[f32],
) {
    let keys = keys.cast::<u16>();
    let mut bits = [0; BLOCK];
    for (first, k) in (0..).step_by(BLOCK).zip(k.chunks(BLOCK)) {
        let bits = &mut bits[..k.len()];
        vector.to_f16(k, bits);
        for (d, bits) in (first..).zip(bits) {
            // SAFETY: inside the block, in our slot.
            unsafe { keys.add(d * BLOCK + slot).write(*bits) };
        }
    }
    let width = v.len().next_multiple_of(16);
    // SAFETY: our slot's row, which lies in the block.
    let row =
        unsafe { std::slice::from_raw_parts_mut(values.cast::<u16>().add(slot * width), width) };
    let (row, padding) = row.split_at_mut(v.len());
    vector.to_f16(v, row);
    // Vectors run over the padding; it need only be finite.
    padding.fill(0);
}

/// Into q8_0 blocks.
///
/// # Safety
/// `keys` and `values` are q8_0 blocks for heads of `k.len()`, whose `slot` is the caller's alone.
pub(super) unsafe fn store_q8(
    vector: Vector,
    keys: *mut u8,
    values: *mut u8,
    slot: usize,
    k: &[f32],
    v: &[f32],
) {
    let (head_dim, groups) = (k.len(), k.len() / GROUP);
    let (k, _) = k.as_chunks::<GROUP>();
    let (v, _) = v.as_chunks::<GROUP>();
    for group in 0..groups {
        let (mut key_codes, mut value_codes) = ([0; GROUP], [0; GROUP]);
        let key_scale = vector.quantize_group(&k[group], &mut key_codes);
        let value_scale = vector.quantize_group(&v[group], &mut value_codes);
        // SAFETY: all inside the blocks, in our slot, by the layout at the top of this file.
        unsafe {
            keys.cast::<u16>()
                .add(group * BLOCK + slot)
                .write(key_scale);
            values
                .cast::<u16>()
                .add(slot * groups + group)
                .write(value_scale);
            let codes = keys.add(groups * BLOCK * 2).cast::<i8>();
            for (d, code) in (group * GROUP..).zip(key_codes) {
                codes.add(d * BLOCK + slot).write(code);
            }
            let codes = values.add(groups * BLOCK * 2).cast::<i8>();
            let row = codes.add(slot * head_dim + group * GROUP);
            row.cast::<[i8; GROUP]>().write(value_codes);
        }
    }
}

multiversion! {
    /// 32 floats as an f16 scale (bits) and codes in `-127 ..= 127`: the scale is the largest
    /// absolute value over 127, and codes are rounded to even by the scale as stored. NaN anywhere
    /// makes the scale NaN. The same bits on every instruction set.
    fn quantize_group(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> u16 = quantize_body;
}

#[inline(always)]
fn quantize_body<L: Lanes>(l: L, x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> u16 {
    let (mut top, mut nan) = (l.splat(0.0), false);
    for x in x.chunks_exact(L::N) {
        let v = l.take(x);
        top = l.max(top, l.max(v, l.sub(l.splat(0.0), v)));
        nan = x.iter().fold(nan, |nan, x| nan | x.is_nan());
    }
    if nan {
        *codes = [0; GROUP];
        return f16::NAN.to_bits();
    }
    let scale = f16::from_f32((l.top(top) / 127.0).min(f16::MAX.to_f32()));
    let inverse = match scale.to_f32() {
        0.0 => 0.0,
        scale => 1.0 / scale,
    };
    for (x, codes) in x.chunks_exact(L::N).zip(codes.chunks_exact_mut(L::N)) {
        let v = l.mul(l.take(x), l.splat(inverse));
        let bounded = l.max(l.splat(-127.0), l.min(l.splat(127.0), v));
        let mut rounded = [0.0; LANES_MAX];
        l.put(&mut rounded, l.round(bounded));
        for (code, x) in codes.iter_mut().zip(rounded) {
            // SAFETY: a whole number in -127 ..= 127.
            *code = unsafe { x.to_int_unchecked::<i32>() } as i8;
        }
    }
    scale.to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::Random;

    #[test]
    fn quantization_of_hostile_groups() {
        for vector in Vector::available() {
            let quantize = |x: &[f32; 32]| {
                let mut codes = [1; 32];
                let scale = vector.quantize_group(x, &mut codes);
                (f16::from_bits(scale), codes)
            };
            assert_eq!(quantize(&[0.0; 32]), (f16::ZERO, [0; 32]));
            assert_eq!(quantize(&[1e-30; 32]), (f16::ZERO, [0; 32]));
            let inf = f32::INFINITY;
            assert_eq!(quantize(&[inf; 32]), (f16::MAX, [127; 32]));
            assert_eq!(quantize(&[-inf; 32]), (f16::MAX, [-127; 32]));
            for at in 0..32 {
                let mut x = [1.0; 32];
                x[at] = f32::NAN;
                assert!(quantize(&x).0.is_nan());
            }
        }
    }

    #[test]
    fn quantization_is_the_same_everywhere() {
        let mut random = Random(11);
        for _ in 0..500 {
            let x: [f32; 32] = random.floats(32, 4.0).try_into().unwrap();
            let top = x.iter().fold(0.0f32, |top, x| top.max(x.abs()));
            let scale = f16::from_f32(top / 127.0);
            let inverse = 1.0 / scale.to_f32();
            let want = x.map(|x| (x * inverse).round_ties_even().clamp(-127.0, 127.0) as i8);
            for vector in Vector::available() {
                let mut codes = [0; 32];
                let bits = vector.quantize_group(&x, &mut codes);
                assert_eq!((bits, codes), (scale.to_bits(), want), "{vector:?}");
            }
        }
    }
}
