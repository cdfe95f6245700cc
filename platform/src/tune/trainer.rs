//! The training loop's step: micro-batches forward and backward, clipping, the optimizer.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use leanstream_core::act::Width;
use leanstream_core::plan::{self, Hyper};

use super::act::{Room, Saved};
use super::allotment::Allotment;
use super::data::Data;
use super::gemm::Products;
use super::memory::{MemoryPlan, widths_of};
use super::model::buffers::{Buffers, Factors, Low};
use super::model::columns::Columns;
use super::model::decoder::{Decoder, Firing};
use super::model::embed::Embedding;
use super::model::head::Losses;
use super::model::importance::Importance;
use super::model::kind::{Kind, LayerPlan};
use super::model::net::Net;
use super::model::params::{Params, Scheme};
use super::model::store::{Layout, Store};
use super::ops::Angles;
use super::optim::{AdamW, Moments, Update, clip_factor, sum_squares};
use super::packing::{Order, Packing, targets};
use super::settings::{ActBits, Recompute, Settings};
use super::team::Team;
use super::watch::Watch;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::io::{self, Source};
use crate::run::model::Vectors;
use crate::run::rope::RopeParams;

/// Steps after which the allotment is chosen again.
const CHOOSE_EVERY: u64 = 8;

/// Everything that a trainer is made of.
pub struct Parts {
    /// The decoder's shape.
    pub net: Net,
    /// Its frozen norms and biases.
    pub vectors: Vectors,
    /// Divisors of rotary frequencies.
    pub rope_factors: Option<Vec<f32>>,
    /// How frozen weights are cut; none where all are trained.
    pub layout: Option<Layout>,
    /// The model's files.
    pub source: Arc<Source>,
    /// How to read them.
    pub io: io::Options,
    /// What is trained.
    pub params: Params,
    /// The elementwise kernels' instruction set.
    pub vector: Vector,
    /// The signal that asks to stop, 0 while there is none.
    pub stop: &'static AtomicI32,
}

/// Pages that a continued run may take beyond its plan, which differs a little from run to run: what a
/// process holds when it plans isn't always the same.
const PAGES_VARY: u64 = 128;

/// What a step did.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Step {
    /// Mean loss of the tokens that were predicted.
    pub loss: f64,
    /// How many they were.
    pub targets: u64,
    /// Tokens that were taken in.
    pub tokens: u64,
    /// Norm of the gradient before clipping.
    pub norm: f64,
    /// Learning rate.
    pub rate: f32,
    /// Share of ReLU's neurons that fired; none where the model has other activations.
    pub active: Option<f64>,
}

/// A model in training.
pub struct Trainer<'m> {
    /// The decoder with its parameters.
    pub decoder: Decoder<'m>,
    /// The optimizer's averages, by tensor.
    pub moments: Vec<Moments>,
    /// What was asked for.
    pub settings: Settings,
    /// Steps done.
    pub step: u64,
    /// Sequences taken, counted on over epochs.
    pub place: u64,
    packing: Packing,
    optimizer: AdamW,
}

