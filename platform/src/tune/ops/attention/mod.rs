//! Causal attention of packed sequences, forward and backward, from queries and keys that are turned
//! already.
//!
//! Scores of [`QUERIES`] queries of one head against all keys they see are in scratch at once, keys down,
//! queries across: a softmax runs down the columns, many queries a vector, and every product takes keys,
//! values and gradients as they lie. Memory beside inputs and outputs is O(tokens) a thread.
//!
//! The backward pass computes the weights again from the queries and keys that it is given, sums
//! included, so that they add up to one even where queries and keys come from quantized storage; neither
//! outputs nor log-sum-exps are needed. Gradients of keys and values are summed a query head at a time
//! into scratch and added over the heads of a group in order: threads don't matter.

mod product;
mod soft;
#[cfg(test)]
mod tests;

use super::lent::Lent;
use super::rows_per_chunk;
use crate::cpu::vector::Vector;
use crate::tune::team::{Sheet, Team};
use product::{Left, Right, Sum};

/// Queries of a tile: a multiple of every vector's floats.
const QUERIES: usize = 32;

/// Sizes of a layer's attention.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct AttentionShape {
    /// Query heads: a multiple of `kv_heads`. Head `h` uses keys and values `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// A token at `t` sees the positions `p <= t` with `t - p < window`; `None` for all.
    pub window: Option<usize>,
    /// Scores are multiplied by it.
    pub scale: f32,
}

impl AttentionShape {
    /// Floats of scratch that [`attention`] needs for sequences of up to `longest` tokens.
    pub fn forward_floats(&self, longest: usize, threads: usize) -> usize {
        threads * (self.keys_max(longest) * QUERIES + 2 * self.tile())
    }

    /// Floats of scratch that [`attention_backward`] needs for a batch of `tokens` tokens in sequences of
    /// up to `longest`.
    pub fn backward_floats(&self, tokens: usize, longest: usize, threads: usize) -> usize {
        let thread = 2 * self.keys_max(longest) * QUERIES + 5 * self.tile();
        2 * tokens * self.heads * self.head_dim + threads * thread
    }

    /// Keys that the queries of a tile see together.
    fn keys_max(&self, longest: usize) -> usize {
        self.window
            .map_or(longest, |window| (window + QUERIES - 1).min(longest))
    }

    /// Floats of a tile's queries.
    fn tile(&self) -> usize {
        QUERIES * self.head_dim
    }

    /// The first position that a token at `position` sees.
    fn oldest(&self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }

    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Tokens of the batch; panics unless all lengths agree.
    fn check(&self, segments: &[(usize, usize)], q: &[f32], k: &[f32], values: &[f32]) -> usize {
        assert!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads) && self.head_dim > 0,
            "query heads come in groups, one a KV head"
        );
        assert!(self.window != Some(0), "a window holds at least the token");
        let tokens = segments.iter().fold(0, |tokens, (start, len)| {
            assert_eq!(*start, tokens, "sequences follow each other");
            tokens + len
        });
        assert_eq!(q.len(), tokens * self.heads * self.head_dim, "queries");
        assert_eq!(k.len(), tokens * self.kv_heads * self.head_dim, "keys");
        assert_eq!(values.len(), k.len(), "values");
        tokens
    }
}

