//! The state machine that runs one *pass* of a plan over and over (a pass is a token, or a batch of
//! prompt tokens; every pass uses the same weights). Events in, actions out; it touches no bytes, no
//! clock, no operating system.
//!
//! - The cursor is the step being computed. Its pieces are submitted as they become ready, in runs of
//!   consecutive ones, in any order; at most [`WORKS_MAX`] works are submitted and not ended, so that
//!   the backend never starves between two. The next step opens when the closing work has ended.
//! - Read-ahead is one position that moves through the plan (and, if a pass follows, on into it). It
//!   passes by what is resident and reads what is not, each into a slot of lower worth; where there
//!   is none it waits. Positions of this pass are `0..planned`, of the next `planned..2 * planned`.
//! - The first step of a pass may gather: it runs over a list of pieces given with the pass instead of
//!   a range (embedding rows), one work each, in order of arrival.
//! - A read that fails is tried [`ATTEMPTS_MAX`] times. If nothing waits for its piece it is dropped,
//!   and asked for again when its step opens; if the cursor waits, the pass halts.
//!
//! Reads are chosen in `fetch.rs`, works in `run.rs`; this file has the interface and the states.

use super::policy::Policy;
use super::queue::Queue;
use super::tables::{Mark, Place, Read, ReadState, Step, Tables};
use crate::port::{ComputeEvent, ReadCommand, ReadOutcome, Work};
use crate::units::{Extent, Piece, PieceId, ReadId, SlotId, StepId};

/// Times a read is tried.
pub const ATTEMPTS_MAX: u8 = 3;

/// Works submitted and not ended.
pub const WORKS_MAX: usize = 2;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Event<'e> {
    /// Run a pass. The engine must be [`idle`](Engine::idle).
    Begin {
        /// Pieces for the first step, each once: row pieces, or others of the same matrix that are
        /// resident. If it isn't empty the first step must have no pieces of its own.
        gather: &'e [PieceId],
        /// Whether another pass will follow, and about how many pieces it will gather: read-ahead
        /// goes on into it and leaves room for these.
        next: Option<u32>,
    },
    /// A read ended.
    ReadEnded {
        /// Which.
        read: ReadId,
        /// How.
        outcome: ReadOutcome,
    },
    /// The compute backend reports.
    Compute(ComputeEvent),
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Action {
    /// Start a read.
    Read(ReadCommand),
    /// Submit work; its slots are [`Engine::homes`].
    Compute(Work),
    /// The pass is done and the engine idle. Reads for the next pass may be in flight.
    Finish,
    /// The pass was given up and the engine is idle, with nothing in flight: memory may be reused, or
    /// another pass begun.
    Halt(Fault),
}

/// Why a pass was given up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// The cursor waits for this piece, and so many reads of it failed.
    Unreadable {
        /// Which.
        piece: PieceId,
        /// Tries.
        attempts: u8,
    },
    /// A sparse layer waits for this unit, and so many reads of it failed or brought damaged bytes.
    Unit {
        /// Its bank.
        bank: u32,
        /// Which unit of the bank.
        index: u32,
        /// Tries.
        attempts: u8,
        /// How the last of them ended.
        lost: Lost,
    },
    /// [`Engine::stop`] was called.
    Stopped,
}

/// Why a read brought nothing of use: a device that fails and a file that is damaged want different help.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lost {
    /// The read itself failed; the backend keeps the reason under this extent.
    Unread(Extent),
    /// The bytes came, and their checksum is wrong.
    Damaged,
}

/// Totals since the engine was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Passes finished.
    pub passes: u64,
    /// Pieces submitted to compute.
    pub pieces: u64,
    /// Of these, resident when their step opened.
    pub hits: u64,
    /// Reads started, without retries.
    pub reads: u64,
    /// Bytes of the reads that succeeded.
    pub bytes_read: u64,
    /// Of these, bytes of rows that were then computed with.
    pub bytes_useful: u64,
    /// Reads started again after a failure.
    pub retries: u64,
    /// Speculative reads given up after [`ATTEMPTS_MAX`] failures.
    pub dropped: u64,
    /// Reads of a piece that had been read for the same pass before. 0 unless reads fail.
    pub rereads: u64,
    /// Times the cursor had nothing to compute and nothing being computed.
    pub waits: u64,
}

impl Counters {
    /// Adds what `other` counted.
    pub fn add(&mut self, other: &Self) {
        *self = self.each(other, |a, b| a + b);
    }

