//! Rotary position embedding: forward by a run's own angles ([`crate::run::rope`]), backward by the same
//! turn the other way, since a turn's transpose is its inverse.

use super::rows_per_chunk;
use crate::cpu::vector::lanes::Lanes;
use crate::cpu::vector::{Vector, multiversion};
use crate::run::rope::{Rope, RopeError, RopeParams};
use crate::tune::team::{Sheet, Team};
use leanstream_core::plan::RopeStyle;

/// Which way heads turn.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// By the angle of the position.
    Forward,
    /// Back by it: gradients of the turned to gradients of the unturned.
    Backward,
}

/// Cosines and sines of every position of a sequence, for one kind of layer.
pub struct Angles {
    style: RopeStyle,
    head_dim: usize,
    /// Floats a position.
    row: usize,
    /// Cosines then sines: (positions, 2, row / 2)
    table: Box<[f32]>,
}

impl Angles {
    /// Bytes of a table for `positions` positions of `n_rot` turning elements.
    pub fn bytes(positions: usize, n_rot: usize) -> usize {
        positions * n_rot * size_of::<f32>()
    }

    /// The angles of positions `0 .. positions`. Allocates [`Angles::bytes`].
    ///
    /// # Errors
    /// A parameter that can't be used.
    pub fn new(params: &RopeParams<'_>, positions: usize) -> Result<Self, RopeError> {
        let rope = Rope::new(params)?;
        let row = rope.row_len();
        let mut table = vec![0.0; positions * row].into_boxed_slice();
        for (position, row) in table.chunks_exact_mut(row).enumerate() {
            rope.fill(position, row);
        }
        Ok(Self {
            style: params.style,
            head_dim: params.head_dim,
            row,
            table,
        })
    }

    /// Turns every head of every token in place. Forward, the bits are those of [`Rope::apply`].
    ///
    /// Shapes: `x` (tokens, heads, head_dim), `positions` (tokens): where each token stands in its own
    /// sequence.
    ///
    /// # Panics
    /// `x` isn't whole heads of as many tokens as there are positions, or a position is beyond the table.
    pub fn turn(
        &self,
        team: &Team,
        v: Vector,
        positions: &[u32],
        x: &mut [f32],
        direction: Direction,
    ) {
        if positions.is_empty() {
            return;
        }
        let width = x.len() / positions.len();
        assert!(
            width > 0 && width.is_multiple_of(self.head_dim),
            "whole heads"
        );
        let back = direction == Direction::Backward;
        let sheet = Sheet {
            data: x,
            row: width,
        };
        team.rows([sheet], rows_per_chunk(width), |first, [x], _| {
            for (token, position) in x.chunks_exact_mut(width).zip(&positions[first..]) {
                let row = &self.table[*position as usize * self.row..][..self.row];
                match self.style {
                    RopeStyle::Adjacent => v.swing_neighbours(token, self.head_dim, row, back),
                    RopeStyle::Halves => v.swing_halves(token, self.head_dim, row, back),
                }
            }
        });
    }
}

multiversion! {
    fn swing_neighbours(x: &mut [f32], head_dim: usize, row: &[f32], back: bool) = neighbours_body;
    fn swing_halves(x: &mut [f32], head_dim: usize, row: &[f32], back: bool) = halves_body;
}

#[inline(always)]
fn neighbours_body<L: Lanes>(_: L, x: &mut [f32], head_dim: usize, row: &[f32], back: bool) {
    let (cosines, sines) = row.split_at(row.len() / 2);
    let sign = if back { -1.0 } else { 1.0 };
    for head in x.chunks_exact_mut(head_dim) {
        let (pairs, _) = head[..row.len()].as_chunks_mut::<2>();
        for (pair, (c, s)) in pairs.iter_mut().zip(cosines.iter().zip(sines)) {
            let ([a, b], s) = (*pair, sign * s);
            *pair = [a * c - b * s, a * s + b * c];
        }
    }
}

