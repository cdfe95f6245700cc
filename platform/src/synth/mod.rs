//! Models of any shape and format, made up from a seed: for tests that need no download and for
//! benchmarks of shapes that nobody has to publish. The weights mean nothing, but they are scaled
//! as training starts from: rows have unit length, embeddings enter the residual stream with a
//! deviation of 1, and what the layers add to it is scaled by `1 / sqrt(2 * layers)` (GPT-2's
//! initialisation), so that all of them together add as much again. Activations stay in range, and
//! rounding them costs the logits what it costs those of a real model.
//!
//! The file depends on the [`Spec`] alone: random bits come from integers, and floating point is
//! held to operations that IEEE 754 rounds the same everywhere.

pub mod blocks;
mod rope;
pub mod vocab;

use std::fmt;
use std::path::Path;

use leanstream_core::quant::QuantType;

use crate::gguf_write::{Header, WriteError, Writer};
use blocks::Rng;
use vocab::Vocab;

/// Which architecture the file claims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    /// Pre-norm, gated FFN.
    Llama,
    /// Norms before and after, norms on queries and keys, sliding windows in 5 of 6 layers.
    Gemma3,
    /// As llama, but the FFN is `down(relu(up(x))^2)`, without a gate.
    Arcee,
}

impl Arch {
    /// As in `general.architecture`, and the prefix of the architecture's keys.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Gemma3 => "gemma3",
            Self::Arcee => "arcee",
        }
    }
}

/// What to make. `Spec::small` gives one to start from.
#[derive(Clone, PartialEq, Debug)]
pub struct Spec {
    /// The architecture.
    pub arch: Arch,
    /// Type of the matrices that the fields below don't name.
    pub ty: QuantType,
    /// Type of `ffn_down`.
    pub down_ty: QuantType,
    /// Type of `token_embd`, and of `output` when the model isn't tied.
    pub embed_ty: QuantType,
    /// Width of the residual stream.
    pub d: u32,
    /// Layers.
    pub layers: u32,
    /// FFN neurons per layer.
    pub ff: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Values per head: even.
    pub head_dim: u32,
    /// Tokens; at least [`vocab::LEAST`] with the built-in vocabulary.
    pub vocab: u32,
    /// `context_length`.
    pub ctx: u32,
    /// Base of the rotary frequencies (of global layers).
    pub rope_base: f32,
    /// Gemma 3: how many tokens a local layer looks back at, itself included.
    pub window: u32,
    /// Written as `ARCH.hidden_activation` where it isn't the architecture's own.
    pub activation: Option<&'static str>,
    /// True: the output matrix is the embedding.
    pub tied: bool,
    /// True: queries, keys and values have biases, and in `llama` every matrix of a layer.
    pub bias: bool,
    /// How rotary frequencies are stretched.
    pub rope_scaling: Option<RopeScaling>,
    /// Gemma 3: `final_logit_softcapping`.
    pub softcap: Option<f32>,
    /// Deviation of the embeddings' values, 1 where it isn't given. A tied model that is to be trained
    /// needs small ones, or its first logits are as large as the root of `d`.
    pub embed_std: Option<f32>,
    /// `general.name`, where it isn't to tell the type and the seed.
    pub name: Option<String>,
    /// Another seed, other weights.
    pub seed: u64,
}

/// Ways to stretch rotary frequencies beyond the context that a model was first trained for.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeScaling {
    /// All frequencies (of global layers) divided by this: the key `rope.scaling.factor`.
    Linear(f32),
    /// Llama 3's: the lower, the more; written as a `rope_freqs` tensor. Its other two parameters,
    /// the factors of low and high frequency, are 1 and 4 in every published model.
    Llama3 {
        /// How far the lowest frequencies are stretched.
        factor: f32,
        /// The context that the model was trained for before.
        original_ctx: u32,
    },
}

