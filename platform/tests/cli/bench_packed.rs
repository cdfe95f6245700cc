//! `bench` of packed models: policies, budgets by the share of neurons, the figure.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::Scratch;
use crate::common::cli::{BIN, Ran, assert_keys, finish, program, with};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use serde_json::Value;

/// Units of [`packed`].
const UNITS: u32 = 3 * 2048;

/// A pack of 3 layers of 2048 units.
fn packed(scratch: &Scratch) -> PathBuf {
    let from = scratch.join("m.gguf");
    let to = scratch.join("m.lean");
    let spec = Spec {
        ff: UNITS / 3,
        layers: 3,
        ..Spec::small(Arch::Llama, QuantType::Q8_0, 12)
    };
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let mut command = program(["pack"]);
    command.arg(&from).arg(&to).args(["--calibrate", "none"]);
    let ran = finish(command.spawn().expect("the program starts"));
    assert_eq!(ran.code, 0, "{ran:?}");
    to
}

fn rows(ran: &Ran) -> Vec<Value> {
    assert_eq!(ran.code, 0, "{ran:?}");
    let text = ran.text();
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.collect()
}

/// The figure's text, and how many lines it has.
fn figure(path: &Path) -> (String, usize) {
    let svg = fs::read_to_string(path).expect("a figure");
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
        "{svg}"
    );
    // Every tag is closed, and every quote.
    assert_eq!(svg.matches('<').count(), svg.matches('>').count());
    assert_eq!(svg.matches('"').count() % 2, 0);
    let lines = svg.matches("<polyline ").count();
    (svg, lines)
}

#[test]
fn a_row_for_each_budget_and_policy() {
    let scratch = Scratch::new("bench-packed");
    let model = packed(&scratch);
    let (text, svg) = (scratch.join("text"), scratch.join("out.svg"));
    fs::write(&text, "The cat sat on the mat and saw the dog. ".repeat(9)).unwrap();
    let args = format!(
        "--budget ffn:15%,ffn:60% --policy refine,lru-window --keep 0.5 -p 0 -n 6 -r 2 -o jsonl \
         --text {} --plot {}",
        text.display(),
        svg.display()
    );
    let rows = rows(&with("bench", &model, &args));
    let policies: Vec<&str> = rows.iter().map(|r| r["policy"].as_str().unwrap()).collect();
    assert_eq!(policies, ["refine", "lru-window", "refine", "lru-window"]);
    for (index, row) in rows.iter().enumerate() {
        assert_keys(
            row,
            &[
                "build_commit",
                "model_type",
                "n_gen",
                "avg_ts",
                "stddev_ts",
                "median_ts",
                "samples_ns",
                "budget_bytes",
                "bytes_read",
                "ceiling_ts",
                "overlap",
                "stall_ms",
            ],
        );
        assert_eq!(
            (&row["mode"], &row["keep"]),
            (&"sparse".into(), &0.5.into())
        );
        assert_eq!(
            (&row["head_rows"], &row["allocations"]),
            (&Value::Null, &0.into())
        );
        let number = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"));
        let shares = [
            "miss_ratio",
            "skipped_ratio",
            "redundant_ratio",
            "late_ratio",
            "hidden",
            "controller_share",
        ];
        for share in shares {
            assert!((0.0..=1.0).contains(&number(share)), "{share}: {row}");
        }
        assert!(number("controller_ms") > 0.0 && number("skipped_ratio") > 0.0);
        // Four looks at most from each layer but the last.
        assert!((0.0..=8.0).contains(&number("looks_per_token")));
        // Dense matrices stay, so all that is read are units.
        assert!(number("miss_ratio") > 0.0 && number("bytes_per_token") > 0.0);
        assert!(number("bytes_read") >= number("bytes_per_token") * 12.0);
        let want = [0.15, 0.6][index / 2];
        let share = number("unit_slots_share");
        assert!(
            (want - 1.0 / f64::from(UNITS)..want + 0.002).contains(&share),
            "{share}"
        );
        assert!(number("peak_rss_bytes") <= number("budget_bytes"));
        assert_eq!(row["perplexity"], Value::Null);
    }
    let number = |row: usize, key: &str| rows[row][key].as_f64().unwrap();
    assert!(number(0, "budget_bytes") < number(2, "budget_bytes"));
    // Of LRU a larger cache holds what a smaller one does.
    assert!(number(3, "miss_ratio") < number(1, "miss_ratio"));
    let (drawn, lines) = figure(&svg);
    assert_eq!(lines, 2, "{drawn}");
    assert!(
        drawn.contains(">lru-window tg6<")
            && drawn.contains(", --keep 0.5<")
            && drawn.contains("budget (MiB)")
    );
    assert_eq!(scratch.names(), ["m.gguf", "m.lean", "out.svg", "text"]);
}

