//! Tokenizers, read from a GGUF file's metadata: text to token ids, and token ids to bytes.
//!
//! Two kinds: byte-level BPE (`tokenizer.ggml.model` = `gpt2`) with the pre-tokenizer that
//! `tokenizer.ggml.pre` names, and SentencePiece BPE (`llama`). The ids are those of llama.cpp for
//! every text that is UTF-8. Bytes that aren't UTF-8 pass through unchanged where the vocabulary has
//! them (llama.cpp puts U+FFFD in their place for the `gpt2` kind), so that decoding gives back
//! exactly what was encoded. Bytes that the vocabulary lacks are lost, as with llama.cpp.
//!
//! Everything is in a few flat tables, so that 262,144 tokens take 7 MB.
//!
//! Not supported: WordPiece (`bert`), Unigram (`t5`), RWKV, PLaMo 2 and Gemma 4's BPE over raw text.

mod bpe;
mod error;
mod merge;
mod meta;
#[cfg(test)]
pub(crate) mod metadata;
mod special;
mod split;
mod spm;
#[cfg(test)]
mod tests;
pub mod train;
mod unicode;
mod utf8;
mod vocab;

use leanstream_core::gguf::Gguf;

pub use error::TextError;
pub use utf8::Utf8Stream;

use bpe::Bpe;
use meta::{MERGES, Meta};
use special::{Defaults, Fragment, Specials};
use spm::Spm;
use vocab::{Vocab, attr};

/// Bytes that [`Tokenizer::encode`] takes at once, at most: 256 MiB, more than any context holds.
pub const INPUT_MAX: usize = 1 << 28;

/// What [`Tokenizer::encode`] does beside tokenizing text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Add BOS and EOS where the model wants them. For text from a chat template, which brings its
    /// own, this is false.
    pub add_special: bool,
    /// Take `<|im_end|>` and the like in the text for the tokens they name, not for text. For
    /// text that a user typed, this is false.
    pub parse_special: bool,
}

/// A model's tokenizer.
#[derive(Debug)]
pub struct Tokenizer {
    vocab: Vocab,
    kind: Kind,
    specials: Specials,
    add_bos: bool,
    add_eos: bool,
    warning: Option<&'static str>,
}

#[derive(Debug)]
enum Kind {
    Bpe(Bpe),
    Spm(Spm),
}

/// `tokenizer.ggml.model`
#[derive(Clone, Copy)]
enum Model {
    Gpt2,
    Llama,
}

impl Model {
    fn read(meta: Meta<'_, '_>) -> Result<Self, TextError> {
        let key = "tokenizer.ggml.model";
        match meta.text(key)?.ok_or(TextError::Missing { key })? {
            b"gpt2" => Ok(Self::Gpt2),
            b"llama" => Ok(Self::Llama),
            other => Err(TextError::Model { name: shown(other) }),
        }
    }
}

