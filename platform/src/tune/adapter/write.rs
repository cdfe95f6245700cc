//! Writing an adapter.

use std::path::Path;

use half::f16;
use leanstream_core::quant::QuantType;

use crate::error::Error;
use crate::gguf_write::{Header, WriteError};
use crate::pack::write_error;

/// What an adapter says of itself.
#[derive(Clone, Copy, Debug)]
pub struct About<'a> {
    /// `general.architecture` of the model that it is for.
    pub arch: &'a str,
    /// The product is scaled by this over the rank.
    pub alpha: f32,
    /// `general.name`: which model it is for, if that has a name.
    pub name: Option<&'a str>,
}

/// One matrix' part of an adapter.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    /// The matrix' tensor in the model.
    pub name: &'a str,
    /// Columns of the matrix.
    pub inputs: u32,
    /// Rows of the matrix.
    pub outputs: u32,
    /// Rows of `a`.
    pub rank: u32,
    /// (rank, inputs)
    pub a: &'a [f32],
    /// (outputs, rank)
    pub b: &'a [f32],
}

/// How an adapter's values are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Precision {
    /// Singles.
    #[default]
    F32,
    /// Halves: half the file.
    F16,
}

/// Values that are encoded at once.
const PART: usize = 4096;

/// Writes an adapter and returns its length in bytes. It grows aside, as `PATH.tmp`, and takes its name
/// when it is complete and on flash.
///
/// # Errors
/// A value that isn't finite (or no half can hold), what can't be written.
///
/// # Panics
/// A part's slices don't have the sizes that it names, or two parts have one name.
pub fn write(
    path: &Path,
    about: &About<'_>,
    parts: &[Part<'_>],
    precision: Precision,
) -> Result<u64, Error> {
    let ty = match precision {
        Precision::F32 => QuantType::F32,
        Precision::F16 => QuantType::F16,
    };
    let mut header = Header::new();
    header.str("general.type", "adapter");
    header.str("general.architecture", about.arch);
    if let Some(name) = about.name {
        header.str("general.name", name);
    }
    header.str("adapter.type", "lora");
    header.f32("adapter.lora.alpha", about.alpha);
    for part in parts {
        let [inputs, outputs, rank] = [part.inputs, part.outputs, part.rank].map(u64::from);
        assert_eq!(part.a.len() as u64, rank * inputs, "A of {}", part.name);
        assert_eq!(part.b.len() as u64, outputs * rank, "B of {}", part.name);
        for (values, letter) in [(part.a, 'a'), (part.b, 'b')] {
            check(path, part.name, letter, values, precision)?;
        }
        header.tensor(&format!("{}.lora_a", part.name), ty, &[inputs, rank]);
        header.tensor(&format!("{}.lora_b", part.name), ty, &[rank, outputs]);
    }
    let put = || -> Result<u64, WriteError> {
        let mut writer = header.create(path)?;
        let mut bytes = Vec::with_capacity(4 * PART);
        for values in parts.iter().flat_map(|part| [part.a, part.b]) {
            for values in values.chunks(PART) {
                bytes.clear();
                match precision {
                    Precision::F32 => bytes.extend(values.iter().flat_map(|x| x.to_le_bytes())),
                    Precision::F16 => {
                        let halves = values.iter().map(|x| f16::from_f32(*x));
                        bytes.extend(halves.flat_map(f16::to_le_bytes));
                    }
                }
                writer.write(&bytes)?;
            }
        }
        writer.finish()
    };
    put().map_err(write_error)
}

fn check(
    path: &Path,
    name: &str,
    letter: char,
    values: &[f32],
    precision: Precision,
) -> Result<(), Error> {
    let fits = |x: &f32| match precision {
        Precision::F32 => x.is_finite(),
        Precision::F16 => f16::from_f32(*x).is_finite(),
    };
    match values.iter().find(|x| !fits(x)) {
        None => Ok(()),
        Some(bad) => Err(Error::Runtime(format!(
            "{}: {name}.lora_{letter} has the value {bad}, so nothing was written: the training ran away; go on from an \
             earlier state with a lower --lr",
            path.display()
        ))),
    }
}
