//! A forward pass to check the fast ones against: every weight decoded, every sum in doubles, all
//! positions computed anew, nothing clever. Only GGUF parsing and block decoding are shared with
//! the program.

use std::collections::HashMap;

use leanstream_core::gguf::{Gguf, Value};
use leanstream_core::quant;

/// A decoded model.
pub struct Reference {
    arch: String,
    d: usize,
    layers: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f64,
    rope_base: f64,
    /// What positions are divided by in global layers.
    rope_scale: f64,
    softcap: Option<f64>,
    /// Local layers see this many tokens, themselves included.
    window: usize,
    activation: fn(f64) -> f64,
    /// What a key or value is kept as.
    cached: fn(f64) -> f64,
    tensors: HashMap<String, Matrix>,
}

/// Rows one after the other; a vector is one row.
struct Matrix {
    cols: usize,
    values: Vec<f64>,
}

impl Matrix {
    fn row(&self, i: usize) -> &[f64] {
        &self.values[i * self.cols..][..self.cols]
    }

    fn times(&self, x: &[f64]) -> Vec<f64> {
        assert_eq!(x.len(), self.cols);
        self.values
            .chunks(self.cols)
            .map(|row| dot(row, x))
            .collect()
    }
}

impl Reference {
    /// Decodes a whole file.
    pub fn new(file: &[u8]) -> Self {
        let gguf = Gguf::parse(file, file.len() as u64).expect("a GGUF file");
        let text = |key: &str| gguf.get(key).and_then(|v| v.as_str()).map(str::to_owned);
        let arch = text("general.architecture").expect("an architecture");
        let value = |key: &str| gguf.get(&format!("{arch}.{key}"));
        let count = |key: &str| value(key).and_then(|v| v.as_u32()).map(|v| v as usize);
        let float = |key: &str| {
            value(key)
                .and_then(|v: Value<'_>| v.as_f32())
                .map(f64::from)
        };
        let d = count("embedding_length").expect("a width");
        let heads = count("attention.head_count").expect("heads");
        let activation = match text(&format!("{arch}.hidden_activation")).as_deref() {
            Some("relu") => relu,
            Some("gelu") => gelu,
            Some("silu") => silu,
            None if arch == "gemma3" => gelu,
            None => silu,
            Some(other) => panic!("activation {other}"),
        };
        let tensors = gguf.tensors().map(|tensor| {
            let bytes = &file[tensor.offset as usize..][..tensor.bytes as usize];
            let cols = tensor.dims[0] as usize;
            let mut singles = vec![0.0; tensor.dims.iter().product::<u64>() as usize];
            quant::decode(tensor.ty.quant().expect("weights"), bytes, &mut singles);
            let values = singles.into_iter().map(f64::from).collect();
            (tensor.name.to_owned(), Matrix { cols, values })
        });
        Self {
            d,
            layers: count("block_count").expect("layers"),
            heads,
            kv_heads: count("attention.head_count_kv").unwrap_or(heads),
            head_dim: count("attention.key_length").unwrap_or(d / heads),
            eps: float("attention.layer_norm_rms_epsilon").expect("an epsilon"),
            rope_base: float("rope.freq_base").unwrap_or(10_000.0),
            rope_scale: float("rope.scaling.factor").unwrap_or(1.0),
            softcap: float("final_logit_softcapping"),
            window: count("attention.sliding_window").unwrap_or(usize::MAX),
            activation,
            cached: |x| x,
            tensors: tensors.collect(),
            arch,
        }
    }

    /// The same model, whose keys and values are rounded to halves.
    pub fn with_halves_cached(self) -> Self {
        let cached = |x| half::f16::from_f64(x).to_f64();
        Self { cached, ..self }
    }

    /// Logits of every position, (position, token).
    pub fn logits(&self, tokens: &[u32]) -> Vec<Vec<f64>> {
        let embed = &self.tensors["token_embd.weight"];
        let scale = if self.gemma() {
            (self.d as f64).sqrt()
        } else {
            1.0
        };
        let mut stream: Vec<Vec<f64>> = tokens
            .iter()
            .map(|&token| {
                embed
                    .row(token as usize)
                    .iter()
                    .map(|v| v * scale)
                    .collect()
            })
            .collect();
        for layer in 0..self.layers {
            self.attention(layer, &mut stream);
            for x in &mut stream {
                self.ffn(layer, x);
            }
        }
        let output = self.tensors.get("output.weight").unwrap_or(embed);
        let cap = |logit: f64| self.softcap.map_or(logit, |cap| cap * (logit / cap).tanh());
        let logits = |x: &Vec<f64>| output.times(&self.norm("output_norm.weight", x));
        stream
            .iter()
            .map(|x| logits(x).into_iter().map(cap).collect())
            .collect()
    }

    fn attention(&self, layer: usize, stream: &mut [Vec<f64>]) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        // Gemma 3: five local layers, then a global one.
        let local = self.gemma() && layer % 6 != 5;
        let base = if local { 10_000.0 } else { self.rope_base };
        let stretch = if local { 1.0 } else { self.rope_scale };
        let window = if local { self.window } else { usize::MAX };

        let project = |part: &str, x: &[f64]| self.linear(&name(part), x);
        let rotated = |part: &str, x: &[f64], position: usize| -> Vec<f64> {
            let mut y = project(part, x);
            for head in y.chunks_mut(self.head_dim) {
                if self.gemma() {
                    head.copy_from_slice(&self.norm(&name(&format!("{part}_norm.weight")), head));
                }
                self.rotate(head, position as f64 / stretch, base);
            }
            y
        };
        let (mut queries, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for (position, x) in stream.iter().enumerate() {
            let x = self.norm(&name("attn_norm.weight"), x);
            queries.push(rotated("attn_q", &x, position));
            let cached = |row: Vec<f64>| row.into_iter().map(self.cached).collect::<Vec<_>>();
            keys.push(cached(rotated("attn_k", &x, position)));
            values.push(cached(project("attn_v", &x)));
        }

        for (position, x) in stream.iter_mut().enumerate() {
            let seen = (position + 1).saturating_sub(window)..position + 1;
            let mut mixed = Vec::new();
            for head in 0..self.heads {
                let at = |row: &[f64], head: usize| {
                    row[head * self.head_dim..][..self.head_dim].to_vec()
                };
                let group = head / (self.heads / self.kv_heads);
                let query = at(&queries[position], head);
                let scores: Vec<f64> = seen
                    .clone()
                    .map(|j| dot(&query, &at(&keys[j], group)) / (self.head_dim as f64).sqrt())
                    .collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut sum = vec![0.0; self.head_dim];
                for (j, weight) in seen.clone().zip(&weights) {
                    let value = at(&values[j], group);
                    add(
                        &mut sum,
                        &value.iter().map(|v| v * weight / total).collect::<Vec<_>>(),
                    );
                }
                mixed.extend(sum);
            }
            let mut out = project("attn_output", &mixed);
            if self.gemma() {
                out = self.norm(&name("post_attention_norm.weight"), &out);
            }
            add(x, &out);
        }
    }

    fn ffn(&self, layer: usize, x: &mut [f64]) {
        let project = |part: &str, x: &[f64]| self.linear(&format!("blk.{layer}.{part}"), x);
        let normed = self.norm(&format!("blk.{layer}.ffn_norm.weight"), x);
        let up = project("ffn_up", &normed);
        let hidden: Vec<f64> = if self.arch == "arcee" {
            up.into_iter().map(|u| relu(u).powi(2)).collect()
        } else {
            let gate = project("ffn_gate", &normed);
            gate.into_iter()
                .zip(up)
                .map(|(g, u)| (self.activation)(g) * u)
                .collect()
        };
        let mut out = project("ffn_down", &hidden);
        if self.gemma() {
            out = self.norm(&format!("blk.{layer}.post_ffw_norm.weight"), &out);
        }
        add(x, &out);
    }

    fn linear(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let mut y = self.tensors[&format!("{name}.weight")].times(x);
        if let Some(bias) = self.tensors.get(&format!("{name}.bias")) {
            add(&mut y, &bias.values);
        }
        y
    }

    /// Turns pairs of a head's values by the position. Gemma pairs a value with the one half a head
    /// away, the others with its neighbour.
    fn rotate(&self, head: &mut [f64], position: f64, base: f64) {
        let half = head.len() / 2;
        for i in 0..half {
            let mut frequency = base.powf(-(i as f64) / half as f64);
            if let Some(factors) = self.tensors.get("rope_freqs.weight") {
                frequency /= factors.values[i];
            }
            let (sin, cos) = (position * frequency).sin_cos();
            let (a, b) = if self.gemma() {
                (i, i + half)
            } else {
                (2 * i, 2 * i + 1)
            };
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }

    fn norm(&self, weight: &str, x: &[f64]) -> Vec<f64> {
        let scale = 1.0 / (dot(x, x) / x.len() as f64 + self.eps).sqrt();
        x.iter()
            .zip(&self.tensors[weight].values)
            .map(|(x, w)| x * scale * w)
            .collect()
    }

    fn gemma(&self) -> bool {
        self.arch == "gemma3"
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn add(to: &mut [f64], what: &[f64]) {
    to.iter_mut().zip(what).for_each(|(to, what)| *to += what);
}

fn relu(x: f64) -> f64 {
    x.max(0.0)
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

/// The tanh form, which is what models were trained with.
fn gelu(x: f64) -> f64 {
    let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3));
    0.5 * x * (1.0 + inner.tanh())
}
