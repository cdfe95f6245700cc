//! Runs the program itself, as a script would.

use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

/// The program.
pub const BIN: &str = env!("CARGO_BIN_EXE_leanstream");

/// A run that takes longer hangs.
const HANGS: Duration = Duration::from_secs(240);

/// Arguments of a greedy run: runs can be compared.
pub const GREEDY: &str = "-p the -n 12 --temp 0 --ignore-eos --budget 64M";

/// What came of a run.
#[derive(Debug)]
pub struct Ran {
    /// The exit code; 1000 and the signal's number where a signal ended it.
    pub code: i32,
    /// What it wrote to stdout, where that was a pipe.
    pub stdout: Vec<u8>,
    /// What it wrote to stderr.
    pub stderr: String,
    /// The peak of its resident memory as the kernel told its parent, in bytes. The kernel counts what
    /// the process was before it became the program: a copy of this one. So it says something only
    /// in test programs that are small themselves.
    pub max_rss: u64,
}

impl Ran {
    /// The one JSON object on stdout.
    pub fn json(&self) -> Value {
        assert_eq!(self.code, 0, "{}", self.stderr);
        serde_json::from_slice(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// stdout as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Checks the exit code, and that what went wrong was told without a panic or output.
    pub fn failed(&self, code: i32) -> &str {
        assert_eq!(self.code, code, "{self:?}");
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        assert!(
            self.stdout.is_empty(),
            "stdout of a failure: {}",
            self.text()
        );
        assert!(!self.stderr.trim().is_empty(), "a failure says why");
        &self.stderr
    }
}

/// The program with arguments, nothing on stdin, and no settings from around the tests.
pub fn program<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Command {
    let mut command = Command::new(BIN);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    for name in [
        "LEANSTREAM_SEAL",
        "LEANSTREAM_ISA",
        "LEANSTREAM_BENCH_ONE",
        "LEANSTREAM_BENCH_ALONE",
    ] {
        command.env_remove(name);
    }
    command
}

/// Runs the program to its end.
pub fn run<A: AsRef<OsStr>>(args: impl IntoIterator<Item = A>) -> Ran {
    finish(program(args).spawn().expect("the program starts"))
}

/// A subcommand with a model and further arguments separated by spaces.
pub fn with(subcommand: &str, model: &Path, args: &str) -> Ran {
    let mut command = program([subcommand, "-m"]);
    command.arg(model).args(args.split_whitespace());
    finish(command.spawn().expect("the program starts"))
}

/// Waits for the end and gathers what is left of stdout and stderr.
pub fn finish(mut child: Child) -> Ran {
    fn gather(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<Vec<u8>> {
        thread::spawn(move || {
            let mut bytes = Vec::new();
            if let Some(mut from) = from {
                from.read_to_end(&mut bytes).expect("its output");
            }
            bytes
        })
    }
    let (stdout, stderr) = (gather(child.stdout.take()), gather(child.stderr.take()));
    let (status, max_rss) = wait(&child);
    Ran {
        code: status
            .code()
            .unwrap_or_else(|| 1000 + status.signal().unwrap_or(0)),
        stdout: stdout.join().expect("no panic"),
        stderr: String::from_utf8_lossy(&stderr.join().expect("no panic")).into_owned(),
        max_rss,
    }
}

/// `wait4`, which tells the peak of the child's memory as well.
fn wait(child: &Child) -> (ExitStatus, u64) {
    let pid = child.id() as i32;
    let start = Instant::now();
    loop {
        let mut status = 0;
        // SAFETY: rusage is plain numbers, for which zeros are a value.
        let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to locals that live through the call; nobody else waits for the
        // child, so the number is still its.
        let done = unsafe { libc::wait4(pid, &mut status, libc::WNOHANG, &mut usage) };
        assert!(done >= 0, "wait4: {}", std::io::Error::last_os_error());
        if done == pid {
            return (ExitStatus::from_raw(status), usage.ru_maxrss as u64 * 1024);
        }
        if start.elapsed() > HANGS {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            panic!("the program hangs");
        }
        thread::sleep(Duration::from_millis(3));
    }
}

/// Whether `signal` is in a mask of a process, as the kernel's table calls it.
fn in_mask(process: &str, mask: &str, signal: Signal) -> bool {
    let path = format!("/proc/{process}/status");
    let status = std::fs::read_to_string(path).expect("a running process");
    let mask = status.lines().find_map(|l| l.strip_prefix(mask));
    let mask = u64::from_str_radix(mask.expect("a mask").trim(), 16).expect("a mask");
    mask >> (signal as i32 - 1) & 1 == 1
}

/// Waits until the child has a handler for `signal`.
pub fn await_caught(child: &Child, signal: Signal) {
    let start = Instant::now();
    let process = child.id().to_string();
    while !in_mask(&process, "SigCgt:", signal) {
        assert!(start.elapsed() < HANGS, "it never listens");
        thread::sleep(Duration::from_millis(2));
    }
}

/// Whether `signal` is ignored here, as SIGINT is in what a shell runs in the background: then it is in every child,
/// and stays so.
pub fn ignored(signal: Signal) -> bool {
    let ignored = in_mask("self", "SigIgn:", signal);
    if ignored {
        println!("skipped: {signal} is ignored where these tests run");
    }
    ignored
}

/// Sends a signal, once the child listens.
pub fn send(child: &Child, signal: Signal) {
    await_caught(child, signal);
    kill(Pid::from_raw(child.id() as i32), signal).expect("a running child");
}

/// Checks that an object has keys.
pub fn assert_keys(object: &Value, wanted: &[&str]) {
    let object = object.as_object().expect("an object");
    let has: Vec<&str> = object.keys().map(String::as_str).collect();
    for key in wanted {
        assert!(has.contains(key), "no {key} in {has:?}");
    }
}

/// A small model: some hundred thousand weights.
pub fn small(path: PathBuf) -> PathBuf {
    let spec = Spec::small(Arch::Llama, QuantType::Q4_0, 9);
    spec.write(&Vocab::BuiltIn, &path).expect("a model");
    path
}

/// A model of 27 MB that needs some 10 MiB at least.
pub fn larger(path: PathBuf) -> PathBuf {
    let spec = Spec {
        ff: 2048,
        layers: 14,
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 10)
    };
    spec.write(&Vocab::BuiltIn, &path).expect("a model");
    path
}
