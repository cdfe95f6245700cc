//! Budgets of `tune` that change: weights that stayed stream, a file decides from the start, and what stops a
//! run says how to go on.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Child;
use std::thread;
use std::time::Duration;

use crate::common::Scratch;
use crate::common::cli::{Ran, finish, ignored, program, with};
use crate::tune_memory::{MIB, await_line, bytes, log_of, resident};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A model whose weights take more than all else that training it on short sequences needs.
struct Heavy {
    scratch: Scratch,
    model: PathBuf,
    data: PathBuf,
    /// MiB with which it can be trained at all.
    least: u64,
}

impl Heavy {
    fn new(name: &str) -> Self {
        let scratch = Scratch::new(name);
        let (model, data) = (scratch.join("m.gguf"), scratch.join("data.txt"));
        let spec = Spec {
            d: 256,
            ff: 1024,
            head_dim: 64,
            layers: 40,
            ..Spec::small(Arch::Llama, QuantType::Q8_0, 17)
        };
        spec.write(&Vocab::BuiltIn, &model).expect("a model");
        let line = "the cat sat on the mat and the dog sat on the log; ";
        fs::write(&data, line.repeat(200)).expect("a file");
        let mut heavy = Self {
            scratch,
            model,
            data,
            least: 0,
        };
        let ran = heavy.run("none", "--act-bits 8 --budget 1M");
        let (_, rest) = ran.failed(4).split_once("(--budget ").expect("a proposal");
        let (least, _) = rest.split_once('M').expect("MiB");
        heavy.least = least.parse().expect("a number");
        heavy
    }

    fn args(&self, out: &str, more: &str) -> String {
        let out = self.scratch.join(out);
        let (data, out) = (self.data.display(), out.display());
        format!("--data {data} -o {out} --seq 64 --rank 2 -t 2 --json {more}")
    }

    fn run(&self, out: &str, more: &str) -> Ran {
        with("tune", &self.model, &self.args(out, more))
    }

    fn start(&self, out: &str, more: &str) -> Child {
        let mut command = program(["tune", "-m"]);
        command.arg(&self.model);
        command.args(self.args(out, more).split_whitespace());
        command.spawn().expect("it starts")
    }

    fn say(&self, budget: &str) -> PathBuf {
        let path = self.scratch.join("budget");
        fs::write(&path, budget).expect("a file");
        path
    }

    /// A run with room for all weights, whose budget falls to `after` MiB in its third step or so. Its summary,
    /// its log, and the most that was resident afterwards.
    fn falling(&self, after: u64, more: &str) -> (Value, Vec<Value>, u64) {
        let file = self.say(&format!("{}M", self.least + 120));
        let log = self.scratch.join("log");
        let more = format!(
            "--budget-file {} --log {} {more}",
            file.display(),
            log.display()
        );
        let child = self.start("fell.gguf", &more);
        await_line(&log, |line| line["step"] == 2);
        let before = resident(&child).expect("it runs");
        assert!(before > after * MIB, "{before} bytes before it fell");
        self.say(&format!("{after}M"));
        await_line(&log, |line| bytes(line, "budget_bytes") == after * MIB);
        let mut most = 0;
        while let Some(now) = resident(&child) {
            most = most.max(now);
            thread::sleep(Duration::from_millis(5));
        }
        let summary = finish(child).json();
        (summary, log_of(&log), most)
    }
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).expect("a file").len()
}

