//! What a unit consists of: rows as they are, down columns moved or quantized anew, a checksum.

use crate::quant::QuantType;

/// Bytes of the CRC32C that ends a unit.
pub const CRC_BYTES: u32 = 4;

/// Neurons that share a scale in the blocks of the source's down matrix.
pub const SCALE_GROUP: u32 = 32;

/// How the down columns of a layer are stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Down {
    /// The very integers or floats of the source, moved from its rows; the scales of blocks stand
    /// apart. `ty` is the source's type.
    Moved {
        /// Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, F16, BF16 or F32.
        ty: QuantType,
    },
    /// Each column is one row of `d` values, quantized anew.
    Rows {
        /// Q8_0, Q5_0 or Q4_0.
        ty: QuantType,
    },
}

impl Down {
    /// How the source's columns of `ty` are moved; `None` when they must be quantized anew.
    pub const fn moved(ty: QuantType) -> Option<Self> {
        match ty {
            QuantType::Q8_0
            | QuantType::Q4_0
            | QuantType::Q4_1
            | QuantType::Q5_0
            | QuantType::Q5_1
            | QuantType::F16
            | QuantType::BF16
            | QuantType::F32 => Some(Self::Moved { ty }),
            _ => None,
        }
    }

    /// How columns are quantized anew to `ty`; `None` for types that this isn't done with.
    pub const fn rows(ty: QuantType) -> Option<Self> {
        match ty {
            QuantType::Q8_0 | QuantType::Q5_0 | QuantType::Q4_0 => Some(Self::Rows { ty }),
            _ => None,
        }
    }

    /// The type: the source's if moved, else the columns' own.
    pub const fn ty(self) -> QuantType {
        match self {
            Self::Moved { ty } | Self::Rows { ty } => ty,
        }
    }

    /// Whether the columns were moved without loss.
    pub const fn is_moved(self) -> bool {
        matches!(self, Self::Moved { .. })
    }

    /// Bytes of a column of `d` values; `None` when it can't be stored so.
    pub fn column_bytes(self, d: u32) -> Option<u32> {
        match self {
            Self::Moved {
                ty: QuantType::Q8_0 | QuantType::Q5_0 | QuantType::Q5_1,
            } => Some(d),
            Self::Moved {
                ty: QuantType::Q4_0 | QuantType::Q4_1,
            } => d.is_multiple_of(2).then_some(d / 2),
            Self::Moved { ty } | Self::Rows { ty } => row_bytes(ty, d),
        }
    }

    /// Whether the scales of the source's blocks stand apart.
    pub const fn has_scales(self) -> bool {
        self.is_moved() && self.ty().block_len() as u32 == SCALE_GROUP
    }

    /// Whether the minimums of the source's blocks stand apart.
    pub const fn has_mins(self) -> bool {
        self.is_moved() && matches!(self.ty(), QuantType::Q4_1 | QuantType::Q5_1)
    }
}

/// Where a unit's parts lie in its bytes. The gate's row if it is there, up, down, zeros up to a multiple of
/// 4, the CRC.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnitLayout {
    /// Type and bytes, from byte 0, of the row that decides whether the neuron is active: the gate's, or
    /// up's in an ungated network. `None` where it stands in a matrix of its own.
    pub gate: Option<(QuantType, u32)>,
    /// The up row's type and bytes; `None` in an ungated network.
    pub up: Option<(QuantType, u32)>,
    /// First byte of the up row.
    pub up_at: u32,
    /// First byte of the down column.
    pub down_at: u32,
    /// Bytes of the down column.
    pub down_bytes: u32,
    /// First byte of the CRC32C, a `u32`, over all the bytes before it.
    pub crc_at: u32,
}

