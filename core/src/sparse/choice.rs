//! What a layer chose, and how it is cut into groups.

/// Groups by importance that a layer is cut into.
pub const STAGES: u32 = 8;

/// Units of a group, at most, so that few slots are enough.
pub const GROUP_MAX: u32 = 256;

/// One unit that a layer uses.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Chosen {
    /// Which unit of the bank; strictly increasing over a choice.
    pub index: u32,
    /// Expected size of what it adds to the layer's output; not negative.
    pub importance: f32,
    /// Share of the pass's tokens that use it (1 when one token is decoded).
    pub share: f32,
}

/// How a choice is cut into groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Grouping {
    /// By importance into [`STAGES`] groups (more, when they would be larger than [`GROUP_MAX`]),
    /// which may be computed in any order.
    Importance,
    /// In the order of the bank, in runs, computed in that order: prompt batches.
    Sequence,
}

impl Grouping {
    /// Units of a run.
    pub const RUN: u32 = 64;
}

/// Which chosen units are used.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Select {
    /// All.
    All,
    /// The resident ones, and of the others those among this share of the most important.
    Top(f32),
}

/// What a layer chose.
#[derive(Clone, Copy, Debug)]
pub struct Choice<'c> {
    /// Which bank.
    pub bank: u32,
    /// The units.
    pub chosen: &'c [Chosen],
    /// The gate's output by unit of the bank, in units of its root mean square, where known.
    pub scores: Option<&'c [f32]>,
    /// How to cut it.
    pub grouping: Grouping,
    /// Which to use.
    pub select: Select,
}