impl<'m> Trainer<'m> {
    /// Allocates everything and starts the threads. Trained tensors are zero until
    /// [`Trainer::begin`].
    ///
    /// # Errors
    /// What the operating system refuses.
    pub fn new(
        parts: Parts,
        memory: MemoryPlan,
        room: &'m mut Room,
        settings: Settings,
        watch: Watch,
    ) -> Result<Self, Error> {
        let Parts {
            net,
            vectors,
            rope_factors,
            layout,
            source,
            io,
            params,
            vector,
            stop,
        } = parts;
        let hyper = net.hyper;
        let sizes = memory.sizes;
        let files = source.files();
        let path = files[0].path().to_owned();
        let embedding = net.matrices[net.embedding.0 as usize];
        let rows = Embedding::open(
            files[usize::from(embedding.file.0)].path(),
            embedding.row_bytes as usize,
        )?;
        let store = match layout {
            Some(layout) => Some(Store::new(layout, memory.slots, source, &io, stop)?),
            None => None,
        };
        let saved = Saved::new(room, memory.pages, settings.seed)
            .map_err(|error| Error::Runtime(error.to_string()))?;
        let mut allotment = Allotment::new(
            &hyper,
            sizes.posts,
            sizes.tokens,
            settings.act,
            settings.recompute,
        );
        let mut widths = vec![LayerPlan([None; Kind::COUNT]); net.layers.len()];
        allotment
            .choose(u64::from(memory.pages), &mut widths)
            .map_err(|error| Error::Runtime(error.to_string()))?;
        let team = Team::new(settings.threads)
            .map_err(|error| Error::io(&path, "start a thread for it", error))?;
        let moments = params
            .tensors
            .iter()
            .map(|tensor| Moments::new(settings.moments, tensor.range().len()))
            .collect();
        let angles = angles(&hyper, rope_factors.as_deref(), sizes.longest)
            .map_err(|error| Error::model(&path, error))?;
        let layers = net.layers.len();
        let decoder = Decoder {
            rows,
            store,
            vectors,
            values: vec![0.0; params.count],
            grads: vec![0.0; params.count],
            params,
            products: Products::new(vector, settings.threads),
            team,
            vector,
            buffers: Buffers::new(&sizes, &hyper),
            low: Low::new(&sizes, &hyper),
            factors: Factors::new(&sizes, &hyper),
            saved,
            columns: Columns::new(widths_of(&net, sizes.posts), settings.threads),
            plan: widths,
            allotment,
            memory,
            watch,
            stop,
            importance: Importance::new(layers, sizes.tokens),
            learn: settings.act == ActBits::Auto && settings.recompute != Recompute::Layers,
            angles,
            losses: Losses::new(sizes.tokens, sizes.head_tokens),
            sizes,
            firing: Firing::new(settings.sparsity),
            seed: settings.seed,
            micro: 0,
            net,
        };
        Ok(Self {
            decoder,
            moments,
            packing: Packing::new(sizes.tokens),
            optimizer: AdamW {
                weight_decay: settings.weight_decay,
                ..AdamW::default()
            },
            settings,
            step: 0,
            place: 0,
        })
    }

    /// First values: adapters that change nothing yet, or the model's own weights.
    ///
    /// # Errors
    /// Weights that can't be read.
    pub fn begin(&mut self, files: &[PathBuf]) -> Result<(), Error> {
        let Decoder { params, values, .. } = &mut self.decoder;
        match params.scheme {
            Scheme::Lora { .. } => params.first_adapters(self.settings.seed, values),
            Scheme::Full => self.decoder.read_weights(files)?,
        }
        Ok(())
    }

    /// One step over the next sequences of `data`.
    ///
    /// # Errors
    /// A read that fails for good, a stop; [`Error::NotFinite`] for a loss or gradient that is no finite number.
    pub fn step(&mut self, data: &Data) -> Result<Step, Error> {
        let end = self.place + u64::from(self.settings.batch);
        let wanted = targets(data, self.place..end);
        let weight = 1.0 / wanted as f32;
        self.decoder.grads.fill(0.0);
        let (mut sum, mut count, mut tokens) = (0.0, 0, 0);
        let mut place = self.place;
        let micro = self.decoder.micro;
        while place < end {
            place = self.packing.fill(data, Order::Shuffled, place..end);
            let batch = self.packing.batch();
            tokens += batch.tokens.len() as u64;
            let (loss, targets) = self.decoder.step(&batch, weight).inspect_err(|_| {
                // What is saved of a step that was given up is of no use; it begins anew.
                self.decoder.saved.clear();
                self.decoder.micro = micro;
            })?;
            sum += loss;
            count += targets as u64;
        }
        let loss = sum / count as f64;
        let norm = self.norm();
        let rate = self.settings.schedule.at(self.step);
        let Some(factor) = clip_factor(norm, self.settings.clip).filter(|_| loss.is_finite())
        else {
            let narrow = |width: Width| width.is_codes() && width <= Width::Two;
            let bits = match self.settings.act.fixed().filter(|width| narrow(*width)) {
                Some(width) => {
                    format!("activations need more than {width} bits (--act-bits auto), ")
                }
                None => String::new(),
            };
            return Err(Error::NotFinite(format!(
                "step {}: the loss is {loss} and the gradient's norm {norm}: {bits}the learning rate of {rate} is too \
                 high (--lr), or the weights are damaged",
                self.step + 1
            )));
        };
        self.apply(rate, factor);
        self.place = end;
        self.step += 1;
        // Often at first, when much is learned.
        if self.step.is_multiple_of(CHOOSE_EVERY) || self.step.is_power_of_two() {
            self.choose()?;
        }
        Ok(Step {
            loss,
            targets: count,
            tokens,
            norm,
            rate,
            active: self.decoder.firing.take(),
        })
    }

