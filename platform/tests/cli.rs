//! The program as scripts see it: exit codes, what goes to stdout, what is said on stderr.

mod common;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use common::Scratch;
use common::cli::{BIN, await_caught, finish, larger, program, run, send, small, with};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// Greedy, so that runs can be compared.
const GREEDY: &str = "-p the -n 12 --temp 0 --ignore-eos --budget 64M";

fn keys(object: &Value) -> Vec<&str> {
    let object = object.as_object().expect("an object");
    object.keys().map(String::as_str).collect()
}

fn assert_keys(object: &Value, wanted: &[&str]) {
    let has = keys(object);
    for key in wanted {
        assert!(has.contains(key), "no {key} in {has:?}");
    }
}

#[test]
fn help_and_version_are_output() {
    for args in [
        &["--help"][..],
        &["help"],
        &["run", "--help"],
        &["bench", "-h"],
        &["--version"],
        &["-V"],
    ] {
        let ran = run(args);
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
        assert!(!ran.stdout.is_empty() && ran.stderr.is_empty(), "{ran:?}");
    }
    let version = run(["--version"]).text();
    assert_eq!(
        version,
        format!("leanstream {}\n", env!("CARGO_PKG_VERSION"))
    );
    // Every subcommand and option has a line.
    let help = run(["--help"]).text();
    for command in [
        "run",
        "perplexity",
        "tokenize",
        "inspect",
        "verify",
        "bench",
        "demo",
    ] {
        assert!(help.contains(command), "{command}");
        let own = run([command, "--help"]).text();
        assert!(own.contains("Usage:"), "{command}: {own}");
    }
}

#[test]
fn errors_of_usage_exit_2() {
    let scratch = Scratch::new("usage");
    let model = small(scratch.join("m.gguf"));
    for args in [
        &[][..],
        &["nonsense"],
        &["--nonsense"],
        &["run"],
        &["run", "--nonsense", "1"],
        &["run", "-m"],
        &["tokenize", "-m", "x"],
        &["tokenize", "-m", "x", "-p", "a", "-f", "b"],
    ] {
        let ran = run(args);
        ran.failed(2);
        assert!(
            ran.stderr.starts_with("leanstream: "),
            "{args:?}: {}",
            ran.stderr
        );
    }
    for args in [
        "-n 4",
        "-p a -n four",
        "-p a --budget 12X",
        "-p a --threads 0",
        "-p a --threads 5000",
        "-p a --kv-type f64",
        "-p a --io mmap",
        "-p a --queue-depth 0",
        "-p a -b 0",
        "-p a --throttle-read fast",
        "-p a --fault often",
        "-p a --temp -1",
        "-p a --temp nan",
        "-p a --top-p 0",
        "-p a --min-p 2",
        "-p a --repeat-penalty 0",
        "-p a --repeat-last-n 1000000",
        "-p abcdefgh -c 3",
        "-p a -p b",
    ] {
        let ran = with("run", &model, args);
        assert_eq!(ran.code, 2, "{args}: {ran:?}");
        ran.failed(2);
    }
    for (command, args) in [
        ("bench", "-o xml"),
        ("bench", "-p 0 -n 0"),
        ("bench", "-r 0"),
        ("bench", "-p x"),
        ("inspect", "--bandwidth fast"),
        ("perplexity", "-p short -c 512"),
        ("perplexity", "-p short -c 1"),
    ] {
        let ran = with(command, &model, args);
        assert_eq!(ran.code, 2, "{command} {args}: {ran:?}");
    }
}

#[test]
fn a_run_prints_its_text_alone() {
    let scratch = Scratch::new("text");
    let model = small(scratch.join("m.gguf"));
    let ran = with("run", &model, GREEDY);
    let summary = with("run", &model, &format!("{GREEDY} --json")).json();
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(summary["text"], ran.text().as_str());
    let lines: Vec<&str> = ran.stderr.lines().collect();
    assert_eq!(lines.len(), 1, "one line on stderr: {}", ran.stderr);
    for word in ["tokens/s", "budget", "peak", "read", "hit rate", "seed"] {
        assert!(lines[0].contains(word), "{word}: {}", lines[0]);
    }
    // llama.cpp's other spellings, and values after an equals sign.
    let equals = "--prompt=the --n-predict=12 --temperature=0 --ignore-eos --budget=64M --json";
    let same = with("run", &model, equals).json();
    assert_eq!(same["tokens"], summary["tokens"]);
    // How it is read and by how many makes no difference to the result.
    for other in [
        "--threads 1",
        "--threads 3",
        "--io pread",
        "--buffered",
        "--queue-depth 1",
        "-c 100",
        "--fault seed=3,fail=1%,short=20%,interrupt=10%,late=10%,late_us=500",
    ] {
        let same = with("run", &model, &format!("{GREEDY} --json {other}")).json();
        assert_eq!(same["tokens"], summary["tokens"], "{other}");
        assert_eq!(same["allocations"], 0, "{other}");
    }
}

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

