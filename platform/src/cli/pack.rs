//! `leanstream pack`: from a GGUF model to a file whose neurons can be read one by one.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use leanstream_core::pack::quality::{KEEPS, SHARES};
use leanstream_core::pack::{Down, Ffn, Order, Quality};
use leanstream_core::quant::QuantType;
use serde_json::json;

use super::args::{PathArg, threads};
use super::output::{print, say};
use super::setup::{self, Machine, Need};
use crate::budget::{Resident, held};
use crate::error::{Error, mib, refuse_input};
use crate::pack::{self, Gates, Options, Report, calibrate};
use crate::run::model::Headers;
use crate::run::session::Wanted;

/// Pack a model for sparse streaming: its neurons become units that can be read one by one.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "pack")]
pub struct Pack {
    /// the model: a GGUF file, or any shard of a split one
    #[argh(positional)]
    model: PathArg,
    /// the pack to be written; a file of that name is replaced when the pack is complete
    #[argh(positional)]
    out: PathArg,
    /// bytes the process may hold: 48M, 1.5G, or a share of the model's size such as 40% (default:
    /// what the machine has, less a margin)
    #[argh(option)]
    budget: Option<String>,
    /// threads (default: one a core)
    #[argh(option, short = 't', from_str_fn(threads))]
    threads: Option<u32>,
    /// the feed-forward networks: units, so that single neurons can be read, or matrices as they are,
    /// which is faster where every neuron is used (SiLU, GELU) and packs the head alone (default: units)
    #[argh(option, default = "\"units\".into()")]
    ffn: String,
    /// how down columns are stored: auto (moved without loss where the type allows it, else q8_0), or
    /// quantized anew to q8_0, q5_0 or q4_0 (default: auto)
    #[argh(option)]
    down: Option<String>,
    /// what is kept of the gates: matrix, or sketch: 4.5 or 2.6 bits a weight, which choose the neurons, whose
    /// exact gates are read with them; such a pack runs in --mode sparse only (default: matrix)
    #[argh(option)]
    gates: Option<String>,
    /// order of the units: frequency, coactivation or file (default: frequency)
    #[argh(option)]
    order: Option<String>,
    /// a text to calibrate on, or none (default: a built-in text)
    #[argh(option)]
    calibrate: Option<PathArg>,
    /// a text, of which the first 1,024 tokens are taken, or 512 of a shorter one; measures on them what leaving
    /// out neurons costs, so that --tolerance can choose how many (seventeen runs, one token at a time)
    #[argh(option)]
    quality: Option<PathArg>,
    /// print one JSON object
    #[argh(switch)]
    json: bool,
}

impl Pack {
    /// With every option at its default.
    pub(super) fn of(model: PathBuf, out: PathBuf) -> Self {
        Self {
            model: PathArg(model),
            out: PathArg(out),
            budget: None,
            threads: None,
            ffn: Ffn::Units.name().into(),
            down: None,
            gates: None,
            order: None,
            calibrate: None,
            quality: None,
            json: false,
        }
    }

