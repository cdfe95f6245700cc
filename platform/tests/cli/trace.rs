//! `leanstream trace` and `replay` as scripts see them.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use serde_json::Value;

use crate::common::Scratch;
use crate::common::cli::{Ran, finish, program, with};
use crate::common::packs::{options, pack_with};

/// A pack that uses all its neurons, more often the first ones.
fn dense(scratch: &Scratch) -> PathBuf {
    let (from, to) = (scratch.join("model.gguf"), scratch.join("model.lean"));
    let spec = Spec {
        d: 128,
        ff: 512,
        layers: 4,
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 5)
    };
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    pack_with(&from, &to, &options()).expect("a pack");
    to
}

fn replay(trace: &Path, args: &str) -> Ran {
    let mut command = program(["replay"]);
    command.arg(trace).args(args.split_whitespace());
    finish(command.spawn().expect("the program starts"))
}

/// Of a model that uses all its neurons replay says how many of the important ones each look named.
#[test]
fn looks_at_a_dense_model_are_compared_with_what_is_kept() {
    let scratch = Scratch::new("trace-kept");
    let (pack, trace) = (dense(&scratch), scratch.join("t.trace"));
    let args = format!(
        "-p abcdefghijklmnop -n 8 --budget 64M -o {}",
        trace.display()
    );
    assert_eq!(with("trace", &pack, &args).code, 0);
    let object = replay(&trace, "--json --policy static --budget 50%").json();
    let kept = object["kept"].as_array().expect("a list");
    let find = |stage: Value, share: f64, named: f64| {
        let row = kept.iter().find(|row| {
            let near = (row["share"].as_f64().unwrap() - share).abs() < 0.005;
            row["stage"] == stage && near && row["named_per_kept"] == named
        });
        row.unwrap_or_else(|| panic!("{stage} {share} {named}: {kept:?}"))
    };
    for share in [0.3, 0.5] {
        for named in [1.0, 1.25] {
            let recall = |stage: Value, key: &str| {
                let value = find(stage, share, named)[key].as_f64();
                value.expect("a share")
            };
            // The gate itself is what chooses. By chance a look has as much as it names.
            assert_eq!(recall(Value::Null, "recall_least_layer"), 1.0);
            let looks = [0, 1, 2, 3].map(|stage| recall(stage.into(), "recall"));
            assert!(looks[0] > share * named && looks[3] > looks[0], "{looks:?}");
            assert!(looks[3] <= 1.0 && recall(3.into(), "recall_least_layer") <= looks[3]);
            let added = recall(Value::Null, "added_recall");
            assert!(added > share * named && added < 1.0, "{added}");
        }
    }
    let table = replay(&trace, "--policy static --budget 50%").text();
    assert!(
        table.contains("| gate | 50% | 1.25 | 100.0%, 100.0% |"),
        "{table}"
    );

    // A pipe is read as a file is.
    let mut command = program([
        "replay", "-", "--json", "--policy", "static", "--budget", "50%",
    ]);
    command.stdin(File::open(&trace).expect("the trace"));
    let piped = finish(command.spawn().expect("the program starts"));
    assert_eq!(piped.json(), object);
}

#[test]
fn what_would_be_no_use_is_refused_before_anything_is_recorded() {
    let scratch = Scratch::new("trace-refused");
    let pack = dense(&scratch);
    let out = scratch.join("t.trace");
    for (args, why) in [
        ("-p abcdef -n 0", "-n 0: replay needs a trace of 2 tokens"),
        ("-p abcdef -n 1", "-n 1: replay needs a trace of 2 tokens"),
        ("-p a -n 4", "give a longer text"),
    ] {
        let ran = with("trace", &pack, &format!("{args} -o {}", out.display()));
        assert!(ran.failed(2).contains(why), "{ran:?}");
    }
    let ran = with("trace", &pack, "-p abcdef -n 4 -o -");
    assert!(ran.failed(2).contains("name a file"), "{ran:?}");
    assert_eq!(scratch.names(), ["model.gguf", "model.lean"]);
}

