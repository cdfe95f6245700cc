//! Losses and gradients of fine-tuning against PyTorch's, in doubles: `golden/tune_steps.json`, made by
//! `platform/benches/torch_block.py` as it says there.

mod common;

use std::path::{Path, PathBuf};

use common::tune::{LORA, fill, prepare, settings};
use leanstream::fetch::{GEMMA3, SMOLLM2};
use leanstream::synth::vocab::{LEAST, Vocab};
use leanstream::synth::{Arch, RopeScaling, Spec};
use leanstream::tune::model::decoder::Batch;
use leanstream::tune::model::params::Scheme;
use leanstream::tune::settings::{Recompute, Settings};
use leanstream::tune::setup;
use leanstream::tune::trainer::Trainer;
use leanstream::tune::watch::Watch;
use leanstream_core::quant::QuantType;
use serde_json::Value;

fn golden(name: &str, train: &str) -> Value {
    let all: Value = serde_json::from_str(include_str!("golden/tune_steps.json")).expect("JSON");
    let cases = all["cases"].as_array().expect("a list");
    let found = cases
        .iter()
        .find(|case| case["name"] == name && case["train"] == train);
    found.expect("the case").clone()
}

fn numbers(value: &Value) -> Vec<f64> {
    let list = value.as_array().expect("a list");
    list.iter().map(|x| x.as_f64().expect("a number")).collect()
}

fn near(what: &str, got: f64, want: f64, relative: f64) {
    assert!(
        (got - want).abs() <= relative * want.abs(),
        "{what}: {got}, not {want}"
    );
}

/// Trains as PyTorch did, and compares every loss, every gradient's norm, and each tensor's first one.
fn check(path: &Path, name: &str, train: &str) {
    let case = golden(name, train);
    let scheme = if train == "lora" { LORA } else { Scheme::Full };
    let mut settings = settings(scheme);
    settings.weight_decay = case["weight_decay"].as_f64().expect("a number") as f32;
    let ids: Vec<u32> = numbers(&case["tokens"])
        .iter()
        .map(|id| *id as u32)
        .collect();
    let tokens = ids.len() - 1;
    let (info, parts, plan) = prepare(path, &settings, tokens, 4 << 30).expect("it fits");
    let mut room = setup::room(&parts, &plan).expect("memory");
    let mut trainer =
        Trainer::new(parts, plan, &mut room, settings, Watch::fixed(4 << 30)).expect("it starts");
    trainer.begin(&info.paths).expect("first values");
    let tensors = trainer.decoder.params.tensors.clone();
    if train == "lora" {
        for tensor in tensors
            .iter()
            .filter(|tensor| tensor.name.ends_with("lora_a"))
        {
            let name = tensor.name.replace(".weight", "");
            let at = tensor.offset..tensor.offset + tensor.rows * tensor.cols;
            fill(&name, 0.03125, &mut trainer.decoder.values[at]);
        }
    }
    let positions: Vec<u32> = (0..tokens as u32).collect();
    let batch = Batch {
        tokens: &ids[..tokens],
        targets: &ids[1..],
        segments: &[(0, tokens)],
        positions: &positions,
    };
    let (losses, norms) = (numbers(&case["losses"]), numbers(&case["grad_norms"]));
    for (step, norm) in norms.iter().enumerate() {
        trainer.decoder.grads.fill(0.0);
        let weight = 1.0 / tokens as f32;
        let (sum, count) = trainer.decoder.step(&batch, weight).expect("a step");
        assert_eq!(count, tokens);
        let what = format!("{name} {train}, step {step}");
        near(
            &format!("{what}: loss"),
            sum / count as f64,
            losses[step],
            2e-4,
        );
        near(&format!("{what}: norm"), trainer.norm(), *norm, 5e-3);
        if step == 0 {
            let firsts = case["first_gradients"].as_object().expect("an object");
            assert!(firsts.len() >= 8, "{firsts:?}");
            for (tensor, want) in firsts {
                let found = tensors.iter().find(|t| t.name == *tensor);
                let found = found.unwrap_or_else(|| panic!("no tensor {tensor}"));
                let at = found.offset..found.offset + found.rows * found.cols;
                let grads = &trainer.decoder.grads[at];
                let got: f64 = grads.iter().map(|g| f64::from(*g).powi(2)).sum();
                near(
                    &format!("{what}: {tensor}"),
                    got.sqrt(),
                    want.as_f64().expect("a number"),
                    2e-3,
                );
            }
        }
        trainer.apply(1e-3, 1.0);
        trainer.step += 1;
    }
    let (sum, count) = trainer.decoder.evaluate(&batch).expect("a pass");
    let last = losses.last().expect("losses");
    near(
        &format!("{name} {train}: last loss"),
        sum / count as f64,
        *last,
        5e-4,
    );
}

#[test]
fn smollm2_is_tuned_as_by_pytorch() {
    if let Some(path) = common::models::model("tune", &SMOLLM2) {
        check(&path, "smollm2", "lora");
    }
}

#[test]
fn gemma3_is_tuned_as_by_pytorch() {
    if let Some(path) = common::models::model("tune", &GEMMA3) {
        check(&path, "gemma3", "lora");
    }
}

/// How alike two directions are.
fn cosine(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let sum = |f: fn(f64, f64) -> f64| -> f64 {
        got.iter()
            .zip(want)
            .map(|(got, want)| f(f64::from(*got), f64::from(*want)))
            .sum()
    };
    sum(|a, b| a * b) / (sum(|a, _| a * a) * sum(|_, b| b * b)).sqrt()
}

