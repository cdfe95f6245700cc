//! What a tensor's values are: weights in a block format, or plain integers.
//!
//! Integers are no weights. They carry what a pack adds to a model: units, which mix formats, and
//! the order of neurons. Whoever wants weights asks [`Element::quant`].

use core::fmt;

use crate::quant::QuantType;

/// The type of a tensor's values. The number that stands in a file is [`Element::ggml`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Element {
    /// Weights.
    Quant(QuantType),
    /// Bytes.
    I8,
    /// Integers of 32 bits, signed.
    I32,
}

impl Element {
    const I8_GGML: u32 = 24;
    const I32_GGML: u32 = 26;

    /// The type with this ggml id; `None` when it isn't supported.
    pub const fn from_ggml(id: u32) -> Option<Self> {
        match id {
            Self::I8_GGML => Some(Self::I8),
            Self::I32_GGML => Some(Self::I32),
            _ => match QuantType::from_ggml(id) {
                Some(ty) => Some(Self::Quant(ty)),
                None => None,
            },
        }
    }

    /// ggml's id.
    pub const fn ggml(self) -> u32 {
        match self {
            Self::Quant(ty) => ty as u32,
            Self::I8 => Self::I8_GGML,
            Self::I32 => Self::I32_GGML,
        }
    }

    /// The block format of weights; `None` for integers.
    pub const fn quant(self) -> Option<QuantType> {
        match self {
            Self::Quant(ty) => Some(ty),
            Self::I8 | Self::I32 => None,
        }
    }

    /// ggml's name, such as `Q4_K`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Quant(ty) => ty.name(),
            Self::I8 => "I8",
            Self::I32 => "I32",
        }
    }

    /// Values in a block; 1 for integers.
    pub const fn block_len(self) -> usize {
        match self {
            Self::Quant(ty) => ty.block_len(),
            Self::I8 | Self::I32 => 1,
        }
    }

    /// Bytes of a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Quant(ty) => ty.block_bytes(),
            Self::I8 => 1,
            Self::I32 => 4,
        }
    }

    /// Bytes of a row of `cols` values; `None` when blocks don't divide the row or the size
    /// overflows.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if cols.is_multiple_of(self.block_len()) {
            (cols / self.block_len()).checked_mul(self.block_bytes())
        } else {
            None
        }
    }
}

impl From<QuantType> for Element {
    fn from(ty: QuantType) -> Self {
        Self::Quant(ty)
    }
}

impl PartialEq<QuantType> for Element {
    fn eq(&self, ty: &QuantType) -> bool {
        *self == Self::Quant(*ty)
    }
}

impl fmt::Display for Element {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_lead_back() {
        for id in 0..64 {
            let Some(element) = Element::from_ggml(id) else {
                continue;
            };
            assert_eq!(element.ggml(), id);
            assert_eq!(
                element.row_bytes(2 * element.block_len()),
                Some(2 * element.block_bytes())
            );
            assert_eq!(element.quant(), QuantType::from_ggml(id));
        }
        assert_eq!(Element::from_ggml(24), Some(Element::I8));
        assert_eq!(Element::from_ggml(26), Some(Element::I32));
        assert_eq!(Element::from_ggml(25), None);
    }
}
