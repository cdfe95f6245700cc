//! What can be wrong with a model file, each with its values and the way out.

use core::fmt;

use crate::quant::QuantType;

/// Why a file can't be used. Messages are one line, without a file name: the caller knows it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GgufError {
    /// The header goes on after the mapped prefix: map at least `bytes` and parse again. Never
    /// returned when the prefix is the whole file; `bytes` always exceeds the prefix.
    NeedMore {
        /// How much to map, at most the file's length.
        bytes: u64,
    },
    /// No bytes at all.
    Empty,
    /// The magic isn't GGUF's.
    NotGguf {
        /// What it seems to be instead.
        looks: Looks,
    },
    /// Written for a big-endian machine.
    BigEndian,
    /// Neither version 2 nor 3.
    Version {
        /// What the file says.
        version: u32,
    },
    /// The file ends inside its header, or a length there is damaged.
    HeaderCut {
        /// What was being read.
        place: Place,
        /// Where in the file.
        offset: u64,
        /// Bytes it takes from there.
        needed: u64,
        /// Bytes that the file has from there.
        left: u64,
    },
    /// A count that the rest of the file has no room for.
    Count {
        /// What was being read.
        place: Place,
        /// What the file says.
        count: u64,
        /// Bytes left after it.
        left: u64,
    },
    /// A key or tensor name that isn't text.
    NotUtf8 {
        /// What was being read.
        place: Place,
        /// The first wrong byte's offset in the file.
        offset: u64,
    },
    /// A metadata type that GGUF doesn't have.
    ValueType {
        /// Of which key.
        key: Label,
        /// What the file says.
        id: u32,
    },
    /// A bool that is neither 0 nor 1.
    Bool {
        /// Of which key.
        key: Label,
        /// What the file says.
        value: u8,
    },
    /// Arrays in arrays, deeper than [`super::ARRAY_DEPTH_MAX`].
    Nesting {
        /// Of which key.
        key: Label,
    },
    /// One key twice.
    DuplicateKey {
        /// Which.
        key: Label,
    },
    /// `general.alignment` isn't a power of two.
    Alignment {
        /// What the file says.
        value: u64,
    },
    /// A key whose value has a type or a range that can't be right.
    KeyRange {
        /// Which key.
        key: Label,
        /// What it must be.
        expected: &'static str,
    },
    /// A tensor of no or more than four dimensions.
    DimCount {
        /// Which tensor.
        tensor: Label,
        /// What the file says.
        n_dims: u32,
    },
    /// A dimension of 0, or dimensions whose size in bytes passes 2^63.
    Dims {
        /// Which tensor.
        tensor: Label,
        /// What the file says.
        dims: [u64; 4],
    },
    /// A type that this program can't decode.
    TensorType {
        /// Which tensor.
        tensor: Label,
        /// What the file says.
        id: u32,
    },
    /// A row that isn't a whole number of blocks.
    Row {
        /// Which tensor.
        tensor: Label,
        /// Its type.
        ty: super::Element,
        /// Values in a row.
        cols: u64,
    },
    /// An offset that isn't a multiple of the alignment.
    Misaligned {
        /// Which tensor.
        tensor: Label,
        /// Offset from the start of the data.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// Data past what a file can hold: offset and size pass 2^64.
    Offset {
        /// Which tensor.
        tensor: Label,
        /// Offset from the start of the data.
        offset: u64,
    },
    /// The file ends before its last tensor does.
    Truncated {
        /// The tensor that ends last.
        tensor: Label,
        /// Where it ends: the least length of the file.
        needed: u64,
        /// The length that it has.
        file_len: u64,
    },
    /// One tensor name twice, in one file or in two shards of a model.
    DuplicateTensor {
        /// Which.
        tensor: Label,
    },
    /// A file that isn't the shard it should be.
    Shard {
        /// Its place among the files, counted from 0.
        expected: u32,
        /// Files that were given.
        files: u32,
        /// What the file's `split.no` and `split.count` say; 0 of 1 without them.
        no: u32,
        /// See `no`.
        count: u32,
    },
    /// The shards together hold another number of tensors than they say.
    ShardTensors {
        /// `split.tensors.count`.
        expected: u64,
        /// Found in all shards.
        found: u64,
    },
}

impl core::error::Error for GgufError {}

