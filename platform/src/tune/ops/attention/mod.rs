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

mod backward;
mod forward;
mod product;
mod soft;
#[cfg(test)]
mod tests;
mod tile;

pub use backward::attention_backward;
pub use forward::attention;

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

/// Tokens of the longest sequence.
fn longest(segments: &[(usize, usize)]) -> usize {
    segments.iter().map(|(_, len)| *len).max().unwrap_or(0)
}
