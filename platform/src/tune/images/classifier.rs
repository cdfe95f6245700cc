//! A classifier's passes: from a batch of images to logits, saving what the backward pass needs. Units and
//! the backward pass are in files of their own.

use leanstream_core::act::Width;
use leanstream_core::act::pool::TensorId;

use super::conv::Work;
use super::importance::Importance;
use super::net::{Exact, Input, Net, Step};
use super::unit::Folds;
use super::{norm, pool, relu};
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::tune::act::{Room, Saved};
use crate::tune::gemm::{Mat, MatMut, Products};
use crate::tune::ops;
use crate::tune::team::Team;

/// Floats that the passes work in: four times a batch at its widest. Shared by all steps.
#[derive(Debug, Default)]
pub(super) struct Buffers {
    /// What a step takes in, then its output; on the way back the gradient of its output, then that of
    /// its input.
    pub(super) x: Vec<f32>,
    pub(super) t: Vec<f32>,
    pub(super) u: Vec<f32>,
    pub(super) spare: Vec<f32>,
}

/// A classifier with its parameters, and everything that its passes need.
pub struct Classifier<'m> {
    /// Its shape.
    pub net: Net,
    /// Parameters.
    pub values: Vec<f32>,
    /// Their gradients: of the last batch.
    pub grads: Vec<f32>,
    /// Means of all norms' channels, then variances, for evaluation.
    pub running: Vec<f32>,
    /// What was saved.
    pub saved: Saved<'m>,
    /// At which width each tensor is saved, by id.
    pub widths: Vec<Width>,
    /// The threads.
    pub team: Team,
    /// The kernels' instruction set.
    pub vector: Vector,
    /// Images of the largest batch.
    pub batch: usize,
    /// What noise in each saved tensor does.
    pub importance: Importance,
    /// Whether that is to be found out.
    pub learn: bool,
    /// Factors of norms in this batch, by channel.
    pub(super) rstd: Vec<f32>,
    /// How what norms saved relates to their outputs.
    pub(super) folds: Folds,
    /// Masks and places.
    pub(super) exact: Vec<u8>,
    pub(super) buffers: Buffers,
    /// Sums of norms.
    pub(super) sums: Vec<f32>,
    /// Two numbers for each channel of one norm.
    pub(super) small: [Vec<f32>; 2],
    pub(super) losses: Vec<f32>,
    pub(super) products: Products,
    pub(super) work: Work,
    /// Batches that were trained on.
    pub(super) done: u64,
}

/// What a batch came to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Sum of the images' losses.
    pub loss: f64,
    /// Images whose class has the highest logit.
    pub correct: usize,
}

impl<'m> Classifier<'m> {
    /// Everything that is computed in, and a store in `room` of `pages` pages. Parameters are zero. The
    /// only place that allocates.
    ///
    /// # Errors
    /// What the operating system refuses, or a room that is too small.
    pub fn new(
        net: Net,
        batch: usize,
        threads: usize,
        vector: Vector,
        room: &'m mut Room,
        pages: u32,
        seed: u64,
    ) -> Result<Self, Error> {
        let team = Team::new(threads)
            .map_err(|error| Error::Runtime(format!("cannot start a thread: {error}")))?;
        let saved =
            Saved::new(room, pages, seed).map_err(|error| Error::Runtime(error.to_string()))?;
        let count = net.count();
        let mut running = vec![0.0; 2 * net.channels];
        running[net.channels..].fill(1.0);
        let widest = batch * net.widest();
        let buffer = || vec![0.0; widest];
        Ok(Self {
            values: vec![0.0; count],
            grads: vec![0.0; count],
            running,
            saved,
            widths: vec![Width::F32; net.kept.len()],
            team,
            vector,
            batch,
            importance: Importance::new(&net, batch),
            learn: false,
            rstd: vec![0.0; net.channels],
            folds: Folds::new(net.channels),
            exact: vec![0; net.exact_len * batch],
            buffers: Buffers {
                x: buffer(),
                t: buffer(),
                u: buffer(),
                spare: buffer(),
            },
            sums: vec![0.0; sums_floats(&net, batch)],
            small: [(); 2].map(|()| vec![0.0; channels_max(&net)]),
            losses: vec![0.0; batch],
            products: Products::new(vector, threads),
            work: Work::new(&net.convs(), threads),
            done: 0,
            net,
        })
    }

