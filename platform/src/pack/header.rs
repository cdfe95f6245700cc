//! The checksum of a pack's header: of everything before the tensors' data.
//!
//! Two keys, so that a damaged name of one doesn't make the pack look like one from before there were
//! any: where one is missing, the other says so.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use leanstream_core::gguf::{Gguf, Value};

use super::write_error;
use crate::error::Error;
use crate::gguf_write::{Header, Writer};
use crate::run::model::Headers;

/// Key of the header's length: where the tensors' data begins.
pub const BYTES_KEY: &str = "lean.header.bytes";

/// Key of the CRC32C of so many bytes, in which the key's own value counts as zeros.
pub const CRC_KEY: &str = "lean.header.crc32c";

/// Bytes of that value.
const CRC_BYTES: u64 = 4;

/// Bytes read at a time: few, as packing has spent its budget on other things.
const PART: u64 = 64 << 10;

/// Where the two values stand in the file.
pub(super) struct Seal {
    bytes_at: u64,
    crc_at: u64,
}

impl Seal {
    /// Sets both keys, to zeros for now.
    pub fn declare(header: &mut Header) -> Self {
        header.u64(BYTES_KEY, 0);
        let bytes_end = header.position();
        header.u32(CRC_KEY, 0);
        Self {
            bytes_at: bytes_end - 8,
            crc_at: header.position() - CRC_BYTES,
        }
    }

    /// Writes both values. All else in the header must have been written.
    ///
    /// # Errors
    /// What can't be written or read back.
    pub fn write(self, writer: &mut Writer) -> Result<(), Error> {
        let bytes = writer.header_bytes();
        writer
            .patch(self.bytes_at, &bytes.to_le_bytes())
            .map_err(write_error)?;
        let aside = writer.complete().map_err(write_error)?;
        let crc = File::open(aside)
            .and_then(|file| header_crc(&file, bytes, self.crc_at))
            .map_err(|error| Error::io(aside, "read its header", error))?;
        writer
            .patch(self.crc_at, &crc.to_le_bytes())
            .map_err(write_error)
    }
}

/// Checks the header of a model; whether it has a checksum, as packs have.
///
/// # Errors
/// A header that isn't what was packed; what can't be read.
pub fn check_header(headers: &Headers) -> Result<bool, Error> {
    let (path, _) = headers.files().next().expect("a model has a file");
    headers.with(|shards, _| match shards[0].split() {
        // Whoever cuts a pack into shards writes headers of his own.
        Some(_) => Ok(false),
        None => check_parsed(path, &shards[0]),
    })
}

fn check_parsed(path: &Path, header: &Gguf<'_>) -> Result<bool, Error> {
    let bytes = header.data_offset();
    let wanted = match (header.get(BYTES_KEY), header.get(CRC_KEY)) {
        (None, None) => return Ok(false),
        (Some(Value::U64(told)), Some(Value::U32(crc)))
            if told == bytes && bytes <= header.file_len() =>
        {
            Some(crc)
        }
        _ => None,
    };
    let found = match header.value_offset(CRC_KEY) {
        Some(crc_at) if wanted.is_some() => File::open(path)
            .and_then(|file| header_crc(&file, bytes, crc_at))
            .map(Some)
            .map_err(|error| Error::io(path, "read its header", error))?,
        _ => None,
    };
    if found.is_some() && found == wanted {
        return Ok(true);
    }
    Err(Error::model(
        path,
        "its header isn't what was packed: its CRC32C doesn't match; copy the file again, or pack the model again",
    ))
}

/// CRC32C of the first `bytes` of a file, with zeros for the four that begin at `crc_at`.
fn header_crc(file: &File, bytes: u64, crc_at: u64) -> io::Result<u32> {
    let mut part = vec![0; PART.min(bytes) as usize];
    let (mut done, mut crc) = (0, 0);
    while done < bytes {
        let part = &mut part[..(bytes - done).min(PART) as usize];
        file.read_exact_at(part, done)?;
        for at in crc_at..crc_at + CRC_BYTES {
            let own = at.checked_sub(done).and_then(|at| usize::try_from(at).ok());
            if let Some(byte) = own.and_then(|at| part.get_mut(at)) {
                *byte = 0;
            }
        }
        crc = crc32c::crc32c_append(crc, part);
        done += part.len() as u64;
    }
    Ok(crc)
}
