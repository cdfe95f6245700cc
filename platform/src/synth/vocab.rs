//! The tokenizer of a made-up model: a small byte-level vocabulary, or another model's.

use leanstream_core::gguf::Gguf;

use super::SynthError;
use crate::gguf_write::Header;

/// Where the tokens come from.
pub enum Vocab<'a> {
    /// Every byte, some English merges and the ChatML marks; the rest is filled with unused tokens.
    BuiltIn,
    /// All `tokenizer.*` metadata of this model.
    Of(&'a Gguf<'a>),
}

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
pub const LEAST: u32 = (SPECIALS.len() + 256 + MERGES.len()) as u32;

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
            Self::BuiltIn if tokens < LEAST => Err(SynthError::Vocab {
                wanted: tokens,
                has: LEAST,
            }),
            Self::BuiltIn => {
                built_in(tokens, header);
                Ok(())
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

fn built_in(tokens: u32, header: &mut Header) {
    let bytes = (0..=255).map(|byte| byte_char(byte).to_string());
    let merged = MERGES.iter().map(|(left, right)| format!("{left}{right}"));
    let filling = (LEAST..tokens).map(|id| format!("<unused{id}>"));
    let texts = SPECIALS
        .iter()
        .map(|s| s.to_string())
        .chain(bytes)
        .chain(merged)
        .chain(filling);
    let types = (0..tokens).map(|id| match id {
        0..3 => CONTROL,
        3..LEAST => NORMAL,
        _ => UNUSED,
    });
    header.str("tokenizer.ggml.model", "gpt2");
    header.str("tokenizer.ggml.pre", "smollm");
    header.strs("tokenizer.ggml.tokens", texts);
    header.i32s("tokenizer.ggml.token_type", types);
    header.strs(
        "tokenizer.ggml.merges",
        MERGES.iter().map(|(left, right)| format!("{left} {right}")),
    );
    header.u32("tokenizer.ggml.bos_token_id", 0);
    header.u32("tokenizer.ggml.eos_token_id", 2);
    header.u32("tokenizer.ggml.padding_token_id", 0);
    header.bool("tokenizer.ggml.add_bos_token", false);
    header.bool("tokenizer.ggml.add_space_prefix", false);
    header.str("tokenizer.chat_template", CHAT_TEMPLATE);
}

/// How byte-level BPE spells a byte: printable Latin-1 as itself, the others, in order, as the
/// characters from U+0100.
fn byte_char(byte: u8) -> char {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|&b| !printable(b)).count();
    char::from_u32(0x100 + before as u32)
        .unwrap_or_else(|| unreachable!("68 bytes are unprintable"))
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
    fn bytes_are_spelled_as_gpt_2_does() {
        assert_eq!(byte_char(b'A'), 'A');
        assert_eq!(byte_char(b' '), 'Ġ');
        assert_eq!(byte_char(b'\n'), 'Ċ');
        assert_eq!(byte_char(0xad), 'Ń');
        let mut all: Vec<char> = (0..=255).map(byte_char).collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 256);
    }

    #[test]
    fn merges_build_on_what_is_there() {
        let mut known: Vec<String> = (0..=255).map(|byte| byte_char(byte).to_string()).collect();
        for (left, right) in MERGES {
            assert!(known.iter().any(|k| k == left), "{left}");
            assert!(known.iter().any(|k| k == right), "{right}");
            let merged = format!("{left}{right}");
            assert!(!known.contains(&merged), "{merged} twice");
            known.push(merged);
        }
    }
}
