//! From texts to sequences: what is put around them, and how they are cut.

use std::path::Path;

use super::Options;
use super::store::{Ids, Span};
use crate::error::{Error, mib};
use crate::text::{self, Tokenizer};

/// Bytes of text that are tokenized at once: a SentencePiece vocabulary takes 60 bytes for each.
const BLOCK: usize = 64 << 10;

/// Collects the sequences of a file.
pub(super) struct Builder<'a> {
    path: &'a Path,
    tokenizer: &'a Tokenizer,
    options: Options,
    /// Whether every sequence begins with BOS.
    bos: Option<u32>,
    ids: Ids,
    spans: Vec<Span>,
    /// The stored ids that no sequence has yet begin here: the open text.
    open: u64,
    /// Items that are too long: how many, and line and tokens of the longest.
    long: Option<(u64, u64, u64)>,
    scratch: Vec<u32>,
}

impl<'a> Builder<'a> {
    /// Nothing yet.
    pub fn new(path: &'a Path, tokenizer: &'a Tokenizer, options: Options) -> Self {
        Self {
            path,
            tokenizer,
            options,
            bos: tokenizer.bos().filter(|_| tokenizer.add_bos()),
            ids: Ids::new(tokenizer.vocab_len()),
            spans: Vec::new(),
            open: 0,
            long: None,
            scratch: Vec::new(),
        }
    }

    /// An error of the file.
    pub fn fail(&self, why: impl std::fmt::Display) -> Error {
        Error::Usage(format!("{}: {why}", self.path.display()))
    }

    /// Takes the beginning of `pending` into the open text as far as it can be tokenized without what
    /// follows; all of it at its end. Returns how many bytes it took.
    pub fn text(&mut self, pending: &str, special: bool, end: bool) -> Result<usize, Error> {
        let mut done = 0;
        while pending.len() - done > BLOCK || (end && done < pending.len()) {
            let rest = &pending[done..];
            let len = if rest.len() > BLOCK {
                cut(rest)
            } else {
                rest.len()
            };
            let options = text::Options {
                add_special: false,
                parse_special: special,
            };
            self.scratch.clear();
            self.tokenizer
                .encode(&rest.as_bytes()[..len], options, &mut self.scratch);
            self.store()?;
            done += len;
        }
        Ok(done)
    }

    /// Ends the open text, with EOS where it is a document, and cuts it into windows. Returns false
    /// when it had no text.
    pub fn end_text(&mut self, document: bool) -> Result<bool, Error> {
        if self.ids.len() == self.open {
            return Ok(false);
        }
        if !document && self.ids.len() - self.open < 2 {
            return Ok(true);
        }
        let eos = self.tokenizer.eos();
        if let Some(eos) = eos.filter(|_| document || self.tokenizer.add_eos()) {
            let last = self.ids.get(self.ids.len() as usize - 1);
            if last != eos {
                self.ids.extend(&[eos]);
            }
        }
        let seq = u64::from(self.options.seq);
        let mut start = self.open;
        // Without BOS before it, the last id of a window is the first of the next.
        let end = self.ids.len() - u64::from(self.bos.is_none());
        while start < end {
            let len = seq.min(end - start);
            self.spans.push(Span {
                start,
                len: len as u32,
                masked: 0,
            });
            start += len;
        }
        self.open = self.ids.len();
        self.check_room()?;
        Ok(true)
    }

