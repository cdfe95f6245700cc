//! Budgets: too small ones, shares, lists, and what they bound.

use std::fs::{self, File};

use crate::common::Scratch;
use crate::common::cli::{Ran, larger, with};
use serde_json::Value;

/// The `--budget` that the message proposes.
fn proposed(stderr: &str) -> &str {
    let (_, rest) = stderr.split_once("(--budget ").expect("a proposal");
    rest.split_once(')').expect("its end").0
}

#[test]
fn a_budget_too_small_names_one_that_does() {
    let scratch = Scratch::new("least");
    let model = larger(scratch.join("m.gguf"));
    for (command, args) in [
        ("run", "-p the -n 8 --temp 0 --ignore-eos --json"),
        (
            "run",
            "-p the -n 8 --temp 0 --ignore-eos --json -c 400 -t 4",
        ),
        (
            "run",
            "-p the -n 8 --temp 0 --ignore-eos --json --io pread --kv-type q8_0",
        ),
        ("perplexity", "--json -c 8 -p abcdefghijklmnopqrstuvwxyz"),
    ] {
        let ran = with(command, &model, &format!("{args} --budget 1M"));
        let stderr = ran.failed(4);
        for word in ["arena", "total", "mib"] {
            assert!(stderr.to_lowercase().contains(word), "{word}: {stderr}");
        }
        let least = proposed(stderr);
        let ran = with(command, &model, &format!("{args} --budget {least}"));
        let summary = ran.json();
        let budget = summary["budget_bytes"].as_u64().unwrap();
        assert!(budget < 24 << 20, "the weights alone have 27 MB");
        assert!(
            summary["peak_rss_bytes"].as_u64().unwrap() <= budget,
            "{summary}"
        );
        // One that is much less doesn't: the proposal is no exaggeration.
        let mib: u64 = least.trim_end_matches('M').parse().unwrap();
        let ran = with(command, &model, &format!("{args} --budget {}M", mib - 2));
        ran.failed(4);
    }
    // The result doesn't depend on the budget.
    let tokens = |budget: &str| {
        let args = format!("-p the -n 8 --temp 0 --ignore-eos --json --budget {budget}");
        with("run", &model, &args).json()["tokens"].clone()
    };
    assert_eq!(tokens("20M"), tokens("100M"));
    assert_eq!(tokens("75%"), tokens("100M"));
    with("inspect", &model, "--budget 1M").failed(4);
    let ran = with("bench", &model, "--budget 1M -p 0 -n 2 -r 1 -o jsonl");
    assert!(ran.failed(4).contains("--budget"));
}

/// `bench` named what is enough for the first test, and failed at the second.
#[test]
fn the_least_budget_is_that_of_the_test_that_needs_most() {
    let scratch = Scratch::new("least-of-tests");
    let model = larger(scratch.join("m.gguf"));
    let bench = |args: &str| with("bench", &model, &format!("{args} -r 1 -t 2 -o jsonl"));
    let least = |tests: &str| {
        let ran = bench(&format!("{tests} --budget 0"));
        let least = proposed(ran.failed(4));
        least.trim_end_matches('M').parse::<u64>().unwrap()
    };
    let (short, both) = (least("-p 4 -n 0"), least("-p 4 -n 240"));
    assert!(short < both, "{short} {both}");
    let ran = bench(&format!("-p 4 -n 240 --budget {both}M"));
    assert_eq!((ran.code, ran.text().lines().count()), (0, 2), "{ran:?}");
    // With what is enough for the first one alone, neither is measured.
    bench(&format!("-p 4 -n 240 --budget {short}M")).failed(4);
    let ran = bench(&format!("-p 4 -n 240 --budget {short}M,64M"));
    assert_eq!(ran.code, 4, "{ran:?}");
    assert_eq!(ran.stderr.matches("too small").count(), 1, "{ran:?}");
    let text = ran.text();
    let refused = text.lines().map(|line| line.contains("\"error\":"));
    assert_eq!(refused.collect::<Vec<_>>(), [true, true, false, false]);
}

