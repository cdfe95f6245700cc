//! How much memory `tune` holds: no more after many steps than after few, and less when the budget falls.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::Scratch;
use crate::common::cli::{finish, program, with};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use serde_json::Value;

pub(crate) const MIB: u64 = 1 << 20;

/// A log as it stands, but for a line that is being written.
pub(crate) fn log_of(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect()
}

pub(crate) fn bytes(line: &Value, key: &str) -> u64 {
    line[key]
        .as_u64()
        .unwrap_or_else(|| panic!("{key}: {line}"))
}

/// Waits until the log has a line that `wanted` is true of.
pub(crate) fn await_line(log: &Path, wanted: impl Fn(&Value) -> bool) {
    let begun = Instant::now();
    while !log_of(log).iter().any(&wanted) {
        assert!(begun.elapsed() < Duration::from_secs(200), "no such step");
        thread::sleep(Duration::from_millis(2));
    }
}

/// What a step takes is there before the first one, so a run may go on for days. Items of all lengths, for
/// each packs the passes in another way, and the least budget but for two MiB, so that weights stream.
#[test]
fn memory_is_flat_over_a_thousand_steps() {
    let scratch = Scratch::new("tune-flat");
    let model = scratch.join("m.gguf");
    let spec = Spec {
        d: 128,
        ff: 256,
        head_dim: 32,
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 13)
    };
    spec.write(&Vocab::BuiltIn, &model).expect("a model");
    let (data, log) = (scratch.join("data.jsonl"), scratch.join("log.jsonl"));
    let items: String = (0..97)
        .map(|i| {
            let words = "cats and dogs sat on mats; ".repeat(1 + i * i % 13);
            format!("{{\"prompt\": \"{i}: \", \"completion\": \"{words}\"}}\n")
        })
        .collect();
    fs::write(&data, &items).expect("a file");
    let eval = scratch.join("eval.jsonl");
    let few: Vec<&str> = items.lines().take(9).collect();
    fs::write(&eval, few.join("\n")).expect("a file");
    let out = scratch.join("a.gguf");
    let args = |more: &str| {
        format!(
            "--data {} -o {} --seq 96 --batch 3 --steps 1000 --eval-every 100 --eval {} -t 2 {more}",
            data.display(),
            out.display(),
            eval.display()
        )
    };
    let ran = with("tune", &model, &args("--budget 1M"));
    let (_, rest) = ran.failed(4).split_once("(--budget ").expect("a proposal");
    let (least, _) = rest.split_once('M').expect("MiB");
    let least: u64 = least.parse().expect("a number");
    let more = format!("--budget {}M --log {} --json", least + 2, log.display());
    let summary = with("tune", &model, &args(&more)).json();
    let lines = log_of(&log);
    let tokens = |line: &Value| bytes(line, "tokens");
    let (fewest, most) = (
        lines.iter().map(tokens).min().expect("lines"),
        lines.iter().map(tokens).max().expect("lines"),
    );
    assert!(most > 3 * fewest, "steps of {fewest} to {most} tokens");
    let peak = |step: usize| bytes(&lines[step - 1], "peak_rss_bytes");
    let (early, late) = (peak(100), peak(1000));
    assert!(
        late <= early + MIB,
        "{early} after 100 steps, {late} after 1000"
    );
    let whole = bytes(&summary, "peak_rss_bytes");
    assert!(
        late > 0 && late <= whole,
        "{late} in the log, {whole} in all"
    );
    assert!(whole <= (least + 2) * MIB, "{whole} of {} MiB", least + 2);
}

/// Resident memory of a process as others see it, in bytes; `None` when it has ended.
pub(crate) fn resident(child: &Child) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    let kib = line.trim().trim_end_matches("kB").trim();
    Some(kib.parse::<u64>().expect("a number") << 10)
}

/// A model whose activations take more than all else that training it needs.
fn deep(path: PathBuf) -> PathBuf {
    let spec = Spec {
        d: 128,
        ff: 512,
        head_dim: 32,
        layers: 28,
        ctx: 1024,
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 11)
    };
    spec.write(&Vocab::BuiltIn, &path).expect("a model");
    path
}

/// The budget before, in MiB, and half of it.
const BEFORE: u64 = 80;
const AFTER: u64 = BEFORE / 2;

/// A training run of [`deep`] whose budget is in a file.
struct Falling {
    scratch: Scratch,
    log: PathBuf,
    budget: PathBuf,
    out: PathBuf,
    child: Child,
}

