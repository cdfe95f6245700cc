//! Files that are wrong: each must be refused with a message that says what is wrong and what to
//! do. Several are bugs that other programs had; their stories stand with them.

#[allow(dead_code)]
mod build;

use build::{Build, array, sample, string};
use leanstream_core::gguf::{Gguf, GgufError, TensorIndex, check_shards};

/// Miri takes a thousand times as long; it gets a sample of the sweeps.
const STEP: usize = if cfg!(miri) { 61 } else { 1 };

/// The message for a file that is mapped whole.
fn refusal(file: &[u8]) -> String {
    let error = Gguf::parse(file, file.len() as u64).expect_err("must be refused");
    assert!(
        !matches!(error, GgufError::NeedMore { .. }),
        "the whole file was there"
    );
    error.to_string()
}

#[track_caller]
fn assert_refused(build: &Build, message: &str) {
    assert_eq!(refusal(&build.file()), message);
}

/// A file with one tensor, in which `info` says what it likes.
fn with_info(dims: &[u64], ty: u32, offset: u64) -> Build {
    Build::new().info("blk.0.ffn_up.weight", dims, ty, offset)
}

/// Dimensions of 2^42 + 1 wrapped the tensor's size to 0 (llama.cpp PR #18674), and a reader in
/// Rust wrapped its u64s in release builds (gguf #15).
#[test]
fn sizes_that_wrap() {
    let wrong = |dims: &[u64], shown| {
        let message = format!(
            "tensor 'blk.0.ffn_up.weight' of {shown} is empty or larger than any file; the file \
             is damaged"
        );
        assert_refused(&with_info(dims, 0, 0), &message);
    };
    let n = (1 << 42) + 1;
    wrong(&[n, n], "4398046511105 x 4398046511105 x 1 x 1");
    wrong(
        &[1 << 16, 1 << 16, 1 << 16, 1 << 16],
        "65536 x 65536 x 65536 x 65536",
    );
    // The number of values fits, their size in bytes does not.
    wrong(&[1 << 62], "4611686018427387904 x 1 x 1 x 1");
    wrong(&[1 << 61], "2305843009213693952 x 1 x 1 x 1");
    // No size at all.
    wrong(&[32, 0], "32 x 0 x 1 x 1");
    wrong(&[0, u64::MAX, 2], "0 x 18446744073709551615 x 2 x 1");
}

/// Offset and size each fit, their sum doesn't; nor does the sum with the data's start.
#[test]
fn offsets_that_wrap() {
    let message = "tensor 'blk.0.ffn_up.weight' begins at data offset 18446744073709551584, past \
                   what a file can hold; the file is damaged";
    assert_refused(&with_info(&[8], 0, u64::MAX - 31), message);
    assert_refused(&with_info(&[1], 0, u64::MAX - 31), message);
}

/// Counts, dimensions and types went unchecked (ggml PR #709).
#[test]
fn counts_that_lie() {
    let count = |build: Build, place: &str, count: u64, left: u64| {
        let message = format!(
            "the header is damaged: {place} counts {count} items, more than the {left} bytes \
             after it can hold; download the file again"
        );
        assert_eq!(refusal(&build.header()), message);
    };
    let start = "the file's start";
    for lie in [u64::MAX, 1] {
        let mut tensors = Build::new();
        tensors.tensor_count = Some(lie);
        count(tensors, start, lie, 8);
        let mut pairs = Build::new();
        pairs.pair_count = Some(lie);
        count(pairs, start, lie, 0);
    }
    // An array whose size in bytes wraps to 8.
    let long = [
        &4u32.to_le_bytes()[..],
        &((1u64 << 62) + 2).to_le_bytes(),
        &[0; 8],
    ]
    .concat();
    let build = Build::new().raw("kinds", 9, &long);
    count(build, "the value of key 'kinds'", (1 << 62) + 2, 8);
}

#[test]
fn lengths_that_lie() {
    for length in [u64::MAX, 1 << 40, 9] {
        let value = [&length.to_le_bytes()[..], b"llama"].concat();
        let build = Build::new().raw("general.architecture", 8, &value);
        let message = format!(
            "the header is cut short or damaged: the value of key 'general.architecture' needs \
             {length} bytes at byte 64, the file has 5 more; download it again"
        );
        assert_eq!(refusal(&build.header()), message);
    }
}

#[test]
fn dimension_counts() {
    for (dims, n) in [(&[][..], 0), (&[1; 5], 5), (&[1; 200], 200)] {
        let message =
            format!("tensor 'blk.0.ffn_up.weight' has {n} dimensions; 1 to 4 are possible");
        assert_refused(&with_info(dims, 0, 0), &message);
    }
}

