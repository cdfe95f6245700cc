//! The head in two planes: a coarse one that is read whole, exact rows that are read one by one.

use super::layout::row_bytes;
use super::{CRC_BYTES, Pack, PackError, Place, crc_at};
use crate::gguf::Element;
use crate::quant::QuantType;

/// The head in two planes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedHead {
    /// Q4_0 `(vocab, d)`: the head, coarsely.
    pub sketch: Place,
    /// Bytes of a sketch row.
    pub sketch_row_bytes: u32,
    /// F32 `(vocab)`: at least the L2 norm of what a sketch row differs from the exact one.
    pub sketch_error: Place,
    /// The exact rows as units.
    pub units: Place,
    /// Number of rows: `vocab`.
    pub count: u32,
    /// Bytes of a unit; a multiple of 4.
    pub unit_bytes: u32,
    /// The exact row's type and bytes, from byte 0 of a unit.
    pub row: (QuantType, u32),
    /// First byte of a unit's CRC32C.
    pub crc_at: u32,
}

impl Pack<'_, '_> {
    /// The head in two planes, where the pack has it so.
    ///
    /// # Errors
    /// Tensors that are missing or misshapen.
    pub fn head(&self) -> Result<Option<PackedHead>, PackError> {
        if self.model.tensors.find("output.sketch").is_none() {
            return Ok(None);
        }
        let (d, vocab) = (u64::from(self.d), u64::from(self.vocab));
        let of = if self.tied {
            "token_embd.weight"
        } else {
            "output.weight"
        };
        let ty = self.find(None, of)?.1.ty;
        let unit = |layer| PackError::Unit { layer, d: self.d };
        let row = ty
            .quant()
            .and_then(|ty| Some((ty, row_bytes(ty, self.d)?)))
            .ok_or(unit(None))?;
        let crc_at = crc_at(row.1).ok_or(unit(None))?;
        let unit_bytes = crc_at + CRC_BYTES;
        let q4_0 = QuantType::Q4_0;
        Ok(Some(PackedHead {
            sketch: self.place(None, "output.sketch", q4_0.into(), &[d, vocab])?,
            sketch_row_bytes: row_bytes(q4_0, self.d).ok_or(unit(None))?,
            sketch_error: self.place(
                None,
                "output.sketch_error",
                QuantType::F32.into(),
                &[vocab],
            )?,
            units: self.place(
                None,
                "output.units",
                Element::I8,
                &[unit_bytes.into(), vocab],
            )?,
            count: self.vocab,
            unit_bytes,
            row,
            crc_at,
        }))
    }
}