/// Why no file was made.
#[derive(Debug)]
pub enum SynthError {
    /// A matrix whose rows aren't whole blocks of its type.
    Rows {
        /// The tensor.
        name: String,
        /// Its columns.
        cols: u32,
        /// Its type.
        ty: QuantType,
    },
    /// Heads that don't go together.
    Shape(&'static str),
    /// The vocabulary doesn't have as many tokens as the spec says.
    Vocab {
        /// What the spec says.
        wanted: u32,
        /// What the vocabulary has, or for the built-in one needs.
        has: u32,
    },
    /// The disk.
    Write(WriteError),
}

impl fmt::Display for SynthError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows { name, cols, ty } => write!(
                f,
                "{name} can't be {ty}: its rows of {cols} values aren't whole blocks of {}; \
                 choose another type or a multiple",
                ty.block_len()
            ),
            Self::Shape(why) => f.write_str(why),
            Self::Vocab { wanted, has } => write!(
                f,
                "a vocabulary of {wanted} tokens was asked for, but the tokenizer has {has}; \
                 ask for that many"
            ),
            Self::Write(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SynthError {}

impl From<WriteError> for SynthError {
    fn from(error: WriteError) -> Self {
        Self::Write(error)
    }
}

impl Spec {
    /// A model of some hundred thousand weights in which every format and path has its place: 256
    /// wide, FFN 512, 4 heads over 2, 2 layers; Gemma 3 gets 7, so that one is global.
    pub fn small(arch: Arch, ty: QuantType, seed: u64) -> Self {
        Self {
            arch,
            ty,
            down_ty: ty,
            embed_ty: ty,
            d: 256,
            layers: if arch == Arch::Gemma3 { 7 } else { 2 },
            ff: 512,
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            vocab: vocab::LEAST,
            ctx: 512,
            rope_base: if arch == Arch::Gemma3 { 1e6 } else { 1e4 },
            window: 16,
            activation: None,
            tied: arch == Arch::Gemma3,
            bias: false,
            rope_scaling: None,
            softcap: None,
            embed_std: None,
            name: None,
            seed,
        }
    }

    /// A shape by name, one of [`Spec::SHAPES`]: `7b-relu`, a Llama of 7B (4 GB) with a ReLU gate and
    /// nine times SmolLM2-135M's neurons a layer, so that a trace of that can stand for its active
    /// sets; `tiny-relu`, the same in small, for tests.
    pub fn named(name: &str, seed: u64) -> Option<Self> {
        let relu = Self {
            activation: Some("relu"),
            ..Self::small(Arch::Llama, QuantType::Q4_0, seed)
        };
        match name {
            "7b-relu" => Some(Self {
                d: 4096,
                layers: 32,
                ff: 9 * 1536,
                heads: 32,
                kv_heads: 8,
                head_dim: 128,
                vocab: 32_000,
                ctx: 8192,
                ..relu
            }),
            "tiny-relu" => Some(Self {
                layers: 4,
                ff: 9 * 128,
                ..relu
            }),
            _ => None,
        }
    }

    /// The names that [`Spec::named`] knows.
    pub const SHAPES: [&str; 2] = ["7b-relu", "tiny-relu"];

    /// Bytes of tensor data the file will have.
    ///
    /// # Errors
    /// As [`Spec::write`], the disk aside.
    pub fn data_bytes(&self) -> Result<u64, SynthError> {
        let mut header = Header::new();
        for tensor in self.tensors()? {
            header.tensor(&tensor.name, tensor.ty, &tensor.dims);
        }
        Ok(header.data_bytes())
    }

    /// Writes the model to `path` and returns the file's length. Holds one megabyte of it at a time.
    ///
    /// # Errors
    /// The shape is impossible, the vocabulary doesn't fit, or the disk fails.
    pub fn write(&self, vocab: &Vocab<'_>, path: &Path) -> Result<u64, SynthError> {
        let tensors = self.tensors()?;
        let mut header = Header::new();
        self.metadata(&mut header);
        vocab.put(self.vocab, &mut header)?;
        for tensor in &tensors {
            header.tensor(&tensor.name, tensor.ty, &tensor.dims);
        }
        let mut writer = header.create(path)?;
        let mut buffer = vec![0; 1 << 20];
        for tensor in &tensors {
            self.fill(tensor, &mut buffer, &mut writer)?;
        }
        Ok(writer.finish()?)
    }

    fn metadata(&self, header: &mut Header) {
        let arch = self.arch.name();
        let key = |name: &str| format!("{arch}.{name}");
        header.str("general.architecture", arch);
        header.str("general.type", "model");
        let name = self.name.clone();
        let name =
            name.unwrap_or_else(|| format!("synthetic {arch} {} seed {}", self.ty, self.seed));
        header.str("general.name", name);
        header.u32("general.quantization_version", 2);
        header.u32("general.alignment", crate::gguf_write::ALIGNMENT as u32);
        header.u32(&key("block_count"), self.layers);
        header.u32(&key("context_length"), self.ctx);
        header.u32(&key("embedding_length"), self.d);
        header.u32(&key("feed_forward_length"), self.ff);
        header.u32(&key("attention.head_count"), self.heads);
        header.u32(&key("attention.head_count_kv"), self.kv_heads);
        header.u32(&key("attention.key_length"), self.head_dim);
        header.u32(&key("attention.value_length"), self.head_dim);
        header.f32(&key("rope.freq_base"), self.rope_base);
        header.u32(&key("vocab_size"), self.vocab);
        if self.arch == Arch::Gemma3 {
            header.f32(&key("attention.layer_norm_rms_epsilon"), 1e-6);
            header.u32(&key("attention.sliding_window"), self.window);
        } else {
            header.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
            header.u32(&key("rope.dimension_count"), self.head_dim);
        }
        if let Some(RopeScaling::Linear(factor)) = self.rope_scaling {
            header.str(&key("rope.scaling.type"), "linear");
            header.f32(&key("rope.scaling.factor"), factor);
        }
        if let Some(softcap) = self.softcap {
            header.f32(&key("final_logit_softcapping"), softcap);
        }
        if let Some(activation) = self.activation {
            header.str(&key("hidden_activation"), activation);
        }
    }

    fn tensors(&self) -> Result<Vec<Tensor>, SynthError> {
        let (d, ff) = (self.d, self.ff);
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) {
            return Err(SynthError::Shape(
                "the key/value heads must divide the heads",
            ));
        }
        if self.head_dim == 0 || !self.head_dim.is_multiple_of(2) {
            return Err(SynthError::Shape("a head has an even number of values"));
        }
        let Some((q, kv)) = self
            .heads
            .checked_mul(self.head_dim)
            .and_then(|q| Some((q, self.kv_heads.checked_mul(self.head_dim)?)))
        else {
            return Err(SynthError::Shape("heads times values per head pass 2^32"));
        };
        let gemma = self.arch == Arch::Gemma3;
        // Two parts of each layer add to the stream, behind a norm in Gemma 3.
        let part = 1.0 / (2.0 * self.layers as f32).sqrt();
        let (added, post) = if gemma { (1.0, part) } else { (part, 1.0) };
        let unit = |cols: u32| 1.0 / (cols as f32).sqrt();
        // Gemma 3 multiplies embeddings by sqrt(d).
        let embedded = self.embed_std.unwrap_or(if gemma { unit(d) } else { 1.0 });
        let mut list = List(Vec::new());
        list.matrix("token_embd.weight", self.embed_ty, d, self.vocab, embedded)?;
        if let Some(RopeScaling::Llama3 {
            factor,
            original_ctx,
        }) = self.rope_scaling
        {
            let dims = vec![u64::from(self.head_dim / 2)];
            let kind = Fill::RopeFactors(factor, original_ctx);
            let name = "rope_freqs.weight".to_owned();
            list.0.push(Tensor {
                name,
                ty: QuantType::F32,
                dims,
                kind,
            });
        }
        let all_biased = self.bias && self.arch == Arch::Llama;
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}");
            list.vector(name("attn_norm.weight"), Fill::Norm(1.0), d);
            list.linear(name("attn_q"), self.ty, d, q, unit(d), self.bias)?;
            list.linear(name("attn_k"), self.ty, d, kv, unit(d), self.bias)?;
            list.linear(name("attn_v"), self.ty, d, kv, unit(d), self.bias)?;
            if gemma {
                list.vector(name("attn_q_norm.weight"), Fill::Norm(1.0), self.head_dim);
                list.vector(name("attn_k_norm.weight"), Fill::Norm(1.0), self.head_dim);
            }
            list.linear(
                name("attn_output"),
                self.ty,
                q,
                d,
                added * unit(q),
                all_biased,
            )?;
            if gemma {
                list.vector(name("post_attention_norm.weight"), Fill::Norm(post), d);
            }
            list.vector(name("ffn_norm.weight"), Fill::Norm(1.0), d);
            if self.arch != Arch::Arcee {
                list.linear(name("ffn_gate"), self.ty, d, ff, unit(d), all_biased)?;
            }
            list.linear(name("ffn_up"), self.ty, d, ff, unit(d), all_biased)?;
            list.linear(
                name("ffn_down"),
                self.down_ty,
                ff,
                d,
                added * unit(ff),
                all_biased,
            )?;
            if gemma {
                list.vector(name("post_ffw_norm.weight"), Fill::Norm(post), d);
            }
        }
        list.vector("output_norm.weight".to_owned(), Fill::Norm(1.0), d);
        if !self.tied {
            list.matrix("output.weight", self.embed_ty, d, self.vocab, unit(d))?;
        }
        Ok(list.0)
    }

    /// Each tensor has a random stream of its own, seeded by its name: the same tensor comes out
    /// whatever else the model has.
    fn fill(
        &self,
        tensor: &Tensor,
        buffer: &mut [u8],
        writer: &mut Writer,
    ) -> Result<(), WriteError> {
        let mut rng = Rng::new(self.seed, &tensor.name);
        match tensor.kind {
            Fill::Matrix(std) => {
                let mut blocks = blocks::Source::new(tensor.ty, std, rng);
                let block = tensor.ty.block_bytes();
                let row = tensor.dims[0] as usize / tensor.ty.block_len() * block;
                let mut left = tensor.dims[1] * row as u64;
                let chunk = buffer.len() / block * block;
                while left > 0 {
                    let part = &mut buffer[..left.min(chunk as u64) as usize];
                    blocks.fill(part);
                    writer.write(part)?;
                    left -= part.len() as u64;
                }
                Ok(())
            }
            Fill::Norm(size) => write_floats(
                writer,
                (0..tensor.dims[0]).map(|_| size * (1.0 + 0.1 * rng.normal())),
            ),
            Fill::Bias => write_floats(writer, (0..tensor.dims[0]).map(|_| 0.3 * rng.normal())),
            Fill::RopeFactors(factor, original_ctx) => {
                let factors = rope::llama3(factor, original_ctx, self.head_dim, self.rope_base);
                write_floats(writer, factors.into_iter())
            }
        }
    }
}

