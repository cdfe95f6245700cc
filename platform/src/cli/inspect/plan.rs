//! How a model would run in a budget: who holds what, what stays, and what a token reads.

use leanstream_core::ledger::Kind;
use leanstream_core::plan::Activation;
use leanstream_core::sparse::Select;
use serde_json::{Map, Value, json};

use crate::budget::held;
use crate::cli::setup::{Machine, Need};
use crate::error::{Error, mib};
use crate::run::gap;
use crate::run::memory::{self, Request, table};
use crate::run::model::{Info, Weights};
use crate::run::packed::Packed;
use crate::run::session::{Memory, Options, Wanted};

/// The plan for one budget, as JSON and as text.
///
/// # Errors
/// A budget that is too small, or what is wrong with the model or an option.
pub(super) fn plan(
    machine: &Machine<'_>,
    context: u32,
    bandwidth: u64,
) -> Result<(Value, String), Error> {
    let (info, mut weights) = machine.load()?;
    let pass_bytes = weights.pass_bytes();
    let need = Need {
        context,
        prompt: context,
        score: false,
        one_by_one: false,
        wanted: Wanted::BEST,
    };
    let held = held();
    let options = machine.options(&info, &weights, need, held)?;
    let request = options.request(held, options.open(&info)?.align());
    let least = least(&info, &weights, &request)?;
    // The store takes the shares over when its tables are made.
    let used = weights
        .packed
        .as_ref()
        .map(|packed| Used::new(packed, info.hyper.act, &options, request.align));
    let head = weights.packed.as_ref().and_then(|packed| {
        let head = packed.head()?;
        Some((head.sketch.bytes, head.count, head.unit_bytes))
    });
    let memory = Memory::new(&info, &mut weights, &options, held)?;
    let plan = &memory.plan;
    let kept = plan.kept();
    let resident = pass_bytes as f64 * f64::from(kept) / f64::from(plan.planned.max(1));
    let units = plan.units.zip(used).map(|(plan, used)| {
        let missing = used.missing(plan.slots as usize);
        (plan, used, missing)
    });
    let of_units = units.as_ref().map_or(0.0, |(.., missing)| missing.bytes);
    let streamed = pass_bytes as f64 - resident + of_units;
    let rate = if streamed >= 1.0 {
        Some(bandwidth as f64 / streamed)
    } else {
        None
    };
    let ledger: Map<String, Value> = plan
        .ledger
        .iter()
        .map(|(kind, bytes)| (kind.name().to_owned(), bytes.into()))
        .collect();
    let mut object = json!({
        "budget_bytes": options.budget,
        "least_budget_bytes": least,
        "held_bytes": plan.ledger.total(),
        "ledger": ledger,
        "context": context,
        "batch": plan.batch,
        "slots": plan.slots,
        "slot_bytes": plan.slot_bytes,
        "pieces": plan.planned,
        "kept_pieces": kept,
        "weights_bytes": pass_bytes,
        "resident_bytes": resident as u64,
        "streamed_bytes_per_token": streamed as u64,
        "bandwidth": bandwidth,
        "disk_bound_tokens_per_s": rate,
        "head": info.head.name(),
    });
    let mut text = format!(
        "budget {} (context {context}, prompt batches of {}; the least is {}):\n{}\n  of {} of weights {} stay ({kept} of \
         {} pieces), {} are read for each token\n",
        mib(options.budget),
        plan.batch,
        mib(least),
        table(&plan.ledger),
        mib(pass_bytes),
        mib(resident as u64),
        plan.planned,
        mib((pass_bytes as f64 - resident) as u64),
    );
    if let Some((plan, used, missing)) = units {
        let count = used.shares.len();
        let room = count.min(plan.slots as usize);
        let share = room as f64 / count.max(1) as f64;
        object["units"] = json!({
            "count": count,
            "slots": plan.slots,
            "slot_bytes": plan.slot_bytes,
            "share": share,
            "reads_max": plan.reads_max,
            "used_per_token": used.per_token,
            "missing_per_token": missing.units,
            "bytes_per_token": missing.bytes as u64,
        });
        if count > 0 {
            text.push_str(&format!(
                "  of {count} units {room} have room ({:.1}%); if the most often used stay, a token uses {:.0} and reads {:.0}: \
                 about {} with what lies between\n",
                100.0 * share,
                used.per_token,
                missing.units,
                mib(missing.bytes as u64),
            ));
        }
    }
    if let Some((sketch, rows, row_bytes)) = head {
        object["head_sketch_bytes"] = sketch.into();
        object["head_rows"] = rows.into();
        object["head_row_bytes"] = row_bytes.into();
        text.push_str(&format!(
            "  the head's sketch of {} is one of the weights; its {rows} rows of {row_bytes} bytes take what slots units \
             leave, and are read as a token needs them\n",
            mib(sketch)
        ));
    }
    text.push_str(&rate.map_or(
        "  nothing is read again: as fast as memory allows\n".into(),
        |rate| {
            format!(
                "  at most {rate:.2} tokens/s at {:.2} GB/s\n",
                bandwidth as f64 / 1e9
            )
        },
    ));
    text.push_str(&format!(
        "  arena: {} slots of {} KiB, {}\n",
        plan.slots,
        plan.slot_bytes >> 10,
        mib(plan.ledger.get(Kind::Arena)),
    ));
    Ok((object, text))
}

