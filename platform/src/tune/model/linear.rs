//! A linear with what is trained at it: an adapter beside frozen weights, or the weights themselves.

use std::ops::Range;

use leanstream_core::act::codec::Counter;
use leanstream_core::act::importance::weight;
use leanstream_core::plan::{Linear, VectorId};
use leanstream_core::quant::QuantType;

use super::net::{Net, Site};
use super::params::{Params, Scheme};
use super::store::{Held, Store};
use crate::cpu::Rows;
use crate::cpu::vector::Vector;
use crate::run::model::Vectors;
use crate::tune::gemm::{Mat, MatMut, Products};
use crate::tune::ops::{self, Dropout};
use crate::tune::optim::sum_squares;
use crate::tune::team::Team;

/// Trained weights as kernels take them: `(rows, cols)` floats.
pub fn trained(values: &[f32], cols: usize) -> Rows<'_> {
    Rows {
        ty: QuantType::F32,
        cols,
        bytes: bytemuck::cast_slice(values),
    }
}

/// A linear's weights.
enum Weight<'a> {
    /// Floats among the trained tensors.
    Trained(Rows<'a>),
    /// Held by the store.
    Frozen(Held<'a>),
}

impl Weight<'_> {
    fn rows(&self) -> Rows<'_> {
        match self {
            Self::Trained(rows) => *rows,
            Self::Frozen(held) => held.rows(),
        }
    }
}

/// What linears and norms are computed with; borrowed for a while from the decoder.
pub struct Linears<'a> {
    /// The threads.
    pub team: &'a Team,
    /// Matrix products.
    pub products: &'a mut Products,
    /// Elementwise kernels.
    pub vector: Vector,
    /// The decoder's shape.
    pub net: &'a Net,
    /// Where trained tensors lie.
    pub params: &'a Params,
    /// Their values.
    pub values: &'a [f32],
    /// Their gradients.
    pub grads: &'a mut [f32],
    /// Frozen weights; none where everything is trained.
    pub store: Option<&'a Store>,
    /// Frozen norms and biases.
    pub vectors: &'a Vectors,
    /// `A x` (tokens, rank), and its gradient.
    pub low: [&'a mut [f32]; 2],
    /// An adapter's input with what dropout leaves out (tokens, widest); empty without dropout.
    pub dropped: &'a mut [f32],
    /// Seed of dropout's noise, and the micro-step; `None` while nothing is trained.
    pub noise: Option<(u64, u64)>,
}