struct Tensor {
    name: String,
    ty: QuantType,
    dims: Vec<u64>,
    kind: Fill,
}

#[derive(Clone, Copy)]
enum Fill {
    /// Values that spread by this.
    Matrix(f32),
    /// Values about this.
    Norm(f32),
    Bias,
    RopeFactors(f32, u32),
}

struct List(Vec<Tensor>);

impl List {
    fn matrix(
        &mut self,
        name: impl Into<String>,
        ty: QuantType,
        cols: u32,
        rows: u32,
        std: f32,
    ) -> Result<(), SynthError> {
        let name = name.into();
        if cols == 0 || rows == 0 {
            return Err(SynthError::Shape("no dimension may be 0"));
        }
        if !(cols as usize).is_multiple_of(ty.block_len()) {
            return Err(SynthError::Rows { name, cols, ty });
        }
        let dims = vec![cols.into(), rows.into()];
        self.0.push(Tensor {
            name,
            ty,
            dims,
            kind: Fill::Matrix(std),
        });
        Ok(())
    }

    /// A matrix, and perhaps its bias.
    fn linear(
        &mut self,
        name: String,
        ty: QuantType,
        cols: u32,
        rows: u32,
        std: f32,
        bias: bool,
    ) -> Result<(), SynthError> {
        self.matrix(format!("{name}.weight"), ty, cols, rows, std)?;
        if bias {
            self.vector(format!("{name}.bias"), Fill::Bias, rows);
        }
        Ok(())
    }

