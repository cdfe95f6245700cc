//! Queries of one head of one sequence, the keys that they see, and the products between them.

use super::product::{Left, Right, Sum};
use super::{AttentionShape, QUERIES};
use crate::cpu::vector::Vector;

/// Where the rows of one head of one sequence lie in (tokens, heads, head_dim).
#[derive(Clone, Copy)]
pub(super) struct Head {
    first: usize,
    width: usize,
}

impl Head {
    /// Head `head` of `heads` from token `start` on.
    pub(super) fn of(heads: usize, head: usize, dim: usize, start: usize) -> Self {
        Self {
            first: (start * heads + head) * dim,
            width: heads * dim,
        }
    }

    /// The float at which a token's row starts.
    pub(super) fn at(&self, token: usize) -> usize {
        self.first + token * self.width
    }
}

/// Up to [`QUERIES`] queries, and the keys that any of them sees.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// The first query.
    pub first: usize,
    /// How many there are; columns beyond are zero and come to nothing.
    pub count: usize,
    /// The first key that the first query sees.
    pub oldest: usize,
}

impl Tile {
    /// Tile number `tile` of a sequence of `len` tokens.
    pub(super) fn of(shape: &AttentionShape, tile: usize, len: usize) -> Self {
        let first = tile * QUERIES;
        Self {
            first,
            count: QUERIES.min(len - first),
            oldest: shape.oldest(first),
        }
    }

    /// Keys that any of the queries sees.
    pub(super) fn keys(&self) -> usize {
        self.first + self.count - self.oldest
    }

    /// `out[key][query] = x[key] . turned[..][query]`.
    pub(super) fn dots(
        &self,
        v: Vector,
        shape: &AttentionShape,
        x: &[f32],
        turned: &[f32],
        out: &mut [f32],
    ) {
        let left = Left {
            data: x,
            rows: self.keys(),
            depth: shape.head_dim,
            row_stride: shape.kv_heads * shape.head_dim,
            depth_stride: 1,
        };
        let right = Right {
            data: turned,
            columns: QUERIES,
            stride: QUERIES,
        };
        v.product(left, right, Sum::new(out, QUERIES), false);
    }

    /// `out[query] = sum over keys of weights[key][query] * x[key]`.
    pub(super) fn gather(
        &self,
        v: Vector,
        shape: &AttentionShape,
        weights: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) {
        let left = Left {
            data: weights,
            rows: QUERIES,
            depth: self.keys(),
            row_stride: 1,
            depth_stride: QUERIES,
        };
        let right = Right {
            data: x,
            columns: shape.head_dim,
            stride: shape.kv_heads * shape.head_dim,
        };
        v.product(left, right, Sum::new(out, shape.head_dim), false);
    }

    /// `out[key] += sum over queries of weights[key][query] * x[query]`.
    pub(super) fn scatter(
        &self,
        v: Vector,
        shape: &AttentionShape,
        weights: &[f32],
        x: &[f32],
        out: &mut [f32],
    ) {
        let left = Left {
            data: weights,
            rows: self.keys(),
            depth: QUERIES,
            row_stride: QUERIES,
            depth_stride: 1,
        };
        let right = Right {
            data: x,
            columns: shape.head_dim,
            stride: shape.head_dim,
        };
        v.product(left, right, Sum::new(out, shape.head_dim), true);
    }

    /// Keys that a query doesn't see score minus infinity.
    pub(super) fn mask(&self, shape: &AttentionShape, scores: &mut [f32]) {
        for (i, row) in scores.chunks_exact_mut(QUERIES).enumerate() {
            let key = self.oldest + i;
            // Queries before the key.
            let before = key.saturating_sub(self.first).min(self.count);
            row[..before].fill(f32::NEG_INFINITY);
            // Queries whose window has passed it.
            if let Some(window) = shape.window {
                let after = (key + window).saturating_sub(self.first);
                if after < self.count {
                    row[after..self.count].fill(f32::NEG_INFINITY);
                }
            }
        }
    }
}

/// `turned[d][i] = row(i)[d] * factor`, 0 from `count` on.
pub(super) fn across<'r>(
    count: usize,
    dim: usize,
    factor: f32,
    row: impl Fn(usize) -> &'r [f32],
    turned: &mut [f32],
) {
    for i in 0..count {
        let row = row(i);
        for d in 0..dim {
            turned[d * QUERIES + i] = row[d] * factor;
        }
    }
    if count < QUERIES {
        for turned in turned.chunks_exact_mut(QUERIES) {
            turned[count..].fill(0.0);
        }
    }
}
