//! `leanstream tune`: fine-tunes a model inside a budget.

mod outputs;
mod report;
mod settings;

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::{Map, json};

use super::args::{PathArg, TypeArg, count, long, threads, whole};
use super::output::say;
use super::setup::default_budget;
use super::storage::Storage;
use crate::alloc::Counting;
use crate::budget::{held, parse_size};
use crate::cpu::Kernels;
use crate::cpu::vector::Vector;
use crate::error::{Error, mib, refuse_input, refuse_special, refuse_twice};
use crate::run::blocks;
use crate::signals;
use crate::tune::checkpoint::{self, Identity};
use crate::tune::data::{self, Data};
use crate::tune::memory::{self, Request};
use crate::tune::setup::{self, Reading};
use crate::tune::trainer::{Parts, Trainer};
use crate::tune::watch::Watch;
use outputs::Outputs;
use report::Report;
use settings::{BATCH_MAX, RANK_MAX};

/// Fine-tune a model inside a budget: an adapter (LoRA), or with --full the whole model. Activations that
/// the backward pass needs are saved in few bits, by what each tensor is worth.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "tune")]
pub struct Tune {
    /// the model: a GGUF file, or any shard of a split one
    #[argh(option, short = 'm', long = "model")]
    model: PathArg,
    /// what to learn from: JSONL with {"prompt", "completion"} or {"text"} a line, or plain text
    #[argh(option)]
    data: PathArg,
    /// what to measure the loss on, before and after; the same formats
    #[argh(option)]
    eval: Option<PathArg>,
    /// the file to make: an adapter as GGUF, or with --full a model
    #[argh(option, short = 'o', long = "output")]
    output: PathArg,
    /// bytes the process may hold: 300M, 1.5G, or a share of the model's size such as 200% (default: what
    /// the machine has, less a margin)
    #[argh(option)]
    budget: Option<String>,
    /// a file that may hold another budget at any time, read again when it changes and on SIGUSR1
    #[argh(option, long = "budget-file")]
    budget_file: Option<PathArg>,
    /// steps (default: 100)
    #[argh(option, default = "100", from_str_fn(long::<1>))]
    steps: u64,
    /// tokens of the longest sequence (default: 512)
    #[argh(option, default = "512", from_str_fn(count::<2>))]
    seq: u32,
    /// sequences of a step (default: 1); short ones share a pass
    #[argh(option, default = "1", from_str_fn(whole::<_, 1, { BATCH_MAX as i128 }>))]
    batch: u32,
    /// train every weight instead of adapters: for small models
    #[argh(switch)]
    full: bool,
    /// rows of an adapter's first matrix (default: 8)
    #[argh(option, from_str_fn(whole::<_, 1, { RANK_MAX as i128 }>))]
    rank: Option<u32>,
    /// adapters are scaled by this over the rank (default: twice the rank)
    #[argh(option)]
    alpha: Option<f32>,
    /// share of an adapter's inputs that are left out at random (default: 0)
    #[argh(option)]
    dropout: Option<f32>,
    /// linears with adapters, a comma list of q, k, v, o, gate, up, down (default: all)
    #[argh(option)]
    targets: Option<String>,
    /// highest learning rate (default: 0.0005)
    #[argh(option)]
    lr: Option<f32>,
    /// how it falls: cosine, linear or constant (default: cosine)
    #[argh(option, default = "String::from(\"cosine\")")]
    schedule: String,
    /// steps in which it rises (default: a twentieth of the steps)
    #[argh(option, from_str_fn(long::<0>))]
    warmup: Option<u64>,
    /// weight decay (default: 0.01)
    #[argh(option, long = "weight-decay", default = "0.01")]
    weight_decay: f32,
    /// largest norm of a step's gradient (default: 1)
    #[argh(option, default = "1.0")]
    clip: f32,
    /// pushes the neurons of a ReLU model to silence, so that fewer need be read: this times their mean
    /// output, summed over layers, is added to the loss that is learned from (default: 0)
    #[argh(option, default = "0.0")]
    sparsity: f32,
    /// seed of data's order, first adapters, rounding and dropout (default: 1)
    #[argh(option, short = 's', default = "1", from_str_fn(long::<0>))]
    seed: u64,
    /// bits of saved activations: auto gives each tensor what it is worth under the budget; 8, 4, 2, 1, bf16
    /// or f32 force one width (default: auto)
    #[argh(option, long = "act-bits", default = "String::from(\"auto\")")]
    act_bits: String,
    /// what is computed again instead of saved: auto (what isn't worth its memory), never, or layers (each
    /// layer from its input) (default: auto)
    #[argh(option, default = "String::from(\"auto\")")]
    recompute: String,
    /// bits of the optimizer's averages: 32 or 8 (default: 32)
    #[argh(
        option,
        long = "optim-bits",
        default = "32",
        from_str_fn(settings::optim_bits)
    )]
    optim_bits: u32,
    /// type of a fully trained model's matrices, such as q8_0 (default: as they were)
    #[argh(option, long = "type")]
    ty: Option<TypeArg>,
    /// steps between checkpoints beside the output (default: 50; 0: only when stopped)
    #[argh(option, long = "checkpoint-every", default = "50", from_str_fn(long::<0>))]
    checkpoint_every: u64,
    /// go on from the output's checkpoint, if there is one
    #[argh(switch)]
    resume: bool,
    /// steps between evaluations (default: only before and after)
    #[argh(option, long = "eval-every", from_str_fn(long::<0>))]
    eval_every: Option<u64>,
    /// write a JSON object a step to this file
    #[argh(option)]
    log: Option<PathArg>,
    /// draw the loss to this file, as SVG
    #[argh(option)]
    plot: Option<PathArg>,
    /// compute threads (default: one a core)
    #[argh(option, short = 't', from_str_fn(threads))]
    threads: Option<u32>,
    /// how to read: auto, uring or pread (default: auto)
    #[argh(option)]
    io: Option<String>,
    /// read through the page cache instead of past it
    #[argh(switch)]
    buffered: bool,
    /// slow reads down, for trials: 300M or 300M,80us
    #[argh(option, long = "throttle-read")]
    throttle_read: Option<String>,
    /// make reads fail, for trials: seed=1,fail=2%,late=5% ...
    #[argh(option)]
    fault: Option<String>,
    /// print one JSON object at the end
    #[argh(switch)]
    json: bool,
}

