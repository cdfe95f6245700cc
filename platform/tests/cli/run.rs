//! `run`: what goes in, and the text that comes out.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Write;
use std::os::unix::ffi::OsStringExt;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use crate::common::Scratch;
use crate::common::cli::{BIN, GREEDY, finish, program, small, with};

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
fn more_tokens_than_fit_are_not_cut_in_silence() {
    let scratch = Scratch::new("huge");
    let model = small(scratch.join("m.gguf"));
    // The prompt is two tokens, and the model was made for 512.
    for (args, fitting) in [
        ("-n 100000000000", "511 tokens"),
        ("-n 512", "511 tokens"),
        ("-n 30 -c 20", "19 tokens"),
    ] {
        let args = format!("-p the --ignore-eos --temp 0 {args} --json");
        let ran = with("run", &model, &args);
        let told = ran.json();
        assert_eq!(told["stop"], "context");
        let fits = format!("{} tokens", told["tokens"].as_array().unwrap().len());
        assert_eq!(fits, fitting);
        assert!(ran.stderr.contains(fitting), "{}", ran.stderr);
        assert_eq!(ran.stderr.contains("-c"), args.contains("-c"));
        assert_eq!(ran.stderr.lines().count(), 2, "{}", ran.stderr);
    }
    for fits in ["-n 19 -c 20", "-n -1 -c 20"] {
        let args = format!("-p the --ignore-eos --temp 0 {fits}");
        let ran = with("run", &model, &args);
        assert_eq!((ran.code, ran.stderr.lines().count()), (0, 1), "{ran:?}");
    }
}
