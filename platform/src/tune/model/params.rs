//! What is trained: where each tensor lies in one flat vector of parameters, and its first values.

use std::ops::Range;

use leanstream_core::plan::{MatrixId, VectorId};

use super::net::{Half, Net, Site};

/// What is trained.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Scheme {
    /// Low-rank adapters beside frozen linears: `y = W x + alpha / rank * B (A x)`.
    Lora {
        /// Rows of `A`.
        rank: usize,
        /// The adapters' output is scaled by `alpha / rank`.
        alpha: f32,
        /// Share of the adapters' inputs that are left out at random.
        dropout: f32,
        /// Which linears have one, by [`Site`].
        sites: [bool; Site::ALL.len()],
    },
    /// Every weight.
    Full,
}

/// An adapter's two matrices in the parameters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pair {
    /// Offset of `A` (rank, inputs).
    pub a: usize,
    /// Offset of `B` (outputs, rank).
    pub b: usize,
    /// Rows of `A`.
    pub rank: usize,
    /// Columns of `A`.
    pub inputs: usize,
    /// Rows of `B`.
    pub outputs: usize,
}

impl Pair {
    /// Where `A` lies.
    pub fn a(&self) -> Range<usize> {
        self.a..self.a + self.rank * self.inputs
    }

    /// Where `B` lies.
    pub fn b(&self) -> Range<usize> {
        self.b..self.b + self.outputs * self.rank
    }
}

/// One trained tensor.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name in the file that it is written to.
    pub name: String,
    /// Its first parameter.
    pub offset: usize,
    /// Rows, 1 for a vector.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Whether weight decay applies: to matrices, not to norms and biases.
    pub decays: bool,
}

impl Tensor {
    /// Where it lies among all parameters.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }
}

/// Where everything that is trained lies.
#[derive(Clone, Debug)]
pub struct Params {
    /// What is trained.
    pub scheme: Scheme,
    /// In the order of their offsets.
    pub tensors: Vec<Tensor>,
    /// How many parameters there are.
    pub count: usize,
    pairs: Vec<[Option<Pair>; Site::ALL.len()]>,
    matrices: Vec<Option<usize>>,
    vectors: Vec<Option<usize>>,
}

impl Params {
    /// Lays them out. `vector_len` tells the length of a resident vector, `names` those of matrices and
    /// vectors, for a full training.
    pub fn new(net: &Net, scheme: Scheme, vectors: &[usize], names: &Names) -> Self {
        let mut params = Self {
            scheme,
            tensors: Vec::new(),
            count: 0,
            pairs: vec![[None; Site::ALL.len()]; net.layers.len()],
            matrices: vec![None; net.matrices.len()],
            vectors: vec![None; vectors.len()],
        };
        match scheme {
            Scheme::Lora { rank, sites, .. } => {
                for (index, layer) in net.layers.iter().enumerate() {
                    for site in Site::ALL {
                        let Some(linear) = layer.linears[site as usize] else {
                            continue;
                        };
                        if !sites[site as usize] {
                            continue;
                        }
                        let (inputs, outputs) = net.shape(linear);
                        let name = site.tensor(index);
                        let a = params.push(format!("{name}.lora_a"), rank, inputs, true);
                        let b = params.push(format!("{name}.lora_b"), outputs, rank, true);
                        params.pairs[index][site as usize] = Some(Pair {
                            a,
                            b,
                            rank,
                            inputs,
                            outputs,
                        });
                    }
                }
            }
            Scheme::Full => {
                for (id, matrix) in net.matrices.iter().enumerate() {
                    let (rows, cols) = (matrix.rows as usize, matrix.cols as usize);
                    let name = names.matrices[id].clone();
                    params.matrices[id] = Some(params.push(name, rows, cols, true));
                }
                for (id, len) in vectors.iter().enumerate() {
                    // Rotary factors are constants.
                    if let Some(name) = &names.vectors[id] {
                        params.vectors[id] = Some(params.push(name.clone(), 1, *len, false));
                    }
                }
            }
        }
        params
    }

