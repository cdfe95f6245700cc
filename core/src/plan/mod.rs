//! From a GGUF header to what a pass does: hyper-parameters, matrices, vectors and steps.
//!
//! One architecture a file. Each reads its keys and tensors and describes itself to a [`Sink`],
//! which the driver implements with whatever memory it has; core allocates nothing. Adding an
//! architecture is one file here and one arm in [`plan`].
//!
//! A layer is five steps. Work without weights of its own is done when a step opens (norms,
//! activations: what makes its input) or closes (residual sums), so that every step but
//! [`Op::Attend`] consumes pieces: `Qkv`, `Attend`, `Out`, `Up`, `Down`.

mod arcee;
mod gemma3;
mod keys;
mod llama;
pub mod pieces;

use core::fmt;

use crate::gguf::Tensor;
use crate::quant::QuantType;
use crate::units::{FileId, PieceId};

pub use keys::Model;
pub(crate) use llama::libm_sqrt;

/// What the feed-forward network does between its matrices.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activation {
    /// `silu(gate) * up`
    Silu,
    /// `gelu(gate) * up`, the tanh form.
    Gelu,
    /// `relu(gate) * up`
    Relu,
    /// `relu(up)^2`, without a gate.
    ReluSquared,
}

impl Activation {
    /// The name that metadata and reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::Silu => "silu",
            Self::Gelu => "gelu",
            Self::Relu => "relu",
            Self::ReluSquared => "relu2",
        }
    }

    /// Whether the network has a gate matrix.
    pub fn gated(self) -> bool {
        self != Self::ReluSquared
    }

    /// Whether neurons with a negative input add nothing at all.
    pub fn sparse(self) -> bool {
        matches!(self, Self::Relu | Self::ReluSquared)
    }
}

/// Which dimensions a rotary embedding turns together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum RopeStyle {
    /// Neighbours `(2i, 2i + 1)`: what GGUF's `llama` weights are permuted for.
    Adjacent,
    /// Halves `(i, i + n/2)`: GPT-NeoX's order.
    Halves,
}

/// Rotary embedding of one kind of layer.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rope {
    /// Frequency base.
    pub base: f32,
    /// Positions are divided by this (linear scaling); 1 means none.
    pub scale: f32,
}

/// The numbers of a model, checked: every size is positive and the products fit.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Hyper {
    /// `general.architecture`.
    pub arch: Arch,
    /// Transformer blocks.
    pub layers: u32,
    /// Width of the residual stream.
    pub d: u32,
    /// Width of the feed-forward network.
    pub ff: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Width of a head, the same for queries, keys and values.
    pub head_dim: u32,
    /// Rows of the embedding and of the head.
    pub vocab: u32,
    /// The context that the model was trained with, in tokens.
    pub context: u32,
    /// Epsilon of the RMS norms.
    pub eps: f32,
    /// Which dimensions turn together.
    pub rope_style: RopeStyle,
    /// How many dimensions of a head turn; even, at most `head_dim`.
    pub rope_dims: u32,
    /// Rotary embedding of layers with full attention.
    pub rope: Rope,
    /// Rotary embedding of sliding-window layers.
    pub rope_local: Rope,
    /// Positions that a sliding-window layer sees; 0 when no layer slides.
    pub window: u32,
    /// Every `window_period`-th layer has full attention (1: all of them).
    pub window_period: u32,
    /// Scores are multiplied by this before the softmax.
    pub attn_scale: f32,
    /// Embeddings are multiplied by this.
    pub embed_scale: f32,
    /// Logits become `cap * tanh(logit / cap)`; 0 leaves them as they are.
    pub logit_softcap: f32,
    /// What the feed-forward network does between its matrices.
    pub act: Activation,
    /// The head is the embedding matrix, and the last step multiplies by it.
    pub tied: bool,
}

impl Hyper {
    /// Whether layer `index` sees only [`Hyper::window`] positions.
    pub fn slides(&self, index: u32) -> bool {
        self.window > 0 && index % self.window_period != self.window_period - 1
    }

    /// Floats of one token's queries.
    pub fn q_dim(&self) -> u32 {
        self.heads * self.head_dim
    }

    /// Floats of one token's keys (or values) in one layer.
    pub fn kv_dim(&self) -> u32 {
        self.kv_heads * self.head_dim
    }
}

/// Architectures that can run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Arch {
    /// Llama 1 to 3, SmolLM and what shares their shape.
    Llama,
    /// Gemma 3, text only.
    Gemma3,
    /// Arcee: Llama's attention with an ungated, squared ReLU.
    Arcee,
}

impl Arch {
    /// The name in `general.architecture`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Gemma3 => "gemma3",
            Self::Arcee => "arcee",
        }
    }
}

/// Names a matrix in the order in which the sink was given it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct MatrixId(pub u32);

/// Names a resident vector in the order in which the sink was given it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct VectorId(pub u32);

