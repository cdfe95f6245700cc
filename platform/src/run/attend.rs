//! Attention of a pass: rotary tables, the KV cache, and the units that threads share out.

use std::fmt;

use leanstream_core::plan::{self, Hyper};

use super::buffers::Buffers;
use super::cells::Cells;
use super::kv::{KvCache, KvError, KvLayout, KvType, ring_capacity};
use super::pass::{Shared, own, see};
use super::rope::{Rope, RopeError, RopeParams};
use crate::cpu::attention::{AttendJob, scratch_floats};

/// The cache of all layers, and the angles of the running batch.
pub struct Attention {
    cache: KvCache,
    /// For layers with full attention, then for those with a sliding window.
    ropes: [Rope; 2],
    /// Cosines and sines of the batch's positions `(2, batch, rope_dims)`.
    table: Cells<f32>,
    batch: usize,
}

impl Attention {
    /// A cache of `context` positions for batches of up to `batch` tokens.
    ///
    /// # Errors
    /// A head that the cache's type can't hold, or sizes beyond the address space.
    pub fn new(
        hyper: &Hyper,
        context: u32,
        batch: u32,
        kv_type: KvType,
        rope_factors: Option<&[f32]>,
    ) -> Result<Self, AttentionError> {
        let layout = layout(hyper, context, batch, kv_type).map_err(AttentionError::Cache)?;
        let region = vec![0u8; layout.bytes()];
        let rope = |rope: &plan::Rope| {
            Rope::new(&RopeParams {
                style: hyper.rope_style,
                head_dim: hyper.head_dim as usize,
                n_rot: hyper.rope_dims as usize,
                base: rope.base,
                linear_factor: rope.scale,
                freq_factors: rope_factors,
            })
        };
        Ok(Self {
            cache: KvCache::new(layout, region).map_err(AttentionError::Cache)?,
            ropes: [
                rope(&hyper.rope).map_err(AttentionError::Rope)?,
                rope(&hyper.rope_local).map_err(AttentionError::Rope)?,
            ],
            table: Cells::new(2 * batch as usize * hyper.rope_dims as usize),
            batch: batch as usize,
        })
    }

    /// Bytes of [`Attention::new`]; `None` where the cache is impossible.
    pub fn bytes(hyper: &Hyper, context: u32, batch: u32, kv_type: KvType) -> Result<u64, KvError> {
        let table = 2 * u64::from(batch) * u64::from(hyper.rope_dims) * 4;
        Ok(layout(hyper, context, batch, kv_type)?.bytes() as u64 + table)
    }

    /// Fills the table for a batch of `tokens` tokens from position `first`.
    pub fn turn_to(&self, first: usize, tokens: usize) {
        for (kind, rope) in self.ropes.iter().enumerate() {
            let width = rope.row_len();
            for token in 0..tokens {
                let at = (kind * self.batch + token) * width;
                rope.fill(first + token, own(&self.table, at..at + width));
            }
        }
    }

    /// Units that attention over `layer` is cut into.
    pub fn units(&self, shared: &Shared, layer: u32) -> usize {
        job(shared, &shared.buffers, layer).units()
    }

    /// One of them; `scratch` is the thread's own.
    pub fn attend(
        &self,
        shared: &Shared,
        buffers: &Buffers,
        layer: u32,
        unit: usize,
        scratch: &mut [f32],
    ) {
        let job = job(shared, buffers, layer);
        let out = &buffers.o;
        assert!(
            out.len() >= job.q.len(),
            "the buffer has room for the batch"
        );
        // SAFETY: the output has room, as just checked; chunks of the task are different units, and
        // nothing is stored while it runs.
        unsafe { job.attend(shared.vector, unit, out.as_ptr(), scratch) }
    }

    /// Floats of a thread's scratch.
    pub fn scratch_floats(hyper: &Hyper) -> usize {
        scratch_floats(
            hyper.head_dim as usize,
            (hyper.heads / hyper.kv_heads) as usize,
        )
    }

    /// Turns one token's queries and keys, and stores its keys and values.
    pub fn store(
        &self,
        shared: &Shared,
        layer: u32,
        token: usize,
        q: &mut [f32],
        k: &mut [f32],
        v: &[f32],
    ) {
        let kind = usize::from(shared.hyper.slides(layer));
        let rope = &self.ropes[kind];
        let at = (kind * self.batch + token) * rope.row_len();
        let row = see(&self.table, at..at + rope.row_len());
        rope.apply(shared.vector, row, q);
        rope.apply(shared.vector, row, k);
        let position = shared.batch.first() + token;
        let heads = 0..shared.hyper.kv_heads as usize;
        // SAFETY: each chunk of the phase stores other positions of this layer, and attention over
        // it runs in a later task.
        unsafe {
            self.cache
                .store_shared(shared.vector, layer as usize, heads, position, k, v)
        }
    }
}

/// Attention of the running batch over one layer.
fn job<'a>(shared: &'a Shared, buffers: &'a Buffers, layer: u32) -> AttendJob<'a> {
    let hyper = &shared.hyper;
    let tokens = shared.batch.tokens();
    AttendJob {
        kv: &shared.attention.cache,
        layer: layer as usize,
        q: see(&buffers.q, 0..tokens * hyper.q_dim() as usize),
        heads: hyper.heads as usize,
        tokens,
        first_position: shared.batch.first(),
        window: hyper.slides(layer).then_some(hyper.window as usize),
        scale: hyper.attn_scale,
        softcap: None,
        threads: shared.scratch.len(),
    }
}

/// Why attention can't be set up.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum AttentionError {
    /// The cache.
    Cache(KvError),
    /// The rotary embedding.
    Rope(RopeError),
}

impl fmt::Display for AttentionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cache(error) => error.fmt(f),
            Self::Rope(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for AttentionError {}

fn layout(hyper: &Hyper, context: u32, batch: u32, kv_type: KvType) -> Result<KvLayout, KvError> {
    let context = context as usize;
    let capacities = (0..hyper.layers).map(|layer| {
        if hyper.slides(layer) {
            ring_capacity(hyper.window as usize, batch as usize, context)
        } else {
            context
        }
    });
    KvLayout::new(
        kv_type,
        hyper.kv_heads as usize,
        hyper.head_dim as usize,
        capacities,
    )
}
