//! ReLU, which keeps one bit of each input; and numbers folded at 0, which the same bits unfold.

use leanstream_core::act::codec::mask;

use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, multiversion};
use crate::tune::lent::Lent;
use crate::tune::team::Team;

/// Elements of a chunk: whole bytes of bits.
const CHUNK: usize = 8192;

/// Bytes that the bits of `elements` elements take.
#[must_use]
pub fn mask_bytes(elements: usize) -> usize {
    elements.div_ceil(8)
}

/// `x = max(x, 0)`, and which elements were above 0. Shapes: `x` (n), `bits` of [`mask_bytes`].
///
/// # Panics
/// The lengths disagree.
pub fn relu(team: &Team, v: Vector, x: &mut [f32], bits: &mut [u8]) {
    noting(team, x, bits, |x, bits| v.keep(bits, x));
}

/// `x = |x|`, and which elements were above 0. Shapes: as in [`relu`].
///
/// # Panics
/// The lengths disagree.
pub fn fold(team: &Team, v: Vector, x: &mut [f32], bits: &mut [u8]) {
    noting(team, x, bits, |x, _| v.magnitudes(x));
}

/// What [`fold`] did is undone. Shapes: as in [`relu`].
///
/// # Panics
/// The lengths disagree.
pub fn unfold(team: &Team, v: Vector, x: &mut [f32], bits: &[u8]) {
    noted(team, x, bits, |x, bits| v.negate_others(bits, x));
}

/// `dy` becomes 0 where the input wasn't above 0. Shapes: as in [`relu`]. It serves too to make again what
/// [`relu`] made, from its input.
///
/// # Panics
/// The lengths disagree.
pub fn relu_backward(team: &Team, v: Vector, dy: &mut [f32], bits: &[u8]) {
    noted(team, dy, bits, |dy, bits| v.keep(bits, dy));
}

/// Writes which elements are above 0, then runs `f` on them.
fn noting(team: &Team, x: &mut [f32], bits: &mut [u8], f: impl Fn(&mut [f32], &[u8]) + Sync) {
    assert_eq!(bits.len(), mask_bytes(x.len()), "a bit an element");
    let len = x.len();
    let (x, bits) = (Lent::new(x), Lent::new(bits));
    team.each(len.div_ceil(CHUNK), &|chunk, _| {
        let (first, count) = part(chunk, len);
        // SAFETY: the chunk's own elements, and the whole bytes of their bits.
        let (x, bits) = unsafe {
            (
                x.part(first, count),
                bits.part(first / 8, count.div_ceil(8)),
            )
        };
        mask::positive(x, bits);
        f(x, bits);
    });
}

/// Runs `f` on elements and their bits.
fn noted(team: &Team, x: &mut [f32], bits: &[u8], f: impl Fn(&mut [f32], &[u8]) + Sync) {
    assert_eq!(bits.len(), mask_bytes(x.len()), "a bit an element");
    let len = x.len();
    let x = Lent::new(x);
    team.each(len.div_ceil(CHUNK), &|chunk, _| {
        let (first, count) = part(chunk, len);
        // SAFETY: the chunk's own elements.
        let x = unsafe { x.part(first, count) };
        f(x, &bits[first / 8..(first + count).div_ceil(8)]);
    });
}

multiversion! {
    /// [`mask::keep`], without its branches.
    fn keep(bits: &[u8], x: &mut [f32]) = keep_body;
    /// `-x` where the bit is 0.
    fn negate_others(bits: &[u8], x: &mut [f32]) = negate_body;
    /// `|x|`.
    fn magnitudes(x: &mut [f32]) = magnitudes_body;
}

#[inline(always)]
fn keep_body<L: Lanes>(_: L, bits: &[u8], x: &mut [f32]) {
    let whole = x.len() / 8;
    let (eights, rest) = x.as_chunks_mut::<8>();
    for (x, byte) in eights.iter_mut().zip(bits) {
        for (i, x) in x.iter_mut().enumerate() {
            let all = 0u32.wrapping_sub(u32::from(*byte) >> i & 1);
            *x = f32::from_bits(x.to_bits() & all);
        }
    }
    mask::keep(&bits[whole..], rest);
}

#[inline(always)]
fn negate_body<L: Lanes>(_: L, bits: &[u8], x: &mut [f32]) {
    for (x, byte) in x.chunks_mut(8).zip(bits) {
        for (i, x) in x.iter_mut().enumerate() {
            let sign = (u32::from(!*byte) >> i & 1) << 31;
            *x = f32::from_bits(x.to_bits() ^ sign);
        }
    }
}

#[inline(always)]
fn magnitudes_body<L: Lanes>(_: L, x: &mut [f32]) {
    x.iter_mut().for_each(|x| *x = x.abs());
}

/// First element and elements of a chunk.
fn part(chunk: usize, len: usize) -> (usize, usize) {
    let first = chunk * CHUNK;
    (first, CHUNK.min(len - first))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::Random;
    use crate::tune::ops::testing::every_machine;

    #[test]
    fn both_ways() {
        every_machine(|team, v| {
            let mut random = Random(1);
            for len in [1, 7, 8, 100, CHUNK, 3 * CHUNK + 13] {
                let x = random.floats(len, 1.0);
                let dy = random.floats(len, 1.0);
                let (mut y, mut dx) = (x.clone(), dy.clone());
                let mut bits = vec![0xff; mask_bytes(len)];
                relu(team, v, &mut y, &mut bits);
                relu_backward(team, v, &mut dx, &bits);
                let mut folded = x.clone();
                fold(team, v, &mut folded, &mut bits);
                let mut unfolded = folded.clone();
                unfold(team, v, &mut unfolded, &bits);
                assert_eq!(unfolded, x);
                for i in 0..len {
                    assert_eq!(folded[i], x[i].abs());
                    assert_eq!(y[i], x[i].max(0.0));
                    assert_eq!(dx[i], if x[i] > 0.0 { dy[i] } else { 0.0 });
                }
            }
        });
    }
}
