//! Models split over several files: which shard a file is, and what the others are called.
//!
//! `split.no` in the metadata counts from 0, the number in a file's name from 1. Everything here
//! counts from 0; [`ShardName`] does the adding.

use super::error::{GgufError, Label};
use super::{Gguf, Value};

/// What the metadata of a shard says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Split {
    /// Which shard this is, counted from 0.
    pub no: u32,
    /// Shards of the model, at least 2.
    pub count: u32,
    /// Tensors in all shards together; `None` when the file doesn't say.
    pub tensors: Option<u64>,
}

impl Split {
    /// From the metadata; `None` for a model of one file.
    pub(super) fn read(gguf: &Gguf<'_>) -> Result<Option<Self>, GgufError> {
        let number = |key: &str, expected| match gguf.get(key).as_ref().map(Value::as_u32) {
            None => Ok(None),
            Some(Some(number)) => Ok(Some(number)),
            Some(None) => Err(GgufError::KeyRange {
                key: Label::new(key),
                expected,
            }),
        };
        let count = number("split.count", "a number of files")?.unwrap_or(1);
        if count <= 1 {
            return Ok(None);
        }
        let expected = "a number below split.count";
        match number("split.no", expected)? {
            Some(no) if no < count => Ok(Some(Self {
                no,
                count,
                tensors: number("split.tensors.count", "a number of tensors")?.map(u64::from),
            })),
            _ => Err(GgufError::KeyRange {
                key: Label::new("split.no"),
                expected,
            }),
        }
    }
}

/// Checks that `files` are the shards of one model, in order and complete. One file that was never
/// split is such a set.
///
/// # Errors
/// [`GgufError::Shard`] for a file in the wrong place, [`GgufError::ShardTensors`] when tensors are
/// missing or left over.
///
/// # Panics
/// Without any file.
pub fn check_shards(files: &[Gguf<'_>]) -> Result<(), GgufError> {
    assert!(!files.is_empty(), "a model has at least one file");
    for (expected, file) in (0u32..).zip(files) {
        let (no, count) = file.split().map_or((0, 1), |split| (split.no, split.count));
        if no != expected || count as usize != files.len() {
            let files = files.len() as u32;
            return Err(GgufError::Shard {
                expected,
                files,
                no,
                count,
            });
        }
    }
    let found = files.iter().map(Gguf::tensor_count).sum();
    match files[0].split().and_then(|split| split.tensors) {
        Some(expected) if expected != found => Err(GgufError::ShardTensors { expected, found }),
        _ => Ok(()),
    }
}

/// A file name of the form `STEM-00002-of-00005.gguf`, which names any other shard as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardName<'a> {
    /// What stands before the numbers.
    pub stem: &'a [u8],
    /// Which shard, counted from 0; the name says one more.
    pub no: u32,
    /// Shards of the model.
    pub count: u32,
}

/// The longest file name on Linux.
pub const FILE_NAME_MAX: usize = 255;

impl<'a> ShardName<'a> {
    const SUFFIX: &'static [u8] = b".gguf";

    /// Takes a name (without directories) apart; `None` when it isn't a shard's.
    pub fn parse(name: &'a [u8]) -> Option<Self> {
        if name.len() > FILE_NAME_MAX {
            return None;
        }
        let name = name.strip_suffix(Self::SUFFIX)?;
        let (name, count) = split_number(name)?;
        let (name, number) = split_number(name.strip_suffix(b"-of-")?)?;
        let stem = name.strip_suffix(b"-")?;
        let no = number.checked_sub(1)?;
        (no < count).then_some(Self { stem, no, count })
    }

    /// The name of shard `no`, counted from 0.
    ///
    /// # Panics
    /// When there is no such shard.
    pub fn shard(&self, no: u32) -> heapless::Vec<u8, FILE_NAME_MAX> {
        assert!(no < self.count, "shard {no} of {}", self.count);
        let mut name = heapless::Vec::new();
        // As long as the name that was parsed, which was checked.
        let parts = [
            self.stem,
            b"-",
            &digits(no + 1),
            b"-of-",
            &digits(self.count),
            Self::SUFFIX,
        ];
        for part in parts {
            name.extend_from_slice(part)
                .expect("no longer than the name that was parsed");
        }
        name
    }
}

/// Splits five digits off the end.
fn split_number(name: &[u8]) -> Option<(&[u8], u32)> {
    let (rest, digits) = name.split_last_chunk::<5>()?;
    let number = digits.iter().try_fold(0, |number, digit| {
        digit
            .is_ascii_digit()
            .then(|| number * 10 + u32::from(digit - b'0'))
    })?;
    Some((rest, number))
}

/// `number` (below 100,000) as five digits.
fn digits(mut number: u32) -> [u8; 5] {
    let mut digits = [b'0'; 5];
    for digit in digits.iter_mut().rev() {
        *digit += (number % 10) as u8;
        number /= 10;
    }
    digits
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_shard_names_the_others() {
        let name = ShardName::parse(b"big-model-Q4_K_M-00002-of-00005.gguf").unwrap();
        assert_eq!(
            name,
            ShardName {
                stem: b"big-model-Q4_K_M",
                no: 1,
                count: 5
            }
        );
        assert_eq!(name.shard(0), b"big-model-Q4_K_M-00001-of-00005.gguf");
        assert_eq!(name.shard(4), b"big-model-Q4_K_M-00005-of-00005.gguf");
        for no in 0..5 {
            assert_eq!(ShardName::parse(&name.shard(no)).unwrap().no, no);
        }
    }

    #[test]
    fn names_are_bytes() {
        let name = ShardName::parse(b"\xff\xfe-00001-of-00002.gguf").unwrap();
        assert_eq!(name.shard(1), b"\xff\xfe-00002-of-00002.gguf");
        assert!(ShardName::parse(b"-00001-of-99999.gguf").is_some());
        let mut longest = [b'x'; 256];
        longest[256 - 20..].copy_from_slice(b"-00001-of-00002.gguf");
        assert!(ShardName::parse(&longest).is_none());
        assert_eq!(ShardName::parse(&longest[1..]).unwrap().shard(1).len(), 255);
    }

    #[test]
    fn other_names_are_not_shards() {
        let others: [&[u8]; 11] = [
            b"",
            b".gguf",
            b"model.gguf",
            b"model-00000-of-00005.gguf",
            b"model-00006-of-00005.gguf",
            b"model-1-of-5.gguf",
            b"model-00001-of-00005.bin",
            b"model-00001-of-00005.gguf.part",
            b"model-000x1-of-00005.gguf",
            b"model00001-of-00005.gguf",
            b"model-00001_of_00005.gguf",
        ];
        for name in others {
            assert_eq!(ShardName::parse(name), None, "{}", name.escape_ascii());
        }
    }
}
