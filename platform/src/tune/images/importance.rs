//! What noise in each saved tensor does to the gradient, from what the backward pass has at hand.
//!
//! An input of a convolution is multiplied, pixel by pixel and tap by tap, with the gradient of the output:
//! [`leanstream_core::act::importance`] with as much of that as an average pixel of the image meets. What a
//! norm saves serves three times: as the input of the convolution that follows (times a gain, where ReLU lets
//! it through); for `gamma`'s own gradient; and in the gradient that the norm passes on, whose noise
//! spoils the gradients of all that is below, by as much of these as flows through.
//!
//! All are relative to what is spoiled: the optimizer divides each weight's gradient by its own size, so that noise in
//! a small one is as harmful as in a large one. A parameter counts by its squared noise by its squared gradient, and by
//! its share of all numbers.

use leanstream_core::act::importance as act;
use leanstream_core::act::pool::TensorId;

use super::net::{Input, Net, Step};
use crate::tune::act::Saved;

/// Importances are taken from the first of every so many batches.
const EVERY: u64 = 4;

/// What one backward pass showed, and importances from it.
#[derive(Debug)]
pub struct Importance {
    /// By tensor: variance at one step of the grid of the gradients that it is multiplied for, relative to these.
    direct: Vec<f64>,
    /// By tensor: noise at one step of the grid in the gradient that a norm passes on, relative to that.
    ratio: Vec<f64>,
    /// By unit: squared gradient of the weights as if pixels were independent, relative to what it is.
    kernels: Vec<f64>,
    /// By step: the same of a linear.
    linears: Vec<f64>,
    /// By step: squared lengths of what came to a block's input past its convolutions, and in all.
    branches: Vec<[f64; 2]>,
    /// By image: what a row of a tensor is multiplied with, squared.
    rows: Vec<f32>,
    /// By image: a norm's gradient, squared, of an average element.
    outputs: Vec<f32>,
    /// By image: squared ranges.
    ranges: Vec<f32>,
    by_tensor: Vec<f32>,
}

/// Whether the `done`-th batch is one to learn from.
pub(super) fn due(done: u64) -> bool {
    done % EVERY == 1 || done <= EVERY
}

/// Operands of a product in the backward pass, image by image.
struct Product<'a> {
    input: Input,
    n: usize,
    /// Gradient of the output (n, any).
    dy: &'a [f32],
    /// The input (n, any).
    x: &'a [f32],
    /// How often an average input pixel is met.
    meets: f64,
    /// Pixels of the input.
    pixels: usize,
    /// What noise in the gradient that is made of them counts.
    weight: f64,
}

impl Importance {
    /// Nothing was seen yet; for batches of `batch` images.
    #[must_use]
    pub fn new(net: &Net, batch: usize) -> Self {
        let by_image = || vec![0.0; batch];
        Self {
            direct: vec![0.0; net.kept.len()],
            ratio: vec![0.0; net.kept.len()],
            kernels: vec![0.0; net.units.len()],
            linears: vec![0.0; net.stages.len()],
            branches: vec![[0.0; 2]; net.stages.len()],
            rows: by_image(),
            outputs: by_image(),
            ranges: by_image(),
            by_tensor: vec![0.0; net.kept.len()],
        }
    }

    /// Bytes of [`Importance::new`].
    #[must_use]
    pub fn bytes(net: &Net, batch: usize) -> usize {
        20 * net.kept.len() + 8 * net.units.len() + 24 * net.stages.len() + 12 * batch
    }

    /// By tensor id, relative to squared gradients.
    #[must_use]
    pub fn by_tensor(&self) -> &[f32] {
        &self.by_tensor
    }

