//! What can be wrong with a pack, each with its values and the way out.

use core::fmt;

/// Why a packed model can't be used. Messages are one line, without a file name: the caller knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PackError {
    /// Written by another version of the packer.
    Version {
        /// What `lean.version` says; `None` when it is no number.
        found: Option<u32>,
    },
    /// `general.alignment` is too small to read units past the page cache.
    Alignment {
        /// What the file says, or GGUF's default.
        alignment: u64,
    },
    /// A key is absent.
    MissingKey {
        /// Which.
        key: &'static str,
    },
    /// A key has a value that can't be right.
    Key {
        /// Which.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
    },
    /// A tensor is absent.
    Missing {
        /// Its layer, if it is in one.
        layer: Option<u32>,
        /// Its name, within the layer.
        name: &'static str,
    },
    /// A layer has units in a pack that says it has none.
    Stray {
        /// Which.
        layer: u32,
    },
    /// A tensor has another type than it must have.
    Type {
        /// Its layer, if it is in one.
        layer: Option<u32>,
        /// Its name, within the layer.
        name: &'static str,
        /// The type's name.
        expected: &'static str,
        /// What the file says.
        found: &'static str,
    },
    /// A tensor has another dimension than it must have.
    Dim {
        /// Its layer, if it is in one.
        layer: Option<u32>,
        /// Its name, within the layer.
        name: &'static str,
        /// Which dimension, counted from 0, fastest first.
        axis: u8,
        /// Values along it.
        expected: u64,
        /// What the file says.
        found: u64,
    },
    /// Rows or columns that can't be stored in their types.
    Unit {
        /// The layer; `None` for the head.
        layer: Option<u32>,
        /// The width that the blocks don't divide.
        d: u32,
    },
    /// `ffn_order` isn't a permutation of the neurons.
    Order {
        /// The layer.
        layer: u32,
        /// The first unit that is wrong.
        unit: u32,
        /// What it says.
        neuron: i32,
    },
}

impl core::error::Error for PackError {}

/// A tensor's name for a message.
struct Named(Option<u32>, &'static str);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(layer) => write!(f, "blk.{layer}.{}", self.1),
            None => f.write_str(self.1),
        }
    }
}

const AGAIN: &str = "pack the model again with 'leanstream pack'";

impl fmt::Display for PackError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Version { found: None } => {
                write!(f, "lean.version is no number; {AGAIN}")
            }
            Self::Version { found: Some(found) } => write!(
                f,
                "packed in version {found} of the format, this program reads versions {} to {}; {AGAIN}",
                super::VERSION_MATRICES,
                super::VERSION
            ),
            Self::Alignment { alignment } => write!(
                f,
                "the pack is aligned to {alignment} bytes, not to a multiple of {}; {AGAIN}",
                super::ALIGNMENT
            ),
            Self::MissingKey { key } => write!(f, "the pack lacks {key}; {AGAIN}"),
            Self::Key { key, expected } => write!(f, "{key} must be {expected}; {AGAIN}"),
            Self::Missing { layer, name } => {
                write!(f, "the pack lacks tensor {}; {AGAIN}", Named(layer, name))
            }
            Self::Stray { layer } => write!(
                f,
                "lean.ffn says matrices, but layer {layer} has units; {AGAIN}"
            ),
            Self::Type {
                layer,
                name,
                expected,
                found,
            } => write!(
                f,
                "tensor {} has type {found}, it must have {expected}; {AGAIN}",
                Named(layer, name)
            ),
            Self::Dim {
                layer,
                name,
                axis,
                expected,
                found,
            } => write!(
                f,
                "tensor {} has {found} values along dimension {axis}, it must have {expected}; {AGAIN}",
                Named(layer, name)
            ),
            Self::Unit {
                layer: Some(layer),
                d,
            } => write!(
                f,
                "rows or columns of {d} values can't be stored as layer {layer} says; {AGAIN}"
            ),
            Self::Unit { layer: None, d } => {
                write!(
                    f,
                    "rows of {d} values can't be stored as the head says; {AGAIN}"
                )
            }
            Self::Order {
                layer,
                unit,
                neuron,
            } => write!(
                f,
                "blk.{layer}.ffn_order says that unit {unit} is neuron {neuron}, which isn't one or \
                 stands there twice; {AGAIN}"
            ),
        }
    }
}