#[test]
fn a_list_goes_on_after_a_budget_too_small() {
    let scratch = Scratch::new("list");
    let model = larger(scratch.join("m.gguf"));
    let list = "--budget 1M,48M,2M,40M";
    let bench = format!("{list} -p 4 -n 2 -r 1");
    let check_told = |ran: &Ran| {
        assert_eq!(ran.code, 4, "{ran:?}");
        assert!(ran.stderr.contains("1.0 MiB is too small"), "{ran:?}");
        assert!(ran.stderr.contains("2.0 MiB is too small"), "{ran:?}");
    };
    let ran = with("bench", &model, &format!("{bench} -o jsonl"));
    check_told(&ran);
    let text = ran.text();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    let lines: Vec<Value> = lines.collect();
    assert_eq!(lines.len(), 8, "two tests for each budget");
    for (i, line) in lines.iter().enumerate() {
        let budget = [1, 48, 2, 40][i / 2];
        assert_eq!(line["budget_bytes"], budget << 20);
        assert_eq!(line["test"], ["pp4", "tg2"][i % 2]);
        let failed = budget < 3;
        assert_eq!(line["avg_ts"].is_null(), failed);
        assert_eq!(line["error"].is_string(), failed);
        if failed {
            assert!(line["least_budget_bytes"].as_u64() > Some(2 << 20));
        }
    }
    let ran = with("bench", &model, &bench);
    check_told(&ran);
    let table = ran.text();
    let columns = |line: &str| line.matches('|').count();
    assert_eq!(table.lines().count(), 2 + 8, "{table}");
    assert!(table.lines().all(|line| columns(line) == 12), "{table}");
    assert_eq!(table.matches("error: ").count(), 4, "{table}");

    let ran = with("inspect", &model, &format!("{list} --json"));
    check_told(&ran);
    let told: Value = serde_json::from_slice(&ran.stdout).unwrap();
    let plans = told["plans"].as_array().unwrap();
    let failed = plans.iter().map(|plan| plan["error"].is_string());
    assert_eq!(failed.collect::<Vec<_>>(), [true, false, true, false]);
    let ran = with("inspect", &model, &format!("{list} --no-tensors"));
    check_told(&ran);
    assert_eq!(ran.text().matches("too small").count(), 2);
    assert_eq!(ran.text().matches("stay (").count(), 2);
    // What is no size is an error of usage there too.
    let ran = with("inspect", &model, "--budget 48M,x");
    ran.failed(2);
}

#[test]
fn a_text_is_bounded_by_the_budget_however_it_is_given() {
    let scratch = Scratch::new("bound");
    let model = larger(scratch.join("m.gguf"));
    let text = scratch.join("text");
    fs::write(&text, vec![b'a'; 2 << 20]).unwrap();
    let path = text.display();
    let whole = fs::metadata(&model).unwrap().len();
    for (command, budget, bytes) in [
        ("run", "20M", (20 << 20) / 16),
        ("run", "50%", whole / 2 / 16),
        ("perplexity", "100%", whole / 16),
    ] {
        let ran = with(command, &model, &format!("-f {path} --budget {budget}"));
        let bound = format!("larger than {bytes} bytes");
        assert!(ran.failed(2).contains(&bound), "{budget}: {}", ran.stderr);
    }
    // A tokenizer has no budget, and says what it takes.
    let ran = with("tokenize", &model, &format!("--ids -f {path}"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        with("tokenize", &model, "--help")
            .text()
            .contains("256 MiB")
    );
    let huge = scratch.join("huge");
    File::create(&huge)
        .unwrap()
        .set_len((256 << 20) + 1)
        .unwrap();
    let ran = with("tokenize", &model, &format!("-f {}", huge.display()));
    assert!(ran.failed(2).contains("larger than 268435456 bytes"));
}

#[test]
fn a_long_prompt_in_small_batches_is_told_what_budget_does_better() {
    let scratch = Scratch::new("batches");
    let model = larger(scratch.join("m.gguf"));
    let prompt = "a ".repeat(150);
    let text = scratch.join("text");
    fs::write(&text, &prompt).unwrap();
    let args = format!("-f {} -n 1 --temp 0 --json", text.display());
    let least = with("run", &model, &format!("{args} --budget 1M"));
    let least = proposed(least.failed(4)).to_owned();
    let ran = with("run", &model, &format!("{args} --budget {least}"));
    let first = ran.json();
    assert_eq!(ran.stderr.lines().count(), 2, "{}", ran.stderr);
    let advice = ran.stderr.lines().next().unwrap();
    assert!(advice.ends_with("makes them 128"), "{advice}");
    let (_, budget) = advice.split_once("--budget ").unwrap();
    let budget = budget.split(' ').next().unwrap();
    // It does, and one that is a little less doesn't.
    let batch = |budget: &str| {
        let args = format!("-p 300 -n 0 -r 1 -o jsonl --budget {budget}");
        with("bench", &model, &args).json()["n_batch"]
            .as_u64()
            .unwrap()
    };
    let mib: u64 = budget.trim_end_matches('M').parse().unwrap();
    assert!(batch(&format!("{}M", mib + 1)) >= 128);
    assert!(batch(&format!("{}M", mib - 2)) < 128);
    let better = with("run", &model, &format!("{args} --budget {budget}"));
    assert_eq!(better.stderr.lines().count(), 1, "{}", better.stderr);
    let read = |told: &Value| told["bytes_read"].as_u64().unwrap();
    assert!(read(&better.json()) * 4 < read(&first));
    // Nothing to tell where the batch was asked for, or the prompt is short.
    for other in [format!("{args} -b 4"), args.replace("-f", "-p")] {
        let ran = with("run", &model, &format!("{other} --budget {least}"));
        assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{ran:?}");
    }
}
