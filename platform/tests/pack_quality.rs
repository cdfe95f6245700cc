//! What leaving out neurons costs: measured by `pack --quality`, used by `--tolerance`.

mod common;

use std::fs;
use std::path::Path;

use common::Scratch;
use common::cli::{Ran, finish, program, small, with};
use common::packs::{TEXT, options, pack_telling};

const RUN: &str = "-p the -n 4 --temp 0 --ignore-eos --json";

fn pack(from: &Path, to: &Path, args: &[&str]) -> Ran {
    let mut command = program(["pack"]);
    command.arg(from).arg(to).args(args);
    finish(command.spawn().expect("the program starts"))
}

#[test]
fn a_tolerance_chooses_how_much_is_read() {
    let scratch = Scratch::new("quality");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    let text = scratch.join("text");
    // Long enough for one chunk of the model's context.
    fs::write(&text, TEXT.repeat(20)).unwrap();
    let text = text.to_str().unwrap();
    let ran = pack(&from, &to, &["--json", "--quality", text]);
    let quality = ran.json()["quality"].clone();
    assert!(ran.stderr.contains("10%"), "{}", ran.stderr);
    assert!(quality["tokens"].as_u64().unwrap() >= 100, "{quality}");
    let rows = quality["loss"].as_array().unwrap();
    assert_eq!(rows.len(), 4);
    for row in rows {
        let row: Vec<f64> = row
            .as_array()
            .unwrap()
            .iter()
            .map(|x| x.as_f64().unwrap())
            .collect();
        assert_eq!(row.len(), 4);
        assert!(row[0] >= 0.0 && row.is_sorted(), "{row:?}");
    }
    // A random model: what is left out is felt.
    let least = rows[2][3].as_f64().unwrap();
    assert!(least > 1e-6, "{quality}");

    let at = |tolerance: &str| {
        let ran = with(
            "run",
            &to,
            &format!("{RUN} --budget ffn:25% --tolerance {tolerance}"),
        );
        let object = ran.json();
        assert_eq!(object["mode"], "sparse");
        let keep = object["keep"].as_f64().unwrap();
        (keep, object["expected_loss"].as_f64().unwrap(), ran.stderr)
    };
    let (all, nothing, _) = at("0");
    assert!(all > 0.29 && nothing < 1e-6, "{all} {nothing}");
    let half = least / 2.0;
    let (some, loss, said) = at(&format!("{half}"));
    assert!(
        some < 1.0 && loss <= half * 1.001,
        "{some} {loss} of {half}"
    );
    assert!(
        said.contains("are read when they are not in memory: perplexity about"),
        "{said}"
    );
    // Nobody means 300%.
    let ran = with("run", &to, &format!("{RUN} --tolerance 3"));
    assert!(ran.failed(2).contains("write 3%, or 0.03"), "{ran:?}");
    let (few, loss, _) = at("900%");
    assert!((few - 0.3).abs() < 1e-6 && few < some, "{few} {some}");
    // The slots are a little more than a quarter: between that and a half. (Of a random model more in
    // memory isn't surely better.)
    let more = rows[3][3].as_f64().unwrap();
    let between = least.min(more) - 1e-6..=least.max(more) + 1e-6;
    assert!(between.contains(&loss), "{loss} {between:?}");
    // With room for everything nothing has to be left out: it is read once.
    let ran = with("run", &to, &format!("{RUN} --budget 64M --tolerance 900%"));
    assert_eq!(ran.json()["keep"].as_f64(), Some(1.0));

    for (args, message) in [
        ("--tolerance 3% --keep 0.5", "give one of them"),
        ("--tolerance 3% --mode exact", "give one of them"),
        ("--tolerance much", "is no share"),
        ("--tolerance -1%", "is no share"),
        ("--tolerance nan", "'nan' is no share; 3% or 0.03"),
        ("--keep nan", "'nan' is no share from 0 to 1; 50% or 0.5"),
        (
            "--keep 1e300",
            "'1e300' is no share from 0 to 1; 50% or 0.5",
        ),
        ("--keep 150%", "'150%' is no share from 0 to 1; 50% or 0.5"),
    ] {
        let ran = with("run", &to, &format!("{RUN} --budget 64M {args}"));
        assert!(ran.failed(2).contains(message), "{}", ran.stderr);
    }
}

#[test]
fn what_was_not_measured_is_not_promised() {
    let scratch = Scratch::new("quality-none");
    let from = small(scratch.join("model.gguf"));
    let to = scratch.join("model.lean");
    pack(&from, &to, &["--json"]).json();
    let ran = with("run", &to, &format!("{RUN} --budget 64M --tolerance 3%"));
    assert!(ran.failed(2).contains("--quality TEXT"), "{}", ran.stderr);
    let ran = with("run", &to, &format!("{RUN} --budget 64M --keep 0.5"));
    assert!(ran.json()["expected_loss"].is_null());
    assert!(ran.stderr.contains("wasn't measured"), "{}", ran.stderr);
    let ran = with("run", &from, &format!("{RUN} --budget 64M --tolerance 3%"));
    assert!(ran.failed(2).contains("packed"), "{}", ran.stderr);

    // A text that is too short, and a budget that is: no pack is left, and none is lost.
    let text = scratch.join("text");
    fs::write(&text, "too short").unwrap();
    let before = fs::read(&to).unwrap();
    let ran = pack(&from, &to, &["--json", "--quality", text.to_str().unwrap()]);
    assert!(
        ran.failed(2).contains("give a longer one"),
        "{}",
        ran.stderr
    );
    assert_eq!(fs::read(&to).unwrap(), before);
    assert_eq!(scratch.names(), ["model.gguf", "model.lean", "text"]);
}

/// Every scored token of every run moves it on.
#[test]
fn measuring_tells_how_far_it_is() {
    let scratch = Scratch::new("quality-progress");
    let from = small(scratch.join("model.gguf"));
    let text = TEXT.repeat(20);
    let options = leanstream::pack::Options {
        quality: Some(&text),
        ..options()
    };
    let mut seen = Vec::new();
    let to = scratch.join("model.lean");
    let mut progress = |what: &'static str, done: u64, all: u64| {
        if what == "measuring" {
            seen.push((done, all));
        }
    };
    let report = pack_telling(&from, &to, &options, &mut progress).expect("a pack");
    let tokens = u64::from(report.quality.expect("it was measured").tokens);
    let all = 17 * tokens;
    assert_eq!(seen.len() as u64, all + 17);
    assert!(
        seen.is_sorted() && seen.last() == Some(&(all, all)),
        "{all}"
    );
}
