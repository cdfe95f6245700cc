//! Streaming: which pieces to read, compute and keep, and when.
//!
//! - [`engine`]: the state machine: events in, `Copy` actions out, memory lent by its caller.
//! - [`tables`]: that memory: steps, marks, slots, reads.
//! - [`queue`]: slots in order of worth, O(1) for every operation.
//! - [`policy`]: what a piece is worth once used: one ranking a file.
//! - [`drive`]: the one loop between the engine, a storage and a compute backend.

pub mod drive;
pub mod engine;
mod fetch;
pub mod policy;
pub mod queue;
mod run;
pub mod tables;

pub use engine::{Action, Counters, Engine, Event, Fault, Lost};
pub use policy::{Policy, Worth, cyclic::Cyclic, lru::Lru};
pub use tables::{Mark, Read, Slot, Step, Tables};
