//! Writes GGUF v3 files. The header is composed first, then tensor data streams through, so that a
//! model is never held in memory; the file grows aside, under `NAME.tmp`, and takes its name only
//! when it is complete and on flash. A crash or a full disk leaves the old file as it was.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::gguf::{Element, Gguf, Value, ValueType};

use crate::aside::{self, Aside};

/// Tensor data starts at multiples of this many bytes, unless [`Header::aligned`] says otherwise:
/// GGUF's default, so no key names it.
pub const ALIGNMENT: u64 = 32;

/// The largest alignment that is written.
pub const ALIGNMENT_MAX: u64 = 1 << 20;

/// Bytes gathered before the file is written to.
const BUFFER: usize = 1 << 20;

/// What stopped a file from being written.
#[derive(Debug)]
pub struct WriteError {
    /// The file that was to be made.
    pub path: PathBuf,
    /// What was being done, as in "can't {doing} PATH".
    pub doing: &'static str,
    /// What the operating system said.
    pub source: io::Error,
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        write!(f, "can't {} {path}: {}", self.doing, self.source)?;
        match self.source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                write!(f, "; free some space or choose another place")
            }
            _ => Ok(()),
        }
    }
}

impl std::error::Error for WriteError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// The header of a file to be: metadata and the list of tensors, in the order of their data.
///
/// Keys and tensor names must be unique; asking twice is the caller's mistake and panics.
pub struct Header {
    alignment: u64,
    keys: Vec<Box<str>>,
    metadata: Vec<u8>,
    tensors: Vec<Tensor>,
}

struct Tensor {
    name: Box<str>,
    ty: Element,
    dims: Vec<u64>,
    /// From the start of the data.
    offset: u64,
    bytes: u64,
}

impl Default for Header {
    fn default() -> Self {
        Self::new()
    }
}

impl Header {
    /// An empty header.
    pub fn new() -> Self {
        Self {
            alignment: ALIGNMENT,
            keys: Vec::new(),
            metadata: Vec::new(),
            tensors: Vec::new(),
        }
    }

    /// An empty header of a file whose tensors begin at multiples of `alignment`, which a key tells.
    ///
    /// # Panics
    /// When it isn't a power of two, or so large that it can't be meant.
    pub fn aligned(alignment: u32) -> Self {
        assert!(alignment.is_power_of_two() && u64::from(alignment) <= ALIGNMENT_MAX);
        let mut header = Self {
            alignment: alignment.into(),
            ..Self::new()
        };
        header.u32("general.alignment", alignment);
        header
    }

    /// A header with the metadata of another file whose keys are wanted, and with its alignment.
    ///
    /// # Panics
    /// When the alignment is so large that it can't be meant; see [`Header::aligned`].
    pub fn like(gguf: &Gguf<'_>, wanted: impl Fn(&str) -> bool) -> Self {
        assert!(gguf.alignment() <= ALIGNMENT_MAX);
        let mut header = Self {
            alignment: gguf.alignment(),
            ..Self::new()
        };
        let mut taken = HashSet::new();
        for (key, value) in gguf.metadata() {
            // Of a key that stands twice, the first counts.
            if wanted(key) && taken.insert(key) {
                header.value(key, &value);
            }
        }
        header
    }

    /// Any value, such as one of another file.
    pub fn value(&mut self, key: &str, value: &Value<'_>) -> &mut Self {
        self.key(key, value.ty());
        put_value(&mut self.metadata, value);
        self
    }

    /// An unsigned number of 32 bits: what counts and ids are.
    pub fn u32(&mut self, key: &str, value: u32) -> &mut Self {
        self.value(key, &Value::U32(value))
    }

    /// An unsigned number of 64 bits: what byte counts are.
    pub fn u64(&mut self, key: &str, value: u64) -> &mut Self {
        self.value(key, &Value::U64(value))
    }

    /// A single.
    pub fn f32(&mut self, key: &str, value: f32) -> &mut Self {
        self.value(key, &Value::F32(value))
    }

    /// A truth value.
    pub fn bool(&mut self, key: &str, value: bool) -> &mut Self {
        self.value(key, &Value::Bool(value))
    }

