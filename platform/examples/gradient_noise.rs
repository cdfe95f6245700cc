//! What few bits do to a gradient: each kind of saved tensor alone at two bits, and all of them at each
//! width, against the gradient with everything saved as f32. Beside it what the allotment takes a
//! kind's importance to be.
//!
//! ```text
//! gradient_noise MODEL.gguf TEXT [STEPS] [SEQ]
//! ```
//!
//! Prints, for each case, the mean over a few micro-batches of `|g' - g|^2 / |g|^2` after STEPS steps of
//! training.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::vector::Vector;
use leanstream::error::Error;
use leanstream::io::{self, Direct};
use leanstream::tune::allotment::Allotment;
use leanstream::tune::data::{self, Data};
use leanstream::tune::memory::{self, Request};
use leanstream::tune::model::kind::{Kind, LayerPlan};
use leanstream::tune::model::params::Scheme;
use leanstream::tune::optim::{Decay, Precision, Schedule};
use leanstream::tune::packing::{Order, Packing};
use leanstream::tune::settings::{ActBits, Recompute, Settings};
use leanstream::tune::setup::{self, Reading};
use leanstream::tune::trainer::Trainer;
use leanstream::tune::watch::Watch;
use leanstream_core::act::Width;

static NO_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Micro-batches that are averaged over.
const BATCHES: u64 = 3;

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

fn measure(model: &Path, text: &Path, steps: u32, seq: u32) -> Result<(), Error> {
    let scheme = Scheme::Lora {
        rank: 8,
        alpha: 16.0,
        dropout: 0.0,
        sites: [true; 7],
    };
    let settings = Settings {
        scheme,
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
        seed: 1,
        act: ActBits::Fixed(Width::F32),
        recompute: Recompute::Never,
        moments: Precision::F32,
        threads: 2,
    };
    let reading = Reading {
        direct: Direct::Auto,
        io: io::Options::default(),
        stop: &NO_SIGNAL,
    };
    let (info, parts) = setup::prepare(model, scheme, Vector::detect(), &reading)?;
    let data = Data::load(
        text,
        &info.tokenizer,
        data::Options {
            seq,
            seed: 1,
            bytes_max: 1 << 30,
        },
    )?;
    let request = Request {
        budget: 4 << 30,
        held: 0,
        tokenizer: 0,
        vectors: 0,
        data: 0,
        tokens: data.longest(),
        longest: data.longest(),
    };
    let layout = parts.layout.as_ref();
    let plan = memory::plan(
        &parts.net,
        layout,
        &parts.params,
        &settings,
        parts.vector,
        &request,
    )?;
    let mut room = setup::room(&parts, &plan)?;
    let posts = plan.sizes.posts;
    let hyper = parts.net.hyper;
    let mut trainer = Trainer::new(parts, plan, &mut room, settings, Watch::fixed(4 << 30))?;
    trainer.begin(&info.paths)?;
    for _ in 0..steps {
        trainer.step(&data)?;
    }
    let layers = hyper.layers as usize;
    let exact = LayerPlan::all(Width::F32);
    let mut packing = Packing::new(data.longest());
    // Importances are learned where everything is at hand: at eight bits.
    let mut learned = Allotment::new(
        &hyper,
        posts,
        data.longest(),
        ActBits::Auto,
        Recompute::Auto,
    );
    trainer.decoder.learn = true;
    trainer.decoder.micro = 0;
    let mut cases: Vec<(String, LayerPlan)> = Width::CODES
        .into_iter()
        .map(|width| (format!("all at {width}"), LayerPlan::all(width)))
        .collect();
    let kinds: Vec<Kind> = Kind::ALL
        .into_iter()
        .filter(|kind| kind.width(&hyper, posts) > 0)
        .collect();
    for kind in &kinds {
        let mut plan = exact;
        plan.0[*kind as usize] = Some(Width::Two);
        cases.push((format!("{} at 2", kind.name()), plan));
    }
    let mut noise = vec![0.0; cases.len()];
    for index in 0..BATCHES {
        let place = trainer.place + index;
        packing.fill(&data, Order::Shuffled, place..place + 1);
        let batch = packing.batch();
        let weight = 1.0 / batch.targets.len() as f32;
        let gradient = |trainer: &mut Trainer<'_>, plan: LayerPlan| {
            let decoder = &mut trainer.decoder;
            decoder.plan.fill(plan);
            decoder.grads.fill(0.0);
            decoder.micro = 4 * index;
            decoder.step(&batch, weight).map(|_| decoder.grads.clone())
        };
        let want = gradient(&mut trainer, exact)?;
        let size: f64 = want.iter().map(|g| f64::from(*g).powi(2)).sum();
        for ((name, plan), noise) in cases.iter().zip(&mut noise) {
            let got = gradient(&mut trainer, *plan)?;
            let off: f64 = got
                .iter()
                .zip(&want)
                .map(|(got, want)| f64::from(got - want).powi(2))
                .sum();
            *noise += off / size / BATCHES as f64;
            if name == "all at 8" {
                learned.learn(trainer.decoder.importance.by_tensor());
            }
        }
    }
    // What the allotment makes of the same memory.
    let one = learned.pages_at(Width::One) as f64;
    for bits in [1.5, 2.0, 2.5, 3.0, 4.0] {
        let mut plan = vec![exact; layers];
        if learned.choose((one * bits) as u64, &mut plan).is_err() {
            continue;
        }
        let mut noise = 0.0;
        for index in 0..BATCHES {
            let place = trainer.place + index;
            packing.fill(&data, Order::Shuffled, place..place + 1);
            let batch = packing.batch();
            let weight = 1.0 / batch.targets.len() as f32;
            let mut gradient = |plan: &[LayerPlan]| {
                let decoder = &mut trainer.decoder;
                decoder.plan.copy_from_slice(plan);
                decoder.grads.fill(0.0);
                decoder.micro = 4 * index;
                decoder.step(&batch, weight).map(|_| decoder.grads.clone())
            };
            let want = gradient(&vec![exact; layers])?;
            let got = gradient(&plan)?;
            let size: f64 = want.iter().map(|g| f64::from(*g).powi(2)).sum();
            let off = got.iter().zip(&want).map(|(g, w)| f64::from(g - w).powi(2));
            noise += off.sum::<f64>() / size / BATCHES as f64;
        }
        let kinds: Vec<String> = kinds
            .iter()
            .map(|kind| {
                let bits = learned.bits_of(&plan, *kind);
                format!(
                    "{} {}",
                    kind.name(),
                    bits.map_or("-".into(), |b| format!("{b:.1}"))
                )
            })
            .collect();
        println!(
            "auto at {bits:<8} {noise:.6}  {}, {} recomputed",
            kinds.join(", "),
            learned.recomputed()
        );
    }
    for ((name, _), noise) in cases.iter().zip(noise) {
        let predicted = kinds
            .iter()
            .find(|kind| name == &format!("{} at 2", kind.name()))
            .map(|kind| learned.importance_of(*kind) * layers as f64 / 9.0);
        match predicted {
            Some(predicted) => println!("{name:16} {noise:.6}  predicted {predicted:.6}"),
            None => println!("{name:16} {noise:.6}"),
        }
    }
    Ok(())
}
