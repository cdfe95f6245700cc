//! Training a classifier inside a budget for what is saved: steps, the optimizer, evaluation.

use leanstream_core::act::Width;

use super::allotment::{Allotment, capacity, fixed_bytes, page_bytes};
use super::classifier::{Classifier, Outcome};
use super::data::Images;
use super::net::Net;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::synth::blocks::Rng;
use crate::tune::act::{Capacity, Room};
use crate::tune::optim::{AdamW, Moments, Precision, Schedule, Update, clip_factor, sum_squares};

/// Steps after which widths are chosen again.
const CHOOSE_EVERY: u64 = 8;

/// What training is asked to do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// Images of a step.
    pub batch: usize,
    /// The width of all that is saved; none: as many bits as each tensor is worth.
    pub act: Option<Width>,
    /// Bytes that saved activations may take, masks and metadata counted; none: as many as they can use.
    pub budget: Option<u64>,
    /// The learning rate.
    pub schedule: Schedule,
    /// Share of each weight that a step takes off, times the learning rate.
    pub weight_decay: f32,
    /// Threads, the caller counted.
    pub threads: usize,
    /// Seed of first values, of the order of images and of rounding.
    pub seed: u64,
}

/// What was decided before anything is allocated.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Memory for [`Trainer::new`].
    pub capacity: Capacity,
    /// Pages at the start.
    pub pages: u32,
    /// The least budget.
    pub least: u64,
    /// Bytes besides pages.
    fixed: u64,
}

impl Plan {
    /// Decides.
    ///
    /// # Errors
    /// [`Error::Budget`]: too few bytes for the narrowest.
    pub fn new(net: &Net, settings: &Settings) -> Result<Self, Error> {
        let allotment = Allotment::new(net, settings.batch, settings.act);
        let (pages_least, pages_most) = allotment.pages();
        let fixed = fixed_bytes(net, settings.batch, settings.act);
        let page = page_bytes() as u64;
        let least = fixed + pages_least * page;
        let too_small = |budget| Error::Budget {
            budget,
            least,
            table: format!(
                "{:>12}  masks, places, norms' factors and metadata\n{:>12}  pages of activations, at the least",
                fixed,
                pages_least * page
            ),
        };
        let pages = match settings.budget {
            None => pages_most,
            Some(budget) if budget < least => return Err(too_small(budget)),
            Some(budget) => pages_most.min((budget - fixed) / page),
        };
        let count = |pages| {
            u32::try_from(pages).map_err(|_| {
                Error::Usage("a batch that saves 16 TiB; take fewer images (--batch)".into())
            })
        };
        Ok(Self {
            capacity: capacity(net, settings.batch, count(pages_most)?),
            pages: count(pages)?,
            least,
            fixed,
        })
    }
}

/// What a step did.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Progress {
    /// Mean loss of its images.
    pub loss: f64,
    /// Images whose class had the highest logit.
    pub correct: usize,
    /// Norm of the gradient.
    pub norm: f64,
    /// Learning rate.
    pub rate: f32,
}

/// A classifier in training.
pub struct Trainer<'m> {
    /// Its passes and parameters.
    pub classifier: Classifier<'m>,
    /// How many bits what it saves gets.
    pub allotment: Allotment,
    /// What was asked for.
    pub settings: Settings,
    /// Steps done.
    pub step: u64,
    plan: Plan,
    moments: Vec<Moments>,
    images: Vec<f32>,
    labels: Vec<u32>,
}

impl<'m> Trainer<'m> {
    /// Allocates everything, and draws the first parameters. `room` is made of `plan.capacity`.
    ///
    /// # Errors
    /// What the operating system refuses.
    pub fn new(
        net: Net,
        vector: Vector,
        plan: Plan,
        room: &'m mut Room,
        settings: Settings,
    ) -> Result<Self, Error> {
        let Settings {
            batch,
            act,
            threads,
            seed,
            ..
        } = settings;
        let allotment = Allotment::new(&net, batch, act);
        let moments = net
            .params
            .iter()
            .map(|param| Moments::new(Precision::F32, param.len))
            .collect();
        let images = vec![0.0; batch * net.image_len()];
        let mut classifier = Classifier::new(net, batch, threads, vector, room, plan.pages, seed)?;
        classifier.learn = act.is_none();
        first_values(&classifier.net, seed, &mut classifier.values);
        let mut trainer = Self {
            classifier,
            allotment,
            settings,
            step: 0,
            plan,
            moments,
            images,
            labels: vec![0; batch],
        };
        trainer.choose()?;
        Ok(trainer)
    }

    /// Bytes that parameters, their gradients, the optimizer's averages and the batch take.
    #[must_use]
    pub fn trained_bytes(net: &Net, batch: usize) -> u64 {
        let moments = net.params.iter();
        let moments: usize = moments
            .map(|param| Moments::bytes(Precision::F32, param.len))
            .sum();
        (8 * net.count() + moments + batch * (4 * net.image_len() + 4)) as u64
    }

