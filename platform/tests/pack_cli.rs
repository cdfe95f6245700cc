//! `leanstream pack` as scripts see it, and what `verify` and `inspect` say of packs.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use common::Scratch;
use common::cli::{BIN, Ran, finish, larger, program, small, with};
use common::packs::{Read, TEXT, reseal};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::gguf::Gguf;
use leanstream_core::quant::QuantType;
use serde_json::Value;

fn pack(from: &Path, to: &Path, args: &str) -> Ran {
    let mut command = program(["pack"]);
    command.arg(from).arg(to).args(args.split_whitespace());
    finish(command.spawn().expect("the program starts"))
}

#[test]
fn a_pack_is_made_checked_and_shown() {
    let scratch = Scratch::new("pack-cli");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    let ran = pack(&from, &to, "--json");
    let object = ran.json();
    assert_eq!(ran.stderr.lines().count(), 1, "{}", ran.stderr);
    assert_eq!(object["bytes"], fs::metadata(&to).unwrap().len());
    assert_eq!(object["down"], "moved");
    assert_eq!(object["down_loss"], 0.0);
    assert_eq!(object["order"], "frequency");
    // A Q4_0 row of 256 and half a byte for each of 256 values.
    assert_eq!(object["unit_bytes"], 144 + 128 + 4);
    assert_eq!(
        object["active_share"]["layers"].as_array().unwrap().len(),
        2
    );
    let mean = object["active_share"]["mean"].as_f64().unwrap();
    assert!((0.3..0.7).contains(&mean), "{mean}");
    assert!(object["calibration_tokens"].as_u64().unwrap() > 1000);
    assert_eq!(scratch.names(), ["model.gguf", "model.lean"]);

    let sum = with("verify", &from, "--sha256 --json").json()["sha256"][0].clone();
    assert_eq!(object["source_sha256"], sum);
    let checked = with("verify", &to, "--blocks --json").json();
    // Two layers of 512 neurons, and the head.
    let head = Read::open(&to).head.unwrap().count;
    assert_eq!(checked["units_checked"], 2 * 512 + head);
    assert_eq!(checked["header_checked"], true);
    assert_eq!(checked["source_sha256"], sum);
    let said = with("verify", &to, "").text();
    assert!(
        said.contains("units: ok") && said.contains(sum.as_str().unwrap()),
        "{said}"
    );

    let shown = with("inspect", &to, "--no-tensors");
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    let text = shown.text();
    assert!(
        text.contains("2 layers of 512 units of 276 bytes") && text.contains("frequency order"),
        "{text}"
    );
    let object = with("inspect", &to, "--json").json();
    assert_eq!(object["pack"]["layers"][1]["down"], "Q4_0");

    // A plain model is neither.
    assert!(with("inspect", &from, "--json").json()["pack"].is_null());
    assert!(with("verify", &from, "--json").json()["units_checked"].is_null());

    // Without --json nothing goes to stdout.
    let ran = pack(&from, &to, "--calibrate none --down q4_0 --threads 1");
    assert_eq!((ran.code, ran.stdout.len()), (0, 0), "{ran:?}");
    assert!(
        ran.stderr.contains("a relative loss of 0.0") && ran.stderr.contains("not calibrated"),
        "{}",
        ran.stderr
    );
}

