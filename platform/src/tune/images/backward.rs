//! The backward pass: from the gradient of the logits down to the first step.
//!
//! `b.x` is the gradient of a step's output and becomes that of its input. A norm's `xhat` is loaded where
//! the norm's backward pass needs it, and before that by the convolution that took in the unit's output.

use leanstream_core::act::pool::TensorId;

use super::classifier::{Buffers, Classifier, bits};
use super::conv;
use super::net::{Input, Step};
use super::{importance, norm, pool, relu};
use crate::error::Error;
use crate::tune::gemm::{Mat, MatMut};
use crate::tune::ops;
use crate::tune::optim::sum_squares;

impl Classifier<'_> {
    pub(super) fn backward(
        &mut self,
        b: &mut Buffers,
        images: &[f32],
        n: usize,
    ) -> Result<(), Error> {
        for at in (0..self.net.stages.len()).rev() {
            let stage = self.net.stages[at];
            let output = n * stage.len;
            let input = n * match at {
                0 => self.net.image_len(),
                _ => self.net.stages[at - 1].len,
            };
            match stage.step {
                Step::Unit(unit) => {
                    let dy = &mut b.x[..output];
                    self.unit_backward(unit, images, n, dy, (&mut b.t, input), &mut b.spare);
                    self.drop_input(self.net.units[unit].input);
                    if at > 0 {
                        self.image_gradient(unit, &b.x[..output], &mut b.u[..input], false);
                        std::mem::swap(&mut b.x, &mut b.u);
                    }
                }
                Step::Block { .. } => self.block_backward(at, b, images, n, input, output),
                Step::MaxPool { pool, places } => {
                    let places = &self.exact[places.before * self.batch..][..places.len * n];
                    pool.backward(&self.team, &b.x[..output], &mut b.t[..input], places);
                    std::mem::swap(&mut b.x, &mut b.t);
                }
                Step::Average { channels } => {
                    pool::average_backward(&self.team, &b.x[..output], &mut b.t[..input], channels);
                    std::mem::swap(&mut b.x, &mut b.t);
                }
                Step::Linear { .. } => self.linear_backward(at, b, images, n, input, output),
            }
        }
        if self.learns() {
            self.importance.finish(&self.net);
        }
        Ok(())
    }

    fn linear_backward(
        &mut self,
        at: usize,
        b: &mut Buffers,
        images: &[f32],
        n: usize,
        input: usize,
        output: usize,
    ) {
        let Step::Linear {
            input: from,
            ins,
            outs,
            param,
            mask,
        } = self.net.stages[at].step
        else {
            unreachable!("a linear's number");
        };
        let dy = &mut b.x[..output];
        if let Some(mask) = mask {
            let bits = bits(&mut self.exact, self.batch, mask, output);
            relu::relu_backward(&self.team, self.vector, dy, bits);
        }
        let dy = &*dy;
        let x = &mut b.t[..input];
        self.input(from, images, n, x, &mut b.spare);
        let [w, bias] = [0, 1].map(|i| self.net.params[param + i].range());
        self.products.product(
            &self.team,
            Mat::new(dy, n, outs).t(),
            Mat::new(x, n, ins),
            1.0,
            MatMut::new(&mut self.grads[w.clone()], outs, ins),
            true,
        );
        if self.learns() {
            let squared = sum_squares(&self.team, self.vector, &self.grads[w.clone()]);
            let (saved, gains) = (&self.saved, &self.folds.gain);
            self.importance
                .saw_linear(&self.net, at, n, dy, x, saved, gains, squared);
        }
        self.drop_input(from);
        ops::bias_gradient(&self.team, self.vector, dy, &mut self.grads[bias]);
        if at > 0 {
            self.products.product(
                &self.team,
                Mat::new(dy, n, outs),
                Mat::new(&self.values[w], outs, ins),
                1.0,
                MatMut::new(&mut b.u[..input], n, ins),
                false,
            );
            std::mem::swap(&mut b.x, &mut b.u);
        }
    }

    fn block_backward(
        &mut self,
        at: usize,
        b: &mut Buffers,
        images: &[f32],
        n: usize,
        input: usize,
        output: usize,
    ) {
        let Step::Block {
            first,
            second,
            shortcut,
            mask,
        } = self.net.stages[at].step
        else {
            unreachable!("a block's number");
        };
        let from = self.net.units[first].input;
        let bits = bits(&mut self.exact, self.batch, mask, output);
        relu::relu_backward(&self.team, self.vector, &mut b.x[..output], bits);
        if let Some(unit) = shortcut {
            b.u[..output].copy_from_slice(&b.x[..output]);
            let dy = &mut b.u[..output];
            self.unit_backward(unit, images, n, dy, (&mut b.t, input), &mut b.spare);
            self.image_gradient(unit, &b.u[..output], &mut b.spare[..input], false);
        }
        b.u[..output].copy_from_slice(&b.x[..output]);
        let dy = &mut b.u[..output];
        self.unit_backward(second, images, n, dy, (&mut b.t, output), &mut []);
        self.image_gradient(second, &b.u[..output], &mut b.t[..output], false);
        let dy = &mut b.t[..output];
        self.unit_backward(first, images, n, dy, (&mut b.u, input), &mut []);
        self.drop_input(from);
        if shortcut.is_some() {
            std::mem::swap(&mut b.x, &mut b.spare);
        }
        let before = self.energy(&b.x[..input]);
        self.image_gradient(first, &b.t[..output], &mut b.x[..input], true);
        let after = self.energy(&b.x[..input]);
        self.importance.saw_branches(at, before, after);
    }

    /// Through a unit's ReLU, where it has one, and its norm: `dy` becomes the gradient of its convolution's output. Adds
    /// the gradients of its parameters. `work` is worked in; its first `input` floats become the unit's input.
    fn unit_backward(
        &mut self,
        index: usize,
        images: &[f32],
        n: usize,
        dy: &mut [f32],
        (work, input): (&mut [f32], usize),
        spare: &mut [f32],
    ) {
        if let Some(mask) = self.net.units[index].mask {
            let bits = bits(&mut self.exact, self.batch, mask, dy.len());
            relu::relu_backward(&self.team, self.vector, dy, bits);
        }
        self.norm_backward(index, dy, &mut work[..dy.len()], n);
        self.kernel_gradient(index, images, n, &mut work[..input], dy, spare);
    }

    /// Through a unit's norm: `dy` becomes the gradient of its input, `hat` is worked in. Adds the gradients
    /// of `gamma` and `beta`, and gives `xhat` back.
    fn norm_backward(&mut self, index: usize, dy: &mut [f32], hat: &mut [f32], n: usize) {
        let unit = self.net.units[index];
        let outs = unit.conv.outs;
        self.hat(index, hat);
        let [dgamma, dbeta] = &mut self.small;
        let (dgamma, dbeta) = (&mut dgamma[..outs], &mut dbeta[..outs]);
        norm::gradients(
            &self.team,
            self.vector,
            dy,
            hat,
            &mut self.sums,
            dgamma,
            dbeta,
        );
        for (i, sums) in [&*dgamma, dbeta].into_iter().enumerate() {
            let range = self.net.params[unit.param + 1 + i].range();
            self.vector.add_assign(&mut self.grads[range], sums);
        }
        let learns = self.learns();
        if learns {
            let spread = &self.folds.spread[unit.channel..unit.channel + outs];
            self.importance.saw_outputs(dy, n, spread);
        }
        let [dgamma, dbeta] = &self.small;
        let (dgamma, dbeta) = (&dgamma[..outs], &dbeta[..outs]);
        let (gamma, _) = self.norm_params(index);
        let rstd = &self.rstd[unit.channel..unit.channel + outs];
        norm::backward(&self.team, self.vector, dy, hat, gamma, rstd, dgamma, dbeta);
        if learns {
            let rows = (dy.len() / outs) as f64;
            // What an error in what was saved is multiplied with in the gradient that is passed on.
            let spread = &self.folds.spread[unit.channel..unit.channel + outs];
            let factor = |i: usize| f64::from(gamma[i] * rstd[i] * spread[i] * dgamma[i]) / rows;
            let square = (0..outs).map(|i| factor(i).powi(2)).sum::<f64>() / outs as f64;
            let passed = self.energy(dy);
            let of_gamma = self.net.params[unit.param + 1].range();
            let squared = sum_squares(&self.team, self.vector, &self.grads[of_gamma]);
            let weight = importance::weight(&self.net, unit.param + 1, squared);
            self.importance
                .saw_norm(unit.xhat, n, square, passed, weight, &self.saved);
        }
        self.release(unit.xhat);
    }

    /// Adds the gradient of a convolution's weights. Shapes: `x` (images, in) to be filled with its input, `dy` (images,
    /// out).
    fn kernel_gradient(
        &mut self,
        index: usize,
        images: &[f32],
        n: usize,
        x: &mut [f32],
        dy: &[f32],
        spare: &mut [f32],
    ) {
        let unit = self.net.units[index];
        self.input(unit.input, images, n, x, spare);
        let range = self.net.params[unit.param].range();
        conv::weight_gradient(
            &self.team,
            self.vector,
            &mut self.work,
            &unit.conv,
            x,
            dy,
            &mut self.grads[range.clone()],
        );
        if self.learns() {
            let squared = sum_squares(&self.team, self.vector, &self.grads[range]);
            let (saved, gains) = (&self.saved, &self.folds.gain);
            self.importance
                .saw_conv(&self.net, index, n, dy, x, saved, gains, squared);
        }
    }

    /// The gradient of a convolution's input. Shapes: `dy` (images, out), `dx` (images, in).
    fn image_gradient(&mut self, index: usize, dy: &[f32], dx: &mut [f32], add: bool) {
        let unit = self.net.units[index];
        let range = self.net.params[unit.param].range();
        conv::input_gradient(
            &self.team,
            self.vector,
            &mut self.work,
            &unit.conv,
            &self.values[range],
            dy,
            dx,
            add,
        );
    }

    /// Gives back an input that was saved as such, after its last use.
    fn drop_input(&mut self, input: Input) {
        if let Input::Saved(kept) = input {
            debug_assert!(self.saved.pool().held(TensorId(kept as u32)).is_some());
            self.release(kept);
        }
    }

    /// Whether this batch is one to learn importances from.
    fn learns(&self) -> bool {
        self.learn && super::importance::due(self.done)
    }

    /// Squared length, where importances are learnt.
    fn energy(&self, x: &[f32]) -> f64 {
        if self.learns() {
            sum_squares(&self.team, self.vector, x)
        } else {
            0.0
        }
    }
}