/// An alignment of 0 was a division by zero (gguf-tools #25).
#[test]
fn alignments() {
    for value in [0, 3, 48, u32::MAX] {
        let message = format!("general.alignment is {value}, not a power of two; convert it again");
        assert_refused(&Build::new().u32("general.alignment", value), &message);
    }
    assert_refused(
        &Build::new().str("general.alignment", "32"),
        "the value of key 'general.alignment' must be a uint32; convert the model again",
    );
    // The largest there is passes, with the data 2 GiB into the file.
    let file = Build::new().u32("general.alignment", 1 << 31).header();
    assert_eq!(
        Gguf::parse(&file, file.len() as u64).unwrap().data_offset(),
        1 << 31
    );
}

/// Two tensors of one name: the second won (llama.cpp #6836). Across shards too.
#[test]
fn names_twice() {
    let message = "tensor 'output.weight' stands twice in the model; convert the model again, or \
                   remove the shard that doesn't belong to it";
    let twice = Build::new()
        .tensor("output.weight", &[1], 0, 4)
        .tensor("output_norm.weight", &[1], 0, 4)
        .tensor("output.weight", &[1], 0, 4)
        .file();
    let once = Build::new().tensor("output.weight", &[1], 0, 4).file();
    let parse = |file| Gguf::parse(file, once.len().max(twice.len()) as u64).unwrap();
    let files = [parse(&twice)];
    let error = TensorIndex::new(&files, &mut [0; 3]).unwrap_err();
    assert_eq!(error.to_string(), message);
    let files = [parse(&once), parse(&once)];
    let error = TensorIndex::new(&files, &mut [0; 2]).unwrap_err();
    assert_eq!(error.to_string(), message);

    let message = "key 'general.name' stands twice in the metadata; which one counts is anyone's \
                   guess, so convert the model again";
    let build = Build::new()
        .str("general.name", "a")
        .u32("other", 1)
        .str("general.name", "a");
    assert_refused(&build, message);
}

/// "Truncated" was said of a file whose architecture was unknown (aprender #2535): this room reads
/// a file of any architecture, and an unknown type is named before the file's length is judged.
#[test]
fn unknown_is_not_truncated() {
    let file = Build::new()
        .str("general.architecture", "frobnicator")
        .file();
    assert!(Gguf::parse(&file, file.len() as u64).is_ok());

    let supported = "which isn't supported; use a file quantized to one of F32, F16, Q4_0, Q4_1, \
                     Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, BF16, MXFP4";
    let name = "tensor 'blk.0.ffn_up.weight'";
    assert_refused(
        &with_info(&[256], 23, 0),
        &format!("{name} has type 23 (IQ4_XS), {supported}"),
    );
    assert_refused(
        &with_info(&[256], 4711, 0),
        &format!("{name} has type 4711, {supported}"),
    );
}

/// A truncated file was accepted, and the program exited with 0 (1bit-MONSTER #1606).
#[test]
fn truncated_data() {
    let file = sample().file();
    let full = file.len();
    assert!(Gguf::parse(&file, full as u64).is_ok());
    for missing in [1, 100, full - sample().header().len()] {
        let message = format!(
            "the file is truncated: tensor 'experts.weight' ends at byte {full}, but the file has \
             {} bytes ({missing} are missing); download it again",
            full - missing
        );
        assert_eq!(refusal(&file[..full - missing]), message);
    }
    // The tensor that ends last counts, not the one that stands last.
    let file = Build::new()
        .info("far", &[8], 0, 1 << 20)
        .info("near", &[8], 0, 0)
        .file();
    assert!(refusal(&file).contains("tensor 'far' ends at byte 1048704"));
}

/// Cut anywhere, the file is refused and never said to need more than there is.
#[test]
fn cut_anywhere() {
    let file = sample().file();
    for len in (0..file.len()).step_by(STEP) {
        refusal(&file[..len]);
    }
}