/// A weight matrix: `rows` dot products of `cols` weights, cut into pieces of whole rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Matrix {
    /// Where it lies.
    pub file: FileId,
    /// Its first byte in that file.
    pub offset: u64,
    /// Block format of its rows.
    pub ty: QuantType,
    /// Outputs.
    pub rows: u32,
    /// Inputs.
    pub cols: u32,
    /// Bytes of one row.
    pub row_bytes: u32,
    /// Its first piece; the others follow. Set when the pieces are cut.
    pub first: PieceId,
    /// Rows of every piece but the last. Set when the pieces are cut.
    pub rows_per_piece: u32,
}

impl Matrix {
    /// Bytes of all rows.
    pub fn bytes(&self) -> u64 {
        u64::from(self.rows) * u64::from(self.row_bytes)
    }

    /// Number of pieces that [`Matrix::rows_per_piece`] gives.
    pub fn piece_count(&self) -> u32 {
        self.rows.div_ceil(self.rows_per_piece)
    }

    /// First row and number of rows of its `index`-th piece.
    pub fn piece_rows(&self, index: u32) -> (u32, u32) {
        let first = index * self.rows_per_piece;
        (first, self.rows_per_piece.min(self.rows - first))
    }
}

/// A small tensor that stays in memory as f32: norms and biases.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vector {
    /// Where it lies.
    pub file: FileId,
    /// Its first byte in that file.
    pub offset: u64,
    /// Its format.
    pub ty: QuantType,
    /// Floats.
    pub len: u32,
}

/// The feed-forward's input matrices.
pub const STEP_MATRICES_MAX: usize = 3;

/// One matrix product of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Linear {
    /// The weights.
    pub matrix: MatrixId,
    /// Added to the output, where the model has it.
    pub bias: Option<VectorId>,
}

/// What a step does. Steps run in the order in which the sink was given them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    /// `x = embedding row of the token * embed_scale`.
    Embed,
    /// `q, k, v = W norm(x)`.
    Qkv {
        /// RMS norm before the matrices.
        norm: VectorId,
    },
    /// Norms of q and k where the model has them, rotary embedding, the cache, attention.
    Attend {
        /// Which layer.
        layer: u32,
        /// RMS norm of each query head.
        q_norm: Option<VectorId>,
        /// RMS norm of each key head.
        k_norm: Option<VectorId>,
    },
    /// `y = W attention`, then `x += y` (normed by `post` first, where the model has it).
    Out {
        /// RMS norm of the output before it is added.
        post: Option<VectorId>,
    },
    /// `gate, up = W norm(x)`.
    Up {
        /// RMS norm before the matrices.
        norm: VectorId,
    },
    /// `y = W act(gate, up)`, then `x += y` (normed by `post` first, where the model has it).
    Down {
        /// RMS norm of the output before it is added.
        post: Option<VectorId>,
    },
    /// `Down` of a packed layer: its units are chosen by what `Up` gave, which is the gate alone (or
    /// the up matrix of an ungated network); `y` is the sum over them. Consumes no pieces.
    Units {
        /// Which layer: the bank of its units.
        layer: u32,
        /// RMS norm of the output before it is added.
        post: Option<VectorId>,
    },
    /// `logits = W norm(x)`; with a sketch of the head these are estimates.
    Head {
        /// RMS norm before the head.
        norm: VectorId,
    },
    /// After a sketch of the head: exact logits of the rows that can still win, the others become minus
    /// infinity. Its bank of units comes after the layers'. Consumes no pieces.
    HeadRows,
}

/// How the logits are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Head {
    /// All of them, by the whole head.
    #[default]
    Full,
    /// Those that can be among the most likely, by a packed head's sketch and a proven bound.
    Exact,
    /// The same with a bound of eight standard deviations.
    Fast,
}

impl Head {
    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Exact => "exact",
            Self::Fast => "fast",
        }
    }

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Full, Self::Exact, Self::Fast]
            .into_iter()
            .find(|head| head.name() == name)
    }

    /// Whether a sketch stands in for the head's matrix.
    pub fn sketched(self) -> bool {
        self != Self::Full
    }
}

/// A step as an architecture describes it: its operation and the matrices that it consumes, in
/// order (q, k, v or gate, up).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StepPlan {
    /// What it does.
    pub op: Op,
    /// Products, the first `linear_count` of them set.
    pub linears: [Option<Linear>; STEP_MATRICES_MAX],
}

/// Takes what an architecture describes. Ids count up from 0.
pub trait Sink {
    /// Keeps a matrix. A matrix may be used by several steps.
    fn matrix(&mut self, matrix: Matrix) -> MatrixId;
    /// Keeps a vector.
    fn vector(&mut self, vector: Vector) -> VectorId;
    /// Appends a step.
    fn step(&mut self, step: StepPlan);
    /// Names the embedding matrix. It is looked up by row, not multiplied.
    fn embedding(&mut self, matrix: MatrixId);
    /// Per-dimension divisors of the rotary frequencies (`rope_freqs.weight`, Llama 3).
    fn rope_factors(&mut self, vector: VectorId);
}