impl fmt::Display for GgufError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeedMore { bytes } => {
                write!(
                    f,
                    "the header goes on: map the first {bytes} bytes and parse again"
                )
            }
            Self::Empty => f.write_str("the file is empty; download it again"),
            Self::NotGguf { looks } => write!(f, "not a GGUF file: {looks}"),
            Self::BigEndian => f.write_str(
                "a big-endian GGUF file; convert it to little endian (gguf_convert_endian.py)",
            ),
            Self::Version {
                version: version @ 0..2,
            } => write!(
                f,
                "GGUF version {version} is older than what this program reads (2 and 3); convert \
                 the original model again"
            ),
            Self::Version { version } => write!(
                f,
                "GGUF version {version} is newer than what this program reads (2 and 3), or the \
                 file is damaged"
            ),
            Self::HeaderCut {
                place,
                offset,
                needed,
                left,
            } => write!(
                f,
                "the header is cut short or damaged: {place} needs {needed} bytes at byte \
                 {offset}, the file has {left} more; download it again"
            ),
            Self::Count { place, count, left } => write!(
                f,
                "the header is damaged: {place} counts {count} items, more than the {left} bytes \
                 after it can hold; download the file again"
            ),
            Self::NotUtf8 { place, offset } => write!(
                f,
                "the header is damaged: the name of {place} isn't UTF-8 at byte {offset}; \
                 download the file again"
            ),
            Self::ValueType { key, id } => write!(
                f,
                "the value of key '{key}' has type {id}, which GGUF doesn't have (0 to 12); \
                 download the file again"
            ),
            Self::Bool { key, value } => write!(
                f,
                "the value of key '{key}' is a bool of {value}, neither 0 nor 1; download the \
                 file again"
            ),
            Self::Nesting { key } => {
                write!(
                    f,
                    "the value of key '{key}' nests arrays deeper than any model needs"
                )
            }
            Self::DuplicateKey { key } => write!(
                f,
                "key '{key}' stands twice in the metadata; which one counts is anyone's guess, so \
                 convert the model again"
            ),
            Self::Alignment { value } => {
                write!(
                    f,
                    "general.alignment is {value}, not a power of two; convert it again"
                )
            }
            Self::KeyRange { key, expected } => {
                write!(
                    f,
                    "the value of key '{key}' must be {expected}; convert the model again"
                )
            }
            Self::DimCount { tensor, n_dims } => {
                write!(
                    f,
                    "tensor '{tensor}' has {n_dims} dimensions; 1 to 4 are possible"
                )
            }
            Self::Dims {
                tensor,
                dims: [a, b, c, d],
            } => write!(
                f,
                "tensor '{tensor}' of {a} x {b} x {c} x {d} is empty or larger than any file; the \
                 file is damaged"
            ),
            Self::TensorType { tensor, id } => {
                write!(f, "tensor '{tensor}' has type {id}")?;
                if let Some(name) = unsupported_name(*id) {
                    write!(f, " ({name})")?;
                }
                f.write_str(", which isn't supported; use a file quantized to one of")?;
                for (i, ty) in QuantType::ALL.iter().enumerate() {
                    f.write_str(if i == 0 { " " } else { ", " })?;
                    f.write_str(ty.name())?;
                }
                Ok(())
            }
            Self::Row { tensor, ty, cols } => write!(
                f,
                "tensor '{tensor}' has rows of {cols} values, not a multiple of {ty}'s block of \
                 {}; the file is damaged",
                ty.block_len()
            ),
            Self::Misaligned {
                tensor,
                offset,
                alignment,
            } => write!(
                f,
                "tensor '{tensor}' begins at data offset {offset}, not a multiple of the \
                 alignment {alignment}; the file is damaged"
            ),
            Self::Offset { tensor, offset } => write!(
                f,
                "tensor '{tensor}' begins at data offset {offset}, past what a file can hold; the \
                 file is damaged"
            ),
            Self::Truncated {
                tensor,
                needed,
                file_len,
            } => write!(
                f,
                "the file is truncated: tensor '{tensor}' ends at byte {needed}, but the file has \
                 {file_len} bytes ({} are missing); download it again",
                needed.saturating_sub(*file_len)
            ),
            Self::DuplicateTensor { tensor } => write!(
                f,
                "tensor '{tensor}' stands twice in the model; convert the model again, or remove \
                 the shard that doesn't belong to it"
            ),
            Self::Shard {
                expected,
                files,
                no,
                count,
            } => write!(
                f,
                "shard {} of {files} says that it is {} of {count}; give the shards of one model, \
                 under their own names",
                u64::from(*expected) + 1,
                u64::from(*no) + 1
            ),
            Self::ShardTensors { expected, found } => write!(
                f,
                "the shards hold {found} tensors, {expected} were split; download all shards of \
                 one model again"
            ),
        }
    }
}

/// ggml's types that exist but can't be decoded here.
fn unsupported_name(id: u32) -> Option<&'static str> {
    Some(match id {
        4 => "Q4_2, removed from ggml",
        5 => "Q4_3, removed from ggml",
        9 => "Q8_1",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        25 => "I16",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        31..=33 => "a repacked Q4_0, removed from ggml",
        34 => "TQ1_0",
        35 => "TQ2_0",
        36..=38 => "a repacked IQ4_NL, removed from ggml",
        40 => "NVFP4",
        _ => return None,
    })
}

/// What a file that isn't GGUF seems to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Looks {
    /// An HTML page: a download link that led to a web page.
    Html,
    /// A JSON reply: usually a server's error.
    Json,
    /// Plain text: usually a server's error.
    Text,
    /// A Git LFS pointer in place of the file it points to.
    LfsPointer,
    /// safetensors.
    Safetensors,
    /// A ZIP archive; PyTorch's checkpoints are some.
    Zip,
    /// gzip, xz, zstd, bzip2 or 7z.
    Compressed,
    /// The GGML formats before GGUF.
    OldGgml,
    /// Zeros: space reserved for a download that never came.
    Zeros,
    /// None of these.
    Unknown,
}

