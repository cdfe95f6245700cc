//! Where training stands, in a file: everything that a continued run needs to go on with the same bits.
//!
//! Eight bytes `LSTUNE01`, the length of a JSON object (u32), the object, the parameters (f32), the
//! optimizer's moments tensor by tensor, the allotment's averages (two f32 each), and the CRC32C (u32) of
//! all that; little-endian. The object says what the rest belongs to, so that a file of another run is
//! told from a damaged one. It grows aside, as `PATH.tmp`, and takes its name when it is on flash.

use std::fs::File;
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};

use super::trainer::Trainer;
use crate::aside::Aside;
use crate::error::Error;

const MAGIC: &[u8; 8] = b"LSTUNE01";
/// Longest object that is read.
const HEADER_MAX: u32 = 1 << 20;

/// What a checkpoint belongs to, beside what the trainer knows.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Names and values, compared one by one.
    pub fields: Map<String, Value>,
}

/// Where `PATH`'s checkpoint lies.
pub fn path_of(output: &Path) -> PathBuf {
    let mut name = output.as_os_str().to_owned();
    name.push(".ckpt");
    PathBuf::from(name)
}

/// Counts what is written into a checksum.
struct Sum<T> {
    inner: T,
    crc: u32,
}

impl<W: Write> Write for Sum<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..count]);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

impl<R: Read> Read for Sum<R> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(bytes)?;
        self.crc = crc32c::crc32c_append(self.crc, &bytes[..count]);
        Ok(count)
    }
}

/// Writes where `trainer` stands.
///
/// # Errors
/// What can't be written; the older checkpoint stays.
pub fn save(path: &Path, identity: &Identity, trainer: &Trainer<'_>) -> Result<(), Error> {
    put(path, identity, trainer).map_err(|error| Error::io(path, "write the checkpoint", error))
}

fn put(path: &Path, identity: &Identity, trainer: &Trainer<'_>) -> io::Result<()> {
    let (mut aside, file) = Aside::create(path)?;
    let mut out = Sum {
        inner: BufWriter::new(file),
        crc: 0,
    };
    let header = json!({
        "identity": identity.fields,
        "step": trainer.step,
        "place": trainer.place,
        "micro": trainer.decoder.micro,
        "pages": trainer.decoder.saved.pool().target(),
        "parameters": trainer.decoder.params.count,
        "plan": trainer.decoder.allotment.text(&trainer.decoder.plan),
    })
    .to_string();
    out.write_all(MAGIC)?;
    out.write_all(&(header.len() as u32).to_le_bytes())?;
    out.write_all(header.as_bytes())?;
    out.write_all(bytemuck::cast_slice(&trainer.decoder.values))?;
    for moments in &trainer.moments {
        moments.write(&mut out)?;
    }
    for average in trainer.decoder.allotment.averages() {
        let [mean, weight] = average.parts();
        out.write_all(&mean.to_le_bytes())?;
        out.write_all(&weight.to_le_bytes())?;
    }
    let crc = out.crc.to_le_bytes();
    out.inner.write_all(&crc)?;
    let file = out
        .inner
        .into_inner()
        .map_err(io::IntoInnerError::into_error)?;
    aside.finish(&file)
}

/// Brings `trainer` where a checkpoint stands. False when there is none.
///
/// # Errors
/// A damaged file, or one of another run, naming what differs. The trainer may hold a part of it then.
pub fn load(path: &Path, identity: &Identity, trainer: &mut Trainer<'_>) -> Result<bool, Error> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(Error::io(path, "open the checkpoint", error)),
    };
    let wrong = |why: &str| {
        Error::Usage(format!(
            "{}: {why}; go on without --resume to begin anew, which replaces it",
            path.display()
        ))
    };
    let damaged = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData => {
            wrong("is damaged, or no checkpoint")
        }
        _ => Error::io(path, "read the checkpoint", error),
    };
    let mut from = Sum {
        inner: BufReader::new(file),
        crc: 0,
    };
    let header = read_header(&mut from).map_err(damaged)?;
    let number = |key: &str| {
        header[key]
            .as_u64()
            .ok_or_else(|| wrong("is damaged, or no checkpoint"))
    };
    for (key, value) in &identity.fields {
        let found = &header["identity"][key];
        if found != value {
            return Err(wrong(&format!(
                "is of another run: {key} was {}, and is {} now",
                shown(found),
                shown(value)
            )));
        }
    }
    if number("parameters")? != trainer.decoder.params.count as u64 {
        return Err(wrong("is of another model"));
    }
    from.read_exact(bytemuck::cast_slice_mut(&mut trainer.decoder.values))
        .map_err(damaged)?;
    for moments in &mut trainer.moments {
        moments.read(&mut from).map_err(damaged)?;
    }
    for average in trainer.decoder.allotment.averages_mut() {
        let mut parts = [0.0f32; 2];
        from.read_exact(bytemuck::cast_slice_mut(&mut parts))
            .map_err(damaged)?;
        *average = leanstream_core::act::importance::Average::from_parts(parts);
    }
    let crc = from.crc;
    let mut found = [0; 4];
    from.inner.read_exact(&mut found).map_err(damaged)?;
    let more = from.inner.read(&mut [0]).map_err(damaged)?;
    if found != crc.to_le_bytes() || more != 0 {
        return Err(wrong("is damaged"));
    }
    trainer.step = number("step")?;
    trainer.place = number("place")?;
    trainer.decoder.micro = number("micro")?;
    let text = header["plan"].as_str().unwrap_or_default();
    trainer.resume_plan(text, number("pages")?)?;
    Ok(true)
}

/// A value as it was written: fractions are f32, whose nearest f64 has more digits.
fn shown(value: &Value) -> String {
    match value.as_f64().filter(|_| value.is_f64()) {
        Some(number) => (number as f32).to_string(),
        None => value.to_string(),
    }
}

fn read_header(from: &mut impl Read) -> io::Result<Value> {
    let mut magic = [0; 8];
    from.read_exact(&mut magic)?;
    let mut len = [0; 4];
    from.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len);
    if &magic != MAGIC || len > HEADER_MAX {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; len as usize];
    from.read_exact(&mut text)?;
    serde_json::from_slice(&text).map_err(|_| io::ErrorKind::InvalidData.into())
}