/// Why a model can't be planned.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum PlanError<'a> {
    /// `general.architecture` is absent or not a string.
    NoArchitecture,
    /// `general.type` says that it is an adapter.
    Adapter,
    /// An architecture that isn't supported.
    UnknownArchitecture(&'a str),
    /// A key is absent. The first part is the architecture's prefix.
    MissingKey(&'static str, &'static str),
    /// A key has a value that can't be used.
    BadKey {
        /// The architecture's prefix.
        arch: &'static str,
        /// The key after the prefix.
        key: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A tensor is absent.
    MissingTensor {
        /// Its layer, if it is in one.
        layer: Option<u32>,
        /// Its name within the layer.
        name: &'static str,
    },
    /// A tensor has another shape than the hyper-parameters say.
    Shape {
        /// The tensor's name in the file.
        name: &'a str,
        /// Rows and columns that it should have.
        expected: (u64, u64),
        /// Rows and columns that it has.
        found: (u64, u64),
    },
    /// A tensor of integers where weights belong.
    NotWeights {
        /// The tensor's name in the file.
        name: &'a str,
        /// Its type's name.
        ty: &'static str,
    },
    /// A variant of a supported architecture that isn't supported.
    Unsupported(&'static str),
}

impl fmt::Display for PlanError<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoArchitecture => f.write_str(
                "the metadata has no general.architecture: the file is not a language model (a vocabulary or an \
                 adapter, perhaps)",
            ),
            Self::Adapter => f.write_str(
                "the file is an adapter (LoRA), not a model: -m takes the model that it was made for, --lora the adapter",
            ),
            Self::UnknownArchitecture(name) => write!(
                f,
                "architecture '{name}' is not supported; supported: llama, gemma3, arcee"
            ),
            Self::MissingKey(arch, key) => write!(
                f,
                "the metadata lacks {arch}.{key}; convert the model again with a current converter"
            ),
            Self::BadKey { arch, key, why } => write!(f, "metadata key {arch}.{key}: {why}"),
            Self::MissingTensor { layer: Some(layer), name } => {
                write!(f, "tensor blk.{layer}.{name} is missing; the file is incomplete or of another architecture")
            }
            Self::MissingTensor { layer: None, name } => {
                write!(f, "tensor {name} is missing; the file is incomplete or of another architecture")
            }
            Self::Shape { name, expected, found } => write!(
                f,
                "tensor {name} has {} rows of {}, but the metadata asks for {} rows of {}",
                found.0, found.1, expected.0, expected.1
            ),
            Self::NotWeights { name, ty } => write!(
                f,
                "tensor {name} has type {ty}, which holds no weights; the file is damaged or of another kind"
            ),
            Self::Unsupported(what) => write!(f, "{what} is not supported"),
        }
    }
}

impl core::error::Error for PlanError<'_> {}

/// Reads the hyper-parameters of a model and describes a pass to `sink`, with its last step as `head`
/// says.
///
/// # Errors
/// What is missing, misshapen or unsupported. The sink may have been told a part by then.
pub fn plan<'a>(
    model: &Model<'_, 'a>,
    sink: &mut impl Sink,
    head: Head,
) -> Result<Hyper, PlanError<'a>> {
    let (hyper, embedding) = match model.architecture()? {
        "llama" => llama::plan(model, sink)?,
        "gemma3" => gemma3::plan(model, sink)?,
        "arcee" => arcee::plan(model, sink)?,
        other => return Err(PlanError::UnknownArchitecture(other)),
    };
    model.head(sink, &hyper, embedding, head)?;
    Ok(Hyper {
        tied: hyper.tied && !head.sketched(),
        ..hyper
    })
}

/// Reads the hyper-parameters of a model alone. Its feed-forward matrices may be missing, as they
/// are in a pack ([`crate::pack`]).
///
/// # Errors
/// What is missing, misshapen or unsupported in the metadata.
pub fn hyper<'a>(model: &Model<'_, 'a>) -> Result<Hyper, PlanError<'a>> {
    match model.architecture()? {
        "llama" => llama::hyper_of(model),
        "gemma3" => gemma3::hyper(model),
        "arcee" => arcee::hyper(model),
        other => Err(PlanError::UnknownArchitecture(other)),
    }
}

/// A matrix over `tensor`, not yet cut.
fn matrix_of(
    file: FileId,
    tensor: &Tensor<'_>,
    ty: QuantType,
    (rows, cols): (u32, u32),
    row_bytes: u32,
) -> Matrix {
    Matrix {
        file,
        offset: tensor.offset,
        ty,
        rows,
        cols,
        row_bytes,
        first: PieceId(u32::MAX),
        rows_per_piece: rows,
    }
}
