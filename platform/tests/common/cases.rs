//! The models whose logits are compared, and the tokens they read. `golden/make_logits.py` has
//! llama.cpp compute what it can of them.

use leanstream::synth::vocab;
use leanstream::synth::{Arch, RopeScaling, Spec};
use leanstream_core::quant::QuantType;

/// One model and its prompt.
pub struct Case {
    /// Unique; also the golden record's name.
    pub name: String,
    /// How the model is made.
    pub spec: Spec,
    /// Tokens of the prompt; logits are compared at the last [`POSITIONS`].
    pub tokens: Vec<u32>,
    /// False where llama.cpp can't compute this: only the reference can tell.
    pub golden: bool,
}

/// How many positions' logits are compared.
pub const POSITIONS: usize = 3;

/// All of them.
pub fn all() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: String, spec: Spec, golden: bool| {
        // Past Gemma's window of 16, twice; and past two blocks of the attention where it says so.
        let count = match spec.arch {
            _ if name.ends_with("long") => 150,
            Arch::Gemma3 => 40,
            Arch::Llama | Arch::Arcee => 12,
        };
        let tokens = (0..count)
            .map(|i| (i * i * 7 + i * 31 + 5) % vocab::LEAST)
            .collect();
        cases.push(Case {
            name,
            spec,
            tokens,
            golden,
        });
    };
    for (seed, ty) in QuantType::ALL.into_iter().enumerate() {
        add(
            format!("llama-{ty}"),
            Spec::small(Arch::Llama, ty, seed as u64),
            true,
        );
    }
    for ty in [QuantType::F32, QuantType::Q8_0, QuantType::Q4_K] {
        add(
            format!("gemma3-{ty}"),
            Spec::small(Arch::Gemma3, ty, 100),
            true,
        );
    }
    for ty in [QuantType::F32, QuantType::Q4_0, QuantType::Q8_0] {
        add(
            format!("arcee-{ty}"),
            Spec::small(Arch::Arcee, ty, 200),
            true,
        );
    }
    let llama = |seed| Spec::small(Arch::Llama, QuantType::F32, seed);
    add(
        "llama-tied".into(),
        Spec {
            tied: true,
            ..llama(300)
        },
        true,
    );
    add(
        "llama-bias".into(),
        Spec {
            bias: true,
            ..llama(301)
        },
        true,
    );
    // A context of 32 puts frequencies on both sides of the blend and in it.
    let scaling = Some(RopeScaling::Llama3 {
        factor: 8.0,
        original_ctx: 32,
    });
    add(
        "llama-rope-llama3".into(),
        Spec {
            rope_scaling: scaling,
            ..llama(302)
        },
        true,
    );
    let scaling = Some(RopeScaling::Linear(4.0));
    add(
        "llama-rope-linear".into(),
        Spec {
            rope_scaling: scaling,
            ..llama(306)
        },
        true,
    );
    // Gemma 3 4B and up stretch the global layers; no Gemma 3 has the other two, which their keys allow.
    let gemma = Spec {
        rope_scaling: Some(RopeScaling::Linear(8.0)),
        softcap: Some(2.0),
        tied: false,
        ..Spec::small(Arch::Gemma3, QuantType::F32, 101)
    };
    add("gemma3-rope-linear".into(), gemma, true);
    // A head that isn't d / heads wide, and as many key heads as query heads.
    add(
        "llama-wide-heads".into(),
        Spec {
            head_dim: 96,
            kv_heads: 4,
            ..llama(303)
        },
        true,
    );
    // Q4_K_M's habit: other types for embedding and down projection.
    let mixed = Spec {
        down_ty: QuantType::Q6_K,
        embed_ty: QuantType::Q8_0,
        ..Spec::small(Arch::Llama, QuantType::Q4_K, 304)
    };
    add("llama-mixed".into(), mixed, true);
    add("llama-long".into(), llama(307), true);
    // A window that isn't a whole number of blocks and moves over their edges.
    let gemma = Spec {
        window: 80,
        ..Spec::small(Arch::Gemma3, QuantType::F32, 102)
    };
    add("gemma3-long".into(), gemma, true);
    // llama.cpp ignores the key and always takes SiLU here.
    for activation in ["relu", "gelu"] {
        add(
            format!("llama-{activation}"),
            Spec {
                activation: Some(activation),
                ..llama(305)
            },
            false,
        );
    }
    cases
}
