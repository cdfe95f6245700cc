//! Ids and sizes. Small `Copy` values: the only things that cross between core and its drivers.

/// A piece: some consecutive rows of one matrix, the unit of reading, keeping and computing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PieceId(pub u32);

/// A slot of the arena. Slots are all of one size; core knows their numbers, drivers their bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotId(pub u32);

impl SlotId {
    /// No slot: what a table of homes says of a piece that is not in memory.
    pub const NONE: SlotId = SlotId(u32::MAX);
}

/// A read in flight. Ids are reused once the read has ended.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct ReadId(pub u16);

/// A step of the plan: one operation over the activations, with the pieces it consumes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StepId(pub u32);

/// One file of a (possibly split) model, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct FileId(pub u16);

/// Bytes on flash. `offset` and `len` are multiples of [`crate::port::Geometry::align`], except
/// that `offset + len` may pass the end of the file by less than one alignment unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Which file of the model.
    pub file: FileId,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
}

/// One piece of the plan's table.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// What is read: the rows, widened to the device's alignment.
    pub extent: Extent,
    /// Bytes from the start of the slot to the first row.
    pub skew: u32,
    /// Bytes of rows, without the widening: what the accounting of useful bytes counts.
    pub bytes: u32,
}
