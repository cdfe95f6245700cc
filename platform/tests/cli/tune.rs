//! `tune` as scripts see it, on models small enough to train in a second.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::Scratch;
use crate::common::cli::{Ran, finish, larger, program, with};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// A text that repeats itself can be learned.
fn data(scratch: &Scratch) -> PathBuf {
    let path = scratch.join("data.txt");
    let line = "the cat sat on the mat and the dog sat on the log; ";
    fs::write(&path, line.repeat(60)).expect("a file");
    path
}

/// Arguments of a short training run, but for those that `more` has.
fn args(data: &Path, out: &Path, more: &str) -> String {
    let mut all = format!("--data {} -o {} {more}", data.display(), out.display());
    for (name, value) in [
        ("--seq", "64"),
        ("--batch", "2"),
        ("--lr", "0.01"),
        ("--warmup", "0"),
        ("--budget", "300M"),
    ] {
        if !more.split_whitespace().any(|word| word == name) {
            all.push_str(&format!(" {name} {value}"));
        }
    }
    all
}

fn tune(model: &Path, data: &Path, out: &Path, more: &str) -> Ran {
    with("tune", model, &args(data, out, more))
}

fn number(summary: &Value, key: &str) -> f64 {
    summary[key]
        .as_f64()
        .unwrap_or_else(|| panic!("{key}: {summary}"))
}

#[test]
fn a_small_model_learns_and_its_adapter_runs() {
    let scratch = Scratch::new("tune-learns");
    let (model, data) = (larger(scratch.join("m.gguf")), data(&scratch));
    let out = scratch.join("a.gguf");
    let plot = scratch.join("loss.svg");
    let log = scratch.join("log.jsonl");
    let more = format!(
        "--steps 12 --json --eval {} --plot {} --log {}",
        data.display(),
        plot.display(),
        log.display()
    );
    let ran = tune(&model, &data, &out, &more);
    let summary = ran.json();
    assert_eq!(number(&summary, "steps"), 12.0);
    assert!(number(&summary, "loss_last") < 0.8 * number(&summary, "loss_first"));
    assert!(number(&summary, "eval_loss") < 0.8 * number(&summary, "eval_loss_first"));
    assert!(number(&summary, "peak_rss_bytes") <= number(&summary, "budget_bytes"));
    assert!(number(&summary, "act_peak_bytes") < number(&summary, "act_f32_bytes"));
    for key in ["mean_bits", "s_per_step"] {
        assert!(number(&summary, key) > 0.0, "{key}");
    }
    assert!(!ran.stderr.contains('\r'), "no progress without a terminal");
    let lines = fs::read_to_string(&log).expect("a log");
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), 12);
    assert_eq!(lines[11]["step"], 12);
    assert!(
        fs::read_to_string(&plot)
            .expect("a figure")
            .contains("<svg")
    );
    // The adapter changes what the model says of the text, for the better.
    let perplexity = |lora: &str| {
        let args = format!("-f {} -c 64 --chunks 4 --json {lora}", data.display());
        number(&with("perplexity", &model, &args).json(), "perplexity")
    };
    let with_adapter = perplexity(&format!("--lora {}", out.display()));
    assert!(with_adapter < 0.7 * perplexity(""), "{with_adapter}");
    assert_eq!(
        scratch.names(),
        [
            "a.gguf",
            "a.gguf.ckpt",
            "data.txt",
            "log.jsonl",
            "loss.svg",
            "m.gguf"
        ]
    );
}

#[test]
fn threads_and_weights_that_stream_change_no_bit() {
    let scratch = Scratch::new("tune-bits");
    let (model, data) = (larger(scratch.join("m.gguf")), data(&scratch));
    let adapter = |name: &str, more: &str| {
        let out = scratch.join(name);
        let ran = tune(
            &model,
            &data,
            &out,
            &format!("--steps 3 --act-bits 4 {more}"),
        );
        assert_eq!(ran.code, 0, "{}", ran.stderr);
        fs::read(out).expect("an adapter")
    };
    let want = adapter("a", "-t 2");
    assert_eq!(adapter("b", "-t 1"), want);
    assert_eq!(adapter("c", "-t 3 --io pread"), want);
    let least = {
        let ran = tune(
            &model,
            &data,
            &scratch.join("d"),
            "--act-bits 4 --budget 1M",
        );
        let stderr = ran.failed(4).to_owned();
        assert!(
            stderr.contains("activations") && stderr.contains("trained"),
            "{stderr}"
        );
        let (_, rest) = stderr.split_once("(--budget ").expect("a proposal");
        rest.split_once(')').expect("its end").0.to_owned()
    };
    assert_eq!(
        adapter("d", &format!("--budget {least}")),
        want,
        "weights stream"
    );
    assert_eq!(
        adapter(
            "e",
            &format!("--budget {least} --fault seed=3,fail=2%,late=5%")
        ),
        want,
        "reads fail and are tried again"
    );
}

