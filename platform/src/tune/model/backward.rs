//! The backward pass: from the gradient of the residual stream before the head down to the first layer.
//!
//! `buffers.dx` is the gradient of a layer's output, and becomes that of its input. What the layer saved
//! comes back into the same buffers that its forward pass filled; what it didn't save is computed again
//! into them.

use leanstream_core::plan::{Activation, VectorId};

use super::decoder::{Batch, Decoder, Keep, linears};
use super::importance::Importance;
use super::kind::Kind;
use super::linear::{Linears, energy, vector};
use super::net::Half;
use crate::error::Error;
use crate::tune::ops::{self, Direction};

impl Decoder<'_> {
    /// One block alone, forward and backward: `buffers.x` becomes its output for the stream `x`, and
    /// `buffers.dx` the gradient of `x` for the output's gradient `dy`. Gradients of what is trained are
    /// added. Below the first block nothing needs a gradient, so that one has none of `x`.
    ///
    /// Shapes: `x`, `dy` (tokens, d).
    ///
    /// # Errors
    /// As [`Decoder::step`].
    pub fn block(
        &mut self,
        index: usize,
        batch: &Batch<'_>,
        x: &[f32],
        dy: &[f32],
    ) -> Result<(), Error> {
        self.micro += 1;
        self.saved.begin_step(self.micro);
        if let Some(store) = &mut self.store {
            store.layer(index, true)?;
        }
        self.buffers.x[..x.len()].copy_from_slice(x);
        self.layer_forward(index, batch, Keep::Saved)?;
        self.buffers.dx[..dy.len()].copy_from_slice(dy);
        self.layer_backward(index, batch)
    }

    pub(super) fn backward(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        if self.learns() {
            self.importance.begin();
        }
        for layer in (0..self.net.layers.len()).rev() {
            self.heed()?;
            if let Some(store) = &mut self.store {
                store.layer(layer, false)?;
            }
            self.layer_backward(layer, batch)?;
        }
        self.embed_backward(batch);
        if self.learns() {
            self.importance.finish();
        }
        Ok(())
    }

    fn layer_backward(&mut self, index: usize, batch: &Batch<'_>) -> Result<(), Error> {
        // Whether the buffers hold attention, computed again because the network's input wasn't saved.
        let here = !self.has(index, Kind::FfnNorm);
        if here {
            self.network_input(index, batch)?;
        }
        self.ffn_backward(index, batch, here)?;
        self.attention_backward(index, batch, here)?;
        for kind in Kind::ALL {
            self.release(index, kind);
        }
        Ok(())
    }

    /// Computes the network's normed input again, from the layer's and from what else is saved of attention.
    fn network_input(&mut self, index: usize, batch: &Batch<'_>) -> Result<(), Error> {
        let (tokens, d) = (batch.tokens.len(), self.net.hyper.d as usize);
        self.attention_values(index, batch)?;
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        // A norm's output and its factor are its input.
        let rows = b.x[..tokens * d].chunks_exact_mut(d);
        let rstds = &*factors.norms[Half::Attention as usize];
        for ((x, xhat), rstd) in rows.zip(b.xhat.chunks_exact(d)).zip(rstds) {
            for (x, xhat) in x.iter_mut().zip(xhat) {
                *x = xhat / *rstd;
            }
        }
        self.output(index, Half::Attention, tokens, Keep::Here)?;
        self.add_output(tokens);
        self.norm_forward(index, Half::Ffn, tokens, Keep::Here)
    }

    /// Fills `n`, `q`, `k`, `v` and `o`, each from what is saved of it or from those before it.
    fn attention_values(&mut self, index: usize, batch: &Batch<'_>) -> Result<(), Error> {
        let tokens = batch.tokens.len();
        self.load(index, Kind::AttnNorm, tokens)?;
        self.normed(index, Half::Attention, tokens);
        if self.has(index, Kind::Q) {
            self.load(index, Kind::Q, tokens)?;
            self.load(index, Kind::K, tokens)?;
            self.load(index, Kind::V, tokens)?;
            self.renorm_heads(index, batch);
        } else {
            self.queries(index, batch, true);
        }
        if self.has(index, Kind::O) {
            self.load(index, Kind::O, tokens)?;
        } else {
            self.attend(index, batch);
        }
        Ok(())
    }

    /// Brings a saved tensor back into its buffer.
    fn load(&mut self, index: usize, kind: Kind, tokens: usize) -> Result<(), Error> {
        let width = kind.width(&self.net.hyper, self.sizes.posts);
        let mut buffer = std::mem::take(self.buffer(kind));
        let result = self.columns.load(
            &self.team,
            self.vector,
            &self.saved,
            kind.id(index),
            &mut buffer[..tokens * width],
            width,
        );
        *self.buffer(kind) = buffer;
        result.map_err(|error| Error::Runtime(format!("layer {index}, {}: {error}", kind.name())))
    }

    /// A half's normed stream from its saved `xhat`.
    fn normed(&mut self, index: usize, half: Half, tokens: usize) {
        let n = tokens * self.net.hyper.d as usize;
        let norm = self.net.layers[index].norm(half);
        let weight = vector(&self.params, &self.values, &self.vectors, norm);
        let b = &mut self.buffers;
        ops::scale_columns(&self.team, self.vector, &b.xhat[..n], weight, &mut b.n[..n]);
    }

    fn ffn_backward(&mut self, index: usize, batch: &Batch<'_>, here: bool) -> Result<(), Error> {
        let tokens = batch.tokens.len();
        let f = tokens * self.net.hyper.ff as usize;
        if !here {
            self.load(index, Kind::FfnNorm, tokens)?;
        }
        let learn = self.learns();
        if learn {
            self.saw_between(index, Kind::FfnNorm, tokens);
        }
        self.normed(index, Half::Ffn, tokens);
        if self.has(index, Kind::Up) {
            if self.net.hyper.act.gated() {
                self.load(index, Kind::Gate, tokens)?;
            }
            self.load(index, Kind::Up, tokens)?;
        } else {
            self.inputs(index, Half::Ffn, tokens, true);
        }
        if learn {
            for kind in [Kind::Gate, Kind::Up] {
                self.saw_between(index, kind, tokens);
            }
        }
        self.activate(tokens);
        if self.net.layers[index].post(Half::Ffn).is_some() {
            if self.has(index, Kind::FfnPost) {
                self.load(index, Kind::FfnPost, tokens)?;
            } else {
                self.output(index, Half::Ffn, tokens, Keep::Here)?;
            }
        }
        self.output_backward(index, Half::Ffn, tokens)?;
        let b = &mut self.buffers;
        let (h, gate, up) = (&mut b.act[..f], &mut b.gate, &mut b.up[..f]);
        let act = self.net.hyper.act;
        match act {
            Activation::ReluSquared => {
                ops::relu_sq_backward(&self.team, self.vector, h, up);
            }
            _ => {
                ops::activate_backward(&self.team, self.vector, act, h, &mut gate[..f], up);
            }
        }
        if act.sparse() {
            let du = if act.gated() { &mut gate[..f] } else { up };
            let active = ops::sparsify(&self.team, h, du, self.firing.slope);
            self.firing.saw(active, f);
        }
        self.inputs_backward(index, Half::Ffn, tokens, learn);
        Ok(())
    }

    fn attention_backward(
        &mut self,
        index: usize,
        batch: &Batch<'_>,
        here: bool,
    ) -> Result<(), Error> {
        let tokens = batch.tokens.len();
        let (qd, kvd) = self.head_widths();
        if here {
            // The network's input took its place.
            self.load(index, Kind::AttnNorm, tokens)?;
            self.normed(index, Half::Attention, tokens);
        } else {
            self.attention_values(index, batch)?;
            if self.net.layers[index].post(Half::Attention).is_some() {
                self.load(index, Kind::AttnPost, tokens)?;
            }
        }
        let learn = self.learns();
        if learn {
            for kind in [Kind::AttnNorm, Kind::Q, Kind::K, Kind::V] {
                self.saw_between(index, kind, tokens);
            }
            let (q, k) = (
                &self.buffers.q[..tokens * qd],
                &self.buffers.k[..tokens * kvd],
            );
            let squares = energy(q) / q.len() as f64 * energy(k) / k.len() as f64;
            let (scale, dim) = (self.net.hyper.attn_scale, self.net.hyper.head_dim);
            let squares = squares * f64::from(scale * scale) * f64::from(dim);
            self.importance.saw_scores(index, squares);
        }
        self.output_backward(index, Half::Attention, tokens)?;
        let shape = self.attention_shape(index);
        let b = &mut self.buffers;
        ops::attention_backward(
            &self.team,
            self.vector,
            &shape,
            batch.segments,
            &mut b.q[..tokens * qd],
            &mut b.k[..tokens * kvd],
            &mut b.v[..tokens * kvd],
            &b.d_o[..tokens * qd],
            &mut b.attention,
        );
        self.turn(index, batch, Direction::Backward);
        self.head_norms_backward(index, tokens);
        self.inputs_backward(index, Half::Attention, tokens, learn);
        Ok(())
    }

    /// Through a half's output: from the stream's gradient to that of its output linear's input, which
    /// goes into `d_o` or `act`.
    fn output_backward(&mut self, index: usize, half: Half, tokens: usize) -> Result<(), Error> {
        let (layer, site) = (self.net.layers[index], half.output());
        let n = tokens * self.net.hyper.d as usize;
        let (width, _) = self.net.shape(layer.linear(site));
        let learn = self.learns();
        if let Some(post) = layer.post(half) {
            self.post_backward(post, half, index, tokens);
        }
        let mut lin = linears!(self, true);
        let b = &mut self.buffers;
        // With a norm behind, `t` is the gradient of its input; without, the stream's own.
        let dy = match layer.post(half) {
            Some(_) => &b.t[..n],
            None => &b.dx[..n],
        };
        let rows = self.importance.rows(if learn { tokens } else { 0 });
        let input = match half {
            Half::Attention => &b.o[..tokens * width],
            Half::Ffn => &b.act[..tokens * width],
        };
        lin.gradients(index, site, input, dy, rows);
        if learn {
            let squared = energy(input);
            self.importance
                .saw_linears(index, half, true, tokens, squared);
        }
        let back = match half {
            Half::Attention => &mut b.d_o[..tokens * width],
            Half::Ffn => &mut b.act[..tokens * width],
        };
        lin.input_gradient(index, site, dy, back, false);
        if learn && half == Half::Attention {
            self.saw_input(index, Kind::O, tokens, 1.0);
        }
        Ok(())
    }

    /// Through the norm of a half's output: `t` becomes the gradient of its input.
    fn post_backward(&mut self, post: VectorId, half: Half, index: usize, tokens: usize) {
        let n = tokens * self.net.hyper.d as usize;
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        let xhat = match half {
            Half::Attention => &b.attn_post[..n],
            Half::Ffn => &b.ffn_post[..n],
        };
        linears!(self, true).norm_backward(
            post,
            (xhat, factors.posts[half as usize]),
            &b.dx[..n],
            &mut b.t[..n],
            false,
        );
    }

    /// Through a half's input linears and the norm before them: what their outputs' gradients say of the
    /// stream is added to `dx`.
    fn inputs_backward(&mut self, index: usize, half: Half, tokens: usize, learn: bool) {
        let layer = self.net.layers[index];
        let norm = layer.norm(half);
        let n = tokens * self.net.hyper.d as usize;
        // Below the first layer's attention nothing is trained unless everything is.
        let on = index > 0 || half == Half::Ffn || self.params.vector(norm).is_some();
        let mut lin = linears!(self, true);
        let b = &mut self.buffers;
        let rows = self.importance.rows(if learn { tokens } else { 0 });
        let mut add = false;
        for &site in half.inputs() {
            let Some(linear) = layer.linears[site as usize] else {
                continue;
            };
            let (_, width) = lin.net.shape(linear);
            let grad = std::mem::take(b.inside(site));
            let dy = &grad[..tokens * width];
            lin.gradients(index, site, &b.n[..n], dy, rows);
            if on {
                lin.input_gradient(index, site, dy, &mut b.t[..n], add);
                add = true;
            }
            *b.inside(site) = grad;
        }
        if learn {
            let squared = energy(&b.n[..n]);
            self.importance
                .saw_linears(index, half, false, tokens, squared);
            let weight = vector(&self.params, &self.values, &self.vectors, norm);
            let squared = energy(weight) / weight.len() as f64;
            self.saw_input(index, Kind::normed(half), tokens, squared);
        }
        if on {
            self.norm_backward(norm, half, index, tokens, learn);
        }
    }

    /// Through the norm before a half: what `t` says of its output is added to `dx`.
    fn norm_backward(
        &mut self,
        norm: VectorId,
        half: Half,
        index: usize,
        tokens: usize,
        learn: bool,
    ) {
        let before = if learn {
            self.stream_energy(tokens)
        } else {
            0.0
        };
        let n = tokens * self.net.hyper.d as usize;
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        linears!(self, true).norm_backward(
            norm,
            (&b.xhat[..n], factors.norms[half as usize]),
            &b.t[..n],
            &mut b.dx[..n],
            true,
        );
        if learn {
            let after = self.stream_energy(tokens);
            // What came through the half, as if it were at right angles to what went by.
            let share = (after - before).abs() / after.max(f64::MIN_POSITIVE);
            self.importance.saw_share(index, half, share);
        }
    }

    /// Whether the running micro-batch is one to learn importances from.
    fn learns(&self) -> bool {
        self.learn && Importance::due(self.micro)
    }

    /// The importance of a saved input of linears, whose gradients were just added; `weight` is the mean
    /// square of what its columns are multiplied by before.
    fn saw_input(&mut self, index: usize, kind: Kind, tokens: usize, weight: f64) {
        let id = kind.id(index);
        let ranges = self.importance.ranges(tokens);
        if self.saved.squared_ranges(id, 0, ranges).is_ok() {
            let squared = weight * f64::from(self.columns.mean_square(id));
            let group = self.saved.group(id).expect("it is saved");
            self.importance
                .saw_input(index, kind, group, tokens, squared as f32);
        }
    }

    /// The noise of a saved tensor that is in its buffer.
    fn saw_between(&mut self, index: usize, kind: Kind, tokens: usize) {
        let id = kind.id(index);
        let ranges = self.importance.ranges(tokens);
        if self.saved.squared_ranges(id, 0, ranges).is_ok() {
            let group = self.saved.group(id).expect("it is saved");
            let width = kind.width(&self.net.hyper, self.sizes.posts);
            let squared = energy(&self.buffer(kind)[..tokens * width]);
            // Ranges are of normalised columns.
            let squared = squared / f64::from(self.columns.mean_square(id));
            self.importance
                .saw_between(index, kind, group, tokens, squared);
        }
    }

    /// Turned queries and keys from what the norms of heads left, where heads are normed.
    fn renorm_heads(&mut self, index: usize, batch: &Batch<'_>) {
        if !self.sizes.head_norms {
            return;
        }
        let layer = self.net.layers[index];
        let tokens = batch.tokens.len();
        let (qd, kvd) = self.head_widths();
        let b = &mut self.buffers;
        for (norm, hat, out, width) in [
            (layer.q_norm, &b.q_hat, &mut b.q, qd),
            (layer.k_norm, &b.k_hat, &mut b.k, kvd),
        ] {
            let norm = norm.expect("both kinds of heads are normed, or none");
            let weight = vector(&self.params, &self.values, &self.vectors, norm);
            ops::scale_columns(
                &self.team,
                self.vector,
                &hat[..tokens * width],
                weight,
                &mut out[..tokens * width],
            );
        }
        self.turn(index, batch, Direction::Forward);
    }

    /// Through the norms of heads: the gradients in `q` and `k` become those of the projections.
    fn head_norms_backward(&mut self, index: usize, tokens: usize) {
        if !self.sizes.head_norms {
            return;
        }
        let layer = self.net.layers[index];
        let (qd, kvd) = self.head_widths();
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        // The gradient of attention's output isn't needed any more; its buffer takes the results.
        for (norm, hat, rstd, grad, width) in [
            (layer.q_norm, &b.q_hat, factors.q, &mut b.q, qd),
            (layer.k_norm, &b.k_hat, factors.k, &mut b.k, kvd),
        ] {
            let norm = norm.expect("both kinds of heads are normed, or none");
            let len = tokens * width;
            let (grad, out) = (&mut grad[..len], &mut b.d_o[..len]);
            linears!(self, true).norm_backward(norm, (&hat[..len], rstd), grad, out, false);
            grad.copy_from_slice(out);
        }
    }

    /// Squared length of the gradient that is passed on.
    fn stream_energy(&self, tokens: usize) -> f64 {
        energy(&self.buffers.dx[..tokens * self.net.hyper.d as usize])
    }
}
