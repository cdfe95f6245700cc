//! A decoder's training pass: its layers, weights, trainable parameters, forward and backward.

mod backward;
mod budget;
pub mod buffers;
pub mod columns;
pub mod decoder;
pub mod embed;
pub mod head;
pub mod importance;
pub mod kind;
pub mod linear;
pub mod net;
pub mod params;
pub mod store;