#[test]
fn a_seed_gives_the_same_text_again() {
    let scratch = Scratch::new("seed");
    let model = small(scratch.join("m.gguf"));
    let tokens = |args: &str| {
        let args = format!("-p the -n 24 --ignore-eos --temp 2 --json {args}");
        with("run", &model, &args).json()["tokens"].clone()
    };
    let first = tokens("-s 5");
    assert_eq!(tokens("-s 5"), first);
    assert_eq!(tokens("-s 5 -t 1"), first);
    assert_ne!(tokens("-s 6"), first);
}

#[test]
fn stdin_is_read_when_asked_for() {
    let scratch = Scratch::new("stdin");
    let model = small(scratch.join("m.gguf"));
    let want = with("run", &model, GREEDY).stdout;
    // A stdin that never closes is left alone.
    let mut command = program(["run", "-m"]);
    command.arg(&model).args(GREEDY.split(' '));
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let open = child.stdin.take();
    assert_eq!(finish(child).stdout, want);
    drop(open);
    // So is one that was never there.
    let script = format!("exec \"$0\" run -m \"$1\" {GREEDY} <&-");
    let child = Command::new("sh")
        .args([
            OsStr::new("-c"),
            OsStr::new(&script),
            OsStr::new(BIN),
            model.as_os_str(),
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    assert_eq!(finish(child).stdout, want);
    // "-f -" reads it all, slowly as it may come; a file is the same.
    let mut command = program(["run", "-f", "-", "-m"]);
    command
        .arg(&model)
        .args("-n 12 --temp 0 --ignore-eos".split(' '));
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"t").unwrap();
    thread::sleep(Duration::from_millis(250));
    stdin.write_all(b"he").unwrap();
    drop(stdin);
    assert_eq!(finish(child).stdout, want);
    fs::write(scratch.join("prompt"), "the").unwrap();
    let args = format!(
        "-f {} -n 12 --temp 0 --ignore-eos",
        scratch.join("prompt").display()
    );
    assert_eq!(with("run", &model, &args).stdout, want);
    // An empty prompt starts from BOS.
    let empty = with("run", &model, "-f /dev/null -n 2 --temp 0 --json").json();
    assert_eq!(empty["prompt_tokens"], 1);
}

#[test]
fn signals_stop_it_at_once() {
    let scratch = Scratch::new("signals");
    let model = small(scratch.join("m.gguf"));
    // At this rate one pass takes minutes.
    let reading = "-p the -n 50 --throttle-read 4K";
    for (args, signal, code) in [
        (reading, Signal::SIGTERM, 143),
        (reading, Signal::SIGINT, 130),
        ("-f - -n 4", Signal::SIGTERM, 143),
        ("-f - -n 4", Signal::SIGINT, 130),
    ] {
        for io in ["uring", "pread"] {
            let mut command = program(["run", "--io", io, "-m"]);
            command.arg(&model).args(args.split(' '));
            let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
            let open = child.stdin.take();
            thread::sleep(Duration::from_millis(400));
            send(&child, signal);
            let ran = finish(child);
            assert_eq!(ran.code, code, "{args} --io {io}: {ran:?}");
            assert!(ran.stdout.is_empty(), "{ran:?}");
            drop(open);
        }
    }
    // A benchmark stops its test as well.
    let mut command = program(["bench", "--throttle-read", "100K", "-m"]);
    command
        .arg(&model)
        .args("-p 0 -n 500 -r 9 --budget 64M".split(' '));
    let child = command.spawn().unwrap();
    thread::sleep(Duration::from_millis(400));
    send(&child, Signal::SIGTERM);
    assert_eq!(finish(child).code, 143);
}

#[test]
fn ignored_signals_stay_ignored() {
    let scratch = Scratch::new("nohup");
    let model = small(scratch.join("m.gguf"));
    // Slow enough that the signal comes while it reads.
    let run = GREEDY.replace("-n 12", "-n 1") + " --throttle-read 700K";
    let script = format!("trap '' HUP; exec \"$0\" run -m \"$1\" {run}");
    let child = Command::new("sh")
        .args([
            OsStr::new("-c"),
            OsStr::new(&script),
            OsStr::new(BIN),
            model.as_os_str(),
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The program has looked at all signals once it listens for the last of them.
    await_caught(&child, Signal::SIGTERM);
    thread::sleep(Duration::from_millis(100));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGHUP).unwrap();
    let ran = finish(child);
    assert_eq!(ran.code, 0, "{ran:?}");
}

#[test]
fn a_reader_that_leaves_is_no_reason_to_talk() {
    let scratch = Scratch::new("pipe");
    let model = small(scratch.join("m.gguf"));
    for mode in ["", "--json-stream"] {
        let mut command = program(["run", "-m"]);
        command.arg(&model).args(
            format!("-p the -n 400 --ignore-eos --temp 0 {mode}")
                .split_whitespace()
                .collect::<Vec<_>>(),
        );
        let mut child = command.spawn().unwrap();
        let mut stdout = child.stdout.take().unwrap();
        let mut five = [0; 5];
        stdout.read_exact(&mut five).unwrap();
        drop(stdout);
        let ran = finish(child);
        assert_eq!((ran.code, ran.stderr.as_str()), (141, ""), "{mode}");
    }
    let path = model.to_str().unwrap();
    for args in [
        &["--help"][..],
        &["inspect", "-m", path],
        &["tokenize", "-m", path, "-p", "a"],
    ] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let child = program(args).stdout(writer).spawn().unwrap();
        let ran = finish(child);
        assert_eq!((ran.code, ran.stderr.as_str()), (141, ""), "{args:?}");
    }
}

#[test]
fn a_full_disk_is_told() {
    let scratch = Scratch::new("full");
    let model = small(scratch.join("m.gguf"));
    let path = model.to_str().unwrap();
    for args in [
        &["--help"][..],
        &["run", "-m", path, "-p", "the", "-n", "3"],
        &["run", "-m", path, "-p", "the", "-n", "3", "--json"],
        &["run", "-m", path, "-p", "the", "-n", "3", "--json-stream"],
        &["tokenize", "-m", path, "-p", "a"],
        &["inspect", "-m", path],
        &["verify", "-m", path],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let child = program(args).stdout(full).spawn().unwrap();
        let ran = finish(child);
        assert!(ran.failed(5).contains("stdout"), "{args:?}: {}", ran.stderr);
    }
    // Nobody listens on stderr: the work is done all the same.
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut command = program(["run", "-m", path]);
    let child = command
        .args(GREEDY.split(' '))
        .stderr(full)
        .spawn()
        .unwrap();
    let ran = finish(child);
    assert_eq!(ran.code, 0);
    assert!(!ran.stdout.is_empty());
}

#[test]
fn paths_and_prompts_may_have_any_bytes() {
    let scratch = Scratch::new("bytes");
    let name = OsString::from_vec(b"m\xff\xfe=x.gguf".to_vec());
    let model = small(scratch.join(name));
    let want = with("run", &model, GREEDY);
    assert_eq!(want.code, 0, "{want:?}");
    let mut equals = OsString::from("--model=");
    equals.push(&model);
    let mut command = program([OsStr::new("run"), &equals]);
    command.args(GREEDY.split(' '));
    assert_eq!(finish(command.spawn().unwrap()).stdout, want.stdout);
    // Bytes are tokens 3 and up of the built-in vocabulary.
    let ids = |prompt: &[u8]| {
        let mut command = program(["tokenize", "--ids", "-m"]);
        command.arg(&model).arg("-p");
        command.arg(OsString::from_vec(prompt.to_vec()));
        finish(command.spawn().unwrap()).json()
    };
    assert_eq!(ids(b"\xff"), serde_json::json!([3 + 0xff]));
    assert_eq!(
        ids(b"--x=-"),
        serde_json::json!(b"--x=-".map(|byte| 3 + u32::from(byte)))
    );
    assert_eq!(ids(b"\xef\xa3\xbf").as_array().map(Vec::len), Some(3));
    let refused = with("run", &scratch.join("\u{e9}.gguf"), "-p x");
    assert!(refused.failed(5).contains('\u{e9}'));
}

#[test]
fn models_that_cannot_be_read() {
    let scratch = Scratch::new("unreadable");
    let model = small(scratch.join("m.gguf"));
    let missing = scratch.join("missing.gguf");
    let pipe = scratch.join("pipe.gguf");
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let dir = scratch.join("dir.gguf");
    fs::create_dir(&dir).unwrap();
    for (command, args) in [
        ("run", "-p a"),
        ("inspect", ""),
        ("verify", ""),
        ("tokenize", "-p a"),
        ("bench", ""),
        ("perplexity", "-p a"),
    ] {
        for (path, code) in [(&missing, 5), (&dir, 3), (&pipe, 3)] {
            let name = path.file_name().unwrap().to_str().unwrap();
            let ran = with(command, path, args);
            assert!(ran.failed(code).contains(name), "{command}: {ran:?}");
        }
    }
    let text = scratch.join("missing.txt");
    let ran = with("run", &model, &format!("-f {}", text.display()));
    assert!(ran.failed(5).contains("missing.txt"));
    let ran = with("run", &model, &format!("-f {}", dir.display()));
    assert!(ran.failed(5).contains("dir.gguf"));
    fs::set_permissions(&model, fs::Permissions::from_mode(0o0)).unwrap();
    if File::open(&model).is_ok() {
        eprintln!("skipped: models_that_cannot_be_read: this user may read every file");
        return;
    }
    assert!(with("run", &model, "-p a").failed(5).contains("m.gguf"));
}

#[test]
fn reads_that_fail_for_good_exit_5() {
    let scratch = Scratch::new("fail");
    let model = small(scratch.join("m.gguf"));
    for io in ["uring", "pread"] {
        let args = format!("-p the -n 3 --fault seed=1,fail=100% --io {io}");
        let ran = with("run", &model, &args);
        assert!(ran.failed(5).contains("m.gguf"), "{ran:?}");
    }
}

#[test]
fn hostile_files_exit_3() {
    let scratch = Scratch::new("hostile");
    let whole = fs::read(small(scratch.join("m.gguf"))).unwrap();
    let changed = |at: usize, bytes: &[u8]| {
        let mut file = whole.clone();
        file[at..at + bytes.len()].copy_from_slice(bytes);
        file
    };
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("empty", Vec::new()),
        ("four", b"GGUF".to_vec()),
        (
            "page",
            b"<!DOCTYPE html>\n<html><body>Not Found</body></html>\n".to_vec(),
        ),
        (
            "pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n".to_vec(),
        ),
        ("magic", changed(0, b"GGML")),
        ("version", changed(4, &99u32.to_le_bytes())),
        ("big-endian", changed(4, &3u32.to_be_bytes())),
        ("tensors", changed(8, &u64::MAX.to_le_bytes())),
        ("tensors-some", changed(8, &1_000_000u64.to_le_bytes())),
        ("keys", changed(16, &u64::MAX.to_le_bytes())),
        ("key-length", changed(24, &u64::MAX.to_le_bytes())),
        ("header", whole[..500].to_vec()),
        ("half", whole[..whole.len() / 2].to_vec()),
        ("last-byte", whole[..whole.len() - 64].to_vec()),
        ("zeros", vec![0; 4096]),
    ];
    for (name, bytes) in cases {
        let path = scratch.join(format!("{name}.gguf"));
        fs::write(&path, bytes).unwrap();
        for (command, args) in [
            ("run", "-p a"),
            ("inspect", ""),
            ("verify", ""),
            ("tokenize", "-p a"),
        ] {
            let ran = with(command, &path, args);
            assert_eq!(ran.code, 3, "{command} {name}: {ran:?}");
            assert!(ran.failed(3).contains(&format!("{name}.gguf")), "{ran:?}");
        }
    }
}

#[test]
fn every_cut_and_many_changes_are_refused_or_harmless() {
    let scratch = Scratch::new("mutants");
    let whole = fs::read(small(scratch.join("m.gguf"))).unwrap();
    let path = scratch.join("mutant.gguf");
    let mut state = 1u64;
    let mut next = || {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    for turn in 0..60 {
        let mut file = whole.clone();
        let at = next() % 12_000;
        if turn % 3 == 0 {
            file.truncate(at);
        } else {
            let byte = [0, 0xff, 0x80, next() as u8][turn % 4];
            file[at] = byte;
        }
        fs::write(&path, file).unwrap();
        let ran = with("run", &path, "-p the -n 1 --temp 0 -c 16 --budget 128M");
        assert!(
            [0, 1, 2, 3, 4].contains(&ran.code) && !ran.stderr.contains("panicked"),
            "byte {at} in turn {turn}: {ran:?}"
        );
    }
}

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

#[test]
fn demo_without_python_says_what_to_do() {
    let scratch = Scratch::new("demo");
    let mut command = program(["demo"]);
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