/// The least budget that would do.
fn least(info: &Info, weights: &Weights, request: &Request) -> Result<u64, Error> {
    let request = Request {
        budget: 0,
        ..*request
    };
    match memory::plan(info, weights, &request) {
        Ok(_) => unreachable!("a plan holds something"),
        Err(Error::Budget { least, .. }) => Ok(least),
        Err(error) => Err(error),
    }
}

/// How often a packed model's units are used, by the calibration.
struct Used {
    /// Share of the tokens that use it, of each unit `(layers, ff)`.
    shares: Vec<f32>,
    /// Units of a layer.
    ff: usize,
    /// Bytes of a unit of each layer.
    bytes: Vec<u32>,
    /// Units that a token uses.
    per_token: f64,
    /// Of those that are missing, which part is read.
    read: f64,
    /// Bytes between two of them that are read along, and what reads are aligned to.
    gap: u32,
    align: u32,
}

/// What a token reads of the units, on average.
#[derive(Default)]
struct Missing {
    /// Units.
    units: f64,
    /// Bytes, with the gaps between units and the rests of sectors.
    bytes: f64,
}

impl Used {
    fn new(packed: &Packed, act: Activation, options: &Options, align: u32) -> Self {
        // Other activations leave no neuron out; the calibration has told the strong from the weak.
        let sparse = act.sparse();
        let shares: Vec<f32> = packed
            .priors()
            .map(|share| if sparse { share } else { 1.0 })
            .collect();
        Self {
            per_token: shares.iter().map(|share| f64::from(*share)).sum(),
            shares,
            ff: packed.ff(),
            bytes: packed.layers().iter().map(|l| l.unit_bytes).collect(),
            read: match options.select {
                Select::All => 1.0,
                Select::Top(keep) => f64::from(keep),
            },
            gap: options.gap.unwrap_or(gap::USUAL),
            align,
        }
    }

    /// What is read where the `slots` most often used units stay, if units were used independently.
    fn missing(&self, slots: usize) -> Missing {
        let mut order: Vec<usize> = (0..self.shares.len()).collect();
        order.sort_by(|a, b| self.shares[*b].total_cmp(&self.shares[*a]));
        let mut odds = vec![0.0; order.len()];
        for &unit in order.iter().skip(slots) {
            odds[unit] = f64::from(self.shares[unit]) * self.read;
        }
        let mut missing = Missing::default();
        for (odds, &bytes) in odds.chunks_exact(self.ff.max(1)).zip(&self.bytes) {
            let (units, read) = reads(odds, bytes, self.gap, self.align);
            missing.units += units;
            missing.bytes += read;
        }
        missing
    }
}

/// Units and bytes that are read of a layer, on average, where unit `i` is with `odds[i]`. A read goes on
/// over a gap of up to `gap` bytes to the next unit; its ends are those of sectors of `align` bytes.
fn reads(odds: &[f64], bytes: u32, gap: u32, align: u32) -> (f64, f64) {
    let (mut units, mut read) = (0.0, 0.0);
    for (unit, odd) in odds.iter().enumerate() {
        units += odd;
        // Of nothing behind this one, so far.
        let mut alone = *odd;
        for (between, next) in odds[unit + 1..]
            .iter()
            .take((gap / bytes) as usize + 1)
            .enumerate()
        {
            read += alone * next * between as f64 * f64::from(bytes);
            alone *= 1.0 - next;
        }
        // A read ends here: half a sector is lost there, and half at its beginning.
        read += alone * f64::from(align);
    }
    (units, read + units * f64::from(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All ways in which six units may be missing, weighed.
    #[test]
    fn the_average_is_over_all_that_may_be_missing() {
        let odds = [0.5, 0.25, 0.0, 0.1, 1.0, 0.3];
        let (bytes, gap, align) = (100, 150, 8);
        let (mut units, mut read) = (0.0, 0.0);
        for set in 0u32..1 << odds.len() {
            let missing = |unit: usize| set >> unit & 1 == 1;
            let weight: f64 = (0..odds.len())
                .map(|u| if missing(u) { odds[u] } else { 1.0 - odds[u] })
                .product();
            let set: Vec<usize> = (0..odds.len()).filter(|u| missing(*u)).collect();
            let mut of_set = set.len() as f64 * 100.0;
            for (at, unit) in set.iter().enumerate() {
                match set.get(at + 1) {
                    Some(next) if next - unit <= 2 => of_set += (next - unit - 1) as f64 * 100.0,
                    _ => of_set += 8.0,
                }
            }
            units += weight * set.len() as f64;
            read += weight * of_set;
        }
        let (of_units, of_read) = reads(&odds, bytes, gap, align);
        assert!((of_units - units).abs() < 1e-12, "{of_units} {units}");
        assert!((of_read - read).abs() < 1e-9, "{of_read} {read}");
        assert_eq!(reads(&[], bytes, gap, align), (0.0, 0.0));
    }
}
