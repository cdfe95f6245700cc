//! Causal attention over the KV cache, in one pass over blocks of positions with a running softmax.
//!
//! A job is cut into independent units (a KV head, or part of its queries, times a tile of tokens)
//! that threads may take in any order; the units with the longest context come first.
//!
//! Deterministic: the result of one (token, head) is the same bits whatever batch, tile, ring size or
//! thread it is computed in. Blocks of
//! [`BLOCK`](crate::run::kv::BLOCK) positions start at absolute multiples; each score
//! sums over the head in order, each output over the positions in order; a position that is masked
//! adds exactly nothing.

mod kernel;
mod plan;
mod product;
mod source;
#[cfg(test)]
mod tests;

use crate::cpu::vector::Vector;
use crate::run::kv::KvCache;

pub use plan::scratch_floats;

/// Attention of consecutive tokens in one layer, whose keys and values are already stored.
#[derive(Clone, Copy, Debug)]
pub struct AttendJob<'a> {
    /// The cache that holds positions up to that of the last token.
    pub kv: &'a KvCache,
    /// Layer of the cache.
    pub layer: usize,
    /// Queries after rotary embedding, (tokens, heads, head_dim).
    pub q: &'a [f32],
    /// Query heads: a multiple of the cache's heads. Query head `h` uses KV head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// How many tokens.
    pub tokens: usize,
    /// Position of the first token.
    pub first_position: usize,
    /// A token at `t` sees the positions `p <= t` with `t - p < window`; `None` for all.
    pub window: Option<usize>,
    /// Scores are multiplied by it: usually `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Scores become `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Threads that will share the units. Only changes how a job is cut, never its result.
    pub threads: usize,
}

impl AttendJob<'_> {
    /// How many units there are to be computed.
    #[must_use]
    pub fn units(&self) -> usize {
        self.cut().units()
    }

    /// Compute every unit on this thread.
    ///
    /// Shapes: `out` (tokens, heads, head_dim), `scratch` ([`scratch_floats`]).
    ///
    /// # Panics
    /// A length is wrong, or the cache no longer holds the positions that the tokens see.
    pub fn attend_all(&self, vector: Vector, out: &mut [f32], scratch: &mut [f32]) {
        assert_eq!(out.len(), self.q.len(), "as many outputs as queries");
        for unit in 0..self.units() {
            // SAFETY: `out` has the shape of the queries and is ours alone.
            unsafe { self.attend(vector, unit, out.as_mut_ptr(), scratch) };
        }
    }

    /// Compute one unit. Allocates nothing; other threads may compute other units meanwhile.
    ///
    /// Shapes: `out` (tokens, heads, head_dim), of which a unit writes its own part; `scratch`
    /// ([`scratch_floats`]), this thread's own, of any content.
    ///
    /// # Safety
    /// `out` has room for as many floats as `q` has. While this runs, no other thread computes the
    /// same unit, uses its part of `out`, or stores into this layer of the cache.
    ///
    /// # Panics
    /// A length is wrong, there is no such unit, or the cache no longer holds the positions that the
    /// tokens see.
    pub unsafe fn attend(&self, vector: Vector, unit: usize, out: *mut f32, scratch: &mut [f32]) {
        self.check();
        // SAFETY: the job was checked; the caller vouches for `out` and the cache.
        unsafe { vector.attend_unit(self, unit, out, scratch) }
    }

    /// Panics unless the job makes sense.
    fn check(&self) {
        let layout = self.kv.layout();
        assert!(
            self.heads > 0 && self.heads.is_multiple_of(layout.kv_heads()),
            "query heads come in groups, one a KV head"
        );
        assert_eq!(
            self.q.len(),
            self.tokens * self.heads * layout.head_dim(),
            "queries of every token and head"
        );
        assert!(self.window != Some(0), "a window holds at least the token");
        if self.tokens > 0 {
            let last = self.first_position + self.tokens - 1;
            let oldest = self.oldest(self.first_position);
            assert!(
                last - oldest < layout.capacity(self.layer),
                "the cache still holds every position that is seen"
            );
        }
    }

    /// The first position that a token at `position` sees.
    fn oldest(&self, position: usize) -> usize {
        self.window
            .map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

impl Vector {
    /// # Safety
    /// As for [`AttendJob::attend`]; the job was checked.
    unsafe fn attend_unit(
        self,
        job: &AttendJob<'_>,
        unit: usize,
        out: *mut f32,
        scratch: &mut [f32],
    ) {
        self.attend_on(job, unit, Out(out), scratch);
    }
}

/// Where a unit writes. Made only in `attend_unit`, whose caller vouches for it.
#[derive(Clone, Copy)]
struct Out(*mut f32);

crate::cpu::vector::multiversion! {
    fn attend_on(job: &AttendJob<'_>, unit: usize, out: Out, scratch: &mut [f32]) = kernel::unit;
}