#[inline(always)]
fn halves_body<L: Lanes>(_: L, x: &mut [f32], head_dim: usize, row: &[f32], back: bool) {
    let (cosines, sines) = row.split_at(row.len() / 2);
    let sign = if back { -1.0 } else { 1.0 };
    for head in x.chunks_exact_mut(head_dim) {
        let (low, high) = head[..row.len()].split_at_mut(row.len() / 2);
        for ((a, b), (c, s)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
            let s = sign * s;
            (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{agree, differences, every_machine, same_bits, weighted, wide};
    use super::*;
    use crate::cpu::vector::testing::Random;

    const FACTORS: [f32; 4] = [1.0, 1.5, 2.0, 4.0];

    /// Every variant that a run has: styles, partial turns, linear scaling, Llama 3's factors.
    fn variants() -> Vec<RopeParams<'static>> {
        let mut all = Vec::new();
        for style in [RopeStyle::Adjacent, RopeStyle::Halves] {
            let plain = RopeParams {
                style,
                head_dim: 8,
                n_rot: 8,
                base: 50.0,
                linear_factor: 1.0,
                freq_factors: None,
            };
            let partial = RopeParams {
                head_dim: 19,
                ..plain
            };
            let scaled = RopeParams {
                linear_factor: 2.5,
                ..plain
            };
            let freq_factors = Some(&FACTORS[..]);
            let llama3 = RopeParams {
                freq_factors,
                ..plain
            };
            all.extend([plain, partial, scaled, llama3]);
        }
        all
    }

    /// Forward in double precision: (tokens, heads, head_dim).
    fn reference(params: &RopeParams<'_>, positions: &[u32], x: &[f64]) -> Vec<f64> {
        let (dim, n) = (params.head_dim, params.n_rot);
        let heads = x.len() / dim / positions.len();
        let mut out = x.to_vec();
        for (index, head) in out.chunks_exact_mut(dim).enumerate() {
            for i in 0..n / 2 {
                let power = f64::from(params.base).powf(-2.0 * i as f64 / n as f64);
                let factor = params.freq_factors.map_or(1.0, |f| f64::from(f[i]));
                let angle = f64::from(positions[index / heads]) * power
                    / f64::from(params.linear_factor)
                    / factor;
                let (j, k) = match params.style {
                    RopeStyle::Adjacent => (2 * i, 2 * i + 1),
                    RopeStyle::Halves => (i, i + n / 2),
                };
                let (a, b) = (head[j], head[k]);
                head[j] = a * angle.cos() - b * angle.sin();
                head[k] = a * angle.sin() + b * angle.cos();
            }
        }
        out
    }

    #[test]
    fn forward_is_that_of_a_run_and_backward_is_its_gradient() {
        // Two sequences, one of which doesn't start at its first position.
        let positions = [0, 1, 2, 3, 9, 10, 11];
        every_machine(|team, v| {
            let mut random = Random(5);
            for params in variants() {
                let angles = Angles::new(&params, 12).unwrap();
                let len = positions.len() * 3 * params.head_dim;
                let (x, dy) = (random.floats(len, 1.0), random.floats(len, 1.0));
                let (mut y, mut plain) = (x.clone(), x.clone());
                angles.turn(team, v, &positions, &mut y, Direction::Forward);
                let rope = Rope::new(&params).unwrap();
                let mut row = vec![0.0; rope.row_len()];
                let tokens = plain.chunks_exact_mut(3 * params.head_dim);
                for (token, position) in tokens.zip(positions) {
                    rope.fill(position as usize, &mut row);
                    rope.apply(v, &row, token);
                }
                assert_eq!(y, plain);
                let mut dx = dy.clone();
                angles.turn(team, v, &positions, &mut dx, Direction::Backward);
                let loss = |x: &[f64]| weighted(&reference(&params, &positions, x), &dy);
                agree(&dx, &differences(&wide(&x), loss), 1e-6, "dx");
            }
        });
    }

    #[test]
    fn threads_do_not_matter() {
        same_bits(|team, v| {
            let mut random = Random(6);
            let params = variants()[1];
            let positions: Vec<u32> = (0..500).collect();
            let angles = Angles::new(&params, 500).unwrap();
            let mut x = random.floats(500 * 4 * params.head_dim, 1.0);
            angles.turn(team, v, &positions, &mut x, Direction::Backward);
            x
        });
    }
}
