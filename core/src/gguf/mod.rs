//! The GGUF header over a byte slice: metadata, tensors, shards. Nothing is copied or allocated.
//!
//! [`Gguf::parse`] walks the whole header once and checks every count, length, type, offset and
//! size against the bytes that are there; what the accessors return afterwards can be relied upon.
//! Versions 2 and 3, little endian.
//!
//! Decisions where GGUF's description leaves room:
//! - A key twice is an error. (Only the first 128 keys are compared with the others, far more than
//!   any known model has; past them the first one counts.)
//! - A tensor name twice is an error, in one file or across shards: see [`TensorIndex`].
//! - Tensors may overlap or leave gaps; they must be aligned and inside the file.
//! - Empty tensors are errors, and so are types that [`crate::quant`] can't decode, but for I8 and
//!   I32 (see [`Element`]).

mod cursor;
mod element;
mod error;
mod index;
mod split;
mod tensor;
mod value;

pub use element::Element;
pub use error::{GgufError, Label, Looks, Place};
pub use index::TensorIndex;
pub use split::{FILE_NAME_MAX, ShardName, Split, check_shards};
pub use tensor::Tensor;
pub use value::{ARRAY_DEPTH_MAX, Array, Strings, Value, ValueType, Values};

use cursor::{At, Cursor};

/// Keys whose place is remembered. Further ones are found by walking.
const KEYS_INDEXED_MAX: usize = 128;

/// Bytes before the first key: magic, version, two counts.
const PREAMBLE_BYTES: usize = 4 + 4 + 8 + 8;

/// The least a key and its value can take: an empty key, a type, one byte.
const PAIR_BYTES_MIN: u64 = 8 + 4 + 1;

const ALIGNMENT_DEFAULT: u64 = 32;

/// The checked header of one file.
#[derive(Clone, Debug)]
pub struct Gguf<'a> {
    /// The mapped start of the file, no longer than the file.
    bytes: &'a [u8],
    file_len: u64,
    version: u32,
    alignment: u64,
    data_offset: u64,
    pair_count: u64,
    /// The first pairs, in the file's order.
    pairs: heapless::Vec<Pair, KEYS_INDEXED_MAX>,
    /// Where the first pair begins that isn't in `pairs`.
    pairs_rest: usize,
    tensor_count: u64,
    /// Where the first tensor info begins.
    tensors_start: usize,
    split: Option<Split>,
}

/// Where a key begins.
#[derive(Clone, Copy, Debug)]
struct Pair {
    hash: u32,
    position: usize,
}

impl<'a> Gguf<'a> {
    /// Parses the header of a file of `file_len` bytes of which `prefix` are the first; what
    /// exceeds `file_len` is ignored.
    ///
    /// # Errors
    /// [`GgufError::NeedMore`] when the prefix ends before the header does: map more and try again.
    /// Any other error is final, and says what is wrong with the file.
    pub fn parse(prefix: &'a [u8], file_len: u64) -> Result<Self, GgufError> {
        let mapped = usize::try_from(file_len)
            .unwrap_or(usize::MAX)
            .min(prefix.len());
        let bytes = &prefix[..mapped];
        let mut cursor = Cursor::new(bytes, 0, file_len);
        let version = read_magic(&mut cursor)?;
        let tensor_count = cursor.count(tensor::INFO_BYTES_MIN)?;
        let pair_count = cursor.count(PAIR_BYTES_MIN)?;

        let mut gguf = Self {
            bytes,
            file_len,
            version,
            alignment: ALIGNMENT_DEFAULT,
            data_offset: 0,
            pair_count: 0,
            pairs: heapless::Vec::new(),
            pairs_rest: 0,
            tensor_count,
            tensors_start: 0,
            split: None,
        };
        gguf.read_pairs(&mut cursor, pair_count)?;
        gguf.alignment = gguf.read_alignment()?;
        gguf.split = Split::read(&gguf)?;
        gguf.read_tensors(&mut cursor)?;
        Ok(gguf)
    }

    /// 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// Tensors begin at multiples of this from [`Self::data_offset`]: a power of two.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Where the tensors' data begins in the file. May pass the file's end if there are no tensors.
    pub fn data_offset(&self) -> u64 {
        self.data_offset
    }

