//! What training leaves behind: an adapter, or a whole model.

use std::path::Path;

use leanstream_core::quant::QuantType;

use super::adapter::{self, About, Part, Precision};
use super::model::net::Site;
use super::model::params::Scheme;
use super::trainer::Trainer;
use crate::error::Error;
use crate::run::model::Info;

/// Writes it, aside and then under its name.
///
/// # Errors
/// What can't be written, or a value that isn't finite.
pub fn write(
    path: &Path,
    info: &Info,
    trainer: &Trainer<'_>,
    ty: Option<QuantType>,
) -> Result<(), Error> {
    let decoder = &trainer.decoder;
    let Scheme::Lora { alpha, .. } = decoder.params.scheme else {
        return super::whole::write(path, info, trainer, ty);
    };
    let mut names = Vec::new();
    for layer in 0..decoder.net.layers.len() {
        for site in Site::ALL {
            if let Some(pair) = decoder.params.pair(layer, site) {
                names.push((site.tensor(layer), pair));
            }
        }
    }
    let parts: Vec<Part<'_>> = names
        .iter()
        .map(|(name, pair)| Part {
            name,
            inputs: pair.inputs as u32,
            outputs: pair.outputs as u32,
            rank: pair.rank as u32,
            a: &decoder.values[pair.a()],
            b: &decoder.values[pair.b()],
        })
        .collect();
    let about = About {
        arch: info.hyper.arch.name(),
        alpha,
        name: Some(&info.name),
    };
    adapter::write(path, &about, &parts, Precision::F32).map(|_| ())
}
