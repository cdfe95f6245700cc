//! What `tune` tells: progress on a terminal, a summary at the end.

use std::io::{IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};

use super::Tune;
use crate::budget::Resident;
use crate::cli::output::{Out, say};
use crate::cli::plot::{Chart, Line};
use crate::error::{Error, mib};
use crate::tune::model::kind::Kind;
use crate::tune::trainer::{Step, Trainer};

/// How often progress is shown.
const SHOW_EVERY: Duration = Duration::from_millis(500);

/// What was seen so far.
pub(super) struct Report {
    title: String,
    steps: u64,
    output: String,
    losses: Vec<(f64, f64)>,
    evals: Vec<(f64, f64)>,
    seconds: Vec<f64>,
    tokens: u64,
    active: Option<f64>,
    shown: Option<Instant>,
    terminal: bool,
}

impl Report {
    /// Nothing yet.
    pub fn new(tune: &Tune) -> Self {
        let name = |path: &std::path::Path| {
            let name = path.file_name().unwrap_or_default();
            name.to_string_lossy().into_owned()
        };
        Self {
            title: format!("{} on {}", name(&tune.model.0), name(&tune.data.0)),
            steps: tune.steps,
            output: tune.output.0.display().to_string(),
            losses: Vec::new(),
            evals: Vec::new(),
            seconds: Vec::new(),
            tokens: 0,
            active: None,
            shown: None,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// A step was done.
    pub fn stepped(&mut self, step: &Step, took: Duration) {
        self.losses
            .push((self.losses.len() as f64 + 1.0, step.loss));
        self.seconds.push(took.as_secs_f64());
        self.tokens += step.tokens;
        self.active = step.active;
    }

    /// The loss on the other data.
    pub fn evaluated(&mut self, step: u64, loss: f64) {
        self.evals.push((step as f64, loss));
    }

    /// A line on a terminal that is written over.
    pub fn progress(&mut self, trainer: &Trainer<'_>, step: &Step) {
        let last = trainer.step == self.steps;
        let shown = self.shown.is_some_and(|at| at.elapsed() < SHOW_EVERY);
        if !self.terminal || (shown && !last) {
            return;
        }
        self.shown = Some(Instant::now());
        let decoder = &trainer.decoder;
        let pool = decoder.saved.pool();
        let end = if last { "\n" } else { "" };
        let _ = write!(
            std::io::stderr(),
            "\r\x1b[Kstep {}/{}, loss {:.4}, {:.0} tokens/s, activations {} of {} ({:.2} bits){end}",
            trainer.step,
            self.steps,
            step.loss,
            step.tokens as f64 / self.seconds.last().copied().unwrap_or(1.0),
            mib(decoder.saved.peak_bytes()),
            mib(u64::from(pool.target()) * 4096),
            decoder.allotment.mean_bits(&decoder.plan),
        );
    }

    /// The losses as a picture.
    pub fn draw(&self) -> String {
        let mut lines = vec![Line {
            name: "loss".into(),
            points: self.losses.clone(),
        }];
        if !self.evals.is_empty() {
            lines.push(Line {
                name: "held out".into(),
                points: self.evals.clone(),
            });
        }
        Chart {
            title: &self.title,
            x: "step",
            y: "loss",
            from_zero: false,
            lines,
        }
        .draw()
    }

    /// The summary, to stdout as JSON or to stderr in words.
    ///
    /// # Errors
    /// Stdout.
    pub fn print(
        &self,
        as_json: bool,
        trainer: &Trainer<'_>,
        evaluated: bool,
    ) -> Result<(), Error> {
        let decoder = &trainer.decoder;
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let ends = |points: &[(f64, f64)]| {
            let loss = |point: Option<&(f64, f64)>| point.map(|point| point.1);
            (loss(points.first()), loss(points.last()))
        };
        let (first, last) = ends(&self.losses);
        let (eval_first, eval_last) = ends(&self.evals);
        let act_peak = decoder.act_peak_bytes();
        let peak = Resident::peak();
        if !as_json {
            let held_out = match (eval_first, eval_last) {
                (Some(first), Some(last)) if evaluated => {
                    format!(", held out {first:.4} to {last:.4}")
                }
                _ => String::new(),
            };
            // A run that goes on where it had ended has no losses.
            let learned = match (first, last) {
                (Some(first), Some(last)) => format!(", loss {first:.4} to {last:.4}"),
                _ => String::new(),
            };
            let active = match self.active {
                Some(share) => format!(", {:.1}% of the neurons active", share * 100.0),
                None => String::new(),
            };
            say(&format!(
                "leanstream: {} steps{learned}{held_out}{active}; {median:.2} s a step, activations at most {} \
                 ({:.2} bits), peak memory {} of {}; wrote {}",
                trainer.step,
                mib(act_peak),
                decoder.allotment.mean_bits(&decoder.plan),
                mib(peak),
                mib(decoder.watch.budget()),
                self.output,
            ));
            return Ok(());
        }
        let (hyper, posts) = (&decoder.net.hyper, decoder.sizes.posts);
        let saved = || {
            Kind::ALL
                .into_iter()
                .filter(|kind| kind.width(hyper, posts) > 0)
        };
        let by_kind = |of: &dyn Fn(Kind) -> Value| -> Map<String, Value> {
            saved()
                .map(|kind| (kind.name().to_owned(), of(kind)))
                .collect()
        };
        let bits = by_kind(&|kind| json!(decoder.allotment.bits_of(&decoder.plan, kind)));
        let importances = by_kind(&|kind| json!(decoder.allotment.importance_of(kind)));
        let store = decoder.store.as_ref();
        let summary = json!({
            "steps": trainer.step,
            "loss_first": first,
            "loss_last": last,
            "eval_loss_first": eval_first,
            "eval_loss": eval_last,
            "act_peak_bytes": act_peak,
            "act_f32_bytes": decoder.allotment.f32_bytes(),
            "mean_bits": decoder.allotment.mean_bits(&decoder.plan),
            "bits": bits,
            "active_ratio": self.active,
            "importance": importances,
            "recomputed": decoder.allotment.recomputed(),
            "peak_rss_bytes": peak,
            "budget_bytes": decoder.watch.budget(),
            "s_per_step": median,
            "tokens_per_s": self.tokens as f64 / self.seconds.iter().sum::<f64>().max(1e-9),
            "tokens": self.tokens,
            "parameters": decoder.params.count,
            "bytes_read": store.map_or(0, |store| store.bytes_read),
            "stall_ms": store.map_or(0.0, |store| store.stalled.as_secs_f64() * 1e3),
            "weights_kept_bytes": store.map_or(0, |store| store.kept_bytes()),
            "io_mode": store.map(|store| store.storage().io_mode()),
            "output": self.output,
        });
        Out::new().write(format!("{summary}\n").as_bytes())
    }
}
