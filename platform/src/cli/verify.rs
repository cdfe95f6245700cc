//! `leanstream verify`: is this file whole?

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use leanstream_core::pack::Ffn;
use leanstream_core::plan::{self, Model};
use serde_json::json;
use sha2::{Digest, Sha256};

use super::args::PathArg;
use super::output::print;
use crate::error::Error;
use crate::fetch::hex;
use crate::pack::check::describe;
use crate::pack::header::check_header;
use crate::run::blocks::{check_blocks, regions};
use crate::run::model::{Headers, Parts};
use crate::signals;
use crate::text::Tokenizer;

/// Bytes read at a time.
const BUFFER_BYTES: usize = 1 << 20;

/// Check a model's structure, that it can run, the header and every unit of a pack, and on request
/// every block of the weights.
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

impl Verify {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let path = &self.model.0;
        let headers = Headers::open(path)?;
        let bad = |error: &dyn std::fmt::Display| Error::model(path, error);
        // First: what else is wrong with a damaged header only follows from it.
        let header_checked = check_header(&headers)?;
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
            check_blocks(&files, &regions, BUFFER_BYTES)?
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
                summary["header_checked"] = header_checked.into();
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
        if header_checked {
            out.push_str("header: ok\n");
        }
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
