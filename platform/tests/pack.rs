//! Packs hold what the models held: every unit, every tensor, every key.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;

use common::packs::{Read, TEXT, options, pack_with, reseal, tensor};
use common::{Scratch, relative_l2};
use leanstream::pack::header::check_header;
use leanstream::pack::{Options, is_sound};
use leanstream::run::model::Headers;
use leanstream::run::session;
use leanstream::synth::vocab::{LEAST, Vocab};
use leanstream::synth::{Arch, Spec};
use leanstream_core::gguf::{Gguf, Value};
use leanstream_core::pack::{Down, Ffn, Order};
use leanstream_core::quant::{QuantType, decode};

fn two_layers(arch: Arch, ty: QuantType) -> Spec {
    Spec {
        layers: 2,
        ..Spec::small(arch, ty, 5)
    }
}

/// Checks all units and tensors of the pack of `spec`; `lossy` is the most that columns may lose.
fn check(name: &str, spec: &Spec, options: &Options<'_>, lossy: f64) -> Read {
    let scratch = Scratch::new(name);
    let (from, to) = (scratch.join("model.gguf"), scratch.join("model.lean"));
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let report = pack_with(&from, &to, options).expect("a pack");
    let source = fs::read(&from).unwrap();
    let read = Read::open(&to);
    assert_eq!(report.bytes, read.file.len() as u64);
    let gated = spec.arch != Arch::Arcee;
    let (d, ff) = (spec.d as usize, spec.ff as usize);
    for (number, layer) in read.layers.iter().enumerate() {
        let part = |part: &str| format!("blk.{number}.{part}");
        let neurons = read.neurons(layer);
        let stats = read.floats(layer.stats);
        // The gate's part: the source's rows, permuted.
        let gate = part(if gated {
            "ffn_gate.weight"
        } else {
            "ffn_up.weight"
        });
        let (rows, wanted) = (tensor(&read.file, &gate).0, tensor(&source, &gate).0);
        let bytes = wanted.len() / ff;
        let (_, down) = tensor(&source, &part("ffn_down.weight"));
        let up = gated.then(|| tensor(&source, &part("ffn_up.weight")).0);
        let mut seen = vec![false; ff];
        for (unit, &neuron) in neurons.iter().enumerate() {
            assert!(
                !std::mem::replace(&mut seen[neuron], true),
                "{neuron} twice"
            );
            assert_eq!(
                rows[unit * bytes..][..bytes],
                wanted[neuron * bytes..][..bytes]
            );
            let stored = read.unit(layer, unit);
            assert!(is_sound(stored, layer.layout.crc_at as usize), "{unit}");
            match (layer.layout.up, up) {
                (Some((ty, len)), Some(up)) => {
                    assert_eq!(ty, spec.ty);
                    let len = len as usize;
                    assert_eq!(stored[..len], up[neuron * len..][..len]);
                }
                (None, None) => {}
                other => panic!("up rows: {:?}", other.0),
            }
            let column = read.column(layer, unit, neuron);
            let wanted: Vec<f32> = (0..d).map(|row| down[row * ff + neuron]).collect();
            if layer.down.is_moved() {
                let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&column), bits(&wanted), "{number} {neuron}");
            } else {
                let double =
                    |values: &[f32]| values.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
                let loss = relative_l2(&double(&column), &double(&wanted));
                assert!(loss < lossy, "{number} {neuron}: {loss}");
            }
            let norm = column
                .iter()
                .map(|x| f64::from(*x).powi(2))
                .sum::<f64>()
                .sqrt();
            let told = f64::from(stats[2 * ff + unit]);
            assert!((told - norm).abs() <= 1e-6 * norm, "{told} {norm}");
            assert!((0.0..=1.0).contains(&stats[unit]));
            assert!(stats[ff + unit].is_finite() && stats[ff + unit] >= 0.0);
        }
        for name in ["ffn_gate.bias", "ffn_up.bias"] {
            if spec.bias && spec.arch == Arch::Llama {
                let (_, bias) = tensor(&read.file, &part(name));
                let (_, wanted) = tensor(&source, &part(name));
                let wanted: Vec<f32> = neurons.iter().map(|neuron| wanted[*neuron]).collect();
                assert_eq!(bias, wanted);
            }
        }
        if read.order == Order::Frequency {
            assert!(stats[..ff].is_sorted_by(|a, b| a >= b), "by frequency");
        }
    }
    check_rest(&source, &read.file);
    check_head(&source, &read, spec);
    read
}