    /// A convolution's weights' gradient was made of `dy` and `x`; it is `squared` long, squared.
    #[expect(
        clippy::too_many_arguments,
        reason = "operands and where they come from"
    )]
    pub(super) fn saw_conv(
        &mut self,
        net: &Net,
        index: usize,
        n: usize,
        dy: &[f32],
        x: &[f32],
        saved: &Saved<'_>,
        gains: &[f32],
        squared: f64,
    ) {
        let unit = net.units[index];
        let pixels = unit.conv.height * unit.conv.width;
        let product = Product {
            input: unit.input,
            n,
            dy,
            x,
            meets: (unit.conv.kernel * unit.conv.kernel) as f64,
            pixels,
            weight: weight(net, unit.param, squared),
        };
        self.kernels[index] = self.saw_product(net, &product, saved, gains);
    }

    /// A linear's weights' gradient was made of `dy` and `x`; it is `squared` long, squared.
    #[expect(
        clippy::too_many_arguments,
        reason = "operands and where they come from"
    )]
    pub(super) fn saw_linear(
        &mut self,
        net: &Net,
        at: usize,
        n: usize,
        dy: &[f32],
        x: &[f32],
        saved: &Saved<'_>,
        gains: &[f32],
        squared: f64,
    ) {
        let Step::Linear { input, param, .. } = net.stages[at].step else {
            unreachable!("a linear's number");
        };
        let product = Product {
            input,
            n,
            dy,
            x,
            meets: 1.0,
            pixels: 1,
            weight: weight(net, param, squared),
        };
        self.linears[at] = self.saw_product(net, &product, saved, gains);
    }

    /// Squared gradient of the product's weights as if pixels were independent, as it counts.
    fn saw_product(
        &mut self,
        net: &Net,
        product: &Product<'_>,
        saved: &Saved<'_>,
        gains: &[f32],
    ) -> f64 {
        let n = product.n;
        let scale = product.weight * product.meets / product.pixels as f64;
        let x: f64 = squares(product.x, n).sum();
        let mut dy = 0.0;
        for (row, squared) in self.rows.iter_mut().zip(squares(product.dy, n)) {
            *row = (scale * squared) as f32;
            dy += squared;
        }
        let incoherent = scale * dy * x / n as f64;
        let (kept, gain) = match product.input {
            Input::Images => return incoherent,
            Input::Saved(kept) => (kept, 1.0),
            Input::Unit(index) | Input::Pooled { unit: index, .. } => {
                let unit = net.units[index];
                let gains = &gains[unit.channel..unit.channel + unit.conv.outs];
                (unit.xhat, mean_square(gains))
            }
        };
        // What is 0 is so exactly: its mask says so, or it is its grid's end.
        let others = product.x.iter().filter(|x| **x != 0.0).count() as f64;
        let factor = gain * others / (n * net.kept[kept].len) as f64;
        self.direct[kept] += factor * self.noise(kept, n, saved, |seen| &seen.rows);
        incoherent
    }

    /// The gradient of a norm's output, before [`Importance::saw_norm`]; `spread` is what saved elements are
    /// multiplied with in `xhat`.
    pub(super) fn saw_outputs(&mut self, dy: &[f32], n: usize, spread: &[f32]) {
        let len = (dy.len() / n) as f64 / mean_square(spread);
        for (row, squared) in self.outputs.iter_mut().zip(squares(dy, n)) {
            *row = (squared / len) as f32;
        }
    }

    /// A norm whose `xhat` is tensor `kept` passed on a gradient of squared length `passed`, in which an error
    /// in what was saved is multiplied by a factor whose square is `square` on average; noise in the gradient of `gamma`
    /// counts `weight`.
    pub(super) fn saw_norm(
        &mut self,
        kept: usize,
        n: usize,
        square: f64,
        passed: f64,
        weight: f64,
        saved: &Saved<'_>,
    ) {
        self.direct[kept] += weight * self.noise(kept, n, saved, |seen| &seen.outputs);
        let spoiled: f64 = self.ranges[..n].iter().map(|r| f64::from(*r)).sum();
        let group = saved.group(TensorId(kept as u32)).unwrap_or(0) as f64;
        self.ratio[kept] = if passed > 0.0 {
            square * spoiled * group / 6.0 / passed
        } else {
            0.0
        };
    }

    /// The squared length of the gradient of a block's input without what came through its first
    /// convolution, and in all.
    pub(super) fn saw_branches(&mut self, at: usize, past: f64, all: f64) {
        self.branches[at] = [past, all];
    }

    /// Variance at one step of a tensor's grid, whose rows are multiplied by what `by` says; leaves its
    /// ranges in `ranges`.
    fn noise(
        &mut self,
        kept: usize,
        n: usize,
        saved: &Saved<'_>,
        by: impl Fn(&Self) -> &Vec<f32>,
    ) -> f64 {
        let id = TensorId(kept as u32);
        let held = saved.squared_ranges(id, 0, &mut self.ranges[..n]);
        let group = saved.group(id);
        held.and(group).map_or(0.0, |group| {
            let rows = by(self)[..n].iter().zip(&self.ranges[..n]);
            let rows = rows.map(|(factor, ranges)| (*factor, *ranges));
            f64::from(act::importance(group as u32, rows))
        })
    }

    /// The pass has ended.
    pub(super) fn finish(&mut self, net: &Net) {
        // Gradients of all that is below a step, which noise in it spoils.
        let mut below = 0.0;
        for (at, stage) in net.stages.iter().enumerate() {
            let mut spoils = |unit: usize, gradients: f64| {
                let kept = net.units[unit].xhat;
                self.direct[kept] += self.ratio[kept] * gradients;
            };
            match stage.step {
                Step::Unit(unit) => {
                    spoils(unit, self.kernels[unit] + below);
                    below += self.kernels[unit];
                }
                Step::Block {
                    first,
                    second,
                    shortcut,
                    ..
                } => {
                    let [past, all] = self.branches[at];
                    let share = |part: f64| {
                        if all > 0.0 {
                            (part / all).min(1.0)
                        } else {
                            0.0
                        }
                    };
                    // As if both ways were at right angles.
                    let through = share((all - past).abs()) * below;
                    spoils(first, self.kernels[first] + through);
                    spoils(second, self.kernels[second] + self.kernels[first] + through);
                    if let Some(unit) = shortcut {
                        spoils(unit, self.kernels[unit] + share(past) * below);
                    }
                    let all = [Some(first), Some(second), shortcut].into_iter().flatten();
                    below += all.map(|unit| self.kernels[unit]).sum::<f64>();
                }
                Step::Linear { .. } => below += self.linears[at],
                Step::MaxPool { .. } | Step::Average { .. } => {}
            }
        }
        for (out, direct) in self.by_tensor.iter_mut().zip(&mut self.direct) {
            *out = *direct as f32;
            *direct = 0.0;
        }
    }
}

/// What noise in the gradient of parameter `index` counts, where that is `squared` long, squared: its share of all
/// numbers by that.
pub(super) fn weight(net: &Net, index: usize, squared: f64) -> f64 {
    let share = net.params[index].len as f64 / net.count() as f64;
    act::weight(share, squared)
}

fn mean_square(x: &[f32]) -> f64 {
    x.iter().map(|x| f64::from(x * x)).sum::<f64>() / x.len() as f64
}

/// The squared length of each of `n` images.
fn squares(x: &[f32], n: usize) -> impl Iterator<Item = f64> {
    x.chunks_exact(x.len() / n)
        .map(|x| f64::from(x.iter().map(|x| x * x).sum::<f32>()))
}
