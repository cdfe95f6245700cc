//! The other commands: bench, inspect, verify, perplexity, tokenize, demo.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;
use std::process::Command;

use crate::common::Scratch;
use crate::common::cli::{assert_keys, finish, program, small, with};
use serde_json::Value;

#[test]
fn bench_prints_a_line_a_test() {
    let scratch = Scratch::new("bench");
    let model = small(scratch.join("m.gguf"));
    let ran = with(
        "bench",
        &model,
        "-p 8 -n 4 -r 2 -o jsonl --budget 32M,48M -c 1",
    );
    assert_eq!(ran.code, 2, "-c is no option of bench");
    let ran = with("bench", &model, "-p 8 -n 4 -r 2 -o jsonl --budget 32M,48M");
    assert_eq!(ran.code, 0, "{ran:?}");
    let lines: Vec<Value> = ran
        .text()
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 4);
    let numbers = |key: &str| -> Vec<u64> {
        lines
            .iter()
            .map(|line| line[key].as_u64().unwrap())
            .collect()
    };
    assert_eq!(numbers("n_prompt"), [8, 0, 8, 0]);
    assert_eq!(numbers("n_gen"), [0, 4, 0, 4]);
    assert_eq!(
        numbers("budget_bytes"),
        [32 << 20, 32 << 20, 48 << 20, 48 << 20]
    );
    for line in &lines {
        assert_keys(
            line,
            &[
                "build_commit",
                "build_number",
                "cpu_info",
                "gpu_info",
                "backends",
                "model_filename",
                "model_type",
                "model_size",
                "model_n_params",
                "n_batch",
                "n_ubatch",
                "n_threads",
                "type_k",
                "type_v",
                "n_prompt",
                "n_gen",
                "n_depth",
                "test_time",
                "avg_ns",
                "stddev_ns",
                "avg_ts",
                "stddev_ts",
                "samples_ns",
                "samples_ts",
                "budget_bytes",
                "peak_rss_bytes",
                "io_mode",
                "bytes_read",
                "bytes_per_token",
                "hit_rate",
                "stall_ms",
                "overlap",
                "probe_bandwidth",
                "ceiling_ts",
            ],
        );
        assert_eq!(line["allocations"], 0, "{line}");
        assert_eq!(line["samples_ns"].as_array().map(Vec::len), Some(2));
        assert!(line["peak_rss_bytes"].as_u64() <= line["budget_bytes"].as_u64());
    }
    let ran = with("bench", &model, "-p 4 -n 0 -r 1");
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(ran.text().lines().count(), 3, "{}", ran.text());
}

#[test]
fn inspect_tells_what_is_there() {
    let scratch = Scratch::new("inspect");
    let model = small(scratch.join("m.gguf"));
    let told = with("inspect", &model, "--json --budget 24M,48M").json();
    assert_eq!(told["metadata"]["general.architecture"], "\"llama\"");
    let tensors = told["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 3 + 2 * 9);
    assert_keys(&tensors[0], &["name", "type", "dims", "offset", "bytes"]);
    let plans = told["plans"].as_array().unwrap();
    assert_eq!(plans.len(), 2);
    for plan in plans {
        let total: u64 = plan["ledger"]
            .as_object()
            .unwrap()
            .values()
            .filter_map(Value::as_u64)
            .sum();
        assert_eq!(plan["held_bytes"].as_u64(), Some(total));
        assert!(total <= plan["budget_bytes"].as_u64().unwrap());
        // It all fits.
        assert_eq!(plan["streamed_bytes_per_token"], 0);
    }
    let text = with("inspect", &model, "--budget 24M").text();
    for word in [
        "general.architecture",
        "blk.1.ffn_down.weight",
        "arena",
        "total",
    ] {
        assert!(text.to_lowercase().contains(word), "{word}: {text}");
    }
    let text = with("inspect", &model, "--budget 24M --no-tensors").text();
    assert!(!text.contains("blk.1.ffn_down.weight"));
}

/// Writes `bytes` at `at` into a file.
fn patch(path: &Path, at: u64, bytes: &[u8]) {
    let mut file = File::options().write(true).open(path).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(bytes).unwrap();
}

#[test]
fn verify_finds_a_damaged_block() {
    let scratch = Scratch::new("verify");
    let model = small(scratch.join("m.gguf"));
    let told = with("verify", &model, "--blocks --sha256 --json").json();
    assert_eq!(told["ok"], true);
    assert!(told["blocks_checked"].as_u64().unwrap() > 1000);
    let sum = told["sha256"][0].as_str().unwrap().to_owned();
    let tool = Command::new("sha256sum").arg(&model).output().unwrap();
    assert!(String::from_utf8_lossy(&tool.stdout).starts_with(&sum));
    let tensors = with("inspect", &model, "--json --budget 64M").json();
    let tensor = tensors["tensors"]
        .as_array()
        .unwrap()
        .iter()
        .find(|t| t["name"] == "blk.1.ffn_down.weight")
        .unwrap()
        .clone();
    // Q4_0: blocks of 18 bytes, each begins with its scale, here infinity.
    let offset = tensor["offset"].as_u64().unwrap();
    patch(&model, offset + 18 * 7, &0x7c00u16.to_le_bytes());
    assert_eq!(with("verify", &model, "").code, 0, "without --blocks");
    let ran = with("verify", &model, "--blocks");
    let stderr = ran.failed(3);
    for word in ["m.gguf", "blk.1.ffn_down.weight", "block 7 "] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
    // Running it is an error, not a panic or made-up text.
    let ran = with("run", &model, "-p the -n 2 --temp 0");
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(!ran.stderr.contains("panicked"), "{}", ran.stderr);
}

#[test]
fn perplexity_prints_running_values_and_the_estimate() {
    let scratch = Scratch::new("perplexity");
    let model = small(scratch.join("m.gguf"));
    let text = scratch.join("text");
    fs::write(&text, "abc xyz 0123456789. ".repeat(12)).unwrap();
    let args = format!("-f {} -c 32 --budget 64M", text.display());
    let ran = with("perplexity", &model, &args);
    assert_eq!(ran.code, 0, "{ran:?}");
    let told = with("perplexity", &model, &format!("{args} --json")).json();
    let value = told["perplexity"].as_f64().unwrap();
    assert!(value > 1.0 && value.is_finite());
    let out = ran.text();
    assert!(out.starts_with("[1]"), "{out}");
    let last = out.trim_end().lines().last().unwrap();
    let want = format!(
        "Final estimate: PPL = {value:.4} +/- {:.5}",
        told["error"].as_f64().unwrap()
    );
    assert_eq!(last, want);
    // Half of each chunk but one token is scored.
    let chunks = told["chunks"].as_u64().unwrap();
    assert!(chunks >= 4);
    assert_eq!(told["scored_tokens"].as_u64(), Some(chunks * 15));
    let two = with("perplexity", &model, &format!("{args} --json --chunks 2")).json();
    let second = |told: &Value| told["running"][1].as_f64().unwrap();
    assert!((second(&two) / second(&told) - 1.0).abs() < 1e-7);
    // Neither the budget nor the batch changes it.
    let other = with("perplexity", &model, &format!("{args} --json -b 5 -t 1")).json();
    let other = other["perplexity"].as_f64().unwrap();
    // Threads share the sum over the vocabulary, so its last bits differ.
    assert!((other / value - 1.0).abs() < 1e-7, "{other} {value}");
}

#[test]
fn tokenize_and_its_forms() {
    let scratch = Scratch::new("tokenize");
    let model = small(scratch.join("m.gguf"));
    let tokenize = |args: &[&str]| {
        let mut command = program(["tokenize", "-m"]);
        command.arg(&model).args(args);
        finish(command.spawn().unwrap())
    };
    let prompt = "<|im_start|>the";
    let ids = tokenize(&["-p", prompt, "--ids"]).json();
    assert_eq!(ids.as_array().map(Vec::len), Some(2 + 1), "{ids}");
    assert_eq!(ids[0], 1);
    let told = tokenize(&["-p", prompt, "--json"]).json();
    let texts: String = told
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["text"].as_str().unwrap())
        .collect();
    assert_eq!(texts, prompt);
    let plain = tokenize(&["-p", prompt, "--ids", "--no-special"]).json();
    assert!(plain.as_array().unwrap().len() > 10);
    let lines = tokenize(&["-p", prompt]).text();
    assert_eq!(lines.lines().count(), 3);
}