#[test]
fn a_killed_run_goes_on_where_its_checkpoint_stands() {
    let scratch = Scratch::new("tune-killed");
    let (model, data) = (larger(scratch.join("m.gguf")), data(&scratch));
    let (whole, out) = (scratch.join("whole.gguf"), scratch.join("a.gguf"));
    // 0.03 as a float is a number that only careful parsing gives back.
    let more = "--steps 30 --checkpoint-every 2 --seed 7 --weight-decay 0.03";
    assert_eq!(tune(&model, &data, &whole, more).code, 0);
    for signal in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut command = program(["tune", "-m"]);
        command.arg(&model);
        command.args(args(&data, &out, &format!("{more} --resume")).split_whitespace());
        let child = command.spawn().expect("it starts");
        let checkpoint = scratch.join("a.gguf.ckpt");
        let begun = Instant::now();
        let known = fs::metadata(&checkpoint).and_then(|m| m.modified()).ok();
        while fs::metadata(&checkpoint).and_then(|m| m.modified()).ok() == known {
            assert!(begun.elapsed() < Duration::from_secs(120), "no checkpoint");
            thread::sleep(Duration::from_millis(2));
        }
        let _ = kill(Pid::from_raw(child.id() as i32), signal);
        let ran = finish(child);
        // It may have been quicker than the signal.
        assert!([0, 143, 1009].contains(&ran.code), "{ran:?}");
        if ran.code != 0 {
            assert!(!out.exists(), "no adapter of a run that didn't end");
        }
    }
    let ran = tune(&model, &data, &out, &format!("{more} --resume"));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert_eq!(
        fs::read(&out).expect("an adapter"),
        fs::read(&whole).expect("an adapter")
    );
    // Another run's checkpoint is refused, and says in what it differs.
    let ran = tune(
        &model,
        &data,
        &out,
        "--steps 30 --seed 8 --weight-decay 0.03 --resume",
    );
    assert!(ran.failed(2).contains("seed"), "{}", ran.stderr);
    // As it was written, not as the nearest f64.
    let decayed = format!("{} --resume", more.replace("0.03", "0.1"));
    let ran = tune(&model, &data, &out, &decayed);
    let told = ran.failed(2);
    assert!(told.contains("was 0.03, and is 0.1 now"), "{told}");
    let checkpoint = scratch.join("a.gguf.ckpt");
    let mut bytes = fs::read(&checkpoint).expect("a checkpoint");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&checkpoint, &bytes).expect("a checkpoint");
    let ran = tune(&model, &data, &out, &format!("{more} --resume"));
    assert!(ran.failed(2).contains("damaged"), "{}", ran.stderr);
}

#[test]
fn a_budget_that_falls_in_mid_run_is_kept_and_training_goes_on() {
    let scratch = Scratch::new("tune-budget");
    let (model, data) = (larger(scratch.join("m.gguf")), data(&scratch));
    let (out, file, log) = (
        scratch.join("a.gguf"),
        scratch.join("budget"),
        scratch.join("log"),
    );
    let ran = tune(
        &model,
        &data,
        &scratch.join("b"),
        "--steps 1 --json --budget 1M",
    );
    let stderr = ran.failed(4).to_owned();
    let (_, rest) = stderr.split_once("(--budget ").expect("a proposal");
    let least: u64 = rest
        .split_once('M')
        .expect("MiB")
        .0
        .parse()
        .expect("a number");
    let more = format!(
        "--steps 40 --json --budget-file {} --log {} --checkpoint-every 0",
        file.display(),
        log.display()
    );
    let mut command = program(["tune", "-m"]);
    command.arg(&model);
    command.args(args(&data, &out, &more).split_whitespace());
    let child = command.spawn().expect("it starts");
    let lines = |n: usize| {
        let begun = Instant::now();
        while fs::read_to_string(&log).unwrap_or_default().lines().count() < n {
            assert!(begun.elapsed() < Duration::from_secs(120), "no steps");
            thread::sleep(Duration::from_millis(1));
        }
    };
    lines(2);
    fs::write(&file, format!("{}M", least + 60)).expect("a file");
    let _ = kill(Pid::from_raw(child.id() as i32), Signal::SIGUSR1);
    let ran = finish(child);
    let summary = ran.json();
    assert!(number(&summary, "loss_last") < number(&summary, "loss_first"));
    let text = fs::read_to_string(&log).expect("a log");
    let budgets: Vec<u64> = text
        .lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).expect("JSON");
            line["budget_bytes"].as_u64().expect("a number")
        })
        .collect();
    assert_eq!(budgets[0], 300 << 20);
    assert_eq!(*budgets.last().expect("lines"), (least + 60) << 20);
    // Below the least it stops with the table, and what it learned is in the checkpoint.
    fs::write(&file, "1M").expect("a file");
    let ran = tune(&model, &data, &out, &more);
    assert!(ran.failed(4).contains("total"), "{}", ran.stderr);
}

