//! A model from which another file is made: its tensors by name, their bytes, its SHA-256.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::gguf::{Element, Gguf};
use sha2::{Digest, Sha256};

use super::write_error;
use crate::error::Error;
use crate::fetch::hex;
use crate::gguf_write::Writer;
use crate::run::model::Headers;
use crate::signals;

/// Bytes read at a time where a file is only passed through.
pub const PART: usize = 1 << 20;

/// A tensor of the source.
#[derive(Clone, Debug)]
pub struct Region {
    /// Its name.
    pub name: String,
    /// Number of its file.
    pub file: usize,
    /// Its type.
    pub ty: Element,
    /// Values along each dimension, fastest first.
    pub dims: Vec<u64>,
    /// First byte in the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The files of a model and the tensors in them.
pub struct Source {
    files: Vec<(PathBuf, File)>,
    /// Bytes of all files.
    pub bytes: u64,
    /// All tensors, in the files' order.
    pub tensors: Vec<Region>,
    by_name: HashMap<String, usize>,
}

impl Source {
    /// Opens the files whose headers are given.
    ///
    /// # Errors
    /// What is wrong with a header, or can't be opened.
    pub fn open(headers: &Headers) -> Result<Self, Error> {
        let files = headers.files().map(|(path, _)| {
            let file = File::open(path).map_err(|error| Error::io(path, "open it", error))?;
            Ok((path.to_owned(), file))
        });
        let files = files.collect::<Result<Vec<_>, Error>>()?;
        let tensors = headers.with(|shards, _| {
            let regions = |(file, shard): (usize, &Gguf<'_>)| {
                let region = |tensor: leanstream_core::gguf::Tensor<'_>| Region {
                    name: tensor.name.to_owned(),
                    file,
                    ty: tensor.ty,
                    dims: tensor.dims[..tensor.n_dims].to_vec(),
                    offset: tensor.offset,
                    bytes: tensor.bytes,
                };
                shard.tensors().map(region).collect::<Vec<_>>()
            };
            Ok(shards
                .iter()
                .enumerate()
                .flat_map(regions)
                .collect::<Vec<_>>())
        })?;
        let names = tensors.iter().enumerate();
        Ok(Self {
            by_name: names.map(|(i, tensor)| (tensor.name.clone(), i)).collect(),
            bytes: headers.files().map(|(_, len)| len).sum(),
            files,
            tensors,
        })
    }

    /// The file that names the model in messages.
    pub fn path(&self) -> &Path {
        &self.files[0].0
    }

    /// The tensor of this name.
    pub fn find(&self, name: &str) -> Option<&Region> {
        self.by_name.get(name).map(|i| &self.tensors[*i])
    }

    /// Reads `out.len()` bytes of a tensor from byte `from` on.
    ///
    /// # Errors
    /// A signal, or what the operating system says.
    pub fn read(&self, region: &Region, from: u64, out: &mut [u8]) -> Result<(), Error> {
        debug_assert!(from + out.len() as u64 <= region.bytes);
        let (path, file) = &self.files[region.file];
        let mut at = region.offset + from;
        for part in out.chunks_mut(PART) {
            signals::check()?;
            file.read_exact_at(part, at)
                .map_err(|error| Error::io(path, "read its weights", error))?;
            at += part.len() as u64;
        }
        Ok(())
    }

    /// Reads all of a tensor into `out`.
    ///
    /// # Errors
    /// As [`Source::read`].
    pub fn read_whole(&self, region: &Region, out: &mut Vec<u8>) -> Result<(), Error> {
        out.clear();
        out.resize(region.bytes as usize, 0);
        self.read(region, 0, out)
    }

    /// Writes all of a tensor, as it is, to the file that is being made; `passed` hears of every part.
    ///
    /// # Errors
    /// As [`Source::read`], or what can't be written.
    pub fn copy(
        &self,
        region: &Region,
        writer: &mut Writer,
        mut passed: impl FnMut(usize),
    ) -> Result<(), Error> {
        let mut buffer = vec![0; PART.min(region.bytes as usize)];
        let mut at = 0;
        while at < region.bytes {
            let len = (region.bytes - at).min(buffer.len() as u64) as usize;
            self.read(region, at, &mut buffer[..len])?;
            writer.write(&buffer[..len]).map_err(write_error)?;
            passed(len);
            at += len as u64;
        }
        Ok(())
    }

    /// SHA-256 of the files one after the other, in hex. `passed` hears of every part.
    ///
    /// # Errors
    /// As [`Source::read`].
    pub fn sha256(&self, mut passed: impl FnMut(usize)) -> Result<String, Error> {
        let mut hash = Sha256::new();
        let mut buffer = vec![0; PART];
        for (path, file) in &self.files {
            let mut at = 0;
            loop {
                signals::check()?;
                let n = file
                    .read_at(&mut buffer, at)
                    .map_err(|error| Error::io(path, "read it", error))?;
                if n == 0 {
                    break;
                }
                hash.update(&buffer[..n]);
                at += n as u64;
                passed(n);
            }
        }
        Ok(hex(hash))
    }
}
