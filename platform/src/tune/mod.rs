//! Fine-tuning inside a budget, after DAF: forward and backward passes whose saved activations are
//! quantized into a page pool.

pub mod act;
pub mod adapter;
pub mod allotment;
pub mod checkpoint;
pub mod data;
pub mod export;
pub mod gemm;
pub mod images;
mod lent;
pub mod memory;
pub mod merge;
pub mod model;
pub mod ops;
pub mod optim;
pub mod packing;
pub mod settings;
pub mod setup;
mod sites;
pub mod team;
pub mod trainer;
pub mod watch;
pub mod whole;
