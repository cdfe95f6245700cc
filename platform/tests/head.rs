//! A head by its sketch chooses the very tokens that the whole head chooses, whatever the budget.

mod common;

use std::path::{Path, PathBuf};

use common::cli::with;
use common::models::model;
use common::packs::{options as pack_options, pack_with};
use common::{Scratch, run};
use leanstream::fetch::{GEMMA3, Published, SMOLLM2};
use leanstream::run::model::load_with;
use leanstream::run::session::{Memory, Options, Session, Stats, Wanted};
use leanstream::sample::{Params, Sampler};
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::pack::Ffn;
use leanstream_core::plan::Head;
use leanstream_core::quant::{QuantType, decode};

const PROMPT: [u32; 9] = [3, 17, 90, 4, 200, 33, 61, 7, 120];

/// A pack of a small model with a vocabulary of several rounds.
fn pack(scratch: &Scratch, name: &str, spec: &Spec) -> PathBuf {
    pack_as(scratch, name, spec, Ffn::Units)
}

fn pack_as(scratch: &Scratch, name: &str, spec: &Spec, ffn: Ffn) -> PathBuf {
    let (from, to) = (
        scratch.join(format!("{name}.gguf")),
        scratch.join(format!("{name}.lean")),
    );
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let options = leanstream::pack::Options {
        ffn,
        ..pack_options()
    };
    pack_with(&from, &to, &options).expect("a pack");
    to
}

fn spec(arch: Arch, embed_ty: QuantType, tied: bool) -> Spec {
    Spec {
        vocab: 2500,
        embed_ty,
        tied,
        activation: (arch == Arch::Llama).then_some("relu"),
        ..Spec::small(arch, QuantType::Q8_0, 21)
    }
}

fn greedy() -> Params {
    Params {
        temperature: 0.0,
        ..Params::default()
    }
}

fn sampling(repeat_penalty: f32) -> Params {
    Params {
        temperature: 0.9,
        top_k: 40,
        repeat_penalty,
        seed: 11,
        ..Params::default()
    }
}

/// Options for `positions` positions with `params`.
fn options(positions: usize, params: &Params) -> Options {
    Options {
        wanted: Wanted {
            top: params.top().expect("a few tokens"),
            changed_max: params.repeat_last_n,
        },
        ..run::options(positions)
    }
}

/// The tokens that follow [`PROMPT`] until the context is full, and what that took.
fn tokens(path: &Path, head: Head, options: &Options, params: &Params) -> (Vec<u32>, Stats) {
    let (info, mut weights) = load_with(path, head).expect("a model");
    let mut memory = Memory::new(&info, &mut weights, options, 0).expect("it fits");
    let mut session = Session::start(&info, weights, &mut memory, options).expect("it starts");
    let mut sampler = Sampler::new(*params, info.hyper.vocab);
    let mut out = Vec::new();
    let mut prompt = true;
    while session.position() < session.context() {
        let (penalty, recent) = sampler.recent();
        session.expect(penalty, recent);
        let logits = match out.last() {
            Some(&last) if !prompt => session.decode(last, true),
            _ => session.prompt(&PROMPT, true),
        };
        prompt = false;
        let token = sampler.choose(logits.expect("a pass")).expect("numbers");
        sampler.accept(token);
        out.push(token);
    }
    (out, session.stats())
}

#[test]
fn every_kind_of_head_gives_the_same_tokens() {
    let scratch = Scratch::new("head-same");
    let kinds = [
        (Arch::Llama, QuantType::Q8_0, true),
        (Arch::Llama, QuantType::Q4_1, false),
        (Arch::Llama, QuantType::Q6_K, true),
        (Arch::Llama, QuantType::Q4_0, true),
        (Arch::Llama, QuantType::F16, false),
        (Arch::Arcee, QuantType::BF16, true),
        (Arch::Gemma3, QuantType::Q8_0, true),
        (Arch::Gemma3, QuantType::Q5_0, true),
    ];
    for (number, (arch, ty, tied)) in kinds.into_iter().enumerate() {
        let spec = Spec {
            // Small enough to bend the logits of these models.
            softcap: (arch == Arch::Gemma3).then_some(2.0),
            ..spec(arch, ty, tied)
        };
        let path = pack(&scratch, &format!("{number}"), &spec);
        for params in [greedy(), sampling(1.0), sampling(1.3), sampling(0.7)] {
            for exact in [false, true] {
                if exact && params != greedy() {
                    continue;
                }
                let options = Options {
                    exact,
                    ..options(240, &params)
                };
                let (want, full) = tokens(&path, Head::Full, &options, &params);
                assert_eq!(full.head_rows(), None);
                let mut rows = f64::MAX;
                for head in [Head::Exact, Head::Fast] {
                    let (got, stats) = tokens(&path, head, &options, &params);
                    assert_eq!(got, want, "{arch:?} {ty} {head:?} {params:?}");
                    let some = stats.head_rows().expect("rows");
                    assert!((64.0..=rows).contains(&some), "{some} of {rows}");
                    rows = some;
                }
                assert!(rows < 2000.0, "{arch:?} {ty}: {rows} rows a token");
            }
        }
    }
}

