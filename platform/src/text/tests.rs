//! Whole tokenizers over small vocabularies: against llama.cpp, over all bytes, and over metadata that
//! is wrong.

use leanstream_core::gguf::Gguf;
use serde_json::Value;

use super::metadata::Metadata;
use super::*;

const PLAIN: Options = Options {
    add_special: false,
    parse_special: false,
};
const SPECIAL: Options = Options {
    add_special: true,
    parse_special: true,
};

fn tokenizer(metadata: &Metadata) -> Result<Tokenizer, TextError> {
    let file = metadata.file();
    let gguf = Gguf::parse(&file, file.len() as u64).unwrap();
    let built = Tokenizer::from_gguf(&gguf);
    if let Ok(built) = &built {
        let foretold = Tokenizer::bytes_needed(&gguf).unwrap();
        let held = built.table_bytes();
        assert!(
            (held..=held + (16 << 10)).contains(&foretold),
            "{held}, {foretold}"
        );
    }
    built
}

fn encode(tokenizer: &Tokenizer, text: &str, options: Options) -> Vec<u32> {
    let mut ids = Vec::new();
    tokenizer.encode(text.as_bytes(), options, &mut ids);
    ids
}

fn decode(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<u8> {
    let mut out = Vec::new();
    tokenizer.decode(ids, &mut out);
    out
}

/// The byte alphabet, in the order of the bytes.
fn alphabet() -> Vec<String> {
    let mut text = Vec::new();
    (0..=255)
        .map(|byte| {
            text.clear();
            bpe::spell(byte, &mut text);
            String::from_utf8(text.clone()).unwrap()
        })
        .collect()
}

/// Byte tokens 0 to 255, then `he`, `ll`, `hell`, `hello`, `Ġhello`, then `<|im_end|>` and `<tag>`.
fn small_bpe() -> Metadata {
    let mut tokens = alphabet();
    tokens.extend(["he", "ll", "hell", "hello", "Ġhello", "<|im_end|>", "<tag>"].map(String::from));
    let mut types = vec![1; 261];
    types.extend([3, 4]);
    Metadata::default()
        .str("tokenizer.ggml.model", "gpt2")
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .strs(
            "tokenizer.ggml.merges",
            &["h e", "l l", "he ll", "hell o", "Ġ hello"],
        )
}

/// `<unk>`, `<s>`, `</s>`, 256 byte tokens, then pieces with scores.
fn small_spm() -> Metadata {
    let mut tokens = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255).map(|byte| format!("<0x{byte:02X}>")));
    tokens.extend(["▁", "a", "b", "ab", "▁a", "ba", "<tag>"].map(String::from));
    let mut types = vec![2, 3, 3];
    types.extend([6; 256]);
    types.extend([1, 1, 1, 1, 1, 1, 4]);
    let mut scores = vec![0.0; 259];
    scores.extend([-9.0, -9.0, -9.0, -2.0, -1.0, -2.0, 0.0]);
    Metadata::default()
        .str("tokenizer.ggml.model", "llama")
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .f32s("tokenizer.ggml.scores", &scores)
}

/// One pre-tokenizer of each kind and three SentencePiece conventions, on texts that tell them apart:
/// see golden/make_tokens.py.
#[test]
fn small_vocabularies_give_llama_cpps_ids() {
    let golden = include_str!("../../tests/golden/small_tokens.json");
    let golden: Value = serde_json::from_str(golden).unwrap();
    let mut checked = 0;
    for (name, variant) in golden["variants"].as_object().unwrap() {
        let mut metadata = Metadata::default();
        let vocabulary = golden[variant[0].as_str().unwrap()].as_object().unwrap();
        for (key, value) in vocabulary.iter().chain(variant[1].as_object().unwrap()) {
            metadata = put(metadata, key, value);
        }
        let tokenizer = tokenizer(&metadata).unwrap();
        for case in golden["cases"].as_array().unwrap() {
            for (mode, options) in [("plain", PLAIN), ("special", SPECIAL)] {
                for (ids, names) in case[mode].as_object().unwrap() {
                    if !names.as_str().unwrap().split('|').any(|n| n == name) {
                        continue;
                    }
                    let text = case["text"].as_str().unwrap();
                    let want: Vec<u32> = ids
                        .split_whitespace()
                        .map(|id| id.parse().unwrap())
                        .collect();
                    assert_eq!(
                        encode(&tokenizer, text, options),
                        want,
                        "{name}, {mode}: {text:?}"
                    );
                    checked += 1;
                }
            }
        }
    }
    assert_eq!(checked, 17 * (26 + 3));
}

