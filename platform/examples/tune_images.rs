//! Trains a classifier of images with its saved activations in few bits. See `--help`.
//!
//! ```text
//! tune_images --net resnet8 --data fashion --act-bits auto --epochs 2 --seed 1 --json
//! ```
//!
//! Sets: `digits` (1,797 of 8 x 8) comes with scikit-learn, which `pip` brings; `fashion` (Fashion-MNIST, 70,000
//! of 28 x 28) is fetched by `platform/benches/datasets.py images`; a folder has files in the same format as
//! Fashion-MNIST's.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use argh::FromArgs;
use leanstream::budget::{Resident, parse_size};
use leanstream::cpu::vector::Vector;
use leanstream::error::Error;
use leanstream::fetch::{self, Published};
use leanstream::tune::act::Room;
use leanstream::tune::images::classifier::Classifier;
use leanstream::tune::images::data::Images;
use leanstream::tune::images::net::Net;
use leanstream::tune::images::trainer::{Plan, Settings, Trainer};
use leanstream::tune::optim::{Decay, Schedule};
use leanstream_core::act::Width;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// scikit-learn's digits (from the UCI repository, CC BY 4.0), 58 kB packed.
const DIGITS: Published = Published {
    file: "digits.csv.gz",
    packages: &["scikit-learn==1.7.2"],
    member: "digits.csv.gz",
    sha256: "09f66e6debdee2cd2b5ae59e0d6abbb73fc2b0e0185d2e1957e9ebb51e23aa22",
};

/// Of the digits, those that are trained on; the others are by other writers.
const DIGITS_TRAIN: usize = 1200;

/// Files of a set as MNIST has them: to train on, then to test with; images, then labels.
const FILES: [&str; 4] = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
];

/// SHA-256 of Fashion-MNIST's, in the same order.
const FASHION: [&str; 4] = [
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
];

/// Share of what f32 would save, each operation for itself, that `--act-bits auto` takes without `--budget`.
const AUTO_SHARE: f64 = 1.0 / 12.2;

/// Train a classifier of images, its activations saved in few bits, and test it.
#[derive(FromArgs)]
struct Args {
    /// resnet8, resnet20, cnn or mlp (default resnet8)
    #[argh(option, default = "\"resnet8\".into()")]
    net: String,
    /// digits, fashion, or a folder of files as MNIST's (default digits)
    #[argh(option, default = "\"digits\".into()")]
    data: String,
    /// auto, f32, bf16, 8, 4, 2 or 1 bits for what is saved (default auto)
    #[argh(option, default = "\"auto\".into()")]
    act_bits: String,
    /// bytes for what is saved, such as 3M (default: for auto a little less than a twelfth of what each operation for itself
    /// would save as f32, else what it takes)
    #[argh(option)]
    budget: Option<String>,
    /// times over the images (default 2)
    #[argh(option, default = "2")]
    epochs: u64,
    /// images of a step (default 64)
    #[argh(option, default = "64")]
    batch: usize,
    /// the highest learning rate (default 0.003)
    #[argh(option, default = "3e-3")]
    lr: f32,
    /// other seed, other first weights, order and rounding (default 1)
    #[argh(option, default = "1")]
    seed: u64,
    /// threads (default: as many as the machine has)
    #[argh(option)]
    threads: Option<usize>,
    /// print one JSON object on the last line
    #[argh(switch)]
    json: bool,
}

fn main() -> ExitCode {
    match run(&argh::from_env()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tune_images: {error}");
            ExitCode::from(error.exit_code() as u8)
        }
    }
}