/// Every gradient of a whole block of SmolLM2 against PyTorch's in f64, saved or computed again.
#[test]
fn a_block_has_the_gradients_of_pytorch() {
    let Some(path) = common::models::model("tune", &SMOLLM2) else {
        return;
    };
    let index: Value = serde_json::from_str(include_str!("golden/tune_block.json")).expect("JSON");
    let bytes = include_bytes!("golden/tune_block.bin");
    let golden: Vec<f32> = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect();
    let tensor = |name: &str| -> &[f32] {
        let entry = &index["tensors"][name];
        let shape = numbers(&entry["shape"]);
        let at = entry["offset"].as_u64().unwrap_or_else(|| panic!("{name}")) as usize;
        &golden[at..at + (shape[0] * shape[1]) as usize]
    };
    let number = |key: &str| index[key].as_u64().expect("a number") as usize;
    let (layer, tokens) = (number("layer"), number("tokens"));
    for recompute in [Recompute::Never, Recompute::Layers] {
        let settings = Settings {
            recompute,
            ..settings(LORA)
        };
        let (info, parts, plan) = prepare(&path, &settings, tokens, 4 << 30).expect("it fits");
        let mut room = setup::room(&parts, &plan).expect("memory");
        let watch = Watch::fixed(4 << 30);
        let mut trainer = Trainer::new(parts, plan, &mut room, settings, watch).expect("it starts");
        trainer.begin(&info.paths).expect("first values");
        let tensors = trainer.decoder.params.tensors.clone();
        let block = format!("blk.{layer}.");
        let ours = || tensors.iter().filter(|t| t.name.starts_with(&block));
        for tensor in ours() {
            let name = tensor.name.replace(".weight", "");
            let scale = if name.ends_with("_a") { 0.03125 } else { 0.125 };
            let at = tensor.offset..tensor.offset + tensor.rows * tensor.cols;
            fill(&name, scale, &mut trainer.decoder.values[at]);
        }
        let d = info.hyper.d as usize;
        let (mut x, mut dy) = (vec![0.0; tokens * d], vec![0.0; tokens * d]);
        fill("x", 1.0, &mut x);
        fill("dy", 1.0, &mut dy);
        let ids = vec![0; tokens];
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let batch = Batch {
            tokens: &ids,
            targets: &ids,
            segments: &[(0, tokens)],
            positions: &positions,
        };
        let decoder = &mut trainer.decoder;
        decoder.block(layer, &batch, &x, &dy).expect("a block");
        let near = |name: &str, got: &[f32]| {
            let cosine = cosine(got, tensor(name));
            assert!(cosine >= 0.99999, "{name}, {recompute:?}: {cosine}");
        };
        let rows: Vec<f32> = decoder.buffers.x[..tokens * d]
            .chunks_exact(d)
            .step_by(8)
            .flatten()
            .copied()
            .collect();
        // What computes a layer again leaves the stream between its halves.
        if recompute == Recompute::Never {
            near("y_rows", &rows);
        }
        near("dx", &decoder.buffers.dx[..tokens * d]);
        assert_eq!(ours().count(), 14);
        for tensor in ours() {
            let at = tensor.offset..tensor.offset + tensor.rows * tensor.cols;
            near(&tensor.name.replace(".weight", ""), &decoder.grads[at]);
        }
    }
}

fn small(scratch: &common::Scratch, spec: &Spec) -> PathBuf {
    let path = scratch.join("model.gguf");
    spec.write(&Vocab::BuiltIn, &path).expect("a model");
    path
}

fn spec(arch: Arch, seed: u64) -> Spec {
    Spec {
        d: 64,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab: LEAST,
        ctx: 8192,
        window: 512,
        down_ty: QuantType::F32,
        embed_ty: QuantType::F32,
        ..Spec::small(arch, QuantType::F32, seed)
    }
}

#[test]
fn arcee_is_trained_as_by_pytorch() {
    let scratch = common::Scratch::new("tune-arcee");
    let path = small(
        &scratch,
        &Spec {
            layers: 2,
            ff: 160,
            ..spec(Arch::Arcee, 11)
        },
    );
    check(&path, "synth-arcee", "lora");
    check(&path, "synth-arcee", "full");
}

#[test]
fn gemma3_with_windows_is_trained_as_by_pytorch() {
    let scratch = common::Scratch::new("tune-gemma3");
    let path = small(
        &scratch,
        &Spec {
            layers: 7,
            ff: 96,
            kv_heads: 1,
            head_dim: 32,
            window: 16,
            ..spec(Arch::Gemma3, 12)
        },
    );
    check(&path, "synth-gemma3", "lora");
    check(&path, "synth-gemma3", "full");
}

#[test]
fn llama_with_biases_and_rope_factors_is_trained_as_by_pytorch() {
    let scratch = common::Scratch::new("tune-llama");
    let path = small(
        &scratch,
        &Spec {
            layers: 2,
            ff: 96,
            heads: 6,
            head_dim: 16,
            bias: true,
            rope_scaling: Some(RopeScaling::Llama3 {
                factor: 8.0,
                original_ctx: 8192,
            }),
            ..spec(Arch::Llama, 13)
        },
    );
    check(&path, "synth-llama", "lora");
    check(&path, "synth-llama", "full");
}
