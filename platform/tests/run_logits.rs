//! What a session computes for small models of every format and architecture, against the slow
//! reference and against llama.cpp.

mod common;

use std::path::PathBuf;

use common::cases::{self, Case, POSITIONS};
use common::reference::Reference;
use common::{Scratch, golden, relative_l2, run};
use leanstream::cpu::Kernels;
use leanstream::run::session::Options;
use leanstream::synth::vocab::Vocab;

fn model(scratch: &Scratch, case: &Case) -> PathBuf {
    let path = scratch.join(format!("{}.gguf", case.name));
    let made = case.spec.write(&Vocab::BuiltIn, &path);
    made.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    path
}

fn logits(case: &Case, path: &std::path::Path, options: &Options) -> Vec<f64> {
    let logits = run::logits(path, options, &case.tokens, POSITIONS);
    let logits = logits.unwrap_or_else(|e| panic!("{}: {e}", case.name));
    logits.concat().into_iter().map(f64::from).collect()
}

fn reference(case: &Case, path: &std::path::Path) -> Vec<f64> {
    let file = std::fs::read(path).expect("what was just written");
    let all = Reference::new(&file)
        .with_halves_cached()
        .logits(&case.tokens);
    all[all.len() - POSITIONS..].concat()
}

/// What rounding may do to logits with exact activations. Sums in singles make 1e-6; a key or value
/// that lies between two halves and falls to the other side makes up to 6e-5.
const EXACT: f64 = 1e-4;

/// How far logits with 8-bit activations may be from llama.cpp's, which rounds its own.
const LLAMA_CPP: f64 = 2e-2;

#[test]
fn exact_activations_give_the_reference_s_logits() {
    let scratch = Scratch::new("exact");
    for case in cases::all() {
        let path = model(&scratch, &case);
        let want = reference(&case, &path);
        for kernels in Kernels::available() {
            let options = Options {
                exact: true,
                kernels,
                ..run::options(case.tokens.len())
            };
            let off = relative_l2(&logits(&case, &path, &options), &want);
            assert!(
                off < EXACT,
                "{} {:?}: {off:.2e} off",
                case.name,
                kernels.isa()
            );
        }
    }
}

#[test]
fn eight_bit_activations_agree_with_llama_cpp_and_are_as_near_to_exact() {
    let scratch = Scratch::new("int8");
    let goldens = golden::load();
    for case in cases::all() {
        let path = model(&scratch, &case);
        let want = reference(&case, &path);
        let floats = case.spec.ty.block_len() == 1;
        let golden = goldens.iter().find(|g| g.name == case.name);
        let golden = golden.map(|golden| golden.logits.concat());
        // Weights in floating point never meet rounded activations here.
        let most = match &golden {
            Some(golden) if !floats => 1.2 * relative_l2(golden, &want),
            _ => EXACT,
        };
        for kernels in Kernels::available() {
            let options = Options {
                kernels,
                ..run::options(case.tokens.len())
            };
            let got = logits(&case, &path, &options);
            let isa = kernels.isa();
            if let Some(golden) = &golden {
                let off = relative_l2(&got, golden);
                assert!(
                    off < LLAMA_CPP,
                    "{} {isa:?}: {off:.2e} off llama.cpp's",
                    case.name
                );
            }
            let off = relative_l2(&got, &want);
            assert!(
                off < most,
                "{} {isa:?}: {off:.2e} off, expected {most:.2e}",
                case.name
            );
        }
    }
}

#[test]
fn neither_budget_nor_threads_nor_batches_change_a_bit() {
    let scratch = Scratch::new("bits");
    let names = [
        "llama-Q4_0",
        "llama-mixed",
        "gemma3-Q8_0",
        "gemma3-long",
        "arcee-F32",
    ];
    for case in cases::all()
        .into_iter()
        .filter(|case| names.contains(&case.name.as_str()))
    {
        let path = model(&scratch, &case);
        let plenty = run::options(case.tokens.len());
        let want = logits(&case, &path, &plenty);
        let tight = Options {
            batch: Some(1),
            ..plenty.clone()
        };
        let tight = Options {
            budget: run::least_budget(&path, &tight),
            ..tight
        };
        let variants = [
            ("least budget, one token at a time", tight.clone()),
            (
                "two threads",
                Options {
                    threads: 2,
                    ..plenty.clone()
                },
            ),
            (
                "batches of five",
                Options {
                    batch: Some(5),
                    ..plenty.clone()
                },
            ),
        ];
        for (what, options) in variants {
            assert_eq!(
                logits(&case, &path, &options),
                want,
                "{}: {what}",
                case.name
            );
        }
    }
}
