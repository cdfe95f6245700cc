//! Makes a model of any shape and format from a seed: see `--help`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use argh::FromArgs;
use leanstream::synth::vocab::{self, Vocab};
use leanstream::synth::{Arch, RopeScaling, Spec};
use leanstream_core::gguf::Gguf;
use leanstream_core::quant::QuantType;

/// Make a GGUF model of random weights: same arguments, same bytes, on every machine.
#[derive(FromArgs)]
struct Args {
    /// llama (default), gemma3 or arcee
    #[argh(option, default = "Arch::Llama", from_str_fn(arch))]
    arch: Arch,
    /// type of the matrices, such as q4_0 (default), q4_k, f32
    #[argh(
        option,
        long = "type",
        default = "QuantType::Q4_0",
        from_str_fn(quant_type)
    )]
    ty: QuantType,
    /// type of ffn_down; default: as --type
    #[argh(option, from_str_fn(quant_type))]
    down_type: Option<QuantType>,
    /// type of token_embd and output; default: as --type
    #[argh(option, from_str_fn(quant_type))]
    embed_type: Option<QuantType>,
    /// width of the residual stream (default 256)
    #[argh(option, default = "256")]
    d: u32,
    /// layers (default 2; gemma3: 7)
    #[argh(option)]
    layers: Option<u32>,
    /// FFN neurons per layer (default 512)
    #[argh(option, default = "512")]
    ff: u32,
    /// query heads (default 4)
    #[argh(option, default = "4")]
    heads: u32,
    /// key and value heads (default: half the heads)
    #[argh(option)]
    kv_heads: Option<u32>,
    /// values per head (default: d / heads)
    #[argh(option)]
    head_dim: Option<u32>,
    /// tokens (default: the built-in vocabulary's least, or the copied one's)
    #[argh(option)]
    vocab: Option<u32>,
    /// context length (default 8192)
    #[argh(option, default = "8192")]
    ctx: u32,
    /// base of the rotary frequencies (default 10000; gemma3: 1000000)
    #[argh(option)]
    rope_base: Option<f32>,
    /// gemma3: sliding window of local layers (default 512)
    #[argh(option, default = "512")]
    window: u32,
    /// FFN activation: silu (default), relu or gelu, written as llama.hidden_activation
    #[argh(option, from_str_fn(activation))]
    act: Option<&'static str>,
    /// the output matrix is the embedding
    #[argh(switch)]
    tied: bool,
    /// queries, keys and values have biases
    #[argh(switch)]
    bias: bool,
    /// stretch rotary frequencies: llama3 (8 over 8192) or linear:FACTOR
    #[argh(option, from_str_fn(rope_scaling))]
    rope_scaling: Option<RopeScaling>,
    /// other seed, other weights (default 0)
    #[argh(option, default = "0")]
    seed: u64,
    /// copy the tokenizer of this GGUF file
    #[argh(option)]
    tokenizer_from: Option<PathBuf>,
    /// the file to make
    #[argh(option, short = 'o', long = "output")]
    output: PathBuf,
}

fn main() -> ExitCode {
    let args: Args = argh::from_env();
    match make(&args) {
        Ok(bytes) => {
            eprintln!("{}: {bytes} bytes", args.output.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("synth: {error}");
            ExitCode::FAILURE
        }
    }
}

fn make(args: &Args) -> Result<u64, Box<dyn std::error::Error>> {
    let donor = args
        .tokenizer_from
        .as_deref()
        .map(std::fs::read)
        .transpose()?;
    let donor = match &donor {
        Some(bytes) => {
            Some(Gguf::parse(bytes, bytes.len() as u64).map_err(|e| format!("tokenizer: {e}"))?)
        }
        None => None,
    };
    let (tokens, vocab) = match &donor {
        Some(model) => (vocab::tokens_of(model), Vocab::Of(model)),
        None => (vocab::LEAST, Vocab::BuiltIn),
    };
    let small = Spec::small(args.arch, args.ty, args.seed);
    let spec = Spec {
        down_ty: args.down_type.unwrap_or(args.ty),
        embed_ty: args.embed_type.unwrap_or(args.ty),
        d: args.d,
        layers: args.layers.unwrap_or(small.layers),
        ff: args.ff,
        heads: args.heads,
        kv_heads: args.kv_heads.unwrap_or(args.heads.div_ceil(2)),
        head_dim: args
            .head_dim
            .unwrap_or(args.d.checked_div(args.heads).unwrap_or(0)),
        vocab: args.vocab.unwrap_or(tokens),
        ctx: args.ctx,
        rope_base: args.rope_base.unwrap_or(small.rope_base),
        window: args.window,
        activation: args.act,
        tied: args.tied || small.tied,
        bias: args.bias,
        rope_scaling: args.rope_scaling,
        ..small
    };
    Ok(spec.write(&vocab, Path::new(&args.output))?)
}

fn arch(name: &str) -> Result<Arch, String> {
    [Arch::Llama, Arch::Gemma3, Arch::Arcee]
        .into_iter()
        .find(|arch| arch.name() == name)
        .ok_or_else(|| format!("{name} is none of llama, gemma3, arcee"))
}

fn quant_type(name: &str) -> Result<QuantType, String> {
    let known = || QuantType::ALL.map(|ty| ty.name().to_lowercase()).join(", ");
    QuantType::ALL
        .into_iter()
        .find(|ty| ty.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| format!("{name} is none of {}", known()))
}

fn activation(name: &str) -> Result<&'static str, String> {
    ["silu", "relu", "gelu"]
        .into_iter()
        .find(|&act| act == name)
        .ok_or_else(|| format!("{name} is none of silu, relu, gelu"))
}

fn rope_scaling(name: &str) -> Result<RopeScaling, String> {
    let linear = name
        .strip_prefix("linear:")
        .map(|factor| factor.parse::<f32>());
    match (name, linear) {
        ("llama3", _) => Ok(RopeScaling::Llama3 {
            factor: 8.0,
            original_ctx: 8192,
        }),
        (_, Some(Ok(factor))) if factor > 0.0 && factor.is_finite() => {
            Ok(RopeScaling::Linear(factor))
        }
        _ => Err(format!("{name} is neither llama3 nor linear:FACTOR")),
    }
}
