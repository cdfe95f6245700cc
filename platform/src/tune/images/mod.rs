//! The second family: classifiers of images, trained with the same codec, page pool and allotment as
//! decoders.
//!
//! - [`conv`], [`norm`], [`relu`], [`pool`]: operations, forward and backward.
//! - [`net`]: which steps a classifier has, and what each of them keeps.
//! - [`classifier`]: its passes; [`importance`]: what noise in what they save does.
//! - [`allotment`]: how many bits that gets; [`trainer`]: the steps.
//! - [`data`]: sets of images.

pub mod allotment;
mod backward;
pub mod classifier;
pub mod conv;
pub mod data;
pub mod importance;
mod lanes;
pub mod net;
pub mod norm;
pub mod pool;
#[cfg(test)]
mod reference;
pub mod relu;
#[cfg(test)]
mod tests;
pub mod trainer;
mod unit;