/// Keys, and the tensors that aren't packed.
fn check_rest(source: &[u8], packed: &[u8]) {
    let old = Gguf::parse(source, source.len() as u64).unwrap();
    let new = Gguf::parse(packed, packed.len() as u64).unwrap();
    for (key, value) in old.metadata() {
        if key != "general.alignment" {
            let found = new.get(key).unwrap_or_else(|| panic!("no {key}"));
            assert_eq!(
                format!("{:?}", plain(found)),
                format!("{:?}", plain(value)),
                "{key}"
            );
        }
    }
    let names = |gguf: &Gguf<'_>| {
        gguf.tensors()
            .map(|t| t.name.to_owned())
            .collect::<Vec<_>>()
    };
    for name in names(&old) {
        let packed_away = [
            ".ffn_up.weight",
            ".ffn_down.weight",
            ".ffn_gate.weight",
            ".ffn_gate.bias",
            ".ffn_up.bias",
        ];
        if !packed_away.iter().any(|part| name.ends_with(part)) {
            assert_eq!(tensor(source, &name).0, tensor(packed, &name).0, "{name}");
        }
    }
    assert!(
        !names(&new)
            .iter()
            .any(|name| name.ends_with("ffn_down.weight"))
    );
    assert!(new.tensors().all(|tensor| tensor.offset % 4096 == 0));
}

/// A value without where it stands in the file.
fn plain(value: Value<'_>) -> Vec<String> {
    match value.as_array() {
        Some(array) => array.values().flat_map(plain).collect(),
        None => vec![format!("{value:?}")],
    }
}

fn check_head(source: &[u8], read: &Read, spec: &Spec) {
    let head = read.head.expect("a head in two planes");
    let name = if spec.tied {
        "token_embd.weight"
    } else {
        "output.weight"
    };
    let (bytes, rows) = tensor(source, name);
    let d = spec.d as usize;
    let errors = read.floats(head.sketch_error);
    let mut sketch = vec![0.0; rows.len()];
    decode(QuantType::Q4_0, read.bytes(head.sketch), &mut sketch);
    let (row_bytes, unit_bytes) = (head.row.1 as usize, head.unit_bytes as usize);
    let (mut off, mut all) = (0.0, 0.0);
    for row in 0..spec.vocab as usize {
        let unit = &read.bytes(head.units)[row * unit_bytes..][..unit_bytes];
        assert_eq!(unit[..row_bytes], bytes[row * row_bytes..][..row_bytes]);
        assert!(is_sound(unit, head.crc_at as usize));
        let pairs = rows[row * d..][..d].iter().zip(&sketch[row * d..][..d]);
        let squares: f64 = pairs
            .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
            .sum();
        assert!(
            squares.sqrt() <= f64::from(errors[row]),
            "row {row}: {} > {}",
            squares.sqrt(),
            errors[row]
        );
        off += f64::from(errors[row]).powi(2);
        all += rows[row * d..][..d]
            .iter()
            .map(|x| f64::from(*x).powi(2))
            .sum::<f64>();
    }
    // Not just a bound: 4 bits lose about a twelfth.
    assert!((off / all).sqrt() < 0.13, "{}", (off / all).sqrt());
}

