//! The engine's reading side: what is read next, where to, and what becomes of a read that ended.

use super::engine::{ATTEMPTS_MAX, Engine, Fault, State};
use super::policy::{Policy, Worth};
use super::tables::{Place, Read, ReadState};
use crate::port::{ReadCommand, ReadOutcome};
use crate::units::{PieceId, ReadId, SlotId};

impl<P: Policy> Engine<'_, P> {
    /// The next read, if there is one to make, a slot for it, and the storage can take it.
    pub(super) fn poll_read(&mut self) -> Option<ReadCommand> {
        if self.again > 0 {
            let retry = self
                .reads
                .iter()
                .position(|read| read.state == ReadState::Again);
            let read = retry.expect("failed reads are counted");
            self.again -= 1;
            self.flying += 1;
            self.counters.retries += 1;
            self.reads[read].state = ReadState::Flying;
            return Some(self.command(read));
        }
        if self.read_free == u32::MAX {
            return None;
        }
        // What the cursor waits for, then what it will want: positions are in that order.
        if self.state == State::Running
            && self.gathering()
            && let Some(piece) = self.next_gathered()
        {
            let slot = self.slot_for(true, 0)?;
            return Some(self.start(piece, slot, self.pass));
        }
        let Some(position) = self.next_position() else {
            return self.poll_loose();
        };
        let this = position < self.planned;
        let piece = if this {
            position
        } else {
            position - self.planned
        };
        let slot = self.slot_for(this && self.needed(piece), self.reserve(this))?;
        if self.ahead == position {
            self.ahead += 1;
        }
        Some(self.start(piece, slot, self.pass.wrapping_add(u32::from(!this))))
    }

    /// The next gathered piece that no read is on its way for.
    fn next_gathered(&mut self) -> Option<u32> {
        while self.gather_next < self.gathered {
            let piece = self.gather[self.gather_next as usize].0;
            let mark = &self.marks[piece as usize];
            if mark.wanted && mark.place == Place::Absent {
                return Some(piece);
            }
            self.gather_next += 1;
        }
        None
    }

    /// How far read-ahead may go. A whole cycle ahead the pieces are those of the open step again.
    fn horizon(&self) -> u32 {
        match (self.state, self.next) {
            (State::Running, Some(_)) => self.first + self.planned,
            (State::Running, None) | (_, Some(_)) => self.planned,
            (_, None) => 0,
        }
    }

    /// Moves read-ahead to the next piece that isn't in memory.
    fn next_position(&mut self) -> Option<u32> {
        let end = self.horizon();
        while self.ahead < end {
            let this = self.ahead < self.planned;
            let piece = if this {
                self.ahead
            } else {
                self.ahead - self.planned
            };
            let mark = self.marks[piece as usize];
            let done = this && (mark.used == self.pass || piece >= self.limit_end);
            match mark.place {
                Place::Absent if !done => return Some(self.ahead),
                Place::Ready if !done => {
                    // As good as just read, and as safe; so it needs the same room.
                    let slot = self.homes[piece as usize];
                    if self
                        .queue
                        .worth(slot)
                        .is_some_and(|worth| worth < Worth::AHEAD)
                    {
                        if self.queue.spare() <= self.reserve(this) {
                            return None;
                        }
                        self.queue.remove(slot);
                        self.queue.push(slot, Worth::AHEAD);
                    }
                }
                _ => {}
            }
            self.ahead += 1;
        }
        None
    }

    /// With nothing else to read, a piece of no step that the policy wants, into an empty slot.
    fn poll_loose(&mut self) -> Option<ReadCommand> {
        let wanted = self.state == State::Running || self.next.is_some();
        while wanted && self.ahead >= self.horizon() && self.loose_next < self.policy.loose() {
            let piece = self.planned + self.loose_next;
            assert!(
                piece < self.first_row,
                "the policy knows how many loose pieces there are"
            );
            if self.marks[piece as usize].place == Place::Absent {
                let roomy = self.queue.spare() > 1 && self.queue.least() == Some(Worth::EMPTY);
                if !roomy {
                    return None;
                }
                let slot = self
                    .queue
                    .first(Worth::EMPTY)
                    .expect("there is an empty one");
                self.queue.remove(slot);
                self.loose_next += 1;
                return Some(self.start(piece, slot, self.pass));
            }
            self.loose_next += 1;
        }
        None
    }

    /// Slots that read-ahead leaves alone: none in the running pass, but for the next one what its
    /// rows will need. Half the reads, so that rows fly side by side; not so many that a small ring
    /// can't read ahead at all.
    fn reserve(&self, this: bool) -> u32 {
        if this && self.state == State::Running {
            return 0;
        }
        let slots = self.queue.len() as u32 / 4;
        let rows = self.next.unwrap_or(0);
        rows.min(self.reads.len() as u32 / 2).min(slots).max(1)
    }

    /// A slot of lower worth than read-ahead, out of its list and empty. If there is none, and the
    /// cursor waits with nothing on its way to it, the least worthy one.
    fn slot_for(&mut self, needed: bool, reserve: u32) -> Option<SlotId> {
        let least = self.queue.least()?;
        let slot = if least < Worth::AHEAD {
            if self.queue.spare() <= reserve {
                return None;
            }
            self.queue.first(least)?
        } else {
            if !needed || self.works[0].is_some() || self.help_is_flying() {
                return None;
            }
            // Of what was read ahead, the last is wanted last.
            self.queue.last(least)?
        };
        self.queue.remove(slot);
        if let Some(PieceId(piece)) = self.queue.piece(slot) {
            self.vacate(piece);
            if piece < self.planned {
                self.ahead = self.ahead.min(self.position(piece));
            }
        }
        Some(slot)
    }

    /// Whether a read in flight will bring a piece that the open step needs.
    fn help_is_flying(&self) -> bool {
        let flying = self
            .reads
            .iter()
            .filter(|read| read.state != ReadState::Free);
        flying.into_iter().any(|read| self.needed(read.piece))
    }

    fn start(&mut self, piece: u32, slot: SlotId, pass: u32) -> ReadCommand {
        let read = self.read_free as usize;
        self.read_free = self.reads[read].piece;
        self.reads[read] = Read {
            piece,
            slot: slot.0,
            attempts: 1,
            state: ReadState::Flying,
        };
        self.flying += 1;
        let mark = &mut self.marks[piece as usize];
        mark.place = Place::Filling;
        if piece < self.planned && mark.read == pass {
            self.counters.rereads += 1;
        }
        mark.read = pass;
        self.homes[piece as usize] = slot;
        self.queue.set_piece(slot, Some(PieceId(piece)));
        self.counters.reads += 1;
        self.command(read)
    }

    fn command(&self, read: usize) -> ReadCommand {
        let Read { piece, slot, .. } = self.reads[read];
        let extent = self.pieces[piece as usize].extent;
        let (slot, piece) = (SlotId(slot), PieceId(piece));
        ReadCommand {
            read: ReadId(read as u16),
            slot,
            piece,
            extent,
        }
    }

    pub(super) fn read_ended(&mut self, id: ReadId, outcome: ReadOutcome) {
        let index = usize::from(id.0);
        let Read {
            piece,
            slot,
            attempts,
            state,
        } = self.reads[index];
        assert_eq!(state, ReadState::Flying, "read {} is in flight", id.0);
        self.flying -= 1;
        match outcome {
            ReadOutcome::Filled => {
                self.counters.bytes_read += u64::from(self.pieces[piece as usize].extent.len);
                self.free_read(index);
                self.filled(piece, SlotId(slot));
            }
            ReadOutcome::Corrupt | ReadOutcome::Failed => {
                let draining = matches!(self.state, State::Draining(_));
                if !draining && attempts < ATTEMPTS_MAX {
                    self.reads[index].attempts += 1;
                    self.reads[index].state = ReadState::Again;
                    self.again += 1;
                    return;
                }
                self.drop_read(index);
                if self.needed(piece) {
                    self.give_up(Fault::Unreadable {
                        piece: PieceId(piece),
                        attempts,
                    });
                } else if !draining {
                    // Read-ahead is past it, so that a bad sector isn't tried over and over.
                    self.counters.dropped += 1;
                }
            }
        }
    }

    fn filled(&mut self, piece: u32, slot: SlotId) {
        // Behind the sweep nobody would come by it again.
        if self.needed(piece) && (self.gathering() || piece < self.sweep) {
            self.marks[piece as usize].place = Place::Arrived;
            self.queue.push_arrived(slot);
        } else {
            self.shelve(piece);
        }
    }

    /// Gives up a read that is not in flight: its slot is empty.
    pub(super) fn drop_read(&mut self, index: usize) {
        let Read { piece, slot, .. } = self.reads[index];
        self.free_read(index);
        self.vacate(piece);
        self.queue.push(SlotId(slot), Worth::EMPTY);
    }

    fn free_read(&mut self, index: usize) {
        self.reads[index] = Read {
            piece: self.read_free,
            ..Read::default()
        };
        self.read_free = index as u32;
    }
}
