//! The backward pass: from the gradient of the residual stream before the head down to the first layer.
//!
//! `buffers.dx` is the gradient of a layer's output, and becomes that of its input. What the layer saved
//! comes back into the same buffers that its forward pass filled; what it didn't save is computed again
//! into them.

use leanstream_core::plan::{Activation, VectorId};

use super::decoder::{Batch, Decoder, Keep, linears};
use super::importance::{Half, Importance};
use super::kind::Kind;
use super::linear::{Linears, energy, vector};
use super::net::Site;
use crate::error::Error;
use crate::tune::ops::{self, Direction};
use crate::tune::optim::sum_squares;

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
        for layer in (0..self.net.layers.len()).rev() {
            self.heed()?;
            if let Some(store) = &mut self.store {
                store.layer(layer, false)?;
            }
            self.layer_backward(layer, batch)?;
        }
        self.embed_backward(batch);
        if self.learns() {
            let squared = sum_squares(&self.team, self.vector, &self.grads);
            self.importance.finish(squared);
        }
        Ok(())
    }

    fn layer_backward(&mut self, index: usize, batch: &Batch<'_>) -> Result<(), Error> {
        // What the buffers hold: everything when the layer was computed again.
        let here = !self.has(index, Kind::FfnNorm);
        if here {
            self.replay(index, batch)?;
        }
        self.ffn_backward(index, batch, here)?;
        self.attention_backward(index, batch, here)?;
        for kind in Kind::ALL {
            self.release(index, kind);
        }
        Ok(())
    }

    /// Computes the layer again from its normed input.
    fn replay(&mut self, index: usize, batch: &Batch<'_>) -> Result<(), Error> {
        let (tokens, d) = (batch.tokens.len(), self.net.hyper.d as usize);
        self.load(index, Kind::AttnNorm, tokens)?;
        let factors = self.factors.layer(index, tokens);
        let b = &mut self.buffers;
        // A norm's output and its factor are its input.
        let rows = b.x[..tokens * d].chunks_exact_mut(d);
        for ((x, xhat), rstd) in rows.zip(b.xhat.chunks_exact(d)).zip(factors.attn_norm) {
            for (x, xhat) in x.iter_mut().zip(xhat) {
                *x = xhat / *rstd;
            }
        }
        self.layer_forward(index, batch, Keep::Here)
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

    /// The norm's output from its saved `xhat`.
    fn normed(&mut self, norm: VectorId, n: usize) {
        let weight = vector(&self.params, &self.values, &self.vectors, norm);
        let b = &mut self.buffers;
        ops::scale_columns(&self.team, self.vector, &b.xhat[..n], weight, &mut b.n[..n]);
    }

    fn ffn_backward(&mut self, index: usize, batch: &Batch<'_>, here: bool) -> Result<(), Error> {
        let layer = self.net.layers[index];
        let (tokens, d) = (batch.tokens.len(), self.net.hyper.d as usize);
        let (n, f) = (tokens * d, tokens * self.net.hyper.ff as usize);
        let act = self.net.hyper.act;
        let learn = !here && self.learns();
        if !here {
            self.load(index, Kind::FfnNorm, tokens)?;
        }
        self.normed(layer.ffn_norm, n);
        if !here {
            let gated = act.gated();
            if gated && self.has(index, Kind::Gate) {
                self.load(index, Kind::Gate, tokens)?;
            }
            if self.has(index, Kind::Up) {
                self.load(index, Kind::Up, tokens)?;
            } else {
                self.inputs(index, tokens, true);
            }
        }
        if learn {
            for kind in [Kind::Gate, Kind::Up] {
                self.saw_between(index, kind, tokens);
            }
        }
        self.activate(tokens);
        if layer.ffn_post.is_some() && !here {
            self.load(index, Kind::FfnPost, tokens)?;
        }
        self.post_backward(layer.ffn_post, Half::Ffn, index, tokens);
        let mut lin = linears!(self, true);
        let b = (
            &self.buffers.n,
            &mut self.buffers.gate,
            &mut self.buffers.up,
            &mut self.buffers.act,
            &mut self.buffers.t,
        );
        let (normed, gate, up, h, t) = b;
        // With a norm behind, `t` is the gradient of its input; without, the stream's own.
        let dy = match layer.ffn_post {
            Some(_) => &t[..n],
            None => &self.buffers.dx[..n],
        };
        let rows = self.importance.rows(if learn { tokens } else { 0 });
        lin.gradients(index, Site::Down, &h[..f], dy, rows);
        if learn {
            let squared = energy(&h[..f]);
            self.importance
                .saw_linears(index, Half::Ffn, true, tokens, squared);
        }
        lin.input_gradient(index, Site::Down, dy, &mut h[..f], false);
        match act {
            Activation::ReluSquared => {
                ops::relu_sq_backward(lin.team, lin.vector, &mut h[..f], &mut up[..f]);
            }
            act => ops::activate_backward(
                lin.team,
                lin.vector,
                act,
                &mut h[..f],
                &mut gate[..f],
                &mut up[..f],
            ),
        }
        let rows = self.importance.rows(if learn { tokens } else { 0 });
        let mut add = false;
        for (site, dy) in [(Site::Gate, &*gate), (Site::Up, &*up)] {
            if site == Site::Gate && !act.gated() {
                continue;
            }
            lin.gradients(index, site, &normed[..n], &dy[..f], rows);
            lin.input_gradient(index, site, &dy[..f], &mut t[..n], add);
            add = true;
        }
        if learn {
            let squared = energy(&normed[..n]);
            self.importance
                .saw_linears(index, Half::Ffn, false, tokens, squared);
            self.saw_input(index, Kind::FfnNorm, tokens, layer.ffn_norm);
        }
        self.norm_backward(layer.ffn_norm, Half::Ffn, index, tokens, learn);
        Ok(())
    }

    fn attention_backward(
        &mut self,
        index: usize,
        batch: &Batch<'_>,
        here: bool,
    ) -> Result<(), Error> {
        let layer = self.net.layers[index];
        let (tokens, d) = (batch.tokens.len(), self.net.hyper.d as usize);
        let n = tokens * d;
        let (qd, kvd) = self.head_widths();
        let learn = !here && self.learns();
        self.load(index, Kind::AttnNorm, tokens)?;
        self.normed(layer.attn_norm, n);
        if !here {
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
            if layer.attn_post.is_some() {
                self.load(index, Kind::AttnPost, tokens)?;
            }
        }
        if learn {
            for kind in [Kind::Q, Kind::K, Kind::V] {
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
        self.post_backward(layer.attn_post, Half::Attention, index, tokens);
        let shape = self.attention_shape(index);
        let mut lin = linears!(self, true);
        let b = &mut self.buffers;
        let dy = match layer.attn_post {
            Some(_) => &b.t[..n],
            None => &b.dx[..n],
        };
        let rows = self.importance.rows(if learn { tokens } else { 0 });
        lin.gradients(index, Site::O, &b.o[..tokens * qd], dy, rows);
        if learn {
            let squared = energy(&b.o[..tokens * qd]);
            self.importance
                .saw_linears(index, Half::Attention, true, tokens, squared);
            let ranges = self.importance.ranges(tokens);
            let id = Kind::O.id(index);
            if self.saved.squared_ranges(id, 0, ranges).is_ok() {
                let group = self.saved.group(id).expect("it is saved");
                let squared = self.columns.mean_square(id);
                self.importance
                    .saw_input(index, Kind::O, group, tokens, squared);
            }
        }
        lin.input_gradient(index, Site::O, dy, &mut b.d_o[..tokens * qd], false);
        ops::attention_backward(
            lin.team,
            lin.vector,
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
        let mut lin = linears!(self, true);
        let b = &mut self.buffers;
        let rows = self.importance.rows(if learn { tokens } else { 0 });
        let mut add = false;
        for (site, dy, width) in [
            (Site::Q, &b.q, qd),
            (Site::K, &b.k, kvd),
            (Site::V, &b.v, kvd),
        ] {
            let dy = &dy[..tokens * width];
            lin.gradients(index, site, &b.n[..n], dy, rows);
            if index > 0 || lin.params.vector(layer.attn_norm).is_some() {
                lin.input_gradient(index, site, dy, &mut b.t[..n], add);
                add = true;
            }
        }
        if learn {
            let squared = energy(&b.n[..n]);
            self.importance
                .saw_linears(index, Half::Attention, false, tokens, squared);
            self.saw_input(index, Kind::AttnNorm, tokens, layer.attn_norm);
        }
        // Below the first layer nothing is trained unless everything is.
        if add {
            self.norm_backward(layer.attn_norm, Half::Attention, index, tokens, learn);
        }
        Ok(())
    }

    /// Through the norm of a half's output: `t` becomes the gradient of its input.
    fn post_backward(&mut self, post: Option<VectorId>, half: Half, index: usize, tokens: usize) {
        let Some(post) = post else {
            return;
        };
        let n = tokens * self.net.hyper.d as usize;
        let factors = self.factors.layer(index, tokens);
        let weight = vector(&self.params, &self.values, &self.vectors, post);
        let b = &mut self.buffers;
        let (xhat, rstd) = match half {
            Half::Attention => (&b.attn_post, factors.attn_post),
            Half::Ffn => (&b.ffn_post, factors.ffn_post),
        };
        ops::rms_norm_backward(
            &self.team,
            self.vector,
            &xhat[..n],
            rstd,
            weight,
            &b.dx[..n],
            &mut b.t[..n],
            false,
        );
        if let Some(at) = self.params.vector(post) {
            let grads = &mut self.grads[at..at + self.net.hyper.d as usize];
            ops::rms_norm_weight_gradient(&self.team, self.vector, &xhat[..n], &b.dx[..n], grads);
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
        let d = self.net.hyper.d as usize;
        let n = tokens * d;
        let factors = self.factors.layer(index, tokens);
        let rstd = match half {
            Half::Attention => factors.attn_norm,
            Half::Ffn => factors.ffn_norm,
        };
        let weight = vector(&self.params, &self.values, &self.vectors, norm);
        let b = &mut self.buffers;
        ops::rms_norm_backward(
            &self.team,
            self.vector,
            &b.xhat[..n],
            rstd,
            weight,
            &b.t[..n],
            &mut b.dx[..n],
            true,
        );
        if let Some(at) = self.params.vector(norm) {
            ops::rms_norm_weight_gradient(
                &self.team,
                self.vector,
                &b.xhat[..n],
                &b.t[..n],
                &mut self.grads[at..at + d],
            );
        }
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

    /// The importance of a norm's saved output, whose linears' gradients were just added.
    fn saw_input(&mut self, index: usize, kind: Kind, tokens: usize, norm: VectorId) {
        let id = kind.id(index);
        let ranges = self.importance.ranges(tokens);
        if self.saved.squared_ranges(id, 0, ranges).is_ok() {
            let weight = vector(&self.params, &self.values, &self.vectors, norm);
            let squared = energy(weight) / weight.len() as f64;
            let squared = squared * f64::from(self.columns.mean_square(id));
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
            let weight = vector(&self.params, &self.values, &self.vectors, norm);
            let len = tokens * width;
            let (hat, out) = (&hat[..len], &mut b.d_o[..len]);
            ops::rms_norm_backward(
                &self.team,
                self.vector,
                hat,
                rstd,
                weight,
                &grad[..len],
                out,
                false,
            );
            if let Some(at) = self.params.vector(norm) {
                let grads = &mut self.grads[at..at + weight.len()];
                ops::rms_norm_weight_gradient(&self.team, self.vector, hat, &grad[..len], grads);
            }
            grad[..len].copy_from_slice(out);
        }
    }

    /// Squared length of the gradient that is passed on.
    fn stream_energy(&self, tokens: usize) -> f64 {
        energy(&self.buffers.dx[..tokens * self.net.hyper.d as usize])
    }
}