    /// The file's length, as it was given.
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    /// Tensors in this file.
    pub fn tensor_count(&self) -> u64 {
        self.tensor_count
    }

    /// Metadata keys in this file.
    pub fn key_count(&self) -> u64 {
        self.pair_count
    }

    /// Which shard this file is; `None` when it is the whole model.
    pub fn split(&self) -> Option<Split> {
        self.split
    }

    /// The value of `key`. Doesn't walk over other values.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        if let Some(value) = self.get_indexed(key) {
            return Some(value);
        }
        let indexed = self.pairs.len() as u64;
        let mut rest = Metadata {
            gguf: self,
            next: indexed,
            cursor: self.at(self.pairs_rest),
        };
        rest.find(|(found, _)| *found == key)
            .map(|(_, value)| value)
    }

    /// Where in the file the value of `key` begins, behind its type.
    pub fn value_offset(&self, key: &str) -> Option<u64> {
        let mut cursor = self.at(PREAMBLE_BYTES);
        for index in 0..self.pair_count {
            let position = cursor.pos();
            let (found, value) = read_pair(&mut cursor, index).ok()?;
            if found == key {
                let key_bytes = size_of::<u64>() + found.len();
                return Some((position + key_bytes + size_of::<u32>()) as u64);
            }
            if let Value::Array(array) = value {
                array.pass(&mut cursor).ok()?;
            }
        }
        None
    }

    /// All keys and values, in the file's order.
    pub fn metadata(&self) -> impl Iterator<Item = (&'a str, Value<'a>)> {
        Metadata {
            gguf: self,
            next: 0,
            cursor: self.at(self.pairs_rest),
        }
    }

    /// All tensors, in the file's order.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'a>> {
        let mut cursor = self.at(self.tensors_start);
        (0..self.tensor_count).map_while(move |index| self.next_tensor(&mut cursor, index))
    }

    /// The tensor called `name`, by a walk over the infos. [`TensorIndex`] is quicker for many, and
    /// knows all shards.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'a>> {
        self.tensors().find(|tensor| tensor.name == name)
    }

    /// Where each tensor info begins.
    fn tensor_positions(&self) -> impl Iterator<Item = u64> {
        let mut cursor = self.at(self.tensors_start);
        (0..self.tensor_count).map_while(move |index| {
            let position = cursor.pos();
            self.next_tensor(&mut cursor, index)
                .map(|_| position as u64)
        })
    }

    fn tensor_at(&self, position: usize) -> Option<Tensor<'a>> {
        self.next_tensor(&mut self.at(position), 0)
    }

    /// The name at a position that [`Self::tensor_positions`] gave.
    fn name_at(&self, position: usize) -> &'a str {
        self.at(position).name().unwrap_or_default()
    }

    fn next_tensor(&self, cursor: &mut Cursor<'a>, index: u64) -> Option<Tensor<'a>> {
        let mut tensor = tensor::read(cursor, index, self.alignment).ok()?;
        tensor.offset += self.data_offset;
        Some(tensor)
    }

    fn at(&self, position: usize) -> Cursor<'a> {
        Cursor::new(self.bytes, position, self.file_len)
    }

    fn get_indexed(&self, key: &str) -> Option<Value<'a>> {
        let hash = hash(key);
        self.pairs
            .iter()
            .filter(|pair| pair.hash == hash)
            .find_map(|pair| {
                let (found, value) = read_pair(&mut self.at(pair.position), 0).ok()?;
                (found == key).then_some(value)
            })
    }

    /// Walks the metadata. `pair_count` grows along, so that lookups work on what has been read.
    fn read_pairs(&mut self, cursor: &mut Cursor<'a>, count: u64) -> Result<(), GgufError> {
        self.pairs_rest = cursor.pos();
        for index in 0..count {
            let position = cursor.pos();
            let (key, value) = read_pair(cursor, index)?;
            if let Value::Array(array) = value {
                array.pass(cursor)?;
            }
            if self.get_indexed(key).is_some() {
                return Err(GgufError::DuplicateKey {
                    key: Label::new(key),
                });
            }
            if self
                .pairs
                .push(Pair {
                    hash: hash(key),
                    position,
                })
                .is_ok()
            {
                self.pairs_rest = cursor.pos();
            }
            self.pair_count += 1;
        }
        Ok(())
    }

    fn read_alignment(&self) -> Result<u64, GgufError> {
        const KEY: &str = "general.alignment";
        match self.get(KEY) {
            None => Ok(ALIGNMENT_DEFAULT),
            Some(Value::U32(value)) if value.is_power_of_two() => Ok(value.into()),
            Some(Value::U32(value)) => Err(GgufError::Alignment {
                value: value.into(),
            }),
            Some(_) => Err(GgufError::KeyRange {
                key: Label::new(KEY),
                expected: "a uint32",
            }),
        }
    }

    /// Walks the tensor infos, and checks that the data they point at is in the file.
    fn read_tensors(&mut self, cursor: &mut Cursor<'a>) -> Result<(), GgufError> {
        self.tensors_start = cursor.pos();
        // The tensor that ends last, and where, from the start of the data.
        let mut last: Option<(Tensor<'a>, u64)> = None;
        for index in 0..self.tensor_count {
            let tensor = tensor::read(cursor, index, self.alignment)?;
            let end = tensor
                .offset
                .checked_add(tensor.bytes)
                .ok_or_else(|| past_end(&tensor))?;
            if last.is_none_or(|(_, last_end)| end > last_end) {
                last = Some((tensor, end));
            }
        }
        // A position in a slice is below 2^63, and so is an alignment: this can't overflow.
        self.data_offset = (cursor.pos() as u64).next_multiple_of(self.alignment);
        if let Some((tensor, end)) = last {
            let needed = self
                .data_offset
                .checked_add(end)
                .ok_or_else(|| past_end(&tensor))?;
            if needed > self.file_len {
                return Err(GgufError::Truncated {
                    tensor: Label::new(tensor.name),
                    needed,
                    file_len: self.file_len,
                });
            }
        }
        Ok(())
    }
}

