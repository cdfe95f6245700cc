//! Makes a model of any shape and format from a seed: see `--help`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use argh::FromArgs;
use leanstream::synth::vocab::{self, Vocab};
use leanstream::synth::{Arch, RopeScaling, Spec};
use leanstream::text::train::{self, Merge};
use leanstream_core::gguf::Gguf;
use leanstream_core::quant::QuantType;

/// Make a GGUF model of random weights: same arguments, same bytes, on every machine.
#[derive(FromArgs)]
struct Args {
    /// a whole shape: 7b-relu (4 GB) or tiny-relu; of the options below only --seed, --tokenizer-from
    /// and -o go with it
    #[argh(option)]
    shape: Option<String>,
    /// llama (default), gemma3 or arcee
    #[argh(option, from_str_fn(arch))]
    arch: Option<Arch>,
    /// type of the matrices, such as q4_0 (default), q4_k, f32
    #[argh(option, long = "type", from_str_fn(quant_type))]
    ty: Option<QuantType>,
    /// type of ffn_down; default: as --type
    #[argh(option, from_str_fn(quant_type))]
    down_type: Option<QuantType>,
    /// type of token_embd and output; default: as --type
    #[argh(option, from_str_fn(quant_type))]
    embed_type: Option<QuantType>,
    /// width of the residual stream (default 256)
    #[argh(option)]
    d: Option<u32>,
    /// layers (default 2; gemma3: 7)
    #[argh(option)]
    layers: Option<u32>,
    /// FFN neurons per layer (default 512)
    #[argh(option)]
    ff: Option<u32>,
    /// query heads (default 4)
    #[argh(option)]
    heads: Option<u32>,
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
    #[argh(option)]
    ctx: Option<u32>,
    /// base of the rotary frequencies (default 10000; gemma3: 1000000)
    #[argh(option)]
    rope_base: Option<f32>,
    /// gemma3: sliding window of local layers (default 512)
    #[argh(option)]
    window: Option<u32>,
    /// FFN activation: silu (default), relu or gelu, written as llama.hidden_activation
    #[argh(option, from_str_fn(activation))]
    act: Option<&'static str>,
    /// the output matrix is the embedding
    #[argh(switch)]
    tied: bool,
    /// deviation of the embeddings (default 1): for a model to be trained, 0.02 or so
    #[argh(option)]
    embed_std: Option<f32>,
    /// queries, keys and values have biases
    #[argh(switch)]
    bias: bool,
    /// stretch rotary frequencies: llama3 (8 over 8192) or linear:FACTOR
    #[argh(option, from_str_fn(rope_scaling))]
    rope_scaling: Option<RopeScaling>,
    /// other seed, other weights (default 0)
    #[argh(option, default = "0")]
    seed: u64,
    /// general.name (default: tells architecture, type and seed)
    #[argh(option)]
    name: Option<String>,
    /// copy the tokenizer of this GGUF file
    #[argh(option)]
    tokenizer_from: Option<PathBuf>,
    /// make a byte-level BPE tokenizer of --vocab tokens out of this text
    #[argh(option)]
    tokenizer_text: Option<PathBuf>,
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
    let merges = args.merges()?;
    let (tokens, vocab) = match (&donor, &merges) {
        (Some(_), Some(_)) => {
            return Err("--tokenizer-from and --tokenizer-text exclude each other".into());
        }
        (Some(model), None) => (vocab::tokens_of(model), Vocab::Of(model)),
        (None, Some(merges)) => (vocab::BASE + merges.len() as u32, Vocab::Trained(merges)),
        (None, None) => (vocab::LEAST, Vocab::BuiltIn),
    };
    let spec = match &args.shape {
        None => args.spec(tokens),
        Some(name) if !args.shaped() => Spec::named(name, args.seed)
            .ok_or_else(|| format!("--shape: {name} is none of {}", Spec::SHAPES.join(", ")))?,
        Some(name) => {
            return Err(format!(
                "--shape {name} says it all; with it go --seed, --tokenizer-from and -o"
            )
            .into());
        }
    };
    Ok(spec.write(&vocab, Path::new(&args.output))?)
}

impl Args {
    /// The merges of a tokenizer of `vocab` tokens for the text that is named.
    fn merges(&self) -> Result<Option<Vec<Merge>>, Box<dyn std::error::Error>> {
        let Some(path) = &self.tokenizer_text else {
            return Ok(None);
        };
        let wanted = self
            .vocab
            .and_then(|tokens| tokens.checked_sub(vocab::BASE))
            .ok_or_else(|| format!("--tokenizer-text needs --vocab, {} or more", vocab::BASE))?;
        let merges = train::merges(&std::fs::read(path)?, vocab::PRE, wanted as usize);
        Ok(Some(merges.expect("a known pre-tokenizer")))
    }

    /// Whether anything is said that a shape says.
    fn shaped(&self) -> bool {
        let numbers = [
            self.d,
            self.layers,
            self.ff,
            self.heads,
            self.kv_heads,
            self.head_dim,
            self.vocab,
            self.ctx,
            self.window,
        ];
        let types = [self.ty, self.down_type, self.embed_type];
        numbers.iter().any(Option::is_some)
            || types.iter().any(Option::is_some)
            || self.arch.is_some()
            || self.act.is_some()
            || self.rope_base.is_some()
            || self.rope_scaling.is_some()
            || self.embed_std.is_some()
            || self.name.is_some()
            || self.tokenizer_text.is_some()
            || self.tied
            || self.bias
    }

    /// The options as a model of `tokens` tokens.
    fn spec(&self, tokens: u32) -> Spec {
        let ty = self.ty.unwrap_or(QuantType::Q4_0);
        let small = Spec::small(self.arch.unwrap_or(Arch::Llama), ty, self.seed);
        let (d, heads) = (self.d.unwrap_or(small.d), self.heads.unwrap_or(small.heads));
        Spec {
            down_ty: self.down_type.unwrap_or(ty),
            embed_ty: self.embed_type.unwrap_or(ty),
            d,
            layers: self.layers.unwrap_or(small.layers),
            ff: self.ff.unwrap_or(small.ff),
            heads,
            kv_heads: self.kv_heads.unwrap_or(heads.div_ceil(2)),
            head_dim: self.head_dim.unwrap_or(d.checked_div(heads).unwrap_or(0)),
            vocab: self.vocab.unwrap_or(tokens),
            ctx: self.ctx.unwrap_or(8192),
            rope_base: self.rope_base.unwrap_or(small.rope_base),
            window: self.window.unwrap_or(512),
            activation: self.act,
            tied: self.tied || small.tied,
            bias: self.bias,
            rope_scaling: self.rope_scaling,
            embed_std: self.embed_std,
            name: self.name.clone(),
            ..small
        }
    }
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
