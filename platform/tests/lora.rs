//! Adapters at run time: what they compute, that streaming doesn't show, and what is refused.

mod common;

use std::path::{Path, PathBuf};

use common::adapters::{self, all, attention, make, merged};
use common::cli::{Ran, assert_keys, with};
use common::{Scratch, run};
use leanstream::run::lora::{Lora, Use};
use leanstream::run::model;
use leanstream::run::session::{Memory, Options, Session};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;

const TEXT: &str = "the-rain-in-spain-falls-mainly-on-the-plain,and-the-water-of-the-river-is-cold;\
    what-was-said-in-the-morning-is-forgotten-by-the-evening";

fn made(scratch: &Scratch, spec: &Spec) -> PathBuf {
    let path = scratch.join("m.gguf");
    spec.write(&Vocab::BuiltIn, &path).expect("a model");
    path
}

/// Arguments that name adapters.
fn loras(adapters: &[(&Path, f64)]) -> String {
    let each = adapters
        .iter()
        .map(|(path, scale)| format!(" --lora {}:{scale}", path.display()));
    each.collect()
}

/// The mean negative log-likelihood of the text.
fn nll(model: &Path, args: &str) -> f64 {
    let args = format!("-p {TEXT} -c 32 --json {args}");
    with("perplexity", model, &args).json()["perplexity"]
        .as_f64()
        .expect("a number")
        .ln()
}

/// Every architecture and format, prompts and single tokens: an adapter beside the weights is the merged
/// model, within the rounding of sums. Halves of activations aside: both compute with singles.
#[test]
fn an_adapter_beside_the_weights_is_the_merged_model() {
    let scratch = Scratch::new("lora-merged");
    for (arch, ty, tied) in [
        (Arch::Llama, QuantType::Q4_0, false),
        (Arch::Gemma3, QuantType::F32, true),
        (Arch::Arcee, QuantType::Q8_0, false),
    ] {
        let spec = Spec {
            bias: arch == Arch::Llama,
            tied,
            softcap: (arch == Arch::Gemma3).then_some(20.0),
            ..Spec::small(arch, ty, 3)
        };
        let model = made(&scratch, &spec);
        let (one, two) = (scratch.join("one.gguf"), scratch.join("two.gguf"));
        let both = |name: &str| all(name) || name == "output.weight";
        make(&model, both, 5, &one);
        make(&model, attention, 6, &two);
        let whole = scratch.join("whole.gguf");
        let given: [(&Path, f64); 2] = [(&one, 0.75), (&two, -0.5)];
        merged(&model, &given, &whole);
        for way in ["", "--token-by-token"] {
            let way = format!("--exact-activations {way}");
            let want = nll(&whole, &way);
            let got = nll(&model, &format!("{way}{}", loras(&given)));
            let bare = nll(&model, &way);
            let off = (got / want - 1.0).abs();
            assert!(off < 1e-5, "{arch:?} {way}: {got} for {want}");
            // It says something only where the adapters do something.
            assert!((bare / want - 1.0).abs() > 1e-3, "{bare} {want}");
            // A scale of 0 is no adapter.
            let none = nll(&model, &format!("{way}{}", loras(&[(&one, 0.0)])));
            assert!((none / bare - 1.0).abs() < 1e-9, "{none} {bare}");
        }
    }
}

const TOKENS: [u32; 14] = [3, 17, 90, 4, 200, 33, 61, 7, 120, 9, 250, 41, 77, 5];

fn logits(path: &Path, uses: &[Use], options: &Options) -> Vec<Vec<f32>> {
    let (info, mut weights) = model::load(path).expect("a model");
    weights.lora = Some(Lora::load(uses, &info, &weights).expect("adapters"));
    let mut memory = Memory::new(&info, &mut weights, options, 0).expect("a plan");
    let mut session = Session::start(&info, weights, &mut memory, options).expect("a session");
    let (prompt, decoded) = TOKENS.split_at(9);
    let mut out = vec![session.prompt(prompt, true).expect("a pass").to_vec()];
    for token in decoded {
        out.push(session.decode(*token, true).expect("a pass").to_vec());
    }
    out
}