#[test]
fn columns_of_every_type_come_back() {
    for ty in QuantType::ALL {
        let spec = Spec {
            down_ty: ty,
            ..two_layers(Arch::Llama, QuantType::Q8_0)
        };
        let read = check(&format!("pack-{ty}"), &spec, &options(), 0.015);
        let wanted = Down::moved(ty).unwrap_or(Down::Rows {
            ty: QuantType::Q8_0,
        });
        assert!(read.layers.iter().all(|layer| layer.down == wanted), "{ty}");
        assert!(read.calibration_tokens > 10);
    }
}

#[test]
fn architectures_activations_and_heads() {
    let relu = Spec {
        activation: Some("relu"),
        tied: true,
        ..two_layers(Arch::Llama, QuantType::Q4_1)
    };
    check("pack-relu", &relu, &options(), 0.0);
    let biased = Spec {
        bias: true,
        embed_ty: QuantType::F16,
        ..two_layers(Arch::Llama, QuantType::Q5_1)
    };
    check("pack-biased", &biased, &options(), 0.0);
    let gemma = Spec {
        embed_ty: QuantType::Q6_K,
        ..two_layers(Arch::Gemma3, QuantType::Q4_K)
    };
    check("pack-gemma", &gemma, &options(), 0.015);
    let read = check(
        "pack-arcee",
        &two_layers(Arch::Arcee, QuantType::Q4_0),
        &options(),
        0.0,
    );
    for layer in &read.layers {
        assert_eq!(layer.layout.up, None);
        assert_eq!(layer.unit_bytes, 128 + 4);
        // Without a gate, the column alone is what a unit weighs.
        let stats = read.floats(layer.stats);
        let ff = layer.count as usize;
        assert_eq!(stats[ff..2 * ff], stats[2 * ff..]);
    }
}

#[test]
fn other_orders_and_types() {
    let spec = Spec {
        activation: Some("relu"),
        ..two_layers(Arch::Llama, QuantType::Q8_0)
    };
    for (name, down, most) in [
        ("pack-to-q8_0", QuantType::Q8_0, 0.015),
        ("pack-to-q5_0", QuantType::Q5_0, 0.07),
        ("pack-to-q4_0", QuantType::Q4_0, 0.14),
    ] {
        let to = Options {
            down: Some(down),
            ..options()
        };
        let read = check(name, &spec, &to, most);
        assert!(
            read.layers
                .iter()
                .all(|layer| layer.down == Down::Rows { ty: down })
        );
    }
    let chained = Options {
        order: Order::Coactivation,
        ..options()
    };
    let read = check("pack-chained", &spec, &chained, 0.0);
    assert_eq!(read.order, Order::Coactivation);
    let file = Options {
        order: Order::File,
        ..options()
    };
    let read = check("pack-file", &spec, &file, 0.0);
    assert!(
        read.layers
            .iter()
            .all(|layer| read.neurons(layer).is_sorted())
    );
    // Without calibration: priors.
    let none = Options {
        calibrate: None,
        ..options()
    };
    let read = check("pack-none", &spec, &none, 0.0);
    assert_eq!((read.order, read.calibration_tokens), (Order::File, 0));
    let stats = read.floats(read.layers[0].stats);
    let ff = spec.ff as usize;
    assert!(stats[..ff].iter().all(|share| *share == 0.5));
    assert_eq!(stats[ff..2 * ff], stats[2 * ff..]);
}