/// One key from JSON.
fn put(metadata: Metadata, key: &str, value: &Value) -> Metadata {
    let list = |value: &Value| value.as_array().unwrap().clone();
    match value {
        Value::Bool(flag) => metadata.bool(key, *flag),
        Value::Number(number) => metadata.u32(key, number.as_u64().unwrap() as u32),
        Value::String(text) => metadata.str(key, text),
        _ if value[0].is_string() => {
            let texts: Vec<String> = list(value)
                .iter()
                .map(|text| text.as_str().unwrap().to_owned())
                .collect();
            metadata.strs(key, &texts)
        }
        _ if value[0].is_f64() => {
            let scores: Vec<f32> = list(value)
                .iter()
                .map(|score| score.as_f64().unwrap() as f32)
                .collect();
            metadata.f32s(key, &scores)
        }
        _ => {
            let types: Vec<i32> = list(value)
                .iter()
                .map(|ty| ty.as_i64().unwrap() as i32)
                .collect();
            metadata.i32s(key, &types)
        }
    }
}

#[test]
fn bpe_merges_by_rank_and_finds_special_tokens() {
    let t = tokenizer(&small_bpe()).unwrap();
    assert_eq!(encode(&t, "hello hello", PLAIN), [259, 260]);
    // No rule makes `lo`, so `ll` comes first and `o` joins what it makes.
    assert_eq!(encode(&t, "hellohel", PLAIN), [259, 256, 108]);
    // A control token is text unless asked for; a user-defined one never is.
    assert_eq!(encode(&t, "<tag><|im_end|>", SPECIAL), [262, 261]);
    let plain = encode(&t, "<tag><|im_end|>", PLAIN);
    assert_eq!((plain[0], plain.len()), (262, 11));
    assert_eq!(decode(&t, &plain), b"<tag><|im_end|>");
    // Markup adds nothing to the text; asked for, it shows.
    assert_eq!(decode(&t, &[259, 261, 260, 9999]), b"hello hello");
    let mut shown = Vec::new();
    t.piece_special(261, &mut shown);
    assert_eq!(shown, b"<|im_end|>");
    assert!(t.is_eog(261) && !t.is_eog(262) && t.is_control(261) && !t.is_control(262));
    assert_eq!((t.bos(), t.eos(), t.eot()), (None, None, Some(261)));
    // Without a pre-tokenizer's name the default is taken, and the user told.
    assert!(t.warning().is_some());
    let named = tokenizer(&small_bpe().str("tokenizer.ggml.pre", "gpt-2")).unwrap();
    assert!(named.warning().is_none());
}

#[test]
fn spm_merges_by_score_and_spells_the_rest_in_bytes() {
    let t = tokenizer(&small_spm()).unwrap();
    // `▁a` beats `ab`; of `ab` and `ba`, which have one score, the left one wins.
    assert_eq!(encode(&t, "ab", PLAIN), [263, 261]);
    assert_eq!(encode(&t, "bab", PLAIN), [259, 264, 261]);
    assert_eq!(encode(&t, "é", PLAIN), [259, 3 + 0xc3, 3 + 0xa9]);
    // The space comes before the text and after each special token, and decoding takes the first off.
    assert_eq!(encode(&t, "a<tag>a", SPECIAL), [1, 263, 265, 263]);
    assert_eq!(decode(&t, &[263, 265, 263]), b"a<tag> a");
    assert_eq!(decode(&t, &[261, 263]), b"b a");
    assert!(encode(&t, "", PLAIN).is_empty());
    assert_eq!(encode(&t, "", SPECIAL), [1]);
    assert!(t.is_eog(2) && !t.is_eog(1));
    let bare = tokenizer(&small_spm().bool("tokenizer.ggml.add_space_prefix", false)).unwrap();
    assert_eq!(encode(&bare, "ab", PLAIN), [262]);
}