#[test]
fn a_row_has_the_perplexity_that_is_measured_alone() {
    let scratch = Scratch::new("bench-perplexity");
    let model = packed(&scratch);
    let text = scratch.join("text");
    fs::write(&text, "The cat sat on the mat and saw the dog. ".repeat(60)).unwrap();
    let shared = "--budget ffn:100% --keep 0.25 --policy lfu -t 1 --kv-type q8_0";
    let file = text.display();
    // Which scores every token with the whole head, whatever the tests do.
    let args = format!("{shared} -p 0 -n 2 -r 1 -o jsonl --head exact --perplexity {file}");
    let row = with("bench", &model, &args).json();
    assert_eq!(row["head"], "exact");
    assert!(row["head_rows"].as_f64().unwrap() >= 1.0);
    let args = format!("{shared} -f {file} -c 512 --chunks 2 --json");
    let alone = with("perplexity", &model, &args).json();
    assert!(alone["perplexity"].as_f64().unwrap() > 1.0);
    assert_eq!(row["perplexity"], alone["perplexity"]);
    let short = scratch.join("short");
    fs::write(&short, "The cat sat.").unwrap();
    let args = format!("-p 0 -n 2 -r 1 --perplexity {}", short.display());
    assert!(
        with("bench", &model, &args)
            .failed(2)
            .contains("two chunks of 512")
    );
}

#[test]
fn a_table_has_the_sparse_columns() {
    let scratch = Scratch::new("bench-table");
    let model = packed(&scratch);
    let args = "--budget 1M,ffn:30% --policy lfu,static -p 8 -n 3 -r 1";
    let ran = with("bench", &model, args);
    assert_eq!(ran.code, 4, "{ran:?}");
    let table = ran.text();
    assert_eq!(table.lines().count(), 2 + 8, "{table}");
    let bars: Vec<usize> = table.lines().map(|l| l.matches('|').count()).collect();
    assert!(bars.iter().all(|n| *n == bars[0]), "{table}");
    for word in [
        "FFN cache",
        "missed",
        "redundant",
        "late",
        "hidden",
        "perplexity",
    ] {
        assert!(table.lines().next().unwrap().contains(word), "{table}");
    }
    assert_eq!(table.matches("| lfu | exact |").count(), 4, "{table}");
    assert_eq!(table.matches("error: ").count(), 4, "{table}");
    assert_eq!(table.matches("| 30.0% |").count(), 4, "{table}");
}

#[test]
fn room_for_a_share_of_the_neurons_is_a_budget_everywhere() {
    let scratch = Scratch::new("ffn");
    let model = packed(&scratch);
    let text = scratch.join("text");
    fs::write(&text, "abc xyz 0123456789. ".repeat(12)).unwrap();
    let budget = |command: &str, args: &str| {
        let told = with(command, &model, args).json();
        let [budget, peak] =
            ["budget_bytes", "peak_rss_bytes"].map(|key| told[key].as_u64().unwrap());
        assert!(peak <= budget, "{command} {args}: {told}");
        budget
    };
    let run = |share: &str| {
        let args = format!("-p the -n 4 --temp 0 --ignore-eos --json --budget ffn:{share}");
        budget("run", &args)
    };
    // A unit has two rows of 256 weights; what a process holds when it plans differs a little.
    let (small, large) = (run("12.5%"), run("62.5%"));
    let units = u64::from(UNITS / 2) * 2 * 256;
    assert!(
        (units..units + units / 2).contains(&(large - small)),
        "{}",
        large - small
    );
    let perplexity = |share: &str| {
        let args = format!("-f {} -c 32 --json --budget ffn:{share}", text.display());
        budget("perplexity", &args)
    };
    assert!(perplexity("10%") < perplexity("90%"));
    for share in ["101%", "12", "%", "-1%", ""] {
        let ran = with("run", &model, &format!("-p the --budget ffn:{share}"));
        assert!(
            ran.failed(2).contains("ffn:0% to ffn:100%"),
            "{}",
            ran.stderr
        );
    }
    let ran = with("run", &model, "-p the -n 1 --budget ffn:50% --keep -0");
    assert!(
        ran.code == 0 && ran.stderr.contains(" 0% of a layer"),
        "{ran:?}"
    );
    // Whoever wrote it wrongly is told that there is such a thing, where there is.
    for (model, told) in [(&model, true), (&scratch.join("m.gguf"), false)] {
        let ran = with("run", model, "-p the --budget ffn=25%");
        assert_eq!(ran.failed(2).contains("ffn:25%"), told, "{}", ran.stderr);
    }
    let plain = scratch.join("m.gguf");
    let text = format!("-c 32 -f {}", text.display());
    for (command, args) in [
        ("run", "-p the"),
        ("perplexity", &text),
        ("inspect", ""),
        ("bench", "-r 1"),
    ] {
        let ran = with(command, &plain, &format!("{args} --budget ffn:20%"));
        assert!(
            ran.failed(2).contains("leanstream pack"),
            "{command}: {}",
            ran.stderr
        );
    }
}

