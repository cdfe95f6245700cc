//! Whether the weights themselves are numbers: every block of every tensor, read from the files.
//!
//! A run doesn't look at each weight it uses. `verify` does so when it is asked, and what computes with the
//! weights when its results stop being finite, to name the tensor to blame.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::gguf::{Gguf, Value};
use leanstream_core::quant;

use super::model::Headers;
use crate::error::Error;
use crate::pack::CRCS_KEY;
use crate::signals;

/// Bytes that are read at a time in a process that has spent its budget.
const SMALL_BYTES: usize = 64 << 10;

/// A tensor to be read: its name, shard, format, place and length.
pub struct Region {
    name: String,
    file: usize,
    /// `None`: integers, in which every value is right.
    ty: Option<quant::QuantType>,
    offset: u64,
    bytes: u64,
    /// CRC32C of a pack's tensor, where it has them.
    crc: Option<u32>,
}

/// Names the tensor that made a computation's numbers stop being finite: the first damaged one of the model at
/// `path`. `Ok` when none is.
///
/// # Errors
/// As [`check_blocks`].
pub fn blame(path: &Path) -> Result<(), Error> {
    let headers = Headers::open(path)?;
    let regions = headers.with(|shards, _| regions(path, shards))?;
    let files: Vec<PathBuf> = headers.files().map(|(path, _)| path.to_owned()).collect();
    drop(headers);
    check_blocks(&files, &regions, SMALL_BYTES).map(|_| ())
}

/// All tensors of a model's files, in the files' order.
///
/// # Errors
/// A pack's list of checksums that isn't one for each tensor.
pub fn regions(path: &Path, shards: &[Gguf<'_>]) -> Result<Vec<Region>, Error> {
    let mut crcs = Vec::new();
    if let Some(value) = shards[0].get(CRCS_KEY) {
        let Value::Array(array) = value else {
            return Err(Error::model(path, format_args!("{CRCS_KEY} is no list")));
        };
        crcs.extend(array.values().map(|value| match value {
            Value::U32(crc) => Some(crc),
            _ => None,
        }));
        let tensors: usize = shards.iter().map(|shard| shard.tensors().count()).sum();
        if crcs.len() != tensors || crcs.contains(&None) {
            return Err(Error::model(
                path,
                format_args!("{CRCS_KEY} isn't a number for each of the {tensors} tensors"),
            ));
        }
    }
    let mut crcs = crcs.into_iter().flatten();
    let mut all = Vec::new();
    for (file, shard) in shards.iter().enumerate() {
        all.extend(shard.tensors().map(|tensor| Region {
            name: tensor.name.to_owned(),
            file,
            ty: tensor.ty.quant(),
            offset: tensor.offset,
            bytes: tensor.bytes,
            crc: crcs.next(),
        }));
    }
    Ok(all)
}

/// Reads every tensor, at most `buffer_bytes` at a time (at least a block's); returns the number of blocks.
///
/// # Errors
/// [`Error::Model`] for the first block with a number that isn't finite, or a tensor with another checksum, by
/// file and name; what can't be read; a signal.
pub fn check_blocks(
    files: &[PathBuf],
    regions: &[Region],
    buffer_bytes: usize,
) -> Result<u64, Error> {
    let mut buffer = vec![0; buffer_bytes];
    let mut blocks = 0;
    for region in regions {
        if region.ty.is_none() && region.crc.is_none() {
            continue;
        }
        let path = &files[region.file];
        let file = File::open(path).map_err(|error| Error::io(path, "open it", error))?;
        let block = region.ty.map_or(1, |ty| ty.block_bytes());
        let step = buffer_bytes - buffer_bytes % block;
        let (mut done, mut crc) = (0, 0);
        while done < region.bytes {
            signals::check()?;
            let part = &mut buffer[..(region.bytes - done).min(step as u64) as usize];
            file.read_exact_at(part, region.offset + done)
                .map_err(|error| Error::io(path, "read its weights", error))?;
            crc = crc32c::crc32c_append(crc, part);
            if let Some(ty) = region.ty {
                quant::check(ty, part).map_err(|error| {
                Error::model(
                    path,
                    format_args!(
                        "tensor {}: block {} has a scale or weight that is no finite number; the file is damaged: \
                         download it again",
                        region.name,
                        blocks_in(done, block) + error.index as u64
                    ),
                )
            })?;
            }
            done += part.len() as u64;
        }
        if region.crc.is_some_and(|want| want != crc) {
            return Err(Error::model(
                path,
                format_args!(
                    "tensor {} isn't what was packed: its CRC32C doesn't match; copy the file again, or pack the model again",
                    region.name
                ),
            ));
        }
        if region.ty.is_some() {
            blocks += blocks_in(region.bytes, block);
        }
    }
    Ok(blocks)
}

fn blocks_in(bytes: u64, block: usize) -> u64 {
    bytes / block as u64
}
