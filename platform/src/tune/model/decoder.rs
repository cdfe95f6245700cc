//! The decoder's forward pass: from tokens to the residual stream before the head, saving what the
//! backward pass needs.

use std::sync::atomic::AtomicI32;

use leanstream_core::plan::Activation;

use super::buffers::{Buffers, Factors, Low, Sizes, attention_shape};
use super::columns::Columns;
use super::head::Losses;
use super::importance::Importance;
use super::kind::{Kind, LayerPlan};
use super::linear::Linears;
use super::net::{Half, Net};
use super::params::Params;
use super::store::Store;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::run::model::Vectors;
use crate::tune::act::{SaveError, Saved};
use crate::tune::allotment::Allotment;
use crate::tune::gemm::Products;
use crate::tune::memory::{MemoryPlan, widths_of};
use crate::tune::ops::{self, Angles, AttentionShape, Direction};
use crate::tune::team::Team;
use crate::tune::watch::Watch;

/// The sequences of a micro-batch, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct Batch<'a> {
    /// Token ids (tokens).
    pub tokens: &'a [u32],
    /// What each is to predict, `u32::MAX` where nothing (tokens).
    pub targets: &'a [u32],
    /// First token and tokens of each sequence.
    pub segments: &'a [(usize, usize)],
    /// Where each token stands in its sequence (tokens).
    pub positions: &'a [u32],
}

/// A decoder that is trained, with everything its passes need.
pub struct Decoder<'m> {
    /// Its shape.
    pub net: Net,
    /// Its frozen norms and biases.
    pub vectors: Vectors,
    /// Its frozen matrices; none where everything is trained.
    pub store: Option<Store>,
    /// Embedding rows of a model whose head isn't its embedding matrix.
    pub rows: super::embed::Embedding,
    /// Where trained tensors lie.
    pub params: Params,
    /// Their values.
    pub values: Vec<f32>,
    /// Their gradients.
    pub grads: Vec<f32>,
    /// The threads.
    pub team: Team,
    /// Matrix products.
    pub products: Products,
    /// Elementwise kernels.
    pub vector: Vector,
    /// Work space of layers.
    pub buffers: Buffers,
    /// Work space of adapters.
    pub low: Low,
    /// Exact factors of norms.
    pub factors: Factors,
    /// What was saved for the backward pass.
    pub saved: Saved<'m>,
    /// By which columns.
    pub columns: Columns,
    /// At which width each layer's tensors are saved.
    pub plan: Vec<LayerPlan>,
    /// How that is chosen.
    pub allotment: Allotment,
    /// Who holds what of the budget.
    pub memory: MemoryPlan,
    /// Whether the budget has changed.
    pub watch: Watch,
    /// The signal that asks to stop, 0 while there is none.
    pub stop: &'static AtomicI32,
    /// What noise in each of them would do.
    pub importance: Importance,
    /// Whether that is to be found out.
    pub learn: bool,
    /// Rotary angles of layers with full attention, then of those with a window.
    pub angles: [Angles; 2],
    /// The losses of one micro-batch.
    pub losses: Losses,
    /// Largest micro-batch.
    pub sizes: Sizes,
    /// Neurons of ReLU that fire, and how they are pushed to silence.
    pub firing: Firing,
    /// Seed of all noise of training.
    pub seed: u64,
    /// Micro-steps so far: the other half of the noise's seed.
    pub micro: u64,
}

/// Neurons of ReLU that fire: their share since the last [`Firing::take`], and what is held against them.
#[derive(Clone, Copy, Default, Debug)]
pub struct Firing {
    /// This times the mean output of ReLU, summed over layers, is added to each token's loss.
    pub penalty: f32,
    /// What that adds to the gradient of ReLU's input where it is positive.
    pub slope: f32,
    active: u64,
    all: u64,
}

impl Firing {
    /// Nothing seen yet.
    pub fn new(penalty: f32) -> Self {
        Self {
            penalty,
            ..Self::default()
        }
    }

    /// Counts `active` of `all`.
    pub(super) fn saw(&mut self, active: u64, all: usize) {
        self.active += active;
        self.all += all as u64;
    }