#[test]
fn what_needs_a_pack_is_told_before_anything_runs() {
    let scratch = Scratch::new("bench-usage");
    let model = packed(&scratch);
    let plain = scratch.join("m.gguf");
    for args in [
        "--policy lfu",
        "--policy refine,lfu",
        "--keep 0.5",
        "--tolerance 3%",
        "--without looks",
        "--text x",
        "--perplexity x",
    ] {
        let ran = with("bench", &plain, &format!("-p 0 -n 2 -r 1 {args}"));
        assert!(
            ran.failed(2).contains("leanstream pack"),
            "{args}: {}",
            ran.stderr
        );
    }
    for args in ["--policy lfu,best", "--policy lfu,", "--policy belady"] {
        let ran = with("bench", &model, &format!("-p 0 -n 2 -r 1 {args}"));
        assert!(
            ran.failed(2).contains("is not a policy"),
            "{args}: {}",
            ran.stderr
        );
    }
    for (args, why) in [
        ("--without gates", "is no part"),
        ("--without order,", "is no part"),
        ("--without order --keep 0.5", "leave one of them out"),
        ("--without retention --policy lfu", "give no other"),
    ] {
        let ran = with("bench", &model, &format!("-p 0 -n 2 -r 1 {args}"));
        assert!(ran.failed(2).contains(why), "{args}: {}", ran.stderr);
    }
    let args = "--budget ffn:20% -p 0 -n 2 -r 1 -o jsonl --without looks,order";
    let row = with("bench", &model, args).json();
    assert_eq!(row["without"], serde_json::json!(["order", "looks"]));
    // A list is for benchmarks only.
    let ran = with("run", &model, "-p the --policy lfu,refine");
    assert!(ran.failed(2).contains("is not a policy"), "{}", ran.stderr);
    let empty = scratch.join("empty");
    fs::write(&empty, "").unwrap();
    let args = format!("-p 0 -n 2 -r 1 --text {}", empty.display());
    assert!(with("bench", &model, &args).failed(2).contains("empty"));
    let ran = with("bench", &model, "-p 0 -n 2 -r 1 --text missing");
    assert!(ran.failed(5).contains("missing"), "{}", ran.stderr);
}

#[test]
fn a_figure_that_cannot_be_written_leaves_nothing() {
    let scratch = Scratch::new("bench-plot");
    let model = packed(&scratch);
    let args = |svg: &Path| format!("-p 4 -n 0 -r 1 --plot {}", svg.display());
    let ran = with("bench", &model, &args(&scratch.join("no/where.svg")));
    assert!(ran.failed(5).contains("where.svg"), "{}", ran.stderr);
    let ran = with("bench", &model, &args(Path::new("/dev/full")));
    assert!(ran.failed(2).contains("/dev/full"), "{}", ran.stderr);
    // As on a full disk: no file may grow past 512 bytes.
    let svg = scratch.join("out.svg");
    fs::write(&svg, "older").unwrap();
    let script = "trap '' XFSZ; ulimit -f 1; exec \"$@\"";
    let limited = Command::new("sh")
        .args(["-c", script, "sh", BIN, "bench", "-m"])
        .arg(&model)
        .args(args(&svg).split_whitespace())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let ran = finish(limited);
    assert_eq!(ran.code, 5, "{ran:?}");
    assert!(
        ran.stderr.contains("out.svg: cannot write"),
        "{}",
        ran.stderr
    );
    assert_eq!(fs::read(&svg).unwrap(), b"older");
    assert_eq!(scratch.names(), ["m.gguf", "m.lean", "out.svg"]);
    // Prompts are drawn where nothing is generated; one line, for one policy.
    let ran = with("bench", &model, &args(&svg));
    assert_eq!(ran.code, 0, "{ran:?}");
    assert_eq!(figure(&svg).1, 1);
    // Any model can be drawn; a failure in between leaves nothing new.
    let plain = scratch.join("m.gguf");
    let other = scratch.join("other.svg");
    let ran = with("bench", &plain, &format!("{} --budget x", args(&other)));
    assert_eq!(ran.code, 2, "{ran:?}");
    assert_eq!(scratch.names(), ["m.gguf", "m.lean", "out.svg"]);
}