    /// A prompt and what is to come of it.
    pub fn pair(&mut self, line: u64, prompt: &str, completion: &str) -> Result<(), Error> {
        let longest = prompt.len() + completion.len();
        if longest > text::INPUT_MAX {
            return Err(self.fail(format_args!("line {line}: {longest} bytes are too many")));
        }
        let mut tokens = std::mem::take(&mut self.scratch);
        tokens.clear();
        let before = self.encode_pair(prompt, completion, &mut tokens);
        if let Some(eos) = self.tokenizer.eos()
            && (tokens.len() == before || tokens.last() != Some(&eos))
        {
            tokens.push(eos);
        }
        // A template may bring the BOS that every sequence has anyway.
        let written =
            usize::from(before > 0 && self.bos == tokens.first().copied() && self.bos.is_some());
        let (ids, before) = (&tokens[written..], before - written);
        let bare = usize::from(self.bos.is_none());
        let len = ids.len().saturating_sub(bare) as u64;
        let masked = before.saturating_sub(bare) as u64;
        let result = if len <= masked {
            Err(self.fail(format_args!(
                "line {line}: there is nothing to predict: give it a prompt and a completion"
            )))
        } else if len > u64::from(self.options.seq) {
            let (count, at, most) = self.long.unwrap_or((0, line, len));
            let (at, most) = if len > most { (line, len) } else { (at, most) };
            self.long = Some((count + 1, at, most));
            Ok(())
        } else {
            self.spans.push(Span {
                start: self.open,
                len: len as u32,
                masked: masked as u32,
            });
            self.ids.extend(ids);
            self.open = self.ids.len();
            self.check_room()
        };
        self.scratch = tokens;
        result
    }

    /// Tokens of both texts; returns how many are the prompt's. As the model would meet them: the
    /// prompt's tokens are those of the prompt alone, and the others continue it where they can.
    fn encode_pair(&self, prompt: &str, completion: &str, tokens: &mut Vec<u32>) -> usize {
        let options = text::Options {
            add_special: false,
            parse_special: true,
        };
        self.tokenizer.encode(prompt.as_bytes(), options, tokens);
        let before = tokens.len();
        let mut joint = Vec::new();
        let both = [prompt, completion].concat();
        self.tokenizer.encode(both.as_bytes(), options, &mut joint);
        match joint.get(..before) {
            Some(beginning) if beginning == tokens.as_slice() => *tokens = joint,
            // A token would reach across the border.
            _ => self
                .tokenizer
                .encode(completion.as_bytes(), options, tokens),
        }
        before
    }

    /// Appends what was tokenized to the open text.
    fn store(&mut self) -> Result<(), Error> {
        let written = self.bos.is_some()
            && self.ids.len() == self.open
            && self.bos == self.scratch.first().copied();
        self.ids.extend(&self.scratch[usize::from(written)..]);
        self.check_room()
    }

    fn check_room(&self) -> Result<(), Error> {
        let held = self.ids.used() + (self.spans.len() * size_of::<Span>()) as u64;
        if held > self.options.bytes_max {
            return Err(self.fail(format_args!(
                "its tokens take more than the {} that there is room for; give less data, or a larger --budget",
                mib(self.options.bytes_max)
            )));
        }
        Ok(())
    }

    /// What was collected, and what the user should be told.
    #[allow(clippy::type_complexity, reason = "the parts of a Data, once")]
    pub fn finish(self) -> Result<(Ids, Vec<Span>, Option<String>), Error> {
        let seq = self.options.seq;
        let notice = self.long.map(|(count, line, most)| {
            let of = count + self.spans.len() as u64;
            format!(
                "{count} of {of} items are longer than --seq {seq} and are left out; the longest, line {line}, has \
                 {most} tokens: --seq {most} takes all"
            )
        });
        if self.spans.is_empty() {
            return Err(self.fail(match notice {
                Some(notice) => notice,
                None if self.ids.len() == 0 => {
                    "it is empty: there is nothing to learn from".to_owned()
                }
                None => "it has one token, and there is nothing to predict: give it more text"
                    .to_owned(),
            }));
        }
        Ok((
            self.ids,
            self.spans,
            notice.map(|notice| self.path.display().to_string() + ": " + &notice),
        ))
    }
}

/// Where to end the next block of a text that is longer than one: after a line's end where a word
/// follows, or else before a space within a line; no token reaches across these. Somewhere else only
/// where there is neither.
fn cut(text: &str) -> usize {
    let bytes = text.as_bytes();
    let blank = |at: usize| bytes[at].is_ascii_whitespace();
    let places = || (1..=BLOCK).rev();
    let line = places().find(|&at| bytes[at - 1] == b'\n' && !blank(at));
    let space =
        |&at: &usize| bytes[at] == b' ' && !blank(at - 1) && at + 1 < bytes.len() && !blank(at + 1);
    line.or_else(|| places().find(space))
        .or_else(|| places().find(|&at| text.is_char_boundary(at)))
        .expect("a character has four bytes at most")
}
