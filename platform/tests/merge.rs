//! `leanstream merge`: what is in the new model, what stays as it was, and what is refused.

mod common;

use std::path::{Path, PathBuf};

use common::adapters::{adapted, all, attention, make, tensor};
use common::cli::{Ran, assert_keys, run, with};
use common::{Scratch, relative_l2};
use leanstream::gguf_write::Header;
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::gguf::Gguf;
use leanstream_core::quant::QuantType;

fn merge(model: &Path, adapters: &[(&Path, f64)], out: &Path, args: &str) -> Ran {
    let mut command = format!("-o {} {args}", out.display());
    for (path, scale) in adapters {
        command += &format!(" --lora {}:{scale}", path.display());
    }
    with("merge", model, &command)
}

fn made(path: PathBuf, spec: &Spec) -> PathBuf {
    spec.write(&Vocab::BuiltIn, &path).expect("a model");
    path
}

/// The bytes of every tensor.
fn tensors(path: &Path) -> Vec<(String, QuantType, Vec<u8>)> {
    let bytes = std::fs::read(path).expect("a model");
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).expect("a model");
    gguf.tensors()
        .map(|tensor| {
            let from = tensor.offset as usize;
            let data = bytes[from..from + tensor.bytes as usize].to_vec();
            (
                tensor.name.to_owned(),
                tensor.ty.quant().expect("weights"),
                data,
            )
        })
        .collect()
}

fn header(path: &Path) -> Vec<u8> {
    let mut bytes = std::fs::read(path).expect("a model");
    let at = Gguf::parse(&bytes, bytes.len() as u64)
        .expect("a model")
        .data_offset();
    bytes.truncate(at as usize);
    bytes
}

/// Every type: adapted matrices are what doubles make of them, within the type's own rounding; all else,
/// the header too, has the same bytes, and threads don't show.
#[test]
fn matrices_are_merged_and_all_else_stays() {
    let scratch = Scratch::new("merge-types");
    for (ty, most) in [
        (QuantType::F32, 1e-6),
        (QuantType::F16, 4e-4),
        (QuantType::BF16, 3e-3),
        (QuantType::Q8_0, 0.006),
        (QuantType::Q6_K, 0.022),
        (QuantType::Q5_K, 0.04),
        (QuantType::Q5_1, 0.04),
        (QuantType::Q5_0, 0.042),
        (QuantType::Q4_K, 0.08),
        (QuantType::Q4_1, 0.08),
        (QuantType::Q4_0, 0.084),
        (QuantType::Q3_K, 0.18),
        (QuantType::Q2_K, 0.4),
    ] {
        let model = made(scratch.join("m.gguf"), &Spec::small(Arch::Llama, ty, 3));
        let (one, two) = (scratch.join("one.gguf"), scratch.join("two.gguf"));
        make(
            &model,
            |name| name == "output.weight" || name.contains("ffn_"),
            5,
            &one,
        );
        make(&model, |name| name.contains("blk.1.ffn_up"), 6, &two);
        let given: [(&Path, f64); 2] = [(&one, 0.5), (&two, -1.5)];
        let out = scratch.join("out.gguf");
        let summary = merge(&model, &given, &out, "--json -t 1").json();
        assert_keys(
            &summary,
            &["source", "out", "bytes", "merged", "change", "loss"],
        );
        assert_eq!(summary["merged"], 7);
        assert_eq!(
            summary["bytes"],
            std::fs::metadata(&out).expect("a file").len()
        );
        assert!(header(&model) == header(&out), "{ty}");
        let double = |values: Vec<f32>| -> Vec<f64> { values.into_iter().map(f64::from).collect() };
        for ((name, _, before), (_, _, after)) in tensors(&model).into_iter().zip(tensors(&out)) {
            if !name.contains("ffn_down")
                && !name.contains("ffn_up")
                && !name.contains("ffn_gate")
                && name != "output.weight"
            {
                assert!(before == after, "{ty} {name}");
                continue;
            }
            let bare = tensor(&model, &name);
            let want = double(adapted(bare.clone(), &name, &given));
            let off = relative_l2(&double(tensor(&out, &name)), &want);
            assert!(off < most, "{ty} {name}: {off}");
            assert!(
                relative_l2(&double(bare), &want) > 0.1,
                "the adapter changes something"
            );
        }
        let loss = summary["loss"].as_f64().expect("a number");
        assert!(
            loss <= most && (loss > most / 4.0 || ty == QuantType::F32),
            "{ty}: {loss}"
        );
        let again = scratch.join("again.gguf");
        merge(&model, &given, &again, "-t 3 --json").json();
        assert!(
            std::fs::read(&out).unwrap() == std::fs::read(&again).unwrap(),
            "{ty}: threads show"
        );
        // A scale of 0 is the model itself.
        merge(&model, &[(&one, 0.0)], &again, "--json").json();
        assert!(
            std::fs::read(&model).unwrap() == std::fs::read(&again).unwrap(),
            "{ty}"
        );
    }
}

