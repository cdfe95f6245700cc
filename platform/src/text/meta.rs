//! Typed access to the `tokenizer.*` metadata, with errors that name the key.

use leanstream_core::gguf::{Array, Gguf, Strings, Value};

use super::error::TextError;
use super::vocab::{TEXT_MAX, TOKENS_MAX};

/// `tokenizer.ggml.tokens`
pub(super) const TOKENS: &str = "tokenizer.ggml.tokens";
/// `tokenizer.ggml.merges`
pub(super) const MERGES: &str = "tokenizer.ggml.merges";
/// `tokenizer.ggml.scores`
pub(super) const SCORES: &str = "tokenizer.ggml.scores";
/// `tokenizer.ggml.token_type`
pub(super) const TYPES: &str = "tokenizer.ggml.token_type";

/// The metadata of one file.
#[derive(Clone, Copy)]
pub(super) struct Meta<'g, 'a>(pub &'g Gguf<'a>);

/// The tokens of a file, counted.
pub(super) struct Tokens<'a> {
    /// Their texts.
    pub texts: Strings<'a>,
    /// How many there are.
    pub count: u32,
    /// Length of all texts together.
    pub text_bytes: u64,
}

impl<'a> Meta<'_, 'a> {
    fn get<T>(
        self,
        key: &'static str,
        want: &'static str,
        read: impl Fn(&Value<'a>) -> Option<T>,
    ) -> Result<Option<T>, TextError> {
        match self.0.get(key) {
            Some(value) => read(&value)
                .map(Some)
                .ok_or(TextError::WrongType { key, want }),
            None => Ok(None),
        }
    }

    /// A text.
    pub(super) fn text(self, key: &'static str) -> Result<Option<&'a [u8]>, TextError> {
        self.get(key, "a string", Value::as_bytes)
    }

    /// A truth value.
    pub(super) fn flag(self, key: &'static str) -> Result<Option<bool>, TextError> {
        self.get(key, "a bool", Value::as_bool)
    }

    /// A token's id, below `tokens`. -1, with which some converters say that there is none, counts
    /// as absent.
    pub(super) fn id(self, key: &'static str, tokens: u32) -> Result<Option<u32>, TextError> {
        let read = |value: &Value<'a>| match value {
            Value::I32(-1) | Value::I64(-1) | Value::U32(u32::MAX) => Some(None),
            _ => value.as_u64().map(Some),
        };
        match self.get(key, "a token id", read)?.flatten() {
            Some(id) if id < u64::from(tokens) => Ok(Some(id as u32)),
            Some(id) => Err(TextError::Id { key, id, tokens }),
            None => Ok(None),
        }
    }

    fn array(self, key: &'static str) -> Result<Option<Array<'a>>, TextError> {
        self.get(key, "an array", Value::as_array)
    }

    /// An array of strings, and how many; at most `max`.
    pub(super) fn strings(
        self,
        key: &'static str,
        max: u32,
    ) -> Result<(Strings<'a>, u32), TextError> {
        let array = self.array(key)?.ok_or(TextError::Missing { key })?;
        let len = array.len() as u64;
        if len > u64::from(max) {
            return Err(TextError::TooLarge {
                key,
                len,
                max: max.into(),
            });
        }
        let want = "an array of strings";
        let strings = array.strings().ok_or(TextError::WrongType { key, want })?;
        Ok((strings, len as u32))
    }

    /// The tokens.
    pub(super) fn tokens(self) -> Result<Tokens<'a>, TextError> {
        let (texts, count) = self.strings(TOKENS, TOKENS_MAX)?;
        let len = texts.clone().map(|text| text.len() as u64).sum();
        if len > TEXT_MAX {
            return Err(TextError::TooLarge {
                key: TOKENS,
                len,
                max: TEXT_MAX,
            });
        }
        Ok(Tokens {
            texts,
            count,
            text_bytes: len,
        })
    }

    /// An array with an entry for each token: longer ones are cut, as llama.cpp does.
    fn per_token(self, key: &'static str, tokens: u32) -> Result<Option<Array<'a>>, TextError> {
        match self.array(key)? {
            Some(array) if array.len() < tokens as usize => Err(TextError::Length {
                key,
                len: array.len() as u64,
                tokens,
            }),
            array => Ok(array),
        }
    }

    /// The type of each token, GGUF's number; `None` where the file doesn't say.
    pub(super) fn types(
        self,
        tokens: u32,
    ) -> Result<Option<impl Iterator<Item = i64> + use<'a>>, TextError> {
        let Some(array) = self.per_token(TYPES, tokens)? else {
            return Ok(None);
        };
        let want = "an array of 32-bit integers";
        match (array.i32s(), array.u32s()) {
            (None, None) => Err(TextError::WrongType { key: TYPES, want }),
            (signed, unsigned) => Ok(Some(
                signed
                    .into_iter()
                    .flatten()
                    .map(i64::from)
                    .chain(unsigned.into_iter().flatten().map(i64::from))
                    .take(tokens as usize),
            )),
        }
    }

    /// The score of each token; `None` where the file doesn't say.
    pub(super) fn scores(
        self,
        tokens: u32,
    ) -> Result<Option<impl Iterator<Item = f32> + use<'a>>, TextError> {
        let Some(array) = self.per_token(SCORES, tokens)? else {
            return Ok(None);
        };
        let want = "an array of 32-bit floats or integers";
        match (array.f32s(), array.i32s()) {
            (None, None) => Err(TextError::WrongType { key: SCORES, want }),
            (floats, whole) => Ok(Some(
                floats
                    .into_iter()
                    .flatten()
                    .chain(whole.into_iter().flatten().map(|score| score as f32))
                    .take(tokens as usize),
            )),
        }
    }
}