#[test]
fn no_budget_batch_or_thread_count_changes_a_bit() {
    let scratch = Scratch::new("lora-bits");
    let spec = Spec {
        d: 512,
        ff: 2048,
        layers: 4,
        ..Spec::small(Arch::Llama, QuantType::Q4_0, 4)
    };
    let model = made(&scratch, &spec);
    let adapter = scratch.join("a.gguf");
    make(&model, all, 7, &adapter);
    let uses = [Use {
        path: adapter,
        scale: 1.0,
    }];
    let plenty = run::options(TOKENS.len());
    let want = logits(&model, &uses, &plenty);
    let least = run::least_budget(
        &model,
        &Options {
            batch: Some(1),
            ..plenty.clone()
        },
    );
    for budget in [least + (2 << 20), least + (4 << 20), 1 << 30] {
        for (threads, batch) in [(1, None), (2, Some(4)), (3, Some(1))] {
            let options = Options {
                budget: budget + u64::from(threads) * (1 << 20),
                threads,
                batch,
                ..plenty.clone()
            };
            let got = logits(&model, &uses, &options);
            assert!(got == want, "{budget} {threads} {batch:?}: other bits");
        }
    }
}

/// What an adapter takes is counted: the least budget that is named holds it, and nothing is
/// allocated between tokens.
#[test]
fn adapters_are_in_the_budget() {
    let scratch = Scratch::new("lora-budget");
    let model = common::cli::larger(scratch.join("m.gguf"));
    let adapter = scratch.join("a.gguf");
    make(&model, all, 8, &adapter);
    let bytes = std::fs::metadata(&adapter).expect("a file").len();
    assert!(bytes > 500_000, "{bytes}");
    let run = |budget: &str, args: &str| -> Ran {
        let args = format!("-p the -n 8 --temp 0 --ignore-eos --json --budget {budget} {args}");
        with("run", &model, &args)
    };
    let least = |args: &str| -> u64 {
        let ran = run("1M", args);
        let (_, rest) = ran.failed(4).split_once("(--budget ").expect("a proposal");
        rest.split_once("M)")
            .expect("its end")
            .0
            .parse()
            .expect("a number")
    };
    let lora = loras(&[(&adapter, 1.0)]);
    assert!(run("1M", &lora).failed(4).contains("adapters"));
    let (bare, more) = (least(""), least(&lora));
    assert!(more > bare, "{more} {bare}");
    let summary = run(&format!("{more}M"), &lora).json();
    assert!(
        summary["peak_rss_bytes"].as_u64() <= summary["budget_bytes"].as_u64(),
        "{summary}"
    );
    assert_eq!(summary["allocations"], 0);
    let plenty = run("100M", &lora).json();
    assert_eq!(plenty["tokens"], summary["tokens"]);
    assert_ne!(run("100M", "").json()["tokens"], summary["tokens"]);
}