    /// Bytes that the passes compute in, whatever is saved: buffers, norms' sums, packing.
    #[must_use]
    pub fn work_bytes(net: &Net, batch: usize, threads: usize, vector: Vector) -> u64 {
        let floats = 4 * batch * net.widest()
            + sums_floats(net, batch)
            + 2 * channels_max(net)
            + 4 * net.channels
            + batch;
        (floats * 4
            + Work::bytes(&net.convs(), threads)
            + Products::bytes_for(vector, threads)
            + Importance::bytes(net, batch)) as u64
    }

    /// Forward and backward over one batch; the gradient of its mean loss is in `grads`.
    ///
    /// Shapes: `images` (images, height, width, channels), `labels` (images).
    ///
    /// # Errors
    /// An activation that isn't finite, or a pool that is too small.
    ///
    /// # Panics
    /// More images than the largest batch, or a label beyond the classes.
    pub fn step(&mut self, images: &[f32], labels: &[u32]) -> Result<Outcome, Error> {
        self.done += 1;
        self.saved.begin_step(self.done);
        self.grads.fill(0.0);
        let mut buffers = std::mem::take(&mut self.buffers);
        let result = self.both(&mut buffers, images, labels);
        self.buffers = buffers;
        if result.is_err() {
            self.saved.clear();
        }
        result
    }

    fn both(&mut self, b: &mut Buffers, images: &[f32], labels: &[u32]) -> Result<Outcome, Error> {
        self.forward(b, images, labels.len(), true)?;
        let outcome = self.loss(b, labels);
        self.backward(b, images, labels.len())?;
        Ok(outcome)
    }

    /// Loss and hits of one batch, with the norms' running statistics; nothing is saved.
    ///
    /// # Errors
    /// None but what [`Classifier::step`] has too.
    ///
    /// # Panics
    /// As there.
    pub fn evaluate(&mut self, images: &[f32], labels: &[u32]) -> Result<Outcome, Error> {
        let mut buffers = std::mem::take(&mut self.buffers);
        let result = self
            .forward(&mut buffers, images, labels.len(), false)
            .map(|()| self.loss(&mut buffers, labels));
        self.buffers = buffers;
        result
    }

