//! Packing: from a GGUF model to a `.lean` file, whose feed-forward networks can be read neuron by
//! neuron. The format is in core's `FORMAT.md`; `leanstream_core::pack` reads it.
//!
//! One matrix is held at a time, and one layer's columns. The source is passed through three times:
//! for its SHA-256, which stands at the front, for calibration, and for the tensors.

pub mod calibrate;
pub mod check;
mod columns;
mod gate;
mod head;
pub mod header;
mod layout;
mod order;
mod quality;
pub(crate) mod quantize;
pub(crate) mod source;
mod written;

use std::collections::HashSet;
use std::io::ErrorKind;
use std::path::Path;

use leanstream_core::pack::quality::{KEEPS, LOSS_KEY, SHARES, TOKENS_KEY};
use leanstream_core::pack::{self, CRC_BYTES, Ffn, Order, Quality};
use leanstream_core::plan::Hyper;
use leanstream_core::quant::QuantType;
use sha2::{Digest, Sha256};

use crate::budget::held;
use crate::error::{Error, mib, refuse_input, refuse_special};
use crate::fetch::hex;
use crate::gguf_write::{Header, WriteError, Writer};
use crate::run::model::{Headers, Info, Weights};
use crate::run::session;
use crate::signals;
use calibrate::Seen;
use layout::Layout;
use source::Source;
use written::Written;

/// What a pack has of the gates.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Gates {
    /// Their matrices.
    #[default]
    Matrix,
    /// Sketches in few bits; the exact rows are the units'.
    Sketch,
}

/// How a model is to be packed.
pub struct Options<'a> {
    /// What becomes of the feed-forward networks. Where they stay matrices, `down`, `gates`, `order` and
    /// `calibrate` say nothing.
    pub ffn: Ffn,
    /// What down columns are quantized to; `None` moves those that can be moved, and takes Q8_0 for
    /// the others.
    pub down: Option<QuantType>,
    /// What becomes of the gates.
    pub gates: Gates,
    /// How units are ordered.
    pub order: Order,
    /// What the model is calibrated on; without it, units are in the file's order.
    pub calibrate: Option<&'a [u8]>,
    /// A text on which it is measured what leaving out neurons costs.
    pub quality: Option<&'a [u8]>,
    /// How it is run for that, with a context of [`calibrate::context`]. Its budget holds for all of
    /// packing.
    pub session: session::Options,
}

/// What came of it.
#[derive(Clone, Debug)]
pub struct Report {
    /// Length of the pack.
    pub bytes: u64,
    /// SHA-256 of the source.
    pub source_sha256: String,
    /// What became of the feed-forward networks.
    pub ffn: Ffn,
    /// Bytes of a unit, in the layer where it is largest; of the head's, where no layer has any.
    pub unit_bytes: u32,
    /// `moved`, the type that columns were quantized to, or `mixed`.
    pub down: &'static str,
    /// Relative L2 error of the down matrices.
    pub down_loss: f64,
    /// How units are ordered.
    pub order: Order,
    /// Share of the neurons that were active, by layer; empty without calibration.
    pub active_share: Vec<f64>,
    /// Tokens that were counted.
    pub calibration_tokens: u32,
    /// Whether the head is in two planes.
    pub head: bool,
    /// What leaving out neurons costs, where it was measured.
    pub quality: Option<Quality>,
    /// Type of the gates' sketches and their relative L2 error, where they are sketched.
    pub gates: Option<(QuantType, f64)>,
}

/// Key of the CRC32C of each tensor, in the order of the file.
pub const CRCS_KEY: &str = "lean.tensors.crc32c";

/// What is being done, for a line of progress: its name, parts done, parts in all.
pub type Progress<'a> = dyn FnMut(&'static str, u64, u64) + 'a;

