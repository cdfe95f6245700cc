//! `static`: the units that calibration found hottest stay, the others share what is left by recency.

use super::{Cause, Retain, Rules, Seen};
use crate::stream::policy::Worth;

/// A hot set from the pack's calibration.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Fixed {
    hot: f32,
}

/// What a used unit outside of the hot set is worth.
const COLD: Worth = Worth(64);

/// Share of the slots, in eighths, that the hot set fills at most; the others pass through the rest.
const HOT_EIGHTHS: u64 = 7;

impl Fixed {
    /// Units with a prior of `hot` and more stay; see [`cutoff`](Self::cutoff).
    pub fn new(hot: f32) -> Self {
        Self { hot }
    }

    /// The least prior of which so many units have as much or more that they fill seven eighths of
    /// `slots` at most.
    pub fn cutoff(priors: impl Iterator<Item = f32> + Clone, slots: u32) -> f32 {
        let room = u64::from(slots) * HOT_EIGHTHS / 8;
        let fits = |cutoff: f32| priors.clone().filter(|prior| *prior >= cutoff).count() as u64;
        // Shares are kept in 65535ths, so sixteen halvings tell them all apart.
        let (mut too_low, mut enough) = (0u32, 65536u32);
        if fits(0.0) <= room {
            return 0.0;
        }
        while enough - too_low > 1 {
            let middle = (too_low + enough) / 2;
            if fits(middle as f32 / 65535.0) <= room {
                enough = middle;
            } else {
                too_low = middle;
            }
        }
        enough as f32 / 65535.0
    }
}

impl Retain for Fixed {
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth {
        match cause {
            _ if seen.prior >= self.hot => Worth::MOST,
            Cause::Used { .. } => COLD,
            Cause::Passed | Cause::Foreseen => Worth::LEAST,
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            by_prior: true,
            ..Rules::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    #[test]
    fn the_hot_set_fits_and_stays() {
        let priors = (0..1000).map(|unit| unit as f32 / 1000.0);
        let cutoff = Fixed::cutoff(priors.clone(), 80);
        let hot = priors.clone().filter(|prior| *prior >= cutoff).count();
        assert_eq!(hot, 70);
        let mut policy = Fixed::new(cutoff);
        let used = Cause::Used { hit: false };
        assert_eq!(policy.worth(&seen(0.0, 0.95), used), Worth::MOST);
        assert_eq!(policy.worth(&seen(1.0, 0.5), used), COLD);
        assert_eq!(
            Fixed::cutoff(priors.clone(), 2000),
            0.0,
            "with room, all stay"
        );
        let equal = core::iter::repeat_n(0.5, 100);
        let cutoff = Fixed::cutoff(equal.clone(), 50);
        assert!(
            equal.clone().all(|prior| prior < cutoff),
            "equals that don't fit stay out together"
        );
        let certain = core::iter::repeat_n(1.0, 100);
        assert!(Fixed::cutoff(certain, 50) > 1.0);
    }
}