/// Bytes of data that are read under any budget.
const DATA_BYTES_LEAST: u64 = 1 << 20;

/// The tensor to blame, where numbers stopped being finite because a weight isn't.
fn explained(error: Error, model: &Path) -> Error {
    match error {
        Error::NotFinite(why) => match blocks::blame(model) {
            Ok(()) => Error::Runtime(format!("{why}; all weights in the file are finite")),
            Err(damaged) => damaged,
        },
        other => other,
    }
}

/// How to go on, where a run was stopped that could.
fn say_where(error: &Error, step: u64) {
    let why = match error {
        Error::Signal(signal) => format!("stopped by signal {signal}"),
        Error::Budget { .. } => "the budget fell too far".to_owned(),
        _ => return,
    };
    say(&if step == 0 {
        format!("leanstream: {why} before the end of step 1: nothing was learned yet")
    } else {
        format!("leanstream: {why} after step {step}; --resume goes on from there")
    });
}

impl Tune {
    pub(super) fn execute(&self, allocator: &Counting) -> Result<(), Error> {
        let settings = self.settings()?;
        signals::listen_again();
        let output = self.output.0.as_path();
        let checkpoint = checkpoint::path_of(output);
        let vector = Vector::beside(&Kernels::from_env().map_err(|e| Error::Usage(e.to_string()))?);
        let (direct, io) = self.storage().options()?;
        let reading = Reading {
            direct,
            io,
            stop: &signals::STOP,
        };
        let (info, parts) = setup::prepare(&self.model.0, settings.scheme, vector, &reading)?;
        self.refuse_inputs(&info.paths)?;
        if self.sparsity > 0.0 && !info.hyper.act.sparse() {
            return Err(Error::Usage(format!(
                "--sparsity: {}'s neurons are never silent: its activation isn't ReLU",
                self.model.0.display()
            )));
        }
        let budget = match &self.budget {
            Some(text) => parse_size(text, Some(info.file_bytes))
                .map_err(|e| Error::Usage(format!("--budget: {e}")))?,
            None => default_budget(info.file_bytes),
        };
        let file = self.budget_file.as_ref().map(|path| path.0.as_path());
        let mut watch = Watch::new(budget, file, info.file_bytes);
        let budget = watch.begin()?;
        let data = self.load(&self.data, &info, budget)?;
        let eval = self
            .eval
            .as_ref()
            .map(|path| self.load(path, &info, budget))
            .transpose()?;
        let all = || std::iter::once(&data).chain(&eval);
        for data in all() {
            if let Some(notice) = data.notice() {
                say(&format!("leanstream: {}: {notice}", data.path().display()));
            }
        }
        let longest = all().map(Data::longest).max().expect("there is data");
        let request = Request {
            budget,
            held: held(),
            tokenizer: info.tokenizer.table_bytes(),
            vectors: parts.vectors.bytes(),
            data: all().map(Data::bytes).sum(),
            // Short sequences share a pass as far as one of the length that was asked for would go.
            tokens: longest.max(self.tokens_of_a_step(&data)),
            longest,
        };
        let plan = memory::plan(
            &parts.net,
            parts.layout.as_ref(),
            &parts.params,
            &settings,
            vector,
            &request,
        )?;
        let mut outputs = Outputs::begin(self, output)?;
        let identity = self.identity(&info.kind, &data, &parts, info.file_bytes);
        let mut room = setup::room(&parts, &plan)?;
        let mut trainer = Trainer::new(parts, plan, &mut room, settings, watch)?;
        trainer.begin(&info.paths)?;
        if self.resume && checkpoint::load(&checkpoint, &identity, &mut trainer)? {
            say(&format!(
                "leanstream: going on from step {} of {}",
                trainer.step,
                checkpoint.display()
            ));
        }
        say(&self.headline(&trainer, &data, budget));
        let mut report = Report::new(self);
        let mut saved_at = trainer.step;
        let result = self.train(
            &mut trainer,
            &data,
            eval.as_ref(),
            &mut report,
            &mut outputs,
            allocator,
            &mut |trainer| {
                saved_at = trainer.step;
                checkpoint::save(&checkpoint, &identity, trainer)
            },
        );
        if let Err(error) = result {
            // What was learned so far isn't lost to a signal, a budget or a disk.
            if trainer.step > saved_at {
                checkpoint::save(&checkpoint, &identity, &trainer)?;
            }
            say_where(&error, trainer.step);
            // Looking for a damaged weight takes memory too.
            drop(trainer);
            drop(room);
            return Err(explained(error, &self.model.0));
        }
        outputs.adapter(output, &info, &trainer, self.ty.map(|ty| ty.0))?;
        outputs.finish(&report)?;
        report.print(self.json, &trainer, eval.is_some())
    }

