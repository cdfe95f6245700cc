//! Operations of the training pass, forward and backward, one a file.
//!
//! Activations are f32, row-major: (tokens, width). Every function forks over a [`Team`], works on
//! slices that the caller lends, and allocates nothing. Results are the same bits for any number of
//! threads: rows are computed alone, and sums over rows go in the order of the rows, cut by columns.
//! Two instruction sets may differ in the last bits.
//!
//! [`Team`]: super::team::Team

mod activation;
mod arith;
mod attention;
mod dropout;
mod embedding;
mod loss;
mod norm;
mod rope;
#[cfg(test)]
pub(in crate::tune) mod testing;

pub use activation::{activate, activate_backward, relu_sq, relu_sq_backward, sparsify};
pub use arith::{add, add_bias, bias_gradient, fill, scale};
pub use attention::{AttentionShape, attention, attention_backward};
pub use dropout::{Dropout, dropout};
pub use embedding::{embed, embed_backward, embed_floats};
pub use loss::{MASKED, cross_entropy, loss_sum};
pub use norm::{
    rms_norm, rms_norm_backward, rms_norm_in_place, rms_norm_weight_gradient, scale_columns,
};
pub use rope::{Angles, Direction};

/// Floats that are worth a chunk of their own.
const CHUNK_FLOATS: usize = 8192;
/// Columns that a chunk takes where sums go over rows.
const CHUNK_COLUMNS: usize = 64;

/// Rows of `width` floats in a chunk.
fn rows_per_chunk(width: usize) -> usize {
    (CHUNK_FLOATS / width).max(1)
}