/// An HTML page or half a download was named .gguf (jan #5266).
#[test]
fn other_files() {
    let html = "not a GGUF file: an HTML page was downloaded instead of the model; use the direct \
                download link";
    let safetensors = [
        &1234u64.to_le_bytes()[..],
        br#"{"__metadata__":{"format":"pt"}"#,
    ]
    .concat();
    let other: [(&[u8], &str); 17] = [
        (b"", "the file is empty; download it again"),
        (b"<!DOCTYPE html><html lang=\"en\">", html),
        (b"\n\n  <html>\n<head><title>404</title>", html),
        (
            b"<?xml version=\"1.0\"?><Error><Code>NoSuchKey</Code>",
            html,
        ),
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
            "not a GGUF file: it is a Git LFS pointer; run `git lfs pull` to get the model",
        ),
        (
            b"{\"error\":\"Repository not found\"}",
            "not a GGUF file: it is JSON, perhaps a server's error message; read it and download \
             the model again",
        ),
        (
            b"Invalid username or password.",
            "not a GGUF file: it is text, perhaps a server's error message; read it and download \
             the model again",
        ),
        (
            &safetensors,
            "not a GGUF file: it is a safetensors file; convert it to GGUF (convert_hf_to_gguf.py)",
        ),
        (
            b"PK\x03\x04\x00\x00archive/data.pkl",
            "not a GGUF file: it is a ZIP archive or a PyTorch checkpoint; unpack or convert it \
             to GGUF",
        ),
        (
            b"\x1f\x8b\x08\x00",
            "not a GGUF file: it is compressed; unpack it first",
        ),
        (
            b"\x28\xb5\x2f\xfd\x04",
            "not a GGUF file: it is compressed; unpack it first",
        ),
        (
            b"tjgg\x03\x00\x00\x00",
            "not a GGUF file: it is a GGML file from before GGUF; get or convert the model as \
             GGUF version 2 or 3",
        ),
        (
            &[0; 4096],
            "not a GGUF file: it begins with zeros, as an unfinished download does; download it \
             again",
        ),
        (
            b"\x7fELF\x02\x01\x01",
            "not a GGUF file: it doesn't begin with the letters GGUF; download it again",
        ),
        (
            b"GG",
            "the header is cut short or damaged: the file's start needs 4 bytes at byte 0, the \
             file has 2 more; download it again",
        ),
        (
            b"GGUF\x03\x00\x00\x00\x01",
            "the header is cut short or damaged: the file's start needs 8 bytes at byte 8, the \
             file has 1 more; download it again",
        ),
        (
            b"GGUF\x00\x00\x00\x00",
            "GGUF version 0 is older than what this program reads (2 and 3); convert the original \
             model again",
        ),
    ];
    for (file, message) in other {
        assert_eq!(refusal(file), message);
    }
}

/// Found by fuzzing: three bytes of text, none of them mapped yet, were a header cut short.
#[test]
fn nothing_mapped_is_nothing_known() {
    let error = Gguf::parse(b"", 3).unwrap_err();
    assert_eq!(error, GgufError::NeedMore { bytes: 3 });
    assert!(refusal(b"Q5.").starts_with("not a GGUF file: it is text"));
}

#[test]
fn versions() {
    let endian = "a big-endian GGUF file; convert it to little endian (gguf_convert_endian.py)";
    assert_refused(
        &Build {
            version: 3u32.swap_bytes(),
            ..Build::new()
        },
        endian,
    );
    assert_refused(
        &Build {
            magic: *b"FUGG",
            ..Build::new()
        },
        endian,
    );
    assert_refused(
        &Build {
            version: 1,
            ..Build::new()
        },
        "GGUF version 1 is older than what this program reads (2 and 3); convert the original \
         model again",
    );
    assert_refused(
        &Build {
            version: 4,
            ..Build::new()
        },
        "GGUF version 4 is newer than what this program reads (2 and 3), or the file is damaged",
    );
}

#[test]
fn values() {
    assert_refused(
        &Build::new().raw("odd", 13, &[0; 8]),
        "the value of key 'odd' has type 13, which GGUF doesn't have (0 to 12); download the file \
         again",
    );
    assert_refused(
        &Build::new().raw("odd", 9, &array(u32::MAX, &[])),
        "the value of key 'odd' has type 4294967295, which GGUF doesn't have (0 to 12); download \
         the file again",
    );
    let bool = "the value of key 'odd' is a bool of 2, neither 0 nor 1; download the file again";
    assert_refused(&Build::new().raw("odd", 7, &[2]), bool);
    assert_refused(
        &Build::new().raw("odd", 9, &array(7, &[vec![1], vec![0], vec![2]])),
        bool,
    );
    // A key is shown without what could steer a terminal.
    assert_refused(
        &Build::new().raw("\x1b[2J", 7, &[2]),
        "the value of key '\u{fffd}[2J' is a bool of 2, neither 0 nor 1; download the file again",
    );
}

