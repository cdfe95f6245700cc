//! Activations that a training step saves for its backward pass, under a budget that may change.
//!
//! - [`pool`]: which pages hold which chunk of which tensor, at how many bits; no bytes.
//! - [`tables`]: the memory lent to the pool; [`error`]: why it refuses.
//! - [`allot`]: how many bits each tensor is worth, and which give way first; [`importance`]: why.
//! - [`codec`]: elements to codes of few bits and back.
//!
//! A saved tensor is cut into *chunks*; a chunk of 8 P elements takes as many pages of P bytes as an
//! element has bits. Two bf16 numbers for each group of elements lie apart from the pages, and don't
//! depend on the bits.

pub mod allot;
pub mod codec;
pub mod error;
pub mod importance;
pub mod pool;
pub mod tables;

use core::fmt;

/// Bits of a saved element. The discriminant is their number.
///
/// The four narrow ones are codes of a group-wise quantization, whose grids nest; the two wide ones
/// are floats as they are.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Width {
    /// One bit: the group's minimum or its maximum.
    One = 1,
    /// Two bits: 4 levels.
    Two = 2,
    /// Four bits: 16 levels.
    Four = 4,
    /// Eight bits: 256 levels.
    Eight = 8,
    /// bf16, rounded to nearest.
    Bf16 = 16,
    /// f32, exact.
    F32 = 32,
}

impl Width {
    /// All, narrowest first.
    pub const ALL: [Self; 6] = [
        Self::One,
        Self::Two,
        Self::Four,
        Self::Eight,
        Self::Bf16,
        Self::F32,
    ];

    /// Those that are codes, narrowest first.
    pub const CODES: [Self; 4] = [Self::One, Self::Two, Self::Four, Self::Eight];

    /// Bits of an element.
    pub fn bits(self) -> u32 {
        self as u32
    }

    /// Whether elements are codes, with a minimum and a scale for each group.
    pub fn is_codes(self) -> bool {
        self <= Self::Eight
    }

    /// Steps of the grid, B = 2^bits - 1; none for floats.
    pub fn steps(self) -> Option<u32> {
        self.is_codes().then(|| (1 << self.bits()) - 1)
    }

    /// The next narrower codes; none below one bit, and none for floats.
    pub fn narrower(self) -> Option<Self> {
        match self {
            Self::Eight => Some(Self::Four),
            Self::Four => Some(Self::Two),
            Self::Two => Some(Self::One),
            Self::One | Self::Bf16 | Self::F32 => None,
        }
    }
}

impl fmt::Display for Width {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("bf16"),
            Self::F32 => f.write_str("f32"),
            codes => write!(f, "{}", codes.bits()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_in_order_and_halved() {
        assert!(Width::ALL.is_sorted());
        for pair in Width::CODES.windows(2) {
            assert_eq!(pair[1].narrower(), Some(pair[0]));
            assert_eq!(2 * pair[0].bits(), pair[1].bits());
            let (few, many) = (pair[0].steps().unwrap(), pair[1].steps().unwrap());
            assert_eq!(many % few, 0, "the grids nest");
        }
        assert_eq!(Width::One.narrower(), None);
        assert_eq!(Width::Bf16.narrower().or(Width::F32.narrower()), None);
        assert_eq!(Width::Bf16.steps(), None);
    }
}
