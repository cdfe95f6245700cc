//! Traces of runs: recorded by the run loop, read again for replay.

mod belady_by_layer;
mod kept;
#[cfg(test)]
mod made_up;
mod record;
mod sets;
mod shape;
mod simulate;

pub use belady_by_layer::belady_by_layer;
pub use kept::Kept;
pub use record::{Meta, ReadKind, Recorder};
pub use sets::{Recall, Sets};
pub use shape::{Recorded, Shape};
pub use simulate::{Machine, Outcome, least_slots, simulate};