/// A flipped bit is found wherever it is, also where every value would be a right one.
#[test]
fn every_tensor_of_a_pack_has_a_checksum() {
    let scratch = Scratch::new("pack-crcs");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    assert_eq!(pack(&from, &to, "--calibrate none").code, 0);
    assert_eq!(with("verify", &to, "--blocks").code, 0);
    let sound = fs::read(&to).unwrap();
    let parsed = Gguf::parse(&sound, sound.len() as u64).expect("a pack");
    let tensors: Vec<_> = parsed
        .tensors()
        .map(|tensor| (tensor.name.to_owned(), tensor.offset, tensor.bytes))
        .collect();
    assert!(tensors.iter().any(|(name, ..)| name == "blk.1.ffn_stats"));
    for (name, offset, bytes) in tensors {
        let mut file = sound.clone();
        // The last byte of a block is a weight's, or of a number its sign and exponent.
        file[(offset + bytes) as usize - 1] ^= 1;
        fs::write(&to, file).unwrap();
        let ran = with("verify", &to, "--blocks");
        assert!(!ran.failed(3).is_empty(), "{name}");
        if name.contains("attn_q") || name == "token_embd.weight" {
            let said = format!("tensor {name} isn't what was packed");
            assert!(ran.stderr.contains(&said), "{}", ran.stderr);
        }
    }
    // A key that doesn't fit is damage too.
    let key = b"lean.tensors.crc32c";
    let at = sound.windows(key.len()).position(|w| w == key).unwrap();
    let mut file = sound.clone();
    file[at + key.len() + 4] = 5;
    reseal(&mut file);
    fs::write(&to, file).unwrap();
    assert!(
        with("verify", &to, "--blocks")
            .failed(3)
            .contains("lean.tensors.crc32c")
    );
}

/// Damage that leaves a header readable, such as a bit of a rotary base, used to pass.
#[test]
fn a_damaged_header_is_found_without_reading_blocks() {
    let scratch = Scratch::new("pack-header");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    assert_eq!(pack(&from, &to, "--calibrate none").code, 0);
    let sound = fs::read(&to).unwrap();
    let spoil = |key: &str, value: &[u8]| {
        let at = sound.windows(key.len()).position(|w| w == key.as_bytes());
        let at = at.unwrap_or_else(|| panic!("no {key}")) + key.len() + 4;
        let mut file = sound.clone();
        file[at..at + value.len()].copy_from_slice(value);
        assert!(file != sound, "{key}");
        fs::write(&to, file).unwrap();
        with("verify", &to, "")
    };
    for (key, value) in [
        ("llama.rope.freq_base", &10001f32.to_le_bytes()[..]),
        ("lean.version", &[3]),
        ("lean.header.bytes", &[1]),
        ("lean.header.crc32c", &[0; 4]),
    ] {
        let ran = spoil(key, value);
        let said = ran.failed(3);
        assert!(
            said.contains("model.lean: its header isn't what was packed"),
            "{said}"
        );
    }
}

/// A trace says which model it is of; a head alone uses no units.
#[test]
fn a_trace_names_the_source() {
    let scratch = Scratch::new("pack-trace");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    let packed = pack(&from, &to, "--json --calibrate none").json();
    let trace = scratch.join("t.trace");
    let args = format!("-p abcdef -n 3 --budget 64M -o {}", trace.display());
    assert_eq!(with("trace", &to, &args).code, 0);
    let file = fs::read(&trace).unwrap();
    let hex: String = file[40..72]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    assert_eq!(packed["source_sha256"], hex.as_str());
    assert_eq!(pack(&from, &to, "--ffn matrices").code, 0);
    let ran = with("trace", &to, &format!("{args} --head exact"));
    assert!(ran.failed(2).contains("has no units to record"), "{ran:?}");
}

