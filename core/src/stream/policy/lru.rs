//! Least recently used: the baseline that the budget table is read against.

use super::{Policy, Worth};
use crate::units::PieceId;

/// Every used piece is worth the same, so the one used longest ago goes first. On a cyclic scan
/// longer than the cache that is always the piece needed soonest: everything is read every pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct Lru;

impl Policy for Lru {
    fn used(&self, _piece: PieceId) -> Worth {
        Worth::LEAST
    }
}
