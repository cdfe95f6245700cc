//! `run --json` and `--json-stream`.

use crate::common::Scratch;
use crate::common::cli::{GREEDY, assert_keys, small, with};
use serde_json::Value;

#[test]
fn the_summary_is_one_json_object() {
    let scratch = Scratch::new("json");
    let model = small(scratch.join("m.gguf"));
    let ran = with("run", &model, &format!("{GREEDY} --json --seed 77"));
    let summary = ran.json();
    assert_keys(
        &summary,
        &[
            "text",
            "tokens",
            "prompt_tokens",
            "stop",
            "prompt_ms",
            "decode_ms",
            "tokens_per_s",
            "budget_bytes",
            "peak_rss_bytes",
            "bytes_read",
            "bytes_read_per_token",
            "hit_rate",
            "stall_ms",
            "overlap",
            "io_mode",
            "device",
            "threads",
            "seed",
            "model",
            "allocations",
        ],
    );
    assert_eq!(summary["tokens"].as_array().map(Vec::len), Some(12));
    assert_eq!(summary["stop"], "length");
    assert_eq!(summary["seed"], 77);
    assert_eq!(summary["budget_bytes"], 64 << 20);
    assert_eq!(summary["allocations"], 0);
    assert!(
        summary["device"]
            .as_str()
            .is_some_and(|d| d.starts_with("cpu:"))
    );
    assert!(summary["peak_rss_bytes"].as_u64().unwrap() <= 64 << 20);
    // The context ends it where -n doesn't.
    let full = with(
        "run",
        &model,
        "-p the -n -1 -c 20 --ignore-eos --temp 0 --json",
    )
    .json();
    assert_eq!(full["stop"], "context");
    let tokens = full["tokens"].as_array().unwrap().len() as u64;
    // The last one needs no place in the cache.
    assert_eq!(full["prompt_tokens"].as_u64().unwrap() + tokens, 21);
    let none = with("run", &model, "-p the -n 0 --json").json();
    assert_eq!(none["tokens"], Value::Array(Vec::new()));
}

#[test]
fn a_stream_of_json_has_the_same_text() {
    let scratch = Scratch::new("stream");
    let model = small(scratch.join("m.gguf"));
    let mut ends_within = 0;
    for seed in 0..12 {
        // A hot random model says random bytes, many of them parts of characters.
        let args = format!("-p the -n 40 --temp 5 --top-k 0 --top-p 1 --min-p 0 -s {seed}");
        let ran = with("run", &model, &format!("{args} --json-stream"));
        assert_eq!(ran.code, 0, "{ran:?}");
        let lines: Vec<Value> = ran
            .text()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
            .collect();
        let (summary, parts) = lines.split_last().expect("a summary");
        assert_eq!(summary["done"], true);
        let texts: String = parts.iter().map(|p| p["text"].as_str().unwrap()).collect();
        assert_eq!(summary["text"], texts.as_str());
        let (ends, parts): (Vec<&Value>, Vec<&Value>) =
            parts.iter().partition(|part| part["token"].is_null());
        ends_within += ends.len();
        let tokens: Vec<Value> = parts.iter().map(|part| part["token"].clone()).collect();
        assert_eq!(summary["tokens"], Value::Array(tokens));
        assert_eq!(summary["allocations"], 0);
        // Raw text has the bytes themselves.
        let raw = with("run", &model, &args);
        assert_eq!(raw.text(), texts);
    }
    assert!(ends_within > 0, "no text ended within a character");
}
