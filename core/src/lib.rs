//! The decisions of leanstream, without bytes, clocks or an operating system.
//!
//! Layers, lowest first; each may use only those above it in this list:
//!
//! - [`units`]: ids and sizes; nothing else travels between core and its drivers.
//! - [`ledger`]: who holds how many bytes of the one budget.
//! - [`quant`]: one GGUF block format a file: sizes and the readable reference decode.
//! - [`gguf`]: the GGUF header over a byte slice.
//! - [`plan`]: one architecture a file: hyper-parameters to steps, matrices and pieces.
//! - [`pack`]: what a packed model adds to a GGUF file: units, their order, sketches.
//! - [`port`]: what the engine asks of the outside world: storage and compute.
//! - [`stream`]: the sans-I/O engine that decides what to read, compute and keep.
//! - [`sparse`]: the same for units that are chosen while a pass runs.
//! - [`trace`]: recorded runs over a byte slice.
//! - [`act`]: activations that training saves: their codec, their pages, their bits.
//!
//! Not supported here: big-endian GGUF, allocation, threads, time (it arrives as an argument).
#![no_std]
#![forbid(unsafe_code)]

pub mod act;
pub mod gguf;
pub mod ledger;
pub mod pack;
pub mod plan;
pub mod port;
pub mod quant;
pub mod sparse;
pub mod stream;
pub mod trace;
pub mod units;