/// Without byte tokens a text's bytes are looked for as they are, and else are unknown.
#[test]
fn spm_without_byte_tokens_knows_what_it_does_not_know() {
    let t = tokenizer(
        &Metadata::default()
            .str("tokenizer.ggml.model", "llama")
            .bool("tokenizer.ggml.add_space_prefix", false)
            .strs(
                "tokenizer.ggml.tokens",
                &[&b"<unk>"[..], b"<s>", b"</s>", b"a", b"\xc3", b"\xa9"],
            )
            .i32s("tokenizer.ggml.token_type", &[2, 3, 3, 1, 1, 1]),
    )
    .unwrap();
    assert_eq!(encode(&t, "abé", PLAIN), [3, 0, 4, 5]);
}

#[test]
fn every_byte_and_random_bytes_come_back() {
    let spaceless = small_spm().bool("tokenizer.ggml.add_space_prefix", false);
    for metadata in [small_bpe(), small_spm(), spaceless] {
        let t = tokenizer(&metadata).unwrap();
        let check = |text: &[u8]| {
            let mut ids = Vec::new();
            t.encode(text, PLAIN, &mut ids);
            assert_eq!(decode(&t, &ids), text, "{text:x?}");
        };
        for byte in 0..=255 {
            check(&[byte]);
            check(&[b'a', byte, b' ', byte]);
        }
        let mut random = 1_u64;
        for len in 0..500 {
            let text: Vec<u8> = (0..len % 50)
                .map(|_| {
                    random = random
                        .wrapping_mul(6364136223846793005)
                        .wrapping_add(1442695040888963407);
                    (random >> 56) as u8
                })
                .collect();
            check(&text);
        }
    }
}

#[test]
fn a_piece_allocates_nothing_when_there_is_room() {
    for metadata in [small_bpe(), small_spm()] {
        let t = tokenizer(&metadata).unwrap();
        let mut out = Vec::with_capacity(t.piece_bytes_max());
        let capacity = out.capacity();
        for id in 0..t.vocab_len() + 2 {
            out.clear();
            t.piece_special(id, &mut out);
            assert_eq!(out.capacity(), capacity);
        }
    }
}

/// The byte tokens and these, with their types.
fn with_specials(specials: &[(&str, i32)]) -> Tokenizer {
    let mut tokens = alphabet();
    tokens.extend(specials.iter().map(|(text, _)| text.to_string()));
    let mut types = vec![1; 256];
    types.extend(specials.iter().map(|&(_, ty)| ty));
    let metadata = Metadata::default()
        .str("tokenizer.ggml.model", "gpt2")
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .strs("tokenizer.ggml.merges", &[""; 0]);
    tokenizer(&metadata).unwrap()
}

#[test]
fn the_longest_special_token_is_found_first() {
    let t = with_specials(&[("<a>", 4), ("<a><b>", 4), ("b><a", 4), ("<a><b><a>", 3)]);
    assert_eq!(encode(&t, "<a><b>", PLAIN), [257]);
    assert_eq!(encode(&t, "<a><a><b><a>", PLAIN), [256, 257, 256]);
    assert_eq!(encode(&t, "<a><a><b><a>", SPECIAL), [256, 259]);
    // `b><a` is longer than the `<a>` in it, and spoils it.
    assert_eq!(encode(&t, "b><a>", PLAIN), [258, 62]);
}

/// A token that looks like markup is markup, whatever its type says.
#[test]
fn markup_is_known_by_its_text() {
    let t = with_specials(&[("<|im_end|>", 1), ("<fim_prefix>", 4), ("<PRE>", 4)]);
    assert!(t.is_control(256) && t.is_control(257) && !t.is_control(258));
    assert_eq!(encode(&t, "<|im_end|><PRE>", SPECIAL), [256, 258]);
    assert_eq!(encode(&t, "<|im_end|><PRE>", PLAIN).len(), 11);
}

