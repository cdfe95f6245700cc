//! What few bits do to a gradient: each kind of saved tensor alone at two bits, all of them at each
//! width, and layers' inputs alone, from which everything is computed again; against the gradient with everything
//! saved as f32. Beside it what the allotment takes a kind's importance to be.
//!
//! ```text
//! gradient_noise MODEL.gguf TEXT [STEPS] [SEQ]
//! ```
//!
//! Prints, for each case, the mean over a few micro-batches of `|g' - g|^2 / |g|^2` after STEPS steps of training: of the
//! whole gradient, and of each trained tensor, on average by their sizes. The latter is what the optimizer sees, which
//! divides each gradient by its own size, and what is predicted.

use std::fmt;
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::vector::Vector;
use leanstream::error::Error;
use leanstream::io::{self, Direct};
use leanstream::tune::allotment::Allotment;
use leanstream::tune::data::{self, Data};
use leanstream::tune::memory::{self, MemoryPlan, Request};
use leanstream::tune::model::kind::{Kind, LayerPlan};
use leanstream::tune::model::params::Scheme;
use leanstream::tune::optim::{Decay, Precision, Schedule};
use leanstream::tune::packing::{Order, Packing};
use leanstream::tune::settings::{ActBits, Recompute, Settings};
use leanstream::tune::setup::{self, Reading};
use leanstream::tune::trainer::{Parts, Trainer};
use leanstream::tune::watch::Watch;
use leanstream_core::act::Width;

static NO_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Micro-batches that are averaged over.
const BATCHES: u64 = 3;
/// Bytes of memory: plenty.
const BUDGET: u64 = 4 << 30;
/// Everything as it is.
const EXACT: LayerPlan = LayerPlan([Some(Width::F32); Kind::COUNT]);

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [model, text, rest @ ..] = args.as_slice() else {
        eprintln!("usage: gradient_noise MODEL.gguf TEXT [STEPS] [SEQ]");
        return ExitCode::from(2);
    };
    let number = |at: usize, usual: u32| rest.get(at).and_then(|x| x.parse().ok()).unwrap_or(usual);
    match measure(
        Path::new(model),
        Path::new(text),
        number(0, 20),
        number(1, 256),
    ) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gradient_noise: {error}");
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

/// Adapters on all linears, everything saved as f32, a constant rate.
fn settings(steps: u32) -> Settings {
    Settings {
        scheme: Scheme::Lora {
            rank: 8,
            alpha: 16.0,
            dropout: 0.0,
            sites: [true; 7],
        },
        batch: 1,
        steps: u64::from(steps),
        schedule: Schedule {
            peak: 1e-3,
            warmup: 2,
            steps: u64::from(steps),
            decay: Decay::Constant,
            floor: 0.0,
        },
        weight_decay: 0.0,
        clip: 1.0,
        sparsity: 0.0,
        seed: 1,
        act: ActBits::Fixed(Width::F32),
        recompute: Recompute::Never,
        moments: Precision::F32,
        threads: 2,
    }
}

fn measure(model: &Path, text: &Path, steps: u32, seq: u32) -> Result<(), Error> {
    let settings = settings(steps);
    let reading = Reading {
        direct: Direct::Auto,
        io: io::Options::default(),
        stop: &NO_SIGNAL,
    };
    let (info, parts) = setup::prepare(model, settings.scheme, Vector::detect(), &reading)?;
    let options = data::Options {
        seq,
        seed: 1,
        bytes_max: 1 << 30,
    };
    let data = Data::load(text, &info.tokenizer, options)?;
    let plan = plan(&parts, &settings, data.longest())?;
    let mut room = setup::room(&parts, &plan)?;
    let mut trainer = Trainer::new(parts, plan, &mut room, settings, Watch::fixed(BUDGET))?;
    trainer.begin(&info.paths)?;
    for _ in 0..steps {
        trainer.step(&data)?;
    }
    trainer.decoder.learn = true;
    trainer.decoder.micro = 0;
    let kinds = kinds(&trainer);
    let mut trained = Trained {
        packing: Packing::new(data.longest()),
        data: &data,
        trainer,
    };
    let cases = cases(&kinds);
    let (noise, mut learned) = trained.each(&cases)?;
    println!("{:16} {:>11} {:>11}", "", "whole", "by tensor");
    trained.allotted(&mut learned, &kinds)?;
    let layers = trained.layers() as f64;
    for (case, noise) in cases.iter().zip(noise) {
        let predicted = case
            .kind
            .map(|kind| learned.importance_of(kind) * layers / 9.0);
        match predicted {
            Some(predicted) => {
                println!("{:16} {noise}  predicted {predicted:.6}", case.name);
            }
            None => println!("{:16} {noise}", case.name),
        }
    }
    Ok(())
}

/// Memory as if there were plenty.
fn plan(parts: &Parts, settings: &Settings, tokens: usize) -> Result<MemoryPlan, Error> {
    let request = Request {
        budget: BUDGET,
        held: 0,
        tokenizer: 0,
        vectors: 0,
        data: 0,
        tokens,
        longest: tokens,
    };
    memory::plan(
        &parts.net,
        parts.layout.as_ref(),
        &parts.params,
        settings,
        parts.vector,
        &request,
    )
}

/// The kinds of tensors that the model has.
fn kinds(trainer: &Trainer<'_>) -> Vec<Kind> {
    let decoder = &trainer.decoder;
    let width = |kind: &Kind| kind.width(&decoder.net.hyper, decoder.sizes.posts);
    let kinds = Kind::ALL.into_iter().filter(|kind| width(kind) > 0);
    kinds.collect()
}

