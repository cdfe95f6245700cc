//! From a model's path to what a trainer is made of.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicI32;

use leanstream_core::plan::VectorId;

use super::act::Room;
use super::memory::{MemoryPlan, capacity};
use super::model::net::Net;
use super::model::params::{Names, Params, Scheme};
use super::model::store::Layout;
use super::trainer::Parts;
use crate::cpu::vector::Vector;
use crate::error::Error;
use crate::io::{self, Direct, Source};
use crate::run::model::{self, Info};

/// How to read a model that is trained.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    /// Whether past the page cache.
    pub direct: Direct,
    /// How.
    pub io: io::Options,
    /// The signal that asks to stop, 0 while there is none.
    pub stop: &'static AtomicI32,
}

/// Reads a model's header and norms, and lays out what is trained.
///
/// # Errors
/// What is wrong with the model, or with training it so.
pub fn prepare(
    path: &Path,
    scheme: Scheme,
    vector: Vector,
    reading: &Reading,
) -> Result<(Info, Parts), Error> {
    let (info, weights) = model::load(path)?;
    let refused = |why: &str| Error::model(&info.paths[0], why);
    let net = Net::new(info.hyper, &weights).map_err(refused)?;
    let source = Source::open(&info.paths, reading.direct).map_err(|error| {
        Error::io(
            &info.paths[0],
            "open it for reading",
            std::io::Error::other(error),
        )
    })?;
    let layout = match scheme {
        Scheme::Full => None,
        Scheme::Lora { .. } => Some(Layout::new(&net, source.align()).map_err(refused)?),
    };
    let vectors = &weights.vectors;
    let lens: Vec<usize> = (0..vectors.count())
        .map(|id| vectors.get(VectorId(id as u32)).len())
        .collect();
    let names = Names::of(&net, lens.len());
    let params = Params::new(&net, scheme, &lens, &names);
    let rope_factors = weights.rope_factors.map(|id| vectors.get(id).to_vec());
    let parts = Parts {
        net,
        rope_factors,
        vectors: weights.vectors,
        layout,
        source: Arc::new(source),
        io: reading.io,
        params,
        vector,
        stop: reading.stop,
    };
    Ok((info, parts))
}

/// The memory of saved activations, to be lent to a trainer.
///
/// # Errors
/// What the operating system refuses.
pub fn room(parts: &Parts, plan: &MemoryPlan) -> Result<Room, Error> {
    let pages = plan.pages_max.max(1);
    Room::new(capacity(
        &parts.net,
        plan.sizes.posts,
        plan.sizes.tokens,
        pages,
    ))
    .map_err(|error| {
        let path = parts.source.files()[0].path();
        Error::io(path, "get memory for its activations", error)
    })
}
