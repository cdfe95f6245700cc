//! Why the pool refuses, in sentences that name the way out.

use core::fmt;

use super::Width;
use super::pool::TensorId;

/// Why the pool refuses. Nothing has changed then.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PoolError {
    /// Too few pages are free below the limit: shrink, release, or recompute instead of saving.
    NoRoom {
        /// Which tensor.
        tensor: TensorId,
        /// Pages that it takes.
        pages_needed: u64,
        /// Pages that are free.
        pages_free: u32,
    },
    /// The table of chunks is full.
    ChunksFull {
        /// Which tensor.
        tensor: TensorId,
        /// Entries of the table.
        chunks_max: u32,
    },
    /// The metadata slab is full.
    GroupsFull {
        /// Which tensor.
        tensor: TensorId,
        /// Entries of the slab.
        groups_max: u32,
    },
    /// There is no such tensor id.
    Unknown {
        /// Which tensor.
        tensor: TensorId,
        /// Ids are below this.
        tensors: u32,
    },
    /// It is held already.
    Held(TensorId),
    /// It isn't held: it was not saved, or was released.
    NotHeld(TensorId),
    /// It has no such chunk.
    NoChunk {
        /// Which tensor.
        tensor: TensorId,
        /// The chunk that was asked for.
        chunk: u32,
        /// How many it has.
        chunks: u32,
    },
    /// A tensor without elements, or with more chunks than can be counted.
    Shape(TensorId),
    /// Only codes shrink, and only to narrower codes.
    NotNarrower {
        /// The chunk's width.
        from: Width,
        /// What was asked for.
        to: Width,
    },
    /// The action was planned before the pool changed otherwise.
    Stale,
    /// The tables were made for fewer pages.
    Beyond {
        /// The limit that was asked for.
        pages: u32,
        /// Pages in the table.
        pages_max: u32,
    },
}

impl fmt::Display for PoolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::NoRoom {
                tensor,
                pages_needed,
                pages_free,
            } => write!(
                f,
                "activation {}: takes {pages_needed} pages, {pages_free} are free: fewer bits, \
                 recompute it, or raise the budget",
                tensor.0
            ),
            Self::ChunksFull { tensor, chunks_max } => write!(
                f,
                "activation {}: the table of {chunks_max} chunks is full: shorter sequences or a \
                 smaller batch",
                tensor.0
            ),
            Self::GroupsFull { tensor, groups_max } => write!(
                f,
                "activation {}: the metadata of {groups_max} groups is full: shorter sequences or \
                 a smaller batch",
                tensor.0
            ),
            Self::Unknown { tensor, tensors } => {
                write!(f, "activation {}: there are {tensors}", tensor.0)
            }
            Self::Held(tensor) => write!(f, "activation {}: saved twice", tensor.0),
            Self::NotHeld(tensor) => write!(f, "activation {}: not saved", tensor.0),
            Self::NoChunk {
                tensor,
                chunk,
                chunks,
            } => write!(f, "activation {}: chunk {chunk} of {chunks}", tensor.0),
            Self::Shape(tensor) => write!(f, "activation {}: impossible shape", tensor.0),
            Self::NotNarrower { from, to } => {
                write!(f, "a chunk of {from} bits can't shrink to {to}")
            }
            Self::Stale => f.write_str("the pool has changed since this was planned"),
            Self::Beyond { pages, pages_max } => write!(
                f,
                "a limit of {pages} pages, in a pool made for {pages_max}: start again with the \
                 larger budget"
            ),
        }
    }
}

impl core::error::Error for PoolError {}
