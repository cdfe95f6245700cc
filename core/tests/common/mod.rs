//! What the engine's tests share: plans, memory, and a witness that checks every action against a
//! second account of slots, reads and works.
#![allow(dead_code)] // Each test file uses a part.

pub mod machine;
pub mod ops;

use leanstream_core::port::{ReadCommand, Work};
use leanstream_core::stream::{Engine, Mark, Policy, Read, Slot, Step, Tables};
use leanstream_core::units::{Extent, FileId, Piece, PieceId, ReadId, SlotId};

/// A small xorshift generator: the tests' only source of chance, all of it from a seed.
#[derive(Clone)]
pub struct Prng(u64);

impl Prng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// `0..n`
    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 16) % n
    }

    /// `least..=most`
    pub fn between(&mut self, (least, most): (u32, u32)) -> u32 {
        least + self.below(u64::from(most - least) + 1) as u32
    }

    pub fn permille(&mut self, rate: u64) -> bool {
        self.below(1000) < rate
    }
}

/// A plan's tables. Pieces have distinct extents, so an offset names a piece.
#[derive(Clone)]
pub struct Plan {
    pub steps: Vec<Step>,
    pub pieces: Vec<Piece>,
    pub planned: u32,
    pub loose: u32,
    pub rows: u32,
}

pub const ALIGN: u32 = 4096;

impl Plan {
    /// Steps with these counts of pieces; every piece is one alignment unit long.
    pub fn new(counts: &[u32], loose: u32, rows: u32) -> Self {
        let mut plan = Self {
            steps: vec![],
            pieces: vec![],
            planned: 0,
            loose,
            rows,
        };
        for &count in counts {
            plan.steps.push(Step {
                first: PieceId(plan.planned),
                count,
            });
            plan.planned += count;
        }
        for piece in 0..plan.planned + loose + rows {
            plan.pieces.push(piece_at(u64::from(piece), 1));
        }
        plan
    }

    pub fn first_row(&self) -> u32 {
        self.planned + self.loose
    }
}

/// A piece of some alignment units whose offset is unique to `tag`.
pub fn piece_at(tag: u64, units: u32) -> Piece {
    let extent = Extent {
        file: FileId(0),
        offset: (tag + 1) << 24,
        len: units * ALIGN,
    };
    Piece {
        extent,
        skew: 0,
        bytes: units * ALIGN - 96,
    }
}

/// The memory an engine is lent.
pub struct Memory {
    pub pieces: Vec<Piece>,
    pub steps: Vec<Step>,
    pub rows: u32,
    pub homes: Vec<SlotId>,
    pub marks: Vec<Mark>,
    pub slots: Vec<Slot>,
    pub reads: Vec<Read>,
    pub gather: Vec<PieceId>,
}

impl Memory {
    pub fn new(plan: &Plan, slots: usize, reads: usize) -> Self {
        Self {
            pieces: plan.pieces.clone(),
            steps: plan.steps.clone(),
            rows: plan.rows,
            homes: vec![SlotId::NONE; plan.pieces.len()],
            marks: vec![Mark::default(); plan.pieces.len()],
            slots: vec![Slot::default(); slots],
            reads: vec![Read::default(); reads],
            gather: vec![PieceId(0); (plan.rows + plan.loose + plan.planned) as usize],
        }
    }

    pub fn engine<P: Policy>(&mut self, policy: P) -> Engine<'_, P> {
        let tables = Tables {
            pieces: &mut self.pieces,
            steps: &self.steps,
            rows: self.rows,
            homes: &mut self.homes,
            marks: &mut self.marks,
            slots: &mut self.slots,
            reads: &mut self.reads,
            gather: &mut self.gather,
        };
        Engine::new(tables, policy)
    }
}

/// What a slot holds, as the world sees it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// Nothing that may be looked at: never filled, or a read failed.
    Poison,
    /// A read is writing here.
    Filling,
    /// The bytes from this offset.
    Bytes(u64),
}

/// The second account: knows what each slot holds, which works use it, and what a pass still owes.
pub struct Witness {
    steps: Vec<Step>,
    contents: Vec<Content>,
    pins: Vec<u32>,
    reads: Vec<Option<ReadCommand>>,
    works: [Option<Work>; 2],
    /// One a piece: the pass that computed it (as a step's piece, or gathered).
    done: Vec<u32>,
    gather: Vec<PieceId>,
    pass: u32,
    step: u32,
    limit: usize,
    left: u32,
    opened: bool,
    running: bool,
    first_row: u32,
    pub reads_started: u64,
}

impl Witness {
    pub fn new(plan: &Plan, slots: usize, reads: usize) -> Self {
        Self {
            steps: plan.steps.clone(),
            contents: vec![Content::Poison; slots],
            pins: vec![0; slots],
            reads: vec![None; reads],
            works: [None; 2],
            done: vec![0; plan.pieces.len()],
            gather: Vec::with_capacity(plan.pieces.len()),
            pass: 0,
            step: 0,
            limit: 0,
            left: 0,
            opened: false,
            running: false,
            first_row: plan.first_row(),
            reads_started: 0,
        }
    }

    /// The pass runs the first `limit` steps.
    pub fn begin(&mut self, gather: &[PieceId], limit: usize) {
        assert!(!self.running);
        self.limit = limit;
        self.running = true;
        self.pass += 1;
        self.gather.clear();
        self.gather.extend_from_slice(gather);
        self.step = 0;
        self.open();
    }

