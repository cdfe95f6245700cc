//! Adapters made up from a seed, and what a reader in doubles makes of a model with them.

use std::path::Path;

use leanstream::gguf_write::Header;
use leanstream::run::model::Headers;
use leanstream::tune::adapter::{About, Adapter, Part, Precision, write};
use leanstream_core::quant::{QuantType, decode};

use super::inputs::Random;

/// Every matrix of the layers.
pub fn all(name: &str) -> bool {
    name.starts_with("blk.") && !name.contains("norm")
}

/// The matrices of attention.
pub fn attention(name: &str) -> bool {
    name.contains("attn_") && all(name)
}

/// The adapter's rank and alpha.
pub const RANK: u32 = 4;
pub const ALPHA: f32 = 6.0;

/// Writes an adapter of rank 4 for the wanted matrices of a model. What it adds has a quarter of the
/// deviation of what it is added to.
pub fn make(model: &Path, wanted: fn(&str) -> bool, seed: u64, out: &Path) {
    struct Owned {
        name: String,
        inputs: u32,
        outputs: u32,
        a: Vec<f32>,
        b: Vec<f32>,
    }
    let mut random = Random(seed);
    let mut floats =
        |len: usize, size: f32| -> Vec<f32> { (0..len).map(|_| size * random.normal()).collect() };
    let headers = Headers::open(model).expect("a model");
    let (arch, parts) = headers
        .with(|shards, _| {
            let arch = shards[0].get("general.architecture").expect("a key");
            let parts = shards[0]
                .tensors()
                .filter(|tensor| tensor.n_dims == 2 && wanted(tensor.name))
                .map(|tensor| {
                    let (inputs, outputs) = (tensor.cols() as usize, tensor.rows() as usize);
                    let rank = RANK as usize;
                    Owned {
                        name: tensor.name.to_owned(),
                        inputs: inputs as u32,
                        outputs: outputs as u32,
                        a: floats(rank * inputs, 1.0 / (inputs as f32).sqrt()),
                        b: floats(outputs * rank, 0.25 / ALPHA * (RANK as f32).sqrt()),
                    }
                })
                .collect::<Vec<_>>();
            Ok((arch.as_str().expect("text").to_owned(), parts))
        })
        .expect("a model");
    assert!(!parts.is_empty(), "nothing to adapt");
    let parts: Vec<Part<'_>> = parts
        .iter()
        .map(|part| Part {
            name: &part.name,
            inputs: part.inputs,
            outputs: part.outputs,
            rank: RANK,
            a: &part.a,
            b: &part.b,
        })
        .collect();
    let about = About {
        arch: &arch,
        alpha: ALPHA,
        name: None,
    };
    write(out, &about, &parts, Precision::F32).expect("an adapter");
}

/// A tensor of `model` as floats, (rows, cols).
pub fn tensor(model: &Path, name: &str) -> Vec<f32> {
    let bytes = std::fs::read(model).expect("a model");
    let gguf = leanstream_core::gguf::Gguf::parse(&bytes, bytes.len() as u64).expect("a model");
    let tensor = gguf.tensor(name).expect("a tensor");
    let from = tensor.offset as usize;
    let mut values = vec![0.0; (tensor.rows() * tensor.cols()) as usize];
    let ty = tensor.ty.quant().expect("weights");
    decode(ty, &bytes[from..from + tensor.bytes as usize], &mut values);
    values
}

/// `values` and the product of every adapter for `name`, summed in doubles.
pub fn adapted(mut values: Vec<f32>, name: &str, adapters: &[(&Path, f64)]) -> Vec<f32> {
    for (path, scale) in adapters {
        let adapter = Adapter::open(path).expect("an adapter");
        let Some(pair) = adapter.pairs().iter().find(|pair| pair.name == name) else {
            continue;
        };
        let [rank, inputs, outputs] =
            [pair.rank, pair.inputs, pair.outputs].map(|size| size as usize);
        let (mut a, mut b) = (vec![0.0; rank * inputs], vec![0.0; outputs * rank]);
        adapter.read_a(pair, &mut a).expect("A");
        adapter.read_b(pair, &mut b).expect("B");
        let factor = scale * f64::from(adapter.alpha()) / rank as f64;
        for (o, row) in values.chunks_exact_mut(inputs).enumerate() {
            for (i, value) in row.iter_mut().enumerate() {
                let product = |r| f64::from(b[o * rank + r]) * f64::from(a[r * inputs + i]);
                *value = (f64::from(*value) + factor * (0..rank).map(product).sum::<f64>()) as f32;
            }
        }
    }
    values
}

/// Writes `model` with the adapters in its matrices, all of it as F32.
pub fn merged(model: &Path, adapters: &[(&Path, f64)], out: &Path) {
    let headers = Headers::open(model).expect("a model");
    headers
        .with(|shards, _| {
            let mut header = Header::new();
            for (key, value) in shards[0]
                .metadata()
                .filter(|(k, _)| *k != "general.alignment")
            {
                header.value(key, &value);
            }
            for tensor in shards[0].tensors() {
                header.tensor(tensor.name, QuantType::F32, &tensor.dims[..tensor.n_dims]);
            }
            let mut writer = header.create(out).expect("a file");
            for tensor in shards[0].tensors() {
                let values = adapted(self::tensor(model, tensor.name), tensor.name, adapters);
                let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
                writer.write(&bytes).expect("written");
            }
            writer.finish().expect("finished");
            Ok(())
        })
        .expect("a model");
}
