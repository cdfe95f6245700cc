//! How a job is cut into units, and what memory a unit needs.

use super::AttendJob;
use crate::cpu::vector::lanes::LANES_MAX;
use crate::run::kv::BLOCK;

/// Query rows (tokens times heads) of a unit, at most, unless one token has more heads.
pub(super) const ROWS_MAX: usize = 96;
/// Rows of a micro-kernel.
pub(super) const CHUNK: usize = 6;

/// Floats of scratch that a unit needs, for query heads in groups of `group` per KV head. The same for
/// any context, batch and instruction set.
#[must_use]
pub const fn scratch_floats(head_dim: usize, group: usize) -> usize {
    let rows = if group > ROWS_MAX { group } else { ROWS_MAX };
    Scratch::sizes(head_dim, rows).0
}

/// The parts of a unit's scratch.
pub(super) struct Scratch {
    /// Scaled queries, (rows, head_dim).
    pub q: *mut f32,
    /// Outputs before division, (rows, width).
    pub sums: *mut f32,
    /// Largest score so far, (rows).
    pub tops: *mut f32,
    /// Sums of weights, one a lane, (rows, LANES_MAX).
    pub totals: *mut f32,
    /// Scores, then weights, of one chunk and one block, (CHUNK, BLOCK).
    pub weights: *mut f32,
    /// Keys of a block, (head_dim, BLOCK).
    pub keys: *mut f32,
    /// Values of a block, (BLOCK, width).
    pub values: *mut f32,
    /// Scales of q8_0 keys and values, (2, head_dim / 32, BLOCK).
    pub scales: *mut f32,
}

impl Scratch {
    const fn sizes(head_dim: usize, rows: usize) -> (usize, [usize; 7]) {
        let width = head_dim.next_multiple_of(LANES_MAX);
        // Multiples of 16 floats first, so that an aligned scratch keeps them aligned.
        let sizes = [
            BLOCK * head_dim,
            BLOCK * width,
            2 * (head_dim / 32) * BLOCK,
            CHUNK * BLOCK,
            rows * width,
            rows * LANES_MAX,
            rows,
        ];
        let mut total = rows * head_dim;
        let mut i = 0;
        while i < sizes.len() {
            total += sizes[i];
            i += 1;
        }
        (total, sizes)
    }

    /// Cut up a scratch for `rows` rows.
    ///
    /// # Panics
    /// It is smaller than [`scratch_floats`].
    pub fn cut(scratch: &mut [f32], head_dim: usize, rows: usize) -> Self {
        let (total, sizes) = Self::sizes(head_dim, rows);
        assert!(
            scratch.len() >= total,
            "attention scratch of {} floats, {total} needed",
            scratch.len()
        );
        let mut rest = scratch.as_mut_ptr();
        let mut next = |size: usize| {
            let part = rest;
            // SAFETY: the sizes add up to at most the length, as was just checked.
            rest = unsafe { rest.add(size) };
            part
        };
        Self {
            keys: next(sizes[0]),
            values: next(sizes[1]),
            scales: next(sizes[2]),
            weights: next(sizes[3]),
            sums: next(sizes[4]),
            totals: next(sizes[5]),
            tops: next(sizes[6]),
            q: next(0),
        }
    }
}

/// The units of a job: tiles of tokens, times KV heads, times parts of the heads that share one.
pub(super) struct Cut {
    tokens: usize,
    tile: usize,
    kv_heads: usize,
    group: usize,
    /// Heads of a part.
    part: usize,
}

/// One unit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Unit {
    pub kv_head: usize,
    /// Query heads, `heads.0 .. heads.0 + heads.1`.
    pub heads: (usize, usize),
    /// Tokens of the batch, `tokens.0 .. tokens.0 + tokens.1`.
    pub tokens: (usize, usize),
}

impl AttendJob<'_> {
    pub(super) fn cut(&self) -> Cut {
        let kv_heads = self.kv.layout().kv_heads();
        let group = self.heads / kv_heads;
        // Heads of a group share the loading of keys and values; give that up only for want of units.
        let tiles = self.tokens.div_ceil((ROWS_MAX / group).max(1)).max(1);
        let parts = self.threads.div_ceil(kv_heads * tiles).clamp(1, group);
        let part = group.div_ceil(parts);
        Cut {
            tokens: self.tokens,
            tile: (ROWS_MAX / part).max(1),
            kv_heads,
            group,
            part,
        }
    }
}

impl Cut {
    fn parts(&self) -> usize {
        self.group.div_ceil(self.part)
    }

    pub fn units(&self) -> usize {
        self.tokens.div_ceil(self.tile) * self.kv_heads * self.parts()
    }

    /// Unit `index`. Tiles come last first: the last has the longest context.
    pub fn unit(&self, index: usize) -> Unit {
        assert!(index < self.units(), "a unit of the job");
        let (rest, part) = (index / self.parts(), index % self.parts());
        let (tile, kv_head) = (rest / self.kv_heads, rest % self.kv_heads);
        let first = (self.tokens.div_ceil(self.tile) - 1 - tile) * self.tile;
        let head = part * self.part;
        Unit {
            kv_head,
            heads: (
                kv_head * self.group + head,
                self.part.min(self.group - head),
            ),
            tokens: (first, self.tile.min(self.tokens - first)),
        }
    }
}