impl Looks {
    /// What the start of a file seems to be, once it's known not to be GGUF.
    pub(super) fn at(start: &[u8]) -> Self {
        let head = &start[..start.len().min(256)];
        let text = head.trim_ascii_start();
        let begins = |word: &[u8]| {
            text.get(..word.len())
                .is_some_and(|start| start.eq_ignore_ascii_case(word))
        };
        let printable = |b: &u8| b.is_ascii_graphic() || b.is_ascii_whitespace();
        if begins(b"<!doctype") || begins(b"<html") || begins(b"<head") || begins(b"<?xml") {
            Self::Html
        } else if begins(b"version https://git-lfs") {
            Self::LfsPointer
        } else if begins(b"{") || begins(b"[") {
            Self::Json
        } else if head.get(8) == Some(&b'{') && head[5..8] == [0; 3] {
            // A length of 64 bits, then the header as JSON; less than 2^40 bytes of it.
            Self::Safetensors
        } else if head.starts_with(b"PK\x03\x04") {
            Self::Zip
        } else if [
            &b"\x1f\x8b"[..],
            b"\xfd7zXZ",
            b"\x28\xb5\x2f\xfd",
            b"BZh",
            b"7z\xbc\xaf",
        ]
        .iter()
        .any(|magic| head.starts_with(magic))
        {
            Self::Compressed
        } else if [b"lmgg", b"fmgg", b"tjgg", b"algg"]
            .iter()
            .any(|magic| head.starts_with(*magic))
        {
            Self::OldGgml
        } else if head.iter().all(|&b| b == 0) {
            Self::Zeros
        } else if head.iter().all(printable) {
            Self::Text
        } else {
            Self::Unknown
        }
    }
}

impl fmt::Display for Looks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Html => {
                "an HTML page was downloaded instead of the model; use the direct download link"
            }
            Self::Json => {
                "it is JSON, perhaps a server's error message; read it and download the model again"
            }
            Self::Text => {
                "it is text, perhaps a server's error message; read it and download the model again"
            }
            Self::LfsPointer => "it is a Git LFS pointer; run `git lfs pull` to get the model",
            Self::Safetensors => {
                "it is a safetensors file; convert it to GGUF (convert_hf_to_gguf.py)"
            }
            Self::Zip => {
                "it is a ZIP archive or a PyTorch checkpoint; unpack or convert it to GGUF"
            }
            Self::Compressed => "it is compressed; unpack it first",
            Self::OldGgml => {
                "it is a GGML file from before GGUF; get or convert the model as GGUF version 2 or 3"
            }
            Self::Zeros => "it begins with zeros, as an unfinished download does; download it again",
            Self::Unknown => "it doesn't begin with the letters GGUF; download it again",
        })
    }
}

/// Which part of the header an error is about.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Place {
    /// Magic, version and the two counts.
    Header,
    /// A metadata key that couldn't be read.
    Key {
        /// Counted from 0.
        index: u64,
    },
    /// The value of a key.
    Value {
        /// Which.
        key: Label,
    },
    /// A tensor whose name couldn't be read.
    TensorInfo {
        /// Counted from 0.
        index: u64,
    },
    /// A tensor.
    Tensor {
        /// Which.
        name: Label,
    },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("the file's start"),
            Self::Key { index } => write!(f, "metadata key {index}"),
            Self::Value { key } => write!(f, "the value of key '{key}'"),
            Self::TensorInfo { index } => write!(f, "tensor {index}"),
            Self::Tensor { name } => write!(f, "tensor '{name}'"),
        }
    }
}

/// A name from the file, fit for a message: shortened, and without control characters, which
/// could play tricks on a terminal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Label(heapless::String<{ Self::BYTES_MAX }, u8>);

impl Label {
    const BYTES_MAX: usize = 64;
    const CUT: &'static str = "...";

    pub(super) fn new(name: &str) -> Self {
        let mut shown = heapless::String::new();
        for c in name.chars() {
            let c = if c.is_control() {
                char::REPLACEMENT_CHARACTER
            } else {
                c
            };
            if shown.len() + c.len_utf8() + Self::CUT.len() > Self::BYTES_MAX {
                // The condition keeps room for it.
                let _ = shown.push_str(Self::CUT);
                break;
            }
            let _ = shown.push(c);
        }
        Self(shown)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Label {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_short_and_harmless() {
        let long = Label::new(core::str::from_utf8(&[b'x'; 200]).unwrap());
        assert_eq!(long.as_str().len(), Label::BYTES_MAX);
        assert!(long.as_str().ends_with("xxx..."));
        assert_eq!(
            Label::new("a\x1b[31mb\n").as_str(),
            "a\u{fffd}[31mb\u{fffd}"
        );
        assert_eq!(
            Label::new("blk.0.ffn_up.weight").as_str(),
            "blk.0.ffn_up.weight"
        );
    }

    #[test]
    fn errors_are_small() {
        // They travel in every Result of the parser.
        assert!(size_of::<GgufError>() <= 128);
    }
}