#[test]
fn bench_and_inspect_take_adapters() {
    let scratch = Scratch::new("lora-bench");
    let model = made(&scratch, &Spec::small(Arch::Llama, QuantType::Q4_0, 9));
    let adapter = scratch.join("a:1.gguf");
    make(&model, all, 8, &adapter);
    let lora = format!("--lora {}", adapter.display());
    let ran = with(
        "bench",
        &model,
        &format!("--budget 64M,32M -p 4 -n 2 -r 1 -o jsonl {lora}"),
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(ran.text().lines().count() >= 4, "{}", ran.text());
    let ran = with("inspect", &model, &format!("--json --budget 64M {lora}"));
    assert_keys(&ran.json(), &["plans"]);
}

#[test]
fn an_adapter_that_does_not_fit_is_refused() {
    let scratch = Scratch::new("lora-refused");
    let spec = Spec::small(Arch::Llama, QuantType::Q4_0, 9);
    let model = made(&scratch, &spec);
    let other = scratch.join("other.gguf");
    let wider = Spec {
        ff: 1024,
        ..spec.clone()
    };
    wider.write(&Vocab::BuiltIn, &other).expect("a model");
    let gemma = scratch.join("gemma.gguf");
    Spec::small(Arch::Gemma3, QuantType::Q4_0, 9)
        .write(&Vocab::BuiltIn, &gemma)
        .expect("a model");
    let deeper = scratch.join("deeper.gguf");
    let deep = Spec { layers: 3, ..spec };
    deep.write(&Vocab::BuiltIn, &deeper).expect("a model");
    for (source, code, want) in [
        (&other, 3, "blk.0.ffn_down.weight is for 256 rows of 1024"),
        (&gemma, 3, "for models of architecture gemma3"),
        (&deeper, 3, "blk.2.attn_k.weight is for a matrix that"),
    ] {
        let adapter = scratch.join("a.gguf");
        make(source, all, 8, &adapter);
        let ran = with(
            "run",
            &model,
            &format!("-p the --lora {}", adapter.display()),
        );
        let told = ran.failed(code);
        assert!(told.contains("a.gguf") && told.contains(want), "{told}");
    }
    let ran = with("run", &model, &format!("-p the --lora {}", model.display()));
    assert!(ran.failed(3).contains("it is no adapter"));
    with("run", &model, "-p the --lora missing.gguf").failed(5);
}

/// A pack takes adapters of attention, and gives what the model that was packed gives; those of packed
/// neurons it refuses.
#[test]
fn packs_take_adapters_of_attention() {
    let scratch = Scratch::new("lora-pack");
    let spec = Spec {
        activation: Some("relu"),
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 9)
    };
    let model = made(&scratch, &spec);
    let pack = scratch.join("m.lean");
    let ran = common::cli::run(
        ["pack", "--calibrate", "none"]
            .map(std::ffi::OsStr::new)
            .into_iter()
            .chain([model.as_os_str(), pack.as_os_str()]),
    );
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let (small, large) = (scratch.join("small.gguf"), scratch.join("large.gguf"));
    make(&model, attention, 8, &small);
    make(&model, all, 8, &large);
    let lora = loras(&[(&small, 1.0)]);
    for way in [
        "--exact-activations",
        "--exact-activations --token-by-token",
    ] {
        let (want, bare) = (nll(&model, &format!("{way}{lora}")), nll(&model, way));
        let packed = nll(&pack, way);
        assert!((packed / bare - 1.0).abs() < 1e-4, "{packed} {bare}");
        for budget in ["16M", "64M"] {
            let got = nll(&pack, &format!("{way}{lora} --budget {budget}"));
            assert!((got / want - 1.0).abs() < 1e-4, "{got} {want}");
            assert!((bare / want - 1.0).abs() > 5e-3, "{bare} {want}");
        }
    }
    let text = |args: &str| {
        let args = format!("-p the -n 12 --temp 0 --ignore-eos --json {args}{lora}");
        with("run", &pack, &args).json()["tokens"].clone()
    };
    assert_eq!(text("--budget 16M"), text("--budget 200M"));
    let ran = with("run", &pack, &format!("-p the {}", loras(&[(&large, 1.0)])));
    // No file is damaged: they don't go together.
    let told = ran.failed(2);
    assert!(
        told.contains("blk.0.ffn_down.weight") && told.contains("leanstream merge"),
        "{told}"
    );
    let head = scratch.join("head.gguf");
    adapters::make(&model, |name| name == "output.weight", 8, &head);
    let args = format!("-p the --temp 0 --head exact {}", loras(&[(&head, 1.0)]));
    assert!(with("run", &pack, &args).failed(2).contains("--head"));
}