    fn vector(&mut self, name: String, kind: Fill, len: u32) {
        self.0.push(Tensor {
            name,
            ty: QuantType::F32,
            dims: vec![len.into()],
            kind,
        });
    }
}

fn write_floats(writer: &mut Writer, values: impl Iterator<Item = f32>) -> Result<(), WriteError> {
    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    writer.write(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_shapes_can_be_made_and_have_their_size() {
        for name in Spec::SHAPES {
            let spec = Spec::named(name, 0).expect("a shape");
            assert_eq!(spec.activation, Some("relu"));
            assert!(spec.data_bytes().is_ok(), "{name}");
        }
        let bytes = |name| Spec::named(name, 0).unwrap().data_bytes().unwrap();
        assert!((3_900_000_000..4_200_000_000).contains(&bytes("7b-relu")));
        assert!(bytes("tiny-relu") < 4 << 20);
        assert_eq!(Spec::named("7b", 0), None);
    }

    #[test]
    fn impossible_shapes_are_errors_that_say_what() {
        let mut spec = Spec::small(Arch::Llama, QuantType::Q4_K, 1);
        spec.d = 288;
        let error = spec.data_bytes().unwrap_err().to_string();
        assert!(
            error.contains("token_embd.weight can't be Q4_K") && error.contains("288"),
            "{error}"
        );
        let mut spec = Spec::small(Arch::Llama, QuantType::F32, 1);
        spec.kv_heads = 3;
        assert!(
            spec.data_bytes()
                .unwrap_err()
                .to_string()
                .contains("divide")
        );
    }
}
