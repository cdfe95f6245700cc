//! `bench --trace`: a model with random weights under the sets of a trace.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::Scratch;
use crate::common::cli::{assert_keys, finish, program, with};
use leanstream::synth::Spec;
use leanstream::synth::vocab::Vocab;
use leanstream::trace::{Meta, Recorder};
use serde_json::Value;

/// Units a layer of the trace, and its tokens: the second half has the 33 and 4 that a test takes.
const UNITS: u32 = 128;
const TOKENS: u32 = 80;

/// A pack of the tiny shape, whose layers have nine times as many units as the trace's.
fn packed(scratch: &Scratch) -> PathBuf {
    let (from, to) = (scratch.join("m.gguf"), scratch.join("m.lean"));
    let spec = Spec::named("tiny-relu", 5).expect("a shape");
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let mut command = program(["pack"]);
    command.arg(&from).arg(&to).args(["--calibrate", "none"]);
    let ran = finish(command.spawn().expect("the program starts"));
    assert_eq!(ran.code, 0, "{ran:?}");
    to
}

/// A trace of two layers in which every fifth neuron is used, others in each token.
fn trace(path: PathBuf, units: u32) -> PathBuf {
    let meta = Meta {
        layers: 2,
        units,
        unit_bytes: 100,
        source_sha256: [0; 32],
        name: "recorded",
        scores: true,
        ranks: false,
    };
    let mut recorder = Recorder::begin(&path, &meta).expect("a trace");
    for token in 0..TOKENS {
        recorder.token(u64::from(token));
        for layer in 0..2 {
            let used = |unit: &u32| (unit * 7 + token + layer).is_multiple_of(5);
            let used: Vec<u16> = (0..units).filter(used).map(|unit| unit as u16).collect();
            recorder.stage(layer, 1, &used);
            let gate = vec![1.0; units as usize];
            recorder.layer(layer, &gate, &used, &vec![1.0; used.len()]);
        }
    }
    recorder.finish().expect("a trace");
    path
}

fn args(trace: &Path, more: &str) -> String {
    format!("-n 4 -r 2 -t 1 --trace {} {more}", trace.display())
}

#[test]
fn every_output_says_that_the_sets_come_from_a_trace() {
    let scratch = Scratch::new("bench-trace");
    let model = packed(&scratch);
    let trace = trace(scratch.join("t.trace"), UNITS);
    let svg = scratch.join("out.svg");
    let more = format!(
        "--budget ffn:20%,ffn:50% --policy refine,static --plot {}",
        svg.display()
    );
    let ran = with("bench", &model, &args(&trace, &(more + " -o jsonl")));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stderr.contains("meaningless"), "{}", ran.stderr);
    assert!(
        fs::read_to_string(&svg)
            .unwrap()
            .contains("sets of a trace")
    );
    let rows: Vec<Value> = ran
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(rows.len(), 4);
    for row in &rows {
        assert_keys(&row["trace"], &["file", "name", "bytes"]);
        let label = &row["trace"];
        assert_eq!(
            (&label["copies"], &label["tokens"], &label["name"]),
            (&9.into(), &40.into(), &"recorded".into())
        );
        assert!(label["note"].as_str().unwrap().contains("meaningless"));
        assert_eq!(
            (&row["allocations"], &row["test"]),
            (&0.into(), &"tg4".into())
        );
        assert!(row["miss_ratio"].as_f64().unwrap() > 0.0, "{row}");
        let number = |key: &str| row[key].as_f64().unwrap();
        assert!(number("peak_rss_bytes") <= number("budget_bytes"));
    }
    let ran = with("bench", &model, &args(&trace, "--budget 1M,64M --keep 50%"));
    assert_eq!(ran.code, 4, "{ran:?}");
    assert_eq!(ran.text().matches("sets of a trace").count(), 2, "{ran:?}");
    // Without the option nothing says so.
    let ran = with("bench", &model, "-p 0 -n 2 -r 1 -o jsonl");
    assert_eq!(ran.json().get("trace"), None);
    assert!(!ran.stderr.contains("trace"), "{}", ran.stderr);
}

#[test]
fn what_makes_no_sense_with_a_trace_is_told_before_anything_runs() {
    let scratch = Scratch::new("bench-trace-usage");
    let model = packed(&scratch);
    let fits = trace(scratch.join("t.trace"), UNITS);
    let other = trace(scratch.join("o.trace"), 100);
    let text = scratch.join("text");
    fs::write(&text, "The cat sat on the mat.").unwrap();
    for (ran, why) in [
        (with("bench", &model, &args(&other, "")), "1152"),
        (with("bench", &model, &args(&fits, "-p 8")), "leave out -p"),
        (
            with(
                "bench",
                &model,
                &args(&fits, &format!("--text {}", text.display())),
            ),
            "meaningless",
        ),
        (
            with(
                "bench",
                &model,
                &args(&fits, &format!("--perplexity {}", text.display())),
            ),
            "meaningless",
        ),
        (
            with(
                "bench",
                &model,
                &format!("-n 4,8 --trace {}", fits.display()),
            ),
            "-n 8",
        ),
        (
            with("bench", &scratch.join("m.gguf"), &args(&fits, "")),
            "leanstream pack",
        ),
    ] {
        assert!(ran.failed(2).contains(why), "{why}: {}", ran.stderr);
    }
    let missing = scratch.join("missing");
    let ran = with("bench", &model, &args(&missing, ""));
    assert!(ran.failed(5).contains("missing"), "{}", ran.stderr);
    let ran = with("bench", &model, &args(&text, ""));
    assert!(ran.failed(3).contains("text"), "{}", ran.stderr);
}