impl Falling {
    fn start(name: &str, more: &str) -> Self {
        let scratch = Scratch::new(name);
        let model = deep(scratch.join("m.gguf"));
        let data = scratch.join("data.txt");
        let line = "the cat sat on the mat and the dog sat on the log; ";
        fs::write(&data, line.repeat(200)).expect("a file");
        let [log, budget, out] = ["log", "budget", "a.gguf"].map(|name| scratch.join(name));
        fs::write(&budget, format!("{BEFORE}M\n")).expect("a file");
        let mut command = program(["tune", "--json", "--seq", "1024", "--rank", "2", "-m"]);
        command.arg(&model).arg("--data").arg(&data);
        command.arg("-o").arg(&out).arg("--log").arg(&log);
        command.arg("--budget-file").arg(&budget);
        command.args(["--budget", &format!("{BEFORE}M"), "-t", "2"]);
        command.args(more.split(' '));
        let child = command.spawn().expect("it starts");
        Self {
            scratch,
            log,
            budget,
            out,
            child,
        }
    }

    /// Resident memory as others see it, in bytes; `None` when the process has ended.
    fn resident(&self) -> Option<u64> {
        resident(&self.child)
    }
}

#[test]
fn half_the_budget_is_half_the_memory_and_training_goes_on() {
    const STEPS: usize = 20;
    let run = Falling::start(
        "tune-half",
        &format!("--steps {STEPS} --lr 0.01 --warmup 0"),
    );
    await_line(&run.log, |line| line["step"] == 3);
    let full = run.resident().expect("it runs");
    assert!(full > AFTER * MIB, "{full}: half the budget would do");
    fs::write(&run.budget, format!("{AFTER}M\n")).expect("a file");
    let fell = |line: &Value| bytes(line, "budget_bytes") == AFTER * MIB;
    await_line(&run.log, fell);
    let mut seen = Vec::new();
    while let Some(resident) = run.resident() {
        seen.push(resident);
        thread::sleep(Duration::from_millis(10));
    }
    let ran = finish(run.child);
    let summary = ran.json();
    assert!(seen.len() > 10, "it was looked at {} times", seen.len());
    let most = seen.into_iter().max().expect("it was looked at");
    assert!(most <= AFTER * MIB, "{most} bytes after the budget fell");
    assert!(bytes(&summary, "peak_rss_bytes") <= BEFORE * MIB);

    let lines = log_of(&run.log);
    assert_eq!(lines.len(), STEPS, "it went on to its end");
    assert!(run.out.exists());
    let at = lines.iter().position(fell).expect("a line");
    assert!((3..10).contains(&at), "the budget fell in step {at}");
    for line in &lines[at..] {
        assert!(bytes(line, "rss_bytes") <= AFTER * MIB, "{line}");
    }
    let bits = |line: &Value| line["mean_bits"].as_f64().expect("a number");
    assert!(bits(&lines[at]) < bits(&lines[at - 1]));
    let losses: Vec<f64> = lines
        .iter()
        .map(|line| line["loss"].as_f64().expect("a number"))
        .collect();
    // The step after the one in which it fell is the first that was computed with what that one learned.
    let last: f64 = losses[STEPS - 3..].iter().sum::<f64>() / 3.0;
    assert!(last < 0.8 * losses[at + 1], "fell in step {at}: {losses:?}");
}

/// Below the least there is no going on: the table says why, what was learned is kept, and goes on with more.
#[test]
fn a_budget_below_the_least_in_mid_run_ends_it_with_the_table() {
    let more = "--steps 12 --checkpoint-every 0 --resume";
    let run = Falling::start("tune-least", more);
    await_line(&run.log, |line| line["step"] == 2);
    fs::write(&run.budget, "8M").expect("a file");
    let ran = finish(run.child);
    let stderr = ran.failed(4);
    for word in [
        "8.0 MiB",
        "at least",
        "--budget ",
        "activations",
        "trained",
        "total",
    ] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
    assert!(!run.out.exists());
    assert!(run.scratch.join("a.gguf.ckpt").exists());
    let done = log_of(&run.log).len();
    fs::write(&run.budget, format!("{BEFORE}M")).expect("a file");
    let args = format!(
        "--data {} -o {} --seq 1024 --rank 2 --json --budget-file {} --budget {BEFORE}M --log {} -t 2 {more}",
        run.scratch.join("data.txt").display(),
        run.out.display(),
        run.budget.display(),
        run.log.display(),
    );
    let summary = with("tune", &run.scratch.join("m.gguf"), &args).json();
    assert_eq!(summary["steps"], 12);
    let steps: Vec<u64> = log_of(&run.log)
        .iter()
        .map(|line| bytes(line, "step"))
        .collect();
    assert!(
        done >= 2 && steps == (1..=12).collect::<Vec<_>>(),
        "{steps:?}"
    );
}