    pub(super) fn execute(&self) -> Result<(), Error> {
        let ffn = self.ffn()?;
        let down = self.down()?;
        let gates = match self.gates.as_deref() {
            None | Some("matrix") => Gates::Matrix,
            Some("sketch") => Gates::Sketch,
            Some(other) => {
                return Err(Error::Usage(format!(
                    "--gates: '{other}' is not a way to keep them; matrix or sketch"
                )));
            }
        };
        let (model, out) = (&self.model.0, &self.out.0);
        let machine = Machine {
            budget: self.budget.as_deref(),
            threads: self.threads,
            ..Machine::of(model)
        };
        let texts = [&self.calibrate, &self.quality];
        let texts = texts.into_iter().flatten().map(|path| path.0.as_path());
        refuse_input(&self.out.0, texts)?;
        let text = match ffn {
            Ffn::Units => self.text(&machine)?,
            Ffn::Matrices => None,
        };
        let quality = match &self.quality {
            None => None,
            Some(_) => Some(setup::text(None, self.quality.as_ref(), Some(&machine))?),
        };
        let order = match &self.order {
            None => Order::Frequency,
            Some(name) => Order::from_name(name).ok_or_else(|| {
                Error::Usage(format!(
                    "--order: '{name}' is not an order; frequency, coactivation or file"
                ))
            })?,
        };
        if ffn == Ffn::Units && text.is_none() && self.order.is_some() && order != Order::File {
            return Err(Error::Usage(format!(
                "--order {} needs calibration: leave out --calibrate none",
                order.name()
            )));
        }
        pack::refuse_pack(&Headers::open(model)?)?;
        let (info, weights) = machine.load()?;
        let context = calibrate::context(&info.hyper);
        let need = Need {
            context,
            prompt: context,
            score: false,
            one_by_one: false,
            wanted: Wanted::BEST,
        };
        let options = Options {
            ffn,
            down,
            gates,
            order,
            calibrate: text.as_deref(),
            quality: quality.as_deref(),
            session: machine.options(&info, &weights, need, held())?,
        };
        let budget = options.session.budget;
        let mut line = Line::new();
        let packed = pack::pack(
            model,
            out,
            (&info, weights),
            &options,
            &mut |what, done, all| {
                line.show(what, done, all);
            },
        );
        line.clear();
        self.tell(&packed?, budget)
    }

    fn ffn(&self) -> Result<Ffn, Error> {
        let ffn = Ffn::from_name(&self.ffn).ok_or_else(|| {
            Error::Usage(format!(
                "--ffn: '{}' is not a way; units or matrices",
                self.ffn
            ))
        })?;
        let of_units = [
            ("--down", self.down.is_some()),
            ("--gates", self.gates.is_some()),
            ("--order", self.order.is_some()),
            ("--calibrate", self.calibrate.is_some()),
            ("--quality", self.quality.is_some()),
        ];
        match of_units.into_iter().find(|(_, given)| *given) {
            Some((name, _)) if ffn == Ffn::Matrices => Err(Error::Usage(format!(
                "{name} is about units, and --ffn matrices makes none: leave one of them out"
            ))),
            _ => Ok(ffn),
        }
    }

    /// `None`: auto.
    fn down(&self) -> Result<Option<QuantType>, Error> {
        let name = match self.down.as_deref() {
            None | Some("auto") => return Ok(None),
            Some(name) => name,
        };
        let ty = QuantType::ALL
            .into_iter()
            .find(|ty| ty.name().eq_ignore_ascii_case(name) && Down::rows(*ty).is_some());
        match ty {
            Some(ty) => Ok(Some(ty)),
            None => Err(Error::Usage(format!(
                "--down: columns can't be quantized to '{name}'; auto, q8_0, q5_0 or q4_0"
            ))),
        }
    }

    fn text(&self, machine: &Machine<'_>) -> Result<Option<Vec<u8>>, Error> {
        match &self.calibrate {
            None => Ok(Some(calibrate::TEXT.into())),
            Some(none) if none.0 == Path::new("none") => Ok(None),
            Some(_) => setup::text(None, self.calibrate.as_ref(), Some(machine)).map(Some),
        }
    }

