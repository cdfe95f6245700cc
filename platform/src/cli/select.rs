//! How much of a packed model is computed: every active neuron, or a share of those that are not in
//! memory, given as it is or by how much quality may be lost.

use leanstream_core::sparse::Select;

use super::setup::Machine;
use crate::error::Error;
use crate::run::memory;
use crate::run::model::{Info, Weights};
use crate::run::session::Options;
use crate::run::setup::Without;

/// Of a layer's active neurons the share that sparse runs read when they are missing.
const KEEP_DEFAULT: f32 = 0.7;

/// A part that can be left out.
type Part = (&'static str, fn(&mut Without) -> &mut bool);

/// Parts that can be left out, by name.
const PARTS: [Part; 3] = [
    ("order", |without| &mut without.order),
    ("looks", |without| &mut without.looks),
    ("retention", |without| &mut without.retention),
];

/// The name of a mode.
pub fn mode(select: Select) -> &'static str {
    match select {
        Select::All => "exact",
        Select::Top(_) => "sparse",
    }
}

impl Machine<'_> {
    /// Which chosen units are used; of a pack with sketched gates or not.
    pub(super) fn select(&self, sketched: bool) -> Result<Select, Error> {
        let sparse = match self.mode {
            None => sketched || self.keep.is_some() || self.tolerance.is_some(),
            Some("exact") if self.keep.is_some() || self.tolerance.is_some() => {
                return Err(Error::Usage(
                    "--keep and --tolerance leave neurons out, --mode exact computes all: give one of them"
                        .into(),
                ));
            }
            Some("exact") if sketched => {
                return Err(Error::Usage(format!(
                    "--mode exact: {} has sketches of its gates, which may miss active neurons; it runs in --mode sparse. \
                     For exact runs pack the model with its gates: leanstream pack MODEL OUT.lean --gates matrix",
                    self.model.display()
                )));
            }
            Some("exact") => false,
            Some("sparse") => true,
            Some(other) => {
                return Err(Error::Usage(format!(
                    "--mode: '{other}' is not a mode; exact or sparse"
                )));
            }
        };
        Ok(match self.keep.unwrap_or(KEEP_DEFAULT) {
            keep if sparse => Select::Top(keep),
            _ => Select::All,
        })
    }

    /// How much higher perplexity may get, as a share.
    pub(super) fn tolerance(&self) -> Result<Option<f32>, Error> {
        let Some(text) = self.tolerance else {
            return Ok(None);
        };
        if self.keep.is_some() {
            return Err(Error::Usage(
                "--tolerance chooses what --keep says: give one of them".into(),
            ));
        }
        match share(text) {
            // Nobody means 300%.
            Ok(number) if number >= 1.0 && !text.ends_with('%') => Err(Error::Usage(format!(
                "--tolerance {text}: without % it is a share of 1; write {text}%, or {}",
                number / 100.0
            ))),
            Ok(share) => Ok(Some(share as f32)),
            Err(why) => Err(Error::Usage(format!("--tolerance: {why}; 3% or 0.03"))),
        }
    }

    /// The share of missing neurons to read so that perplexity gets no higher than that.
    pub(super) fn within(
        &self,
        tolerance: f32,
        info: &Info,
        weights: &Weights,
        options: &Options,
        held: u64,
    ) -> Result<Select, Error> {
        let Some(quality) = &info.quality else {
            return Err(Error::Usage(format!(
                "--tolerance: it wasn't measured what leaving out neurons costs {}; give --keep, or measure it: leanstream \
                 pack MODEL OUT.lean --quality TEXT",
                self.model.display()
            )));
        };
        let request = options.request(held, options.open(info)?.align());
        let plan = memory::plan(info, weights, &request)?;
        let share = in_memory(info, plan.unit_slots());
        if share >= 1.0 {
            // Whatever is read stays.
            return Ok(Select::Top(1.0));
        }
        Ok(Select::Top(quality.keep_within(share as f32, tolerance).0))
    }

    /// Which parts of the sparse scheme are left out.
    pub(super) fn without(&self, select: Select) -> Result<Without, Error> {
        let mut without = Without::default();
        for name in self.without.into_iter().flat_map(|text| text.split(',')) {
            let Some((_, part)) = PARTS.iter().find(|(part, _)| *part == name) else {
                return Err(Error::Usage(format!(
                    "--without: '{name}' is no part; order, looks or retention"
                )));
            };
            *part(&mut without) = true;
        }
        if without.order && select != Select::All {
            return Err(Error::Usage(
                "--without order has no most important units, which --mode sparse reads: leave one of them out".into(),
            ));
        }
        if without.retention && self.policy.is_some_and(|policy| policy != "refine") {
            return Err(Error::Usage(
                "--without retention takes parts from --policy refine: give no other".into(),
            ));
        }
        Ok(without)
    }
}

/// The parts that are left out, by name.
pub fn left_out(mut without: Without) -> Vec<&'static str> {
    let left = PARTS.into_iter().filter(|(_, part)| *part(&mut without));
    left.map(|(name, _)| name).collect()
}

/// The share of a packed model's neurons that `slots` have room for.
pub fn in_memory(info: &Info, slots: u32) -> f64 {
    let units = u64::from(info.hyper.layers) * u64::from(info.hyper.ff);
    // Small models have a few slots more than neurons, and a sketched head's rows share them.
    (f64::from(slots) / units.max(1) as f64).min(1.0)
}

/// How much higher perplexity is to be expected where `slots` neurons have room; `None` where it wasn't
/// measured.
pub fn expected_loss(info: &Info, options: &Options, slots: u32) -> Option<f32> {
    match options.select {
        Select::All => Some(0.0),
        Select::Top(keep) => info.quality?.loss(in_memory(info, slots) as f32, keep),
    }
}

/// The share of missing neurons that are read, as it was written: the nearest f32 has more digits.
pub fn keep(select: Select) -> Option<f64> {
    match select {
        Select::All => None,
        Select::Top(keep) => Some((f64::from(keep) * 1e6).round() / 1e6),
    }
}

/// What leaving out neurons means, in a line; `None` where none are.
pub fn told(info: &Info, options: &Options, slots: u32) -> Option<String> {
    let share = 100.0 * keep(options.select)?;
    let cost = match expected_loss(info, options, slots) {
        Some(loss) => format!(
            "perplexity about {:.1}% higher, as measured when the model was packed",
            100.0 * loss
        ),
        None => "what that costs wasn't measured (pack --quality does)".into(),
    };
    Some(format!(
        "{share:.0}% of a layer's active neurons are read when they are not in memory: {cost}"
    ))
}

/// `--keep` as it is written.
pub(super) fn keep_from(text: &str) -> Result<f32, String> {
    let found = share(text).map(|share| share as f32);
    let found = found.ok().filter(|share| *share <= 1.0);
    found.ok_or_else(|| format!("'{text}' is no share from 0 to 1; 50% or 0.5"))
}

/// A share as `3%` or `0.03`.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let (number, scale) = match text.strip_suffix('%') {
        Some(percent) => (percent, 0.01),
        None => (text, 1.0),
    };
    let number = number.parse::<f64>().ok();
    let number = number.filter(|number| *number >= 0.0 && number.is_finite());
    let why = || format!("'{text}' is no share");
    // -0 is 0.
    Ok(number.ok_or_else(why)?.abs() * scale)
}