impl Tokenizer {
    /// Builds the tables. Nothing of `gguf` is kept.
    ///
    /// # Errors
    /// What is missing, contradictory or not supported in the metadata; what is there twice; no
    /// memory for the tables.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Self, TextError> {
        let meta = Meta(gguf);
        let model = Model::read(meta)?;
        let tokens = meta.tokens()?;
        let mut vocab = Vocab::new(tokens.texts, tokens.count, tokens.text_bytes)?;
        if let Some(types) = meta.types(tokens.count)? {
            for (attrs, ty) in vocab.attrs_mut().iter_mut().zip(types) {
                *attrs = match ty {
                    1 => attr::NORMAL,
                    2 => attr::UNKNOWN,
                    3 => attr::CONTROL,
                    4 => attr::USER_DEFINED,
                    6 => attr::BYTE,
                    // Unused and undefined tokens stand for nothing.
                    _ => 0,
                };
            }
        }
        match model {
            Model::Gpt2 => Self::gpt2(meta, vocab),
            Model::Llama => Self::llama(meta, vocab),
        }
    }

    fn gpt2(meta: Meta<'_, '_>, mut vocab: Vocab) -> Result<Self, TextError> {
        let pre = meta.text("tokenizer.ggml.pre")?;
        let name = pre.unwrap_or(b"default");
        let Some((_, rule)) = split::RULES
            .iter()
            .find(|(rule, _)| rule.as_bytes() == name)
        else {
            let supported: Vec<&str> = split::RULES.iter().map(|&(name, _)| name).collect();
            return Err(TextError::Pre {
                name: shown(name),
                supported: supported.join(", "),
            });
        };
        let (rules, count) = meta.strings(MERGES, bpe::RULES_MAX)?;
        let bpe = Bpe::new(&vocab, *rule, rules, count)?;
        let specials = Specials::new(meta, &mut vocab, Defaults::default())?;
        let warning = pre.is_none().then_some(
            "the file has no tokenizer.ggml.pre, so text is cut in the default way and tokens may \
             be wrong: convert the model again with a current converter",
        );
        Self::finish(meta, vocab, Kind::Bpe(bpe), specials, rule.add_bos, warning)
    }

    fn llama(meta: Meta<'_, '_>, mut vocab: Vocab) -> Result<Self, TextError> {
        let tokens = vocab.len();
        let mut orders = vocab::filled(tokens as usize, spm::order(0, 0.0)?)?;
        if let Some(scores) = meta.scores(tokens)? {
            for ((order, score), id) in orders.iter_mut().zip(scores).zip(0..) {
                *order = spm::order(id, score)?;
            }
        }
        let defaults = Defaults {
            bos: Some(1),
            eos: Some(2),
            unknown: Some(0),
        };
        let specials = Specials::new(meta, &mut vocab, defaults)?;
        let prefix = meta
            .flag("tokenizer.ggml.add_space_prefix")?
            .unwrap_or(true);
        let spm = Spm::new(&vocab, orders, specials.unknown, prefix);
        Self::finish(meta, vocab, Kind::Spm(spm), specials, true, None)
    }

    fn finish(
        meta: Meta<'_, '_>,
        vocab: Vocab,
        kind: Kind,
        specials: Specials,
        add_bos: bool,
        warning: Option<&'static str>,
    ) -> Result<Self, TextError> {
        let asked = |asks, key, default, id: Option<u32>| match meta.flag(asks)?.unwrap_or(default)
        {
            true if id.is_none() => Err(TextError::NoToken { asks, key }),
            add => Ok(add),
        };
        let add_bos = asked(
            "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.bos_token_id",
            add_bos,
            specials.bos,
        )?;
        let add_eos = asked(
            "tokenizer.ggml.add_eos_token",
            "tokenizer.ggml.eos_token_id",
            false,
            specials.eos,
        )?;
        Ok(Self {
            vocab,
            kind,
            specials,
            add_bos,
            add_eos,
            warning,
        })
    }

    /// What [`Tokenizer::from_gguf`] would hold, in bytes: at least [`Tokenizer::table_bytes`] and at
    /// most 16 KiB more. For the budget, before anything is allocated.
    ///
    /// # Errors
    /// As [`Tokenizer::from_gguf`], of what can be told from counts.
    pub fn bytes_needed(gguf: &Gguf<'_>) -> Result<u64, TextError> {
        let meta = Meta(gguf);
        let model = Model::read(meta)?;
        let tokens = meta.tokens()?;
        let kind = match model {
            Model::Gpt2 => bpe::bytes(meta.strings(MERGES, bpe::RULES_MAX)?.1),
            Model::Llama => spm::bytes(tokens.count),
        };
        Ok(vocab::bytes(tokens.count, tokens.text_bytes) + kind + special::BYTES_MAX)
    }

    /// Appends the tokens of `text` to `out`. Allocates scratch memory, about 60 bytes for each
    /// byte of the longest word (`gpt2`) or of the text between two special tokens (`llama`).
    ///
    /// # Panics
    /// If `text` is longer than [`INPUT_MAX`].
    pub fn encode(&self, text: &[u8], options: Options, out: &mut Vec<u32>) {
        assert!(text.len() <= INPUT_MAX, "the caller bounds its input");
        if options.add_special && self.add_bos {
            out.extend(self.specials.bos);
        }
        let fragments = self.specials.cut(&self.vocab, text, options.parse_special);
        for fragment in fragments {
            match (fragment, &self.kind) {
                (Fragment::Token(id), _) => out.push(id),
                (Fragment::Text(text), Kind::Bpe(bpe)) => bpe.encode(&self.vocab, text, out),
                // Each begins the input or follows a special token: both ask for the prefix.
                (Fragment::Text(text), Kind::Spm(spm)) => spm.encode(&self.vocab, text, out),
            }
        }
        if options.add_special && self.add_eos {
            out.extend(self.specials.eos);
        }
    }

    /// Appends the bytes that a generated token adds to the text. Control and unknown tokens add
    /// nothing, nor do ids outside the vocabulary. Doesn't allocate while `out` has room for
    /// [`Tokenizer::piece_bytes_max`] bytes more.
    pub fn piece(&self, id: u32, out: &mut Vec<u8>) {
        if !self.is_control(id) {
            self.piece_special(id, out);
        }
    }

    /// [`Tokenizer::piece`], but control and unknown tokens show as they are written: `<|im_end|>`.
    pub fn piece_special(&self, id: u32, out: &mut Vec<u8>) {
        if id >= self.vocab.len() {
            return;
        }
        let (text, attrs) = (self.vocab.text(id), self.vocab.attrs(id));
        if attrs & (attr::CONTROL | attr::UNKNOWN | attr::USER_DEFINED) != 0 {
            out.extend_from_slice(text);
        } else if attrs & attr::NORMAL != 0 {
            match self.kind {
                Kind::Bpe(_) => bpe::unspell_text(text, out),
                Kind::Spm(_) => spm::unescape(text, out),
            }
        } else if attrs & attr::BYTE != 0 {
            out.extend(spm::text_byte(text));
        }
    }

    /// Appends the text of a whole sequence, as [`Tokenizer::piece`] gives it, without the space that
    /// [`Tokenizer::encode`] puts before a text (of the `llama` kind) if the first token has it.
    pub fn decode(&self, ids: &[u32], out: &mut Vec<u8>) {
        let Some((&first, rest)) = ids.split_first() else {
            return;
        };
        let start = out.len();
        self.piece(first, out);
        let prefixed = matches!(&self.kind, Kind::Spm(spm) if spm.add_space_prefix);
        if prefixed && out.get(start) == Some(&b' ') {
            out.remove(start);
        }
        for &id in rest {
            self.piece(id, out);
        }
    }

    /// Bytes of the longest token: no piece is longer.
    pub fn piece_bytes_max(&self) -> usize {
        (0..self.vocab.len())
            .map(|id| self.vocab.text(id).len())
            .max()
            .unwrap_or(0)
    }

    /// The token that is written exactly so in the file, as for the marks of a chat template.
    pub fn token(&self, text: &[u8]) -> Option<u32> {
        self.vocab.find(text)
    }

    /// How many tokens there are.
    pub fn vocab_len(&self) -> u32 {
        self.vocab.len()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.specials.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.specials.eos
    }

    /// The token that ends a turn.
    pub fn eot(&self) -> Option<u32> {
        self.specials.eot
    }

    /// Whether a text begins with BOS. Then there is one.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// Whether a text ends with EOS. Then there is one.
    pub fn add_eos(&self) -> bool {
        self.add_eos
    }

    /// Whether a generation ends with this token.
    pub fn is_eog(&self, id: u32) -> bool {
        self.specials.is_eog(id)
    }

    /// Whether this token is markup: control, or unknown.
    pub fn is_control(&self, id: u32) -> bool {
        id < self.vocab.len() && self.vocab.attrs(id) & (attr::CONTROL | attr::UNKNOWN) != 0
    }

    /// What the user should be told about this tokenizer, if anything.
    pub fn warning(&self) -> Option<&'static str> {
        self.warning
    }

    /// What the tables hold, in bytes.
    pub fn table_bytes(&self) -> u64 {
        let kind = match &self.kind {
            Kind::Bpe(bpe) => bpe.table_bytes(),
            Kind::Spm(spm) => spm.table_bytes(),
        };
        self.vocab.table_bytes() + kind + self.specials.table_bytes()
    }
}

/// A name from a file, fit to be shown.
fn shown(name: &[u8]) -> String {
    let name = &name[..name.len().min(64)];
    String::from_utf8_lossy(name).escape_debug().to_string()
}