#[test]
fn no_budget_or_thread_count_changes_a_token() {
    let scratch = Scratch::new("head-budget");
    for tied in [true, false] {
        let path = pack(&scratch, "model", &spec(Arch::Llama, QuantType::Q8_0, tied));
        let params = sampling(1.1);
        let plenty = options(80, &params);
        let (want, resident) = tokens(&path, Head::Full, &plenty, &params);
        assert_eq!(resident.units.failed, 0);
        for head in [Head::Exact, Head::Fast] {
            let least = least(&path, head, &plenty);
            let mut read = u64::MAX;
            for (extra, threads) in [(0, 1), (1 << 20, 2), (1 << 30, 3)] {
                let options = Options {
                    budget: least + extra + u64::from(threads - 1) * (1 << 20),
                    batch: if extra == 0 { Some(1) } else { None },
                    threads,
                    ..plenty.clone()
                };
                let (got, stats) = tokens(&path, head, &options, &params);
                assert_eq!(got, want, "{head:?} {extra}");
                assert!(stats.bytes_read() < read, "more memory, fewer bytes");
                read = stats.bytes_read();
            }
        }
    }
}

/// With the head alone packed, all logits are the model's to the bit, and the sketch gives the same
/// tokens; with plenty of memory, and with as little as will do.
#[test]
fn a_packed_head_alone_changes_no_bit_of_the_rest() {
    let scratch = Scratch::new("head-alone");
    for (arch, tied) in [
        (Arch::Llama, true),
        (Arch::Llama, false),
        (Arch::Arcee, true),
        (Arch::Gemma3, true),
    ] {
        let spec = Spec {
            softcap: (arch == Arch::Gemma3).then_some(2.0),
            ..spec(arch, QuantType::Q8_0, tied)
        };
        let name = format!("{arch:?}-{tied}");
        let path = pack_as(&scratch, &name, &spec, Ffn::Matrices);
        let model = path.with_extension("gguf");
        let params = sampling(1.1);
        let plenty = options(60, &params);
        let want = run::logits(&model, &plenty, &PROMPT, 4).expect("a run");
        let (chosen, _) = tokens(&model, Head::Full, &plenty, &params);
        for (extra, threads) in [(0, 1), (300 << 10, 2), (1 << 30, 2)] {
            for head in [Head::Full, Head::Exact, Head::Fast] {
                let options = Options {
                    budget: least(&path, head, &plenty)
                        + extra
                        + u64::from(threads - 1) * (1 << 20),
                    batch: if extra == 0 { Some(1) } else { None },
                    threads,
                    ..plenty.clone()
                };
                let what = format!("{name} {head:?} {extra}");
                let (got, stats) = tokens(&path, head, &options, &params);
                assert_eq!(got, chosen, "{what}");
                assert_eq!(stats.head_rows().is_some(), head.sketched(), "{what}");
                if head == Head::Full {
                    let got = run::logits(&path, &options, &PROMPT, 4).expect("a run");
                    assert!(got == want, "{what}: other bits");
                }
            }
        }
    }
}

/// The least budget, in batches of one token.
fn least(path: &Path, head: Head, options: &Options) -> u64 {
    let (info, mut weights) = load_with(path, head).expect("a model");
    let options = Options {
        budget: 1,
        batch: Some(1),
        ..options.clone()
    };
    match Memory::new(&info, &mut weights, &options, 0) {
        Err(leanstream::error::Error::Budget { least, .. }) => least,
        _ => panic!("a byte is no budget"),
    }
}

