//! `llama`: Llama 1 to 3, SmolLM, TinyLlama, Mistral and what shares their shape.
//!
//! Pre-norm blocks, grouped-query attention, gated feed-forward (`llama.hidden_activation` may name
//! another activation than SiLU), optional biases, tied or untied head. Mixtures of experts carry
//! the same architecture name and are refused.

use super::{
    Activation, Arch, Hyper, MatrixId, Model, Op, PlanError, Rope, RopeStyle, Sink, StepPlan,
};

const ARCH: &str = "llama";

/// All but the last step; the embedding, for that.
pub(super) fn plan<'a>(
    model: &Model<'_, 'a>,
    sink: &mut impl Sink,
) -> Result<(Hyper, MatrixId), PlanError<'a>> {
    let hyper = hyper_of(model)?;
    let embedding = describe(model, sink, &hyper)?;
    Ok((hyper, embedding))
}

/// Hyper-parameters of `llama` itself.
pub(super) fn hyper_of<'a>(model: &Model<'_, 'a>) -> Result<Hyper, PlanError<'a>> {
    if model
        .size_or(ARCH, "expert_count", Some(1))
        .is_ok_and(|experts| experts > 1)
    {
        return Err(PlanError::Unsupported(
            "a mixture of experts (llama.expert_count)",
        ));
    }
    hyper(
        model,
        ARCH,
        Arch::Llama,
        model.activation(ARCH, Activation::Silu)?,
    )
}

/// Hyper-parameters as `llama` and its relatives name them.
pub(super) fn hyper<'a>(
    model: &Model<'_, 'a>,
    arch: &'static str,
    kind: Arch,
    act: Activation,
) -> Result<Hyper, PlanError<'a>> {
    let (d, layers, heads, kv_heads, head_dim) = model.shape(arch)?;
    let rope = Rope {
        base: model.real_or(arch, "rope.freq_base", Some(10_000.0))?,
        scale: model.rope_scale(arch)?,
    };
    Ok(Hyper {
        arch: kind,
        layers,
        d,
        ff: model.size(arch, "feed_forward_length")?,
        heads,
        kv_heads,
        head_dim,
        vocab: model.vocab(d)?,
        context: model.size(arch, "context_length")?,
        eps: model.real_or(arch, "attention.layer_norm_rms_epsilon", None)?,
        rope_style: RopeStyle::Adjacent,
        rope_dims: model.rope_dims(arch, head_dim)?,
        rope,
        rope_local: rope,
        window: 0,
        window_period: 1,
        attn_scale: model.real_or(
            arch,
            "attention.scale",
            Some(1.0 / libm_sqrt(head_dim as f32)),
        )?,
        embed_scale: model.real_or(arch, "embedding_scale", Some(1.0))?,
        logit_softcap: 0.0,
        act,
        tied: !model.has("output.weight"),
    })
}

/// The steps of `llama` and of its relatives without a gate, but the last; the embedding.
pub(super) fn describe<'a>(
    model: &Model<'_, 'a>,
    sink: &mut impl Sink,
    hyper: &Hyper,
) -> Result<MatrixId, PlanError<'a>> {
    let d = hyper.d;
    let embedding = model.embedding(sink, hyper)?;
    sink.step(StepPlan {
        op: Op::Embed,
        linears: [None; 3],
    });
    model.rope_factors(sink, hyper)?;
    for layer in 0..hyper.layers {
        let norm = model.vector(sink, Some(layer), "attn_norm.weight", d)?;
        let linears = model.qkv(sink, hyper, layer)?;
        sink.step(StepPlan {
            op: Op::Qkv { norm },
            linears,
        });
        let op = Op::Attend {
            layer,
            q_norm: None,
            k_norm: None,
        };
        sink.step(StepPlan {
            op,
            linears: [None; 3],
        });
        let linears = model.out(sink, hyper, layer)?;
        sink.step(StepPlan {
            op: Op::Out { post: None },
            linears,
        });
        let norm = model.vector(sink, Some(layer), "ffn_norm.weight", d)?;
        let linears = model.up(sink, hyper, layer)?;
        sink.step(StepPlan {
            op: Op::Up { norm },
            linears,
        });
        model.down(sink, hyper, layer, None)?;
    }
    Ok(embedding)
}

/// Square root by Newton's method in f64: `core` has none without std.
pub(crate) fn libm_sqrt(x: f32) -> f32 {
    let x = f64::from(x);
    let mut root = x.max(1.0);
    for _ in 0..64 {
        root = 0.5 * (root + x / root);
    }
    root as f32
}

#[cfg(test)]
mod tests {
    use super::libm_sqrt;

    #[test]
    fn square_roots_are_exact_where_they_can_be() {
        for n in [1u32, 4, 64, 128, 256, 576, 640, 4096] {
            assert_eq!(libm_sqrt(n as f32), (n as f64).sqrt() as f32, "{n}");
        }
        assert_eq!(libm_sqrt(0.25), 0.5);
    }
}