/// No network, no Python: only a folder to write in.
#[test]
fn demo_runs_what_is_part_of_the_program() {
    let scratch = Scratch::new("demo-small");
    let run = |args: &[&str]| {
        let mut command = program(["demo"]);
        command
            .args(args)
            .env("LEANSTREAM_CACHE", scratch.join("cache"))
            .env("PATH", scratch.join("nothing-here"));
        finish(command.spawn().unwrap())
    };
    let told = run(&["--json", "-n", "24"]).json();
    assert_eq!(told["tokens"].as_array().map(Vec::len), Some(24));
    assert!(told["bytes_read"].as_u64() > Some(0), "{told}");
    assert!(
        told["peak_rss_bytes"].as_u64() <= told["budget_bytes"].as_u64(),
        "{told}"
    );
    // The second time all is there, and the text is the same; in words and spaces, as English has them.
    let text = run(&["-n", "24"]).text();
    assert_eq!(told["text"], *text);
    let letters = text.chars().filter(|c| c.is_ascii_lowercase() || *c == ' ');
    assert!(letters.count() * 10 > text.len() * 8, "{text}");
    // A damaged file is put right.
    let cache = scratch.join("cache");
    let files = std::fs::read_dir(&cache).unwrap();
    let model = files
        .map(|entry| entry.unwrap().path())
        .find(|path| path.extension() == Some("gguf".as_ref()))
        .unwrap();
    std::fs::write(&model, "no model").unwrap();
    assert_eq!(run(&["-n", "24"]).text(), text);
    assert!(std::fs::metadata(&model).unwrap().len() > 1 << 20);
    assert!(run(&["--model", "large"]).failed(2).contains("smollm2"));
}

#[test]
fn demos_that_begin_at_once_do_not_meet() {
    let scratch = Scratch::new("demos");
    let start = || {
        let mut command = program(["demo", "-n", "8"]);
        command.env("LEANSTREAM_CACHE", scratch.join("cache"));
        command.spawn().unwrap()
    };
    let all: Vec<_> = (0..4).map(|_| start()).collect();
    let all: Vec<_> = all.into_iter().map(finish).collect();
    assert!(all.iter().all(|ran| ran.code == 0), "{all:?}");
    assert!(all.iter().all(|ran| ran.stdout == all[0].stdout), "{all:?}");
    let names = std::fs::read_dir(scratch.join("cache")).unwrap();
    assert_eq!(names.count(), 2, "the model and its pack");
}

#[test]
fn demo_without_python_says_what_to_do() {
    let scratch = Scratch::new("demo");
    let mut command = program(["demo", "--model", "smollm2"]);
    command
        .env("LEANSTREAM_CACHE", scratch.join("cache"))
        .env("PATH", scratch.join("nothing-here"));
    let ran = finish(command.spawn().unwrap());
    let stderr = ran.failed(1);
    assert!(
        stderr.contains("python3") && stderr.contains("run -m"),
        "{stderr}"
    );
}