impl UnitLayout {
    /// The layout of the units of a network `d` wide; `None` when a row or a column can't be stored.
    pub fn new(gate: Option<QuantType>, up: Option<QuantType>, down: Down, d: u32) -> Option<Self> {
        let row = |ty: Option<QuantType>| match ty {
            Some(ty) => Some(Some((ty, row_bytes(ty, d)?))),
            None => Some(None),
        };
        let (gate, up) = (row(gate)?, row(up)?);
        let up_at = gate.map_or(0, |(_, bytes)| bytes);
        let down_at = up_at.checked_add(up.map_or(0, |(_, bytes)| bytes))?;
        let down_bytes = down.column_bytes(d)?;
        let crc_at = crc_at(down_at.checked_add(down_bytes)?)?;
        Some(Self {
            gate,
            up,
            up_at,
            down_at,
            down_bytes,
            crc_at,
        })
    }

    /// Bytes of a unit.
    pub fn unit_bytes(&self) -> u32 {
        self.crc_at + CRC_BYTES
    }
}

/// Where the CRC of a unit with `bytes` bytes of content stands.
pub fn crc_at(bytes: u32) -> Option<u32> {
    let at = bytes.checked_next_multiple_of(4)?;
    at.checked_add(CRC_BYTES).map(|_| at)
}

/// Bytes of a row of `cols` values; `None` when they aren't whole blocks.
pub(super) fn row_bytes(ty: QuantType, cols: u32) -> Option<u32> {
    ty.row_bytes(cols as usize)?.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_up_down_padding_crc() {
        // SmolLM2 with relu: rows of Q8_0, 576 wide.
        let down = Down::moved(QuantType::Q8_0).unwrap();
        let layout = UnitLayout::new(None, Some(QuantType::Q8_0), down, 576).unwrap();
        assert_eq!((layout.down_at, layout.down_bytes), (612, 576));
        assert_eq!((layout.crc_at, layout.unit_bytes()), (1188, 1192));
        // With the gate's row.
        let gate = Some(QuantType::F16);
        let layout = UnitLayout::new(gate, Some(QuantType::Q8_0), down, 576).unwrap();
        assert_eq!((layout.up_at, layout.down_at), (1152, 1152 + 612));
        assert_eq!(layout.unit_bytes(), 1152 + 1192);
        let huge = UnitLayout::new(Some(QuantType::F32), gate, down, 1 << 29);
        assert_eq!(huge.map(|layout| layout.up_at), Some(1 << 31));
        let more = UnitLayout::new(Some(QuantType::F32), Some(QuantType::F32), down, 1 << 29);
        assert_eq!(more, None, "rows longer than 32 bits count");
        // Ungated, 18-byte columns: padded to 20.
        let rows = Down::rows(QuantType::Q4_0).unwrap();
        let layout = UnitLayout::new(None, None, rows, 32).unwrap();
        assert_eq!((layout.down_at, layout.down_bytes), (0, 18));
        assert_eq!((layout.crc_at, layout.unit_bytes()), (20, 24));
    }

    #[test]
    fn columns_that_cannot_be_stored_are_none() {
        assert_eq!(Down::moved(QuantType::Q4_K), None);
        assert_eq!(Down::moved(QuantType::IQ4_NL), None);
        assert_eq!(Down::rows(QuantType::Q4_K), None);
        let nibbles = Down::moved(QuantType::Q4_1).unwrap();
        assert_eq!(nibbles.column_bytes(33), None);
        assert_eq!(nibbles.column_bytes(34), Some(17));
        let blocks = Down::rows(QuantType::Q8_0).unwrap();
        assert_eq!(blocks.column_bytes(33), None);
        let singles = Down::moved(QuantType::F32).unwrap();
        assert_eq!(singles.column_bytes(3), Some(12));
        assert_eq!(singles.column_bytes(u32::MAX), None);
        assert_eq!(crc_at(u32::MAX), None);
        assert_eq!(crc_at(u32::MAX - 4), None);
        assert!(!singles.has_scales() && nibbles.has_scales() && nibbles.has_mins());
        assert!(!blocks.has_scales());
    }
}
