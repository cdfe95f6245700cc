//! On demand, least recently used: what *LLM in a flash* does. There a window of the last few tokens'
//! neurons stays; under a fixed budget the window is as long as the budget allows. Row and column
//! of a neuron are bundled by the unit itself.

use super::{Cause, Retain, Seen};
use crate::stream::policy::Worth;

/// Everything used is worth the same, so what was used longest ago goes first.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LruWindow;

/// What a used unit is worth.
const USED: Worth = Worth(128);

impl Retain for LruWindow {
    fn worth(&mut self, _seen: &Seen, cause: Cause) -> Worth {
        match cause {
            Cause::Used { .. } => USED,
            // Nothing is read ahead, and what merely stays keeps its place.
            Cause::Passed | Cause::Foreseen => Worth::LEAST,
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
            assert_eq!(LruWindow.worth(&rare, cause), USED);
            assert_eq!(LruWindow.worth(&common, cause), USED);
        }
        assert!(!LruWindow.reranks() && !LruWindow.speculates() && !LruWindow.newest_first());
        assert_eq!(LruWindow.segment(), None);
    }
}
