//! Running a model inside a budget: loading, planning memory, and passes over the weights.

pub mod advice;
pub mod attend;
pub mod buffers;
pub mod cells;
pub mod clock;
mod compute;
pub mod gap;
pub mod head;
pub mod kv;
pub mod lora;
pub mod memory;
pub mod meter;
pub mod model;
pub mod order;
pub mod packed;
pub mod pass;
pub mod perplexity;
pub mod probe;
pub mod rope;
pub mod score;
pub mod seats;
pub mod session;
pub mod setup;
pub mod sparse;
pub mod stalls;
pub mod stats;
pub mod units;