/// Nested arrays: two levels are read, a third is refused, and depth can't exhaust the stack.
#[test]
fn nesting() {
    let message = "the value of key 'deep' nests arrays deeper than any model needs";
    let mut value = array(4, &[7u32.to_le_bytes().to_vec()]);
    value = array(9, &[value]);
    let file = Build::new().raw("deep", 9, &value).file();
    assert!(Gguf::parse(&file, file.len() as u64).is_ok());
    for _ in 0..10_000 {
        value = [&9u32.to_le_bytes()[..], &1u64.to_le_bytes(), &value].concat();
        if value.len() < 200 || value.len() > 119_000 {
            assert_refused(&Build::new().raw("deep", 9, &value), message);
        }
    }
}

#[test]
fn names_that_are_not_text() {
    assert_refused(
        &Build::new().raw(b"ok\xffkey", 0, &[0]),
        "the header is damaged: the name of metadata key 0 isn't UTF-8 at byte 34; download the \
         file again",
    );
    assert_refused(
        &Build::new().info(b"\xc3", &[1], 0, 0),
        "the header is damaged: the name of tensor 0 isn't UTF-8 at byte 32; download the file \
         again",
    );
}

#[test]
fn rows_and_offsets() {
    assert_refused(
        &with_info(&[48, 2], 8, 0),
        "tensor 'blk.0.ffn_up.weight' has rows of 48 values, not a multiple of Q8_0's block of \
         32; the file is damaged",
    );
    assert_refused(
        &with_info(&[48, 2], 0, 16),
        "tensor 'blk.0.ffn_up.weight' begins at data offset 16, not a multiple of the alignment \
         32; the file is damaged",
    );
}

/// Loading from shard 2 failed as an "illegal split file" (wllama #135), and `split.no` was taken
/// to count from 1 as names do (FreeToken PR #154). Names are tested in split.rs.
#[test]
fn shards() {
    let shard = |no: u16, count: u16, names: &[&str]| {
        let mut build = Build::new().u16("split.no", no).u16("split.count", count);
        build = build.raw("split.tensors.count", 5, &3i32.to_le_bytes());
        for name in names {
            build = build.tensor(name, &[1], 0, 4);
        }
        build
    };
    let refusal = |files: &[Vec<u8>]| {
        let files: Vec<_> = files
            .iter()
            .map(|file| Gguf::parse(file, file.len() as u64).unwrap())
            .collect();
        check_shards(&files).unwrap_err().to_string()
    };
    let (first, second) = (shard(0, 2, &["a", "b"]).file(), shard(1, 2, &["c"]).file());
    let way_out = "give the shards of one model, under their own names";
    assert_eq!(
        refusal(&[second.clone(), first.clone()]),
        format!("shard 1 of 2 says that it is 2 of 2; {way_out}")
    );
    assert_eq!(
        refusal(std::slice::from_ref(&first)),
        format!("shard 1 of 1 says that it is 1 of 2; {way_out}")
    );
    assert_eq!(
        refusal(&[first.clone(), sample().file()]),
        format!("shard 2 of 2 says that it is 1 of 1; {way_out}")
    );
    assert_eq!(
        refusal(&[first, shard(1, 2, &[]).file()]),
        "the shards hold 2 tensors, 3 were split; download all shards of one model again"
    );
    assert_refused(
        &shard(2, 2, &[]),
        "the value of key 'split.no' must be a number below split.count; convert the model again",
    );
    assert_refused(
        &Build::new().u16("split.count", 2),
        "the value of key 'split.no' must be a number below split.count; convert the model again",
    );
    assert_refused(
        &Build::new().raw("split.count", 8, &string("2")),
        "the value of key 'split.count' must be a number of files; convert the model again",
    );
}

/// Any one byte changed: refused or read, but never a panic, and what is read stays in the file.
#[test]
fn any_byte_wrong() {
    let sound = sample().file();
    let header = sample().header().len();
    for at in (0..header).step_by(STEP) {
        for change in [1, 0x80, 0xff] {
            let mut file = sound.clone();
            file[at] ^= change;
            let Ok(gguf) = Gguf::parse(&file, file.len() as u64) else {
                continue;
            };
            for (key, value) in gguf.metadata() {
                assert_eq!(gguf.get(key).unwrap().ty(), value.ty());
                if let Some(array) = value.as_array() {
                    assert_eq!(array.values().count(), array.len());
                }
            }
            assert_eq!(gguf.tensors().count() as u64, gguf.tensor_count());
            for tensor in gguf.tensors() {
                assert!(tensor.offset + tensor.bytes <= file.len() as u64);
            }
        }
    }
}
