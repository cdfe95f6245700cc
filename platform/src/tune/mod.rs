//! Fine-tuning inside a budget, after DAF: forward and backward passes whose saved activations are
//! quantized into a page pool.

pub mod act;
pub mod adapter;
pub mod data;
pub mod gemm;
pub mod ops;
pub mod optim;
pub mod team;
