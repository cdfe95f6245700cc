//! The forward pass.

use super::tile::{Head, Tile, across};
use super::{AttentionShape, QUERIES, longest};
use crate::cpu::vector::Vector;
use crate::tune::lent::Lent;
use crate::tune::team::Team;

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
    let dim = shape.head_dim;
    let tiles = |len: usize| len.div_ceil(QUERIES);
    let all: usize = segments.iter().map(|(_, len)| tiles(*len)).sum();
    team.each(all * shape.heads, &|chunk, thread| {
        let (head, mut left) = (chunk % shape.heads, chunk / shape.heads);
        let mut sequences = segments.iter();
        let (start, len) = loop {
            let (start, len) = *sequences.next().expect("a tile of a sequence");
            if left < tiles(len) {
                break (start, len);
            }
            left -= tiles(len);
        };
        // The last queries see the most keys: they go first.
        let tile = Tile::of(shape, tiles(len) - 1 - left, len);
        // SAFETY: a thread runs one chunk at a time.
        let scratch = unsafe { scratch.part(thread * share, share) };
        let (turned, scratch) = scratch.split_at_mut(shape.tile());
        let (sums, scores) = scratch.split_at_mut(shape.tile());
        let scores = &mut scores[..tile.keys() * QUERIES];
        let queries = Head::of(shape.heads, head, dim, start);
        let row = |i: usize| &q[queries.at(tile.first + i)..][..dim];
        across(tile.count, dim, shape.scale, row, turned);
        let keys = Head::of(shape.kv_heads, head / shape.group(), dim, start).at(tile.oldest);
        tile.dots(v, shape, &k[keys..], turned, scores);
        tile.mask(shape, scores);
        let mut factors = [0.0; QUERIES];
        v.soften(scores, &mut factors);
        tile.gather(v, shape, scores, &values[keys..], sums);
        for (i, sums) in sums.chunks_exact(dim).take(tile.count).enumerate() {
            // SAFETY: this token's and head's output is this chunk's alone.
            let o = unsafe { o.part(queries.at(tile.first + i), dim) };
            o.copy_from_slice(sums);
            v.scale(o, factors[i]);
        }
    });
}