const TEXT: &str = "the-rain-in-spain-falls-mainly-on-the-plain,and-the-water-of-the-river-is-cold";

/// A merged model in singles is what `--lora` computes.
#[test]
fn merging_is_running_with_the_adapter() {
    let scratch = Scratch::new("merge-run");
    for arch in [Arch::Gemma3, Arch::Arcee] {
        let model = made(
            scratch.join("m.gguf"),
            &Spec::small(arch, QuantType::Q8_0, 3),
        );
        let (adapter, out) = (scratch.join("a.gguf"), scratch.join("out.gguf"));
        make(&model, all, 5, &adapter);
        let ran = merge(&model, &[(&adapter, 0.7)], &out, "--type f32");
        assert_eq!((ran.code, ran.stdout.len()), (0, 0), "{}", ran.stderr);
        let nll = |model: &Path, args: &str| {
            let args = format!("-p {TEXT} -c 16 --json --exact-activations {args}");
            let ppl = with("perplexity", model, &args).json()["perplexity"].as_f64();
            ppl.expect("a number").ln()
        };
        let want = nll(&model, &format!("--lora {}:0.7", adapter.display()));
        let (got, bare) = (nll(&out, ""), nll(&model, ""));
        assert!((got / want - 1.0).abs() < 1e-5, "{arch:?}: {got} {want}");
        assert!((bare / want - 1.0).abs() > 1e-3, "{bare} {want}");
    }
}

#[test]
fn types_that_nothing_is_quantized_to_become_q8_0() {
    let scratch = Scratch::new("merge-instead");
    let model = made(
        scratch.join("m.gguf"),
        &Spec::small(Arch::Llama, QuantType::IQ4_NL, 3),
    );
    let (adapter, out) = (scratch.join("a.gguf"), scratch.join("out.gguf"));
    make(&model, attention, 5, &adapter);
    let ran = merge(&model, &[(&adapter, 1.0)], &out, "");
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("8 matrices are Q8_0 now") && ran.stderr.contains("--type"),
        "{}",
        ran.stderr
    );
    for (name, ty, _) in tensors(&out) {
        let want = match name.as_str() {
            name if attention(name) => QuantType::Q8_0,
            name if name.contains("norm") => QuantType::F32,
            _ => QuantType::IQ4_NL,
        };
        assert_eq!(ty, want, "{name}");
    }
    with("verify", &out, "--blocks");
    let ran = merge(&model, &[(&adapter, 1.0)], &out, "--type q4_k");
    assert!(!ran.stderr.contains("Q8_0"), "{}", ran.stderr);
    // The rounding is larger than what a small scale changes, and that is told.
    let ran = merge(&model, &[(&adapter, 0.01)], &out, "--type q4_0");
    assert!(
        ran.stderr.contains("of the change, so") && ran.stderr.contains("or q8_0"),
        "{}",
        ran.stderr
    );
    // No advice of what there is already.
    let ran = merge(&model, &[(&adapter, 0.001)], &out, "--type q8_0");
    assert!(
        ran.stderr.contains("--type f16 keeps more of it"),
        "{}",
        ran.stderr
    );
    let ran = merge(&model, &[(&adapter, 0.01)], &out, "--type f16");
    assert!(!ran.stderr.contains("of the change, so"), "{}", ran.stderr);
}