    fn tell(&self, report: &Report, budget: u64) -> Result<(), Error> {
        let layers = &report.active_share;
        let mean = layers.iter().sum::<f64>() / layers.len().max(1) as f64;
        let (out, source) = (&self.out.0, &self.model.0);
        let loss = match report.down_loss {
            0.0 => "without loss".into(),
            loss => format!("a relative loss of {loss:.5}"),
        };
        let active = match report.calibration_tokens {
            0 => "not calibrated".into(),
            tokens => format!("{:.1}% active over {tokens} tokens", 100.0 * mean),
        };
        let gates = match report.gates {
            None => String::new(),
            Some((ty, loss)) => format!(", gates sketched in {ty} (a relative loss of {loss:.5})"),
        };
        let about = format!(
            "units of {} bytes in {} order, down columns {} ({loss}){gates}, {active}",
            report.unit_bytes,
            report.order.name(),
            report.down,
        );
        let matrices = report.ffn == Ffn::Matrices;
        let about = if matrices {
            format!(
                "the head in two planes, units of {} bytes",
                report.unit_bytes
            )
        } else {
            about
        };
        say(&format!(
            "{}: {}, {about}",
            out.display(),
            mib(report.bytes)
        ));
        if let Some(quality) = &report.quality {
            say(&losses(quality));
        }
        if !self.json {
            return Ok(());
        }
        let mut summary = json!({
            "source": source.to_string_lossy(),
            "source_sha256": report.source_sha256,
            "out": out.to_string_lossy(),
            "bytes": report.bytes,
            "ffn": report.ffn.name(),
            "unit_bytes": report.unit_bytes,
            "down": report.down,
            "down_loss": report.down_loss,
            "gates": report.gates.map_or("matrix", |(ty, _)| ty.name()),
            "gates_loss": report.gates.map_or(0.0, |(_, loss)| loss),
            "order": report.order.name(),
            "active_share": (!layers.is_empty()).then(|| json!({ "mean": mean, "layers": layers })),
            "calibration_tokens": report.calibration_tokens,
            "head": if report.head { "sketch" } else { "full" },
            "quality": report.quality.as_ref().map(|quality| json!({
                "tokens": quality.tokens,
                "in_memory": SHARES,
                "keep": KEEPS,
                "loss": quality.losses().chunks(KEEPS.len()).collect::<Vec<_>>(),
            })),
            "budget_bytes": budget,
            "peak_rss_bytes": Resident::read().map_or(0, |resident| resident.peak),
        });
        if let (true, Some(object)) = (matrices, summary.as_object_mut()) {
            for key in [
                "down",
                "down_loss",
                "order",
                "active_share",
                "calibration_tokens",
            ] {
                object.remove(key);
            }
        }
        print(&format!("{summary}\n"))
    }
}

/// What leaving out neurons costs, as a table.
fn losses(quality: &Quality) -> String {
    let mut table =
        String::from("perplexity, when of the active neurons that are not in memory\n  in memory");
    for keep in KEEPS {
        table += &format!("  {keep:>4} are read");
    }
    for (share, row) in SHARES.iter().zip(quality.losses().chunks(KEEPS.len())) {
        table += &format!("\n  {:>8.0}%", 100.0 * share);
        for loss in row {
            table += &format!("  {:>+12.1}%", 100.0 * loss);
        }
    }
    table
}

/// How often the line of progress changes at most.
const EVERY: Duration = Duration::from_millis(100);

/// One line of progress on a terminal; nothing elsewhere.
pub(super) struct Line {
    on: bool,
    last: Option<Instant>,
}

impl Line {
    pub(super) fn new() -> Self {
        Self {
            on: std::io::stderr().is_terminal(),
            last: None,
        }
    }

    pub(super) fn show(&mut self, what: &str, done: u64, all: u64) {
        if self.on && self.last.is_none_or(|last| last.elapsed() >= EVERY) {
            self.last = Some(Instant::now());
            let percent = 100.0 * done as f64 / all.max(1) as f64;
            self.write(&format!("\r\x1b[K{what}: {percent:.0}%"));
        }
    }

    pub(super) fn clear(&mut self) {
        if self.last.is_some() {
            self.write("\r\x1b[K");
        }
    }

    fn write(&self, text: &str) {
        let mut stderr = std::io::stderr().lock();
        // Nobody may be there to see it, and that is no reason to stop.
        let _ = stderr
            .write_all(text.as_bytes())
            .and_then(|()| stderr.flush());
    }
}
