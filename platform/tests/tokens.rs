//! Token ids of two published models against those of llama.cpp, and their memory.

mod common;

use std::fs::File;
use std::io::Read;

use leanstream::fetch::{GEMMA3, Published, SMOLLM2};
use leanstream::text::{Options, Tokenizer};
use leanstream_core::gguf::{Gguf, GgufError};
use serde_json::Value;

/// Runs `test` on the model's tokenizer, or says which test is skipped.
fn with_model(test: &str, published: &Published, check: impl FnOnce(&Gguf<'_>, &Tokenizer)) {
    let Some(path) = common::models::model(test, published) else {
        return;
    };
    let name = published.file;
    let mut file = File::open(path).unwrap();
    let len = file.metadata().unwrap().len();
    let mut header = vec![0; 1 << 20];
    file.read_exact(&mut header).unwrap();
    loop {
        let more = match Gguf::parse(&header, len) {
            Ok(gguf) => break check(&gguf, &Tokenizer::from_gguf(&gguf).unwrap()),
            Err(GgufError::NeedMore { bytes, .. }) => bytes as usize,
            Err(error) => panic!("{name}: {error}"),
        };
        let had = header.len();
        header.resize(more.max(had * 2).min(len as usize), 0);
        file.read_exact(&mut header[had..]).unwrap();
    }
}

fn encode(tokenizer: &Tokenizer, text: &[u8], add_special: bool, parse_special: bool) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(
        text,
        Options {
            add_special,
            parse_special,
        },
        &mut ids,
    );
    ids
}

/// Every golden text of `model`, as bytes, with its entry.
fn golden(model: &str) -> Vec<(Vec<u8>, Value)> {
    let all: Value = serde_json::from_str(include_str!("golden/tokens.json")).unwrap();
    let cases = all[model].as_array().unwrap().clone();
    cases
        .into_iter()
        .map(|case| (case["text"].as_str().unwrap().into(), case))
        .collect()
}

fn check_golden(model: &str, tokenizer: &Tokenizer) {
    let cases = golden(model);
    assert!(cases.len() > 15);
    for (text, case) in cases {
        for (key, add, parse) in [
            ("ids_with_special_parsed", true, true),
            ("ids_plain", true, false),
            ("ids_no_bos", false, true),
        ] {
            let want: Vec<u32> = serde_json::from_value(case[key].clone()).unwrap();
            let ids = encode(tokenizer, &text, add, parse);
            assert_eq!(ids, want, "{model}, {key}: {}", case["text"]);
        }
    }
}

#[test]
fn smollm2_gives_llama_cpps_ids() {
    with_model("smollm2_gives_llama_cpps_ids", &SMOLLM2, |_, tokenizer| {
        check_golden("smollm2", tokenizer);
    });
}

#[test]
fn gemma3_gives_llama_cpps_ids() {
    with_model("gemma3_gives_llama_cpps_ids", &GEMMA3, |_, tokenizer| {
        check_golden("gemma3", tokenizer);
    });
}

/// The whole program has 24 MiB with the one and 48 MiB with the other.
#[test]
fn tables_are_small_and_foretold() {
    for (published, max) in [(SMOLLM2, 2_500_000), (GEMMA3, 8_000_000)] {
        let name = published.file;
        with_model(
            "tables_are_small_and_foretold",
            &published,
            |gguf, tokenizer| {
                let (held, foretold) = (
                    tokenizer.table_bytes(),
                    Tokenizer::bytes_needed(gguf).unwrap(),
                );
                eprintln!("{name}: {held} bytes of tables");
                assert!(held <= max, "{name}: {held}");
                assert!(
                    (held..=held + (16 << 10)).contains(&foretold),
                    "{name}: {held}, {foretold}"
                );
            },
        );
    }
}

#[test]
fn roles_are_the_metadatas() {
    with_model("roles_are_the_metadatas", &SMOLLM2, |_, t| {
        assert_eq!(
            (t.vocab_len(), t.bos(), t.eos(), t.eot()),
            (49152, Some(1), Some(2), Some(2))
        );
        assert!(!t.add_bos() && !t.add_eos() && t.warning().is_none());
        // <|endoftext|>, <|im_end|> and, as a repository's name ends a file, <reponame>.
        let eog: Vec<u32> = (0..t.vocab_len()).filter(|&id| t.is_eog(id)).collect();
        assert_eq!(eog, [0, 2, 4]);
        assert_eq!(t.token(b"<|im_start|>"), Some(1));
    });
    with_model("roles_are_the_metadatas", &GEMMA3, |_, t| {
        assert_eq!(
            (t.vocab_len(), t.bos(), t.eos(), t.eot()),
            (262144, Some(2), Some(1), Some(106))
        );
        assert!(t.add_bos() && !t.add_eos());
        let eog: Vec<u32> = (0..t.vocab_len()).filter(|&id| t.is_eog(id)).collect();
        // llama.cpp takes every </s> for an end, so also the one that Gemma has for HTML.
        assert_eq!(eog, [1, 106, 212]);
    });
}

/// Bytes in, bytes out: every pair of bytes, and random strings. SmolLM2 has no tokens for six control
/// characters and for 15 bytes that are no part of any assigned character's UTF-8; they are lost,
/// here as in llama.cpp.
#[test]
fn decoding_gives_back_what_was_encoded() {
    for (published, model) in [(SMOLLM2, "smollm2"), (GEMMA3, "gemma3")] {
        with_model(
            "decoding_gives_back_what_was_encoded",
            &published,
            |_, tokenizer| {
                let lost: Vec<u8> = (0..=255)
                    .filter(|&byte| encode(tokenizer, &[byte], false, false).is_empty())
                    .collect();
                assert_eq!(lost.len(), if model == "smollm2" { 21 } else { 0 });
                let mut out = Vec::new();
                let mut check = |text: &[u8]| {
                    out.clear();
                    tokenizer.decode(&encode(tokenizer, text, false, false), &mut out);
                    let mut want = text.to_vec();
                    want.retain(|byte| !lost.contains(byte));
                    assert_eq!(out, want, "{model}: {text:x?}");
                };
                for (text, _) in golden(model) {
                    check(&text);
                }
                for pair in 0..=u16::MAX {
                    check(&pair.to_le_bytes());
                }
                let mut random = 0x9e37_79b9_7f4a_7c15_u64;
                for len in 0..2000 {
                    let text: Vec<u8> = (0..len % 100)
                        .map(|_| {
                            random ^= random << 13;
                            random ^= random >> 7;
                            random ^= random << 17;
                            random as u8
                        })
                        .collect();
                    check(&text);
                }
            },
        );
    }
}