#[test]
fn special_tokens_of_too_many_lengths_are_refused() {
    let tokens: Vec<String> = (1..=257).map(|len| "x".repeat(len)).collect();
    let build = |count: usize| {
        tokenizer(
            &Metadata::default()
                .str("tokenizer.ggml.model", "gpt2")
                .strs("tokenizer.ggml.tokens", &tokens[..count])
                .i32s("tokenizer.ggml.token_type", &vec![4; count])
                .strs("tokenizer.ggml.merges", &[""; 0]),
        )
    };
    assert!(build(256).is_ok());
    assert!(matches!(
        build(257),
        Err(TextError::TooLarge {
            len: 257,
            max: 256,
            ..
        })
    ));
}

#[test]
fn gpt_oss_and_gemma_4_do_not_end_where_others_do() {
    let eog = |texts: &[&str]| {
        let mut tokens = alphabet();
        tokens.extend(texts.iter().map(|text| text.to_string()));
        let metadata = Metadata::default()
            .str("tokenizer.ggml.model", "gpt2")
            .strs("tokenizer.ggml.tokens", &tokens)
            .strs("tokenizer.ggml.merges", &[""; 0])
            .u32("tokenizer.ggml.eos_token_id", 0);
        let t = tokenizer(&metadata).unwrap();
        let ends = |text: &&&str| t.token(text.as_bytes()).is_some_and(|id| t.is_eog(id));
        assert!(t.is_eog(0));
        texts.iter().filter(ends).count()
    };
    assert_eq!(eog(&["<|end|>", "<|call|>"]), 2);
    assert_eq!(
        eog(&["<|end|>", "<|return|>", "<|call|>", "<|channel|>"]),
        2
    );
    assert_eq!(eog(&["</s>", "<eos>"]), 2);
    assert_eq!(eog(&["</s>", "<|tool_response>"]), 1);
    assert_eq!(
        eog(&["<fim_pad>", "<REPO>", "<|file_sep|>", "<fim_prefix>"]),
        3
    );
}