/// Forward: `o = softmax(scale q k^T) v`, each sequence by itself.
///
/// Shapes: `q`, `o` (tokens, heads, head_dim), `k`, `values` (tokens, kv_heads, head_dim), `segments`
/// (start, tokens) of the sequences, which fill the batch in order; `scratch`
/// ([`AttentionShape::forward_floats`]), of any content.
///
/// # Panics
/// The lengths disagree, or the scratch is too short.
#[allow(clippy::too_many_arguments)]
pub fn attention(
    team: &Team,
    v: Vector,
    shape: &AttentionShape,
    segments: &[(usize, usize)],
    q: &[f32],
    k: &[f32],
    values: &[f32],
    o: &mut [f32],
    scratch: &mut [f32],
) {
    shape.check(segments, q, k, values);
    assert_eq!(o.len(), q.len(), "as many outputs as queries");
    let longest = longest(segments);
    let share = shape.forward_floats(longest, 1);
    assert!(scratch.len() >= share * team.threads(), "enough scratch");
    let (o, scratch) = (Lent::new(o), Lent::new(scratch));
    let chunks: usize = segments.iter().map(|(_, len)| len.div_ceil(QUERIES)).sum();
    let (dim, width) = (shape.head_dim, shape.heads * shape.head_dim);
    team.each(chunks * shape.heads, &|chunk, thread| {
        let (head, mut left) = (chunk % shape.heads, chunk / shape.heads);
        let segment = segments.iter().find(|(_, len)| {
            let tiles = len.div_ceil(QUERIES);
            let found = left < tiles;
            left -= if found { 0 } else { tiles };
            found
        });
        let (start, len) = *segment.expect("a tile of a sequence");
        // The last queries see the most keys: they go first.
        let tile = len.div_ceil(QUERIES) - 1 - left;
        // SAFETY: a thread runs one chunk at a time.
        let scratch = unsafe { scratch.part(thread * share, share) };
        let (turned, scratch) = scratch.split_at_mut(shape.tile());
        let (sums, scores) = scratch.split_at_mut(shape.tile());
        let at = Tile::of(shape, tile, len);
        at.queries(q, start, width, head * dim, shape.scale, dim, None, turned);
        let scores = &mut scores[..at.keys() * QUERIES];
        let first_key = (start + at.oldest) * shape.kv_heads + head / shape.group();
        let (keys, values) = (&k[first_key * dim..], &values[first_key * dim..]);
        at.dots(v, shape, keys, turned, scores);
        at.mask(shape, scores);
        let mut factors = [0.0; QUERIES];
        v.soften(scores, &mut factors);
        at.gather(v, shape, scores, values, sums);
        for (i, sums) in sums.chunks_exact(dim).take(at.count).enumerate() {
            // SAFETY: this token's and head's output is this chunk's alone.
            let o = unsafe { o.part((start + at.first + i) * width + head * dim, dim) };
            o.copy_from_slice(sums);
            v.scale(o, factors[i]);
        }
    });
}