    /// Bytes of activations that are saved at most at once: pages, metadata, masks, places and factors.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        self.saved.peak_bytes() + (self.exact.len() + 4 * self.rstd.len()) as u64
    }

    /// From `images` to logits in `b.x`.
    fn forward(
        &mut self,
        b: &mut Buffers,
        images: &[f32],
        n: usize,
        train: bool,
    ) -> Result<(), Error> {
        let mut len = self.net.image_len();
        assert!(n <= self.batch, "no more images than a batch");
        assert_eq!(images.len(), n * len, "as many images as labels");
        b.x[..n * len].copy_from_slice(images);
        for at in 0..self.net.stages.len() {
            let stage = self.net.stages[at];
            let (input, output) = (n * len, n * stage.len);
            match stage.step {
                Step::Unit(unit) => {
                    self.unit(unit, &b.x[..input], &mut b.t[..output], train)?;
                    std::mem::swap(&mut b.x, &mut b.t);
                }
                Step::Block {
                    first,
                    second,
                    shortcut,
                    mask,
                } => {
                    self.unit(first, &b.x[..input], &mut b.t[..output], train)?;
                    self.unit(second, &b.t[..output], &mut b.u[..output], train)?;
                    let skipped = match shortcut {
                        Some(unit) => {
                            self.unit(unit, &b.x[..input], &mut b.t[..output], train)?;
                            &b.t
                        }
                        None => &b.x,
                    };
                    let sum = &mut b.u[..output];
                    ops::add(&self.team, self.vector, sum, &skipped[..output]);
                    let bits = bits(&mut self.exact, self.batch, mask, output);
                    relu::relu(&self.team, self.vector, sum, bits);
                    std::mem::swap(&mut b.x, &mut b.u);
                }
                Step::MaxPool { pool, places } => {
                    let places = &mut self.exact[places.before * self.batch..][..places.len * n];
                    pool.forward(&self.team, &b.x[..input], &mut b.t[..output], places);
                    std::mem::swap(&mut b.x, &mut b.t);
                }
                Step::Average { channels } => {
                    let (x, y) = (&b.x[..input], &mut b.t[..output]);
                    pool::average(&self.team, self.vector, x, y, channels);
                    std::mem::swap(&mut b.x, &mut b.t);
                }
                Step::Linear {
                    ins,
                    outs,
                    param,
                    mask,
                    ..
                } => {
                    let [w, bias] = [0, 1].map(|i| self.net.params[param + i].range());
                    let y = &mut b.t[..output];
                    self.products.product(
                        &self.team,
                        Mat::new(&b.x[..input], n, ins),
                        Mat::new(&self.values[w], outs, ins).t(),
                        1.0,
                        MatMut::new(y, n, outs),
                        false,
                    );
                    ops::add_bias(&self.team, self.vector, y, &self.values[bias]);
                    if let Some(mask) = mask {
                        let bits = bits(&mut self.exact, self.batch, mask, output);
                        relu::relu(&self.team, self.vector, y, bits);
                    }
                    std::mem::swap(&mut b.x, &mut b.t);
                }
            }
            if let Some(kept) = stage.output.filter(|_| train) {
                self.save(kept, &b.x[..output])?;
            }
            len = stage.len;
        }
        Ok(())
    }

    /// Losses and hits of the logits in `b.x`, which become their gradients of the mean loss.
    fn loss(&mut self, b: &mut Buffers, labels: &[u32]) -> Outcome {
        let (n, classes) = (labels.len(), self.net.classes);
        let logits = &mut b.x[..n * classes];
        let hits = logits.chunks_exact(classes).zip(labels);
        let correct = hits
            .filter(|(logits, label)| self.vector.argmax(logits) == **label as usize)
            .count();
        let losses = &mut self.losses[..n];
        let weight = 1.0 / n as f32;
        ops::cross_entropy(
            &self.team,
            self.vector,
            logits,
            classes,
            labels,
            weight,
            0.0,
            losses,
        );
        Outcome {
            loss: ops::loss_sum(losses),
            correct,
        }
    }

    /// A norm's `gamma` and `beta`.
    pub(super) fn norm_params(&self, unit: usize) -> (&[f32], &[f32]) {
        let param = self.net.units[unit].param;
        let [gamma, beta] = [1, 2].map(|i| &self.values[self.net.params[param + i].range()]);
        (gamma, beta)
    }

    pub(super) fn save(&mut self, kept: usize, x: &[f32]) -> Result<(), Error> {
        let (len, width) = (self.net.kept[kept].len, self.widths[kept]);
        self.saved
            .save(&self.team, TensorId(kept as u32), x, len, width)
            .map_err(|error| Error::Runtime(format!("{}: {error}", self.net.kept[kept].name)))
    }

    pub(super) fn load(&self, kept: usize, out: &mut [f32]) {
        self.saved
            .load(&self.team, TensorId(kept as u32), out)
            .expect("what the forward pass saved is held until its last use");
    }

    pub(super) fn release(&mut self, kept: usize) {
        self.saved
            .release(TensorId(kept as u32))
            .expect("what the forward pass saved is held until its last use");
    }

    /// The input of a convolution or linear, for the backward pass. Shapes: `images` the batch, `out`
    /// (images, in), `spare` at least as long as any unit's output.
    pub(super) fn input(
        &self,
        input: Input,
        images: &[f32],
        n: usize,
        out: &mut [f32],
        spare: &mut [f32],
    ) {
        match input {
            Input::Images => out.copy_from_slice(images),
            Input::Saved(kept) => self.load(kept, out),
            Input::Unit(unit) => self.output(unit, out),
            Input::Pooled { unit, step } => {
                let Step::MaxPool { pool, places } = self.net.stages[step].step else {
                    unreachable!("a max-pool's number");
                };
                let full = &mut spare[..n * pool.in_len()];
                self.output(unit, full);
                let places = &self.exact[places.before * self.batch..][..places.len * n];
                pool.again(&self.team, full, out, places);
            }
        }
    }
}

/// The bits of `elements` elements of a batch.
pub(super) fn bits(exact: &mut [u8], batch: usize, place: Exact, elements: usize) -> &mut [u8] {
    &mut exact[place.before * batch..][..relu::mask_bytes(elements)]
}

fn channels_max(net: &Net) -> usize {
    let outs = net.units.iter().map(|unit| unit.conv.outs);
    outs.max().unwrap_or(0)
}

fn sums_floats(net: &Net, batch: usize) -> usize {
    let each = net.units.iter().map(|unit| {
        let rows = batch * unit.conv.out_len() / unit.conv.outs;
        norm::scratch_floats(rows, unit.conv.outs)
    });
    each.max().unwrap_or(0)
}