/// Spoils a pack's sketch, so that its estimates are of little use, and makes its errors say so.
fn spoil(path: &Path) {
    let pack = common::packs::Read::open(path);
    let head = pack.head.expect("a head");
    let (d, count) = (pack.hyper.d as usize, head.count as usize);
    let mut file = pack.file.clone();
    let (mut exact, mut coarse) = (vec![0.0; d], vec![0.0; d]);
    for row in 0..count {
        let at = head.sketch.offset as usize + row * head.sketch_row_bytes as usize;
        let sketch = &mut file[at..at + head.sketch_row_bytes as usize];
        for (block, bytes) in sketch.chunks_exact_mut(18).enumerate() {
            if (row * 7 + block * 5 + row * block) % 8 < 5 {
                // Code 8 is zero.
                bytes[2..].fill(0x88);
            }
        }
        decode(QuantType::Q4_0, sketch, &mut coarse);
        let unit = &pack.bytes(head.units)[row * head.unit_bytes as usize..];
        decode(head.row.0, &unit[..head.row.1 as usize], &mut exact);
        let off = exact.iter().zip(&coarse);
        let squared: f64 = off.map(|(a, b)| f64::from(a - b).powi(2)).sum();
        let error = ((squared.sqrt() * (1.0 + 1e-6)) as f32).next_up();
        let at = head.sketch_error.offset as usize + row * 4;
        file[at..at + 4].copy_from_slice(&error.to_le_bytes());
    }
    std::fs::write(path, file).expect("room");
}

/// The best estimates aren't the best logits then, and the bound has to find those.
#[test]
fn a_poor_sketch_costs_rows_and_no_token() {
    let scratch = Scratch::new("head-poor");
    for (arch, ty) in [
        (Arch::Llama, QuantType::Q8_0),
        (Arch::Llama, QuantType::F16),
        (Arch::Gemma3, QuantType::Q4_1),
    ] {
        let spec = Spec {
            softcap: (arch == Arch::Gemma3).then_some(2.0),
            ..spec(arch, ty, true)
        };
        let path = pack(&scratch, "model", &spec);
        spoil(&path);
        for params in [greedy(), sampling(1.3)] {
            let options = options(120, &params);
            let (want, _) = tokens(&path, Head::Full, &options, &params);
            let (got, stats) = tokens(&path, Head::Exact, &options, &params);
            assert_eq!(got, want, "{arch:?} {ty} {params:?}");
            let rows = stats.head_rows().expect("rows");
            assert!(rows > 500.0, "{rows}: not so poor");
        }
    }
}

/// A pack whose rows are all damaged.
#[test]
fn a_damaged_row_is_an_error_that_names_it() {
    let scratch = Scratch::new("head-damage");
    let path = pack(&scratch, "model", &spec(Arch::Llama, QuantType::Q8_0, true));
    let head = common::packs::Read::open(&path).head.expect("a head");
    let mut file = std::fs::read(&path).expect("a pack");
    let rows = head.units.offset as usize..(head.units.offset + head.units.bytes) as usize;
    file[rows].iter_mut().for_each(|byte| *byte ^= 0x55);
    std::fs::write(&path, file).expect("room");
    let (info, mut weights) = load_with(&path, Head::Exact).expect("a model");
    let options = run::options(16);
    let mut memory = Memory::new(&info, &mut weights, &options, 0).expect("it fits");
    let mut session = Session::start(&info, weights, &mut memory, &options).expect("it starts");
    let error = session.prompt(&PROMPT, true).unwrap_err().to_string();
    assert!(
        error.contains("of the head") && error.contains("checksum"),
        "{error}"
    );
}