#[test]
fn wrong_metadata_is_refused_by_name() {
    use TextError as E;
    let model = |name: &str| Metadata::default().str("tokenizer.ggml.model", name);
    let bpe = |tokens: &[&str], merges: &[&str]| {
        model("gpt2")
            .strs("tokenizer.ggml.tokens", tokens)
            .strs("tokenizer.ggml.merges", merges)
    };
    let spm = |tokens: &[&str]| model("llama").strs("tokenizer.ggml.tokens", tokens);
    let merge = |index, what| E::Merge { index, what };
    let (tokens, types, scores) = (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.scores",
    );
    let (strings, integers) = ("an array of strings", "an array of 32-bit integers");
    let cases = [
        (
            Metadata::default(),
            E::Missing {
                key: "tokenizer.ggml.model",
            },
        ),
        (
            Metadata::default().u32("tokenizer.ggml.model", 1),
            E::WrongType {
                key: "tokenizer.ggml.model",
                want: "a string",
            },
        ),
        (
            model("b\nrt\u{7f}"),
            E::Model {
                name: "b\\nrt\\u{7f}".into(),
            },
        ),
        (model("gpt2"), E::Missing { key: tokens }),
        (
            model("gpt2").u32(tokens, 1),
            E::WrongType {
                key: tokens,
                want: "an array",
            },
        ),
        (
            model("gpt2").i32s(tokens, &[1]),
            E::WrongType {
                key: tokens,
                want: strings,
            },
        ),
        (
            model("gpt2").strs(tokens, &["a"]),
            E::Missing {
                key: "tokenizer.ggml.merges",
            },
        ),
        (
            bpe(&["a", "b", "a"], &[]),
            E::Duplicate {
                first: 0,
                second: 2,
            },
        ),
        (
            bpe(&["a", "b"], &["a"]),
            merge(0, "it has no space between two tokens"),
        ),
        (
            bpe(&["a", "b"], &[""]),
            merge(0, "it has no space between two tokens"),
        ),
        (
            bpe(&["a", "b"], &[" "]),
            merge(0, "it has no space between two tokens"),
        ),
        (
            bpe(&["a", "b", "ab"], &["a b", "a c"]),
            merge(1, "it names a text that is no token"),
        ),
        (
            bpe(&["a", "b", "ab"], &["a "]),
            merge(0, "it names a text that is no token"),
        ),
        (
            bpe(&["a", "b"], &["a b"]),
            merge(0, "what it makes is no token"),
        ),
        (
            bpe(&["a"], &[]).i32s(types, &[]),
            E::Length {
                key: types,
                len: 0,
                tokens: 1,
            },
        ),
        (
            bpe(&["a"], &[]).f32s(types, &[0.0]),
            E::WrongType {
                key: types,
                want: integers,
            },
        ),
        (
            bpe(&["a"], &[]).u32("tokenizer.ggml.eos_token_id", 1),
            E::Id {
                key: "tokenizer.ggml.eos_token_id",
                id: 1,
                tokens: 1,
            },
        ),
        (
            bpe(&["a"], &[]).str("tokenizer.ggml.bos_token_id", "0"),
            E::WrongType {
                key: "tokenizer.ggml.bos_token_id",
                want: "a token id",
            },
        ),
        (
            bpe(&["a"], &[]).i32("tokenizer.ggml.eot_token_id", -7),
            E::WrongType {
                key: "tokenizer.ggml.eot_token_id",
                want: "a token id",
            },
        ),
        (
            bpe(&["a"], &[]).bool("tokenizer.ggml.add_bos_token", true),
            E::NoToken {
                asks: "tokenizer.ggml.add_bos_token",
                key: "tokenizer.ggml.bos_token_id",
            },
        ),
        (
            bpe(&["a"], &[]).u32("tokenizer.ggml.add_eos_token", 1),
            E::WrongType {
                key: "tokenizer.ggml.add_eos_token",
                want: "a bool",
            },
        ),
        (
            spm(&["a", "b", "c"]).f32s(scores, &[0.0]),
            E::Length {
                key: scores,
                len: 1,
                tokens: 3,
            },
        ),
        (
            spm(&["a", "b"]).f32s(scores, &[0.0, f32::NAN]),
            E::Score { id: 1 },
        ),
        (
            spm(&["a"]).strs(scores, &["0"]),
            E::WrongType {
                key: scores,
                want: "an array of 32-bit floats or integers",
            },
        ),
        // BOS is 1 where the file doesn't say, and there is no token 1.
        (
            spm(&["a"]),
            E::NoToken {
                asks: "tokenizer.ggml.add_bos_token",
                key: "tokenizer.ggml.bos_token_id",
            },
        ),
    ];
    for (metadata, want) in cases {
        let error = tokenizer(&metadata).unwrap_err();
        assert_eq!(error, want);
        let shown = error.to_string();
        assert!(shown.contains("tokenizer.ggml."), "{shown}");
        assert!(shown.contains(": "), "{shown}");
    }
}

#[test]
fn an_unknown_pre_tokenizer_is_named_with_those_that_are_known() {
    let error = tokenizer(&small_bpe().str("tokenizer.ggml.pre", "gpt-5")).unwrap_err();
    let shown = error.to_string();
    assert!(shown.contains("'gpt-5'"), "{shown}");
    for name in ["smollm", "llama-bpe", "qwen2", "gpt-2", "default"] {
        assert!(shown.contains(name), "{shown}");
    }
}

/// Converters pad arrays, write -1 for "none", leave texts empty and use any bytes.
#[test]
fn odd_metadata_that_real_files_have_is_taken() {
    let tokens: [&[u8]; 5] = [b"a", b"", b"\xff\xfe", b"", b"b"];
    let t = tokenizer(
        &Metadata::default()
            .str("tokenizer.ggml.model", "gpt2")
            .str("tokenizer.ggml.pre", "qwen2")
            .strs("tokenizer.ggml.tokens", &tokens)
            .i32s("tokenizer.ggml.token_type", &[1, 5, 1, 77, 1, 1, 1])
            .strs("tokenizer.ggml.merges", &[""; 0])
            .i32("tokenizer.ggml.bos_token_id", -1)
            .u32("tokenizer.ggml.eos_token_id", u32::MAX),
    )
    .unwrap();
    assert_eq!((t.bos(), t.eos(), t.vocab_len()), (None, None, 5));
    assert_eq!(encode(&t, "ab?", PLAIN), [0, 4]);
    assert_eq!(decode(&t, &[0, 1, 2, 3, 4]), b"a\xff\xfeb");
}
