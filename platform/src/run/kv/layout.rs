//! Types and sizes of a cache, known before anything is allocated.

use std::fmt;

use super::{ALIGN, BLOCK, GROUP};

/// Element type of a cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvType {
    /// IEEE binary16, rounded to nearest even; 2 bytes. Values beyond 65504 are kept at that.
    F16,
    /// Blocks of 32 8-bit codes with an f16 scale; 34 bytes per 32. `head_dim` is a multiple of 32.
    #[allow(non_camel_case_types)]
    Q8_0,
}

impl KvType {
    /// ggml's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F16 => "f16",
            Self::Q8_0 => "q8_0",
        }
    }

    /// The type called `name`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::F16, Self::Q8_0]
            .into_iter()
            .find(|ty| ty.name() == name)
    }
}

/// Why a cache can't be made.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KvError {
    /// A q8_0 cache needs heads of whole blocks.
    HeadDim {
        /// Elements of a head.
        head_dim: usize,
    },
    /// The sizes multiply beyond what an address can hold.
    TooLarge,
    /// The region is smaller than [`KvLayout::bytes`].
    Region {
        /// Bytes given.
        given: usize,
        /// Bytes needed.
        needed: usize,
    },
}

impl fmt::Display for KvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HeadDim { head_dim } => write!(
                f,
                "a q8_0 KV cache needs a head size that is a multiple of 32, not {head_dim}; use an f16 cache"
            ),
            Self::TooLarge => write!(
                f,
                "the KV cache is larger than the address space; use a shorter context"
            ),
            Self::Region { given, needed } => {
                write!(f, "the KV cache needs {needed} bytes and was given {given}")
            }
        }
    }
}

impl std::error::Error for KvError {}

/// Positions that a layer with a sliding window must hold so that batches of up to `batch_max` tokens
/// can be stored before they attend; never more than the whole `context`.
#[must_use]
pub fn ring_capacity(window: usize, batch_max: usize, context: usize) -> usize {
    window.saturating_add(batch_max).min(context)
}

/// The sizes of a cache: computed before anything is allocated, for the ledger.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvLayout {
    ty: KvType,
    kv_heads: usize,
    head_dim: usize,
    /// Bytes of a block.
    pub(super) key_block: usize,
    pub(super) value_block: usize,
    pub(super) layers: Box<[Layer]>,
    bytes: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Layer {
    /// Positions, a multiple of `BLOCK`.
    pub capacity: usize,
    /// Offsets of the keys and values.
    pub keys: usize,
    pub values: usize,
}

impl KvLayout {
    /// A cache of one layer for each of `capacities` (in positions, rounded up to [`BLOCK`]).
    ///
    /// # Errors
    /// [`KvError::HeadDim`] or [`KvError::TooLarge`].
    pub fn new(
        ty: KvType,
        kv_heads: usize,
        head_dim: usize,
        capacities: impl IntoIterator<Item = usize>,
    ) -> Result<Self, KvError> {
        let width = match ty {
            KvType::F16 => head_dim.checked_next_multiple_of(16),
            KvType::Q8_0 if head_dim.is_multiple_of(GROUP) => Some(head_dim),
            KvType::Q8_0 => return Err(KvError::HeadDim { head_dim }),
        };
        let block = |elements: usize| {
            let bytes = match ty {
                KvType::F16 => elements.checked_mul(2)?,
                KvType::Q8_0 => elements.checked_add(elements / GROUP * 2)?,
            };
            bytes.checked_mul(BLOCK)
        };
        let sizes = || {
            let (key_block, value_block) = (block(head_dim)?, block(width?)?);
            let mut bytes = ALIGN; // the region may start anywhere
            let mut layers = Vec::new();
            for capacity in capacities {
                let capacity = capacity.checked_next_multiple_of(BLOCK)?;
                let blocks = kv_heads.checked_mul(capacity / BLOCK)?;
                let keys = bytes;
                let values = keys.checked_add(blocks.checked_mul(key_block)?)?;
                bytes = values.checked_add(blocks.checked_mul(value_block)?)?;
                layers.push(Layer {
                    capacity,
                    keys: keys - ALIGN,
                    values: values - ALIGN,
                });
            }
            isize::try_from(bytes).ok()?;
            Some(Self {
                ty,
                kv_heads,
                head_dim,
                key_block,
                value_block,
                layers: layers.into(),
                bytes,
            })
        };
        sizes().ok_or(KvError::TooLarge)
    }

    /// Bytes of the region that [`KvCache::new`] wants.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Layers.
    #[must_use]
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Positions that layer `layer` holds: what was asked for, rounded up to [`BLOCK`].
    #[must_use]
    pub fn capacity(&self, layer: usize) -> usize {
        self.layers[layer].capacity
    }

    /// Element type.
    #[must_use]
    pub fn ty(&self) -> KvType {
        self.ty
    }

    /// Heads of keys and values.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Elements of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.head_dim
    }
}

#[cfg(test)]
mod tests {
    use super::super::KvCache;
    use super::*;

    #[test]
    fn bytes_are_those_of_the_elements_and_one_line() {
        let layout = KvLayout::new(KvType::F16, 3, 64, [512; 30]).unwrap();
        assert_eq!(layout.bytes(), 30 * 2 * 3 * 512 * 64 * 2 + 64);
        let layout = KvLayout::new(KvType::Q8_0, 3, 64, [500; 30]).unwrap();
        assert_eq!(layout.bytes(), 30 * 2 * 3 * 512 * 68 + 64);
        assert_eq!(layout.capacity(0), 512);
        let layout = KvLayout::new(KvType::F16, 1, 20, [64]).unwrap();
        assert_eq!(layout.bytes(), 64 * (20 + 32) * 2 + 64);
        assert_eq!(ring_capacity(512, 256, 32_768), 768);
        assert_eq!(ring_capacity(512, 256, 600), 600);
    }

    #[test]
    fn errors_name_the_number_and_the_way_out() {
        let error = KvLayout::new(KvType::Q8_0, 1, 80, [64]).unwrap_err();
        assert!(error.to_string().contains("not 80"), "{error}");
        for (heads, head_dim, capacity) in [
            (usize::MAX, 64, 64),
            (1, usize::MAX - 63, 64),
            (1, 64, usize::MAX),
            (1 << 20, 1 << 20, 1 << 22),
        ] {
            let error = KvLayout::new(KvType::F16, heads, head_dim, [capacity]).unwrap_err();
            assert_eq!(error, KvError::TooLarge);
        }
        let layout = KvLayout::new(KvType::F16, 1, 64, [64]).unwrap();
        let needed = layout.bytes();
        let error = KvCache::new(layout, vec![0; needed - 1]).unwrap_err();
        let given = needed - 1;
        assert_eq!(error, KvError::Region { given, needed });
    }
}