/// Walks the metadata: by the index first, then by what follows.
struct Metadata<'g, 'a> {
    gguf: &'g Gguf<'a>,
    next: u64,
    /// Stands at the first pair past the index, or at a later one.
    cursor: Cursor<'a>,
}

impl<'a> Iterator for Metadata<'_, 'a> {
    type Item = (&'a str, Value<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.gguf.pair_count {
            return None;
        }
        let index = self.next;
        self.next += 1;
        if let Some(pair) = self.gguf.pairs.get(index as usize) {
            return read_pair(&mut self.gguf.at(pair.position), index).ok();
        }
        let (key, value) = read_pair(&mut self.cursor, index).ok()?;
        if let Value::Array(array) = value {
            array.pass(&mut self.cursor).ok()?;
        }
        Some((key, value))
    }
}

/// Reads a key and its value; of an array only the head.
fn read_pair<'a>(cursor: &mut Cursor<'a>, index: u64) -> Result<(&'a str, Value<'a>), GgufError> {
    cursor.at = At::Key(index);
    let key = cursor.name()?;
    cursor.at = At::Value(key);
    Ok((key, value::read_any(cursor)?))
}

/// Reads magic and version, and tells what else the file may be.
fn read_magic(cursor: &mut Cursor<'_>) -> Result<u32, GgufError> {
    const MAGIC: &[u8] = b"GGUF";
    let start = cursor.rest();
    if cursor.left() == 0 {
        return Err(GgufError::Empty);
    }
    // Judge by as much of the magic as the file has: more than may be mapped.
    let known = cursor.left().min(MAGIC.len() as u64) as usize;
    cursor.clone().take(known as u64)?;
    if start[..known] == *b"FUGG" {
        return Err(GgufError::BigEndian);
    }
    if start[..known] != MAGIC[..known] {
        return Err(GgufError::NotGguf {
            looks: Looks::at(start),
        });
    }
    cursor.take(MAGIC.len() as u64)?;
    match cursor.u32()? {
        version @ (2 | 3) => Ok(version),
        version if (1..=3).contains(&version.swap_bytes()) => Err(GgufError::BigEndian),
        version => Err(GgufError::Version { version }),
    }
}

fn past_end(tensor: &Tensor<'_>) -> GgufError {
    GgufError::Offset {
        tensor: Label::new(tensor.name),
        offset: tensor.offset,
    }
}

/// FNV-1a. Collisions cost a comparison, nothing else.
fn hash(key: &str) -> u32 {
    key.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}
