//! `leanstream inspect`: what is in a model, and how it would run in a budget.

mod plan;

use std::fmt::Write as _;

use leanstream_core::gguf::Value as Meta;
use leanstream_core::pack::{Ffn, PackedLayer};
use serde_json::{Value, json};

use super::output::{print, say};
use super::setup::{Machine, runs_a_model};
use crate::budget::parse_size;
use crate::error::{Error, mib};
use crate::pack::check::{Described, describe};
use crate::run::model::Headers;

/// Elements of a metadata array that are shown.
const SHOWN_MAX: usize = 6;

/// Bytes of a metadata string that are shown.
const SHOWN_BYTES: usize = 60;

runs_a_model! {
    /// Show metadata, tensors, and the memory plan for budgets.
    #[argh(subcommand, name = "inspect")]
    pub struct Inspect {
        /// positions of the KV cache in the plan (default: 512)
        #[argh(option, short = 'c', long = "ctx-size", default = "512", from_str_fn(super::args::count::<0>))]
        ctx_size: u32,
        /// bytes per second of the storage, for the plan's speed (default: 1G)
        #[argh(option, default = "\"1G\".into()")]
        bandwidth: String,
        /// leave out the list of tensors
        #[argh(switch, long = "no-tensors")]
        no_tensors: bool,
        /// print one JSON object
        #[argh(switch)]
        json: bool,
    }
}

impl Inspect {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let bandwidth = parse_size(&self.bandwidth, None)
            .map_err(|error| Error::Usage(format!("--bandwidth: {error}")))?;
        if bandwidth == 0 {
            return Err(Error::Usage(
                "--bandwidth 0: a storage that reads nothing runs nothing; give bytes per second"
                    .into(),
            ));
        }
        let headers = Headers::open(&self.model.0)?;
        let (metadata, tensors) = headers.with(|shards, _| {
            let metadata: Vec<(String, String)> = shards[0]
                .metadata()
                .map(|(key, value)| (key.to_owned(), show(&value)))
                .collect();
            let tensors: Vec<Value> = shards
                .iter()
                .flat_map(|shard| shard.tensors())
                .map(|tensor| {
                    json!({
                        "name": tensor.name,
                        "type": tensor.ty.name(),
                        "dims": &tensor.dims[..tensor.n_dims],
                        "offset": tensor.offset,
                        "bytes": tensor.bytes,
                    })
                })
                .collect();
            Ok((metadata, tensors))
        })?;
        let pack = describe(&headers)?;
        drop(headers);
        let budgets: Vec<Option<&str>> = match &self.budget {
            None => vec![None],
            Some(list) => list.split(',').map(|item| Some(item.trim())).collect(),
        };
        let mut plans = Vec::new();
        let several = budgets.len() > 1;
        let mut result = Ok(());
        for budget in budgets {
            let machine = Machine {
                budget,
                ..self.machine()
            };
            plans.push(match plan::plan(&machine, self.ctx_size, bandwidth) {
                // One that is too small says so; the others are shown all the same.
                Err(error @ Error::Budget { .. }) if several => {
                    say(&format!("leanstream: {error}"));
                    result = Err(Error::Told(error.exit_code()));
                    no_plan(&error)
                }
                other => other?,
            });
        }
        if self.json {
            let metadata: serde_json::Map<String, Value> = metadata
                .into_iter()
                .map(|(key, value)| (key, value.into()))
                .collect();
            let plans: Vec<&Value> = plans.iter().map(|(plan, _)| plan).collect();
            let mut object = json!({ "metadata": metadata, "tensors": tensors, "plans": plans });
            if let Some(pack) = &pack {
                object["pack"] = packed(pack);
            }
            print(&format!("{object}\n"))?;
            return result;
        }
        let mut out = String::new();
        // Writing to a String can't fail.
        for (key, value) in &metadata {
            let _ = writeln!(out, "{key} = {value}");
        }
        if !self.no_tensors {
            let _ = writeln!(out);
            for tensor in &tensors {
                let text = |key: &str| tensor[key].as_str().unwrap_or("").to_owned();
                let _ = writeln!(
                    out,
                    "{:<40} {:<7} {:<22} {:>12}",
                    text("name"),
                    text("type"),
                    tensor["dims"].to_string(),
                    mib(tensor["bytes"].as_u64().unwrap_or(0))
                );
            }
        }
        if let Some(pack) = &pack {
            let _ = write!(out, "\n{}", packed_text(pack));
        }
        for (_, text) in &plans {
            let _ = write!(out, "\n{text}");
        }
        print(&out)?;
        result
    }
}