/// Backward in place: `q`, `k` and `values` become their gradients, given the outputs' gradient `d_o`.
///
/// Shapes as in [`attention`], `d_o` as `q`; `scratch` ([`AttentionShape::backward_floats`]), of any content.
///
/// # Panics
/// The lengths disagree, or the scratch is too short.
#[allow(clippy::too_many_arguments)]
pub fn attention_backward(
    team: &Team,
    v: Vector,
    shape: &AttentionShape,
    segments: &[(usize, usize)],
    q: &mut [f32],
    k: &mut [f32],
    values: &mut [f32],
    d_o: &[f32],
    scratch: &mut [f32],
) {
    let tokens = shape.check(segments, q, k, values);
    assert_eq!(d_o.len(), q.len(), "as many outputs as queries");
    let longest = longest(segments);
    let needed = shape.backward_floats(tokens, longest, team.threads());
    assert!(scratch.len() >= needed, "enough scratch");
    let (dim, width) = (shape.head_dim, shape.heads * shape.head_dim);
    // Each query head's own sums, (heads, tokens, head_dim).
    let (dk, scratch) = scratch.split_at_mut(tokens * width);
    let (dv, scratch) = scratch.split_at_mut(tokens * width);
    {
        let share = shape.backward_floats(0, longest, 1);
        let (q, scratch) = (Lent::new(q), Lent::new(scratch));
        let (dk, dv) = (Lent::new(dk), Lent::new(dv));
        let (k, values) = (&*k, &*values);
        team.each(segments.len() * shape.heads, &|chunk, thread| {
            let (head, (start, len)) = (chunk % shape.heads, segments[chunk / shape.heads]);
            let own = (head * tokens + start) * dim;
            // SAFETY: a thread runs one chunk at a time; a head's sums of a sequence are its chunk's.
            let (scratch, dk, dv) = unsafe {
                (
                    scratch.part(thread * share, share),
                    dk.part(own, len * dim),
                    dv.part(own, len * dim),
                )
            };
            dk.fill(0.0);
            dv.fill(0.0);
            let first_key = start * shape.kv_heads + head / shape.group();
            // No tokens, no keys.
            let (k, values) = (
                k.get(first_key * dim..).unwrap_or(&[]),
                values.get(first_key * dim..).unwrap_or(&[]),
            );
            let mut buffers = Buffers::cut(scratch, shape);
            for tile in 0..len.div_ceil(QUERIES) {
                let at = Tile::of(shape, tile, len);
                let place = |i: usize| (start + at.first + i) * width + head * dim;
                for i in 0..at.count {
                    // SAFETY: this token's and head's queries are this chunk's alone.
                    let q = unsafe { q.part(place(i), dim) };
                    buffers.q[i * dim..(i + 1) * dim].copy_from_slice(q);
                }
                at.queries(
                    d_o,
                    start,
                    width,
                    head * dim,
                    1.0,
                    dim,
                    Some(buffers.d_o),
                    buffers.d_o_turned,
                );
                let dq = at.back(v, shape, &mut buffers, k, values, dk, dv);
                for (i, dq) in dq.chunks_exact(dim).take(at.count).enumerate() {
                    // SAFETY: as above.
                    let q = unsafe { q.part(place(i), dim) };
                    q.copy_from_slice(dq);
                    v.scale(q, shape.scale);
                }
            }
        });
    }
    let kv_width = shape.kv_heads * dim;
    let sheets = [k, values].map(|data| Sheet {
        data,
        row: kv_width,
    });
    team.rows(sheets, rows_per_chunk(width), |first, [k, values], _| {
        for (out, heads) in [(k, &*dk), (values, &*dv)] {
            for (i, out) in out.chunks_exact_mut(dim).enumerate() {
                let (token, kv_head) = (first + i / shape.kv_heads, i % shape.kv_heads);
                let mut head = kv_head * shape.group();
                let part = |head: usize| &heads[(head * tokens + token) * dim..][..dim];
                out.copy_from_slice(part(head));
                for _ in 1..shape.group() {
                    head += 1;
                    v.add_assign(out, part(head));
                }
            }
        }
    });
}

fn longest(segments: &[(usize, usize)]) -> usize {
    segments.iter().map(|(_, len)| *len).max().unwrap_or(0)
}

/// A thread's scratch of the backward pass.
struct Buffers<'a> {
    /// Queries, scaled once in use: (QUERIES, head_dim)
    q: &'a mut [f32],
    /// The same across: (head_dim, QUERIES)
    q_turned: &'a mut [f32],
    /// Gradients of outputs: (QUERIES, head_dim)
    d_o: &'a mut [f32],
    /// The same across: (head_dim, QUERIES)
    d_o_turned: &'a mut [f32],
    /// Gradients of queries: (QUERIES, head_dim)
    dq: &'a mut [f32],
    /// Weights: (keys, QUERIES)
    p: &'a mut [f32],
    /// Gradients of weights, then of scores: (keys, QUERIES)
    dp: &'a mut [f32],
}

impl<'a> Buffers<'a> {
    fn cut(scratch: &'a mut [f32], shape: &AttentionShape) -> Self {
        let tile = shape.tile();
        let (q, rest) = scratch.split_at_mut(tile);
        let (q_turned, rest) = rest.split_at_mut(tile);
        let (d_o, rest) = rest.split_at_mut(tile);
        let (d_o_turned, rest) = rest.split_at_mut(tile);
        let (dq, rest) = rest.split_at_mut(tile);
        let (p, dp) = rest.split_at_mut(rest.len() / 2);
        Self {
            q,
            q_turned,
            d_o,
            d_o_turned,
            dq,
            p,
            dp,
        }
    }
}

