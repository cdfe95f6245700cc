//! Decayed frequency alone.

use super::{Cause, Retain, Rules, Seen};
use crate::stream::policy::Worth;

/// Ranks by the decayed share of tokens that used a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Lfu;

impl Retain for Lfu {
    fn worth(&mut self, seen: &Seen, _cause: Cause) -> Worth {
        // Shares are kept in 65535ths: 16 octaves, of 15 levels each.
        let level = (seen.frequency_log2 + 16.0) * 15.0;
        Worth(1 + level.clamp(0.0, 254.0) as u8)
    }

    fn rules(&self) -> Rules {
        Rules {
            reranks: true,
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

    #[test]
    fn more_often_is_worth_more() {
        let mut before = Worth::EMPTY;
        for power in (0..=16).rev() {
            let frequency = 1.0 / (1u32 << power) as f32;
            let worth = Lfu.worth(&seen(frequency, 0.0), Cause::Passed);
            assert!(worth > before, "at {frequency}");
            before = worth;
        }
        assert_eq!(Lfu.worth(&seen(0.0, 1.0), Cause::Passed), Worth::LEAST);
        let close = |frequency| Lfu.worth(&seen(frequency, 0.0), Cause::Passed);
        assert!(close(0.105) > close(0.1), "a twentieth is told apart");
    }
}
