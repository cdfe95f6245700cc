//! `leanstream replay`: what a policy, a budget or a device would have made of a recorded run.

use std::fmt::Write as _;
use std::path::Path;

use argh::FromArgs;
use leanstream_core::sparse::retain::Name;
use serde_json::{Value, json};

use super::args::{PathArg, count, whole};
use super::output::{print, say};
use super::select::share;
use super::setup::{self, Longest};
use crate::budget::parse_size;
use crate::error::Error;
use crate::trace::{Kept, Machine, Outcome, Recall, Sets, belady_by_layer, least_slots, simulate};

/// Budgets, where none are given.
const BUDGETS: &str = "10%,25%,50%";

/// Bytes of a chunk, where neither the trace nor the command line says it.
const CHUNK_BYTES: u32 = 4096;

/// Run a recorded trace again in virtual time, under any policy, budget and storage.
///
/// The clock is made up: the first quarter of the tokens calibrates and warms up, the others count. Units that
/// were read ahead in time count as hits, and Belady's rule reads none ahead, so that a policy can have fewer
/// misses than it.
#[derive(FromArgs)]
#[argh(subcommand, name = "replay")]
pub struct Replay {
    /// the trace: LEANTRC, as `leanstream trace` writes it, or FFNTRC1; '-' for stdin
    #[argh(positional)]
    trace: PathArg,
    /// policies, a comma list (default: refine,lru-window,oneshot,static,lfu,belady)
    #[argh(option)]
    policy: Option<String>,
    /// budgets of the units alone, a comma list; sizes or shares of all units (default: those of 10%,25%,50%
    /// that are large enough)
    #[argh(option)]
    budget: Option<String>,
    /// microseconds before a read's first byte (default: 80)
    #[argh(option, default = "80", from_str_fn(count::<0>))]
    latency_us: u32,
    /// bytes per second of the storage (default: 300M)
    #[argh(option, default = "\"300M\".into()")]
    bandwidth: String,
    /// reads per second of the storage, at most; 0: as many as its bytes allow (default: 0)
    #[argh(option, default = "0", from_str_fn(count::<0>))]
    iops: u32,
    /// reads in flight, 1 to 255 (default: 32)
    #[argh(option, default = "32", from_str_fn(whole::<_, 1, 255>))]
    queue: u8,
    /// microseconds of computing a layer (default: the trace's, or 200)
    #[argh(option, from_str_fn(count::<0>))]
    compute_us: Option<u32>,
    /// microseconds of computing a stage of a layer (default: 0)
    #[argh(option, default = "0", from_str_fn(count::<0>))]
    stage_us: u32,
    /// leave out what the trace's stages foresaw
    #[argh(switch, long = "no-stages")]
    no_stages: bool,
    /// alignment of reads, a power of two (default: 4096)
    #[argh(option, default = "4096", from_str_fn(whole::<_, 1, 1_048_576>))]
    align: u32,
    /// bytes of a unit (default: the trace's; 4096 for FFNTRC1)
    #[argh(option, from_str_fn(whole::<_, 1, 16_777_216>))]
    unit_bytes: Option<u32>,
    /// share of each layer that counts as used in an FFNTRC1 trace, like 30% (default: 30%)
    #[argh(option, default = "\"30%\".into()")]
    keep: String,
    /// output: md or jsonl (default: md)
    #[argh(option, short = 'o', default = "\"md\".into()")]
    output: String,
    /// print one JSON object
    #[argh(switch)]
    json: bool,
}

/// A row of the table.
struct Row {
    policy: Name,
    budget: u64,
    share: f64,
    outcome: Outcome,
    /// Misses of Belady's rule at the same budget, where it was asked for.
    least: Option<u64>,
    /// The same with a cache of its own for each layer.
    least_by_layer: Option<u64>,
}

