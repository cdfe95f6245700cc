//! What becomes of texts, with a byte-level vocabulary in which most letters are tokens.

use std::path::{Path, PathBuf};

use super::*;
use crate::text::metadata::Metadata;

const EOS: u32 = 0;
const BOS: u32 = 1;
/// Bytes are tokens from here on.
const BYTES: u32 = 3;

/// GPT-2's way to write a byte as a character.
fn spelled(byte: u8) -> char {
    let plain = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if plain(byte) {
        return byte.into();
    }
    let before = (0..byte).filter(|&b| !plain(b)).count() as u32;
    char::from_u32(256 + before).unwrap()
}

fn tokenizer(bos: bool) -> Tokenizer {
    let mut tokens = vec!["<eos>".to_owned(), "<bos>".into(), "<|im_end|>".into()];
    tokens.extend((0..=255).map(|b| spelled(b).to_string()));
    tokens.push("ab".into());
    let types: Vec<i32> = (0..tokens.len())
        .map(|i| if i < BYTES as usize { 3 } else { 1 })
        .collect();
    let file = Metadata::default()
        .str("tokenizer.ggml.model", "gpt2")
        .str("tokenizer.ggml.pre", "gpt-2")
        .strs("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .strs("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.eos_token_id", EOS)
        .u32("tokenizer.ggml.bos_token_id", BOS)
        .bool("tokenizer.ggml.add_bos_token", bos)
        .file();
    Tokenizer::from_gguf(&leanstream_core::gguf::Gguf::parse(&file, file.len() as u64).unwrap())
        .unwrap()
}

fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("leanstream-data-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn load(path: &Path, seq: u32, bos: bool) -> Result<Data, Error> {
    let options = Options {
        seq,
        seed: 5,
        bytes_max: 1 << 30,
    };
    Data::load(path, &tokenizer(bos), options)
}

fn failure(name: &str, bytes: &[u8]) -> String {
    let error = load(&file(name, bytes), 8, false).unwrap_err();
    assert_eq!(error.exit_code(), 2);
    error.to_string()
}

/// Tokens and targets of the sequences in the file's order, bytes as they are, others as `e`, `b`,
/// `m`, and `_` where masked.
fn shown(data: &Data) -> Vec<(String, String)> {
    let show = |ids: &[u32]| -> String {
        ids.iter()
            .map(|&id| match id {
                EOS => 'e',
                BOS => 'b',
                2 => 'm',
                MASKED => '_',
                259 => 'X',
                byte => char::from((byte - BYTES) as u8),
            })
            .collect()
    };
    let (mut tokens, mut targets) = (vec![7; data.longest()], vec![7; data.longest()]);
    (0..data.sequences())
        .map(|i| {
            let len = data.item(i, &mut tokens, &mut targets);
            assert_eq!(len, data.len_of(i));
            (show(&tokens[..len]), show(&targets[..len]))
        })
        .collect()
}

fn pairs(all: &[(&str, &str)]) -> Vec<(String, String)> {
    all.iter().map(|&(a, b)| (a.into(), b.into())).collect()
}

#[test]
fn plain_text_is_cut_into_windows_that_predict_every_token_once() {
    let path = file("plain.txt", b"01234567<eos>");
    let data = load(&path, 5, false).unwrap();
    assert_eq!(
        shown(&data),
        pairs(&[("01234", "12345"), ("567<e", "67<eo"), ("os", "s>")])
    );
    assert_eq!((data.tokens(), data.targets(), data.longest()), (12, 12, 5));
    let data = load(&path, 5, true).unwrap();
    assert_eq!(
        shown(&data),
        pairs(&[("b0123", "01234"), ("b567<", "567<e"), ("bos", "os>")])
    );
    let exact = load(&file("exact.txt", b"012345"), 5, false).unwrap();
    assert_eq!(shown(&exact), pairs(&[("01234", "12345")]));
}

#[test]
fn items_end_with_eos_and_prompts_are_masked() {
    let lines = br#"
{"text": "hello", "id": 3}

{"prompt": "q:", "completion": "r<|im_end|>"}
{"prompt": "a", "completion": "b"}
{"prompt": "q", "completion": "r<eos>"}
{"prompt": "", "completion": "r"}
{"prompt": "q", "completion": ""}
"#;
    let data = load(&file("items.jsonl", lines), 4, false).unwrap();
    let want = [
        ("hell", "ello"),
        ("o", "e"),
        ("q:rm", "_rme"),
        // "ab" is a token, but the prompt's alone is "a".
        ("ab", "be"),
        ("qr", "re"),
        ("r", "e"),
        ("q", "e"),
    ];
    assert_eq!(shown(&data), pairs(&want));
    assert_eq!(data.notice(), None);
    let data = load(&file("items.jsonl", lines), 5, true).unwrap();
    let want = [
        ("bhell", "hello"),
        ("b", "e"),
        ("bq:rm", "__rme"),
        ("bab", "_be"),
        ("bqr", "_re"),
        ("br", "re"),
        ("bq", "_e"),
    ];
    assert_eq!(shown(&data), pairs(&want));
    assert_eq!(data.targets(), 6 + 3 + 2 + 2 + 2 + 1);
}

/// A chat template writes its own BOS.
#[test]
fn a_bos_is_not_doubled() {
    let lines = br#"{"prompt": "<bos>q", "completion": "r"}
{"text": "<bos>r"}"#;
    let data = load(&file("bos.jsonl", lines), 5, true).unwrap();
    assert_eq!(shown(&data), pairs(&[("bqr", "_re"), ("br", "re")]));
}

#[test]
fn items_that_are_too_long_are_left_out_and_told() {
    let lines = br#"{"prompt": "0", "completion": "12345"}
{"prompt": "0123", "completion": "4567"}
{"prompt": "0", "completion": "1"}"#;
    let data = load(&file("long.jsonl", lines), 4, false).unwrap();
    assert_eq!(shown(&data), pairs(&[("01", "1e")]));
    let notice = data.notice().unwrap();
    assert!(notice.ends_with(
        "long.jsonl: 2 of 3 items are longer than --seq 4 and are left out; the longest, line 2, has 8 tokens: --seq 8 \
         takes all"
    ));
    assert_eq!(
        load(&file("long.jsonl", lines), 8, false)
            .unwrap()
            .sequences(),
        3
    );
    let error = load(&file("long.jsonl", &lines[..38]), 4, false).unwrap_err();
    assert!(error.to_string().contains("1 of 1 items"), "{error}");
}

#[test]
fn bad_data_says_what_and_where() {
    for (name, bytes, want) in [
        ("a.txt", &b""[..], "it is empty"),
        ("b.txt", b"x", "it has one token"),
        ("c.txt", b"ab\nc\xff\n", "line 2, byte 4: it isn't UTF-8"),
        ("d.txt", b"ab\nc\xc3", "line 2, byte 4: it isn't UTF-8"),
        ("e.jsonl", b"\n \n", "it is empty"),
        (
            "f.jsonl",
            b"{\"text\": \"a\"}\n{\"text\": a}\n",
            "line 2, column 10: it isn't JSON: expected value",
        ),
        (
            "g.jsonl",
            b"{\"text\": \"a\"}\n{\"text\": \"a\xff\"}",
            "line 2, byte 11 of it: it isn't UTF-8",
        ),
        (
            "h.jsonl",
            b"[1]",
            "line 1: it must be an object with \"text\"",
        ),
        (
            "i.jsonl",
            b"{\"text\": 1}",
            "line 1: \"text\" is not a string",
        ),
        ("j.jsonl", b"{\"text\": \"\"}", "line 1: its text is empty"),
        (
            "k.jsonl",
            b"{\"text\": \"a\", \"prompt\": \"b\"}",
            "line 1: it must be an object",
        ),
        (
            "l.jsonl",
            b"{\"prompt\": \"\", \"completion\": \"\"}",
            "line 1: there is nothing to predict",
        ),
        ("m.json", b"[{\"text\": \"a\"}]", "one object a line"),
        // A first line of ours makes it JSONL, whatever its name.
        (
            "n.txt",
            b"{\"text\": \"a\"}\nb",
            "line 2, column 1: it isn't JSON",
        ),
    ] {
        let error = failure(name, bytes);
        assert!(
            error.contains(name) && error.contains(want),
            "{name}: {error}"
        );
    }
    let missing = load(Path::new("/nonexistent"), 8, false).unwrap_err();
    assert_eq!(missing.exit_code(), 5);
    let options = Options {
        seq: 8,
        seed: 0,
        bytes_max: 50,
    };
    let path = file("room.txt", &b"word ".repeat(10));
    let error = Data::load(&path, &tokenizer(false), options).unwrap_err();
    assert!(error.to_string().contains("--budget"), "{error}");
}

#[test]
fn a_byte_order_mark_and_windows_line_ends_are_no_text() {
    let data = load(&file("mark.txt", b"\xef\xbb\xbfxyz"), 8, false).unwrap();
    assert_eq!(shown(&data), pairs(&[("xy", "yz")]));
    let lines = b"\xef\xbb\xbf{\"text\": \"xyz\"}\r\n{\"text\": \"u\"}\r\n";
    let data = load(&file("mark.jsonl", lines), 8, false).unwrap();
    assert_eq!(shown(&data), pairs(&[("xyz", "yze"), ("u", "e")]));
}

/// A text of many blocks gives the tokens that it gives in one.
#[test]
fn blocks_do_not_show() {
    let mut text = String::new();
    for i in 0..120_000 {
        text.push_str(["ab", " cab", "é", "日本", "\n\n", "  x", ". ", "\n"][i * 7919 % 8]);
        if i % 1000 == 0 {
            text.push_str(&"ab".repeat(300));
        }
    }
    let mut want = Vec::new();
    let options = crate::text::Options {
        add_special: false,
        parse_special: false,
    };
    tokenizer(false).encode(text.as_bytes(), options, &mut want);
    let data = load(&file("blocks.txt", text.as_bytes()), 100, false).unwrap();
    assert!(text.len() > 3 * 65536);
    let (mut tokens, mut targets) = ([0; 100], [0; 100]);
    let mut got = Vec::new();
    for i in 0..data.sequences() {
        let len = data.item(i, &mut tokens, &mut targets);
        got.extend_from_slice(&tokens[..len]);
    }
    got.push(*targets[..data.len_of(data.sequences() - 1)].last().unwrap());
    assert!(got == want, "{} {}", got.len(), want.len());
    assert!(data.bytes() < 2 * got.len() as u64 + 24 * data.sequences() as u64);
}

#[test]
fn epochs_have_every_sequence_once() {
    let path = file("epochs.txt", &b"0123456789".repeat(10));
    let data = load(&path, 4, false).unwrap();
    let count = data.sequences();
    let mut orders = Vec::new();
    for epoch in 0..3 {
        let order: Vec<usize> = (0..count)
            .map(|i| data.at((epoch * count + i) as u64))
            .collect();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..count));
        orders.push(order);
    }
    assert_ne!(orders[0], orders[1]);
    let again = load(&path, 4, false).unwrap();
    assert_eq!(again.fingerprint(), data.fingerprint());
    assert_ne!(
        load(&path, 5, false).unwrap().fingerprint(),
        data.fingerprint()
    );
    let (mut tokens, mut targets) = ([0; 4], [0; 4]);
    let mut other = ([0; 4], [0; 4]);
    for i in 0..count as u64 {
        assert_eq!(
            data.sequence(i, &mut tokens, &mut targets),
            data.item(data.at(i), &mut other.0, &mut other.1)
        );
        assert_eq!((tokens, targets), other);
    }
}