#[test]
fn a_push_to_silence_leaves_fewer_neurons_active() {
    let scratch = Scratch::new("tune-sparsity");
    let data = data(&scratch);
    let model = scratch.join("relu.gguf");
    let spec = Spec {
        activation: Some("relu"),
        ..Spec::small(Arch::Llama, QuantType::F32, 7)
    };
    spec.write(&Vocab::BuiltIn, &model).expect("a model");
    let active = |more: &str| {
        let more = format!("--full --steps 20 --lr 0.003 --json {more}");
        let summary = tune(&model, &data, &scratch.join("out.gguf"), &more).json();
        assert!(number(&summary, "loss_last") < 0.8 * number(&summary, "loss_first"));
        number(&summary, "active_ratio")
    };
    let (free, pushed) = (active(""), active("--sparsity 1"));
    assert!(pushed < 0.6 * free, "{pushed} of {free}");
    // Neurons with SiLU are never silent.
    let silu = larger(scratch.join("silu.gguf"));
    let out = scratch.join("a.gguf");
    let ran = tune(&silu, &data, &out, "--steps 1 --sparsity 1");
    assert!(ran.failed(2).contains("--sparsity"), "{}", ran.stderr);
    let summary = tune(&silu, &data, &out, "--steps 1 --json").json();
    assert!(summary["active_ratio"].is_null(), "{summary}");
}

#[test]
fn bad_data_has_messages_of_its_own() {
    let scratch = Scratch::new("tune-bad");
    let model = larger(scratch.join("m.gguf"));
    let out = scratch.join("a.gguf");
    let cases: [(&str, &[u8], &str); 5] = [
        ("empty.txt", b"", "empty"),
        ("one.txt", b"a", "token"),
        ("bytes.txt", b"abc \xff\xfe def", "UTF-8"),
        (
            "json.jsonl",
            b"{\"text\": \"fine\"}\n{\"prompt\": 1}\n",
            "line 2",
        ),
        ("none.jsonl", b"\n\n", "nothing"),
    ];
    for (name, bytes, word) in cases {
        let path = scratch.join(name);
        fs::write(&path, bytes).expect("a file");
        let ran = tune(&model, &path, &out, "--steps 1");
        assert!(ran.code != 0 && ran.stdout.is_empty(), "{name}: {ran:?}");
        assert!(ran.stderr.contains(word), "{name}: {}", ran.stderr);
        assert!(ran.stderr.contains(name), "{name}: {}", ran.stderr);
        assert!(!out.exists());
    }
    let data = data(&scratch);
    for (more, word) in [
        ("--steps 0", "--steps"),
        ("--rank 0", "--rank"),
        ("--targets q,z", "'z'"),
        ("--act-bits 3", "--act-bits"),
        ("--lr nan", "learning rate"),
        ("--full --rank 4", "--full"),
        ("--type q8_0", "--full"),
        ("--full --type q9_9", "q4_0"),
        ("--full --type mxfp4", "q4_0"),
        ("--seq 1000000", "--seq"),
        ("--recompute some", "--recompute"),
        ("--dropout 1", "--dropout"),
    ] {
        let ran = tune(&model, &data, &out, more);
        assert!(ran.failed(2).contains(word), "{more}: {}", ran.stderr);
    }
    let ran = tune(&model, &data, &data, "--steps 1");
    assert!(ran.failed(2).contains("is read"), "{}", ran.stderr);
    let ran = tune(&model, &data, &scratch.join("no/where.gguf"), "--steps 1");
    ran.failed(5);
    // None of them trained before it found out.
    assert!(!scratch.join("a.gguf.ckpt").exists());
}
