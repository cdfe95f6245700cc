//! The head and its loss, a few tokens at a time, so that no batch's logits are ever whole.

use super::decoder::{Batch, Decoder, linears};
use super::linear::{Linears, trained, vector};
use crate::error::Error;
use crate::tune::gemm::{Mat, MatMut};
use crate::tune::ops::{self, MASKED};

/// What the head needs beside the shared buffers.
pub struct Losses {
    /// Factors of the last norm (tokens).
    rstd: Vec<f32>,
    /// Tokens of the running chunk (head_tokens).
    rows: Vec<u32>,
    /// Their targets.
    targets: Vec<u32>,
    /// Their losses.
    losses: Vec<f32>,
}

impl Losses {
    /// For micro-batches of `tokens` tokens, `head_tokens` of which share a chunk.
    pub fn new(tokens: usize, head_tokens: usize) -> Self {
        Self {
            rstd: vec![0.0; tokens],
            rows: Vec::with_capacity(head_tokens),
            targets: Vec::with_capacity(head_tokens),
            losses: vec![0.0; head_tokens],
        }
    }

    /// Bytes of [`Losses::new`].
    pub fn bytes(tokens: usize, head_tokens: usize) -> u64 {
        (tokens * 4 + head_tokens * 12) as u64
    }
}

impl Decoder<'_> {
    /// The sum of the losses of tokens that have a target, and their number. With a `weight`, `dx`
    /// becomes that times the gradient of the sum.
    pub(super) fn head(
        &mut self,
        batch: &Batch<'_>,
        weight: Option<f32>,
    ) -> Result<(f64, usize), Error> {
        let (tokens, d) = (batch.tokens.len(), self.net.hyper.d as usize);
        let n = tokens * d;
        let b = &mut self.buffers;
        linears!(self, false).norm(
            self.net.head_norm,
            &b.x[..n],
            &mut b.n[..n],
            &mut b.xhat[..n],
            &mut self.losses.rstd[..tokens],
        );
        // Tokens without a target have no gradient.
        ops::fill(&self.team, &mut b.t[..n], 0.0);
        let (mut sum, mut count, mut next) = (0.0, 0, 0);
        while next < tokens {
            let losses = &mut self.losses;
            losses.rows.clear();
            losses.targets.clear();
            while next < tokens && losses.rows.len() < self.sizes.head_tokens {
                if batch.targets[next] != MASKED {
                    let at = losses.rows.len() * d;
                    let from = &self.buffers.n[next * d..(next + 1) * d];
                    self.buffers.head_in[at..at + d].copy_from_slice(from);
                    losses.rows.push(next as u32);
                    losses.targets.push(batch.targets[next]);
                }
                next += 1;
            }
            if !losses.rows.is_empty() {
                sum += self.chunk(weight)?;
                count += self.losses.rows.len();
            }
        }
        if weight.is_none() {
            return Ok((sum, count));
        }
        let b = &mut self.buffers;
        linears!(self, true).norm_backward(
            self.net.head_norm,
            (&b.xhat[..n], &self.losses.rstd[..tokens]),
            &b.t[..n],
            &mut b.dx[..n],
            false,
        );
        Ok((sum, count))
    }

    /// The running chunk: its logits, losses, and gradients into `t`.
    fn chunk(&mut self, weight: Option<f32>) -> Result<f64, Error> {
        let (d, vocab) = (self.net.hyper.d as usize, self.net.hyper.vocab as usize);
        let head = *self.net.matrix(self.net.head);
        let rows = self.losses.rows.len();
        let whole = self.params.matrix(self.net.head.matrix);
        let b = &mut self.buffers;
        let logits = &mut b.logits[..rows * vocab];
        if let Some(at) = whole {
            let weights = trained(&self.values[at..at + vocab * d], d);
            self.products
                .forward(&self.team, weights, &b.head_in[..rows * d], logits, false);
        } else {
            let store = self.store.as_mut().expect("frozen weights are in a store");
            let input = Mat::new(&b.head_in[..rows * d], rows, d);
            store.each_head_part(&head, |first, weights| {
                let out = MatMut::spaced(&mut logits[first..], rows, weights.rows(), vocab);
                self.products
                    .forward_at(&self.team, weights, input, out, false);
            })?;
        }
        if let Some(bias) = self.net.head.bias {
            let bias = vector(&self.params, &self.values, &self.vectors, bias);
            ops::add_bias(&self.team, self.vector, logits, bias);
        }
        let losses = &mut self.losses.losses[..rows];
        ops::cross_entropy(
            &self.team,
            self.vector,
            logits,
            vocab,
            &self.losses.targets,
            weight.unwrap_or(0.0),
            self.net.hyper.logit_softcap,
            losses,
        );
        let sum = ops::loss_sum(losses);
        if weight.is_none() {
            return Ok(sum);
        }
        let back = &mut b.head_back[..rows * d];
        if let Some(at) = whole {
            let weights = trained(&self.values[at..at + vocab * d], d);
            self.products
                .backward(&self.team, weights, logits, back, false);
            let logits = Mat::new(logits, rows, vocab);
            let input = Mat::new(&b.head_in[..rows * d], rows, d);
            let grads = MatMut::new(&mut self.grads[at..at + vocab * d], vocab, d);
            self.products
                .product(&self.team, logits.t(), input, 1.0, grads, true);
        } else {
            let store = self.store.as_mut().expect("frozen weights are in a store");
            store.each_head_part(&head, |first, weights| {
                let dy = Mat::spaced(&logits[first..], rows, weights.rows(), vocab);
                let dx = MatMut::new(back, rows, d);
                self.products
                    .backward_at(&self.team, weights, dy, dx, first > 0);
            })?;
        }
        for (back, row) in back.chunks_exact(d).zip(&self.losses.rows) {
            let at = *row as usize * d;
            b.t[at..at + d].copy_from_slice(back);
        }
        Ok(sum)
    }
}
