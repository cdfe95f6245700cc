//! Adapters beside the weights: `y += B (A x)` after a matrix' own product, where `B` has taken in the
//! adapter's scale.
//!
//! They stay in memory as f32, those of all matrices of a step side by side: the step's input is
//! multiplied by all `A` at once when it is made, and every part of an output adds its rows of `B`, which
//! is stored by columns. Several adapters of one matrix are one of their ranks together. Each sum has a
//! fixed order, whatever the threads and the parts, so a streamed run has the bits of a resident one.

use std::collections::HashMap;
use std::ops::Range;
use std::path::PathBuf;

use leanstream_core::plan::{Hyper, Op, STEP_MATRICES_MAX, StepPlan};

use super::cells::Cells;
use super::model::{Info, Weights};
use super::pass::{Order, Shared, own, see};
use crate::error::Error;
use crate::tune::adapter::{Adapter, Pair};

/// An adapter to be used.
#[derive(Clone, PartialEq, Debug)]
pub struct Use {
    /// The file.
    pub path: PathBuf,
    /// How strongly; 1 is as it was trained.
    pub scale: f32,
}

/// The matrices of all adapters.
pub struct Lora {
    /// All `A` and `B`.
    floats: Vec<f32>,
    steps: Vec<Site>,
    hidden_max: usize,
}

/// The adapters of a step.
#[derive(Clone, Copy, Default)]
struct Site {
    /// Where its `A` begins in the floats `(rank, inputs)`.
    a: usize,
    /// Ranks of all its products together.
    rank: usize,
    inputs: usize,
    products: [Product; STEP_MATRICES_MAX],
}

/// The adapters of one product of a step.
#[derive(Clone, Copy, Default)]
struct Product {
    /// First of the step's hidden values.
    first: usize,
    rank: usize,
    /// Where its `B` begins in the floats `(rank, outputs)`.
    b: usize,
    outputs: usize,
}

/// A pair of an adapter and where it belongs.
struct Found<'a> {
    adapter: &'a Adapter,
    pair: &'a Pair,
    step: usize,
    product: usize,
    factor: f32,
}

impl Lora {
    /// Reads adapters for the matrices of a model.
    ///
    /// # Errors
    /// An adapter that can't be used, or not with this model; no memory for them.
    pub fn load(uses: &[Use], info: &Info, weights: &Weights) -> Result<Self, Error> {
        let adapters = uses
            .iter()
            .map(|given| Ok((Adapter::open(&given.path)?, given.scale)))
            .collect::<Result<Vec<_>, Error>>()?;
        let found = place(&adapters, info, weights)?;
        let mut steps = vec![Site::default(); weights.steps.len()];
        for found in &found {
            let site = &mut steps[found.step];
            let product = &mut site.products[found.product];
            site.inputs = found.pair.inputs as usize;
            product.outputs = found.pair.outputs as usize;
            product.rank += found.pair.rank as usize;
        }
        let mut len = 0;
        for site in &mut steps {
            site.a = len;
            for product in &mut site.products {
                product.first = site.rank;
                site.rank += product.rank;
            }
            len += site.rank * site.inputs;
            for product in &mut site.products {
                product.b = len;
                len += product.rank * product.outputs;
            }
        }
        let mut lora = Self {
            floats: Vec::new(),
            hidden_max: steps.iter().map(|site| site.rank).max().unwrap_or(0),
            steps,
        };
        lora.floats.try_reserve_exact(len).map_err(|_| {
            Error::Runtime(format!(
                "there is no memory for {} bytes of adapters; use fewer, or smaller ones",
                len as u64 * 4
            ))
        })?;
        lora.floats.resize(len, 0.0);
        lora.read(&found)?;
        Ok(lora)
    }

