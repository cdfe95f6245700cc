//! Vectors of channels where the last may be part of one.

use crate::cpu::vector::lanes::Lanes;

/// Up to a vector of floats, zeros after the last.
#[inline(always)]
pub(super) fn get<L: Lanes>(l: L, from: &[f32]) -> L::V {
    if from.len() == L::N {
        l.take(from)
    } else {
        l.take_part(from, 0.0)
    }
}

/// Writes as many floats as there is room for.
#[inline(always)]
pub(super) fn set<L: Lanes>(l: L, to: &mut [f32], value: L::V) {
    if to.len() == L::N {
        l.put(to, value);
    } else {
        l.put_part(to, value);
    }
}
