//! A decoder as training sees it: layers of named linears and norms, read off the plan that `run` uses.

use leanstream_core::plan::{Hyper, Linear, Matrix, MatrixId, Op, VectorId};

use crate::run::model::Weights;

/// A linear of a layer, where an adapter may sit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Site {
    /// Queries.
    Q,
    /// Keys.
    K,
    /// Values.
    V,
    /// The attention's output.
    O,
    /// The feed-forward's gate.
    Gate,
    /// The feed-forward's other input matrix.
    Up,
    /// The feed-forward's output.
    Down,
}

impl Site {
    /// All of them, in the order in which a layer uses them.
    pub const ALL: [Self; 7] = [
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];

    /// As the command line and tables call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::O => "o",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::Down => "down",
        }
    }

    /// Its tensor in layer `layer` of a GGUF file.
    pub fn tensor(self, layer: usize) -> String {
        let name = match self {
            Self::Q => "attn_q",
            Self::K => "attn_k",
            Self::V => "attn_v",
            Self::O => "attn_output",
            Self::Gate => "ffn_gate",
            Self::Up => "ffn_up",
            Self::Down => "ffn_down",
        };
        format!("blk.{layer}.{name}.weight")
    }
}

/// Which half of a layer. Each norms the residual stream, computes, and adds its output to the stream.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Half {
    /// Attention.
    Attention,
    /// The feed-forward network.
    Ffn,
}

impl Half {
    /// The linears of its normed input.
    pub fn inputs(self) -> &'static [Site] {
        match self {
            Self::Attention => &[Site::Q, Site::K, Site::V],
            Self::Ffn => &[Site::Gate, Site::Up],
        }
    }

    /// The linear that makes its output.
    pub fn output(self) -> Site {
        match self {
            Self::Attention => Site::O,
            Self::Ffn => Site::Down,
        }
    }
}

/// One block.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// RMS norm before each half, by [`Half`].
    pub norms: [VectorId; 2],
    /// RMS norm of each half's output before it is added.
    pub posts: [Option<VectorId>; 2],
    /// RMS norm of each query head.
    pub q_norm: Option<VectorId>,
    /// RMS norm of each key head.
    pub k_norm: Option<VectorId>,
    /// Its linears, by [`Site`]; an ungated network has no gate.
    pub linears: [Option<Linear>; Site::ALL.len()],
}

impl Layer {
    /// RMS norm before a half.
    pub fn norm(&self, half: Half) -> VectorId {
        self.norms[half as usize]
    }

    /// RMS norm of a half's output before it is added.
    pub fn post(&self, half: Half) -> Option<VectorId> {
        self.posts[half as usize]
    }

    /// The linear at a site that every layer has, or that the caller knows this one has.
    pub fn linear(&self, site: Site) -> Linear {
        self.linears[site as usize].expect("the layer has this linear")
    }
}

/// The whole decoder.
#[derive(Clone, Debug)]
pub struct Net {
    /// The model's numbers.
    pub hyper: Hyper,
    /// Its blocks.
    pub layers: Vec<Layer>,
    /// RMS norm before the head.
    pub head_norm: VectorId,
    /// The head.
    pub head: Linear,
    /// Looked up by row.
    pub embedding: MatrixId,
    /// Where all matrices lie.
    pub matrices: Vec<Matrix>,
}

impl Net {
    /// Reads it off a plan.
    ///
    /// # Errors
    /// A packed model, in words.
    pub fn new(hyper: Hyper, weights: &Weights) -> Result<Self, &'static str> {
        let mut layers = Vec::with_capacity(hyper.layers as usize);
        let (mut norm, mut q_norm, mut k_norm, mut attn_post) = (None, None, None, None);
        let (mut ffn_norm, mut linears) = (None, [None; 7]);
        let mut head = None;
        for step in &weights.steps {
            let [a, b, c] = step.linears;
            match step.op {
                Op::Embed => {}
                Op::Qkv { norm: id } => {
                    norm = Some(id);
                    linears = [a, b, c, None, None, None, None];
                }
                Op::Attend {
                    q_norm: q,
                    k_norm: k,
                    ..
                } => (q_norm, k_norm) = (q, k),
                Op::Out { post } => {
                    attn_post = post;
                    linears[Site::O as usize] = a;
                }
                Op::Up { norm: id } => {
                    ffn_norm = Some(id);
                    let (gate, up) = if hyper.act.gated() { (a, b) } else { (None, a) };
                    linears[Site::Gate as usize] = gate;
                    linears[Site::Up as usize] = up;
                }
                Op::Down { post } => {
                    linears[Site::Down as usize] = a;
                    layers.push(Layer {
                        norms: [
                            norm.expect("a layer begins with its queries"),
                            ffn_norm.expect("Up comes before Down"),
                        ],
                        posts: [attn_post, post],
                        q_norm,
                        k_norm,
                        linears,
                    });
                }
                Op::Head { norm } => head = Some((norm, a)),
                Op::Units { .. } | Op::HeadRows => {
                    return Err(
                        "is packed, and a packed model can't be tuned; give the GGUF it was made from",
                    );
                }
            }
        }
        let (head_norm, head) = head.expect("a plan ends with its head");
        Ok(Self {
            hyper,
            layers,
            head_norm,
            head: head.expect("a head has a matrix"),
            embedding: weights.embedding,
            matrices: weights.matrices.clone(),
        })
    }

    /// The matrix of a linear.
    pub fn matrix(&self, linear: Linear) -> &Matrix {
        &self.matrices[linear.matrix.0 as usize]
    }

    /// Inputs and outputs of a linear.
    pub fn shape(&self, linear: Linear) -> (usize, usize) {
        let matrix = self.matrix(linear);
        (matrix.cols as usize, matrix.rows as usize)
    }
}