    /// Mean loss over all of `data`, as it stands.
    ///
    /// # Errors
    /// As [`Trainer::step`].
    pub fn evaluate(&mut self, data: &Data) -> Result<f64, Error> {
        let (mut sum, mut count, mut place) = (0.0, 0, 0);
        let end = data.sequences() as u64;
        while place < end {
            place = self.packing.fill(data, Order::File, place..end);
            let (loss, targets) = self.decoder.evaluate(&self.packing.batch())?;
            sum += loss;
            count += targets;
        }
        let loss = sum / count as f64;
        if !loss.is_finite() {
            return Err(Error::NotFinite(format!(
                "{}: after {} steps the loss is {loss}: the learning rate is too high (--lr), or the weights are damaged",
                data.path().display(),
                self.step
            )));
        }
        Ok(loss)
    }

    /// Norm of all gradients.
    pub fn norm(&self) -> f64 {
        let decoder = &self.decoder;
        sum_squares(&decoder.team, decoder.vector, &decoder.grads).sqrt()
    }

    /// Moves what is trained against its gradients times `factor`.
    pub fn apply(&mut self, rate: f32, factor: f32) {
        let Decoder {
            team,
            vector,
            params,
            values,
            grads,
            ..
        } = &mut self.decoder;
        let update = Update {
            rate,
            step: self.step,
            factor,
            seed: self.settings.seed,
            tensor: 0,
        };
        let tensors = params.tensors.iter();
        self.optimizer.step_all(
            team,
            *vector,
            values,
            grads,
            &mut self.moments,
            update,
            tensors.map(|tensor| (tensor.range(), tensor.decays)),
        );
    }

    /// Chooses widths again, by what the steps so far showed.
    ///
    /// # Errors
    /// The pages don't do any more.
    pub fn choose(&mut self) -> Result<(), Error> {
        let decoder = &mut self.decoder;
        decoder.allotment.learn(decoder.importance.by_tensor());
        let pages = u64::from(decoder.saved.pool().target());
        decoder
            .allotment
            .choose(pages, &mut decoder.plan)
            .map(|_| ())
            .map_err(|error| Error::Runtime(error.to_string()))
    }

    /// Goes on with a plan for `pages` pages that a checkpoint has.
    ///
    /// # Errors
    /// It is no plan of this model.
    pub fn resume_plan(&mut self, text: &str, pages: u64) -> Result<(), Error> {
        let decoder = &mut self.decoder;
        let here = u64::from(decoder.memory.pages);
        if pages > here + PAGES_VARY || pages > u64::from(decoder.memory.pages_max) {
            // Another budget: the plan made for it stands.
            return Ok(());
        }
        if !decoder.allotment.take(text, &mut decoder.plan) {
            return Err(Error::Usage(
                "the checkpoint's plan of activations isn't one of this model".into(),
            ));
        }
        decoder
            .saved
            .set_limit(&decoder.team, pages as u32, decoder.allotment.by_tensor())
            .map_err(|error| Error::Runtime(error.to_string()))?;
        Ok(())
    }
}

/// Rotary angles of both kinds of layers.
fn angles(
    hyper: &Hyper,
    factors: Option<&[f32]>,
    positions: usize,
) -> Result<[Angles; 2], crate::run::rope::RopeError> {
    let of = |rope: &plan::Rope| {
        let params = RopeParams {
            style: hyper.rope_style,
            head_dim: hyper.head_dim as usize,
            n_rot: hyper.rope_dims as usize,
            base: rope.base,
            linear_factor: rope.scale,
            freq_factors: factors,
        };
        Angles::new(&params, positions)
    };
    Ok([of(&hyper.rope)?, of(&hyper.rope_local)?])
}
