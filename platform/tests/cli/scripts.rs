//! Signals, pipes and disks: what happens around the program.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::Scratch;
use crate::common::cli::{BIN, GREEDY, await_caught, finish, ignored, program, send, small};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

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
        if ignored(signal) {
            continue;
        }
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
    // A benchmark stops its test as well, and while it measures the storage.
    for budgets in ["64M", "64M,65M"] {
        let child = slow_bench(&model, budgets);
        thread::sleep(Duration::from_millis(400));
        send(&child, Signal::SIGTERM);
        assert_eq!(finish(child).code, 143, "{budgets}");
    }
}

fn slow_bench(model: &Path, budgets: &str) -> Child {
    let mut command = program(["bench", "--throttle-read", "100K", "-m"]);
    command
        .arg(model)
        .args("-p 0 -n 500 -r 9 --budget".split(' '))
        .arg(budgets);
    command.spawn().unwrap()
}

/// A benchmark of one row becomes its test: there is no second process that takes memory beside it.
#[test]
fn a_single_test_is_alone() {
    let scratch = Scratch::new("alone");
    let model = small(scratch.join("m.gguf"));
    let child = slow_bench(&model, "64M");
    let of = |file: &str| fs::read(format!("/proc/{}/{file}", child.id())).unwrap();
    let name = b"LEANSTREAM_BENCH_ALONE=";
    let start = Instant::now();
    while !of("environ").windows(name.len()).any(|part| part == name) {
        assert!(
            start.elapsed() < Duration::from_secs(120),
            "it starts another"
        );
        thread::sleep(Duration::from_millis(20));
    }
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

/// A closed stdout is replaced by /dev/null before `main`: it used to swallow the text and exit 0.
#[test]
fn a_closed_stdout_is_told_and_dev_null_is_not() {
    let scratch = Scratch::new("closed");
    let model = small(scratch.join("m.gguf"));
    let shell = |redirect: &str, args: &str| {
        let script = format!("exec \"$0\" {args} -m \"$1\" {redirect}");
        let mut command = Command::new("sh");
        command.args([OsStr::new("-c"), OsStr::new(&script), OsStr::new(BIN)]);
        command.arg(&model).stdout(Stdio::piped());
        finish(command.stderr(Stdio::piped()).spawn().unwrap())
    };
    let run = format!("run {GREEDY}");
    let bench = "bench --budget 64M -p 0 -n 2 -r 1";
    for args in [
        run.as_str(),
        &format!("{run} --json"),
        "tokenize -p a",
        bench,
    ] {
        let ran = shell(">&-", args);
        assert!(ran.failed(5).contains("stdout"), "{args}: {}", ran.stderr);
        // The null device, also as some callers open it.
        for null in [">/dev/null", "1<>/dev/null", "</dev/null >/dev/null 2>&1"] {
            let ran = shell(null, args);
            assert_eq!(ran.code, 0, "{args} {null}: {ran:?}");
        }
    }
}

/// In a mount namespace without /proc, where there was one the peak used to be 0.
#[test]
fn the_peak_is_told_without_proc() {
    let scratch = Scratch::new("proc");
    let model = small(scratch.join("m.gguf"));
    let hide = "mount -t tmpfs none /proc && ! test -e /proc/self && echo hidden >&2 && ";
    let script = format!("{hide} exec \"$0\" run -m \"$1\" {GREEDY} --json");
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", &script, BIN])
        .arg(&model);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let ran = match command.spawn() {
        Ok(child) => finish(child),
        Err(error) => return eprintln!("skipped: the_peak_is_told_without_proc: {error}"),
    };
    if !ran.stderr.contains("hidden") {
        return eprintln!("skipped: the_peak_is_told_without_proc: {}", ran.stderr);
    }
    let peak = ran.json()["peak_rss_bytes"].as_u64().unwrap();
    assert!((1 << 20..1 << 40).contains(&peak), "{peak}");
}
