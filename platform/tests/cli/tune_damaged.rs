//! `tune` of models whose weights aren't all numbers: no step is taken, and the tensor is named.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::common::Scratch;
use crate::common::cli::with;
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use serde_json::Value;

const NAN: f32 = f32::NAN;
const INF: f32 = f32::INFINITY;

/// Where each tensor of a file begins, and its bytes.
fn places(model: &Path) -> Vec<(String, u64, u64)> {
    let told = with("inspect", model, "--json --budget 64M").json();
    let tensors = told["tensors"].as_array().expect("tensors");
    let number = |tensor: &Value, key: &str| tensor[key].as_u64().expect("a number");
    tensors
        .iter()
        .map(|tensor| {
            let name = tensor["name"].as_str().expect("a name").to_owned();
            (name, number(tensor, "offset"), number(tensor, "bytes"))
        })
        .collect()
}

/// Calls `check` with the model as it is after `bytes` were written at each of `places` in it; then it is as before.
fn patched(model: &Path, places: &[u64], bytes: &[u8], check: impl FnOnce()) {
    let file = File::options().read(true).write(true).open(model);
    let file = file.expect("the model");
    let mut before = vec![0; bytes.len()];
    file.read_exact_at(&mut before, places[0]).expect("bytes");
    let kept: Vec<Vec<u8>> = places
        .iter()
        .map(|at| {
            let mut kept = before.clone();
            file.read_exact_at(&mut kept, *at).expect("bytes");
            file.write_all_at(bytes, *at).expect("bytes");
            kept
        })
        .collect();
    check();
    for (at, kept) in places.iter().zip(kept) {
        file.write_all_at(&kept, *at).expect("bytes");
    }
}

/// One weight that is NaN or infinite, in every matrix of a layer, the head, or the embedding: in LoRA it comes out
/// when numbers aren't finite any more, whichever way they are saved, and all of a model is looked at when all
/// is trained.
#[test]
fn a_weight_that_is_no_number_is_named() {
    let scratch = Scratch::new("tune-nan");
    let data = scratch.join("data.txt");
    fs::write(&data, "the cat sat on the mat; ".repeat(20)).expect("a file");
    let out = scratch.join("a.gguf");
    for (arch, ty) in [
        (Arch::Llama, QuantType::F32),
        (Arch::Llama, QuantType::Q4_0),
        (Arch::Gemma3, QuantType::F32),
        (Arch::Arcee, QuantType::F32),
        (Arch::Arcee, QuantType::Q8_0),
    ] {
        let name = format!("{}-{ty}.gguf", arch.name());
        let model = scratch.join(&name);
        Spec::small(arch, ty, 12)
            .write(&Vocab::BuiltIn, &model)
            .expect("a model");
        let refuses = |tensor: &str, more: &str, what: &str| {
            let args = format!(
                "--data {} -o {} --seq 48 --steps 2 --budget 200M --checkpoint-every 1 {more}",
                data.display(),
                out.display()
            );
            let ran = with("tune", &model, &args);
            let what = format!("{name}: {tensor} {what} {more}");
            assert_eq!(ran.code, 3, "{what}: {ran:?}");
            let stderr = ran.failed(3);
            for word in [&name, tensor, "damaged"] {
                assert!(stderr.contains(word), "{word}: {what}: {stderr}");
            }
            assert!(!out.exists() && !scratch.join("a.gguf.ckpt").exists());
        };
        for (tensor, offset, bytes) in places(&model) {
            let (layer, head) = (tensor.contains("blk.1."), tensor.starts_with("output."));
            let embedding = tensor == "token_embd.weight";
            let norm = tensor.contains("norm");
            if !(layer || head || embedding) {
                continue;
            }
            for bad in [NAN, INF] {
                let value = match ty {
                    _ if norm => bad.to_le_bytes().to_vec(),
                    QuantType::F32 => bad.to_le_bytes().to_vec(),
                    _ => half::f16::from_f32(bad).to_bits().to_le_bytes().to_vec(),
                };
                let block = ty.block_bytes() as u64;
                let row = ty.row_bytes(256).expect("whole blocks") as u64;
                // Only rows that the text needs are looked up in an embedding; a head has use for all.
                let places: Vec<u64> = match embedding {
                    true => (0..bytes / row).map(|i| offset + i * row).collect(),
                    false if norm => vec![offset + 4 * 5],
                    false => vec![offset + 7 * block],
                };
                if embedding && arch == Arch::Llama {
                    // A row that the text has no use for would be written to the new model untouched.
                    patched(&model, &places[places.len() - 1..], &value, || {
                        refuses(&tensor, "--full", &bad.to_string());
                    });
                }
                patched(&model, &places, &value, || {
                    let what = bad.to_string();
                    refuses(&tensor, "", &what);
                    if norm {
                        return;
                    }
                    refuses(&tensor, "--act-bits f32 --recompute never", &what);
                    if tensor.contains("ffn_up") {
                        refuses(&tensor, "--full", &what);
                        refuses(&tensor, "--recompute layers", &what);
                        refuses(&tensor, &format!("--eval {}", data.display()), &what);
                    }
                });
            }
        }
    }
}

/// A learning rate can do the same with sound weights: then no file is blamed, and what was learned before stays.
#[test]
fn training_that_goes_too_far_is_no_fault_of_the_file() {
    let scratch = Scratch::new("tune-far");
    let (model, data) = (scratch.join("m.gguf"), scratch.join("data.txt"));
    Spec::small(Arch::Llama, QuantType::Q8_0, 12)
        .write(&Vocab::BuiltIn, &model)
        .expect("a model");
    fs::write(&data, "the cat sat on the mat; ".repeat(20)).expect("a file");
    let args = format!(
        "--data {} -o {} --seq 48 --steps 50 --budget 200M --lr 1e30 --warmup 0",
        data.display(),
        scratch.join("a.gguf").display()
    );
    let ran = with("tune", &model, &args);
    let stderr = ran.failed(1);
    assert!(
        stderr.contains("--lr") && stderr.contains("all weights in the file are finite"),
        "{stderr}"
    );
    assert_eq!(scratch.names(), ["a.gguf.ckpt", "data.txt", "m.gguf"]);
}
