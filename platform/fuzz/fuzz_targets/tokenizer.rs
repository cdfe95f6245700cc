//! Tokenizers over metadata that is right, slightly wrong or noise, and over any text.
//!
//! Whatever the metadata: building ends in a tokenizer or an error with a message, never a panic.
//! Whatever the text: every id is a token's, pieces are no longer than the longest token, and over
//! a vocabulary with all bytes the text comes back.
#![no_main]

#[path = "../../src/text/metadata.rs"]
mod metadata;

use leanstream::text::{Options, Tokenizer, Utf8Stream};
use leanstream_core::gguf::Gguf;
use libfuzzer_sys::fuzz_target;
use metadata::Metadata;

/// The fuzzer's bytes, taken from the front; zeros when they are used up.
struct Source<'d>(&'d [u8]);

impl<'d> Source<'d> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn bytes(&mut self, len: usize) -> &'d [u8] {
        let (head, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        head
    }

    fn text(&mut self) -> &'d [u8] {
        let len = self.byte() % 12;
        self.bytes(len.into())
    }

    /// One in 16: rare enough that most of the metadata stays right.
    fn rarely(&mut self) -> bool {
        self.byte() & 15 == 15
    }
}

const PRE: [&str; 15] = [
    "default",
    "gpt-2",
    "smollm",
    "llama-bpe",
    "minicpm5",
    "qwen2",
    "qwen35",
    "seed-coder",
    "tekken",
    "gpt-4o",
    "falcon",
    "deepseek-coder",
    "deepseek-v3",
    "dbrx",
    "?",
];

const MARKS: [&str; 8] = [
    "<|im_end|>",
    "</s>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "<tag>",
    "  ",
    "\n\n",
];

/// A character of the byte alphabet, by its byte.
fn spelled(byte: u8) -> String {
    let printable = |b: u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let code = match printable(byte) {
        true => u32::from(byte),
        false => 0x100 + (0..byte).filter(|&b| !printable(b)).count() as u32,
    };
    char::from_u32(code).unwrap().into()
}

/// Keys that both kinds have.
fn common(mut metadata: Metadata, source: &mut Source<'_>) -> Metadata {
    for key in [
        "bos", "eos", "eot", "eom", "unknown", "fim_pad", "fim_rep", "prefix",
    ] {
        let key = format!("tokenizer.ggml.{key}_token_id");
        metadata = match source.byte() {
            0..=127 => metadata,
            byte @ 128..=247 => metadata.u32(&key, u32::from(byte)),
            248..=250 => metadata.i32(&key, -1),
            251..=253 => metadata.u32(&key, u32::from_le_bytes([source.byte(); 4])),
            _ => metadata.str(&key, source.text()),
        };
    }
    for key in ["add_bos_token", "add_eos_token", "add_space_prefix"] {
        let key = format!("tokenizer.ggml.{key}");
        metadata = match source.byte() {
            0..=127 => metadata,
            byte @ 128..=250 => metadata.bool(&key, byte & 1 == 1),
            _ => metadata.u32(&key, 1),
        };
    }
    match source.byte() {
        0..=199 => metadata,
        200..=250 => metadata.str("general.name", "Phi-3"),
        _ => metadata.u32("general.name", 3),
    }
}

/// Types of `count` tokens of which the first `plain` have type `ty`.
fn types(count: usize, plain: usize, ty: i32, source: &mut Source<'_>) -> Vec<i32> {
    let mut types: Vec<i32> = (0..count)
        .map(|id| {
            if id < plain {
                ty
            } else {
                i32::from(source.byte() % 8)
            }
        })
        .collect();
    if source.rarely() {
        types.truncate(source.byte().into());
    }
    types
}

/// The metadata, and whether every byte of a text must come back.
fn gpt2(source: &mut Source<'_>) -> (Metadata, bool) {
    let mut tokens: Vec<String> = (0..=255).map(spelled).collect();
    let mut merges = Vec::new();
    for _ in 0..source.byte() % 40 {
        let (left, right) = (source.byte(), source.byte());
        let pick = |n: u8, tokens: &[String]| tokens[usize::from(n) * 7 % tokens.len()].clone();
        let (left, right) = (pick(left, &tokens), pick(right, &tokens));
        let joined = format!("{left}{right}");
        if joined.len() < 64 && !tokens.contains(&joined) {
            tokens.push(joined);
            merges.push(format!("{left} {right}"));
        }
    }
    let plain = tokens.len();
    let marks = source.byte();
    for (i, mark) in MARKS.iter().enumerate() {
        if marks >> i & 1 == 1 && !tokens.iter().any(|token| token == mark) {
            tokens.push(mark.to_string());
        }
    }
    if source.rarely() {
        merges.push(String::from_utf8_lossy(source.text()).into());
    }
    if source.rarely() {
        tokens.push(String::from_utf8_lossy(source.text()).into());
    }
    let types = types(tokens.len(), plain, 1, source);
    let metadata = Metadata::default()
        .str("tokenizer.ggml.model", "gpt2")
        .str(
            "tokenizer.ggml.pre",
            PRE[usize::from(source.byte()) % PRE.len()],
        )
        .strs("tokenizer.ggml.tokens", &tokens)
        .strs("tokenizer.ggml.merges", &merges)
        .i32s("tokenizer.ggml.token_type", &types);
    (metadata, true)
}

