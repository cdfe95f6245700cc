//! The backward pass.

use super::tile::{Head, Tile, across};
use super::{AttentionShape, QUERIES, longest};
use crate::cpu::vector::Vector;
use crate::tune::lent::Lent;
use crate::tune::ops::rows_per_chunk;
use crate::tune::team::{Sheet, Team};

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
    let dim = shape.head_dim;
    // Each query head's own sums, (heads, tokens, head_dim).
    let (dk, scratch) = scratch.split_at_mut(q.len());
    let (dv, scratch) = scratch.split_at_mut(q.len());
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
            let mut chunk = Chunk {
                v,
                shape,
                buffers: Buffers::cut(scratch, shape),
                queries: Head::of(shape.heads, head, dim, start),
                keys: Head::of(shape.kv_heads, head / shape.group(), dim, start),
                dk,
                dv,
            };
            chunk.dk.fill(0.0);
            chunk.dv.fill(0.0);
            for tile in 0..len.div_ceil(QUERIES) {
                // SAFETY: this head's queries of this sequence are this chunk's alone.
                unsafe { chunk.tile(Tile::of(shape, tile, len), &q, k, values, d_o) };
            }
        });
    }
    let row = shape.kv_heads * dim;
    let sheets = [k, values].map(|data| Sheet { data, row });
    let per = rows_per_chunk(shape.heads * dim);
    team.rows(sheets, per, |first, [k, values], _| {
        for (out, heads) in [(k, &*dk), (values, &*dv)] {
            for (i, out) in out.chunks_exact_mut(dim).enumerate() {
                let (token, kv_head) = (first + i / shape.kv_heads, i % shape.kv_heads);
                let part = |head: usize| &heads[(head * tokens + token) * dim..][..dim];
                let first_head = kv_head * shape.group();
                out.copy_from_slice(part(first_head));
                for head in first_head + 1..first_head + shape.group() {
                    v.add_assign(out, part(head));
                }
            }
        }
    });
}

/// One query head of one sequence.
struct Chunk<'a> {
    v: Vector,
    shape: &'a AttentionShape,
    buffers: Buffers<'a>,
    queries: Head,
    keys: Head,
    /// Sums of the keys' gradients: (tokens of the sequence, head_dim)
    dk: &'a mut [f32],
    /// Sums of the values' gradients: (tokens of the sequence, head_dim)
    dv: &'a mut [f32],
}

impl Chunk<'_> {
    /// One tile: adds to the sums, turns the queries into their gradients.
    ///
    /// # Safety
    /// Nobody else uses this head's queries of this sequence.
    unsafe fn tile(
        &mut self,
        tile: Tile,
        q: &Lent<'_, f32>,
        k: &[f32],
        values: &[f32],
        d_o: &[f32],
    ) {
        let (v, shape, dim, b) = (self.v, self.shape, self.shape.head_dim, &mut self.buffers);
        let place = |i: usize| self.queries.at(tile.first + i);
        b.q[tile.count * dim..].fill(0.0);
        b.d_o[tile.count * dim..].fill(0.0);
        for i in 0..tile.count {
            let row = i * dim..(i + 1) * dim;
            // SAFETY: as the caller vouches; the part ends with the statement.
            b.q[row.clone()].copy_from_slice(unsafe { q.part(place(i), dim) });
            b.d_o[row].copy_from_slice(&d_o[place(i)..][..dim]);
        }
        v.scale(b.q, shape.scale);
        across(QUERIES, dim, 1.0, |i| &b.q[i * dim..][..dim], b.q_turned);
        across(
            QUERIES,
            dim,
            1.0,
            |i| &b.d_o[i * dim..][..dim],
            b.d_o_turned,
        );
        let from = self.keys.at(tile.oldest);
        let (k, values) = (&k[from..], &values[from..]);
        let own = tile.oldest * dim..;
        let (dk, dv) = (&mut self.dk[own.clone()], &mut self.dv[own]);
        let len = tile.keys() * QUERIES;
        let (p, dp) = (&mut b.p[..len], &mut b.dp[..len]);
        tile.dots(v, shape, k, b.q_turned, p);
        tile.mask(shape, p);
        let mut factors = [0.0; QUERIES];
        v.soften(p, &mut factors);
        v.scale_queries(p, &factors);
        tile.scatter(v, shape, p, b.d_o, dv);
        tile.dots(v, shape, values, b.d_o_turned, dp);
        v.score_gradients(p, dp);
        tile.scatter(v, shape, dp, b.q, dk);
        tile.gather(v, shape, dp, k, b.dq);
        for i in 0..tile.count {
            // SAFETY: as above.
            let dq = unsafe { q.part(place(i), dim) };
            dq.copy_from_slice(&b.dq[i * dim..][..dim]);
            v.scale(dq, shape.scale);
        }
    }
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
