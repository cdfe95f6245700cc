//! What an error in a saved tensor costs: measured in the backward pass, averaged, and never nothing.
//!
//! For dA = sum over rows t of p_t x_t^T, stochastic rounding of x in groups of G elements with B steps
//! gives the variance C / B^2 with C = (G / 6) sum_t |p_t|^2 sum_g R_{t,g}^2, R being the range of a
//! group. The ranges are in the metadata, p is at hand: no pass is made for it.

use super::allot::Site;

/// C of one tensor, from one backward pass: `group` elements a group, and for each row t the squared
/// length of what row t was multiplied with and the sum of its groups' squared ranges.
pub fn importance(group: u32, rows: impl IntoIterator<Item = (f32, f32)>) -> f32 {
    let sum: f64 = rows
        .into_iter()
        .map(|(factor, ranges)| f64::from(factor) * f64::from(ranges))
        .sum();
    // An element's error has variance s^2 p(1-p), s^2 / 6 on average over p.
    (sum * f64::from(group) / 6.0) as f32
}

/// What noise counts in a gradient that is `squared` long, squared, where it is a `share` of all parameters: the optimizer
/// divides each gradient by its own size. 0 where there is none, or none that is finite.
pub fn weight(share: f64, squared: f64) -> f64 {
    if squared.is_finite() && squared > 0.0 {
        share / squared
    } else {
        0.0
    }
}

/// The moving average of a tensor's importance.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Average {
    mean: f32,
    weight: f32,
}

impl Average {
    /// Counts `importance`, with the weight `1 - keep` against `keep` of all before it. What isn't a
    /// finite number from 0 on is left out.
    pub fn note(&mut self, importance: f32, keep: f32) {
        if importance.is_finite() && importance >= 0.0 {
            self.mean = keep * self.mean + (1.0 - keep) * importance;
            self.weight = keep * self.weight + (1.0 - keep);
        }
    }

    /// The two numbers that make it up, for whoever stores it.
    pub fn parts(&self) -> [f32; 2] {
        [self.mean, self.weight]
    }

    /// One from its parts; what isn't a finite number from 0 on counts as nothing.
    pub fn from_parts([mean, weight]: [f32; 2]) -> Self {
        let sane = |x: f32| x.is_finite() && x >= 0.0;
        match sane(mean) && sane(weight) {
            true => Self { mean, weight },
            false => Self::default(),
        }
    }

    /// The average of what was counted; 0 before.
    pub fn value(&self) -> f32 {
        if self.weight > 0.0 {
            self.mean / self.weight
        } else {
            0.0
        }
    }
}

/// Sets the sites' importances: the averages, but none below `share` of what it would be if all
/// importance were spread by `priors` (elements of the tensor, for want of better). At the start of
/// LoRA, where B = 0 makes every importance 0, that is by the priors alone.
///
/// # Panics
/// The lengths disagree.
pub fn floor(sites: &mut [Site], averages: &[Average], priors: &[f32], share: f32) {
    assert_eq!(sites.len(), averages.len());
    assert_eq!(sites.len(), priors.len());
    let sum = |numbers: &mut dyn Iterator<Item = f32>| numbers.map(f64::from).sum::<f64>();
    let (known, spread) = (
        sum(&mut averages.iter().map(Average::value)),
        sum(&mut priors.iter().copied()),
    );
    let scale = match known > 0.0 && spread > 0.0 {
        true => (f64::from(share) * known / spread) as f32,
        false => 1.0,
    };
    for ((site, average), prior) in sites.iter_mut().zip(averages).zip(priors) {
        site.importance = average.value().max(scale * prior);
    }
}
