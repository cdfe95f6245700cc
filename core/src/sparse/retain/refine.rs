//! Ours: the probability of use, from how often a unit is used and from what its gate said.
//!
//! A gate's output is known for every neuron of a layer, also for those that stay closed: one that
//! nearly opened is likelier to open for the next token. So
//!
//! ```text
//! logit = BIAS + FREQUENCY * log2(frequency) + SCORE * score
//! ```
//!
//! where the frequency begins as the pack's prior and the score is the pre-activation in units of its
//! layer's root mean square, cut at 4 either way. The worth is that logit on a scale of levels. All
//! units of a model are as big and cost as much to read, so nothing has to be divided by it; and
//! distances to the next use are all one token, so they don't tell units apart.
//!
//! How the constants were found: logistic regression of the discounted sum of a unit's uses in the
//! tokens to come (factor 0.5 a token) over 600,000 units and tokens of 1,024 tokens of Python's
//! language reference, run by a ReLU-gated SmolLM2-135M in f32; then read off on 1,024 tokens of the
//! GNU GPL. Age, the prior as a feature beside the frequency, frequencies of two or three time scales
//! and moving averages of the score were tried and change misses by less than 1%.

use super::{Cause, Retain, Rules, Seen};
use crate::sparse::log2::log2;
use crate::stream::policy::Worth;

/// Ranks by the logit of use; reads ahead what a stage's score makes likely.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Refine {}

/// Of the probability that a unit is used by one of the next tokens.
const BIAS: f32 = 0.70;
/// A factor of two in frequency.
const FREQUENCY: f32 = 0.76;
/// One root mean square of the layer's pre-activations.
const SCORE: f32 = 0.50;
/// Scores are cut here, as they were when the constants were found.
const SCORE_MAX: f32 = 4.0;
/// The mean score of units that were used, for when it isn't said.
const SCORE_USED: f32 = 0.45;
/// The mean score of those that were not.
const SCORE_PASSED: f32 = -0.87;

/// Of the probability that this token uses a foreseen unit, fitted like the others to the gate on the
/// residual after an eighth of the layer's predecessor and attention on that: it is as good as sure
/// a fifth of a root mean square away from zero. (On the residual before the predecessor the score's
/// factor is 6: a score of 0.1 is right for 6 of 10 units there, for 9 of 10 here.)
const FORESEEN_BIAS: f32 = -0.27;
/// One root mean square of the stage's scores.
const FORESEEN_SCORE: f32 = 18.9;
/// The score of a foreseen unit for which the stage says none: right for 9 of 10.
const SCORE_FORESEEN: f32 = 0.13;

/// The logit of the least worth: everything below is as good as never used.
const LOGIT_LEAST: f32 = -10.0;
/// Levels a unit of the logit: 254 of them reach +4.
const LEVELS: f32 = 18.0;

impl Refine {
    /// The policy; what it knows of units is kept elsewhere.
    pub fn new() -> Self {
        Self {}
    }

    /// The score of a stage that is right for this share of the units it names, where it says no
    /// more of each.
    pub fn score_of(precision: f32) -> f32 {
        let share = precision.clamp(0.001, 0.999);
        let logit = (log2(share) - log2(1.0 - share)) * core::f32::consts::LN_2;
        (logit - FORESEEN_BIAS) / FORESEEN_SCORE
    }
}

/// `score` where it is known, cut to what the constants hold for.
#[inline]
fn known(score: f32, otherwise: f32) -> f32 {
    if score.is_nan() {
        otherwise
    } else {
        score.clamp(-SCORE_MAX, SCORE_MAX)
    }
}

impl Retain for Refine {
    #[inline]
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth {
        let kept = |score: f32| BIAS + FREQUENCY * seen.frequency_log2 + SCORE * score;
        let logit = match cause {
            Cause::Used { .. } => kept(known(seen.score, SCORE_USED)),
            Cause::Passed => kept(known(seen.score, SCORE_PASSED)),
            Cause::Foreseen => FORESEEN_BIAS + FORESEEN_SCORE * known(seen.score, SCORE_FORESEEN),
        };
        let level = (logit - LOGIT_LEAST) * LEVELS;
        Worth(Worth::LEAST.0 + level.clamp(0.0, 254.0) as u8)
    }

    fn rules(&self) -> Rules {
        Rules {
            reranks: true,
            slack: 2,
            speculates: true,
            // Of units that every token needs, the one just used is needed last: keeping the others saves as
            // many reads as there are slots, where the oldest first would save none.
            newest_first: true,
            ..Rules::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    fn worth(frequency: f32, score: f32, cause: Cause) -> u8 {
        let unit = Seen {
            score,
            ..seen(frequency, 0.1)
        };
        Refine::new().worth(&unit, cause).0
    }

    #[test]
    fn frequency_and_score_both_count() {
        assert!(worth(0.2, 0.0, Cause::Passed) > worth(0.1, 0.0, Cause::Passed));
        assert!(worth(0.1, -0.1, Cause::Passed) > worth(0.1, -2.0, Cause::Passed));
        assert!(
            worth(0.1, -0.1, Cause::Passed) > worth(0.12, -2.0, Cause::Passed),
            "one that nearly opened is worth more than one that is used a little more often"
        );
        let used = Cause::Used { hit: true };
        assert!(worth(0.1, f32::NAN, used) > worth(0.1, f32::NAN, Cause::Passed));
        assert_eq!(worth(0.1, 4.0, used), worth(0.1, 1e9, used));
    }

    #[test]
    fn the_scale_tells_apart_what_is_near_the_edge_of_a_cache() {
        // Half of SmolLM2's neurons are used by 4% to 30% of tokens.
        let mut before = 0;
        for step in 0..20 {
            let frequency = 0.04 * 1.12f32.powi(step);
            let now = worth(frequency, -0.5, Cause::Passed);
            assert!(now > before, "at {frequency}");
            before = now;
        }
        assert!(worth(1.0 / 65535.0, -4.0, Cause::Passed) >= 1);
        assert!(worth(1.0, 4.0, Cause::Passed) < 255);
    }

    #[test]
    fn a_stage_is_trusted_as_far_as_it_is_right() {
        assert!((Refine::score_of(0.917) - SCORE_FORESEEN).abs() < 0.02);
        let doubted = worth(0.01, Refine::score_of(0.1), Cause::Foreseen);
        let trusted = worth(0.01, Refine::score_of(0.8), Cause::Foreseen);
        let kept = worth(0.3, -0.5, Cause::Passed);
        assert!(doubted < kept && kept < trusted);
    }

    #[test]
    fn what_is_surely_needed_comes_before_what_may_be() {
        let sure = worth(0.01, 2.0, Cause::Foreseen);
        let doubtful = worth(0.01, -0.5, Cause::Foreseen);
        assert!(sure > worth(0.6, 0.5, Cause::Passed));
        assert!(doubtful < worth(0.2, -0.5, Cause::Passed));
    }
}
