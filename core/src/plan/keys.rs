//! Reading an architecture's keys and tensors, with errors that name them.

use core::fmt::Write as _;

use super::{
    Activation, Head, Hyper, Linear, MatrixId, Op, PlanError, STEP_MATRICES_MAX, Sink, StepPlan,
    Vector, VectorId, matrix_of,
};
use crate::gguf::{Gguf, Tensor, TensorIndex, Value};
use crate::pack::GATE_TYPES;
use crate::quant::QuantType;
use crate::units::FileId;

/// Sizes above this are refused: products of two of them still fit 64 bits with room, and no real
/// model comes near.
const SIZE_MAX: u32 = 1 << 24;

/// The headers of a model's files. Metadata is the first's, tensors may lie in any.
#[derive(Clone, Copy)]
pub struct Model<'m, 'a> {
    /// The header whose metadata counts.
    pub first: &'m Gguf<'a>,
    /// The tensors of all shards.
    pub tensors: TensorIndex<'m, 'a>,
}

/// The products of a step.
type Linears = [Option<Linear>; STEP_MATRICES_MAX];

/// A metadata or tensor name put together without allocation.
type Name = heapless::String<96>;

fn name(parts: core::fmt::Arguments<'_>) -> Name {
    let mut name = Name::new();
    // Longest: "blk.4294967295." or an architecture's name with the longest key, well below 96.
    name.write_fmt(parts).expect("names are short");
    name
}