/// As [`gpt2`], but `▁` in a text is a space afterwards, and there may be no byte tokens.
fn llama(source: &mut Source<'_>) -> (Metadata, bool) {
    let mut tokens: Vec<Vec<u8>> = [&b"<unk>"[..], b"<s>", b"</s>"]
        .map(<[u8]>::to_vec)
        .to_vec();
    let whole = !source.rarely();
    if whole {
        tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>").into_bytes()));
    }
    let plain = tokens.len();
    for mark in &MARKS[..usize::from(source.byte()) % MARKS.len()] {
        if !tokens.iter().any(|token| token == mark.as_bytes()) {
            tokens.push(mark.as_bytes().to_vec());
        }
    }
    for _ in 0..source.byte() % 64 {
        let mut text = source.text().to_vec();
        if source.byte() & 3 == 0 {
            text.splice(0..0, "▁".bytes());
        }
        if !tokens.contains(&text) || source.rarely() {
            tokens.push(text);
        }
    }
    let mut kinds = types(tokens.len(), plain, 6, source);
    for (kind, special) in kinds.iter_mut().zip([2, 3, 3]) {
        *kind = special;
    }
    let mut scores: Vec<f32> = (0..tokens.len())
        .map(|_| f32::from(source.byte() as i8))
        .collect();
    if source.rarely() {
        scores[0] = f32::from_le_bytes([source.byte(); 4]);
    }
    let metadata = Metadata::default()
        .str("tokenizer.ggml.model", "llama")
        .strs("tokenizer.ggml.tokens", &tokens)
        .f32s("tokenizer.ggml.scores", &scores)
        .i32s("tokenizer.ggml.token_type", &kinds);
    (metadata, false)
}

fn check(tokenizer: &Tokenizer, text: &[u8], byte_complete: bool) {
    let longest = tokenizer.piece_bytes_max();
    let (mut ids, mut piece, mut shown) = (Vec::new(), Vec::new(), Vec::new());
    let mut utf8 = (Utf8Stream::new(), String::new());
    for mode in 0..4 {
        let options = Options {
            add_special: mode & 1 == 1,
            parse_special: mode & 2 == 2,
        };
        ids.clear();
        tokenizer.encode(text, options, &mut ids);
        shown.clear();
        for &id in &ids {
            assert!(id < tokenizer.vocab_len());
            piece.clear();
            tokenizer.piece_special(id, &mut piece);
            assert!(piece.len() <= longest);
            shown.extend_from_slice(&piece);
            utf8.0.push(&piece, &mut utf8.1);
        }
        if byte_complete && !options.add_special {
            assert_eq!(shown, text);
        }
        utf8.0.finish(&mut utf8.1);
        assert_eq!(utf8.1, String::from_utf8_lossy(&shown));
        utf8.1.clear();
        shown.clear();
        tokenizer.decode(&ids, &mut shown);
    }
}

fuzz_target!(|data: &[u8]| {
    let mut source = Source(data);
    let kind = source.byte();
    if kind == 255 {
        // A header as it comes.
        if let Ok(gguf) = Gguf::parse(source.0, source.0.len() as u64) {
            let _ = Tokenizer::from_gguf(&gguf).map_err(|error| error.to_string());
        }
        return;
    }
    let (metadata, complete) = if kind & 1 == 0 {
        gpt2(&mut source)
    } else {
        llama(&mut source)
    };
    let file = common(metadata, &mut source).file();
    let gguf = Gguf::parse(&file, file.len() as u64).expect("the writer writes GGUF");
    match Tokenizer::from_gguf(&gguf) {
        Ok(tokenizer) => {
            let foretold = Tokenizer::bytes_needed(&gguf).expect("it could be built");
            assert!(tokenizer.table_bytes() <= foretold);
            // White space after a token of Phi 3 is lost on purpose.
            let strips = gguf.get("general.name").is_some();
            check(&tokenizer, source.0, complete && !strips);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
