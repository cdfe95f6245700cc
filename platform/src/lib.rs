//! leanstream on Linux: the drivers of [`leanstream_core`] and what the command line is made of.

pub mod alloc;
pub mod arena;
pub mod aside;
pub mod budget;
pub mod cli;
pub mod closed;
pub mod cpu;
pub mod embedded;
pub mod error;
pub mod fetch;
pub mod gguf_write;
pub mod io;
pub mod pack;
pub mod pool;
pub mod run;
pub mod sample;
pub mod signals;
pub mod synth;
pub mod text;
pub mod trace;
pub mod tune;
