//! The bytes of saved activations: what [`leanstream_core::act`] decides is done here.
//!
//! - [`pages`]: the arena; memory that can be given back.
//! - [`codec`]: kernels that quantize, decode and shrink.
//! - [`room`]: all memory of a store, made before the first step.
//! - [`saved`]: the store; [`filling`]: a tensor on its way into it.

pub mod codec;
pub mod filling;
pub mod pages;
mod place;
pub mod room;
pub mod saved;

pub use filling::Filling;
pub use pages::Pages;
pub use room::{Capacity, Layout, Room};
pub use saved::{Change, SaveError, Saved};
