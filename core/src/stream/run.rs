//! The engine's computing side: which work is submitted next, and what becomes of its pieces.

use super::engine::{Engine, State, WORKS_MAX};
use super::policy::{Policy, Worth};
use super::tables::Place;
use crate::port::Work;
use crate::units::{PieceId, SlotId};

impl<P: Policy> Engine<'_, P> {
    /// The next work of the open step.
    pub(super) fn poll_work(&mut self) -> Option<Work> {
        if self.works[WORKS_MAX - 1].is_some() || !(self.opens || self.left > 0) {
            return None;
        }
        let Some((first, end)) = self.next_run() else {
            if self.works[0].is_none() && !self.waiting {
                self.waiting = true;
                self.counters.waits += 1;
            }
            return None;
        };
        self.waiting = false;
        self.left -= end - first;
        let work = Work {
            step: self.step_id(),
            first: PieceId(first),
            count: end - first,
            opens: self.opens,
            closes: self.left == 0,
        };
        self.opens = false;
        self.counters.pieces += u64::from(work.count);
        let free = self
            .works
            .iter()
            .position(Option::is_none)
            .expect("looked above");
        self.works[free] = Some(work);
        Some(work)
    }

    /// Pins a run of pieces that are ready, and returns it.
    fn next_run(&mut self) -> Option<(u32, u32)> {
        if self.opens && self.left == 0 {
            return Some((self.end, self.end));
        }
        if let Some(slot) = self.queue.first_arrived() {
            return Some(self.arrived_run(slot));
        }
        if self.gathering() {
            return None;
        }
        while self.sweep < self.end {
            let first = self.sweep;
            if self.marks[first as usize].place != Place::Ready {
                // It comes in by a read, as arrived.
                self.sweep += 1;
                continue;
            }
            let mut fresh = self.fresh_max();
            while self.sweep < self.end
                && fresh > 0
                && self.marks[self.sweep as usize].place == Place::Ready
            {
                fresh -= self.pin(self.sweep);
                self.sweep += 1;
            }
            return Some((first, self.sweep));
        }
        None
    }

    /// The first arrived piece, with the neighbours that have arrived too.
    fn arrived_run(&mut self, slot: SlotId) -> (u32, u32) {
        let piece = self
            .queue
            .piece(slot)
            .expect("an arrived slot holds a piece")
            .0;
        let (mut first, mut end) = (piece, piece + 1);
        if self.gathering() {
            self.marks[piece as usize].wanted = false;
            self.pin(piece);
            return (first, end);
        }
        let mut fresh = self.fresh_max() - self.pin(piece).min(1);
        while first > self.first && fresh > 0 && self.arrived(first - 1) {
            first -= 1;
            fresh -= self.pin(first);
        }
        while end < self.end && fresh > 0 && self.arrived(end) {
            fresh -= self.pin(end);
            end += 1;
        }
        (first, end)
    }

    fn arrived(&self, piece: u32) -> bool {
        self.marks[piece as usize].place == Place::Arrived
    }

    /// How many pieces that were read for this pass one work may hold: enough that a work is worth its
    /// start, and no more, for the ring's slots come back only when it ends. Pieces that are kept don't
    /// count, so a resident step is one work.
    fn fresh_max(&self) -> u32 {
        (self.reads.len() as u32 / 2).max(1)
    }

    /// Takes a ready piece for work; 1 if it was read for this pass.
    fn pin(&mut self, piece: u32) -> u32 {
        let gathering = self.gathering();
        let mark = &mut self.marks[piece as usize];
        mark.place = Place::Pinned;
        let fresh = mark.read == self.pass && mark.used != self.pass;
        // A planned piece that is gathered from still has its own step to come.
        if !gathering {
            mark.used = self.pass;
        }
        self.queue.remove(self.homes[piece as usize]);
        if fresh && !(gathering && piece < self.planned) {
            self.counters.bytes_useful += u64::from(self.pieces[piece as usize].bytes);
        }
        u32::from(fresh)
    }

    /// The work ended: its pieces may go.
    pub(super) fn release(&mut self, work: Work) {
        for piece in work.first.0..work.first.0 + work.count {
            self.shelve(piece);
        }
    }

    /// Lists a resident piece, which is in no list, by what it is worth now.
    pub(super) fn shelve(&mut self, piece: u32) {
        let slot = self.homes[piece as usize];
        if piece >= self.first_row {
            // The next pass has other rows.
            self.vacate(piece);
            self.queue.push(slot, Worth::EMPTY);
            return;
        }
        let used = self.policy.used(PieceId(piece)).max(Worth::LEAST);
        let worth = if self.relied_on(piece) {
            used.max(Worth::AHEAD)
        } else {
            used
        };
        self.marks[piece as usize].place = Place::Ready;
        self.queue.push(slot, worth);
    }

    /// Takes a listed slot out of its list and lists it again by what it is worth now.
    pub(super) fn settle(&mut self, slot: SlotId) {
        let piece = self
            .queue
            .piece(slot)
            .expect("only slots with pieces are settled")
            .0;
        self.queue.remove(slot);
        self.shelve(piece);
    }

    /// Whether read-ahead has passed by this piece's next use, and counts on it.
    fn relied_on(&self, piece: u32) -> bool {
        let draining = matches!(self.state, State::Draining(_));
        !draining && piece < self.planned && self.position(piece) < self.ahead
    }

    /// The position of a planned piece's next use.
    pub(super) fn position(&self, piece: u32) -> u32 {
        let used = self.marks[piece as usize].used == self.pass;
        if used { piece + self.planned } else { piece }
    }

    /// Forgets where a piece was; its slot is left in no list, or in the one it is in.
    pub(super) fn vacate(&mut self, piece: u32) {
        let slot = core::mem::replace(&mut self.homes[piece as usize], SlotId::NONE);
        self.marks[piece as usize].place = Place::Absent;
        self.queue.set_piece(slot, None);
    }
}
