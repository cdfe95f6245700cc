//! Sequences of a step packed into micro-batches: one after the other, as many as fit.

use super::data::{Data, MASKED};
use super::model::decoder::Batch;

/// One micro-batch's tokens, in lent memory.
pub struct Packing {
    tokens: Vec<u32>,
    targets: Vec<u32>,
    positions: Vec<u32>,
    segments: Vec<(usize, usize)>,
    len: usize,
}

/// Which sequences: of the endless run of epochs, or as they stand in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Shuffled, for training.
    Shuffled,
    /// For evaluation.
    File,
}

impl Packing {
    /// Room for `tokens` tokens.
    pub fn new(tokens: usize) -> Self {
        Self {
            tokens: vec![0; tokens],
            targets: vec![MASKED; tokens],
            positions: vec![0; tokens],
            segments: Vec::with_capacity(tokens.div_ceil(2)),
            len: 0,
        }
    }

    /// Bytes of [`Packing::new`].
    pub fn bytes(tokens: usize) -> u64 {
        (tokens * 12 + tokens.div_ceil(2) * size_of::<(usize, usize)>()) as u64
    }

    /// Packs sequences from `places` on, at least one and as many as fit; returns where the next begins.
    ///
    /// # Panics
    /// A sequence is longer than the room.
    pub fn fill(&mut self, data: &Data, order: Order, places: std::ops::Range<u64>) -> u64 {
        self.len = 0;
        self.segments.clear();
        let mut place = places.start;
        while place < places.end && self.segments.len() < self.segments.capacity() {
            let sequence = match order {
                Order::Shuffled => data.at(place),
                Order::File => place as usize,
            };
            let len = data.len_of(sequence);
            if self.len + len > self.tokens.len() && self.len > 0 {
                break;
            }
            let room = self.len..self.len + len;
            let (tokens, targets) = (
                &mut self.tokens[room.clone()],
                &mut self.targets[room.clone()],
            );
            data.item(sequence, tokens, targets);
            for (position, out) in self.positions[room].iter_mut().enumerate() {
                *out = position as u32;
            }
            self.segments.push((self.len, len));
            self.len += len;
            place += 1;
        }
        place
    }

    /// What was packed.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            tokens: &self.tokens[..self.len],
            targets: &self.targets[..self.len],
            segments: &self.segments,
            positions: &self.positions[..self.len],
        }
    }
}

/// Tokens that the sequences at `places` predict.
pub fn targets(data: &Data, places: std::ops::Range<u64>) -> u64 {
    places
        .map(|place| data.targets_of(data.at(place)) as u64)
        .sum()
}