/// A bit of any byte before the tensors' data is found, those of the checksum's own keys too.
#[test]
fn every_byte_of_the_header_is_checked() {
    let scratch = Scratch::new("pack-header");
    let (from, to) = (scratch.join("model.gguf"), scratch.join("model.lean"));
    let spec = two_layers(Arch::Llama, QuantType::Q8_0);
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    for ffn in [Ffn::Units, Ffn::Matrices] {
        let plain = Options {
            ffn,
            calibrate: None,
            ..options()
        };
        pack_with(&from, &to, &plain).expect("a pack");
        let verify = || Headers::open(&to).and_then(|headers| check_header(&headers));
        assert!(verify().expect("sound"), "a pack's header is checked");
        // What a reader makes of FORMAT.md.
        let sound = fs::read(&to).unwrap();
        let mut sealed = sound.clone();
        reseal(&mut sealed);
        assert!(sealed == sound);
        let gguf = Gguf::parse(&sound, sound.len() as u64).unwrap();
        let bytes = gguf.data_offset();
        assert_eq!(gguf.get("lean.header.bytes").unwrap().as_u64(), Some(bytes));
        let file = fs::File::options().write(true).open(&to).unwrap();
        for at in 0..bytes {
            let byte = sound[at as usize];
            file.write_all_at(&[byte ^ 1 << (at % 8)], at).unwrap();
            match verify() {
                Err(error) => assert_eq!(error.exit_code(), 3, "byte {at}: {error}"),
                Ok(_) => panic!("byte {at} of {bytes} may be damaged"),
            }
            file.write_all_at(&[byte], at).unwrap();
        }
        assert!(fs::read(&to).unwrap() == sound);
    }
    // A model, and packs from before there was a checksum, have none.
    let headers = Headers::open(&from).unwrap();
    assert!(!check_header(&headers).expect("a model"));
}

/// Which thread comes first, and how prompts are cut, changes no byte.
#[test]
fn packs_are_reproducible() {
    let scratch = Scratch::new("pack-again");
    let from = scratch.join("model.gguf");
    let spec = two_layers(Arch::Gemma3, QuantType::Q8_0);
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let mut packs = Vec::new();
    for (threads, batch) in [(1, None), (3, None), (2, Some(7))] {
        let to = scratch.join(format!("{threads}.lean"));
        let options = Options {
            order: Order::Coactivation,
            session: session::Options {
                threads,
                batch,
                ..options().session
            },
            ..options()
        };
        pack_with(&from, &to, &options).expect("a pack");
        packs.push(fs::read(&to).unwrap());
    }
    assert!(packs[0] == packs[1], "threads change the pack");
    assert!(packs[0] == packs[2], "batches change the pack");
}

/// The stats say what the model does, and say it of the right units.
#[test]
fn shares_are_those_of_the_model() {
    let scratch = Scratch::new("pack-shares");
    let (from, to) = (scratch.join("model.gguf"), scratch.join("model.lean"));
    // Biases of the gate decide who is active: large ones make it sure.
    let spec = Spec {
        activation: Some("relu"),
        bias: true,
        vocab: LEAST,
        ..two_layers(Arch::Llama, QuantType::F32)
    };
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let mut source = fs::read(&from).unwrap();
    let (at, len) = {
        let gguf = Gguf::parse(&source, source.len() as u64).unwrap();
        let bias = gguf.tensor("blk.1.ffn_gate.bias").unwrap();
        (bias.offset as usize, bias.bytes as usize)
    };
    for (neuron, value) in source[at..at + len].chunks_exact_mut(4).enumerate() {
        let wanted: f32 = if neuron % 3 == 0 { 1e4 } else { -1e4 };
        value.copy_from_slice(&wanted.to_le_bytes());
    }
    fs::write(&from, source).unwrap();
    let report = pack_with(&from, &to, &options()).expect("a pack");
    let read = Read::open(&to);
    let layer = &read.layers[1];
    let stats = read.floats(layer.stats);
    for (unit, neuron) in read.neurons(layer).into_iter().enumerate() {
        let wanted = if neuron % 3 == 0 { 1.0 } else { 0.0 };
        assert_eq!(stats[unit], wanted, "neuron {neuron}");
    }
    let mean = 171.0 / 512.0;
    assert!(
        (report.active_share[1] - mean).abs() < 1e-9,
        "{}",
        report.active_share[1]
    );
    assert_eq!(read.calibration_tokens, report.calibration_tokens);
    assert!(TEXT.len() as u32 > report.calibration_tokens);
}