    fn read(&mut self, found: &[Found<'_>]) -> Result<(), Error> {
        let mut rows = Vec::new();
        // Ranks of each product that earlier adapters have taken.
        let mut taken = vec![[0; STEP_MATRICES_MAX]; self.steps.len()];
        for found in found {
            let (adapter, pair) = (found.adapter, found.pair);
            let site = self.steps[found.step];
            let product = site.products[found.product];
            let taken = &mut taken[found.step][found.product];
            let (rank, outputs) = (pair.rank as usize, product.outputs);
            let a = site.a + (product.first + *taken) * site.inputs;
            adapter.read_a(pair, &mut self.floats[a..a + rank * site.inputs])?;
            rows.clear();
            rows.resize(outputs * rank, 0.0);
            adapter.read_b(pair, &mut rows)?;
            let b = product.b + *taken * outputs;
            let columns = &mut self.floats[b..b + rank * outputs];
            for (output, row) in rows.chunks_exact(rank).enumerate() {
                for (r, value) in row.iter().enumerate() {
                    columns[r * outputs + output] = found.factor * value;
                }
            }
            *taken += rank;
        }
        Ok(())
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        (self.floats.capacity() * size_of::<f32>() + self.steps.capacity() * size_of::<Site>())
            as u64
    }

    /// Bytes of the hidden values of `tokens` tokens, and of one ahead.
    pub fn hidden_bytes(&self, tokens: u64) -> u64 {
        (tokens + 1) * self.hidden_max as u64 * 4
    }
}

/// Finds what each pair belongs to.
fn place<'a>(
    adapters: &'a [(Adapter, f32)],
    info: &Info,
    weights: &Weights,
) -> Result<Vec<Found<'a>>, Error> {
    let model = &info.paths[0];
    let targets = targets(&info.hyper, &weights.steps);
    let mut all = Vec::new();
    for (adapter, scale) in adapters {
        adapter.check_arch(info.hyper.arch.name(), model)?;
        for pair in adapter.pairs() {
            let name = pair.name.as_str();
            if info.packed && name.contains(".ffn_") {
                return Err(adapter.unsuited(
                    pair,
                    format_args!(
                        "is for a feed-forward network, whose neurons are packed in {}: merge the adapter into the model \
                         that was packed (leanstream merge -m MODEL.gguf --lora ADAPTER -o OUT.gguf), and pack that",
                        model.display()
                    ),
                ));
            }
            if info.head.sketched() && name == HEAD {
                return Err(adapter.unsuited(
                    pair,
                    format_args!(
                        "is for the head, which --head {} sketches: leave out --head",
                        info.head.name()
                    ),
                ));
            }
            let Some(&(step, product)) = targets.get(name) else {
                return Err(adapter.misplaced(
                    pair,
                    format_args!(
                        "is for a matrix that {} doesn't multiply by: give the model that the adapter was made from",
                        model.display()
                    ),
                ));
            };
            let linear = weights.steps[step].linears[product].expect("targets are products");
            let matrix = &weights.matrices[linear.matrix.0 as usize];
            adapter.check_shape(pair, (matrix.rows.into(), matrix.cols.into()), model)?;
            let factor = adapter.factor(pair, *scale)?;
            // At a scale of 0 it adds nothing.
            if factor != 0.0 {
                all.push(Found {
                    adapter,
                    pair,
                    step,
                    product,
                    factor,
                });
            }
        }
    }
    Ok(all)
}

/// The name of a head of its own.
const HEAD: &str = "output.weight";

/// Tensors that a pass multiplies by: their step, and which product of it.
fn targets(hyper: &Hyper, steps: &[StepPlan]) -> HashMap<String, (usize, usize)> {
    let mut targets = HashMap::new();
    let mut layers = 0u32;
    for (number, step) in steps.iter().enumerate() {
        let names: &[&str] = match step.op {
            Op::Qkv { .. } => {
                layers += 1;
                &["attn_q", "attn_k", "attn_v"]
            }
            Op::Out { .. } => &["attn_output"],
            Op::Up { .. } if hyper.act.gated() => &["ffn_gate", "ffn_up"],
            Op::Up { .. } => &["ffn_up"],
            Op::Down { .. } => &["ffn_down"],
            Op::Head { .. } => {
                if !hyper.tied {
                    targets.insert(HEAD.to_owned(), (number, 0));
                }
                &[]
            }
            Op::Embed | Op::Attend { .. } | Op::Units { .. } | Op::HeadRows => &[],
        };
        let products = step.linears.iter().flatten();
        for (product, (name, _)) in names.iter().zip(products).enumerate() {
            let name = format!("blk.{}.{name}.weight", layers - 1);
            targets.insert(name, (number, product));
        }
    }
    targets
}

/// Adapters with the hidden values of the batch.
pub struct LoraRoom {
    lora: Lora,
    /// `A x` of the running step `(tokens, hidden_max)`.
    hidden: Cells<f32>,
    /// The same of the layer ahead, one token.
    ahead: Cells<f32>,
}

impl LoraRoom {
    /// Room for `tokens` tokens.
    pub fn new(lora: Lora, tokens: usize) -> Self {
        Self {
            hidden: Cells::new(tokens * lora.hidden_max),
            ahead: Cells::new(lora.hidden_max),
            lora,
        }
    }

    fn hidden(
        &self,
        order: Order,
        token: usize,
        part: Range<usize>,
    ) -> (&Cells<f32>, Range<usize>) {
        let at = token * self.lora.hidden_max;
        let cells = if order.ahead {
            &self.ahead
        } else {
            &self.hidden
        };
        (cells, at + part.start..at + part.end)
    }
}

impl Shared {
    /// In phase `Input`: `A x` of one token for all products of the step.
    pub(super) fn lora_in(&self, order: Order, token: usize, x: &[f32]) {
        let Some(room) = &self.lora else { return };
        let site = &room.lora.steps[order.step as usize];
        if site.rank == 0 {
            return;
        }
        let (cells, range) = room.hidden(order, token, 0..site.rank);
        let a = &room.lora.floats[site.a..site.a + site.rank * site.inputs];
        for (hidden, row) in own(cells, range)
            .iter_mut()
            .zip(a.chunks_exact(site.inputs))
        {
            *hidden = self.vector.dot(row, x);
        }
    }

    /// In phase `Rows`: adds `B (A x)` to some rows of a product for one token.
    pub(super) fn lora_out(
        &self,
        order: Order,
        product: usize,
        rows: Range<usize>,
        token: usize,
        out: &mut [f32],
    ) {
        let Some(room) = &self.lora else { return };
        let product = &room.lora.steps[order.step as usize].products[product];
        if product.rank == 0 {
            return;
        }
        let part = product.first..product.first + product.rank;
        let (cells, range) = room.hidden(order, token, part);
        for (r, &hidden) in see(cells, range).iter().enumerate() {
            let at = product.b + r * product.outputs;
            let column = &room.lora.floats[at + rows.start..at + rows.end];
            self.vector.add_scaled(out, hidden, column);
        }
    }
}