    fn push(&mut self, name: String, rows: usize, cols: usize, decays: bool) -> usize {
        let offset = self.count;
        self.count += rows * cols;
        self.tensors.push(Tensor {
            name,
            offset,
            rows,
            cols,
            decays,
        });
        offset
    }

    /// The adapter at a site.
    pub fn pair(&self, layer: usize, site: Site) -> Option<Pair> {
        self.pairs[layer][site as usize]
    }

    /// `alpha / rank`, 0 without adapters.
    pub fn scale(&self) -> f32 {
        match self.scheme {
            Scheme::Lora { rank, alpha, .. } => alpha / rank as f32,
            Scheme::Full => 0.0,
        }
    }

    /// Where a matrix lies, when matrices are trained.
    pub fn matrix(&self, id: MatrixId) -> Option<usize> {
        self.matrices[id.0 as usize]
    }

    /// Where a vector lies, when vectors are trained.
    pub fn vector(&self, id: VectorId) -> Option<usize> {
        self.vectors[id.0 as usize]
    }

    /// Writes an adapter's first values: `A` uniform within `1 / sqrt(inputs)`, `B` zero, as PEFT's.
    pub fn first_adapters(&self, seed: u64, out: &mut [f32]) {
        let mut state = seed ^ 0x9E37_79B9_7F4A_7C15;
        out.fill(0.0);
        for pair in self.pairs.iter().flatten().flatten() {
            let bound = 1.0 / (pair.inputs as f32).sqrt();
            for x in &mut out[pair.a()] {
                *x = (2.0 * uniform(&mut state) - 1.0) * bound;
            }
        }
    }
}

/// Names in the file of the model's matrices and vectors, by id; `None` for what isn't trained.
#[derive(Clone, Debug, Default)]
pub struct Names {
    /// Of matrices.
    pub matrices: Vec<String>,
    /// Of vectors.
    pub vectors: Vec<Option<String>>,
}

impl Names {
    /// The names by which GGUF files call them; `vectors` is how many vectors the model has.
    pub fn of(net: &Net, vectors: usize) -> Self {
        let mut names = Self {
            matrices: vec![String::new(); net.matrices.len()],
            vectors: vec![None; vectors],
        };
        names.matrices[net.embedding.0 as usize] = "token_embd.weight".into();
        if net.head.matrix != net.embedding {
            names.matrices[net.head.matrix.0 as usize] = "output.weight".into();
        }
        names.vectors[net.head_norm.0 as usize] = Some("output_norm.weight".into());
        for (index, layer) in net.layers.iter().enumerate() {
            for site in Site::ALL {
                let Some(linear) = layer.linears[site as usize] else {
                    continue;
                };
                let name = site.tensor(index);
                if let Some(bias) = linear.bias {
                    let name = name.replace(".weight", ".bias");
                    names.vectors[bias.0 as usize] = Some(name);
                }
                names.matrices[linear.matrix.0 as usize] = name;
            }
            let norms = [
                (Some(layer.norm(Half::Attention)), "attn_norm"),
                (layer.q_norm, "attn_q_norm"),
                (layer.k_norm, "attn_k_norm"),
                (layer.post(Half::Attention), "post_attention_norm"),
                (Some(layer.norm(Half::Ffn)), "ffn_norm"),
                (layer.post(Half::Ffn), "post_ffw_norm"),
            ];
            for (id, name) in norms {
                if let Some(id) = id {
                    names.vectors[id.0 as usize] = Some(format!("blk.{index}.{name}.weight"));
                }
            }
        }
        names
    }
}

/// Uniform in `0 .. 1` (SplitMix64).
pub fn uniform(state: &mut u64) -> f32 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f32 / (1u64 << 24) as f32
}