    /// A string: bytes, since tokenizers hold some that aren't UTF-8.
    pub fn str(&mut self, key: &str, value: impl AsRef<[u8]>) -> &mut Self {
        self.value(key, &Value::Str(value.as_ref()))
    }

    /// An array of strings.
    pub fn strs<S: AsRef<[u8]>>(
        &mut self,
        key: &str,
        values: impl IntoIterator<Item = S>,
    ) -> &mut Self {
        self.array(key, ValueType::Str, values, |to, value| {
            put_str(to, value.as_ref())
        })
    }

    /// An array of signed numbers of 32 bits.
    pub fn i32s(&mut self, key: &str, values: impl IntoIterator<Item = i32>) -> &mut Self {
        self.array(key, ValueType::I32, values, |to, value| {
            to.extend(value.to_le_bytes())
        })
    }

    /// An array of unsigned numbers of 32 bits.
    pub fn u32s(&mut self, key: &str, values: impl IntoIterator<Item = u32>) -> &mut Self {
        self.array(key, ValueType::U32, values, |to, value| {
            to.extend(value.to_le_bytes())
        })
    }

    /// An array of truth values.
    pub fn bools(&mut self, key: &str, values: impl IntoIterator<Item = bool>) -> &mut Self {
        self.array(key, ValueType::Bool, values, |to, value| {
            to.push(value.into())
        })
    }

    /// An array of singles.
    pub fn f32s(&mut self, key: &str, values: impl IntoIterator<Item = f32>) -> &mut Self {
        self.array(key, ValueType::F32, values, |to, value| {
            to.extend(value.to_le_bytes())
        })
    }

    /// Where in the file the value that was set last ends.
    pub fn position(&self) -> u64 {
        (PREAMBLE + self.metadata.len()) as u64
    }

    /// Declares the next tensor, `dims[0]` columns first, and returns the bytes of its data.
    ///
    /// # Panics
    /// When the columns aren't whole blocks of `ty`, there are no or more than 4 dimensions, or the
    /// name is taken.
    pub fn tensor(&mut self, name: &str, ty: impl Into<Element>, dims: &[u64]) -> u64 {
        let ty = ty.into();
        assert!(
            (1..=4).contains(&dims.len()),
            "{name} has {} dimensions",
            dims.len()
        );
        assert!(
            !self.tensors.iter().any(|t| &*t.name == name),
            "two tensors named {name}"
        );
        let row = usize::try_from(dims[0])
            .ok()
            .and_then(|cols| ty.row_bytes(cols));
        let bytes = row.and_then(|row| {
            dims[1..]
                .iter()
                .try_fold(row as u64, |bytes, &dim| bytes.checked_mul(dim))
        });
        let Some(bytes) = bytes else {
            panic!("{name}: rows of {} aren't whole {ty} blocks", dims[0])
        };
        let offset = self.data_bytes();
        self.tensors.push(Tensor {
            name: name.into(),
            ty,
            dims: dims.to_vec(),
            offset,
            bytes,
        });
        bytes
    }

    /// Bytes of tensor data declared so far, with the padding between tensors.
    pub fn data_bytes(&self) -> u64 {
        self.tensors
            .last()
            .map_or(0, |t| (t.offset + t.bytes).next_multiple_of(self.alignment))
    }

    /// Bytes that [`Header::create`] takes to compose the header and to gather what is written.
    pub fn memory_bytes(&self) -> u64 {
        (2 * self.metadata.len() + 512 * self.tensors.len() + BUFFER) as u64
    }

