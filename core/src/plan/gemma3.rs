//! `gemma3`: Gemma 3's text decoder.
//!
//! Norms before and after both halves of a block, norms of query and key heads, a sliding window in
//! five layers of six with a rotary base of their own, embeddings scaled by the root of their width,
//! a tied head. The converter has added the 1 to the norms' weights.

use super::{
    Activation, Arch, Hyper, MatrixId, Model, Op, PlanError, Rope, RopeStyle, Sink, StepPlan,
};
use crate::plan::llama::libm_sqrt;

const ARCH: &str = "gemma3";

/// The largest Gemma 3 (27B) scales its scores by the width of a head as `d / heads`, not as its
/// keys' width. It is told by its number of blocks, as llama.cpp does.
const LAYERS_27B: u32 = 62;

/// All but the last step; the embedding, for that.
pub(super) fn plan<'a>(
    model: &Model<'_, 'a>,
    sink: &mut impl Sink,
) -> Result<(Hyper, MatrixId), PlanError<'a>> {
    let hyper = hyper(model)?;
    let (d, layers, head_dim) = (hyper.d, hyper.layers, hyper.head_dim);
    let embedding = model.embedding(sink, &hyper)?;
    sink.step(StepPlan {
        op: Op::Embed,
        linears: [None; 3],
    });
    for layer in 0..layers {
        let at = Some(layer);
        let norm = model.vector(sink, at, "attn_norm.weight", d)?;
        let linears = model.qkv(sink, &hyper, layer)?;
        sink.step(StepPlan {
            op: Op::Qkv { norm },
            linears,
        });
        let q_norm = Some(model.vector(sink, at, "attn_q_norm.weight", head_dim)?);
        let k_norm = Some(model.vector(sink, at, "attn_k_norm.weight", head_dim)?);
        sink.step(StepPlan {
            op: Op::Attend {
                layer,
                q_norm,
                k_norm,
            },
            linears: [None; 3],
        });
        let linears = model.out(sink, &hyper, layer)?;
        let post = Some(model.vector(sink, at, "post_attention_norm.weight", d)?);
        sink.step(StepPlan {
            op: Op::Out { post },
            linears,
        });
        let norm = model.vector(sink, at, "ffn_norm.weight", d)?;
        let linears = model.up(sink, &hyper, layer)?;
        sink.step(StepPlan {
            op: Op::Up { norm },
            linears,
        });
        let post = model.vector(sink, at, "post_ffw_norm.weight", d)?;
        model.down(sink, &hyper, layer, Some(post))?;
    }
    Ok((hyper, embedding))
}

/// Hyper-parameters.
pub(super) fn hyper<'a>(model: &Model<'_, 'a>) -> Result<Hyper, PlanError<'a>> {
    let (d, layers, heads, kv_heads, head_dim) = model.shape(ARCH)?;
    let score_width = if layers == LAYERS_27B {
        (d / heads).max(1)
    } else {
        head_dim
    };
    Ok(Hyper {
        arch: Arch::Gemma3,
        layers,
        d,
        ff: model.size(ARCH, "feed_forward_length")?,
        heads,
        kv_heads,
        head_dim,
        vocab: model.vocab(d)?,
        context: model.size(ARCH, "context_length")?,
        eps: model.real_or(ARCH, "attention.layer_norm_rms_epsilon", None)?,
        rope_style: RopeStyle::Halves,
        rope_dims: model.rope_dims(ARCH, head_dim)?,
        rope: Rope {
            base: model.real_or(ARCH, "rope.freq_base", Some(1_000_000.0))?,
            scale: model.rope_scale(ARCH)?,
        },
        rope_local: Rope {
            base: model.real_or(ARCH, "rope.freq_base_swa", Some(10_000.0))?,
            scale: 1.0,
        },
        window: model.size_or(ARCH, "attention.sliding_window", Some(0))?,
        window_period: model.size_or(ARCH, "attention.sliding_window_pattern", Some(6))?,
        attn_scale: 1.0 / libm_sqrt(score_width as f32),
        embed_scale: libm_sqrt(d as f32),
        logit_softcap: model.real_or(ARCH, "final_logit_softcapping", Some(0.0))?,
        act: model.activation(ARCH, Activation::Gelu)?,
        tied: !model.has("output.weight"),
    })
}