#[test]
fn what_can_not_be_merged_is_refused_and_nothing_is_written() {
    let scratch = Scratch::new("merge-refused");
    let spec = Spec::small(Arch::Llama, QuantType::Q4_0, 3);
    let model = made(scratch.join("m.gguf"), &spec);
    let wide = Spec { ff: 1024, ..spec };
    let other = made(scratch.join("other.gguf"), &wide);
    let gemma = made(
        scratch.join("gemma.gguf"),
        &Spec::small(Arch::Gemma3, QuantType::Q4_0, 3),
    );
    let pack = scratch.join("m.lean");
    let paths = [model.as_os_str(), pack.as_os_str()];
    let ran = run(["pack", "--calibrate", "none"]
        .map(std::ffi::OsStr::new)
        .into_iter()
        .chain(paths));
    assert_eq!(ran.code, 0, "{}", ran.stderr);
    let adapters = ["a.gguf", "wide.gguf", "gemma-a.gguf"].map(|name| scratch.join(name));
    for (model, adapter) in [&model, &other, &gemma].into_iter().zip(&adapters) {
        make(model, all, 5, adapter);
    }
    let [fitting, wide, foreign] = adapters.each_ref().map(|path| path.as_path());
    let out = scratch.join("out.gguf");
    std::fs::write(&out, "as it was").expect("a file");
    let (before, names) = (std::fs::read(&model).expect("a model"), scratch.names());
    for (adapters, out, args, code, want) in [
        (&[][..], &out, "", 2, "--lora"),
        (&[(fitting, 1.0)], &model, "", 2, "which is read"),
        (&[(fitting, 1.0)], &adapters[0], "", 2, "which is read"),
        (
            &[(fitting, 1.0)],
            &std::env::temp_dir(),
            "",
            2,
            "is a directory",
        ),
        (&[(fitting, 1.0)], &out, "--type q9_9", 2, "q4_0"),
        (&[(fitting, 1.0)], &out, "--type mxfp4", 2, "q4_0"),
        (&[(fitting, 1.0)], &out, "-t 0", 2, "from 1 to 1024"),
        (&[(fitting, 1e38)], &out, "", 3, "no number"),
        (&[(fitting, 1e37)], &out, "--type f16", 1, "--type f32"),
        (
            &[(wide, 1.0)],
            &out,
            "",
            3,
            "blk.0.ffn_down.weight is for 256 rows of 1024",
        ),
        (&[(foreign, 1.0)], &out, "", 3, "architecture gemma3"),
        (&[(&*model, 1.0)], &out, "", 3, "no adapter"),
    ] {
        let ran = merge(&model, adapters, out, args);
        assert!(ran.failed(code).contains(want), "{args}: {}", ran.stderr);
    }
    let ran = merge(&pack, &[(fitting, 1.0)], &out, "");
    assert!(ran.failed(3).contains("is a pack"), "{}", ran.stderr);
    merge(&scratch.join("none.gguf"), &[(fitting, 1.0)], &out, "").failed(5);
    assert_eq!(std::fs::read_to_string(&out).expect("a file"), "as it was");
    assert!(std::fs::read(&model).expect("a model") == before);
    assert_eq!(scratch.names(), names, "nothing is left");
}

#[test]
fn weights_that_are_not_finite_are_named() {
    let scratch = Scratch::new("merge-nan");
    let model = made(
        scratch.join("m.gguf"),
        &Spec::small(Arch::Llama, QuantType::F32, 3),
    );
    let adapter = scratch.join("a.gguf");
    make(&model, all, 5, &adapter);
    let mut bytes = std::fs::read(&model).expect("a model");
    let at = {
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).expect("a model");
        gguf.tensor("blk.1.ffn_up.weight").expect("a tensor").offset as usize
    };
    bytes[at + 4 * 256 * 3..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    std::fs::write(&model, bytes).expect("a file");
    let ran = merge(&model, &[(&adapter, 1.0)], &scratch.join("out.gguf"), "");
    let told = ran.failed(3);
    assert!(
        told.contains("row 3 of tensor blk.1.ffn_up.weight"),
        "{told}"
    );
    assert_eq!(scratch.names(), ["a.gguf", "m.gguf"]);
}

/// A model in shards becomes one file.
#[test]
fn shards_become_one_file() {
    let scratch = Scratch::new("merge-shards");
    let model = made(
        scratch.join("m.gguf"),
        &Spec::small(Arch::Llama, QuantType::Q4_0, 3),
    );
    let bytes = std::fs::read(&model).expect("a model");
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).expect("a model");
    let all: Vec<_> = gguf.tensors().collect();
    for (no, part) in all.chunks(all.len().div_ceil(2)).enumerate() {
        let mut header = Header::like(&gguf, |key| no == 0 || key == "general.architecture");
        header.value("split.no", &leanstream_core::gguf::Value::U16(no as u16));
        header.value("split.count", &leanstream_core::gguf::Value::U16(2));
        header.value(
            "split.tensors.count",
            &leanstream_core::gguf::Value::I32(all.len() as i32),
        );
        for tensor in part {
            header.tensor(tensor.name, tensor.ty, &tensor.dims[..tensor.n_dims]);
        }
        let path = scratch.join(format!("s-{:05}-of-00002.gguf", no + 1));
        let mut writer = header.create(&path).expect("a file");
        for tensor in part {
            let from = tensor.offset as usize;
            writer
                .write(&bytes[from..from + tensor.bytes as usize])
                .expect("written");
        }
        writer.finish().expect("finished");
    }
    let (adapter, whole, joined) = (
        scratch.join("a.gguf"),
        scratch.join("whole.gguf"),
        scratch.join("joined.gguf"),
    );
    make(&model, common::adapters::all, 5, &adapter);
    merge(&model, &[(&adapter, 1.0)], &whole, "--json").json();
    merge(
        &scratch.join("s-00002-of-00002.gguf"),
        &[(&adapter, 1.0)],
        &joined,
        "--json",
    )
    .json();
    assert!(std::fs::read(&whole).unwrap() == std::fs::read(&joined).unwrap());
    // Every shard is an input.
    let first = scratch.join("s-00001-of-00002.gguf");
    merge(
        &scratch.join("s-00002-of-00002.gguf"),
        &[(&adapter, 1.0)],
        &first,
        "",
    )
    .failed(2);
}
