//! From the options of `tune` to a run's settings.

use super::Tune;
use crate::cli::storage::threads;
use crate::error::Error;
use crate::tune::model::net::Site;
use crate::tune::model::params::Scheme;
use crate::tune::optim::{Decay, Precision, Schedule};
use crate::tune::settings::{ActBits, Recompute, Settings};

/// Largest rank that makes sense: more is a full matrix.
pub(super) const RANK_MAX: u32 = 1024;
/// Most sequences of a step.
pub(super) const BATCH_MAX: u32 = 65_536;

fn usage(name: &str, why: impl std::fmt::Display) -> Error {
    Error::Usage(format!("{name}: {why}"))
}

/// `--optim-bits`.
pub(super) fn optim_bits(text: &str) -> Result<u32, String> {
    match text {
        "8" => Ok(8),
        "32" => Ok(32),
        _ => Err("8 or 32".into()),
    }
}

impl Tune {
    /// The settings, checked.
    ///
    /// # Errors
    /// An option that can't be understood, or that doesn't go with another.
    pub(super) fn settings(&self) -> Result<Settings, Error> {
        let scheme = self.scheme()?;
        let not_negative = |name, x: f32| {
            if x.is_finite() && x >= 0.0 {
                Ok(x)
            } else {
                Err(usage(name, format_args!("{x} is no number from 0 on")))
            }
        };
        let decay = Decay::from_name(&self.schedule).ok_or_else(|| {
            usage(
                "--schedule",
                format_args!("'{}' is none of cosine, linear, constant", self.schedule),
            )
        })?;
        let schedule = Schedule {
            peak: self.lr.unwrap_or(5e-4),
            warmup: self.warmup.unwrap_or(self.steps / 20),
            steps: self.steps,
            decay,
            floor: 0.0,
        }
        .checked()
        .map_err(|error| usage("--lr, --warmup", error))?;
        let act = ActBits::from_name(&self.act_bits).ok_or_else(|| {
            usage(
                "--act-bits",
                format_args!("'{}' is none of auto, 1, 2, 4, 8, bf16, f32", self.act_bits),
            )
        })?;
        let recompute = Recompute::from_name(&self.recompute).ok_or_else(|| {
            usage(
                "--recompute",
                format_args!("'{}' is none of auto, never, layers", self.recompute),
            )
        })?;
        let moments = match self.optim_bits {
            8 => Precision::Bits8,
            _ => Precision::F32,
        };
        if self.ty.is_some() && !self.full {
            return Err(usage(
                "--type",
                "an adapter has none; it goes with --full, or with leanstream merge",
            ));
        }
        let clip = not_negative("--clip", self.clip)?;
        if clip == 0.0 {
            return Err(usage("--clip", "0 leaves nothing of the gradient"));
        }
        Ok(Settings {
            scheme,
            batch: self.batch,
            steps: self.steps,
            schedule,
            weight_decay: not_negative("--weight-decay", self.weight_decay)?,
            clip,
            sparsity: not_negative("--sparsity", self.sparsity)?,
            seed: self.seed,
            act,
            recompute,
            moments,
            threads: threads(self.threads) as usize,
        })
    }

    fn scheme(&self) -> Result<Scheme, Error> {
        if self.full {
            let lora = [
                ("--rank", self.rank.is_some()),
                ("--alpha", self.alpha.is_some()),
                ("--dropout", self.dropout.is_some()),
                ("--targets", self.targets.is_some()),
            ];
            return match lora.into_iter().find(|(_, given)| *given) {
                Some((name, _)) => Err(usage(name, "is for adapters, and --full trains none")),
                None => Ok(Scheme::Full),
            };
        }
        let rank = self.rank.unwrap_or(8);
        let alpha = self.alpha.unwrap_or(2.0 * rank as f32);
        if !(alpha.is_finite() && alpha > 0.0) {
            return Err(usage(
                "--alpha",
                format_args!("{alpha} is no positive number"),
            ));
        }
        let dropout = self.dropout.unwrap_or(0.0);
        if !(0.0..1.0).contains(&dropout) {
            return Err(usage(
                "--dropout",
                format_args!("{dropout}: from 0, and below 1"),
            ));
        }
        let mut sites = [self.targets.is_none(); Site::ALL.len()];
        for name in self.targets.iter().flat_map(|list| list.split(',')) {
            let site = Site::ALL
                .into_iter()
                .find(|site| site.name() == name.trim());
            let Some(site) = site else {
                return Err(usage(
                    "--targets",
                    format_args!("'{name}' is none of q, k, v, o, gate, up, down"),
                ));
            };
            sites[site as usize] = true;
        }
        Ok(Scheme::Lora {
            rank: rank as usize,
            alpha,
            dropout,
            sites,
        })
    }
}
