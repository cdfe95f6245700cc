//! `leanstream merge`: adapters become part of a model.

use leanstream_core::quant::QuantType;
use serde_json::json;

use super::args::{LoraArg, PathArg, TypeArg, threads};
use super::output::{print, say};
use super::pack::Line;
use super::storage;
use crate::budget::Resident;
use crate::error::{Error, mib};
use crate::run::lora::Use;
use crate::tune::merge::{self, Options, Report};

/// Merge LoRA adapters into a model: a new GGUF file that runs without them.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "merge")]
pub struct Merge {
    /// the model: a GGUF file, or any shard of a split one
    #[argh(option, short = 'm', long = "model")]
    model: PathArg,
    /// a LoRA adapter (GGUF) to merge, FILE or FILE:SCALE; may be given several times
    #[argh(option)]
    lora: Vec<LoraArg>,
    /// the new model; a file of that name is replaced when it is complete
    #[argh(option, short = 'o')]
    out: PathArg,
    /// type of the merged matrices, such as q8_0 or f16 (default: each keeps its own; rounding to few bits
    /// again costs a part of what the adapter learned)
    #[argh(option, long = "type")]
    ty: Option<TypeArg>,
    /// threads (default: one a core)
    #[argh(option, short = 't', from_str_fn(threads))]
    threads: Option<u32>,
    /// print one JSON object
    #[argh(switch)]
    json: bool,
}

/// An error of this share of the change is worth a word: SmolLM2 lost nearly all that an adapter had taught it to a
/// change of 0.96% stored in Q4_1 with an error of 0.93%.
const LOSS_TOLD: f64 = 0.25;

impl Merge {
    pub(super) fn execute(&self) -> Result<(), Error> {
        if self.lora.is_empty() {
            return Err(Error::Usage(
                "give an adapter to merge: --lora FILE[:SCALE]".into(),
            ));
        }
        let uses: Vec<Use> = self.lora.iter().map(|lora| lora.0.clone()).collect();
        let options = Options {
            uses: &uses,
            ty: self.ty.map(|ty| ty.0),
            threads: storage::threads(self.threads) as usize,
        };
        let mut line = Line::new();
        let merged = merge::merge(
            &self.model.0,
            &self.out.0,
            &options,
            &mut |what, done, all| line.show(what, done, all),
        );
        line.clear();
        self.tell(&merged?)
    }

    fn tell(&self, report: &Report) -> Result<(), Error> {
        for (ty, count) in &report.instead {
            say(&format!(
                "leanstream: {count} matrices are Q8_0 now: nothing is quantized to {ty}; --type chooses another type"
            ));
        }
        say(&format!(
            "{}: {}, {} matrices changed by {:.3}% and stored with an error of {:.3}%",
            self.out.0.display(),
            mib(report.bytes),
            report.merged,
            100.0 * report.change,
            100.0 * report.loss,
        ));
        let exact = [QuantType::F16, QuantType::BF16, QuantType::F32];
        let best = self.ty.is_some_and(|ty| exact.contains(&ty.0));
        if report.loss > LOSS_TOLD * report.change && !best {
            let or = match report.fewer {
                true => ", or q8_0 where matrices have fewer bits now,",
                false => "",
            };
            say(&format!(
                "leanstream: that error is {:.0}% of the change, so what the adapter learned may be lost; --type f16{or} \
                 keeps more of it",
                100.0 * report.loss / report.change
            ));
        }
        if !self.json {
            return Ok(());
        }
        let summary = json!({
            "source": self.model.0.to_string_lossy(),
            "out": self.out.0.to_string_lossy(),
            "bytes": report.bytes,
            "merged": report.merged,
            "change": report.change,
            "loss": report.loss,
            "peak_rss_bytes": Resident::read().map_or(0, |resident| resident.peak),
        });
        print(&format!("{summary}\n"))
    }
}
