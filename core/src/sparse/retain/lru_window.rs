//! On demand, least recently used: what *LLM in a flash* does. There a window of the last few tokens'
//! neurons stays; under a fixed budget the window is as long as the budget allows. Row and column
//! of a neuron are bundled by the unit itself.

use super::{Cause, Retain, Rules, Seen};
use crate::stream::policy::Worth;

/// Everything used is worth the same, so what was used longest ago goes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LruWindow {
    /// Whether it takes what is foreseen, which the published way doesn't: to see what foresight alone
    /// does.
    pub ahead: bool,
}

/// What a used unit is worth.
const USED: Worth = Worth(128);

/// What a foreseen one is worth, where any is taken: it comes before all that was used.
const AHEAD: Worth = Worth(160);

impl Retain for LruWindow {
    fn worth(&mut self, _seen: &Seen, cause: Cause) -> Worth {
        match cause {
            Cause::Used { .. } => USED,
            Cause::Foreseen if self.ahead => AHEAD,
            // Nothing is read ahead, and what merely stays keeps its place.
            Cause::Passed | Cause::Foreseen => Worth::LEAST,
        }
    }

    fn rules(&self) -> Rules {
        Rules {
            speculates: self.ahead,
            ..Rules::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    #[test]
    fn only_the_order_of_use_counts() {
        let (rare, common) = (seen(0.01, 0.01), seen(0.9, 0.9));
        for hit in [false, true] {
            let cause = Cause::Used { hit };
            for ahead in [false, true] {
                let mut lru = LruWindow { ahead };
                assert_eq!(lru.worth(&rare, cause), USED);
                assert_eq!(lru.worth(&common, cause), USED);
                assert_eq!(lru.worth(&rare, Cause::Passed), Worth::LEAST);
            }
        }
        let mut lru = LruWindow::default();
        assert_eq!(lru.rules(), Rules::default());
        assert_eq!(lru.worth(&common, Cause::Foreseen), Worth::LEAST);
        let mut ahead = LruWindow { ahead: true };
        assert!(ahead.rules().speculates && ahead.worth(&rare, Cause::Foreseen) > USED);
    }
}
