//! The place of the CUDA backend.
//!
//! A GPU backend implements [`Compute`]: `submit` enqueues work and returns at once, `poll` looks at
//! what has ended and returns at once. Nothing in the port blocks, because a device delivers its
//! results (and partial results) through shared memory while storage reads are still in flight.
//!
//! The CPU backend in `platform/` implements the same port; there is no CUDA code yet.
#![no_std]

pub use leanstream_core::port::{Compute, ComputeEvent, Work};
