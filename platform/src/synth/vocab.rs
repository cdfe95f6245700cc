//! The tokenizer of a made-up model: a small byte-level vocabulary, or another model's.

use leanstream_core::gguf::Gguf;

use super::SynthError;
use crate::gguf_write::Header;
use crate::text::train::{Merge, spelled};

/// Where the tokens come from.
pub enum Vocab<'a> {
    /// Every byte, some English merges and the ChatML marks; the rest is filled with unused tokens.
    BuiltIn,
    /// All `tokenizer.*` metadata of this model.
    Of(&'a Gguf<'a>),
    /// Every byte and these merges ([`crate::text::train`], pre-tokenizer [`PRE`]).
    Trained(&'a [Merge]),
}

/// The pre-tokenizer of the vocabularies that are made here.
pub const PRE: &str = "smollm";

/// Special tokens, from id 0; the bytes follow from id 3, in order.
const SPECIALS: [&str; 3] = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];

/// Merges by rank; `Ġ` is how byte-level BPE writes a space.
const MERGES: [(&str, &str); 29] = [
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġ", "a"),
    ("i", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġt", "he"),
    ("e", "r"),
    ("Ġ", "s"),
    ("a", "t"),
    ("Ġ", "w"),
    ("Ġ", "o"),
    ("e", "n"),
    ("Ġ", "c"),
    ("i", "t"),
    ("i", "s"),
    ("a", "n"),
    ("o", "r"),
    ("e", "s"),
    ("Ġ", "b"),
    ("e", "d"),
    ("Ġ", "f"),
    ("in", "g"),
    ("l", "l"),
    ("Ġt", "o"),
    ("a", "s"),
    ("Ġa", "n"),
    ("Ġo", "f"),
    ("Ġan", "d"),
];

/// Tokens of the built-in vocabulary without any filling.
pub const LEAST: u32 = BASE + MERGES.len() as u32;

/// Tokens of a vocabulary without merges: the special ones and every byte.
pub const BASE: u32 = SPECIALS.len() as u32 + 256;

/// Words of this template are ChatML's: every marked-up turn, then the assistant's opening.
const CHAT_TEMPLATE: &str = "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' \
    + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}\
    {{ '<|im_start|>assistant\n' }}{% endif %}";

const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

impl Vocab<'_> {
    /// Adds the `tokenizer.*` keys for `tokens` tokens.
    pub(super) fn put(&self, tokens: u32, header: &mut Header) -> Result<(), SynthError> {
        match self {
            Self::BuiltIn => {
                byte_level(tokens, &MERGES, header)?;
                header.str("tokenizer.chat_template", CHAT_TEMPLATE);
                Ok(())
            }
            Self::Trained(merges) => {
                let merges: Vec<(&str, &str)> = merges
                    .iter()
                    .map(|(l, r)| (l.as_str(), r.as_str()))
                    .collect();
                byte_level(tokens, &merges, header)
            }
            Self::Of(model) => copy(model, tokens, header),
        }
    }
}

/// How many tokens a model's tokenizer has.
pub fn tokens_of(model: &Gguf<'_>) -> u32 {
    let tokens = model
        .get("tokenizer.ggml.tokens")
        .and_then(|value| value.as_array());
    tokens.map_or(0, |tokens| tokens.len().try_into().unwrap_or(u32::MAX))
}

/// A byte-level vocabulary with these merges, filled up with unused tokens.
fn byte_level(tokens: u32, merges: &[(&str, &str)], header: &mut Header) -> Result<(), SynthError> {
    let has = BASE + merges.len() as u32;
    if tokens < has {
        return Err(SynthError::Vocab {
            wanted: tokens,
            has,
        });
    }
    let merged = merges.iter().map(|(left, right)| format!("{left}{right}"));
    let filling = (has..tokens).map(|id| format!("<unused{id}>"));
    let texts = SPECIALS
        .iter()
        .map(|s| s.to_string())
        .chain((0..=255).map(spelled))
        .chain(merged)
        .chain(filling);
    let types = (0..tokens).map(|id| match id {
        id if id < SPECIALS.len() as u32 => CONTROL,
        id if id < has => NORMAL,
        _ => UNUSED,
    });
    header.str("tokenizer.ggml.model", "gpt2");
    header.str("tokenizer.ggml.pre", PRE);
    header.strs("tokenizer.ggml.tokens", texts);
    header.i32s("tokenizer.ggml.token_type", types);
    header.strs(
        "tokenizer.ggml.merges",
        merges.iter().map(|(left, right)| format!("{left} {right}")),
    );
    header.u32("tokenizer.ggml.bos_token_id", 0);
    header.u32("tokenizer.ggml.eos_token_id", 2);
    header.u32("tokenizer.ggml.padding_token_id", 0);
    header.bool("tokenizer.ggml.add_bos_token", false);
    header.bool("tokenizer.ggml.add_space_prefix", false);
    Ok(())
}

fn copy(model: &Gguf<'_>, wanted: u32, header: &mut Header) -> Result<(), SynthError> {
    let has = tokens_of(model);
    if has != wanted {
        return Err(SynthError::Vocab { wanted, has });
    }
    for (key, value) in model
        .metadata()
        .filter(|(key, _)| key.starts_with("tokenizer."))
    {
        header.value(key, &value);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merges_build_on_what_is_there() {
        let mut known: Vec<String> = (0..=255).map(spelled).collect();
        for (left, right) in MERGES {
            assert!(known.iter().any(|k| k == left), "{left}");
            assert!(known.iter().any(|k| k == right), "{right}");
            let merged = format!("{left}{right}");
            assert!(!known.contains(&merged), "{merged} twice");
            known.push(merged);
        }
    }
}
