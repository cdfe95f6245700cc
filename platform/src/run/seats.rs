//! Which slot each piece of submitted work is in.
//!
//! The engine decides, the arena holds the bytes; the threads that compute need the way from one to
//! the other without asking either.

use std::sync::atomic::{AtomicU32, Ordering};

use leanstream_core::units::{PieceId, SlotId};

/// Piece to slot, valid for pieces of work that has been submitted and has not ended.
pub struct Seats(Box<[AtomicU32]>);

impl Seats {
    /// Seats for `pieces` pieces, none of them taken.
    pub fn new(pieces: usize) -> Self {
        Self(
            (0..pieces)
                .map(|_| AtomicU32::new(SlotId::NONE.0))
                .collect(),
        )
    }

    /// Notes where the pieces from `first` on are.
    pub fn set(&self, first: PieceId, slots: &[SlotId]) {
        for (seat, slot) in self.0[first.0 as usize..].iter().zip(slots) {
            seat.store(slot.0, Ordering::Relaxed);
        }
    }

    /// The slot that `piece` is in.
    pub fn slot(&self, piece: PieceId) -> SlotId {
        SlotId(self.0[piece.0 as usize].load(Ordering::Relaxed))
    }
}