impl<'a> Linears<'a> {
    /// A norm's weight or a bias.
    pub fn vector(&self, id: VectorId) -> &'a [f32] {
        vector(self.params, self.values, self.vectors, id)
    }

    fn weight(&self, linear: Linear) -> Weight<'a> {
        let matrix = self.net.matrix(linear);
        match self.params.matrix(linear.matrix) {
            Some(at) => {
                let (rows, cols) = (matrix.rows as usize, matrix.cols as usize);
                Weight::Trained(trained(&self.values[at..at + rows * cols], cols))
            }
            None => {
                let store = self.store.expect("frozen weights are in a store");
                Weight::Frozen(store.matrix(linear.matrix, matrix))
            }
        }
    }

    /// The RMS norm `y` of `x`. Shapes: `x`, `y`, `xhat` (rows, width), `rstd` (rows).
    pub fn norm(
        &self,
        norm: VectorId,
        x: &[f32],
        y: &mut [f32],
        xhat: &mut [f32],
        rstd: &mut [f32],
    ) {
        let (weight, eps) = (self.vector(norm), self.net.hyper.eps);
        ops::rms_norm(self.team, self.vector, x, weight, eps, y, xhat, rstd);
    }

    /// The same, of what is in `y`.
    pub fn norm_in_place(&self, norm: VectorId, y: &mut [f32], xhat: &mut [f32], rstd: &mut [f32]) {
        let (weight, eps) = (self.vector(norm), self.net.hyper.eps);
        xhat.copy_from_slice(y);
        ops::rms_norm_in_place(self.team, self.vector, xhat, weight, eps, y, rstd);
    }

    /// `dx (+)=` the gradient of a norm's input, and adds that of its weight where that is trained.
    /// Shapes: `xhat`, `dy`, `dx` (rows, width), `rstd` (rows).
    pub fn norm_backward(
        &mut self,
        norm: VectorId,
        (xhat, rstd): (&[f32], &[f32]),
        dy: &[f32],
        dx: &mut [f32],
        add: bool,
    ) {
        let weight = self.vector(norm);
        ops::rms_norm_backward(self.team, self.vector, xhat, rstd, weight, dy, dx, add);
        if let Some(at) = self.params.vector(norm) {
            let grads = &mut self.grads[at..at + weight.len()];
            ops::rms_norm_weight_gradient(self.team, self.vector, xhat, dy, grads);
        }
    }

    /// `y = W x + bias + alpha / rank * B (A x)`. Shapes: `x` (tokens, inputs), `y` (tokens, outputs).
    pub fn forward(&mut self, layer: usize, site: Site, x: &[f32], y: &mut [f32]) {
        let linear = self.net.layers[layer].linear(site);
        let (inputs, outputs) = self.net.shape(linear);
        let tokens = x.len() / inputs;
        self.product(linear, x, y);
        if let Some(pair) = self.params.pair(layer, site) {
            let rank = pair.rank;
            self.lower(layer, site, x);
            let low = Mat::new(&self.low[0][..tokens * rank], tokens, rank);
            let b = Mat::new(&self.values[pair.b()], outputs, rank).t();
            let y = MatMut::new(y, tokens, outputs);
            let scale = self.params.scale();
            self.products.product(self.team, low, b, scale, y, true);
        }
    }

    fn product(&mut self, linear: Linear, x: &[f32], y: &mut [f32]) {
        let weight = self.weight(linear);
        self.products.forward(self.team, weight.rows(), x, y, false);
        if let Some(bias) = linear.bias {
            ops::add_bias(self.team, self.vector, y, self.vector(bias));
        }
    }

    /// `low[0] = A x`, of what dropout leaves of `x`.
    fn lower(&mut self, layer: usize, site: Site, x: &[f32]) {
        let pair = self.params.pair(layer, site).expect("an adapter");
        let tokens = x.len() / pair.inputs;
        let x = match self.mask(layer, site) {
            Some(mask) => {
                let dropped = &mut self.dropped[..x.len()];
                ops::dropout(self.team, self.vector, mask, x, dropped, false);
                &*dropped
            }
            None => x,
        };
        let x = Mat::new(x, tokens, pair.inputs);
        let a = Mat::new(&self.values[pair.a()], pair.rank, pair.inputs).t();
        let low = MatMut::new(&mut self.low[0][..tokens * pair.rank], tokens, pair.rank);
        self.products.product(self.team, x, a, 1.0, low, false);
    }

    /// What dropout leaves out at a site in the running micro-step.
    fn mask(&self, layer: usize, site: Site) -> Option<Dropout> {
        let Scheme::Lora { dropout, .. } = self.params.scheme else {
            return None;
        };
        let (seed, step) = self.noise?;
        (dropout > 0.0).then(|| Dropout {
            share: dropout,
            counter: Counter {
                seed,
                step,
                tensor: (layer * Site::ALL.len() + site as usize) as u32,
            },
        })
    }

    /// Adds the gradients of what is trained at a site, and leaves `low[1]` for
    /// [`Linears::input_gradient`]. To each of `rows` is added the squared length of what that row of `x`
    /// is multiplied with in the gradient. Shapes: `x` (tokens, inputs), `dy` (tokens, outputs), `rows`
    /// (tokens) or nothing.
    pub fn gradients(&mut self, layer: usize, site: Site, x: &[f32], dy: &[f32], rows: &mut [f32]) {
        let linear = self.net.layers[layer].linear(site);
        let (inputs, outputs) = self.net.shape(linear);
        let tokens = x.len() / inputs;
        let out = Mat::new(dy, tokens, outputs);
        if let Some(at) = self.params.matrix(linear.matrix) {
            let grads = &mut self.grads[at..at + outputs * inputs];
            let grads = MatMut::new(grads, outputs, inputs);
            let x = Mat::new(x, tokens, inputs);
            self.products
                .product(self.team, out.t(), x, 1.0, grads, true);
            if let Some(at) = linear.bias.and_then(|bias| self.params.vector(bias)) {
                let grads = &mut self.grads[at..at + outputs];
                ops::bias_gradient(self.team, self.vector, dy, grads);
            }
            let at = at..at + outputs * inputs;
            add_squares(rows, dy, self.noise_weight(at, rows));
            return;
        }
        let Some(pair) = self.params.pair(layer, site) else {
            return;
        };
        let (rank, scale) = (pair.rank, self.params.scale());
        // What was computed on the way forward; cheaper again than kept.
        self.lower(layer, site, x);
        let low = Mat::new(&self.low[0][..tokens * rank], tokens, rank);
        let b_grads = MatMut::new(&mut self.grads[pair.b()], outputs, rank);
        self.products
            .product(self.team, out.t(), low, scale, b_grads, true);
        let b = Mat::new(&self.values[pair.b()], outputs, rank);
        let dlow = MatMut::new(&mut self.low[1][..tokens * rank], tokens, rank);
        self.products.product(self.team, out, b, scale, dlow, false);
        let dropped = self.mask(layer, site).is_some();
        let x = if dropped { &self.dropped[..x.len()] } else { x };
        let dlow = Mat::new(&self.low[1][..tokens * rank], tokens, rank);
        let a_grads = MatMut::new(&mut self.grads[pair.a()], rank, inputs);
        let x = Mat::new(x, tokens, inputs);
        self.products
            .product(self.team, dlow.t(), x, 1.0, a_grads, true);
        // Noise of `x` is in both gradients: in that of A times `B^T dy`, and through A x in that of B times
        // `dy`.
        let weight = self.noise_weight(pair.a(), rows);
        add_squares(rows, &self.low[1][..tokens * rank], weight);
        if !rows.is_empty() {
            let a = &self.values[pair.a()];
            let through = a.iter().map(|a| a * a).sum::<f32>() / inputs as f32;
            let weight = self.noise_weight(pair.b(), rows);
            add_squares(rows, dy, weight * scale * scale * through);
        }
    }

    /// What noise counts in the gradient at `at`, where `rows` are asked for.
    fn noise_weight(&self, at: Range<usize>, rows: &[f32]) -> f32 {
        if rows.is_empty() {
            return 0.0;
        }
        let share = at.len() as f64 / self.params.count as f64;
        weight(share, sum_squares(self.team, self.vector, &self.grads[at])) as f32
    }

    /// `dx (+)= dy W`, and through the adapter, whose [`Linears::gradients`] came just before.
    pub fn input_gradient(
        &mut self,
        layer: usize,
        site: Site,
        dy: &[f32],
        dx: &mut [f32],
        add: bool,
    ) {
        let linear = self.net.layers[layer].linear(site);
        let (inputs, outputs) = self.net.shape(linear);
        let tokens = dy.len() / outputs;
        let weight = self.weight(linear);
        self.products
            .backward(self.team, weight.rows(), dy, dx, add);
        let Some(pair) = self.params.pair(layer, site) else {
            return;
        };
        let rank = pair.rank;
        let dlow = Mat::new(&self.low[1][..tokens * rank], tokens, rank);
        let a = Mat::new(&self.values[pair.a()], rank, inputs);
        match self.mask(layer, site) {
            None => {
                let dx = MatMut::new(dx, tokens, inputs);
                self.products.product(self.team, dlow, a, 1.0, dx, true);
            }
            Some(mask) => {
                let part = &mut self.dropped[..tokens * inputs];
                let out = MatMut::new(part, tokens, inputs);
                self.products.product(self.team, dlow, a, 1.0, out, false);
                ops::dropout(self.team, self.vector, mask, part, dx, true);
            }
        }
    }
}

/// A norm's weight or a bias, trained or not.
pub fn vector<'a>(
    params: &Params,
    values: &'a [f32],
    vectors: &'a Vectors,
    id: VectorId,
) -> &'a [f32] {
    let frozen = vectors.get(id);
    match params.vector(id) {
        Some(at) => &values[at..at + frozen.len()],
        None => frozen,
    }
}

/// The sum of squares, in a fixed order.
pub fn energy(x: &[f32]) -> f64 {
    x.chunks(64)
        .map(|part| f64::from(part.iter().map(|x| x * x).sum::<f32>()))
        .sum()
}

/// Adds the squared length of each row of `x`, times `factor`. Shapes: `rows` (n) or nothing, `x` (n, any).
fn add_squares(rows: &mut [f32], x: &[f32], factor: f32) {
    if rows.is_empty() {
        return;
    }
    let width = x.len() / rows.len();
    for (row, x) in rows.iter_mut().zip(x.chunks_exact(width)) {
        *row += factor * x.iter().map(|x| x * x).sum::<f32>();
    }
}