impl<'a> Model<'_, 'a> {
    pub(super) fn architecture(&self) -> Result<&'a str, PlanError<'a>> {
        let ty = self.get_raw("general.type").and_then(|v| v.as_str());
        if ty == Some("adapter") {
            return Err(PlanError::Adapter);
        }
        self.get_raw("general.architecture")
            .and_then(|v| v.as_str())
            .ok_or(PlanError::NoArchitecture)
    }

    fn get_raw(&self, key: &str) -> Option<Value<'a>> {
        self.first.get(key)
    }

    fn get(&self, arch: &'static str, key: &'static str) -> Option<Value<'a>> {
        self.get_raw(&name(format_args!("{arch}.{key}")))
    }

    /// A positive size, at most [`SIZE_MAX`].
    pub(super) fn size(&self, arch: &'static str, key: &'static str) -> Result<u32, PlanError<'a>> {
        self.size_or(arch, key, None)
    }

    pub(super) fn size_or(
        &self,
        arch: &'static str,
        key: &'static str,
        default: Option<u32>,
    ) -> Result<u32, PlanError<'a>> {
        let Some(value) = self.get(arch, key) else {
            return default.ok_or(PlanError::MissingKey(arch, key));
        };
        match value.as_u32() {
            Some(0) => Err(PlanError::BadKey {
                arch,
                key,
                why: "must not be 0",
            }),
            Some(n) if n <= SIZE_MAX => Ok(n),
            Some(_) => Err(PlanError::BadKey {
                arch,
                key,
                why: "is larger than 16777216",
            }),
            None => Err(PlanError::BadKey {
                arch,
                key,
                why: "is not one unsigned number",
            }),
        }
    }

    /// A finite, positive number.
    pub(super) fn real_or(
        &self,
        arch: &'static str,
        key: &'static str,
        default: Option<f32>,
    ) -> Result<f32, PlanError<'a>> {
        let Some(value) = self.get(arch, key) else {
            return default.ok_or(PlanError::MissingKey(arch, key));
        };
        match value.as_f32() {
            Some(x) if x.is_finite() && x > 0.0 => Ok(x),
            Some(_) => Err(PlanError::BadKey {
                arch,
                key,
                why: "must be finite and positive",
            }),
            None => Err(PlanError::BadKey {
                arch,
                key,
                why: "is not a number",
            }),
        }
    }

    pub(super) fn text(
        &self,
        arch: &'static str,
        key: &'static str,
    ) -> Result<Option<&'a str>, PlanError<'a>> {
        match self.get(arch, key) {
            None => Ok(None),
            Some(value) => match value.as_str() {
                Some(text) => Ok(Some(text)),
                None => Err(PlanError::BadKey {
                    arch,
                    key,
                    why: "is not text",
                }),
            },
        }
    }

    /// `hidden_activation` as we read it; absent means `default`.
    pub(super) fn activation(
        &self,
        arch: &'static str,
        default: Activation,
    ) -> Result<Activation, PlanError<'a>> {
        Ok(match self.text(arch, "hidden_activation")? {
            None => default,
            Some("silu" | "swish") => Activation::Silu,
            Some("gelu" | "gelu_pytorch_tanh") => Activation::Gelu,
            Some("relu") => Activation::Relu,
            Some(_) => {
                return Err(PlanError::BadKey {
                    arch,
                    key: "hidden_activation",
                    why: "is unknown; known: silu, gelu, relu",
                });
            }
        })
    }

    /// Factor of linear rotary scaling. Other kinds of scaling are errors, since ignoring them gives
    /// wrong text without a word. Llama 3's kind comes as a tensor (`rope_freqs.weight`) instead.
    pub(super) fn rope_scale(&self, arch: &'static str) -> Result<f32, PlanError<'a>> {
        match self.text(arch, "rope.scaling.type")? {
            None => self.real_or(arch, "rope.scale_linear", Some(1.0)),
            Some("none") => Ok(1.0),
            Some("linear") => self.real_or(arch, "rope.scaling.factor", Some(1.0)),
            Some("llama3") => Ok(1.0),
            Some(_) => Err(PlanError::BadKey {
                arch,
                key: "rope.scaling.type",
                why: "is not supported; supported: none, linear, llama3",
            }),
        }
    }

    /// Sizes that all our architectures share. Returns `(d, layers, heads, kv_heads, head_dim)`.
    pub(super) fn shape(
        &self,
        arch: &'static str,
    ) -> Result<(u32, u32, u32, u32, u32), PlanError<'a>> {
        let d = self.size(arch, "embedding_length")?;
        let layers = self.size(arch, "block_count")?;
        if layers > 4096 {
            return Err(PlanError::BadKey {
                arch,
                key: "block_count",
                why: "is larger than 4096",
            });
        }
        let heads = self.size(arch, "attention.head_count")?;
        let kv_heads = self.size_or(arch, "attention.head_count_kv", Some(heads))?;
        if heads > 65536 || kv_heads > heads || heads % kv_heads != 0 {
            return Err(PlanError::BadKey {
                arch,
                key: "attention.head_count_kv",
                why: "must divide attention.head_count",
            });
        }
        if self.get(arch, "attention.key_length").is_none() && d % heads != 0 {
            return Err(PlanError::BadKey {
                arch,
                key: "attention.head_count",
                why: "must divide embedding_length, or attention.key_length be given",
            });
        }
        let head_dim = self.size_or(arch, "attention.key_length", Some((d / heads).max(1)))?;
        if self.size_or(arch, "attention.value_length", Some(head_dim))? != head_dim {
            return Err(PlanError::Unsupported(
                "a model whose keys and values differ in width",
            ));
        }
        if head_dim > 4096 || head_dim % 2 != 0 {
            return Err(PlanError::BadKey {
                arch,
                key: "attention.key_length",
                why: "must be even and at most 4096",
            });
        }
        Ok((d, layers, heads, kv_heads, head_dim))
    }

    pub(super) fn rope_dims(
        &self,
        arch: &'static str,
        head_dim: u32,
    ) -> Result<u32, PlanError<'a>> {
        let dims = self.size_or(arch, "rope.dimension_count", Some(head_dim))?;
        if dims % 2 != 0 || dims > head_dim {
            return Err(PlanError::BadKey {
                arch,
                key: "rope.dimension_count",
                why: "must be even and at most the head's width",
            });
        }
        Ok(dims)
    }

    fn find(&self, layer: Option<u32>, suffix: &'static str) -> Option<(FileId, Tensor<'a>)> {
        let full = match layer {
            Some(layer) => name(format_args!("blk.{layer}.{suffix}")),
            None => name(format_args!("{suffix}")),
        };
        let (file, tensor) = self.tensors.find(&full)?;
        Some((FileId(file as u16), tensor))
    }

    /// Rows of the embedding matrix, which is where a GGUF says how large the vocabulary is.
    pub(super) fn vocab(&self, d: u32) -> Result<u32, PlanError<'a>> {
        let (_, tensor) = self
            .find(None, "token_embd.weight")
            .ok_or(PlanError::MissingTensor {
                layer: None,
                name: "token_embd.weight",
            })?;
        let (rows, cols) = shape_of(&tensor);
        if cols != u64::from(d) || rows == 0 || rows > u64::from(SIZE_MAX) || tensor.n_dims > 2 {
            return Err(PlanError::Shape {
                name: tensor.name,
                expected: (rows, u64::from(d)),
                found: (rows, cols),
            });
        }
        Ok(rows as u32)
    }

    /// A matrix that may be absent.
    pub(super) fn matrix_opt(
        &self,
        sink: &mut impl Sink,
        layer: Option<u32>,
        suffix: &'static str,
        rows: u32,
        cols: u32,
    ) -> Result<Option<MatrixId>, PlanError<'a>> {
        let Some((file, tensor)) = self.find(layer, suffix) else {
            return Ok(None);
        };
        let ty = weights_of(&tensor)?;
        let found = shape_of(&tensor);
        let expected = (u64::from(rows), u64::from(cols));
        let row_bytes = ty
            .row_bytes(cols as usize)
            .and_then(|bytes| u32::try_from(bytes).ok());
        match row_bytes {
            Some(row_bytes) if found == expected && tensor.n_dims <= 2 => Ok(Some(
                sink.matrix(matrix_of(file, &tensor, ty, (rows, cols), row_bytes)),
            )),
            _ => Err(PlanError::Shape {
                name: tensor.name,
                expected,
                found,
            }),
        }
    }

    /// A matrix.
    pub(super) fn matrix(
        &self,
        sink: &mut impl Sink,
        layer: Option<u32>,
        suffix: &'static str,
        rows: u32,
        cols: u32,
    ) -> Result<MatrixId, PlanError<'a>> {
        self.matrix_opt(sink, layer, suffix, rows, cols)?
            .ok_or(PlanError::MissingTensor {
                layer,
                name: suffix,
            })
    }

    /// A matrix of a layer with the bias that may come with it.
    pub(super) fn linear(
        &self,
        sink: &mut impl Sink,
        layer: u32,
        (weight, bias): (&'static str, &'static str),
        rows: u32,
        cols: u32,
    ) -> Result<Option<Linear>, PlanError<'a>> {
        let matrix = self.matrix(sink, Some(layer), weight, rows, cols)?;
        let bias = self.vector_opt(sink, Some(layer), bias, rows)?;
        Ok(Some(Linear { matrix, bias }))
    }

    /// A vector that may be absent.
    pub(super) fn vector_opt(
        &self,
        sink: &mut impl Sink,
        layer: Option<u32>,
        suffix: &'static str,
        len: u32,
    ) -> Result<Option<VectorId>, PlanError<'a>> {
        let Some((file, tensor)) = self.find(layer, suffix) else {
            return Ok(None);
        };
        let ty = weights_of(&tensor)?;
        let found = shape_of(&tensor);
        if found != (1, u64::from(len)) || ty.row_bytes(len as usize).is_none() {
            return Err(PlanError::Shape {
                name: tensor.name,
                expected: (1, u64::from(len)),
                found,
            });
        }
        Ok(Some(sink.vector(Vector {
            file,
            offset: tensor.offset,
            ty,
            len,
        })))
    }

    /// A vector.
    pub(super) fn vector(
        &self,
        sink: &mut impl Sink,
        layer: Option<u32>,
        suffix: &'static str,
        len: u32,
    ) -> Result<VectorId, PlanError<'a>> {
        self.vector_opt(sink, layer, suffix, len)?
            .ok_or(PlanError::MissingTensor {
                layer,
                name: suffix,
            })
    }

    /// Embedding first, since its row is the first thing a pass needs.
    pub(super) fn embedding(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
    ) -> Result<MatrixId, PlanError<'a>> {
        let embedding = self.matrix(sink, None, "token_embd.weight", hyper.vocab, hyper.d)?;
        sink.embedding(embedding);
        Ok(embedding)
    }

    /// The matrices of a layer's queries, keys and values.
    pub(super) fn qkv(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
        layer: u32,
    ) -> Result<Linears, PlanError<'a>> {
        let (q, kv, d) = (hyper.q_dim(), hyper.kv_dim(), hyper.d);
        Ok([
            self.linear(sink, layer, ("attn_q.weight", "attn_q.bias"), q, d)?,
            self.linear(sink, layer, ("attn_k.weight", "attn_k.bias"), kv, d)?,
            self.linear(sink, layer, ("attn_v.weight", "attn_v.bias"), kv, d)?,
        ])
    }

    /// The matrix behind a layer's attention.
    pub(super) fn out(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
        layer: u32,
    ) -> Result<Linears, PlanError<'a>> {
        let names = ("attn_output.weight", "attn_output.bias");
        let out = self.linear(sink, layer, names, hyper.d, hyper.q_dim())?;
        Ok([out, None, None])
    }

    /// The first matrices of a layer's feed-forward network: gate and up, or up alone; of a packed layer the
    /// gate, or its sketch, in the gate's or up's place.
    pub(super) fn up(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
        layer: u32,
    ) -> Result<Linears, PlanError<'a>> {
        let (ff, d) = (hyper.ff, hyper.d);
        let packed = self.packed(layer);
        let sketched = packed && self.get_raw(GATE_TYPES).is_some();
        let names = if sketched {
            ("ffn_gate.sketch", "ffn_gate.bias")
        } else {
            ("ffn_gate.weight", "ffn_gate.bias")
        };
        let gate = if hyper.act.gated() {
            self.linear(sink, layer, names, ff, d)?
        } else {
            None
        };
        if packed && gate.is_some() {
            return Ok([gate, None, None]);
        }
        let names = if sketched {
            ("ffn_up.sketch", "ffn_up.bias")
        } else {
            ("ffn_up.weight", "ffn_up.bias")
        };
        let up = self.linear(sink, layer, names, ff, d)?;
        Ok(if gate.is_some() {
            [gate, up, None]
        } else {
            [up, None, None]
        })
    }

    /// Whether a layer's neurons are packed into units.
    fn packed(&self, layer: u32) -> bool {
        self.find(Some(layer), "ffn_units").is_some()
    }

    /// The step with the last matrix of a layer's feed-forward network, or with its units.
    pub(super) fn down(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
        layer: u32,
        post: Option<VectorId>,
    ) -> Result<(), PlanError<'a>> {
        if self.packed(layer) {
            let biases = ["ffn_down.bias", "ffn_up.bias"];
            // The up matrix of an ungated network isn't packed, and may have its bias.
            let biases = &biases[..if hyper.act.gated() { 2 } else { 1 }];
            if biases
                .iter()
                .any(|bias| self.find(Some(layer), bias).is_some())
            {
                return Err(PlanError::Unsupported("a packed feed-forward with biases"));
            }
            sink.step(StepPlan {
                op: Op::Units { layer, post },
                linears: [None; STEP_MATRICES_MAX],
            });
            return Ok(());
        }
        let names = ("ffn_down.weight", "ffn_down.bias");
        let down = self.linear(sink, layer, names, hyper.d, hyper.ff)?;
        sink.step(StepPlan {
            op: Op::Down { post },
            linears: [down, None, None],
        });
        Ok(())
    }

    /// The last step: a head of its own, or the embedding again; or a packed head's sketch, and a step
    /// for the exact rows.
    pub(super) fn head(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
        embedding: MatrixId,
        head: Head,
    ) -> Result<(), PlanError<'a>> {
        let (vocab, d) = (hyper.vocab, hyper.d);
        let norm = self.vector(sink, None, "output_norm.weight", d)?;
        let matrix = if head.sketched() {
            self.matrix(sink, None, "output.sketch", vocab, d)?
        } else {
            let own = self.matrix_opt(sink, None, "output.weight", vocab, d)?;
            own.unwrap_or(embedding)
        };
        sink.step(StepPlan {
            op: Op::Head { norm },
            linears: [Some(Linear { matrix, bias: None }), None, None],
        });
        if head.sketched() {
            sink.step(StepPlan {
                op: Op::HeadRows,
                linears: [None; STEP_MATRICES_MAX],
            });
        }
        Ok(())
    }

    /// Llama 3's frequency divisors, where the file has them.
    pub(super) fn rope_factors(
        &self,
        sink: &mut impl Sink,
        hyper: &Hyper,
    ) -> Result<(), PlanError<'a>> {
        if let Some(vector) =
            self.vector_opt(sink, None, "rope_freqs.weight", hyper.rope_dims / 2)?
        {
            sink.rope_factors(vector);
        }
        Ok(())
    }

    pub(super) fn has(&self, suffix: &'static str) -> bool {
        self.find(None, suffix).is_some()
    }
}

/// The block format of a tensor that must hold weights.
fn weights_of<'a>(tensor: &Tensor<'a>) -> Result<QuantType, PlanError<'a>> {
    tensor.ty.quant().ok_or(PlanError::NotWeights {
        name: tensor.name,
        ty: tensor.ty.name(),
    })
}

/// Rows and columns, higher dimensions counted as rows.
fn shape_of(tensor: &Tensor<'_>) -> (u64, u64) {
    (tensor.rows(), tensor.cols())
}
