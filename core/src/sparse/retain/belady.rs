//! Belady's rule: what is needed again last goes first. It needs the future, so it runs in replay
//! only, as the bound that the others are read against.

use super::{Cause, Retain, Rules, Seen};
use crate::stream::policy::Worth;

/// Ranks by [`Seen::next`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Belady;

impl Retain for Belady {
    fn worth(&mut self, seen: &Seen, _cause: Cause) -> Worth {
        Worth(255 - seen.next.min(254) as u8)
    }

    fn rules(&self) -> Rules {
        Rules {
            reranks: true,
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
    fn sooner_is_worth_more() {
        let mut before = Worth::EMPTY;
        for next in (1..=254).rev() {
            let unit = Seen {
                next,
                ..seen(0.5, 0.5)
            };
            let worth = Belady.worth(&unit, Cause::Passed);
            assert!(worth > before, "at {next}");
            before = worth;
        }
        assert_eq!(Belady.worth(&seen(1.0, 1.0), Cause::Passed), Worth::LEAST);
    }
}