/// Packs the model at `path`, which `info` and `weights` were loaded from, into `out`. A file of that
/// name is replaced when the pack is complete, and not before.
///
/// # Errors
/// A model that can't be packed, a budget that is too small for one layer, what can't be read or
/// written.
pub fn pack(
    path: &Path,
    out: &Path,
    (info, weights): (&Info, Weights),
    options: &Options<'_>,
    progress: &mut Progress<'_>,
) -> Result<Report, Error> {
    refuse_input(out, [path])?;
    refuse_special(out)?;
    let headers = Headers::open(path)?;
    let source = Source::open(&headers)?;
    let hyper = &info.hyper;
    let layout = match options.ffn {
        Ffn::Units => Layout::new(&source, hyper, options.down, options.gates)?,
        Ffn::Matrices => Layout::head_alone(&source, hyper)?,
    };
    let text = options.calibrate.filter(|_| options.ffn == Ffn::Units);
    let measured = match options.quality {
        Some(text) => Some(quality::tokens(info, text, &options.session)?),
        None => None,
    };
    let calibrating = match text {
        Some(_) => {
            let sampled = options.order == Order::Coactivation;
            calibrate::least_budget(info, &weights, &options.session, sampled)?
        }
        None => 0,
    };
    check_budget(&source, &layout, hyper, options, held(), calibrating)?;

    let mut done = 0;
    let source_sha256 = source.sha256(|n| {
        done += n as u64;
        progress("hashing", done, source.bytes);
    })?;
    let (seen, tokens) = match text {
        None => (Vec::new(), 0),
        Some(text) => {
            let task = calibrate::Calibrate {
                source: &source,
                layers: &layout.layers,
                info,
                options: &options.session,
                text,
                sampled: options.order == Order::Coactivation,
            };
            let calibration = calibrate::calibrate(&task, weights, |done, all| {
                progress("calibrating", done as u64, all as u64);
            })?;
            (calibration.layers, calibration.tokens)
        }
    };
    let order = if seen.is_empty() {
        Order::File
    } else {
        options.order
    };
    let down = down_name(&layout);
    let mut header = Header::aligned(pack::ALIGNMENT as u32);
    copy_metadata(&headers, &mut header)?;
    let sketched = layout.layers.iter().any(|layer| layer.gate.is_some());
    header.u32(
        "lean.version",
        if sketched {
            pack::VERSION
        } else {
            pack::VERSION_MATRICES
        },
    );
    header.str("lean.source.sha256", &source_sha256);
    header.u64("lean.source.bytes", source.bytes);
    header.str("lean.ffn", options.ffn.name());
    let layers = &layout.layers;
    if options.ffn == Ffn::Units {
        unit_metadata(&mut header, &layout, hyper, order, tokens);
    }
    if let Some(text) = text {
        header.str(
            "lean.calibration.sha256",
            hex(Sha256::new().chain_update(text)),
        );
    }
    let losses = measured.as_ref().map(|_| {
        header.u32(TOKENS_KEY, 0);
        let tokens_end = header.position();
        header.f32s(LOSS_KEY, [0.0; SHARES.len() * KEEPS.len()]);
        (tokens_end, header.position())
    });
    header.u32s(CRCS_KEY, layout.items.iter().map(|_| 0));
    let crcs_end = header.position();
    let seal = header::Seal::declare(&mut header);
    for item in &layout.items {
        header.tensor(&item.name, item.ty, &item.dims);
    }
    drop(headers);

    let mut written = Written::new(
        &source,
        &layout,
        hyper,
        (&seen, tokens, order),
        options.session.threads as usize,
    );
    let mut writer = header.create(out).map_err(write_error)?;
    for (number, item) in layout.items.iter().enumerate() {
        signals::check()?;
        written.item(item, &mut writer, progress)?;
        progress("packing", number as u64 + 1, layout.items.len() as u64);
    }
    signals::check()?;
    let crcs: Vec<u8> = writer.crcs().iter().flat_map(|x| x.to_le_bytes()).collect();
    writer
        .patch(crcs_end - crcs.len() as u64, &crcs)
        .map_err(write_error)?;
    let (down_loss, gate_loss) = (written.down_loss(), written.gate_loss());
    // What follows needs the memory.
    drop(written);
    let quality = match (&measured, losses) {
        (Some(tokens), Some((tokens_end, losses_end))) => {
            let aside = writer.complete().map_err(write_error)?;
            let quality = quality::measure(aside, tokens, &options.session, progress)?;
            let losses: Vec<u8> = quality
                .losses()
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect();
            let patched = writer
                .patch(losses_end - losses.len() as u64, &losses)
                .and_then(|()| writer.patch(tokens_end - 4, &quality.tokens.to_le_bytes()));
            patched.map_err(write_error)?;
            Some(quality)
        }
        _ => None,
    };
    seal.write(&mut writer)?;
    let bytes = writer.finish().map_err(write_error)?;
    let share = |seen: &Seen| {
        let active: u64 = seen.active.iter().map(|n| u64::from(*n)).sum();
        active as f64 / (f64::from(tokens.max(1)) * seen.active.len() as f64)
    };
    let units = layers.iter().map(|layer| layer.unit.unit_bytes()).max();
    let head = layout.head.as_ref();
    let unit_bytes = units.or(head.map(|head| head.crc_at as u32 + CRC_BYTES));
    Ok(Report {
        ffn: options.ffn,
        bytes,
        source_sha256,
        unit_bytes: unit_bytes.unwrap_or(0),
        down,
        down_loss,
        order,
        active_share: seen.iter().map(share).collect(),
        calibration_tokens: tokens,
        head: layout.head.is_some(),
        quality,
        gates: layers
            .first()
            .and_then(|layer| layer.gate.as_ref())
            .map(|gate| (gate.sketch, gate_loss)),
    })
}

/// Refuses a model that is packed already.
///
/// # Errors
/// That, or a header that is wrong.
pub fn refuse_pack(headers: &Headers) -> Result<(), Error> {
    headers.with(|shards, _| match shards[0].get("lean.version") {
        None => Ok(()),
        Some(_) => {
            let (path, _) = headers.files().next().expect("a model has a file");
            Err(Error::model(
                path,
                "is a pack already; give the GGUF file that it was made from",
            ))
        }
    })
}

/// Puts the CRC of a unit's content at `crc_at`. What lies between content and CRC must be zeros.
pub fn seal(unit: &mut [u8], crc_at: usize) {
    let crc = crc32c::crc32c(&unit[..crc_at]);
    unit[crc_at..crc_at + CRC_BYTES as usize].copy_from_slice(&crc.to_le_bytes());
}