    /// What was counted since `before`, an earlier state of the same counters.
    pub fn since(&self, before: &Self) -> Self {
        self.each(before, |a, b| a - b)
    }

    /// Every count of both, combined. Names each field, so that a new one can't be forgotten.
    fn each(&self, other: &Self, combine: impl Fn(u64, u64) -> u64) -> Self {
        Self {
            passes: combine(self.passes, other.passes),
            pieces: combine(self.pieces, other.pieces),
            hits: combine(self.hits, other.hits),
            reads: combine(self.reads, other.reads),
            bytes_read: combine(self.bytes_read, other.bytes_read),
            bytes_useful: combine(self.bytes_useful, other.bytes_useful),
            retries: combine(self.retries, other.retries),
            dropped: combine(self.dropped, other.dropped),
            rereads: combine(self.rereads, other.rereads),
            waits: combine(self.waits, other.waits),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Idle,
    Running,
    /// All steps are done; `Finish` is to be told.
    Finished,
    /// Given up; `Halt` is told when nothing is in flight.
    Draining(Fault),
}

/// See the [module](self).
pub struct Engine<'m, P> {
    pub(super) pieces: &'m mut [Piece],
    pub(super) steps: &'m [Step],
    pub(super) homes: &'m mut [SlotId],
    pub(super) marks: &'m mut [Mark],
    pub(super) queue: Queue<'m>,
    pub(super) policy: P,
    pub(super) planned: u32,
    pub(super) first_row: u32,
    pub(super) state: State,
    pub(super) counters: Counters,
    /// Number of the pass that runs or will run next.
    pub(super) pass: u32,
    pub(super) next: Option<u32>,
    /// Steps that a pass runs, and the piece behind the last that they use.
    pub(super) limit: u32,
    pub(super) limit_end: u32,

    /// The open step, its pieces `first..end`, the sweep over them, and how many are unsubmitted.
    pub(super) step: u32,
    pub(super) first: u32,
    pub(super) end: u32,
    pub(super) sweep: u32,
    pub(super) left: u32,
    pub(super) opens: bool,
    pub(super) waiting: bool,
    pub(super) works: [Option<Work>; WORKS_MAX],

    pub(super) gather: &'m mut [PieceId],
    pub(super) gathered: u32,
    pub(super) gather_next: u32,

    pub(super) reads: &'m mut [Read],
    pub(super) read_free: u32,
    pub(super) flying: u32,
    pub(super) again: u32,
    /// Read-ahead's position.
    pub(super) ahead: u32,
    pub(super) loose_next: u32,
}

impl<'m, P: Policy> Engine<'m, P> {
    /// The tables are the whole memory of the engine; it never asks for more.
    ///
    /// # Panics
    /// If the tables don't fit together: steps must take the pieces from 0 on without gaps, `homes`
    /// and `marks` have one entry a piece, and there is at least one slot and one read.
    pub fn new(tables: Tables<'m>, policy: P) -> Self {
        let Tables {
            pieces,
            steps,
            rows,
            homes,
            marks,
            slots,
            reads,
            gather,
        } = tables;
        assert!(
            pieces.len() < 1 << 30,
            "positions in two passes fit 32 bits"
        );
        assert_eq!(homes.len(), pieces.len(), "one home a piece");
        assert_eq!(marks.len(), pieces.len(), "one mark a piece");
        assert!(!slots.is_empty(), "an engine needs a slot");
        assert!(
            !reads.is_empty() && reads.len() <= usize::from(u16::MAX),
            "read ids are 16 bits"
        );
        assert!(!steps.is_empty(), "a plan has a step");
        let mut planned = 0;
        for step in steps {
            if step.count > 0 {
                assert_eq!(step.first.0, planned, "steps take pieces in order");
                planned += step.count;
            }
        }
        let count = pieces.len() as u32;
        let first_row = count
            .checked_sub(rows)
            .expect("row pieces are in the table");
        assert!(planned <= first_row, "steps take no row pieces");
        homes.fill(SlotId::NONE);
        marks.fill(Mark::default());
        let last = reads.len() - 1;
        for (read, entry) in reads.iter_mut().enumerate() {
            // A free entry's `piece` is the next free entry.
            let next = if read == last {
                u32::MAX
            } else {
                read as u32 + 1
            };
            *entry = Read {
                piece: next,
                ..Read::default()
            };
        }
        Self {
            pieces,
            steps,
            homes,
            marks,
            queue: Queue::new(slots),
            policy,
            planned,
            first_row,
            state: State::Idle,
            counters: Counters::default(),
            pass: 1,
            next: None,
            limit: steps.len() as u32,
            limit_end: planned,
            step: 0,
            first: 0,
            end: 0,
            sweep: 0,
            left: 0,
            opens: false,
            waiting: false,
            works: [None; WORKS_MAX],
            gather,
            gathered: 0,
            gather_next: 0,
            reads,
            read_free: 0,
            flying: 0,
            again: 0,
            ahead: 0,
            loose_next: 0,
        }
    }