    /// The share that fired since this was last asked for; none where there is no ReLU.
    pub fn take(&mut self) -> Option<f64> {
        let share = (self.all > 0).then(|| self.active as f64 / self.all as f64);
        (self.active, self.all) = (0, 0);
        share
    }
}

/// What becomes of a layer's activations.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keep {
    /// Nothing is trained.
    Nothing,
    /// They are saved as the plan says.
    Saved,
    /// They stay in the buffers: the layer is computed again for its backward pass.
    Here,
}

/// Borrows a decoder's parts for its linears, beside its buffers.
macro_rules! linears {
    ($self:ident, $train:expr) => {
        Linears {
            team: &$self.team,
            products: &mut $self.products,
            vector: $self.vector,
            net: &$self.net,
            params: &$self.params,
            values: &$self.values,
            grads: &mut $self.grads,
            store: $self.store.as_ref(),
            vectors: &$self.vectors,
            low: [&mut $self.low.x, &mut $self.low.dx],
            dropped: &mut $self.low.dropped,
            noise: $train.then_some(($self.seed, $self.micro)),
        }
    };
}
pub(super) use linears;

impl Decoder<'_> {
    /// One micro-batch forward and backward. Adds the gradient of `weight` times the sum of its losses,
    /// and returns that sum and how many tokens had a target.
    ///
    /// # Errors
    /// A read that fails for good, a stop, an activation that isn't finite, or a pool that is too small.
    pub fn step(&mut self, batch: &Batch<'_>, weight: f32) -> Result<(f64, usize), Error> {
        self.micro += 1;
        self.saved.begin_step(self.micro);
        self.firing.slope = self.firing.penalty * weight / self.net.hyper.ff as f32;
        self.forward(batch, true)?;
        let result = self.head(batch, Some(weight))?;
        self.backward(batch)?;
        Ok(result)
    }

    /// The sum of a micro-batch's losses and how many tokens had a target; nothing is trained.
    ///
    /// # Errors
    /// A read that fails for good, or a stop.
    pub fn evaluate(&mut self, batch: &Batch<'_>) -> Result<(f64, usize), Error> {
        self.forward(batch, false)?;
        self.head(batch, None)
    }

    /// The most bytes that what is kept for the backward pass came to: pages, metadata, and the exact
    /// factors.
    pub fn act_peak_bytes(&self) -> u64 {
        let widths = widths_of(&self.net, self.sizes.posts);
        let (columns, _) = Columns::bytes(widths, self.sizes.threads);
        let factors = Factors::bytes(&self.sizes, &self.net.hyper);
        self.saved.peak_bytes() + columns + factors
    }

    fn forward(&mut self, batch: &Batch<'_>, train: bool) -> Result<(), Error> {
        let d = self.net.hyper.d as usize;
        let tokens = batch.tokens.len();
        self.embed(batch)?;
        debug_assert!(tokens * d <= self.buffers.x.len());
        let keep = if train { Keep::Saved } else { Keep::Nothing };
        for layer in 0..self.net.layers.len() {
            self.heed()?;
            if let Some(store) = &mut self.store {
                store.layer(layer, true)?;
            }
            self.layer_forward(layer, batch, keep)?;
        }
        Ok(())
    }

    /// One layer: the stream in `buffers.x` becomes its output.
    pub(super) fn layer_forward(
        &mut self,
        index: usize,
        batch: &Batch<'_>,
        keep: Keep,
    ) -> Result<(), Error> {
        self.attention_forward(index, batch, keep)?;
        self.ffn_forward(index, batch, keep)
    }

    fn attention_forward(
        &mut self,
        index: usize,
        batch: &Batch<'_>,
        keep: Keep,
    ) -> Result<(), Error> {
        let tokens = batch.tokens.len();
        self.norm_forward(index, Half::Attention, tokens, keep)?;
        self.queries(index, batch, keep != Keep::Nothing);
        self.save(index, Kind::Q, tokens, keep)?;
        self.save(index, Kind::K, tokens, keep)?;
        self.save(index, Kind::V, tokens, keep)?;
        self.attend(index, batch);
        self.save(index, Kind::O, tokens, keep)?;
        self.output(index, Half::Attention, tokens, keep)?;
        self.add_output(tokens);
        Ok(())
    }

    fn ffn_forward(&mut self, index: usize, batch: &Batch<'_>, keep: Keep) -> Result<(), Error> {
        let tokens = batch.tokens.len();
        self.norm_forward(index, Half::Ffn, tokens, keep)?;
        self.inputs(index, Half::Ffn, tokens, keep != Keep::Nothing);
        self.save(index, Kind::Gate, tokens, keep)?;
        self.save(index, Kind::Up, tokens, keep)?;
        self.activate(tokens);
        self.output(index, Half::Ffn, tokens, keep)?;
        self.add_output(tokens);
        Ok(())
    }

    /// The stream, normed for a half, into `n` and `xhat`.
    pub(super) fn norm_forward(
        &mut self,
        index: usize,
        half: Half,
        tokens: usize,
        keep: Keep,
    ) -> Result<(), Error> {
        let norm = self.net.layers[index].norm(half);
        let n = tokens * self.net.hyper.d as usize;
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        linears!(self, false).norm(
            norm,
            &b.x[..n],
            &mut b.n[..n],
            &mut b.xhat[..n],
            factors.norms[half as usize],
        );
        self.save(index, Kind::normed(half), tokens, keep)
    }

    /// A half's output, through the norm that may follow it, into `t`.
    pub(super) fn output(
        &mut self,
        index: usize,
        half: Half,
        tokens: usize,
        keep: Keep,
    ) -> Result<(), Error> {
        let (layer, site) = (self.net.layers[index], half.output());
        let n = tokens * self.net.hyper.d as usize;
        let (width, _) = self.net.shape(layer.linear(site));
        let b = &mut self.buffers;
        let input = std::mem::take(b.inside(site));
        let t = &mut b.t[..n];
        linears!(self, keep != Keep::Nothing).forward(index, site, &input[..tokens * width], t);
        *b.inside(site) = input;
        if let Some(post) = layer.post(half) {
            let factors = self.factors.layer(index, tokens);
            let (xhat, t) = match half {
                Half::Attention => (&mut b.attn_post, &mut b.t),
                Half::Ffn => (&mut b.ffn_post, &mut b.t),
            };
            linears!(self, false).norm_in_place(
                post,
                &mut t[..n],
                &mut xhat[..n],
                factors.posts[half as usize],
            );
            self.save(index, Kind::output(half), tokens, keep)?;
        }
        Ok(())
    }

    /// A half's output is added to the stream.
    pub(super) fn add_output(&mut self, tokens: usize) {
        let n = tokens * self.net.hyper.d as usize;
        let b = &mut self.buffers;
        ops::add(&self.team, self.vector, &mut b.x[..n], &b.t[..n]);
    }

    /// `q`, `k`, `v` of the normed stream in `n`, normed and turned. Keeps what norms of heads divided.
    pub(super) fn queries(&mut self, index: usize, batch: &Batch<'_>, train: bool) {
        let layer = self.net.layers[index];
        let tokens = batch.tokens.len();
        let (qd, kvd) = self.head_widths();
        self.inputs(index, Half::Attention, tokens, train);
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        for (norm, x, xhat, rstd, width) in [
            (layer.q_norm, &mut b.q, &mut b.q_hat, factors.q, qd),
            (layer.k_norm, &mut b.k, &mut b.k_hat, factors.k, kvd),
        ] {
            if let Some(norm) = norm {
                let (x, xhat) = (&mut x[..tokens * width], &mut xhat[..tokens * width]);
                linears!(self, false).norm_in_place(norm, x, xhat, rstd);
            }
        }
        self.turn(index, batch, Direction::Forward);
    }

    /// A half's linears of the normed stream in `n`.
    pub(super) fn inputs(&mut self, index: usize, half: Half, tokens: usize, train: bool) {
        let n = tokens * self.net.hyper.d as usize;
        let b = &mut self.buffers;
        for &site in half.inputs() {
            let Some(linear) = self.net.layers[index].linears[site as usize] else {
                continue;
            };
            let (_, width) = self.net.shape(linear);
            let mut out = std::mem::take(b.inside(site));
            let (x, y) = (&b.n[..n], &mut out[..tokens * width]);
            linears!(self, train).forward(index, site, x, y);
            *b.inside(site) = out;
        }
    }

    /// Turns queries and keys forward, or, when they have become gradients, back.
    pub(super) fn turn(&mut self, index: usize, batch: &Batch<'_>, direction: Direction) {
        let tokens = batch.tokens.len();
        let (qd, kvd) = self.head_widths();
        let angles = &self.angles[usize::from(self.net.hyper.slides(index as u32))];
        let b = &mut self.buffers;
        for x in [&mut b.q[..tokens * qd], &mut b.k[..tokens * kvd]] {
            angles.turn(&self.team, self.vector, batch.positions, x, direction);
        }
    }

    /// Attention over what is in `q`, `k`, `v`.
    pub(super) fn attend(&mut self, index: usize, batch: &Batch<'_>) {
        let tokens = batch.tokens.len();
        let (qd, kvd) = self.head_widths();
        let shape = self.attention_shape(index);
        let b = &mut self.buffers;
        ops::attention(
            &self.team,
            self.vector,
            &shape,
            batch.segments,
            &b.q[..tokens * qd],
            &b.k[..tokens * kvd],
            &b.v[..tokens * kvd],
            &mut b.o[..tokens * qd],
            &mut b.attention,
        );
    }

    /// `act` of `gate` and `up`.
    pub(super) fn activate(&mut self, tokens: usize) {
        let len = tokens * self.net.hyper.ff as usize;
        let b = &mut self.buffers;
        match self.net.hyper.act {
            Activation::ReluSquared => {
                ops::relu_sq(&self.team, self.vector, &b.up[..len], &mut b.act[..len]);
            }
            act => ops::activate(
                &self.team,
                self.vector,
                act,
                &b.gate[..len],
                &b.up[..len],
                &mut b.act[..len],
            ),
        }
    }

    /// The buffer that a saved tensor comes from and goes back to.
    pub(super) fn buffer(&mut self, kind: Kind) -> &mut Vec<f32> {
        let b = &mut self.buffers;
        match kind {
            Kind::AttnNorm | Kind::FfnNorm => &mut b.xhat,
            // Where heads are normed, what the norm's backward pass needs.
            Kind::Q if self.sizes.head_norms => &mut b.q_hat,
            Kind::K if self.sizes.head_norms => &mut b.k_hat,
            Kind::Q => &mut b.q,
            Kind::K => &mut b.k,
            Kind::V => &mut b.v,
            Kind::O => &mut b.o,
            Kind::AttnPost => &mut b.attn_post,
            Kind::Gate => &mut b.gate,
            Kind::Up => &mut b.up,
            Kind::FfnPost => &mut b.ffn_post,
        }
    }

    fn save(&mut self, index: usize, kind: Kind, tokens: usize, keep: Keep) -> Result<(), Error> {
        if keep != Keep::Saved {
            return Ok(());
        }
        let width = kind.width(&self.net.hyper, self.sizes.posts);
        let Some(bits) = self.plan[index].width(kind).filter(|_| width > 0) else {
            return Ok(());
        };
        let buffer = std::mem::take(self.buffer(kind));
        let x = &buffer[..tokens * width];
        let result = self.columns.save(
            &self.team,
            self.vector,
            &mut self.saved,
            kind.id(index),
            x,
            width,
            bits,
        );
        *self.buffer(kind) = buffer;
        result.map_err(|error| {
            let why = format!("layer {index}, {}: {error}", kind.name());
            match error {
                SaveError::NotFinite { .. } => Error::NotFinite(why),
                _ => Error::Runtime(why),
            }
        })
    }

    /// Floats of a token's queries, and of its keys.
    pub(super) fn head_widths(&self) -> (usize, usize) {
        let hyper = &self.net.hyper;
        (hyper.q_dim() as usize, hyper.kv_dim() as usize)
    }

    pub(super) fn attention_shape(&self, index: usize) -> AttentionShape {
        attention_shape(&self.net.hyper, index as u32)
    }
}