impl Replay {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let markdown = match self.output.as_str() {
            "md" => true,
            "jsonl" => false,
            other => return Err(Error::Usage(format!("-o {other}: md or jsonl"))),
        };
        let policies = self.policies()?;
        let keep = share(&self.keep).ok().filter(|keep| *keep <= 1.0);
        let keep = keep.ok_or_else(|| {
            Error::Usage(format!("--keep: '{}' is no share; 30% or 0.3", self.keep))
        })?;
        let mut sets = if self.trace.0.as_os_str() == "-" {
            let file = setup::read(&std::io::stdin(), Path::new("stdin"), Longest::trace())?;
            Sets::parse(&file, Path::new("stdin"), keep)?
        } else {
            Sets::load(&self.trace.0, keep)?
        };
        if self.no_stages {
            sets.forget_stages();
        }
        if sets.tokens < 2 {
            let why =
                "a trace of fewer than two tokens leaves nothing to count; record a longer run";
            return Err(Error::model(&self.trace.0, why));
        }
        let machine = self.machine(&sets)?;
        let warm = (sets.tokens / 4).max(1);
        let recall = sets.recall();
        let mut rows = Vec::new();
        let (budgets, result) = self.budgets(&sets, &machine)?;
        for budget in budgets {
            let first = rows.len();
            let (mut least, mut least_by_layer) = (None, None);
            let slots = budget / u64::from(machine.unit_bytes);
            let all = u64::from(sets.layers) * u64::from(sets.units);
            let held = slots.min(all) as u32;
            for &policy in &policies {
                let outcome = simulate(&sets, policy, held, machine, warm);
                if policy.needs_oracle() {
                    least = Some(outcome.counters.misses());
                    least_by_layer = Some(belady_by_layer(&sets, held, warm));
                }
                let share = slots as f64 / all as f64;
                rows.push(Row {
                    policy,
                    budget,
                    share,
                    outcome,
                    least: None,
                    least_by_layer: None,
                });
            }
            for row in &mut rows[first..] {
                row.least = least;
                row.least_by_layer = least_by_layer;
            }
        }
        if rows.is_empty() {
            return result;
        }
        print(&if self.json {
            let rows: Vec<Value> = rows.iter().map(object).collect();
            let stages: Vec<Value> = recall.iter().map(stage).collect();
            let all = json!({
                "model": sets.name, "tokens": sets.tokens, "layers": sets.layers,
                "units": sets.units, "unit_bytes": machine.unit_bytes,
                "stages": stages,
                "kept": sets.kept().iter().map(kept).collect::<Vec<_>>(),
                "results": rows,
            });
            format!("{all}\n")
        } else if markdown {
            table(&sets, &recall, &rows)
        } else {
            rows.iter()
                .fold(String::new(), |out, row| format!("{out}{}\n", object(row)))
        })?;
        result
    }

    fn policies(&self) -> Result<Vec<Name>, Error> {
        let Some(list) = &self.policy else {
            return Ok(Name::ALL.to_vec());
        };
        list.split(',')
            .map(|name| {
                Name::from_name(name.trim()).ok_or_else(|| {
                    let names = Name::ALL.map(Name::as_str).join(", ");
                    Error::Usage(format!("--policy: '{name}' is none of {names}"))
                })
            })
            .collect()
    }

    fn machine(&self, sets: &Sets) -> Result<Machine, Error> {
        let usage = |why: &str| Err(Error::Usage(why.into()));
        let bytes_per_s = parse_size(&self.bandwidth, None)
            .map_err(|error| Error::Usage(format!("--bandwidth: {error}")))?;
        if bytes_per_s == 0 {
            return usage("--bandwidth: at 0 bytes per second nothing would ever end");
        }
        if !self.align.is_power_of_two() {
            return usage("--align: a power of two, 1048576 at most");
        }
        let unit_bytes = self.unit_bytes.or(sets.unit_bytes).unwrap_or(CHUNK_BYTES);
        if unit_bytes == 0 || unit_bytes > 1 << 24 {
            return usage("--unit-bytes: from 1 to 16777216");
        }
        let compute_ns = match (self.compute_us, sets.compute_ns) {
            (Some(us), _) => u64::from(us) * 1000,
            (None, Some(ns)) => u64::from(ns),
            (None, None) => 200_000,
        };
        // Reading on costs less than another read while the device counts reads.
        let gap = bytes_per_s
            .checked_div(u64::from(self.iops))
            .unwrap_or(0)
            .min(64 << 10);
        Ok(Machine {
            latency_ns: u64::from(self.latency_us) * 1000,
            bytes_per_s,
            iops: u64::from(self.iops),
            reads_max: self.queue,
            align: self.align,
            gap: gap as u32,
            compute_ns,
            stage_ns: u64::from(self.stage_us) * 1000,
            unit_bytes,
        })
    }

    /// Those that hold enough units, and how the command ends: one that was asked for and is too small says so,
    /// and the others are replayed all the same.
    fn budgets(
        &self,
        sets: &Sets,
        machine: &Machine,
    ) -> Result<(Vec<u64>, Result<(), Error>), Error> {
        let unit_bytes = u64::from(machine.unit_bytes);
        let whole = u64::from(sets.layers) * u64::from(sets.units) * unit_bytes;
        let least = u64::from(least_slots(sets)) * unit_bytes;
        let (mut budgets, mut small) = (Vec::new(), Vec::new());
        for item in self.budget.as_deref().unwrap_or(BUDGETS).split(',') {
            let budget = parse_size(item.trim(), Some(whole))
                .map_err(|error| Error::Usage(format!("--budget: {error}")))?;
            if budget >= least {
                budgets.push(budget);
            } else {
                small.push((item.trim(), budget));
            }
        }
        for (item, bytes) in &small {
            say(&format!(
                "leanstream: --budget {item}: {bytes} bytes hold too few units; at least {least} ({:.1}% of all) are needed",
                least as f64 * 100.0 / whole as f64
            ));
        }
        let ended = budgets.is_empty() || self.budget.is_some() && !small.is_empty();
        Ok((budgets, if ended { Err(Error::Told(4)) } else { Ok(()) }))
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

impl Row {
    fn miss_ratio(&self) -> f64 {
        let counters = &self.outcome.counters;
        ratio(counters.misses(), counters.chosen - counters.skipped)
    }

    fn bytes_per_token(&self) -> f64 {
        ratio(
            self.outcome.counters.bytes_read,
            u64::from(self.outcome.tokens),
        )
    }

    fn redundant_ratio(&self) -> f64 {
        let counters = &self.outcome.counters;
        ratio(counters.bytes_redundant, counters.bytes_read)
    }

    fn late_ratio(&self) -> f64 {
        let counters = &self.outcome.counters;
        ratio(counters.late, counters.misses())
    }

    fn tokens_per_s(&self) -> f64 {
        ratio(u64::from(self.outcome.tokens), self.outcome.time_ns) * 1e9
    }

    /// Share of the channel's busy time behind which something was computed.
    fn overlap(&self) -> f64 {
        1.0 - ratio(self.outcome.stall_ns, self.outcome.busy_ns).min(1.0)
    }

    /// Misses as a multiple of `least`.
    fn over(&self, least: Option<u64>) -> Option<f64> {
        least
            .filter(|&least| least > 0)
            .map(|least| ratio(self.outcome.counters.misses(), least))
    }
}

fn object(row: &Row) -> Value {
    let counters = &row.outcome.counters;
    json!({
        "test": "replay",
        "policy": row.policy.as_str(),
        "budget_bytes": row.budget,
        "budget_share": row.share,
        "tokens": row.outcome.tokens,
        "used": counters.chosen - counters.skipped,
        "hits": counters.hits,
        "misses": counters.misses(),
        "late": counters.late,
        "miss_ratio": row.miss_ratio(),
        "misses_over_belady": row.over(row.least),
        "misses_over_belady_by_layer": row.over(row.least_by_layer),
        "belady_by_layer_misses": row.least_by_layer,
        "reads": counters.reads,
        "bytes_read": counters.bytes_read,
        "bytes_per_token": row.bytes_per_token(),
        "bytes_redundant": counters.bytes_redundant,
        "redundant_ratio": row.redundant_ratio(),
        "late_ratio": row.late_ratio(),
        "foreseen": counters.foreseen,
        "foreseen_used": counters.foreseen_used,
        "stall_ns": row.outcome.stall_ns,
        "overlap": row.overlap(),
        "avg_ts": row.tokens_per_s(),
    })
}

fn stage(recall: &Recall) -> Value {
    json!({
        "stage": recall.stage,
        "recall": recall.mean,
        "recall_least_layer": recall.least,
        "named_per_used": recall.named,
    })
}

fn kept(kept: &Kept) -> Value {
    json!({
        "stage": kept.stage,
        "share": kept.share,
        "named_per_kept": kept.named,
        "recall": kept.chosen[0],
        "recall_least_layer": kept.chosen[1],
        "added_recall": kept.added.map(|recall| recall[0]),
        "added_recall_least_layer": kept.added.map(|recall| recall[1]),
    })
}

fn table(sets: &Sets, recall: &[Recall], rows: &[Row]) -> String {
    let mut out = String::new();
    // Writing to a String can't fail.
    let _ = writeln!(
        out,
        "{}: {} tokens, {} layers of {} units; virtual time\n",
        sets.name, sets.tokens, sets.layers, sets.units
    );
    if !recall.is_empty() {
        let _ = writeln!(
            out,
            "| stage | recall | worst layer | named per used |\n| ---: | ---: | ---: | ---: |"
        );
        for stage in recall {
            let _ = writeln!(
                out,
                "| {} | {:.1}% | {:.1}% | {:.2} |",
                stage.stage,
                stage.mean * 100.0,
                stage.least * 100.0,
                stage.named
            );
        }
        out.push('\n');
    }
    if !sets.kept().is_empty() {
        let _ = writeln!(
            out,
            "| stage | kept | named per kept | chosen: recall, worst layer | adding most: recall, worst layer |\n\
             | ---: | ---: | ---: | ---: | ---: |"
        );
        let recall =
            |[mean, least]: [f64; 2]| format!("{:.1}%, {:.1}%", mean * 100.0, least * 100.0);
        for kept in sets.kept() {
            let _ = writeln!(
                out,
                "| {} | {:.0}% | {} | {} | {} |",
                kept.stage.map_or("gate".into(), |stage| stage.to_string()),
                kept.share * 100.0,
                kept.named,
                recall(kept.chosen),
                kept.added.map_or("-".into(), recall),
            );
        }
        out.push('\n');
    }
    let _ = writeln!(
        out,
        "| budget | policy | misses | of Belady's | of Belady's by layer \
         | late | KiB/token | redundant | stall | tokens/s |\n\
         | ---: | :--- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    );
    let multiple = |over: Option<f64>| over.map_or("-".into(), |over| format!("{over:.2}x"));
    for row in rows {
        let _ = writeln!(
            out,
            "| {:.1}% | {} | {:.1}% | {} | {} | {:.1}% | {:.0} | {:.1}% | {:.1}% | {:.2} |",
            row.share * 100.0,
            row.policy.as_str(),
            row.miss_ratio() * 100.0,
            multiple(row.over(row.least)),
            multiple(row.over(row.least_by_layer)),
            row.late_ratio() * 100.0,
            row.bytes_per_token() / 1024.0,
            row.redundant_ratio() * 100.0,
            ratio(row.outcome.stall_ns, row.outcome.time_ns) * 100.0,
            row.tokens_per_s()
        );
    }
    out
}