    /// Sets the extent of row piece `row` (counted from the first row piece) and returns its id.
    ///
    /// # Panics
    /// While a pass runs.
    pub fn set_row(&mut self, row: u32, piece: Piece) -> PieceId {
        assert_eq!(self.state, State::Idle, "rows are set between passes");
        let id = self.first_row + row;
        assert_eq!(
            self.marks[id as usize].place,
            Place::Absent,
            "rows go when they are used"
        );
        self.pieces[id as usize] = piece;
        PieceId(id)
    }

    /// How many steps the following passes run, from the first on. Pieces of the others are not read:
    /// of a prompt in several batches, only the last needs the head.
    ///
    /// # Panics
    /// While a pass runs, for no step at all, or when the plan has fewer.
    pub fn set_steps(&mut self, steps: u32) {
        assert_eq!(self.state, State::Idle, "steps are set between passes");
        assert!(steps > 0, "a pass has a step");
        let running = &self.steps[..steps as usize];
        // Read-ahead may have gone by pieces that are used after all.
        self.ahead = self.ahead.min(self.limit_end);
        self.limit = steps;
        self.limit_end = running.iter().map(|step| step.count).sum();
    }

    /// The slot in which all bytes of `piece` are, if they are in memory.
    pub fn slot_of(&self, piece: PieceId) -> Option<SlotId> {
        match self.marks[piece.0 as usize].place {
            Place::Absent | Place::Filling => None,
            Place::Ready | Place::Arrived | Place::Pinned => Some(self.homes[piece.0 as usize]),
        }
    }

    /// Slots of the pieces of submitted work, in order.
    pub fn homes(&self, work: Work) -> &[SlotId] {
        &self.homes[work.first.0 as usize..][..work.count as usize]
    }

    /// A piece's row in the table.
    pub fn piece(&self, piece: PieceId) -> Piece {
        self.pieces[piece.0 as usize]
    }

    /// Whether a pass may begin.
    pub fn idle(&self) -> bool {
        self.state == State::Idle
    }

    /// Reads that the storage has.
    pub fn reads_flying(&self) -> u32 {
        self.flying
    }

    /// Works that the compute backend has.
    pub fn works_flying(&self) -> usize {
        self.works.iter().flatten().count()
    }

    /// Totals since the engine was made.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Gives up the pass, or the read-ahead of an idle engine: no more is started, and when all that
    /// flies has ended [`Action::Halt`] follows. A pass whose last step is done finishes all the same.
    pub fn stop(&mut self) {
        self.fail(Fault::Stopped);
    }

    /// [`Engine::stop`] for another reason.
    pub fn fail(&mut self, fault: Fault) {
        if matches!(self.state, State::Idle | State::Running) {
            self.give_up(fault);
        }
    }

    /// Tells the engine what happened.
    ///
    /// # Panics
    /// If it can't have: a read or work that isn't in flight, a pass while one runs, a piece gathered
    /// twice.
    pub fn handle(&mut self, event: Event<'_>) {
        match event {
            Event::Begin { gather, next } => self.begin(gather, next),
            Event::ReadEnded { read, outcome } => self.read_ended(read, outcome),
            Event::Compute(ComputeEvent::Ended(work)) => {
                assert_eq!(
                    self.works[0],
                    Some(work),
                    "works end in the order of submission"
                );
                self.works.rotate_left(1);
                self.works[WORKS_MAX - 1] = None;
                self.release(work);
                if work.closes && self.state == State::Running {
                    self.step += 1;
                    self.open();
                }
            }
            Event::Compute(ComputeEvent::Partial { step, first, count }) => {
                // A dense plan decides nothing by partial results; they still have to be of this work.
                let work = self.works[0].expect("partial results are of the running work");
                let inside = first.0 >= work.first.0 && count <= work.count;
                let inside = inside && first.0 - work.first.0 <= work.count - count;
                assert!(
                    work.step == step && inside,
                    "partial results are of the running work"
                );
            }
        }
    }