/// What every layer saves, the same in each.
struct Case {
    name: String,
    plan: LayerPlan,
    /// The kind of tensor that alone is at two bits.
    kind: Option<Kind>,
}

fn cases(kinds: &[Kind]) -> Vec<Case> {
    let all = Width::CODES.into_iter().map(|width| Case {
        name: format!("all at {width}"),
        plan: LayerPlan::all(width),
        kind: None,
    });
    let alone = kinds.iter().map(|kind| {
        let mut plan = EXACT;
        plan.0[*kind as usize] = Some(Width::Two);
        Case {
            name: format!("{} at 2", kind.name()),
            plan,
            kind: Some(*kind),
        }
    });
    let again = Width::CODES.into_iter().map(|width| Case {
        name: format!("inputs at {width}"),
        plan: LayerPlan::input(width),
        kind: None,
    });
    all.chain(alone).chain(again).collect()
}

/// A model that has learned a little, whose gradients are compared.
struct Trained<'d, 'm> {
    trainer: Trainer<'m>,
    data: &'d Data,
    packing: Packing,
}

impl Trained<'_, '_> {
    fn layers(&self) -> usize {
        self.trainer.decoder.net.layers.len()
    }

    /// The gradient of the `index`-th micro-batch from here on, with layers saved as `plan` says.
    fn gradient(&mut self, index: u64, plan: &[LayerPlan]) -> Result<Vec<f32>, Error> {
        let place = self.trainer.place + index;
        self.packing
            .fill(self.data, Order::Shuffled, place..place + 1);
        let batch = self.packing.batch();
        let weight = 1.0 / batch.targets.len() as f32;
        let decoder = &mut self.trainer.decoder;
        decoder.plan.copy_from_slice(plan);
        decoder.grads.fill(0.0);
        decoder.micro = 4 * index;
        decoder.step(&batch, weight)?;
        Ok(decoder.grads.clone())
    }

    /// The noise of each case, and an allotment that has learned the importances. They are learned where
    /// everything is at hand: at eight bits.
    fn each(&mut self, cases: &[Case]) -> Result<(Vec<Noise>, Allotment), Error> {
        let layers = self.layers();
        let decoder = &self.trainer.decoder;
        let mut learned = Allotment::new(
            &decoder.net.hyper,
            decoder.sizes.posts,
            self.data.longest(),
            ActBits::Auto,
            Recompute::Auto,
        );
        let eight = LayerPlan::all(Width::Eight);
        let mut noise = vec![Noise::default(); cases.len()];
        for index in 0..BATCHES {
            let want = self.gradient(index, &vec![EXACT; layers])?;
            for (case, noise) in cases.iter().zip(&mut noise) {
                let got = self.gradient(index, &vec![case.plan; layers])?;
                self.add(noise, &got, &want);
                if case.plan == eight {
                    learned.learn(self.trainer.decoder.importance.by_tensor());
                }
            }
        }
        Ok((noise, learned))
    }

    /// What the allotment makes of the memory that so many bits everywhere would take.
    fn allotted(&mut self, learned: &mut Allotment, kinds: &[Kind]) -> Result<(), Error> {
        let exact = vec![EXACT; self.layers()];
        let one = learned.pages_at(Width::One) as f64;
        for bits in [1.5, 2.0, 2.5, 3.0, 4.0] {
            let mut plan = exact.clone();
            if learned.choose((one * bits) as u64, &mut plan).is_err() {
                continue;
            }
            let mut noise = Noise::default();
            for index in 0..BATCHES {
                let want = self.gradient(index, &exact)?;
                let got = self.gradient(index, &plan)?;
                self.add(&mut noise, &got, &want);
            }
            let of = |kind: &Kind| match learned.bits_of(&plan, *kind) {
                Some(bits) => format!("{} {bits:.1}", kind.name()),
                None => format!("{} -", kind.name()),
            };
            let kinds: Vec<String> = kinds.iter().map(of).collect();
            println!(
                "auto at {bits:<8} {noise}  {}, {} recomputed",
                kinds.join(", "),
                learned.recomputed()
            );
        }
        Ok(())
    }

    /// Adds what one of the micro-batches shows.
    fn add(&self, noise: &mut Noise, got: &[f32], want: &[f32]) {
        let share = 1.0 / BATCHES as f64;
        noise.whole += share * off(got, want);
        for tensor in &self.trainer.decoder.params.tensors {
            let range = tensor.range();
            let size = range.len() as f64 / got.len() as f64;
            noise.by_tensor += share * size * off(&got[range.clone()], &want[range]);
        }
    }
}

/// Squared noise relative to the squared gradient.
#[derive(Clone, Copy, Default)]
struct Noise {
    whole: f64,
    by_tensor: f64,
}

impl fmt::Display for Noise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let number = |x: f64| match x {
            1000.0.. => format!("{x:.2e}"),
            _ => format!("{x:.6}"),
        };
        write!(
            f,
            "{:>11} {:>11}",
            number(self.whole),
            number(self.by_tensor)
        )
    }
}

/// `|got - want|^2 / |want|^2`.
fn off(got: &[f32], want: &[f32]) -> f64 {
    let size: f64 = want.iter().map(|want| f64::from(*want).powi(2)).sum();
    let off = got.iter().zip(want);
    let off: f64 = off.map(|(g, w)| f64::from(g - w).powi(2)).sum();
    off / size
}