/// What has room in a budget, and what a token reads beside it by the calibration.
#[test]
fn a_plan_tells_what_units_have_room_and_what_is_read() {
    let scratch = Scratch::new("pack-plan");
    let from = scratch.join("model.gguf");
    let to = scratch.join("model.lean");
    let spec = Spec {
        d: 256,
        ff: 1024,
        layers: 6,
        vocab: 2500,
        activation: Some("relu"),
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 7)
    };
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    assert_eq!(pack(&from, &to, "").code, 0);
    let read = Read::open(&to);
    let mut units: Vec<f32> = Vec::new();
    for layer in &read.layers {
        let stats = read.floats(layer.stats);
        units.extend(&stats[..layer.count as usize]);
    }
    units.sort_by(|a, b| b.total_cmp(a));
    let used: f64 = units.iter().map(|share| f64::from(*share)).sum();
    let near = |a: f64, b: f64| (a - b).abs() <= 1e-3 * b.abs() + 1.0;

    let list = "ffn:0%,ffn:25%,ffn:50%,ffn:100%";
    let plans = with("inspect", &to, &format!("--json -t 1 --budget {list}")).json();
    for (plan, least) in plans["plans"]
        .as_array()
        .unwrap()
        .iter()
        .zip([0, 25, 50, 100])
    {
        let number = |key: &str| plan[key].as_f64().expect(key);
        let of = |key: &str| plan["units"][key].as_f64().expect(key);
        assert_eq!(of("count"), 6.0 * 1024.0);
        assert!(of("share") * 100.0 >= f64::from(least), "{plan}");
        let slots = of("slots") as usize;
        let missing = units.iter().skip(slots).map(|share| f64::from(*share));
        let missing: f64 = missing.sum();
        let bytes = of("bytes_per_token");
        assert!(near(of("used_per_token"), used), "{plan}");
        assert!(near(of("missing_per_token"), missing), "{missing} {plan}");
        // With what is read along.
        let units = missing * f64::from(read.layers[0].unit_bytes);
        assert!(
            bytes >= units && bytes < 3.0 * units + 1.0,
            "{units} {plan}"
        );
        assert_eq!(bytes == 0.0, least == 100);
        let dense = number("weights_bytes") - number("resident_bytes");
        assert!(
            near(number("streamed_bytes_per_token"), dense + bytes),
            "{plan}"
        );
        assert!(number("least_budget_bytes") < number("budget_bytes"));
        assert!(plan["head_sketch_bytes"].is_null());
    }
    let least = plans["plans"][0]["least_budget_bytes"].as_u64().unwrap();
    let run = |args: &str| with("run", &to, &format!("-p the -n 2 -c 512 -t 1 {args}")).code;
    assert_eq!(run(&format!("--budget {}", least + (1 << 20))), 0);
    assert_eq!(run(&format!("--budget {}", least - (1 << 20))), 4);

    // Of what is missing, a sparse run reads a part.
    let plan = |args: &str| {
        with("inspect", &to, &format!("--json -t 1 {args}")).json()["plans"][0].clone()
    };
    let all = plan("--budget ffn:25%")["units"]["missing_per_token"].clone();
    let half = plan("--budget ffn:25% --keep 0.5")["units"]["missing_per_token"].clone();
    assert!(near(all.as_f64().unwrap(), 2.0 * half.as_f64().unwrap()));
    let sketched = plan("--budget ffn:25% --head exact");
    assert_eq!(sketched["head"], "exact");
    assert_eq!(
        sketched["head_sketch_bytes"],
        read.head.unwrap().sketch.bytes
    );

    let text = with("inspect", &to, "--no-tensors --budget ffn:25% --head fast").text();
    for what in [
        "of 6144 units",
        "the head's sketch of",
        "tokens/s at",
        "the least is",
    ] {
        assert!(text.contains(what), "{text}");
    }
}

