//! Checking a pack's units against their CRCs, in bounded parts.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use leanstream_core::gguf::{Gguf, TensorIndex};
use leanstream_core::pack::{Ffn, Pack, PackedHead, PackedLayer, Place, check_order};
use leanstream_core::plan::{self, Hyper, Model};

use super::is_sound;
use crate::error::Error;
use crate::run::model::Headers;
use crate::signals;

/// Bytes read at a time.
const PART: usize = 1 << 20;

/// A pack's description, taken out of its header.
pub struct Described {
    /// The files, in the order of their shards.
    pub files: Vec<PathBuf>,
    /// The model's numbers.
    pub hyper: Hyper,
    /// What it has of the feed-forward networks.
    pub ffn: Ffn,
    /// By number; none where the networks are matrices.
    pub layers: Vec<PackedLayer>,
    /// The head, if it is in two planes.
    pub head: Option<PackedHead>,
    /// `lean.down`.
    pub down: String,
    /// Name of the order.
    pub order: &'static str,
    /// Tokens that the statistics come from.
    pub calibration_tokens: u32,
    /// SHA-256 of the source, in hex.
    pub source_sha256: String,
    /// Length of the source.
    pub source_bytes: u64,
}

/// Reads the description of a pack; `None` for a model that isn't packed.
///
/// # Errors
/// What is wrong with the header.
pub fn describe(headers: &Headers) -> Result<Option<Described>, Error> {
    headers.with(|shards, tensors| describe_parsed(headers, shards, tensors))
}

fn describe_parsed(
    headers: &Headers,
    shards: &[Gguf<'_>],
    tensors: TensorIndex<'_, '_>,
) -> Result<Option<Described>, Error> {
    let files: Vec<PathBuf> = headers.files().map(|(path, _)| path.to_owned()).collect();
    let model = Model {
        first: &shards[0],
        tensors,
    };
    if shards[0].get("lean.version").is_none() {
        return Ok(None);
    }
    let hyper = plan::hyper(&model).map_err(|error| Error::model(&files[0], error))?;
    let bad = |error: leanstream_core::pack::PackError| Error::model(&files[0], error);
    let Some(pack) = Pack::of(&model, &hyper).map_err(bad)? else {
        return Ok(None);
    };
    let layers = (0..pack.layers()).map(|layer| pack.layer(layer));
    Ok(Some(Described {
        hyper,
        ffn: pack.ffn,
        layers: layers.collect::<Result<_, _>>().map_err(bad)?,
        head: pack.head().map_err(bad)?,
        down: shards[0]
            .get("lean.down")
            .and_then(|down| down.as_str())
            .unwrap_or("")
            .to_owned(),
        order: pack.order.name(),
        calibration_tokens: pack.calibration_tokens,
        source_sha256: pack.source_sha256.to_owned(),
        source_bytes: pack.source_bytes,
        files,
    }))
}

impl Described {
    /// Bytes of all units, the head's aside.
    pub fn unit_bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.units.bytes).sum()
    }

    /// Checks every unit's CRC, those of the gates' sketches, and every order; returns the number of units.
    ///
    /// # Errors
    /// The first unit that isn't what was packed, by layer and number; what can't be read.
    pub fn check(&self) -> Result<u64, Error> {
        let mut units = 0;
        for (number, layer) in (0u32..).zip(&self.layers) {
            self.check_order(number, layer)?;
            self.check_sketch(number, layer)?;
            let name = format!("layer {number}");
            self.check_units(&name, &layer.units, layer.unit_bytes, layer.layout.crc_at)?;
            units += u64::from(layer.count);
        }
        if let Some(head) = &self.head {
            self.check_units("the head", &head.units, head.unit_bytes, head.crc_at)?;
            units += u64::from(head.count);
        }
        Ok(units)
    }

    fn check_units(
        &self,
        name: &str,
        place: &Place,
        unit_bytes: u32,
        crc_at: u32,
    ) -> Result<(), Error> {
        let unit_bytes = unit_bytes as usize;
        let mut part = vec![0; (PART / unit_bytes).max(1) * unit_bytes];
        let mut first = 0;
        self.each_part(place, &mut part, |bytes| {
            for (index, unit) in bytes.chunks_exact(unit_bytes).enumerate() {
                if !is_sound(unit, crc_at as usize) {
                    return Err(format!(
                        "unit {} of {name} isn't what was packed: its CRC32C doesn't match; copy the file again, or \
                         pack the model again",
                        first + index
                    ));
                }
            }
            first += bytes.len() / unit_bytes;
            Ok(())
        })
    }

    fn check_sketch(&self, number: u32, layer: &PackedLayer) -> Result<(), Error> {
        let Some(sketch) = &layer.sketch else {
            return Ok(());
        };
        let mut crcs = Vec::new();
        let mut bytes = vec![0; sketch.crcs.bytes as usize];
        self.each_part(&sketch.crcs, &mut bytes, |bytes| {
            crcs.extend(
                bytes
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| u32::from_le_bytes(*b)),
            );
            Ok(())
        })?;
        let row = sketch.row_bytes as usize;
        let mut part = vec![0; (PART / row).max(1) * row];
        let mut first = 0;
        self.each_part(&sketch.rows, &mut part, |bytes| {
            let rows = bytes.chunks_exact(row);
            let count = rows.len();
            for (index, (row, crc)) in rows.zip(&crcs[first..]).enumerate() {
                if crc32c::crc32c(row) != *crc {
                    return Err(format!(
                        "row {} of the sketch of layer {number}'s gate isn't what was packed: its CRC32C doesn't match; \
                         copy the file again, or pack the model again",
                        first + index
                    ));
                }
            }
            first += count;
            Ok(())
        })
    }

    fn check_order(&self, number: u32, layer: &PackedLayer) -> Result<(), Error> {
        let mut bytes = vec![0; layer.order.bytes as usize];
        let mut order = Vec::new();
        self.each_part(&layer.order, &mut bytes, |bytes| {
            order.extend(
                bytes
                    .as_chunks::<4>()
                    .0
                    .iter()
                    .map(|b| i32::from_le_bytes(*b)),
            );
            Ok(())
        })?;
        let mut seen = vec![0; order.len().div_ceil(8)];
        check_order(number, order.into_iter(), &mut seen)
            .map_err(|error| Error::model(&self.files[usize::from(layer.order.file.0)], error))
    }

    /// Reads a place part by part; `part` is as long as each is at most.
    fn each_part(
        &self,
        place: &Place,
        part: &mut [u8],
        mut each: impl FnMut(&[u8]) -> Result<(), String>,
    ) -> Result<(), Error> {
        let path = &self.files[usize::from(place.file.0)];
        let file = File::open(path).map_err(|error| Error::io(path, "open it", error))?;
        let mut done = 0;
        while done < place.bytes {
            signals::check()?;
            let len = (place.bytes - done).min(part.len() as u64) as usize;
            file.read_exact_at(&mut part[..len], place.offset + done)
                .map_err(|error| Error::io(path, "read its weights", error))?;
            each(&part[..len]).map_err(|why| Error::model(path, why))?;
            done += len as u64;
        }
        Ok(())
    }
}
