//! What holding a unit is worth. A ranking is one file here.
//!
//! Resident units are listed by [`Worth`]; a unit is read on speculation only into a slot of lower
//! worth than its own, and a unit that the token waits for may take the least worthy slot that is
//! not in use. So fetching and evicting are one order, and the cache can't thrash.

mod belady;
mod fixed;
mod lfu;
mod lru_window;
mod oneshot;
mod policy;
mod refine;

pub use belady::Belady;
pub use fixed::Fixed;
pub use lfu::Lfu;
pub use lru_window::LruWindow;
pub use oneshot::Oneshot;
pub use policy::{Name, Policy};
pub use refine::Refine;

use crate::stream::policy::Worth;

/// Why a unit's worth is asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// This token used it. `hit`: it was resident when its layer chose.
    Used {
        /// Whether it was resident before.
        hit: bool,
    },
    /// Its layer was computed and this token did not use it. Asked only of policies that
    /// [rerank](Rules::reranks).
    Passed,
    /// It may be read because a stage foresees that it will be used; [`Seen::score`] is the
    /// stage's estimate.
    Foreseen,
}

/// What is known of a unit when its worth is asked.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Seen {
    /// Which unit.
    pub unit: u32,
    /// log2 of the decayed share of tokens that used it, this token included; -30 and less where it is
    /// as good as none.
    pub frequency_log2: f32,
    /// Tokens since it was last used; 0: this token, `u32::MAX`: never.
    pub age: u32,
    /// The gate's pre-activation in units of its layer's root mean square for this token (so it is
    /// comparable between layers), or NaN where it isn't known.
    pub score: f32,
    /// Share of calibration tokens that used it, from the pack, for policies that go [by it](Rules::by_prior); NaN
    /// otherwise.
    pub prior: f32,
    /// Tokens until its next use, where an oracle knows (replay); `u32::MAX` otherwise.
    pub next: u32,
}

/// A cap on how many units may have one worth, as segmented LRU has for its protected segment:
/// above it, the unit listed longest falls to another worth.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segment {
    /// The capped worth.
    pub worth: Worth,
    /// Units that may have it.
    pub units_max: u32,
    /// Where those beyond go.
    pub below: Worth,
}

/// What a policy wants of the store.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rules {
    /// Whether units that a token did not use are asked for again at every token.
    pub reranks: bool,
    /// By how much the worth of a unit that a token did not use may differ before it is listed anew. With
    /// any, units above what is evicted aren't either: their order is that of an earlier token.
    pub slack: u8,
    /// Whether it goes by the calibration's share.
    pub by_prior: bool,
    /// Whether stages may read on speculation before a layer's exact choice.
    pub speculates: bool,
    /// Which of equals goes first: the one listed last, or else longest ago. Of units that are all needed
    /// again, the one just used is needed last.
    pub newest_first: bool,
    /// A capped worth, if it has one.
    pub segment: Option<Segment>,
}

/// Ranks resident units.
pub trait Retain {
    /// What keeping `seen.unit` is worth from now on, between [`Worth::LEAST`] and [`Worth::MOST`].
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth;

    /// What it wants of the store; the same at any time.
    fn rules(&self) -> Rules;
}

#[cfg(test)]
mod tests {
    use super::Seen;
    use crate::sparse::log2::log2;

    /// A unit used ten tokens ago, of which the rest isn't known.
    pub(super) fn seen(frequency: f32, prior: f32) -> Seen {
        Seen {
            unit: 0,
            frequency_log2: log2(frequency),
            age: 10,
            score: f32::NAN,
            prior,
            next: u32::MAX,
        }
    }
}