/// Queries of one head of one sequence, and the keys that they see.
#[derive(Clone, Copy)]
struct Tile {
    /// The first query.
    first: usize,
    /// How many there are, at most [`QUERIES`]; columns beyond are zero and come to nothing.
    count: usize,
    /// The first key that the first query sees.
    oldest: usize,
}

impl Tile {
    fn of(shape: &AttentionShape, tile: usize, len: usize) -> Self {
        let first = tile * QUERIES;
        Self {
            first,
            count: QUERIES.min(len - first),
            oldest: shape.oldest(first),
        }
    }

    /// Keys that any of the queries sees.
    fn keys(&self) -> usize {
        self.first + self.count - self.oldest
    }

    /// Rows of `x` (tokens, width) from column `column` on, `dim` of them, times `factor`: across into
    /// `turned` (dim, QUERIES), and as they are into `plain` (QUERIES, dim).
    #[allow(clippy::too_many_arguments)]
    fn queries(
        &self,
        x: &[f32],
        start: usize,
        width: usize,
        column: usize,
        factor: f32,
        dim: usize,
        plain: Option<&mut [f32]>,
        turned: &mut [f32],
    ) {
        let row = |i: usize| &x[(start + self.first + i) * width + column..][..dim];
        across(self.count, dim, factor, row, turned);
        if let Some(plain) = plain {
            plain[self.count * dim..].fill(0.0);
            for (i, plain) in plain.chunks_exact_mut(dim).take(self.count).enumerate() {
                plain.copy_from_slice(row(i));
            }
        }
    }

    /// `out[key][query] = x[key] . turned[..][query]`.
    fn dots(&self, v: Vector, shape: &AttentionShape, x: &[f32], turned: &[f32], out: &mut [f32]) {
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
    fn gather(
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
    fn scatter(
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
    fn mask(&self, shape: &AttentionShape, scores: &mut [f32]) {
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

    /// One tile backward: adds to the sums of keys and values, returns the queries' gradient, not yet
    /// scaled.
    #[allow(clippy::too_many_arguments)]
    fn back<'b>(
        &self,
        v: Vector,
        shape: &AttentionShape,
        buffers: &'b mut Buffers<'_>,
        k: &[f32],
        values: &[f32],
        dk: &mut [f32],
        dv: &mut [f32],
    ) -> &'b [f32] {
        let dim = shape.head_dim;
        let b = buffers;
        b.q[self.count * dim..].fill(0.0);
        v.scale(b.q, shape.scale);
        across(
            QUERIES,
            dim,
            1.0,
            |i| &b.q[i * dim..(i + 1) * dim],
            b.q_turned,
        );
        let from = self.oldest * shape.kv_heads * dim;
        let (k, values) = (&k[from..], &values[from..]);
        let (dk, dv) = (&mut dk[self.oldest * dim..], &mut dv[self.oldest * dim..]);
        let len = self.keys() * QUERIES;
        let (p, dp) = (&mut b.p[..len], &mut b.dp[..len]);
        self.dots(v, shape, k, b.q_turned, p);
        self.mask(shape, p);
        let mut factors = [0.0; QUERIES];
        v.soften(p, &mut factors);
        v.scale_queries(p, &factors);
        self.scatter(v, shape, p, b.d_o, dv);
        self.dots(v, shape, values, b.d_o_turned, dp);
        v.score_gradients(p, dp);
        self.scatter(v, shape, dp, b.q, dk);
        self.gather(v, shape, dp, k, b.dq);
        b.dq
    }
}

/// `turned[d][i] = row(i)[d] * factor`, 0 from `count` on.
fn across<'r>(
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