    /// The next thing to do, or `None` until an event arrives.
    pub fn poll(&mut self) -> Option<Action> {
        match self.state {
            State::Finished => {
                self.state = State::Idle;
                Some(Action::Finish)
            }
            State::Draining(fault) => {
                if self.flying > 0 || self.works[0].is_some() {
                    return None;
                }
                self.reset();
                Some(Action::Halt(fault))
            }
            State::Running => match self.poll_work() {
                Some(work) => Some(Action::Compute(work)),
                None => self.poll_read().map(Action::Read),
            },
            State::Idle => self.poll_read().map(Action::Read),
        }
    }

    fn begin(&mut self, gather: &[PieceId], next: Option<u32>) {
        assert_eq!(self.state, State::Idle, "one pass at a time");
        assert!(
            gather.len() <= self.gather.len(),
            "more is gathered than was announced"
        );
        assert!(
            gather.is_empty() || self.steps[0].count == 0,
            "a step gathers or has its pieces"
        );
        self.state = State::Running;
        self.next = next;
        self.gather[..gather.len()].copy_from_slice(gather);
        self.gathered = gather.len() as u32;
        self.gather_next = 0;
        for &piece in gather {
            let mark = &mut self.marks[piece.0 as usize];
            assert!(!mark.wanted, "piece {} is gathered once", piece.0);
            mark.wanted = true;
            if mark.place == Place::Ready {
                mark.place = Place::Arrived;
                let slot = self.homes[piece.0 as usize];
                self.queue.remove(slot);
                self.queue.push_arrived(slot);
                self.counters.hits += 1;
            }
        }
        self.step = 0;
        self.first = 0;
        self.end = 0;
        self.open();
    }

    /// Opens `self.step`, or ends the pass behind the last one.
    fn open(&mut self) {
        let Some(step) = self.steps[..self.limit as usize].get(self.step as usize) else {
            self.counters.passes += 1;
            self.pass = self.pass.wrapping_add(1);
            self.ahead = self.ahead.max(self.planned) - self.planned;
            self.state = State::Finished;
            return;
        };
        self.first = self.end;
        self.end += step.count;
        self.sweep = self.first;
        self.opens = true;
        self.left = if self.gathering() {
            self.gathered
        } else {
            step.count
        };
        // Read-ahead comes back to what it gave up.
        for piece in self.first..self.end {
            match self.marks[piece as usize].place {
                Place::Absent => self.ahead = self.ahead.min(piece),
                Place::Ready => self.counters.hits += 1,
                _ => {}
            }
        }
    }

    /// Whether the open step is one that gathers.
    pub(super) fn gathering(&self) -> bool {
        self.step == 0 && self.gathered > 0
    }

    /// Whether the open step can't end without a read or work of `piece`.
    pub(super) fn needed(&self, piece: u32) -> bool {
        if self.state != State::Running {
            return false;
        }
        let mark = &self.marks[piece as usize];
        if self.gathering() {
            return mark.wanted;
        }
        (self.first..self.end).contains(&piece) && mark.used != self.pass
    }

    pub(super) fn give_up(&mut self, fault: Fault) {
        self.state = State::Draining(fault);
        if self.again > 0 {
            for read in 0..self.reads.len() {
                if self.reads[read].state == ReadState::Again {
                    self.drop_read(read);
                }
            }
            self.again = 0;
        }
    }

    /// Back to idle with nothing in flight: what is resident stays, what was only asked for goes.
    fn reset(&mut self) {
        for index in 0..self.gathered as usize {
            self.marks[self.gather[index].0 as usize].wanted = false;
        }
        while let Some(slot) = self.queue.first_arrived() {
            self.settle(slot);
        }
        // Read-ahead starts over, so nothing is in its window now.
        let mut slot = self.queue.first(super::Worth::AHEAD);
        let last = self.queue.last(super::Worth::AHEAD);
        while let Some(next) = slot {
            self.settle(next);
            slot = if Some(next) == last {
                None
            } else {
                self.queue.first(super::Worth::AHEAD)
            };
        }
        self.gathered = 0;
        self.next = None;
        self.ahead = 0;
        self.pass = self.pass.wrapping_add(1);
        self.state = State::Idle;
    }
}

impl<P> Engine<'_, P> {
    /// The open step.
    pub(super) fn step_id(&self) -> StepId {
        StepId(self.step)
    }
}