    /// The loop: steps, evaluations, checkpoints.
    #[allow(clippy::too_many_arguments)]
    fn train(
        &self,
        trainer: &mut Trainer<'_>,
        data: &Data,
        eval: Option<&Data>,
        report: &mut Report,
        outputs: &mut Outputs,
        allocator: &Counting,
        save: &mut dyn FnMut(&Trainer<'_>) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(eval) = eval {
            report.evaluated(trainer.step, trainer.evaluate(eval)?);
        }
        while trainer.step < self.steps {
            let begun = Instant::now();
            allocator.seal();
            let step = trainer.step(data);
            allocator.unseal();
            let step = step?;
            report.stepped(&step, begun.elapsed());
            if let Some(trouble) = trainer.decoder.watch.take_trouble() {
                say(&format!("leanstream: {trouble}; the budget stays as it is"));
            }
            let now = trainer.step;
            let every = |n: u64| n > 0 && now.is_multiple_of(n);
            let evaluates = every(self.eval_every.unwrap_or(0)) || trainer.step == self.steps;
            let loss = match eval.filter(|_| evaluates) {
                Some(eval) => {
                    let loss = trainer.evaluate(eval)?;
                    report.evaluated(trainer.step, loss);
                    Some(loss)
                }
                None => None,
            };
            outputs.log(trainer, &step, begun.elapsed(), loss)?;
            report.progress(trainer, &step);
            if every(self.checkpoint_every) || (trainer.step == self.steps) {
                save(trainer)?;
            }
        }
        Ok(())
    }

