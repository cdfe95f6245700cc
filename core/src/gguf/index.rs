//! Finds tensors by name over all files of a model, and refuses names that stand there twice.

use core::cmp::Ordering;

use super::error::{GgufError, Label};
use super::{Gguf, Tensor};

/// Tensors of all files, sorted by name. Sorting is what finds duplicates without comparing every
/// pair, and without a hash that a hostile file could make collide.
#[derive(Clone, Copy, Debug)]
pub struct TensorIndex<'s, 'a> {
    files: &'s [Gguf<'a>],
    /// File and position of each info, sorted by name.
    entries: &'s [u64],
}

/// An entry is `file << POSITION_BITS | position`: 2^16 files with headers of 2^48 bytes.
const POSITION_BITS: u32 = 48;

impl<'s, 'a> TensorIndex<'s, 'a> {
    /// How many numbers of scratch an index takes.
    pub fn entries_needed(files: &[Gguf<'_>]) -> usize {
        files.iter().map(|file| file.tensor_count() as usize).sum()
    }

    /// Sorts the tensors of `files` (at most 65,536 of them) in `scratch`.
    ///
    /// # Errors
    /// [`GgufError::DuplicateTensor`].
    ///
    /// # Panics
    /// When `scratch` is shorter than [`Self::entries_needed`].
    pub fn new(files: &'s [Gguf<'a>], scratch: &'s mut [u64]) -> Result<Self, GgufError> {
        assert!(files.len() <= 1 << (64 - POSITION_BITS), "too many files");
        let scratch = &mut scratch[..Self::entries_needed(files)];
        let infos = (0u64..).zip(files).flat_map(|(file, gguf)| {
            gguf.tensor_positions()
                .map(move |position| file << POSITION_BITS | position)
        });
        let mut written = 0;
        for (slot, entry) in scratch.iter_mut().zip(infos) {
            *slot = entry;
            written += 1;
        }
        debug_assert_eq!(written, scratch.len());
        let order = |&a: &u64, &b: &u64| name(files, a).cmp(name(files, b));
        scratch.sort_unstable_by(order);
        match scratch
            .windows(2)
            .find(|pair| order(&pair[0], &pair[1]) == Ordering::Equal)
        {
            Some(pair) => Err(GgufError::DuplicateTensor {
                tensor: Label::new(name(files, pair[0])),
            }),
            None => Ok(Self {
                files,
                entries: scratch,
            }),
        }
    }

    /// The tensor called `wanted`, and the number of its file.
    pub fn find(&self, wanted: &str) -> Option<(usize, Tensor<'a>)> {
        let at = self
            .entries
            .binary_search_by(|&entry| name(self.files, entry).cmp(wanted))
            .ok()?;
        let (file, position) = place(self.entries[at]);
        Some((file, self.files[file].tensor_at(position)?))
    }
}

fn place(entry: u64) -> (usize, usize) {
    (
        (entry >> POSITION_BITS) as usize,
        (entry & ((1 << POSITION_BITS) - 1)) as usize,
    )
}

fn name<'a>(files: &[Gguf<'a>], entry: u64) -> &'a str {
    let (file, position) = place(entry);
    files[file].name_at(position)
}
