//! From tokens to the residual stream: rows of the embedding matrix, from memory or from the file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::plan::{MatrixId, VectorId};
use leanstream_core::quant;

use super::decoder::{Batch, Decoder};
use crate::error::Error;
use crate::tune::ops;

/// The file that rows are read from when they are not in memory, a row at a time.
pub struct Embedding {
    file: File,
    path: PathBuf,
    row: Vec<u8>,
}

impl Embedding {
    /// Opens the file; rows have `row_bytes` bytes.
    ///
    /// # Errors
    /// The file can't be opened.
    pub fn open(path: &Path, row_bytes: usize) -> Result<Self, Error> {
        Ok(Self {
            file: File::open(path).map_err(|error| Error::io(path, "open it", error))?,
            path: path.to_owned(),
            row: vec![0; row_bytes],
        })
    }
}

impl Decoder<'_> {
    pub(super) fn embed(&mut self, batch: &Batch<'_>) -> Result<(), Error> {
        let d = self.net.hyper.d as usize;
        let factor = self.net.hyper.embed_scale;
        let x = &mut self.buffers.x[..batch.tokens.len() * d];
        let matrix = self.net.matrices[self.net.embedding.0 as usize];
        if let Some(at) = self.params.matrix(self.net.embedding) {
            let table = &self.values[at..at + matrix.rows as usize * d];
            ops::embed_floats(&self.team, self.vector, table, batch.tokens, factor, x);
            return Ok(());
        }
        let tied = self.net.head.matrix == self.net.embedding;
        for (token, x) in batch.tokens.iter().zip(x.chunks_exact_mut(d)) {
            let row = *token as usize;
            let held = self
                .store
                .as_ref()
                .filter(|_| tied)
                .and_then(|store| store.head_row(row, &matrix));
            if let Some(held) = held {
                quant::decode(matrix.ty, held.rows().bytes, x);
                continue;
            }
            let rows = &mut self.rows;
            let at = matrix.offset + u64::from(*token) * u64::from(matrix.row_bytes);
            rows.file
                .read_exact_at(&mut rows.row, at)
                .map_err(|error| Error::io(&rows.path, "read its embeddings", error))?;
            quant::decode(matrix.ty, &rows.row, x);
        }
        if factor != 1.0 {
            ops::scale(&self.team, self.vector, x, factor);
        }
        Ok(())
    }

    /// Reads the model's own weights as the first values of what is trained.
    ///
    /// # Errors
    /// Weights that can't be read, or aren't finite.
    pub fn read_weights(&mut self, files: &[PathBuf]) -> Result<(), Error> {
        let opened = files
            .iter()
            .map(|path| File::open(path).map_err(|error| Error::io(path, "open it", error)))
            .collect::<Result<Vec<_>, _>>()?;
        for (id, matrix) in self.net.matrices.iter().enumerate() {
            let Some(at) = self.params.matrix(MatrixId(id as u32)) else {
                continue;
            };
            let file = usize::from(matrix.file.0);
            let cols = matrix.cols as usize;
            let mut row = vec![0; matrix.row_bytes as usize];
            for index in 0..matrix.rows as usize {
                let from = matrix.offset + index as u64 * u64::from(matrix.row_bytes);
                opened[file]
                    .read_exact_at(&mut row, from)
                    .map_err(|error| Error::io(&files[file], "read its weights", error))?;
                if quant::check(matrix.ty, &row).is_err() {
                    let named = self.params.tensors.iter().find(|t| t.offset == at);
                    return Err(Error::model(
                        &files[file],
                        format_args!(
                            "tensor {}: row {index} holds a weight that is no finite number; the file is damaged: \
                             download it again",
                            named.map_or("of its weights", |tensor| tensor.name.as_str())
                        ),
                    ));
                }
                let to = at + index * cols;
                quant::decode(matrix.ty, &row, &mut self.values[to..to + cols]);
            }
        }
        for id in 0..self.vectors.count() {
            let id = VectorId(id as u32);
            if let Some(at) = self.params.vector(id) {
                let from = self.vectors.get(id);
                self.values[at..at + from.len()].copy_from_slice(from);
            }
        }
        Ok(())
    }

    /// Adds the gradient of the rows that were looked up, where they are trained.
    pub(super) fn embed_backward(&mut self, batch: &Batch<'_>) {
        let Some(at) = self.params.matrix(self.net.embedding) else {
            return;
        };
        let matrix = &self.net.matrices[self.net.embedding.0 as usize];
        let len = matrix.rows as usize * matrix.cols as usize;
        ops::embed_backward(
            &self.team,
            self.vector,
            batch.tokens,
            &self.buffers.dx[..batch.tokens.len() * matrix.cols as usize],
            self.net.hyper.embed_scale,
            &mut self.grads[at..at + len],
        );
    }
}
