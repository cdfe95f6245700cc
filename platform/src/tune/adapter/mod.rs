//! Adapters as GGUF files, in the format that llama.cpp loads: for a matrix `W` (outputs, inputs) two
//! thin ones, `A` (rank, inputs) and `B` (outputs, rank), so that `W + scale * alpha / rank * B A`
//! stands in its place.
//!
//! Metadata: `general.type` = `adapter`, `general.architecture`, `adapter.type` = `lora`,
//! `adapter.lora.alpha` (f32; 0 means that nothing is scaled by the rank). Tensors: `NAME.lora_a` and
//! `NAME.lora_b`, where `NAME` is the matrix' tensor in the model, such as `blk.0.attn_q.weight`.

mod read;
#[cfg(test)]
mod tests;
mod write;

pub use read::{Adapter, Pair};
pub use write::{About, Part, Precision, write};
