//! The activations of a pass, for as many tokens as a batch may have.

use leanstream_core::plan::Hyper;

use super::cells::Cells;
use crate::cpu::{ACT_GROUP, SUM_GROUP};

/// What a batch needs, and nothing else: `t` tokens, shapes `(token, width)`.
pub struct Buffers {
    /// Residual stream `(t, d)`.
    pub x: Cells<f32>,
    /// Normed input of a step `(t, d)`.
    pub n: Cells<f32>,
    /// Queries `(t, q_dim)`.
    pub q: Cells<f32>,
    /// Keys `(t, kv_dim)`.
    pub k: Cells<f32>,
    /// Values `(t, kv_dim)`.
    pub v: Cells<f32>,
    /// Attention's output `(t, q_dim)`.
    pub o: Cells<f32>,
    /// A block's output before it is added `(t, d)`.
    pub y: Cells<f32>,
    /// Gate, then the activated product; the only one of an ungated network `(t, ff)`.
    pub g: Cells<f32>,
    /// Up `(t, ff)`; empty in an ungated network.
    pub u: Cells<f32>,
    /// Int8 codes of the running step's input `(t, widest)`.
    pub codes: Cells<i8>,
    /// Their scales `(t, widest / 32)`.
    pub scales: Cells<f32>,
    /// Their sums `(t, widest / 16)`.
    pub sums: Cells<i16>,
    /// Logits of one token `(vocab)`.
    pub logits: Cells<f32>,
    /// The batch's token ids `(t)`.
    pub tokens: Cells<u32>,
    /// The widest input of a matrix.
    pub widest: usize,
}

/// Widest input of any matrix, in whole groups.
fn widest(hyper: &Hyper) -> usize {
    (hyper.d.max(hyper.q_dim()).max(hyper.ff) as usize).next_multiple_of(ACT_GROUP)
}

impl Buffers {
    /// Buffers for `tokens` tokens. All memory is touched.
    pub fn new(hyper: &Hyper, tokens: usize) -> Self {
        let wide = widest(hyper);
        let (d, ff) = (hyper.d as usize, hyper.ff as usize);
        let (q, kv) = (hyper.q_dim() as usize, hyper.kv_dim() as usize);
        Self {
            x: Cells::new(tokens * d),
            n: Cells::new(tokens * d),
            q: Cells::new(tokens * q),
            k: Cells::new(tokens * kv),
            v: Cells::new(tokens * kv),
            o: Cells::new(tokens * q),
            y: Cells::new(tokens * d),
            g: Cells::new(tokens * ff),
            u: Cells::new(if hyper.act.gated() { tokens * ff } else { 0 }),
            codes: Cells::new(tokens * wide),
            scales: Cells::new(tokens * wide / ACT_GROUP),
            sums: Cells::new(tokens * wide / SUM_GROUP),
            logits: Cells::new(hyper.vocab as usize),
            tokens: Cells::new(tokens),
            widest: wide,
        }
    }

    /// Buffers for one token of a layer ahead: without logits.
    pub fn ahead(hyper: &Hyper) -> Self {
        Self::new(&Hyper { vocab: 0, ..*hyper }, 1)
    }

    /// Bytes that [`Buffers::ahead`] takes.
    pub fn ahead_bytes(hyper: &Hyper) -> u64 {
        Self::bytes(&Hyper { vocab: 0, ..*hyper }, 1)
    }

    /// Bytes that [`Buffers::new`] takes for `tokens` tokens.
    pub fn bytes(hyper: &Hyper, tokens: u64) -> u64 {
        let wide = widest(hyper) as u64;
        let ffs = if hyper.act.gated() { 2 } else { 1 };
        let floats = 3 * u64::from(hyper.d)
            + 2 * u64::from(hyper.q_dim())
            + 2 * u64::from(hyper.kv_dim())
            + ffs * u64::from(hyper.ff)
            + wide / ACT_GROUP as u64
            + 1;
        tokens * (floats * 4 + wide + wide / SUM_GROUP as u64 * 2) + u64::from(hyper.vocab) * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use leanstream_core::plan::{Activation, Arch, Rope, RopeStyle};

    /// The ledger is charged what is allocated, not an estimate of it.
    #[test]
    fn the_charge_is_what_is_allocated() {
        let rope = Rope {
            base: 1e4,
            scale: 1.0,
        };
        for act in [Activation::Silu, Activation::ReluSquared] {
            let hyper = Hyper {
                arch: Arch::Llama,
                layers: 2,
                d: 96,
                ff: 160,
                heads: 3,
                kv_heads: 1,
                head_dim: 16,
                vocab: 77,
                context: 64,
                eps: 1e-5,
                rope_style: RopeStyle::Adjacent,
                rope_dims: 16,
                rope,
                rope_local: rope,
                window: 0,
                window_period: 1,
                attn_scale: 0.25,
                embed_scale: 1.0,
                logit_softcap: 0.0,
                act,
                tied: true,
            };
            let buffers = Buffers::new(&hyper, 5);
            let floats = [
                &buffers.x, &buffers.n, &buffers.q, &buffers.k, &buffers.v, &buffers.o, &buffers.y,
            ];
            let floats: usize = floats.iter().map(|b| b.len()).sum::<usize>()
                + buffers.g.len()
                + buffers.u.len()
                + buffers.scales.len()
                + buffers.logits.len();
            let bytes = floats * 4
                + buffers.codes.len()
                + buffers.sums.len() * 2
                + buffers.tokens.len() * 4;
            assert_eq!(Buffers::bytes(&hyper, 5), bytes as u64);
        }
    }
}