/// `--ffn matrices` packs the head alone.
#[test]
fn a_head_alone_is_packed_checked_and_shown() {
    let scratch = Scratch::new("pack-head");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    let object = pack(&from, &to, "--ffn matrices --json").json();
    assert_eq!(object["ffn"], "matrices");
    assert_eq!(object["head"], "sketch");
    assert_eq!(object["bytes"], fs::metadata(&to).unwrap().len());
    assert!(object["down"].is_null() && object["calibration_tokens"].is_null());
    let read = Read::open(&to);
    let head = read.head.unwrap();
    assert_eq!(read.layers.len(), 0);
    assert_eq!(object["unit_bytes"], head.unit_bytes);
    let checked = with("verify", &to, "--blocks --json").json();
    assert_eq!(checked["units_checked"], head.count);
    let text = with("inspect", &to, "--no-tensors").text();
    assert!(text.contains("feed-forward networks as matrices"), "{text}");
    let shown = with("inspect", &to, "--json --head exact").json();
    assert_eq!(shown["pack"]["ffn"], "matrices");
    assert_eq!(shown["plans"][0]["head_rows"], head.count);
    assert_eq!(shown["pack"]["layers"].as_array().unwrap().len(), 0);
    assert_eq!(with("inspect", &from, "--json").json()["pack"], Value::Null);

    // A damaged row of the head is found, and so is a matrix that isn't there.
    let mut file = read.file.clone();
    file[(head.units.offset + head.units.bytes) as usize - 1] ^= 1;
    fs::write(&to, &file).unwrap();
    let said = with("verify", &to, "").failed(3).to_owned();
    assert!(said.contains("of the head"), "{said}");
    let name = b"blk.1.ffn_down.weight";
    let at = |file: &[u8]| file.windows(name.len()).position(|part| part == name);
    let mut file = read.file.clone();
    let at = at(&file).expect("the matrix's name");
    file[at + 10] = b'x';
    reseal(&mut file);
    fs::write(&to, &file).unwrap();
    for command in ["verify", "inspect"] {
        let said = with(command, &to, "").failed(3).to_owned();
        assert!(said.contains("blk.1.ffn_down.weight is missing"), "{said}");
    }

    for args in [
        "--down q4_0",
        "--gates sketch",
        "--order file",
        "--calibrate none",
    ] {
        let ran = pack(&from, &to, &format!("--ffn matrices {args}"));
        assert!(ran.failed(2).contains("is about units"), "{}", ran.stderr);
    }
    let ran = pack(&from, &to, "--ffn none");
    assert!(ran.failed(2).contains("units or matrices"));
    assert_eq!(pack(&from, &to, "--ffn matrices").code, 0);
    for args in ["--keep 0.5", "--policy lfu", "--budget ffn:50%"] {
        let ran = with("run", &to, &format!("-p the -n 2 {args}"));
        assert!(ran.failed(2).contains("whose neurons are packed"), "{args}");
    }
}

#[test]
fn damage_is_named() {
    let scratch = Scratch::new("pack-damage");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    assert_eq!(pack(&from, &to, "--calibrate none").code, 0);
    let sound = Read::open(&to);
    let (layer, head) = (sound.layers[1], sound.head.unwrap());
    let spoil = |at: u64| {
        let mut file = sound.file.clone();
        file[at as usize] ^= 4;
        fs::write(&to, file).unwrap();
        let ran = with("verify", &to, "");
        ran.failed(3).to_owned()
    };
    let units = u64::from(layer.unit_bytes);
    // In the up row, in the column, in the CRC itself, in the last unit of all.
    for at in [1, 200, units - 1] {
        let said = spoil(layer.units.offset + 37 * units + at);
        assert!(
            said.contains("unit 37 of layer 1") && said.contains("pack the model again"),
            "{said}"
        );
    }
    let said = spoil(head.units.offset + head.units.bytes - 1);
    assert!(
        said.contains(&format!("unit {} of the head", head.count - 1)),
        "{said}"
    );
    let said = spoil(layer.order.offset);
    assert!(said.contains("blk.1.ffn_order says that unit"), "{said}");

    // A version that isn't known.
    let key = b"lean.version";
    let at = sound
        .file
        .windows(key.len())
        .position(|part| part == key)
        .unwrap();
    let mut file = sound.file.clone();
    file[at + key.len() + 4] = 3;
    reseal(&mut file);
    fs::write(&to, &file).unwrap();
    let said = with("verify", &to, "").failed(3).to_owned();
    assert!(
        said.contains("version 3 of the format, this program reads versions 1 to 2"),
        "{said}"
    );
    // Cut short.
    fs::write(&to, &sound.file[..sound.file.len() - 5000]).unwrap();
    let said = with("verify", &to, "").failed(3).to_owned();
    assert!(said.contains("truncated"), "{said}");
}