#[test]
fn the_program_says_what_it_read_and_allocates_nothing() {
    let scratch = Scratch::new("head-cli");
    let path = pack(&scratch, "model", &spec(Arch::Llama, QuantType::Q8_0, true));
    let text = scratch.join("text");
    std::fs::write(&text, "The cat sat on the mat. ".repeat(9)).expect("room");
    let alone = pack_as(
        &scratch,
        "alone",
        &spec(Arch::Llama, QuantType::Q8_0, true),
        Ffn::Matrices,
    );
    for (path, args) in [
        (&path, "--temp 0"),
        (&path, "--top-k 40 --repeat-penalty 1.2"),
        (&alone, "--temp 0"),
    ] {
        let run = |args: &str| {
            let common = "-p the -n 60 -s 3 --ignore-eos --budget 16M --json";
            with("run", path, &format!("{common} {args}")).json()
        };
        let full = run(args);
        assert_eq!(full["head"], "full");
        assert!(full["head_rows"].is_null());
        for head in ["exact", "fast"] {
            let got = run(&format!("{args} --head {head}"));
            assert_eq!(got["tokens"], full["tokens"], "{head} {args}");
            assert_eq!(got["head"], head);
            assert_eq!(got["allocations"], 0, "{head} {args}");
            let rows = got["head_rows"].as_f64().expect("a number");
            assert!((64.0..2500.0).contains(&rows), "{rows}");
        }
    }
    // A benchmark says it too, in a row of a list and alone; the text decides which rows.
    let row = |path: &Path, args: &str| {
        let args = format!(
            "-p 0 -n 9 -r 2 -t 1 --head exact --text {} {args}",
            text.display()
        );
        let ran = with("bench", path, &args);
        assert_eq!(ran.code, 0, "{ran:?}");
        ran.text()
    };
    for (path, packed) in [(&path, true), (&alone, false)] {
        for budgets in ["16M", "16M,20M"] {
            let told = row(path, &format!("--budget {budgets} -o jsonl"));
            assert_eq!(told.lines().count(), budgets.split(',').count());
            for line in told.lines() {
                let line: serde_json::Value = serde_json::from_str(line).expect("an object");
                assert_eq!(line["head"], "exact", "{line}");
                let rows = line["head_rows"].as_f64().expect("a number");
                assert!((64.0..2500.0).contains(&rows), "{line}");
                assert_eq!(line["policy"].is_string(), packed, "{line}");
                assert!(line["probe_bandwidth"].as_f64() > Some(0.0), "{line}");
                assert_eq!(line["allocations"], 0, "{line}");
            }
        }
        let table = row(path, "--budget 16M");
        assert!(
            table.contains("| head rows |") && table.contains("| exact |"),
            "{table}"
        );
        assert_eq!(table.lines().count(), 3);
    }
    let ran = with("run", &path, "-p the --top-k 0 --head exact");
    assert!(ran.failed(2).contains("--top-k 0"), "{}", ran.stderr);
    let ran = with("run", &path, "-p the --head best");
    assert!(ran.failed(2).contains("full, exact or fast"));
    let ran = with("run", &scratch.join("model.gguf"), "-p the --head fast");
    assert!(ran.failed(2).contains("no sketch"), "{}", ran.stderr);
    let text = "the cat sat on the mat ".repeat(20);
    std::fs::write(scratch.join("text"), text).expect("room");
    let args = format!("-c 16 --head exact -f {}", scratch.join("text").display());
    let ran = with("perplexity", &path, &args);
    assert!(ran.failed(2).contains("every logit"), "{}", ran.stderr);
}

/// A published model's pack beside it, where somebody has made one.
fn published_pack(test: &str, published: &Published) -> Option<PathBuf> {
    let path = model(test, published)?.with_extension("lean");
    if path.exists() {
        return Some(path);
    }
    eprintln!(
        "skipped: {test}: no {}: leanstream pack makes it",
        path.display()
    );
    None
}

fn published(test: &str, published: &Published) {
    let Some(path) = published_pack(test, published) else {
        return;
    };
    for (positions, params) in [(200, greedy()), (40, sampling(1.1))] {
        let options = options(PROMPT.len() + positions, &params);
        let (want, _) = tokens(&path, Head::Full, &options, &params);
        for head in [Head::Exact, Head::Fast] {
            let (got, stats) = tokens(&path, head, &options, &params);
            assert_eq!(got, want, "{head:?} {params:?}");
            eprintln!("{test}: {head:?}: {:?} rows a token", stats.head_rows());
        }
    }
    // Little more than the least budget, and one with room for a part of the head.
    for mib in [40, 160] {
        for head in ["exact", "fast"] {
            let args = format!(
                "-p Gravity -n 4 --temp 0 --ignore-eos --json --budget {mib}M --head {head}"
            );
            let ran = with("run", &path, &args).json();
            let peak = ran["peak_rss_bytes"].as_u64().expect("a number");
            assert!(peak <= mib << 20, "{head}: {peak} of {mib} MiB");
            assert_eq!(ran["allocations"], 0, "{head}, {mib} MiB");
        }
    }
}

#[test]
fn smollm2_gives_the_same_tokens() {
    published("smollm2_gives_the_same_tokens", &SMOLLM2);
}

#[test]
fn gemma3_gives_the_same_tokens() {
    published("gemma3_gives_the_same_tokens", &GEMMA3);
}
