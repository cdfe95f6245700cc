//! A fully trained model as a GGUF file: its source's metadata, and every tensor, with the trained ones'
//! values.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use half::{bf16, f16};
use leanstream_core::gguf::Element;
use leanstream_core::quant::QuantType;

use super::model::params::Tensor;
use super::trainer::Trainer;
use crate::error::Error;
use crate::gguf_write::Header;
use crate::pack::quantize::quantize;
use crate::pack::{copy_metadata, write_error};
use crate::run::model::{Headers, Info};

/// Types that trained values can be written as.
const TYPES: [QuantType; 6] = [
    QuantType::F32,
    QuantType::F16,
    QuantType::BF16,
    QuantType::Q8_0,
    QuantType::Q5_0,
    QuantType::Q4_0,
];

/// Writes the model. Matrices become `ty` where that is given and their rows are whole blocks, else stay
/// as they were as far as values can be written so (else `Q8_0`); vectors are F32.
///
/// # Errors
/// A type that isn't known, a value that isn't finite, or what can't be read or written.
pub fn write(
    path: &Path,
    info: &Info,
    trainer: &Trainer<'_>,
    ty: Option<&str>,
) -> Result<(), Error> {
    let wanted = ty.map(parse).transpose()?;
    let params = &trainer.decoder.params;
    let headers = Headers::open(&info.paths[0])?;
    let mut header = Header::new();
    copy_metadata(&headers, &mut header)?;
    // Names and places are read twice rather than held: first for the header, then for the data.
    let mut plan = Vec::new();
    headers.with(|shards, _| {
        for (shard, gguf) in shards.iter().enumerate() {
            for tensor in gguf.tensors() {
                let trained = params.tensors.iter().find(|t| t.name == tensor.name);
                let element = match trained {
                    Some(trained) if trained.rows == 1 => Element::from(QuantType::F32),
                    Some(trained) => Element::from(choose(wanted, tensor.ty, trained.cols)),
                    None => tensor.ty,
                };
                let dims = &tensor.dims[..tensor.n_dims];
                header.tensor(tensor.name, element, dims);
                plan.push((
                    shard,
                    trained.cloned(),
                    element,
                    tensor.offset,
                    tensor.bytes,
                ));
            }
        }
        Ok(())
    })?;
    let mut writer = header.create(path).map_err(write_error)?;
    let mut bytes = Vec::new();
    for (shard, trained, element, offset, len) in plan {
        match trained {
            Some(tensor) => {
                let ty = element.quant().expect("a type that was chosen");
                for row in rows(&tensor, &trainer.decoder.values) {
                    if let Some(bad) = row.iter().find(|x| !x.is_finite()) {
                        return Err(Error::Runtime(format!(
                            "{}: tensor {} has the value {bad}; training has diverged: a lower --lr may help",
                            path.display(),
                            tensor.name
                        )));
                    }
                    encode(ty, row, &mut bytes);
                    writer.write(&bytes).map_err(write_error)?;
                }
            }
            None => {
                let source = &info.paths[shard];
                let file = File::open(source).map_err(|e| Error::io(source, "open it", e))?;
                bytes.resize(len as usize, 0);
                file.read_exact_at(&mut bytes, offset)
                    .map_err(|e| Error::io(source, "read it", e))?;
                writer.write(&bytes).map_err(write_error)?;
            }
        }
    }
    writer.finish().map_err(write_error).map(|_| ())
}

fn rows<'a>(tensor: &Tensor, values: &'a [f32]) -> std::slice::ChunksExact<'a, f32> {
    values[tensor.offset..tensor.offset + tensor.rows * tensor.cols].chunks_exact(tensor.cols)
}

fn parse(name: &str) -> Result<QuantType, Error> {
    TYPES
        .into_iter()
        .find(|ty| ty.name().eq_ignore_ascii_case(name))
        .ok_or_else(|| {
            let known = TYPES.map(|ty| ty.name().to_lowercase()).join(", ");
            Error::Usage(format!("--type: '{name}' is none of {known}"))
        })
}

fn choose(wanted: Option<QuantType>, found: Element, cols: usize) -> QuantType {
    let found = found.quant().unwrap_or(QuantType::F32);
    let ty = wanted.unwrap_or(if TYPES.contains(&found) {
        found
    } else {
        QuantType::Q8_0
    });
    if cols.is_multiple_of(ty.block_len()) {
        ty
    } else {
        QuantType::F16
    }
}

fn encode(ty: QuantType, row: &[f32], bytes: &mut Vec<u8>) {
    bytes.clear();
    match ty {
        QuantType::F32 => bytes.extend(row.iter().flat_map(|x| x.to_le_bytes())),
        QuantType::F16 => bytes.extend(row.iter().flat_map(|x| f16::from_f32(*x).to_le_bytes())),
        QuantType::BF16 => bytes.extend(row.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes())),
        _ => {
            let len = ty.row_bytes(row.len()).expect("whole blocks");
            bytes.resize(len, 0);
            quantize(ty, row, bytes);
        }
    }
}