#[test]
fn what_cannot_be_packed_is_told() {
    let scratch = Scratch::new("pack-refused");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    for (args, message) in [
        (
            "--down q4_k",
            "columns can't be quantized to 'q4_k'; auto, q8_0, q5_0 or q4_0",
        ),
        (
            "--order random",
            "'random' is not an order; frequency, coactivation or file",
        ),
        ("--order coactivation --calibrate none", "needs calibration"),
        ("--budget lots", "--budget"),
        ("--threads 0", "from 1 to 1024"),
    ] {
        let ran = pack(&from, &to, args);
        assert!(ran.failed(2).contains(message), "{args}: {}", ran.stderr);
    }
    let empty = scratch.join("empty.txt");
    fs::write(&empty, "").unwrap();
    let ran = pack(&from, &to, &format!("--calibrate {}", empty.display()));
    assert!(
        ran.failed(2).contains("less than two tokens"),
        "{}",
        ran.stderr
    );
    let ran = pack(&from, &from, "");
    assert!(ran.failed(2).contains("which is read"), "{}", ran.stderr);
    let ran = pack(&scratch.join("none.gguf"), &to, "");
    assert!(ran.failed(5).contains("none.gguf"), "{}", ran.stderr);
    let ran = pack(&empty, &to, "");
    assert!(ran.failed(3).contains("empty"), "{}", ran.stderr);
    let ran = pack(&from, &scratch.join("no/such/model.lean"), "");
    assert!(
        ran.failed(5).contains("no/such/model.lean"),
        "{}",
        ran.stderr
    );
    let ran = finish(program(["pack"]).arg(&from).spawn().unwrap());
    ran.failed(2);
    assert_eq!(scratch.names(), ["empty.txt", "model.gguf"]);

    assert_eq!(pack(&from, &to, "--calibrate none").code, 0);
    let ran = pack(&to, &scratch.join("again.lean"), "");
    assert!(
        ran.failed(3).contains("is a pack already"),
        "{}",
        ran.stderr
    );
}

