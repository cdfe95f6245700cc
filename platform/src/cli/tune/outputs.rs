//! The files that `tune` makes: the adapter or model, the log, the figure.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leanstream_core::quant::QuantType;
use serde_json::json;

use super::Tune;
use super::report::Report;
use crate::aside::Aside;
use crate::budget::Resident;
use crate::cli::plot::Plot;
use crate::error::Error;
use crate::run::model::Info;
use crate::tune::export;
use crate::tune::trainer::{Step, Trainer};

/// Files that are being made.
pub(super) struct Outputs {
    /// Nobody else makes the adapter meanwhile.
    held: Option<(Aside, File)>,
    log: Option<(PathBuf, File)>,
    plot: Option<Plot>,
}

impl Outputs {
    /// Makes sure that the files can be made, before anything is trained.
    ///
    /// # Errors
    /// One that can't.
    pub fn begin(tune: &Tune, output: &Path) -> Result<Self, Error> {
        let held = Aside::create(output).map_err(|error| Error::io(output, "create it", error))?;
        let log = match &tune.log {
            None => None,
            Some(path) => {
                // A continued run adds to what it wrote before.
                let file = if tune.resume {
                    File::options().create(true).append(true).open(&path.0)
                } else {
                    File::create(&path.0)
                };
                let file = file.map_err(|error| Error::io(&path.0, "create it", error))?;
                Some((path.0.clone(), file))
            }
        };
        let plot = tune.plot.as_ref().map(|path| Plot::begin(&path.0));
        Ok(Self {
            held: Some(held),
            log,
            plot: plot.transpose()?,
        })
    }

    /// One line of the log.
    ///
    /// # Errors
    /// The disk.
    pub fn log(
        &mut self,
        trainer: &Trainer<'_>,
        step: &Step,
        took: Duration,
        eval: Option<f64>,
    ) -> Result<(), Error> {
        let Some((path, file)) = &mut self.log else {
            return Ok(());
        };
        let decoder = &trainer.decoder;
        let resident = Resident::read();
        let line = json!({
            "step": trainer.step,
            "loss": step.loss,
            "eval_loss": eval,
            "lr": step.rate,
            "grad_norm": step.norm,
            "tokens": step.tokens,
            "targets": step.targets,
            "active_ratio": step.active,
            "ms": took.as_secs_f64() * 1e3,
            "budget_bytes": decoder.watch.budget(),
            "act_limit_bytes": u64::from(decoder.saved.pool().target()) * 4096,
            "mean_bits": decoder.allotment.mean_bits(&decoder.plan),
            "recomputed": decoder.allotment.recomputed(),
            "rss_bytes": resident.map(|resident| resident.now()),
            "peak_rss_bytes": resident.map(|resident| resident.peak),
        });
        file.write_all(format!("{line}\n").as_bytes())
            .map_err(|error| Error::io(path, "write the log", error))
    }

    /// The adapter, or the model.
    ///
    /// # Errors
    /// The disk, or a value that isn't finite.
    pub fn adapter(
        &mut self,
        path: &Path,
        info: &Info,
        trainer: &Trainer<'_>,
        ty: Option<QuantType>,
    ) -> Result<(), Error> {
        // Whoever writes it takes hold of it again.
        self.held = None;
        export::write(path, info, trainer, ty)
    }

    /// The figure.
    ///
    /// # Errors
    /// The disk.
    pub fn finish(self, report: &Report) -> Result<(), Error> {
        match self.plot {
            Some(plot) => plot.finish(&report.draw()),
            None => Ok(()),
        }
    }
}