    /// Opens `PATH.tmp`, writes the header and waits for the data.
    ///
    /// # Errors
    /// The file can't be made or written, or another process is at it.
    pub fn create(&self, path: &Path) -> Result<Writer, WriteError> {
        let (aside, file) = Aside::create(path).map_err(|source| WriteError {
            path: path.to_owned(),
            doing: "create",
            source,
        })?;
        let mut writer = Writer {
            aside,
            file,
            alignment: self.alignment,
            buffer: Vec::with_capacity(BUFFER),
            tensors: self.tensors.iter().map(|t| t.bytes).collect(),
            crcs: vec![0; self.tensors.len()],
            current: 0,
            left: 0,
            written: 0,
            header_bytes: 0,
        };
        let header = self.encode();
        writer.header_bytes = header.len() as u64;
        writer.put(&header)?;
        writer.written = 0;
        writer.advance()?;
        Ok(writer)
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.metadata.len() + 128 * self.tensors.len() + 64);
        out.extend_from_slice(b"GGUF");
        out.extend_from_slice(&3u32.to_le_bytes());
        out.extend_from_slice(&(self.tensors.len() as u64).to_le_bytes());
        out.extend_from_slice(&(self.keys.len() as u64).to_le_bytes());
        out.extend_from_slice(&self.metadata);
        for tensor in &self.tensors {
            put_str(&mut out, tensor.name.as_bytes());
            out.extend_from_slice(&(tensor.dims.len() as u32).to_le_bytes());
            for dim in &tensor.dims {
                out.extend_from_slice(&dim.to_le_bytes());
            }
            out.extend_from_slice(&tensor.ty.ggml().to_le_bytes());
            out.extend_from_slice(&tensor.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(self.alignment as usize), 0);
        out
    }

    fn key(&mut self, key: &str, ty: ValueType) {
        assert!(
            !self.keys.iter().any(|k| &**k == key),
            "two values for {key}"
        );
        self.keys.push(key.into());
        put_str(&mut self.metadata, key.as_bytes());
        self.metadata.extend_from_slice(&(ty as u32).to_le_bytes());
    }

    fn array<T>(
        &mut self,
        key: &str,
        ty: ValueType,
        values: impl IntoIterator<Item = T>,
        put: impl Fn(&mut Vec<u8>, T),
    ) -> &mut Self {
        self.key(key, ValueType::Array);
        put_array(&mut self.metadata, ty, values, put);
        self
    }
}

/// Bytes before the metadata: magic, version and two counts.
const PREAMBLE: usize = 24;

/// A file being written: takes the data of the declared tensors, one after the other.
///
/// Dropped before [`Writer::finish`], it removes what it wrote.
pub struct Writer {
    /// Dropped before the file, whose lock keeps others from its name till then.
    aside: Aside,
    file: File,
    /// Of the tensors' data.
    alignment: u64,
    buffer: Vec<u8>,
    /// Bytes of each tensor.
    tensors: Vec<u64>,
    /// CRC32C of what each has so far.
    crcs: Vec<u32>,
    /// The tensor that the next byte belongs to; `tensors.len()` when all are complete.
    current: usize,
    /// Bytes it still wants.
    left: u64,
    /// Bytes of data so far, with padding.
    written: u64,
    header_bytes: u64,
}