    fn open(&mut self) {
        self.opened = false;
        self.left = match self.steps[..self.limit].get(self.step as usize) {
            None => 0,
            Some(_) if self.gathering() => self.gather.len() as u32,
            Some(step) => step.count,
        };
    }

    fn gathering(&self) -> bool {
        self.step == 0 && !self.gather.is_empty()
    }

    pub fn read_started(&mut self, command: ReadCommand) {
        let slot = command.slot.0 as usize;
        assert!(
            self.reads[usize::from(command.read.0)].is_none(),
            "the read id is in use"
        );
        assert_ne!(
            self.contents[slot],
            Content::Filling,
            "two reads fill one slot"
        );
        assert_eq!(self.pins[slot], 0, "a read overwrites submitted work");
        self.contents[slot] = Content::Filling;
        self.reads[usize::from(command.read.0)] = Some(command);
        self.reads_started += 1;
    }

    pub fn read_ended(&mut self, read: ReadId, filled: bool) -> ReadCommand {
        let command = self.reads[usize::from(read.0)]
            .take()
            .expect("the read is in flight");
        let content = if filled {
            Content::Bytes(command.extent.offset)
        } else {
            Content::Poison
        };
        self.contents[command.slot.0 as usize] = content;
        command
    }

    /// `offset_of` gives the offset of a piece's extent.
    pub fn submitted(&mut self, work: Work, slots: &[SlotId], offset_of: impl Fn(PieceId) -> u64) {
        assert!(self.running);
        let free = self
            .works
            .iter()
            .position(Option::is_none)
            .expect("two works at most");
        assert_eq!(work.step.0, self.step, "steps run one after the other");
        assert_eq!(
            work.opens, !self.opened,
            "the first work of a step opens it, no other"
        );
        assert_eq!(slots.len(), work.count as usize);
        self.opened = true;
        let step = self.steps[self.step as usize];
        if self.gathering() {
            assert_eq!(work.count, 1);
            assert!(
                self.gather.contains(&work.first),
                "this piece isn't gathered"
            );
        } else if work.count > 0 {
            assert!(work.first.0 >= step.first.0);
            assert!(work.first.0 + work.count <= step.first.0 + step.count);
        }
        self.left = self
            .left
            .checked_sub(work.count)
            .expect("no piece is computed twice");
        assert_eq!(
            work.closes,
            self.left == 0,
            "the last work of a step closes it, no other"
        );
        for (index, slot) in slots.iter().enumerate() {
            let piece = PieceId(work.first.0 + index as u32);
            let slot = slot.0 as usize;
            assert_eq!(
                self.contents[slot],
                Content::Bytes(offset_of(piece)),
                "wrong bytes"
            );
            self.pins[slot] += 1;
            // What is gathered is marked apart: a planned piece has its own step to come.
            let mark = if self.gathering() {
                self.pass | 1 << 31
            } else {
                self.pass
            };
            assert_ne!(
                self.done[piece.0 as usize], mark,
                "no piece is computed twice"
            );
            self.done[piece.0 as usize] = mark;
        }
        self.works[free] = Some(work);
    }

    /// The work that must end next.
    pub fn running_work(&self) -> Option<Work> {
        self.works[0]
    }

    pub fn flying(&self) -> impl Iterator<Item = ReadCommand> + '_ {
        self.reads.iter().flatten().copied()
    }

    pub fn work_ended(&mut self, slots: &[SlotId], offset_of: impl Fn(PieceId) -> u64) {
        let work = self.works[0].take().expect("a work runs");
        self.works.rotate_left(1);
        for (index, slot) in slots.iter().enumerate() {
            let piece = PieceId(work.first.0 + index as u32);
            let held = self.contents[slot.0 as usize];
            assert_eq!(
                held,
                Content::Bytes(offset_of(piece)),
                "bytes changed under work"
            );
            self.pins[slot.0 as usize] -= 1;
        }
        if work.closes {
            self.step += 1;
            self.open();
        }
    }

    pub fn finished(&mut self) {
        assert!(self.running);
        assert_eq!(self.step as usize, self.limit, "every step ran");
        assert!(self.works[0].is_none());
        self.running = false;
    }

    pub fn halted(&mut self) {
        assert!(self.works[0].is_none(), "work is in flight");
        assert!(
            self.reads.iter().all(Option::is_none),
            "reads are in flight"
        );
        assert!(self.pins.iter().all(|&pins| pins == 0));
        self.running = false;
    }

    /// Checks what the engine says of every piece against what the slots hold.
    pub fn agrees(
        &self,
        slot_of: impl Fn(PieceId) -> Option<SlotId>,
        offset_of: impl Fn(PieceId) -> u64,
    ) {
        let mut taken = vec![false; self.contents.len()];
        for piece in (0..self.done.len() as u32).map(PieceId) {
            let Some(slot) = slot_of(piece) else { continue };
            let held = self.contents[slot.0 as usize];
            assert_eq!(
                held,
                Content::Bytes(offset_of(piece)),
                "piece {} isn't there",
                piece.0
            );
            assert!(!taken[slot.0 as usize], "two pieces in one slot");
            taken[slot.0 as usize] = true;
        }
    }

    /// A slot gets bytes of no piece: what a test plants to see it caught.
    pub fn scribble(&mut self, slot: SlotId) {
        self.contents[slot.0 as usize] = Content::Bytes(1);
    }
}
