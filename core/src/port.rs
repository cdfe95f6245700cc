//! Everything the engine asks of the outside world. Implementations live elsewhere, one a file.

use crate::units::{Extent, PieceId, ReadId, SlotId, StepId};

/// What a storage device wants of its readers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Geometry {
    /// Offsets, lengths and memory addresses are multiples of this many bytes (a power of two).
    pub align: u32,
    /// Reads in flight at once, at most.
    pub reads_max: u16,
}

/// Fill `slot` with `extent`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadCommand {
    /// Names the read until it ends.
    pub read: ReadId,
    /// Where the bytes go: from the slot's first byte.
    pub slot: SlotId,
    /// What is read for.
    pub piece: PieceId,
    /// Which bytes.
    pub extent: Extent,
}

/// How a read ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadOutcome {
    /// Every byte of the extent that the file has is in the slot.
    Filled,
    /// The bytes came but fail their checksum.
    Corrupt,
    /// The device or the operating system refused. The backend keeps the reason.
    Failed,
}

/// Fills slots from flash.
///
/// `start` never blocks and never fails for lack of room: the engine has at most
/// [`Geometry::reads_max`] reads in flight.
pub trait Storage {
    /// Fixed for the life of the backend.
    fn geometry(&self) -> Geometry;
    /// Begin a read. Exactly one `poll` result follows for it.
    fn start(&mut self, command: ReadCommand);
    /// A read that has ended, or `None`. Never blocks.
    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)>;
    /// Block until a read may have ended or about `timeout_us` have passed.
    fn wait(&mut self, timeout_us: u32);
}

/// Run `step` over `count` ready pieces starting at `first` (all pieces of the run are consecutive
/// ids). A step without pieces has `count` 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Work {
    /// The step whose operation runs.
    pub step: StepId,
    /// First piece of the run.
    pub first: PieceId,
    /// Pieces in the run.
    pub count: u32,
    /// True for the work that starts a step: inputs may be prepared once here.
    pub opens: bool,
    /// True for the work that completes a step: outputs are final when it ends.
    pub closes: bool,
}

/// What a compute backend reports.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ComputeEvent {
    /// All of this work is done; its pieces may be released.
    Ended(Work),
    /// Part of it is done: pieces `first .. first + count` of the running work. Their results can be
    /// read; a sparse plan refines its priorities from them.
    Partial {
        /// The step it belongs to.
        step: StepId,
        /// First finished piece.
        first: PieceId,
        /// How many.
        count: u32,
    },
}

/// Runs work over filled slots. Nothing here blocks: a GPU enqueues in `submit` and delivers events
/// through shared memory; a CPU computes a bounded slice in `poll`, so that its caller can look at
/// the storage between slices.
pub trait Compute {
    /// Enqueue. `slots[i]` (`work.count` of them) holds piece `work.first + i`; the slots keep those
    /// bytes until the work's [`ComputeEvent::Ended`], but the slice itself is only lent for the call.
    /// Two works may be enqueued at once; they run, and end, in the order of submission.
    ///
    /// # Errors
    /// The work itself, when the backend can take no more now. A backend that is not
    /// [`busy`](Compute::busy) takes at least one.
    fn submit(&mut self, work: Work, slots: &[SlotId]) -> Result<(), Work>;
    /// The next event, or `None` when there is none yet. While work is submitted the loop calls this
    /// and the storage's `poll` in turn without blocking: a backend that computes elsewhere may wait
    /// here for a few microseconds instead of being asked again at once.
    fn poll(&mut self) -> Option<ComputeEvent>;
    /// True while there is something to compute: while submitted work has not ended, except for a
    /// sparse step that waits for units.
    fn busy(&self) -> bool;
}
