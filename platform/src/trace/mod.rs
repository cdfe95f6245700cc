//! Traces of runs: recorded by the run loop, read again for replay.

mod record;

pub use record::{Meta, ReadKind, Recorder};