impl Writer {
    /// Appends bytes to the current tensor; the next one begins when it is complete.
    ///
    /// # Errors
    /// The disk is full or fails.
    ///
    /// # Panics
    /// When `bytes` are more than the tensor still wants.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let len = bytes.len() as u64;
        assert!(
            len <= self.left,
            "{len} bytes for a tensor that wants {}",
            self.left
        );
        self.put(bytes)?;
        if let Some(crc) = self.crcs.get_mut(self.current) {
            *crc = crc32c::crc32c_append(*crc, bytes);
        }
        self.left -= len;
        if self.left == 0 {
            self.current += 1;
            self.advance()?;
        }
        Ok(())
    }

    /// Bytes before the tensors' data.
    pub fn header_bytes(&self) -> u64 {
        self.header_bytes
    }

    /// CRC32C of each tensor's bytes so far, without padding.
    pub fn crcs(&self) -> &[u32] {
        &self.crcs
    }

    /// The file that is being written, whole once all tensors are complete and this has returned.
    ///
    /// # Errors
    /// The disk is full or fails.
    ///
    /// # Panics
    /// When tensors are incomplete.
    pub fn complete(&mut self) -> Result<&Path, WriteError> {
        self.assert_complete();
        self.flush()?;
        Ok(self.aside.aside())
    }

    /// Replaces bytes of the header that have been written.
    ///
    /// # Errors
    /// The disk fails.
    pub fn patch(&mut self, position: u64, bytes: &[u8]) -> Result<(), WriteError> {
        self.flush()?;
        self.file
            .write_all_at(bytes, position)
            .map_err(|source| self.error("write", source))
    }

    fn assert_complete(&self) {
        assert!(
            self.current == self.tensors.len(),
            "tensor {} of {} wants {} more bytes",
            self.current,
            self.tensors.len(),
            self.left
        );
    }

    /// Puts the file on flash under its name, replacing what was there, and returns its length.
    ///
    /// # Errors
    /// The disk fails; the old file stays.
    ///
    /// # Panics
    /// When tensors are incomplete.
    pub fn finish(mut self) -> Result<u64, WriteError> {
        self.assert_complete();
        self.flush()?;
        self.file
            .sync_all()
            .map_err(|source| self.error("sync", source))?;
        let len = self
            .file
            .metadata()
            .map_err(|source| self.error("look at", source))?
            .len();
        self.aside
            .rename()
            .map_err(|source| self.error("rename to", source))?;
        aside::sync_directory(self.aside.path())
            .map_err(|source| self.error("sync the directory of", source))?;
        Ok(len)
    }

    /// Pads, then steps over tensors without bytes.
    fn advance(&mut self) -> Result<(), WriteError> {
        let mut padding = self.written.next_multiple_of(self.alignment) - self.written;
        while padding > 0 {
            let part = padding.min(ALIGNMENT);
            self.put(&[0; ALIGNMENT as usize][..part as usize])?;
            padding -= part;
        }
        while self.current < self.tensors.len() && self.tensors[self.current] == 0 {
            self.current += 1;
        }
        self.left = self.tensors.get(self.current).copied().unwrap_or(0);
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.written += bytes.len() as u64;
        if self.buffer.len() + bytes.len() > BUFFER {
            self.flush()?;
        }
        if bytes.len() >= BUFFER {
            self.send(bytes)
        } else {
            self.buffer.extend_from_slice(bytes);
            Ok(())
        }
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        let buffer = std::mem::take(&mut self.buffer);
        let sent = self.send(&buffer);
        self.buffer = buffer;
        self.buffer.clear();
        sent
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.file
            .write_all(bytes)
            .map_err(|source| self.error("write", source))
    }

    fn error(&self, doing: &'static str, source: io::Error) -> WriteError {
        WriteError {
            path: self.aside.path().to_owned(),
            doing,
            source,
        }
    }
}

/// A value without its type.
fn put_value(to: &mut Vec<u8>, value: &Value<'_>) {
    match *value {
        Value::U8(v) => to.push(v),
        Value::I8(v) => to.extend(v.to_le_bytes()),
        Value::U16(v) => to.extend(v.to_le_bytes()),
        Value::I16(v) => to.extend(v.to_le_bytes()),
        Value::U32(v) => to.extend(v.to_le_bytes()),
        Value::I32(v) => to.extend(v.to_le_bytes()),
        Value::U64(v) => to.extend(v.to_le_bytes()),
        Value::I64(v) => to.extend(v.to_le_bytes()),
        Value::F32(v) => to.extend(v.to_le_bytes()),
        Value::F64(v) => to.extend(v.to_le_bytes()),
        Value::Bool(v) => to.push(v.into()),
        Value::Str(v) => put_str(to, v),
        Value::Array(array) => {
            put_array(to, array.element_type(), array.values(), |to, v| {
                put_value(to, &v)
            });
        }
    }
}

/// Element type, count, elements.
fn put_array<T>(
    to: &mut Vec<u8>,
    ty: ValueType,
    values: impl IntoIterator<Item = T>,
    put: impl Fn(&mut Vec<u8>, T),
) {
    to.extend((ty as u32).to_le_bytes());
    let count_at = to.len();
    to.extend([0; 8]);
    let mut count = 0u64;
    for value in values {
        put(to, value);
        count += 1;
    }
    to[count_at..count_at + 8].copy_from_slice(&count.to_le_bytes());
}

fn put_str(to: &mut Vec<u8>, bytes: &[u8]) {
    to.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    to.extend_from_slice(bytes);
}