#[test]
fn weights_that_stayed_stream_when_the_budget_falls_and_change_no_bit() {
    let heavy = Heavy::new("tune-weights");
    let after = heavy.least + 2;
    let fixed = "--steps 10 --act-bits 8 --lr 0.003 --warmup 0";
    let (summary, lines, most) = heavy.falling(after, fixed);
    assert!(most > 0 && most <= after * MIB, "{most} of {after} MiB");
    assert_eq!(lines.len(), 10, "it went on to its end");
    assert_eq!(bytes(&summary, "budget_bytes"), after * MIB);
    let kept = bytes(&summary, "weights_kept_bytes");
    assert!(kept < length(&heavy.model) / 4, "{kept} bytes still stay");
    let small = heavy.run("small.gguf", &format!("{fixed} --budget {after}M"));
    assert_eq!(bytes(&small.json(), "weights_kept_bytes"), kept);
    let read = |name| fs::read(heavy.scratch.join(name)).expect("an adapter");
    assert!(read("fell.gguf") == read("small.gguf"), "other bits");

    // Half of the weights do, where half of them have room.
    let middle = heavy.least + length(&heavy.model) / MIB / 2;
    let more = "--steps 24 --lr 0.01 --warmup 0";
    fs::remove_file(heavy.scratch.join("log")).expect("a log");
    let (summary, lines, most) = heavy.falling(middle, more);
    assert!(most <= middle * MIB, "{most} of {middle} MiB");
    let some = bytes(&summary, "weights_kept_bytes");
    assert!(some > kept && some < length(&heavy.model), "{some} bytes");
    let losses = lines.iter().map(|line| line["loss"].as_f64());
    let losses: Vec<f64> = losses.map(|loss| loss.expect("a number")).collect();
    assert!(losses[23] < 0.9 * losses[3], "{losses:?}");
}

#[test]
fn the_first_plan_obeys_the_file() {
    let heavy = Heavy::new("tune-file");
    let small = heavy.least + 2;
    let file = heavy.say(&format!("{small}M\n"));
    let file = format!("--steps 2 --act-bits 8 --budget-file {}", file.display());
    for given in ["", "--budget 500M"] {
        let summary = heavy.run("a.gguf", &format!("{file} {given}")).json();
        let peak = bytes(&summary, "peak_rss_bytes");
        assert!(peak <= small * MIB, "{given}: {peak} of {small} MiB");
        assert_eq!(bytes(&summary, "budget_bytes"), small * MIB, "{given}");
    }
    heavy.say("1M");
    assert!(heavy.run("b.gguf", &file).failed(4).contains("at least"));
    heavy.say("much");
    assert!(heavy.run("b.gguf", &file).failed(2).contains("'much'"));
}

#[test]
fn a_budget_of_nothing_is_too_small_and_not_wrong() {
    let heavy = Heavy::new("tune-nothing");
    let stderr = heavy
        .run("a.gguf", "--act-bits 8 --budget 0")
        .failed(4)
        .to_owned();
    let least = format!("(--budget {}M)", heavy.least);
    assert!(
        stderr.contains(&least) && stderr.contains("total"),
        "{stderr}"
    );
}

#[test]
fn what_stops_a_run_says_how_to_go_on_and_nonsense_in_the_file_is_told_once() {
    let heavy = Heavy::new("tune-stopped");
    let log = heavy.scratch.join("log");
    let file = heavy.say("500M");
    let more = format!(
        "--steps 10000 --checkpoint-every 0 --budget-file {} --log {}",
        file.display(),
        log.display()
    );
    for (signal, code) in [(Signal::SIGTERM, 143), (Signal::SIGINT, 130)] {
        if ignored(signal) {
            continue;
        }
        let _ = fs::remove_file(&log);
        heavy.say("500M");
        let child = heavy.start("a.gguf", &more);
        await_line(&log, |line| line["step"] == 2);
        heavy.say("much");
        await_line(&log, |line| line["step"] == 6);
        kill(Pid::from_raw(child.id() as i32), signal).expect("it runs");
        let ran = finish(child);
        let stderr = ran.failed(code);
        let step = log_of(&log).len();
        let says = format!(
            "stopped by signal {} after step {step}; --resume",
            code - 128
        );
        assert!(stderr.contains(&says), "{says}: {stderr}");
        assert_eq!(stderr.matches("'much'").count(), 1, "{stderr}");
    }
}