    /// Steps of an epoch: whole batches.
    #[must_use]
    pub fn steps(&self, data: &Images) -> u64 {
        (data.len() / self.settings.batch) as u64
    }

    /// One step over the next images of `data`, in an order of their own in every epoch. Allocates nothing.
    ///
    /// # Errors
    /// A loss or an activation that isn't finite.
    ///
    /// # Panics
    /// `data` has fewer images than a batch, or other ones than the net's.
    pub fn step(&mut self, data: &Images) -> Result<Progress, Error> {
        let batch = self.settings.batch as u64;
        let steps = self.steps(data);
        assert!(steps > 0, "at least a batch of images");
        let first = self.step % steps * batch;
        data.fill(
            (first..first + batch).map(|i| data.shuffled(self.settings.seed, self.step / steps, i)),
            &mut self.images,
            &mut self.labels,
        );
        let Outcome { loss, correct } = self.classifier.step(&self.images, &self.labels)?;
        let loss = loss / batch as f64;
        let classifier = &self.classifier;
        let norm = sum_squares(&classifier.team, classifier.vector, &classifier.grads).sqrt();
        let rate = self.settings.schedule.at(self.step);
        if clip_factor(norm, f32::MAX).is_none() || !loss.is_finite() {
            return Err(Error::Runtime(format!(
                "step {}: the loss is {loss} and the gradient's norm {norm}: the learning rate of {rate} is too \
                 high (--lr)",
                self.step + 1
            )));
        }
        self.apply(rate);
        self.step += 1;
        if self.settings.act.is_none() && self.step % CHOOSE_EVERY == 1 {
            self.allotment.learn(self.classifier.importance.by_tensor());
            self.choose()?;
        }
        Ok(Progress {
            loss,
            correct,
            norm,
            rate,
        })
    }

    /// Share of `data`'s images that are told right, and their mean loss.
    ///
    /// # Errors
    /// None that training doesn't have.
    pub fn evaluate(&mut self, data: &Images) -> Result<(f64, f64), Error> {
        let (mut loss, mut correct, mut first) = (0.0, 0, 0);
        while first < data.len() {
            let n = self.settings.batch.min(data.len() - first);
            let images = &mut self.images[..n * data.image_len()];
            let labels = &mut self.labels[..n];
            data.fill(first..first + n, images, labels);
            let outcome = self.classifier.evaluate(images, labels)?;
            loss += outcome.loss;
            correct += outcome.correct;
            first += n;
        }
        let count = data.len() as f64;
        Ok((correct as f64 / count, loss / count))
    }

    /// Keeps what is saved to another budget from the next step on; memory that comes free goes back to the
    /// system.
    ///
    /// # Errors
    /// [`Error::Budget`]: training can't go on in it; nothing has changed.
    pub fn set_budget(&mut self, budget: u64) -> Result<(), Error> {
        let pages = budget.saturating_sub(self.plan.fixed) / page_bytes() as u64;
        let (pages_least, pages_most) = self.allotment.pages();
        if budget < self.plan.least || pages < pages_least {
            return Err(Error::Budget {
                budget,
                least: self.plan.least,
                table: String::new(),
            });
        }
        let pages = pages.min(pages_most) as u32;
        let classifier = &mut self.classifier;
        classifier
            .saved
            .set_limit(&classifier.team, pages, self.allotment.importance())
            .map_err(|error| Error::Runtime(error.to_string()))?;
        self.choose()
    }

    /// Chooses widths by what is known of importances.
    fn choose(&mut self) -> Result<(), Error> {
        let pages = u64::from(self.classifier.saved.pool().target());
        self.allotment
            .choose(pages, &mut self.classifier.widths)
            .map_err(|error| Error::Runtime(error.to_string()))
    }

    /// Moves the parameters against their gradients.
    fn apply(&mut self, rate: f32) {
        let Classifier {
            net,
            values,
            grads,
            team,
            vector,
            ..
        } = &mut self.classifier;
        let optimizer = AdamW {
            weight_decay: self.settings.weight_decay,
            ..AdamW::default()
        };
        let update = Update {
            rate,
            step: self.step,
            factor: 1.0,
            seed: self.settings.seed,
            tensor: 0,
        };
        let params = net.params.iter();
        optimizer.step_all(
            team,
            *vector,
            values,
            grads,
            &mut self.moments,
            update,
            params.map(|param| (param.range(), param.decays)),
        );
    }
}

/// Weights nearly normal with the variance `2 / inputs` (He's, for ReLU), the rest constants.
fn first_values(net: &Net, seed: u64, values: &mut [f32]) {
    for param in &net.params {
        let mut random = Rng::new(seed, &param.name);
        let deviation = match param.fan_in {
            0 => 0.0,
            inputs => (2.0 / inputs as f32).sqrt(),
        };
        for value in &mut values[param.range()] {
            *value = param.constant + deviation * random.normal();
        }
    }
}
