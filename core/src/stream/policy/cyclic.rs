//! The ranking for dense plans, where every pass uses every piece once, in the same order.
//!
//! On such a scan no order of recency helps, and the next use of what was just used is always the
//! furthest. What does help is to choose some pieces and never let go of them: with `slots` slots, of
//! which `ring` carry the rest through, `slots - ring` pieces are kept and exactly
//! `planned - (slots - ring)` are read in each pass. The kept ones are spread evenly over the plan, so
//! that the demand on the device is even along the pass and is hidden behind computing everywhere.

use super::{Policy, Worth};
use crate::units::PieceId;

/// Kept pieces stay; the others pass through the ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Cyclic {
    planned: u32,
    kept: u32,
    loose: u32,
    ring: u32,
}

/// What [`Cyclic`] needs to know of a plan and its memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Pieces that belong to steps: `0 .. planned`.
    pub planned: u32,
    /// Pieces after them that belong to no step (the table of an untied embedding).
    pub loose: u32,
    /// Row pieces after those: at least one slot is left to them.
    pub rows: u32,
    /// Slots of the arena.
    pub slots: u32,
    /// Reads in flight at once, at most.
    pub reads_max: u16,
}

/// Fewer than this and a piece can't be read while another is computed and a row passes by.
const RING_MIN: u32 = 4;

impl Cyclic {
    /// Chooses the ring, then the kept set. If everything fits, everything is kept.
    ///
    /// A slot of the ring is a slot that keeps nothing: `ring` more reads in each pass than need be, of
    /// `missing`. Too small a ring, on the other hand, holds fewer reads in flight than the device
    /// needs to be busy, and how many that is isn't known here. The root of `missing` keeps both
    /// losses small; more than one and a half slots a read (one filling, half of one waiting or being
    /// computed) and two are never of use.
    pub fn new(shape: Shape) -> Self {
        let room = shape.rows.min(1);
        let missing = shape
            .planned
            .saturating_add(room)
            .saturating_sub(shape.slots);
        let reads = u32::from(shape.reads_max);
        let deep = reads + reads / 2 + 2;
        Self::with_ring(shape, deep.min(missing.isqrt() + 2).max(RING_MIN))
    }

    /// The same with a given ring; it is cut to the slots there are.
    ///
    /// # Panics
    /// If there is no slot, or no ring.
    pub fn with_ring(shape: Shape, ring: u32) -> Self {
        let Shape {
            planned,
            loose,
            rows,
            slots,
            reads_max,
        } = shape;
        assert!(slots > 0, "an engine needs a slot");
        assert!(
            ring > 0,
            "pieces that are not kept need a slot to pass through"
        );
        let room = rows.min(1);
        if planned <= slots.saturating_sub(room) {
            let left = slots - planned;
            let loose = loose.min(left.saturating_sub(rows.min(u32::from(reads_max).max(1))));
            return Self {
                planned,
                kept: planned,
                loose,
                ring: left,
            };
        }
        let ring = ring.min(slots);
        // planned > slots - room and ring > 0, so kept < planned + 1: something always passes.
        Self {
            planned,
            kept: (slots - ring).min(planned),
            loose: 0,
            ring,
        }
    }

    /// Pieces of steps that are kept.
    pub fn kept(&self) -> u32 {
        self.kept
    }

    /// Slots through which the rest passes.
    pub fn ring(&self) -> u32 {
        self.ring
    }

    /// Whether `piece`, which belongs to a step, is kept. Of any consecutive `n` pieces, `n * kept /
    /// planned` are, rounded down or up.
    pub fn keeps(&self, piece: PieceId) -> bool {
        let (kept, planned) = (u64::from(self.kept), u64::from(self.planned));
        kept == planned || (u64::from(piece.0) * kept) % planned < kept
    }
}

impl Policy for Cyclic {
    fn used(&self, piece: PieceId) -> Worth {
        if piece.0 < self.planned {
            if self.keeps(piece) {
                Worth::MOST
            } else {
                Worth::LEAST
            }
        } else if piece.0 - self.planned < self.loose {
            // Above what has passed through, below everything that is about to be used.
            Worth(Worth::AHEAD.0 / 2)
        } else {
            Worth::LEAST
        }
    }

    fn loose(&self) -> u32 {
        self.loose
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(planned: u32, slots: u32) -> Shape {
        Shape {
            planned,
            loose: 0,
            rows: 1,
            slots,
            reads_max: 4,
        }
    }

    #[test]
    fn keeps_exactly_as_many_as_it_says_and_evenly() {
        for planned in 1..if cfg!(miri) { 12 } else { 80 } {
            for slots in 1..=planned + 2 {
                let cyclic = Cyclic::new(shape(planned, slots));
                let kept = (0..planned).filter(|&p| cyclic.keeps(PieceId(p))).count() as u32;
                assert_eq!(kept, cyclic.kept());
                if planned < slots {
                    assert_eq!(kept, planned);
                    continue;
                }
                assert_eq!(kept, slots - cyclic.ring());
                // The longest run of pieces that are not kept, around the cycle.
                let mut run = 0;
                let mut longest = 0;
                for p in 0..2 * planned {
                    run = if cyclic.keeps(PieceId(p % planned)) {
                        0
                    } else {
                        run + 1
                    };
                    longest = longest.max(run);
                }
                if kept > 0 {
                    assert!(
                        longest <= (planned - kept).div_ceil(kept),
                        "{planned} {slots}"
                    );
                }
            }
        }
    }

    #[test]
    fn pieces_of_no_step_get_what_is_left() {
        let all = Shape {
            planned: 10,
            loose: 5,
            rows: 8,
            slots: 30,
            reads_max: 4,
        };
        assert_eq!(Cyclic::new(all).loose(), 5);
        assert_eq!(Cyclic::new(Shape { slots: 17, ..all }).loose(), 3);
        assert_eq!(Cyclic::new(Shape { slots: 11, ..all }).loose(), 0);
        assert_eq!(Cyclic::new(Shape { slots: 11, ..all }).kept(), 10);
        assert!(Cyclic::new(Shape { slots: 10, ..all }).kept() < 10);
    }
}