/// Whether a unit's bytes are the ones that were sealed.
pub fn is_sound(unit: &[u8], crc_at: usize) -> bool {
    crc32c::crc32c(&unit[..crc_at]).to_le_bytes() == unit[crc_at..crc_at + CRC_BYTES as usize]
}

/// What packing holds at its peak, beside what is held already; before, calibration holds `calibrating`
/// bytes in all.
fn check_budget(
    source: &Source,
    layout: &Layout,
    hyper: &Hyper,
    options: &Options<'_>,
    held: u64,
    calibrating: u64,
) -> Result<(), Error> {
    let matrix = layout.matrix_bytes(source);
    let gate = layout.gate_bytes();
    let columns = layout.columns_bytes(hyper);
    // Counts, strengths and, one layer at a time, order and statistics.
    let neurons = u64::from(hyper.ff) * (layout.layers.len() as u64 * 8 + 32);
    let threads = options.session.threads as usize;
    let head = layout
        .head
        .as_ref()
        .map_or(0, |head| head::memory_bytes(head, threads));
    // The header is composed in memory; the source's is a good measure for it.
    let first = source.tensors.iter().map(|tensor| tensor.offset).min();
    let header = 2 * first.unwrap_or(0).min(source.bytes) + (2 << 20);
    let parts = [
        ("program", held),
        ("header", header),
        ("statistics", neurons),
        ("one matrix", matrix),
        ("one gate", gate),
        ("one layer's columns", columns),
        ("head", head),
    ];
    let packing = parts
        .iter()
        .fold(0u64, |sum, (_, bytes)| sum.saturating_add(*bytes));
    let least = packing.max(calibrating);
    if least <= options.session.budget {
        return Ok(());
    }
    let before = [("calibrating, before", calibrating)];
    let before = before.iter().filter(|(_, bytes)| *bytes > 0);
    let lines = parts
        .iter()
        .chain(before)
        .map(|(name, bytes)| format!("  {name:<20} {:>12}", mib(*bytes)));
    Err(Error::Budget {
        budget: options.session.budget,
        least,
        table: lines.collect::<Vec<_>>().join("\n"),
    })
}

/// All keys of the source but those that say how its file is laid out.
pub(crate) fn copy_metadata(headers: &Headers, header: &mut Header) -> Result<(), Error> {
    headers.with(|shards, _| {
        let mut taken = HashSet::new();
        for (key, value) in shards[0].metadata() {
            let ours = key == "general.alignment" || key.starts_with("split.");
            // Of a key that stands twice, the first counts.
            if !ours && taken.insert(key) {
                header.value(key, &value);
            }
        }
        Ok(())
    })
}

/// What the file says of its units.
fn unit_metadata(header: &mut Header, layout: &Layout, hyper: &Hyper, order: Order, tokens: u32) {
    let layers = &layout.layers;
    header.str("lean.down", down_name(layout));
    header.u32s(
        "lean.down.types",
        layers.iter().map(|layer| layer.how.ty() as u32),
    );
    header.bools(
        "lean.down.moved",
        layers.iter().map(|layer| layer.how.is_moved()),
    );
    if hyper.act.gated() {
        let types = layers.iter().flat_map(|layer| layer.unit.up);
        header.u32s("lean.up.types", types.map(|(ty, _)| ty as u32));
    }
    if layers.iter().any(|layer| layer.gate.is_some()) {
        let types = layers.iter().flat_map(|layer| layer.unit.gate);
        header.u32s("lean.gate.types", types.map(|(ty, _)| ty as u32));
    }
    header.str("lean.order", order.name());
    header.u32("lean.calibration.tokens", tokens);
}

fn down_name(layout: &Layout) -> &'static str {
    let name = |layer: &layout::Layer| {
        if layer.how.is_moved() {
            "moved"
        } else {
            layer.how.ty().name()
        }
    };
    let mut names = layout.layers.iter().map(name);
    let first = names.next().unwrap_or("moved");
    if names.all(|name| name == first) {
        first
    } else {
        "mixed"
    }
}

/// What stopped a file from being written, with the way out.
pub(crate) fn write_error(error: WriteError) -> Error {
    let source = match error.source.kind() {
        kind @ (ErrorKind::StorageFull | ErrorKind::QuotaExceeded) => std::io::Error::new(
            kind,
            format!("{}; free some space or choose another place", error.source),
        ),
        kind @ ErrorKind::WouldBlock => {
            std::io::Error::new(kind, "another process is writing it: wait for it to end")
        }
        _ => error.source,
    };
    Error::io(&error.path, error.doing, source)
}

fn put(writer: &mut Writer, bytes: &[u8]) -> Result<(), Error> {
    writer.write(bytes).map_err(write_error)
}

fn put_all<const N: usize>(
    writer: &mut Writer,
    values: impl Iterator<Item = [u8; N]>,
) -> Result<(), Error> {
    for value in values {
        put(writer, &value)?;
    }
    Ok(())
}