fn run(args: &Args) -> Result<(), Error> {
    let [train, mut test] = sets(&args.data)?;
    test.scale_as(&train);
    let classes = train.classes.max(test.classes);
    let net = Net::named(&args.net, train.shape, classes).ok_or_else(|| {
        Error::Usage(format!(
            "--net {}: there are resnet8, resnet20, cnn and mlp",
            args.net
        ))
    })?;
    let settings = settings(args, &net, train.len())?;
    let (batch, threads) = (settings.batch, settings.threads);
    let vector = Vector::detect();
    let plan = Plan::new(&net, &settings)?;
    let failed = |error| Error::Runtime(format!("cannot get memory for activations: {error}"));
    let mut room = Room::new(plan.capacity).map_err(failed)?;
    let shape = net.clone();
    let mut trainer = Trainer::new(net, vector, plan, &mut room, settings)?;
    let (mut first, mut last, steps) = (None, 0.0, trainer.steps(&train));
    let start = Instant::now();
    for epoch in 0..args.epochs {
        let (mut loss, mut correct) = (0.0, 0);
        for _ in 0..steps {
            let progress = trainer.step(&train)?;
            first.get_or_insert(progress.loss);
            loss += progress.loss / steps as f64;
            correct += progress.correct;
        }
        last = loss;
        eprintln!(
            "epoch {}: loss {loss:.4}, {:.2}% right while training, {:.2} bits an activation",
            epoch + 1,
            100.0 * correct as f64 / (steps as f64 * batch as f64),
            trainer.allotment.mean_bits(&trainer.classifier.widths)
        );
    }
    let seconds = start.elapsed().as_secs_f64();
    let (accuracy, eval_loss) = trainer.evaluate(&test)?;
    let classifier = &trainer.classifier;
    let kept = shape.kept.iter().zip(&classifier.widths);
    let widths: serde_json::Map<String, Value> = kept
        .map(|(kept, width)| (kept.name.clone(), json!(width.to_string())))
        .collect();
    let peak = classifier.peak_bytes();
    let [f32_bytes, eager_bytes] =
        [shape.kept_len(), shape.eager_len()].map(|len| (4 * len * batch) as u64);
    eprintln!(
        "{:.2}% right of {} others; activations at most {peak} bytes: {:.1} times less than f32 at its least, {:.1} \
         times less than each operation for itself",
        100.0 * accuracy,
        test.len(),
        f32_bytes as f64 / peak as f64,
        eager_bytes as f64 / peak as f64
    );
    if args.json {
        let report = json!({
            "net": args.net,
            "data": args.data,
            "act_bits": args.act_bits,
            "seed": args.seed,
            "batch": batch,
            "epochs": args.epochs,
            "steps": trainer.step,
            "loss_first": first,
            "loss_last": last,
            "eval_loss": eval_loss,
            "accuracy": accuracy,
            "act_peak_bytes": peak,
            "act_f32_bytes": f32_bytes,
            "act_eager_bytes": eager_bytes,
            "mean_bits": trainer.allotment.mean_bits(&classifier.widths),
            "widths": widths,
            "work_bytes": Classifier::work_bytes(&shape, batch, threads, vector),
            "trained_bytes": Trainer::trained_bytes(&shape, batch),
            "data_bytes": train.bytes() + test.bytes(),
            "peak_rss_bytes": Resident::peak(),
            "s_per_step": seconds / trainer.step.max(1) as f64,
        });
        println!("{report}");
    }
    Ok(())
}

fn settings(args: &Args, net: &Net, images: usize) -> Result<Settings, Error> {
    let act = match args.act_bits.as_str() {
        "auto" => None,
        name => {
            let width = Width::ALL
                .into_iter()
                .find(|width| width.to_string() == name);
            Some(width.ok_or_else(|| {
                Error::Usage(format!(
                    "--act-bits {name}: there are auto, f32, bf16, 8, 4, 2 and 1"
                ))
            })?)
        }
    };
    if args.batch == 0 || args.batch > images {
        return Err(Error::Usage(format!(
            "--batch {}: from 1 to the {images} images there are",
            args.batch
        )));
    }
    let eager_bytes = 4 * net.eager_len() * args.batch;
    let budget = match &args.budget {
        Some(text) => Some(
            parse_size(text, None).map_err(|error| Error::Usage(format!("--budget: {error}")))?,
        ),
        None => act
            .is_none()
            .then_some((eager_bytes as f64 * AUTO_SHARE) as u64),
    };
    let steps = args.epochs * (images / args.batch) as u64;
    let schedule = Schedule {
        peak: args.lr,
        warmup: steps / 20,
        steps,
        decay: Decay::Cosine,
        floor: 0.0,
    };
    let threads = args
        .threads
        .unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    Ok(Settings {
        batch: args.batch,
        act,
        budget,
        schedule: schedule
            .checked()
            .map_err(|error| Error::Usage(format!("--lr: {error}")))?,
        weight_decay: 0.05,
        threads: threads.max(1),
        seed: args.seed,
    })
}

/// Images to train on, and to test with.
fn sets(name: &str) -> Result<[Images; 2], Error> {
    if name == "digits" {
        let path = DIGITS.get(&|what| eprintln!("{what}"))?;
        let packed = read(&path)?;
        let mut text = String::new();
        flate2::read::GzDecoder::new(&packed[..])
            .read_to_string(&mut text)
            .map_err(|error| Error::io(&path, "unpack it", error))?;
        let set = Images::table(&text).and_then(|set| set.split(DIGITS_TRAIN));
        return set.map_err(|error| Error::model(&path, error));
    }
    let known = name == "fashion";
    let dir = match fetch::cache_dir() {
        Some(cache) if known => cache.join("images"),
        _ => PathBuf::from(name),
    };
    if !FILES.iter().all(|file| dir.join(file).is_file()) {
        return Err(Error::Usage(format!(
            "--data {name}: {} hasn't the four files of a set ({}, ...); 'platform/benches/datasets.py images {0}' \
             fetches Fashion-MNIST",
            dir.display(),
            FILES[0]
        )));
    }
    let mut parts = Vec::new();
    for (file, sha256) in FILES.iter().zip(FASHION) {
        let path = dir.join(file);
        let bytes = read(&path)?;
        let found = fetch::hex(Sha256::new_with_prefix(&bytes));
        if known && found != sha256 {
            return Err(Error::Runtime(format!(
                "{}: has SHA-256 {found}, not {sha256}: delete it and fetch it again",
                path.display()
            )));
        }
        parts.push(bytes);
    }
    let set = |images: usize| {
        Images::idx(&parts[images], &parts[images + 1])
            .map_err(|error| Error::model(&dir.join(FILES[images]), error))
    };
    Ok([set(0)?, set(2)?])
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    fs::read(path).map_err(|error| Error::io(path, "read it", error))
}
