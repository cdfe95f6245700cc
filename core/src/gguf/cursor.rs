//! Reads the header front to back. Every length is compared with the bytes that are left before
//! anything is done with it, so hostile numbers end as errors that say where they stand.

use super::error::{GgufError, Label, Place};

/// What is being read, for the errors. Borrows, so that naming it costs nothing until it's needed.
#[derive(Clone, Copy, Debug)]
pub(super) enum At<'a> {
    Header,
    Key(u64),
    Value(&'a str),
    TensorInfo(u64),
    Tensor(&'a str),
}

impl At<'_> {
    pub(super) fn place(self) -> Place {
        match self {
            At::Header => Place::Header,
            At::Key(index) => Place::Key { index },
            At::Value(key) => Place::Value {
                key: Label::new(key),
            },
            At::TensorInfo(index) => Place::TensorInfo { index },
            At::Tensor(name) => Place::Tensor {
                name: Label::new(name),
            },
        }
    }
}

/// A position in the mapped start of a file.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    /// The mapped start; never longer than `file_len`.
    bytes: &'a [u8],
    /// Next byte, at most `bytes.len()`.
    pos: usize,
    file_len: u64,
    pub(super) at: At<'a>,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8], pos: usize, file_len: u64) -> Self {
        debug_assert!(pos <= bytes.len() && bytes.len() as u64 <= file_len);
        Self {
            bytes,
            pos,
            file_len,
            at: At::Header,
        }
    }

    pub(super) fn pos(&self) -> usize {
        self.pos
    }

    /// Everything mapped from here on.
    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.pos..]
    }

    /// Bytes of the file, mapped or not, from here to its end.
    pub(super) fn left(&self) -> u64 {
        self.file_len - self.pos as u64
    }

    pub(super) fn take(&mut self, len: u64) -> Result<&'a [u8], GgufError> {
        if len > self.left() {
            return Err(GgufError::HeaderCut {
                place: self.at.place(),
                offset: self.pos as u64,
                needed: len,
                left: self.left(),
            });
        }
        let rest = self.rest();
        if len > rest.len() as u64 {
            // Doubling keeps a caller that maps step by step from parsing once per string.
            let mapped = self.bytes.len() as u64;
            let bytes = (self.pos as u64 + len)
                .max(2 * mapped)
                .max(4096)
                .min(self.file_len);
            return Err(GgufError::NeedMore { bytes });
        }
        // Not longer than a slice, so it fits.
        let len = len as usize;
        self.pos += len;
        Ok(&rest[..len])
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], GgufError> {
        let bytes = self.take(N as u64)?;
        Ok(bytes.try_into().expect("as long as was asked for"))
    }

    pub(super) fn u32(&mut self) -> Result<u32, GgufError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, GgufError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A count of things that take at least `item_bytes` each: refused unless the file has room.
    pub(super) fn count(&mut self, item_bytes: u64) -> Result<u64, GgufError> {
        let count = self.u64()?;
        match count.checked_mul(item_bytes) {
            Some(bytes) if bytes <= self.left() => Ok(count),
            _ => Err(GgufError::Count {
                place: self.at.place(),
                count,
                left: self.left(),
            }),
        }
    }

    pub(super) fn string(&mut self) -> Result<&'a [u8], GgufError> {
        let len = self.u64()?;
        self.take(len)
    }

    /// A string that names something, so it must be text.
    pub(super) fn name(&mut self) -> Result<&'a str, GgufError> {
        let bytes = self.string()?;
        core::str::from_utf8(bytes).map_err(|error| GgufError::NotUtf8 {
            place: self.at.place(),
            offset: (self.pos - bytes.len() + error.valid_up_to()) as u64,
        })
    }
}
