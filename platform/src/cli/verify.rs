//! `leanstream verify`: is this file whole?

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::gguf::{Gguf, Value};
use leanstream_core::pack::Ffn;
use leanstream_core::plan::{self, Model};
use leanstream_core::quant;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::args::PathArg;
use super::output::print;
use crate::error::Error;
use crate::fetch::hex;
use crate::pack::CRCS_KEY;
use crate::pack::check::describe;
use crate::run::model::{Headers, Parts};
use crate::signals;
use crate::text::Tokenizer;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// Check a model's structure, that it can run, every unit of a pack, and on request every block of
/// the weights.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "verify")]
pub struct Verify {
    /// the model
    #[argh(option, short = 'm', long = "model")]
    model: PathArg,
    /// read all weights, and check every block's scales and a pack's checksum of each tensor
    #[argh(switch)]
    blocks: bool,
    /// print the SHA-256 of each file
    #[argh(switch)]
    sha256: bool,
    /// print one JSON object
    #[argh(switch)]
    json: bool,
}

/// A tensor to be read: its name, shard, format, place and length.
struct Region {
    name: String,
    file: usize,
    /// `None`: integers, in which every value is right.
    ty: Option<quant::QuantType>,
    offset: u64,
    bytes: u64,
    /// CRC32C of a pack's tensor, where it has them.
    crc: Option<u32>,
}

impl Verify {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let path = &self.model.0;
        let headers = Headers::open(path)?;
        let bad = |error: &dyn std::fmt::Display| Error::model(path, error);
        let pack = describe(&headers)?;
        let (regions, arch, version, sketched) = headers.with(|shards, tensors| {
            let model = Model {
                first: &shards[0],
                tensors,
            };
            let hyper = match &pack {
                Some(pack) if pack.ffn == Ffn::Units => pack.hyper,
                _ => plan::plan(&model, &mut Parts::default(), plan::Head::Full)
                    .map_err(|error| bad(&error))?,
            };
            Tokenizer::from_gguf(&shards[0]).map_err(|error| bad(&error))?;
            let sketched = tensors.find("output.sketch").is_some();
            Ok((
                regions(path, shards)?,
                hyper.arch.name(),
                shards[0].version(),
                sketched,
            ))
        })?;
        let files: Vec<PathBuf> = headers.files().map(|(path, _)| path.to_owned()).collect();
        drop(headers);
        let units = match &pack {
            Some(pack) => {
                // What a run refuses: statistics, errors and losses that make no sense.
                let head = match sketched {
                    true => plan::Head::Exact,
                    false => plan::Head::Full,
                };
                drop(crate::run::model::load_with(path, head)?);
                pack.check()?
            }
            None => 0,
        };
        let blocks = if self.blocks {
            check_blocks(&files, &regions)?
        } else {
            0
        };
        let mut sums = Vec::new();
        if self.sha256 {
            for file in &files {
                sums.push(sha256(file)?);
            }
        }
        if self.json {
            let mut summary = json!({
                "ok": true,
                "architecture": arch,
                "gguf_version": version,
                "tensors": regions.len(),
                "blocks_checked": blocks,
                "sha256": sums,
            });
            if let Some(pack) = &pack {
                summary["units_checked"] = units.into();
                summary["source_sha256"] = pack.source_sha256.as_str().into();
            }
            return print(&format!("{summary}\n"));
        }
        let mut out = format!(
            "{}: GGUF v{version}, {arch}, {} tensors: ok\n",
            path.display(),
            regions.len()
        );
        if let Some(pack) = &pack {
            out.push_str(&format!(
                "{units} units: ok\npacked from a model of {} bytes with SHA-256 {}\n",
                pack.source_bytes, pack.source_sha256
            ));
        }
        if self.blocks {
            out.push_str(&format!("{blocks} blocks of weights: ok\n"));
        }
        for (file, sum) in files.iter().zip(&sums) {
            out.push_str(&format!("{sum}  {}\n", file.display()));
        }
        print(&out)
    }
}

fn regions(path: &Path, shards: &[Gguf<'_>]) -> Result<Vec<Region>, Error> {
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

/// Reads every tensor in bounded parts; returns the number of blocks.
fn check_blocks(files: &[PathBuf], regions: &[Region]) -> Result<u64, Error> {
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut blocks = 0;
    for region in regions {
        if region.ty.is_none() && region.crc.is_none() {
            continue;
        }
        let path = &files[region.file];
        let file = File::open(path).map_err(|error| Error::io(path, "open it", error))?;
        let block = region.ty.map_or(1, |ty| ty.block_bytes());
        let step = BUFFER_BYTES - BUFFER_BYTES % block;
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

fn sha256(path: &Path) -> Result<String, Error> {
    let mut file = File::open(path).map_err(|error| Error::io(path, "open it", error))?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        signals::check()?;
        let n = file
            .read(&mut buffer)
            .map_err(|error| Error::io(path, "read it", error))?;
        if n == 0 {
            return Ok(hex(hash));
        }
        hash.update(&buffer[..n]);
    }
}
