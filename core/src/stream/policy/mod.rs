//! One order for fetching and evicting. A ranking is one file here.
//!
//! The engine keeps resident pieces in order of [`Worth`] and fetches a piece only into a slot of
//! lower worth:
//!
//! | worth                | who has it                                                        |
//! |----------------------|-------------------------------------------------------------------|
//! | [`Worth::EMPTY`]     | a slot that holds nothing                                         |
//! | below `AHEAD`        | used, and not worth a second stay: what read-ahead may overwrite  |
//! | [`Worth::AHEAD`]     | read, or found resident, by read-ahead and not used yet           |
//! | above `AHEAD`        | used, and kept: read-ahead passes it by                           |
//!
//! The piece that a step waits for stands above the table: if nothing else can free a slot, it takes
//! the least worthy one.

pub mod cyclic;
pub mod lru;

use crate::units::PieceId;

/// What holding a piece is worth: higher stays longer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Worth(pub u8);

impl Worth {
    /// A slot without a piece.
    pub const EMPTY: Worth = Worth(0);
    /// The least of a slot with a piece.
    pub const LEAST: Worth = Worth(1);
    /// A piece in the read-ahead window.
    pub const AHEAD: Worth = Worth(128);
    /// Kept as long as anything else can go.
    pub const MOST: Worth = Worth(255);
}

/// Ranks pieces.
pub trait Policy {
    /// The worth of `piece` once it has been used, until read-ahead comes by it again. Among equals
    /// the one used longest ago goes first. Never [`Worth::EMPTY`].
    fn used(&self, piece: PieceId) -> Worth;

    /// How many of the pieces that belong to no step (from the first on) to read when nothing else is
    /// wanted and slots are empty.
    fn loose(&self) -> u32 {
        0
    }
}