/// What stands for the plan of a budget that is too small.
fn no_plan(error: &Error) -> (Value, String) {
    let Error::Budget { budget, least, .. } = error else {
        unreachable!("only budgets that are too small have no plan");
    };
    let why = error.headline();
    let object = json!({
        "budget_bytes": budget,
        "least_budget_bytes": least,
        "error": why,
    });
    (object, format!("{why}\n"))
}

/// What a pack has, as JSON.
fn packed(pack: &Described) -> Value {
    let layers = pack.layers.iter().map(|layer| {
        json!({
            "units": layer.count,
            "unit_bytes": layer.unit_bytes,
            "gate": layer.layout.gate.map(|(ty, _)| ty.name()),
            "sketch": layer.sketch.map(|sketch| sketch.ty.name()),
            "up": layer.layout.up.map(|(ty, _)| ty.name()),
            "down": layer.down.ty().name(),
            "moved": layer.down.is_moved(),
        })
    });
    json!({
        "source_sha256": pack.source_sha256,
        "source_bytes": pack.source_bytes,
        "ffn": pack.ffn.name(),
        "down": pack.down,
        "order": pack.order,
        "calibration_tokens": pack.calibration_tokens,
        "units_bytes": pack.unit_bytes(),
        "layers": layers.collect::<Vec<_>>(),
        "head": pack.head.map(|head| json!({
            "sketch_bytes": head.sketch.bytes,
            "unit_bytes": head.unit_bytes,
            "row": head.row.0.name(),
        })),
    })
}

/// The same as text.
fn packed_text(pack: &Described) -> String {
    let sizes = pack.layers.iter().map(|layer| layer.unit_bytes);
    let (least, most) = (sizes.clone().min().unwrap_or(0), sizes.max().unwrap_or(0));
    let size = if least == most {
        format!("{most}")
    } else {
        format!("{least} to {most}")
    };
    let calibrated = match pack.calibration_tokens {
        0 => "not calibrated".into(),
        tokens => format!("calibrated on {tokens} tokens"),
    };
    let head = pack.head.map_or("  head: not packed".into(), |head| {
        format!(
            "  head: a sketch of {}, and units of {} bytes ({})",
            mib(head.sketch.bytes),
            head.unit_bytes,
            head.row.0
        )
    });
    let source = format!(
        "pack of a model of {} with SHA-256 {}:",
        mib(pack.source_bytes),
        pack.source_sha256
    );
    if pack.ffn == Ffn::Matrices {
        return format!("{source}\n  feed-forward networks as matrices\n{head}\n");
    }
    let sketch = |layer: &PackedLayer| layer.sketch.map(|sketch| sketch.rows.bytes);
    let gates = match pack.layers.iter().filter_map(sketch).sum() {
        0 => "matrices".into(),
        bytes => format!("sketches of {} in all", mib(bytes)),
    };
    format!(
        "{source}\n  {} layers of {} units of {size} bytes, {} in all; {} order, \
         {calibrated}\n  gates: {gates}\n  down columns: {}\n{head}\n",
        pack.hyper.layers,
        pack.hyper.ff,
        mib(pack.unit_bytes()),
        pack.order,
        pack.down,
    )
}

/// A metadata value on one line.
fn show(value: &Meta<'_>) -> String {
    if let Some(array) = value.as_array() {
        let items: Vec<String> = array
            .values()
            .take(SHOWN_MAX)
            .map(|item| show(&item))
            .collect();
        let more = if array.len() > SHOWN_MAX {
            format!(", ... {} in all", array.len())
        } else {
            String::new()
        };
        return format!("[{}{more}]", items.join(", "));
    }
    if let Some(bytes) = value.as_bytes() {
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES)]).into_owned();
        let more = if bytes.len() > SHOWN_BYTES {
            format!("... {} bytes in all", bytes.len())
        } else {
            String::new()
        };
        return format!("{shown:?}{more}");
    }
    match (
        value.as_bool(),
        value.as_u64(),
        value.as_i64(),
        value.as_f32(),
    ) {
        (Some(flag), ..) => flag.to_string(),
        (_, Some(number), ..) => number.to_string(),
        (_, _, Some(number), _) => number.to_string(),
        (.., Some(number)) => number.to_string(),
        _ => "?".into(),
    }
}
