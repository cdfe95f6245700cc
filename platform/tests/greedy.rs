//! The most likely next token along llama.cpp's own greedy texts, position by position.
//!
//! Free-running texts of models this small part by chance: llama.cpp itself, with its f32 values moved
//! by one unit in the last place, repeats only two to six of eight texts of 32 tokens. So each token is
//! taken from llama.cpp's list, and ours is compared there: it may differ only where llama.cpp's two
//! best logits are close. `golden/greedy.json` has lists and margins, made by llama.cpp as shipped
//! in llama-cpp-python 0.3.36 (CPU, flash attention on, f16 cache).

mod common;

use common::run;
use leanstream::fetch::{GEMMA3, Published, SMOLLM2};
use leanstream::run::model;
use leanstream::run::session::{Memory, Session};
use leanstream::text;
use serde_json::Value;

/// llama.cpp moved by one unit in the last place changes margins by 0.2 (root mean square).
const NEAR_TIE: f64 = 0.25;

/// Least share of equal tokens; llama.cpp reaches 97% against itself so moved.
const EQUAL_LEAST: f64 = 0.94;

fn check(test: &str, published: &Published, name: &str) {
    let Some(path) = common::models::model(test, published) else {
        return;
    };
    let all: Value = serde_json::from_str(include_str!("golden/greedy.json")).expect("JSON");
    let (mut equal, mut total) = (0, 0);
    for case in all[name].as_array().expect("a list") {
        let prompt = case["prompt"].as_str().expect("text");
        let (info, mut weights) = model::load(&path).expect("a model");
        let mut tokens = Vec::new();
        let options = text::Options {
            add_special: true,
            parse_special: true,
        };
        info.tokenizer
            .encode(prompt.as_bytes(), options, &mut tokens);
        let golden = case["tokens"].as_array().expect("a list");
        let options = run::options(tokens.len() + golden.len());
        let mut memory = Memory::new(&info, &mut weights, &options, 0).expect("it fits");
        let mut session = Session::start(&info, weights, &mut memory, &options).expect("it starts");
        let mut logits = session.prompt(&tokens, true).expect("a prompt");
        for (position, (want, margin)) in golden
            .iter()
            .zip(case["margins"].as_array().expect("a list"))
            .enumerate()
        {
            let (want, margin) = (
                want.as_u64().expect("an id"),
                margin.as_f64().expect("a number"),
            );
            let best = (0..)
                .zip(logits.iter())
                .max_by(|a, b| a.1.total_cmp(b.1))
                .expect("logits")
                .0;
            total += 1;
            if best == want {
                equal += 1;
            } else {
                assert!(
                    margin < NEAR_TIE,
                    "{prompt:?}: token {position} is {best}, not {want}, by {margin}"
                );
            }
            logits = session
                .decode(want as u32, position + 1 < golden.len())
                .expect("a token");
        }
    }
    let share = f64::from(equal) / f64::from(total);
    eprintln!("{name}: {equal} of {total} equal");
    assert!(
        share >= EQUAL_LEAST,
        "{name}: only {equal} of {total} tokens are llama.cpp's"
    );
}

#[test]
fn smollm2_follows_llama_cpp() {
    check("smollm2_follows_llama_cpp", &SMOLLM2, "smollm2");
}

#[test]
fn gemma3_follows_llama_cpp() {
    check("gemma3_follows_llama_cpp", &GEMMA3, "gemma3");
}
