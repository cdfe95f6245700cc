//! Training data: a text file becomes sequences of tokens, each with what is to be predicted.
//!
//! - **Plain text** is cut into windows of `seq` tokens. Every token of the text but the first is
//!   predicted exactly once; the last window is shorter.
//! - **JSONL** has an object a line. `{"text": ...}` is a whole document, which ends with EOS and is
//!   cut into windows where it is longer than `seq`. `{"prompt": ..., "completion": ...}` ends with
//!   EOS, and only the completion and its EOS are predicted. One that is longer than `seq` is left
//!   out and told ([`Data::notice`]): without its end it would teach something else. Marks such as
//!   `<|im_end|>` are the tokens that they name, as in a prompt of `run`; in plain text they are text.
//!
//! Where the model's metadata asks for BOS, every sequence begins with it, since a prompt does too.
//! Tokens are held in 2, 3 or 4 bytes, as the vocabulary needs; the order of an epoch is computed,
//! not stored.

mod items;
pub(in crate::tune) mod order;
mod read;
mod store;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::text::Tokenizer;
use items::Builder;
use store::{Ids, Span};

/// The target of a token that is not learned from.
pub const MASKED: u32 = u32::MAX;

/// How a file is read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Tokens of the longest sequence, at least 2.
    pub seq: u32,
    /// Seed of the order.
    pub seed: u64,
    /// Bytes that tokens and sequences may take in memory.
    pub bytes_max: u64,
}

/// Sequences of tokens, in memory.
#[derive(Debug)]
pub struct Data {
    path: PathBuf,
    seed: u64,
    ids: Ids,
    spans: Vec<Span>,
    bos: Option<u32>,
    longest: u32,
    tokens: u64,
    targets: u64,
    notice: Option<String>,
}

impl Data {
    /// Reads and tokenizes a file. The file is read in pieces, so that it takes the memory of its
    /// tokens and little more.
    ///
    /// # Errors
    /// A file that can't be read, has nothing to learn from, isn't UTF-8, has a line that isn't what
    /// JSONL should be, or is larger than `bytes_max`; a signal that came meanwhile.
    pub fn load(path: &Path, tokenizer: &Tokenizer, options: Options) -> Result<Self, Error> {
        if options.seq < 2 {
            return Err(Error::Usage(format!(
                "--seq {}: a sequence has at least 2 tokens",
                options.seq
            )));
        }
        let mut builder = Builder::new(path, tokenizer, options);
        read::file(path, &mut builder)?;
        let (mut ids, mut spans, notice) = builder.finish()?;
        ids.shrink();
        spans.shrink_to_fit();
        Ok(Self {
            path: path.to_owned(),
            seed: options.seed,
            bos: tokenizer.bos().filter(|_| tokenizer.add_bos()),
            longest: spans.iter().map(|span| span.len).max().unwrap_or(0),
            tokens: spans.iter().map(|span| u64::from(span.len)).sum(),
            targets: spans.iter().map(|span| u64::from(span.targets())).sum(),
            ids,
            spans,
            notice,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Sequences of an epoch, at least 1.
    pub fn sequences(&self) -> usize {
        self.spans.len()
    }

    /// Tokens of the longest sequence.
    pub fn longest(&self) -> usize {
        self.longest as usize
    }

    /// Tokens that an epoch takes in.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Tokens that an epoch predicts.
    pub fn targets(&self) -> u64 {
        self.targets
    }

    /// What the user should be told once, such as items that were left out.
    pub fn notice(&self) -> Option<&str> {
        self.notice.as_deref()
    }

    /// Bytes held, for the ledger.
    pub fn bytes(&self) -> u64 {
        self.ids.bytes() + (self.spans.capacity() * size_of::<Span>()) as u64
    }

    /// A checksum of all sequences: equal where a continued run meets the same data.
    pub fn fingerprint(&self) -> u32 {
        let mut sum = self.ids.checksum();
        for span in &self.spans {
            sum = crc32c::crc32c_append(sum, &span.start.to_le_bytes());
            sum = crc32c::crc32c_append(sum, &span.len.to_le_bytes());
            sum = crc32c::crc32c_append(sum, &span.masked.to_le_bytes());
        }
        sum
    }

    /// Which sequence of the file stands at `place` of an endless run of epochs, each of which has
    /// every sequence once, in an order of its own.
    pub fn at(&self, place: u64) -> usize {
        let count = self.spans.len() as u64;
        order::place(self.seed, place / count, place % count, count) as usize
    }

    /// Tokens of a sequence of the file, at most [`Data::longest`].
    pub fn len_of(&self, sequence: usize) -> usize {
        self.spans[sequence].len as usize
    }

    /// Tokens of a sequence of the file that are predicted, at least 1.
    pub fn targets_of(&self, sequence: usize) -> usize {
        self.spans[sequence].targets() as usize
    }

    /// Writes the sequence at `place` of an endless run of epochs: its tokens, and for each what is
    /// to follow, or [`MASKED`]. Returns how many there are. Allocates nothing.
    ///
    /// # Panics
    /// The buffers are shorter than the sequence.
    pub fn sequence(&self, place: u64, tokens: &mut [u32], targets: &mut [u32]) -> usize {
        self.item(self.at(place), tokens, targets)
    }

    /// The same of a sequence as they stand in the file, for evaluation.
    ///
    /// # Panics
    /// There is no such sequence, or the buffers are shorter than it.
    pub fn item(&self, sequence: usize, tokens: &mut [u32], targets: &mut [u32]) -> usize {
        let span = self.spans[sequence];
        let len = span.len as usize;
        let (tokens, targets) = (&mut tokens[..len], &mut targets[..len]);
        let start = span.start as usize;
        // A BOS isn't stored; it stands before the first token that is.
        let ahead = usize::from(self.bos.is_none());
        for (i, target) in targets.iter_mut().enumerate() {
            *target = self.ids.get(start + i + ahead);
        }
        tokens[0] = self.bos.unwrap_or_else(|| self.ids.get(start));
        tokens[1..].copy_from_slice(&targets[..len - 1]);
        targets[..span.masked as usize].fill(MASKED);
        len
    }
}
