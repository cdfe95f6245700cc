//! Packs made for tests, and what a reader who knows nothing but FORMAT.md makes of them.

use std::path::Path;

use half::f16;
use leanstream::error::Error;
use leanstream::pack::{self, Gates, Options, Report};
use leanstream::run::model;
use leanstream_core::gguf::{Gguf, TensorIndex};
use leanstream_core::pack::{Down, Ffn, Order, Pack, PackedHead, PackedLayer, Place};
use leanstream_core::plan::{self, Hyper, Model};
use leanstream_core::quant::{QuantType, decode};

use super::run;

/// A few words, so that calibration is quick.
pub const TEXT: &[u8] = b"The cat sat on the mat, and the dog ran to the inn.";

/// Calibrated on a few words.
pub fn options() -> Options<'static> {
    Options {
        ffn: Ffn::Units,
        down: None,
        gates: Gates::Matrix,
        order: Order::Frequency,
        calibrate: Some(TEXT),
        quality: None,
        session: run::options(512),
    }
}

/// Packs `from` into `to`.
pub fn pack_with(from: &Path, to: &Path, options: &Options<'_>) -> Result<Report, Error> {
    pack_telling(from, to, options, &mut |_, _, _| {})
}

/// The same, and tells `progress`.
pub fn pack_telling(
    from: &Path,
    to: &Path,
    options: &Options<'_>,
    progress: &mut pack::Progress<'_>,
) -> Result<Report, Error> {
    let loaded = model::load(from)?;
    let context = leanstream::pack::calibrate::context(&loaded.0.hyper);
    let options = Options {
        session: leanstream::run::session::Options {
            context,
            prompt: context,
            ..options.session.clone()
        },
        ..*options
    };
    pack::pack(from, to, (&loaded.0, loaded.1), &options, progress)
}

/// A pack, read whole.
pub struct Read {
    pub file: Vec<u8>,
    pub hyper: Hyper,
    pub layers: Vec<PackedLayer>,
    pub head: Option<PackedHead>,
    pub order: Order,
    pub calibration_tokens: u32,
}

impl Read {
    /// Reads a pack that is sound.
    pub fn open(path: &Path) -> Self {
        let file = std::fs::read(path).expect("a pack");
        let (hyper, layers, head, order, calibration_tokens) = {
            let files = [Gguf::parse(&file, file.len() as u64).expect("a GGUF file")];
            let mut scratch = vec![0; TensorIndex::entries_needed(&files)];
            let tensors = TensorIndex::new(&files, &mut scratch).expect("no name twice");
            let model = Model {
                first: &files[0],
                tensors,
            };
            let hyper = plan::hyper(&model).expect("a model");
            let pack = Pack::of(&model, &hyper).expect("sound").expect("a pack");
            let layers = (0..pack.layers()).map(|layer| pack.layer(layer).expect("sound"));
            (
                hyper,
                layers.collect(),
                pack.head().expect("sound"),
                pack.order,
                pack.calibration_tokens,
            )
        };
        Self {
            file,
            hyper,
            layers,
            head,
            order,
            calibration_tokens,
        }
    }

    pub fn bytes(&self, place: Place) -> &[u8] {
        &self.file[place.offset as usize..][..place.bytes as usize]
    }

    pub fn floats(&self, place: Place) -> Vec<f32> {
        let bytes = self.bytes(place);
        let mut floats = vec![0.0; bytes.len() / 4];
        decode(QuantType::F32, bytes, &mut floats);
        floats
    }

    /// Source neurons of a layer's units.
    pub fn neurons(&self, layer: &PackedLayer) -> Vec<usize> {
        let bytes = self.bytes(layer.order).as_chunks::<4>().0;
        let neurons = bytes.iter().map(|b| i32::from_le_bytes(*b) as usize);
        neurons.collect()
    }

    /// A unit's bytes.
    pub fn unit(&self, layer: &PackedLayer, unit: usize) -> &[u8] {
        let bytes = layer.unit_bytes as usize;
        &self.bytes(layer.units)[unit * bytes..][..bytes]
    }

    /// A unit's down column `(d)`, decoded as FORMAT.md has it; `neuron` is the source's.
    pub fn column(&self, layer: &PackedLayer, unit: usize, neuron: usize) -> Vec<f32> {
        let unit = self.unit(layer, unit);
        let column = &unit[layer.layout.down_at as usize..][..layer.layout.down_bytes as usize];
        let d = self.hyper.d as usize;
        let table = |place: Option<Place>, i: usize| {
            let bytes = self.bytes(place.expect("a table"));
            let at = (neuron / 32 * d + i) * 2;
            f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
        };
        let scale = |i| table(layer.scales, i);
        let min = |i| table(layer.mins, i);
        let nibble = |i: usize| f32::from(column[i / 2] >> (4 * (i % 2)) & 0xf);
        let byte = |i: usize| f32::from(column[i]);
        let value = |i: usize| match layer.down.ty() {
            QuantType::Q8_0 => scale(i) * f32::from(column[i] as i8),
            QuantType::Q4_0 => scale(i) * (nibble(i) - 8.0),
            QuantType::Q4_1 => scale(i) * nibble(i) + min(i),
            QuantType::Q5_0 => scale(i) * (byte(i) - 16.0),
            QuantType::Q5_1 => scale(i) * byte(i) + min(i),
            other => panic!("{other} isn't moved from blocks"),
        };
        match layer.down {
            Down::Moved { ty } if ty.block_len() > 1 => (0..d).map(value).collect(),
            Down::Moved { ty } | Down::Rows { ty } => {
                let mut values = vec![0.0; d];
                decode(ty, column, &mut values);
                values
            }
        }
    }
}

/// A tensor of a GGUF file: bytes and, for weights, values.
pub fn tensor<'f>(file: &'f [u8], name: &str) -> (&'f [u8], Vec<f32>) {
    let gguf = Gguf::parse(file, file.len() as u64).expect("a GGUF file");
    let tensor = gguf.tensor(name).unwrap_or_else(|| panic!("no {name}"));
    let bytes = &file[tensor.offset as usize..][..tensor.bytes as usize];
    let mut values = Vec::new();
    if let Some(ty) = tensor.ty.quant() {
        values = vec![0.0; (tensor.rows() * tensor.cols()) as usize];
        decode(ty, bytes, &mut values);
    }
    (bytes, values)
}

/// Makes the checksum of a pack's header right again, after a change that isn't meant as damage.
pub fn reseal(file: &mut [u8]) {
    let (bytes, at) = {
        let gguf = Gguf::parse(file, file.len() as u64).expect("a GGUF file");
        (gguf.data_offset() as usize, crc_at(file))
    };
    file[at..at + 4].fill(0);
    let crc = crc32c::crc32c(&file[..bytes]);
    file[at..at + 4].copy_from_slice(&crc.to_le_bytes());
}

/// Where the checksum of a pack's header stands.
pub fn crc_at(file: &[u8]) -> usize {
    let key = b"lean.header.crc32c";
    let key_at = file.windows(key.len()).position(|part| part == key);
    // Behind the value's type.
    key_at.expect("a checksum of the header") + key.len() + 4
}