/// The least budget that a refusal names does, and the process stays within it.
#[test]
fn the_budget_holds() {
    let scratch = Scratch::new("pack-budget");
    let from = larger(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    // Few words: with the least budget, every batch reads the whole model.
    let text = scratch.join("text.txt");
    fs::write(&text, TEXT).unwrap();
    let text = format!("--threads 2 --calibrate {}", text.display());
    let mut budget = "1M".to_owned();
    let mut refusals = 0;
    let object = loop {
        let ran = pack(&from, &to, &format!("--json {text} --budget {budget}"));
        if ran.code == 0 {
            break ran.json();
        }
        let said = ran.failed(4);
        let (_, rest) = said.split_once("(--budget ").expect("the least budget");
        budget = rest.split_once(')').expect("the least budget").0.to_owned();
        refusals += 1;
        // One refusal by packing itself, some by what calibration needs.
        assert!(refusals < 6, "the least budget keeps growing: {budget}");
        assert_eq!(scratch.names(), ["model.gguf", "text.txt"]);
    };
    assert!(refusals > 0);
    let peak = object["peak_rss_bytes"].as_u64().unwrap();
    let budget = object["budget_bytes"].as_u64().unwrap();
    assert!(peak <= budget, "{peak} of {budget}");
    assert!(budget < 24 << 20, "{budget}");
    // And the pack is the one that a rich machine makes.
    let rich = scratch.join("rich.lean");
    assert_eq!(pack(&from, &rich, &text).code, 0);
    assert!(fs::read(&to).unwrap() == fs::read(&rich).unwrap());
}

/// As on a full disk: the file may not grow past a limit.
#[test]
fn a_full_disk_leaves_nothing() {
    let scratch = Scratch::new("pack-full");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    fs::write(&to, "older").unwrap();
    let limited = Command::new("sh")
        .args([
            "-c",
            "trap '' XFSZ; ulimit -f 200; exec \"$@\"",
            "sh",
            BIN,
            "pack",
        ])
        .arg(&from)
        .arg(&to)
        .args(["--calibrate", "none"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let ran = finish(limited);
    assert!(
        ran.failed(5).contains("model.lean: cannot write"),
        "{}",
        ran.stderr
    );
    assert_eq!(scratch.names(), ["model.gguf", "model.lean"]);
    assert_eq!(fs::read(&to).unwrap(), b"older");
}

/// What is read is never written over, by whatever name.
#[test]
fn outputs_are_no_inputs() {
    let scratch = Scratch::new("pack-over");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    pack(&from, &to, "--calibrate none").text();
    let link = scratch.join("link");
    std::os::unix::fs::symlink(&to, &link).unwrap();
    let text = scratch.join("text");
    fs::write(&text, TEXT).unwrap();
    let before = fs::read(&to).unwrap();
    let (link, text) = (link.display(), text.display());
    for (command, args) in [
        ("trace", format!("-p the -n 4 -o {link}")),
        ("trace", format!("-f {text} -n 4 -o {text}")),
        ("bench", format!("-p 0 -n 2 -r 1 --plot {link}")),
        (
            "bench",
            format!("-p 0 -n 2 -r 1 --text {text} --plot {text}"),
        ),
    ] {
        let ran = with(command, &to, &args);
        assert!(ran.failed(2).contains("which is read"), "{}", ran.stderr);
    }
    let folder = scratch.join("folder");
    fs::create_dir(&folder).unwrap();
    let ran = pack(&from, &folder, "");
    assert!(ran.failed(2).contains("is a directory"), "{}", ran.stderr);
    assert_eq!(fs::read(&to).unwrap(), before);
    assert_eq!(fs::read(scratch.join("text")).unwrap(), TEXT);
}

/// A limit on the size of files, as full disks, leaves nothing behind.
#[test]
fn a_file_that_may_not_grow_leaves_nothing() {
    let scratch = Scratch::new("pack-limit");
    let from = small(scratch.join("model.gguf"));
    let limited = Command::new("sh")
        .args(["-c", "ulimit -f 100; exec \"$@\"", "sh", BIN, "pack"])
        .args([&from, &scratch.join("model.lean")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let ran = finish(limited);
    assert!(ran.failed(5).contains("model.lean"), "{ran:?}");
    assert_eq!(scratch.names(), ["model.gguf"]);
}

/// What `run` would refuse, `verify` finds.
#[test]
fn statistics_that_make_no_sense_are_found() {
    let scratch = Scratch::new("pack-stats");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    pack(&from, &to, "--calibrate none").text();
    let read = Read::open(&to);
    let whole = read.file.clone();
    let stats = read.layers[1].stats.offset as usize;
    let errors = read.head.unwrap().sketch_error.offset as usize;
    for (at, why) in [(stats, "share of tokens"), (errors, "is no size")] {
        let mut file = whole.clone();
        file[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
        fs::write(&to, &file).unwrap();
        let ran = with("verify", &to, "");
        assert!(ran.failed(3).contains(why), "{}", ran.stderr);
    }
}

/// The least budget that is named does for calibrating and for packing.
#[test]
fn the_least_budget_is_enough() {
    let scratch = Scratch::new("pack-least");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    for more in ["", "--calibrate none", "--order coactivation"] {
        let ran = pack(&from, &to, &format!("--budget 1K {more}"));
        let said = ran.failed(4);
        let named = said.split("(--budget ").nth(1).expect("a budget is named");
        let named = named.split(')').next().expect("its end");
        let ran = pack(&from, &to, &format!("--budget {named} {more}"));
        assert_eq!(ran.code, 0, "{more}: {said}{}", ran.stderr);
    }
}
