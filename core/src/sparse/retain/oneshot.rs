//! One prediction a layer and a segmented LRU, as *PowerInfer-2* has them: a unit comes in on
//! probation, and a second use while it stays protects it.

use super::{Cause, Retain, Rules, Seen, Segment};
use crate::stream::policy::Worth;

/// Segmented LRU with a protected segment of at most so many units.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Oneshot {
    protected_max: u32,
}

/// Used once, or fallen from protection.
const PROBATION: Worth = Worth(64);
/// Read ahead and not used yet: may push out what is on probation and nothing else.
const FORESEEN: Worth = Worth(96);
/// Used again while it stayed.
const PROTECTED: Worth = Worth(128);

impl Oneshot {
    /// For a cache of `slots` units, half of which may be protected: a probation that is shorter than
    /// what one token brings in protects nothing.
    pub fn new(slots: u32) -> Self {
        Self {
            protected_max: slots / 2,
        }
    }
}

impl Retain for Oneshot {
    fn worth(&mut self, _seen: &Seen, cause: Cause) -> Worth {
        match cause {
            Cause::Used { hit: true } => PROTECTED,
            Cause::Used { hit: false } | Cause::Passed => PROBATION,
            Cause::Foreseen => FORESEEN,
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            speculates: true,
            segment: Some(Segment {
                worth: PROTECTED,
                units_max: self.protected_max,
                below: PROBATION,
            }),
            ..Rules::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    #[test]
    fn a_second_use_protects_and_the_segment_is_capped() {
        let mut policy = Oneshot::new(100);
        let unit = seen(0.5, 0.5);
        let first = policy.worth(&unit, Cause::Used { hit: false });
        let second = policy.worth(&unit, Cause::Used { hit: true });
        let foreseen = policy.worth(&unit, Cause::Foreseen);
        let wrong = policy.worth(&unit, Cause::Passed);
        assert!(first < foreseen && foreseen < second);
        assert_eq!(wrong, first, "a wrong guess is the first to go");
        let segment = policy.rules().segment.expect("the protected one");
        assert_eq!(
            (segment.worth, segment.units_max, segment.below),
            (second, 50, first)
        );
        assert!(policy.rules().speculates && !policy.rules().reranks);
    }
}
