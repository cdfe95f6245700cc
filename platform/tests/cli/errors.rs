//! Files that can't be read or aren't what they say.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;

use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;

use crate::common::Scratch;
use crate::common::cli::{finish, program, small, with};
use crate::common::packs::Read;

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

/// A failing device used to end as a damaged file when the read was of a unit or of a head's row.
#[test]
fn a_failing_device_is_told_from_a_damaged_pack() {
    let scratch = Scratch::new("fail-units");
    let (from, pack) = (scratch.join("m.gguf"), scratch.join("m.lean"));
    let spec = Spec {
        vocab: 2500,
        ..Spec::small(Arch::Llama, QuantType::Q4_0, 9)
    };
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    for (packing, args, what) in [
        ("units", "--budget ffn:20%", "of layer 1"),
        ("matrices", "--head exact", "of the head"),
    ] {
        let mut command = program(["pack", "--ffn", packing]);
        let packed = finish(command.arg(&from).arg(&pack).spawn().unwrap());
        assert_eq!(packed.code, 0, "{packed:?}");
        let run = |more: &str| {
            let common = "-p the -n 60 --temp 1.3 -s 1 --ignore-eos --json";
            with("run", &pack, &format!("{common} {args} {more}"))
        };
        // Few enough reads fail that the matrices come in, so many that a unit fails three times.
        let found = (1..40).any(|seed| {
            let ran = run(&format!("--fault seed={seed},fail=20%"));
            if ran.code == 0 {
                return false;
            }
            let said = ran.failed(5);
            assert!(
                said.contains("m.lean") && said.contains("injected fault"),
                "{said}"
            );
            said.contains(what)
        });
        assert!(found, "nothing {what} ever failed");
        // Bytes that come and are wrong.
        let sound = Read::open(&pack);
        let place = match sound.layers.get(1) {
            Some(layer) => layer.units,
            None => sound.head.expect("a head").units,
        };
        let mut file = sound.file;
        let bytes = place.offset as usize..(place.offset + place.bytes) as usize;
        file[bytes].iter_mut().for_each(|byte| *byte ^= 0x55);
        fs::write(&pack, file).unwrap();
        let ran = run("");
        let said = ran.failed(3);
        assert!(
            said.contains(what) && said.contains("checksum is wrong"),
            "{said}"
        );
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
