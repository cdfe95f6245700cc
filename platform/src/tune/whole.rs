//! A fully trained model as a GGUF file: its source's metadata, and every tensor, with the trained ones'
//! values.

use std::path::Path;

use leanstream_core::gguf::Element;
use leanstream_core::quant::QuantType;

use super::model::params::Tensor;
use super::trainer::Trainer;
use crate::error::Error;
use crate::gguf_write::Header;
use crate::pack::quantize::{INSTEAD, encodes, quantize};
use crate::pack::source::{Region, Source};
use crate::pack::{copy_metadata, write_error};
use crate::run::model::{Headers, Info};

/// Writes the model. Matrices become `wanted` where that is given and their rows are whole blocks, else stay
/// as they were as far as values can be written so (else `Q8_0`); vectors are F32.
///
/// # Errors
/// A value that isn't finite, or what can't be read or written.
pub fn write(
    path: &Path,
    info: &Info,
    trainer: &Trainer<'_>,
    wanted: Option<QuantType>,
) -> Result<(), Error> {
    let headers = Headers::open(&info.paths[0])?;
    let source = Source::open(&headers)?;
    let mut header = Header::new();
    copy_metadata(&headers, &mut header)?;
    drop(headers);
    let trained = |region: &Region| {
        let mut tensors = trainer.decoder.params.tensors.iter();
        tensors.find(|tensor| tensor.name == region.name)
    };
    let stored = |region: &Region| match trained(region) {
        Some(tensor) if tensor.rows == 1 => Element::from(QuantType::F32),
        Some(tensor) => Element::from(choose(wanted, region.ty, tensor.cols)),
        None => region.ty,
    };
    for region in &source.tensors {
        header.tensor(&region.name, stored(region), &region.dims);
    }
    let mut writer = header.create(path).map_err(write_error)?;
    let mut bytes = Vec::new();
    for region in &source.tensors {
        let Some(tensor) = trained(region) else {
            source.copy(region, &mut writer, |_| ())?;
            continue;
        };
        let ty = stored(region).quant().expect("a type that was chosen");
        bytes.resize(ty.row_bytes(tensor.cols).expect("whole blocks"), 0);
        for row in rows(tensor, &trainer.decoder.values) {
            if let Some(bad) = row.iter().find(|x| !x.is_finite()) {
                return Err(Error::Runtime(format!(
                    "{}: tensor {} has the value {bad}; training has diverged: a lower --lr may help",
                    path.display(),
                    tensor.name
                )));
            }
            quantize(ty, row, &mut bytes);
            writer.write(&bytes).map_err(write_error)?;
        }
    }
    writer.finish().map_err(write_error).map(|_| ())
}

fn rows<'a>(tensor: &Tensor, values: &'a [f32]) -> std::slice::ChunksExact<'a, f32> {
    values[tensor.range()].chunks_exact(tensor.cols)
}

fn choose(wanted: Option<QuantType>, found: Element, cols: usize) -> QuantType {
    let found = found.quant().unwrap_or(QuantType::F32);
    let ty = wanted.unwrap_or(if encodes(found) { found } else { INSTEAD });
    if cols.is_multiple_of(ty.block_len()) {
        ty
    } else {
        QuantType::F16
    }
}