/// A trace of a small model.
fn recorded(scratch: &Scratch) -> PathBuf {
    let (pack, trace) = (dense(scratch), scratch.join("t.trace"));
    let args = format!("-p abcdefgh -n 3 --budget 64M -o {}", trace.display());
    assert_eq!(with("trace", &pack, &args).code, 0);
    trace
}

/// A budget too small for a layer is told, and the others of the list have their rows; it ended with 0.
#[test]
fn budgets_too_small_are_told() {
    let scratch = Scratch::new("trace-budgets");
    let trace = recorded(&scratch);
    let ran = replay(&trace, "--json --policy static --budget 1,100% --queue 255");
    assert_eq!(ran.code, 4, "{ran:?}");
    assert!(ran.stderr.contains("--budget 1: 1 bytes"), "{ran:?}");
    let told: Value = serde_json::from_slice(&ran.stdout).expect("an object");
    assert_eq!(told["results"].as_array().expect("rows").len(), 1);
    let ran = replay(&trace, "--policy static --budget 1,0%");
    assert_eq!(ran.failed(4).lines().count(), 2, "{ran:?}");
    // What is named does.
    let (_, least) = ran.stderr.split_once("at least ").expect("the least");
    let least: u64 = least.split(' ').next().unwrap().parse().expect("bytes");
    let args = |bytes: u64| format!("--policy static --budget {bytes}");
    assert_eq!(replay(&trace, &args(least)).code, 0);
    replay(&trace, &args(least - 1)).failed(4);
    // Of budgets that nobody asked for those that do are enough: here all units of a layer are used by
    // each token, which 10% have no room for.
    let ran = replay(&trace, "--policy static");
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.stderr.contains("--budget 10%: "), "{ran:?}");
}

/// Misses stand as multiples of Belady's, of a cache in common and of one for each layer.
#[test]
fn misses_are_compared_with_beladys() {
    let scratch = Scratch::new("trace-belady");
    let trace = recorded(&scratch);
    let object = replay(&trace, "--json --policy lfu,belady --budget 50%").json();
    for row in object["results"].as_array().expect("rows") {
        // Half of 512 units in each of 4 layers: all are used by every token, and half can be hits.
        let least = row["tokens"].as_u64().expect("a count") * 4 * 256;
        assert_eq!(row["belady_by_layer_misses"], least, "{row}");
        let misses = row["misses"].as_f64().expect("a count");
        let multiple = misses / least as f64;
        assert_eq!(row["misses_over_belady_by_layer"], multiple, "{row}");
    }
    let row = |args: &str| {
        let table = replay(&trace, args).text();
        let mut lines = table.lines().skip_while(|line| !line.contains("budget"));
        let mut cells = || {
            let line = lines.next().expect("a line");
            line.split(" | ").map(str::to_owned).collect::<Vec<_>>()
        };
        let (head, rule, row) = (cells(), cells(), cells());
        assert_eq!([rule.len(), row.len()], [head.len(); 2], "{table}");
        assert_eq!(head[3..5], ["of Belady's", "of Belady's by layer"]);
        row[3..5].to_vec()
    };
    let multiples = row("--policy belady --budget 50%");
    assert!(multiples.iter().all(|cell| cell.ends_with('x')));
    assert_eq!(multiples[0], "1.00x");
    assert_eq!(row("--policy lfu --budget 50%"), ["-", "-"]);
}

/// Whatever byte of the header is damaged: if it shows, it is the file that is wrong, not the command line.
#[test]
fn a_damaged_header_is_the_files_fault() {
    let scratch = Scratch::new("trace-damaged");
    let trace = recorded(&scratch);
    let sound = fs::read(&trace).expect("the trace");
    for at in (0..40).filter(|at| !(32..36).contains(at)) {
        let mut file = sound.clone();
        file[at] ^= 0x81;
        fs::write(&trace, file).expect("a damaged trace");
        let ran = replay(&trace, "--json --policy static --budget 50%");
        // Units of some other size can't be told from right ones.
        if !((24..27).contains(&at) && ran.code == 0) {
            ran.failed(3);
        }
    }
}
