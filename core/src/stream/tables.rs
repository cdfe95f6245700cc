//! The engine's memory, lent in its constructor. Nothing here is meant to be read by its lender.

use crate::units::{Piece, PieceId, SlotId};

/// One operation of the plan, with the pieces it consumes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Step {
    /// First piece. Steps that have pieces take them one after the other from piece 0 on.
    pub first: PieceId,
    /// How many. 0: the step only computes.
    pub count: u32,
}

/// Everything the engine needs, by table.
pub struct Tables<'m> {
    /// Planned pieces (all steps' pieces in order), then loose ones (of no step, but useful to
    /// gather from), then `rows` row pieces, whose extents are set before each pass.
    pub pieces: &'m mut [Piece],
    /// In order of execution.
    pub steps: &'m [Step],
    /// How many of the last pieces are row pieces.
    pub rows: u32,
    /// One a piece.
    pub homes: &'m mut [SlotId],
    /// One a piece.
    pub marks: &'m mut [Mark],
    /// One a slot of the arena.
    pub slots: &'m mut [Slot],
    /// As many as may be in flight at once: [`crate::port::Geometry::reads_max`].
    pub reads: &'m mut [Read],
    /// As many as one pass may gather.
    pub gather: &'m mut [PieceId],
}

/// Where a piece stands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Place {
    /// Not in memory.
    #[default]
    Absent,
    /// A read is filling its slot, or is about to be tried again.
    Filling,
    /// In its slot, which may be evicted.
    Ready,
    /// In its slot, and the running step wants it next.
    Arrived,
    /// In its slot, in submitted work.
    Pinned,
}

/// What the engine remembers of a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Mark {
    /// The pass that used it last.
    pub(super) used: u32,
    /// The pass it was last read for.
    pub(super) read: u32,
    pub(super) place: Place,
    /// This pass gathers it and hasn't yet.
    pub(super) wanted: bool,
}

/// What the engine remembers of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Slot {
    pub(super) piece: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) list: u16,
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            piece: u32::MAX,
            prev: u32::MAX,
            next: u32::MAX,
            list: u16::MAX,
        }
    }
}

/// What the engine remembers of a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Read {
    pub(super) piece: u32,
    pub(super) slot: u32,
    pub(super) attempts: u8,
    pub(super) state: ReadState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum ReadState {
    #[default]
    Free,
    /// The storage has it.
    Flying,
    /// It failed and is to be started again.
    Again,
}