    /// Tokens of a step's sequences, as far as they fit one of the length that was asked for.
    fn tokens_of_a_step(&self, data: &Data) -> usize {
        let mean = data.tokens().div_ceil(data.sequences() as u64);
        let step = mean.saturating_mul(u64::from(self.batch));
        step.min(u64::from(self.seq)) as usize
    }

    fn load(
        &self,
        path: &PathArg,
        info: &crate::run::model::Info,
        budget: u64,
    ) -> Result<Data, Error> {
        if self.seq > info.hyper.context {
            return Err(Error::Usage(format!(
                "--seq {}: the model was trained with {} tokens of context; give at most that",
                self.seq, info.hyper.context
            )));
        }
        let options = data::Options {
            seq: self.seq,
            seed: self.seed,
            // With less the plan refuses whatever the data is, and says what would do.
            bytes_max: (budget / 8).max(DATA_BYTES_LEAST),
        };
        Data::load(&path.0, &info.tokenizer, options)
    }

    fn refuse_inputs(&self, model: &[PathBuf]) -> Result<(), Error> {
        let inputs = [
            Some(&self.data),
            self.eval.as_ref(),
            self.budget_file.as_ref(),
        ];
        let inputs = inputs.into_iter().flatten().map(|path| &path.0);
        let inputs: Vec<_> = model.iter().chain(inputs).map(PathBuf::as_path).collect();
        let checkpoint = checkpoint::path_of(&self.output.0);
        let others = [self.log.as_ref(), self.plot.as_ref()];
        let others = others.into_iter().flatten().map(|path| path.0.as_path());
        let mut outputs = vec![self.output.0.as_path(), checkpoint.as_path()];
        // The log is written as it stands, wherever that is.
        let plot = self.plot.iter().map(|path| path.0.as_path());
        for out in outputs.iter().copied().chain(plot) {
            refuse_special(out)?;
        }
        outputs.extend(others);
        for (at, out) in outputs.iter().enumerate() {
            refuse_input(out, inputs.iter().copied())?;
            refuse_twice(out, &outputs[..at])?;
        }
        Ok(())
    }

    fn storage(&self) -> Storage<'_> {
        Storage {
            io: self.io.as_deref(),
            buffered: self.buffered,
            throttle: self.throttle_read.as_deref(),
            fault: self.fault.as_deref(),
        }
    }

    /// What a checkpoint must agree with: all that changes the numbers, but the number of steps.
    fn identity(&self, kind: &str, data: &Data, parts: &Parts, model_bytes: u64) -> Identity {
        let fields = json!({
            "model": kind,
            "model_bytes": model_bytes,
            "parameters": parts.params.count,
            "data": data.fingerprint(),
            "scheme": format!("{:?}", parts.params.scheme),
            "seq": self.seq,
            "batch": self.batch,
            "lr": self.lr,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "weight_decay": self.weight_decay,
            "clip": self.clip,
            "sparsity": self.sparsity,
            "seed": self.seed,
            "act_bits": self.act_bits,
            "recompute": self.recompute,
            "optim_bits": self.optim_bits,
        });
        Identity {
            fields: fields.as_object().cloned().unwrap_or_else(Map::new),
        }
    }

    fn headline(&self, trainer: &Trainer<'_>, data: &Data, budget: u64) -> String {
        let decoder = &trainer.decoder;
        let weights = decoder.store.as_ref().map_or(0, |store| store.kept_bytes());
        format!(
            "leanstream: {} parameters, {} sequences of up to {} tokens, budget {}: {} of weights stay, {} for \
             activations ({:.2} bits an element)",
            decoder.params.count,
            data.sequences(),
            data.longest(),
            mib(budget),
            mib(weights),
            mib(u64::from(decoder.memory.pages) * 4096),
            decoder.allotment.mean_bits(&decoder.plan),
        )
    }
}
