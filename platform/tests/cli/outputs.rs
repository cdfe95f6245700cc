//! Outputs: never what is read, nor two under one name, nor anything but a file, nor another process's.

use std::fs::{self, File};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::common::Scratch;
use crate::common::adapters;
use crate::common::cli::{Ran, larger, run, with};

const TEXT: &str = "the cat sat on the mat and the dog sat on the log; ";

fn packed(model: &Path, out: &Path, more: &str) -> Ran {
    let (model, out) = (model.display(), out.display());
    let line = format!("pack {model} {out} {more}");
    run(line.split_whitespace())
}

/// A model, an adapter of it, its pack, and a text.
struct Lab {
    scratch: Scratch,
    model: PathBuf,
    adapter: PathBuf,
    pack: PathBuf,
    text: PathBuf,
}

impl Lab {
    fn new(test: &str) -> Self {
        let scratch = Scratch::new(test);
        let model = larger(scratch.join("m.gguf"));
        let (adapter, pack) = (scratch.join("a.gguf"), scratch.join("m.lean"));
        adapters::make(&model, adapters::all, 1, &adapter);
        assert_eq!(packed(&model, &pack, "").code, 0);
        let text = scratch.join("text");
        fs::write(&text, TEXT.repeat(20)).expect("a text");
        Self {
            scratch,
            model,
            adapter,
            pack,
            text,
        }
    }

    fn tune(&self, out: &Path, more: &str) -> Ran {
        let text = self.text.display();
        let args = format!(
            "--data {text} --seq 64 --steps 1 --budget 300M {more} -o {}",
            out.display()
        );
        with("tune", &self.model, &args)
    }

    /// Each command that makes a large file, asked for `out`.
    fn each(&self, out: &Path) -> [(&'static str, Ran); 4] {
        let name = out.display();
        let merge = format!("--lora {} -o {name}", self.adapter.display());
        let trace = format!("-p abcdefgh -n 3 --budget 64M -o {name}");
        [
            ("tune", self.tune(out, "")),
            ("merge", with("merge", &self.model, &merge)),
            ("pack", packed(&self.model, out, "")),
            ("trace", with("trace", &self.pack, &trace)),
        ]
    }
}

#[test]
fn what_is_no_file_is_not_replaced() {
    let lab = Lab::new("outputs-no-file");
    let out = lab.scratch.join("socket");
    let _socket = UnixListener::bind(&out).expect("a socket");
    let folder = lab.scratch.join("folder");
    fs::create_dir(&folder).expect("a folder");
    for (out, why) in [
        (out.as_path(), "is no file"),
        (Path::new("/dev/null"), "is no file"),
        (&folder, "is a directory"),
    ] {
        let plot = lab.scratch.join("a2.gguf");
        let plot = lab.tune(&plot, &format!("--plot {}", out.display()));
        for (command, ran) in lab.each(out).into_iter().chain([("plot", plot)]) {
            let told = ran.failed(2);
            // By the name that was given, and not that of the file it would grow in.
            assert!(
                told.contains(why) && !told.contains(".tmp"),
                "{command}: {told}"
            );
            let meta = fs::symlink_metadata(out).expect("it is there");
            assert!(!meta.is_file(), "{command}");
        }
    }
    let nowhere = lab.scratch.join("no/out");
    let trace = format!("-p abcdefgh -n 3 --budget 64M -o {}", nowhere.display());
    let ran = with("trace", &lab.pack, &trace);
    assert!(ran.failed(5).contains("no/out: cannot"), "{}", ran.stderr);
}

#[test]
fn one_process_writes_a_file() {
    let lab = Lab::new("outputs-alone");
    let out = lab.scratch.join("out");
    let other = File::create(lab.scratch.join("out.tmp")).expect("another's file");
    other.lock().expect("a lock");
    for (command, ran) in lab.each(&out) {
        let told = ran.failed(5);
        assert!(
            told.contains("another process is writing it"),
            "{command}: {told}"
        );
        assert!(!out.exists(), "{command}");
    }
    drop(other);
    for (command, ran) in lab.each(&out) {
        assert_eq!(ran.code, 0, "{command}: {ran:?}");
    }
}

#[test]
fn what_is_read_is_not_written() {
    let mut lab = Lab::new("outputs-read");
    let before = fs::read(&lab.text).expect("the text");
    for ending in ["", ".ckpt", ".tmp", ".ckpt.tmp"] {
        lab.text = lab.scratch.join(format!("t{ending}"));
        fs::write(&lab.text, &before).expect("the text");
        let ran = lab.tune(&lab.scratch.join("t"), "");
        assert!(ran.failed(2).contains("which is read"), "{ending}: {ran:?}");
        assert_eq!(fs::read(&lab.text).ok().as_ref(), Some(&before), "{ending}");
    }
    for option in ["--calibrate", "--quality"] {
        let text = lab.text.display();
        let ran = packed(&lab.model, &lab.text, &format!("{option} {text}"));
        assert!(ran.failed(2).contains("which is read"), "{option}: {ran:?}");
        assert_eq!(fs::read(&lab.text).ok().as_ref(), Some(&before), "{option}");
    }
}

#[test]
fn no_two_outputs_have_one_name() {
    let lab = Lab::new("outputs-twice");
    let out = lab.scratch.join("o.gguf");
    let name = out.display();
    for more in [
        format!("--log {name}"),
        format!("--plot {name}"),
        format!("--log {name}.ckpt"),
        format!("--log {name}.tmp"),
        format!("--log {name}.log --plot {name}.log"),
    ] {
        let ran = lab.tune(&out, &more);
        assert!(ran.failed(2).contains("is written as"), "{more}: {ran:?}");
        assert!(!out.exists(), "{more}");
    }
}

#[test]
fn an_adapter_is_no_model() {
    let lab = Lab::new("outputs-adapter");
    let ran = with("run", &lab.adapter, "-p x -n 1");
    assert!(ran.failed(3).contains("--lora"), "{ran:?}");
}
