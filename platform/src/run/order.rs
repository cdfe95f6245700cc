//! What the threads are told: phases of steps as tasks, and the batch that they run on.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::pool::Task;

/// What the threads do in a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Phase {
    /// Embedding rows of the tokens that a piece holds.
    Embed,
    /// The step's input: norm or activation, then int8 codes. Chunks are tokens.
    Input,
    /// Rows of pieces times the input. Chunks are parts of pieces.
    Rows,
    /// Norms of heads, rotary embedding, storing to the cache. Chunks are tokens.
    Store,
    /// Attention. Chunks are its units.
    Attend,
    /// Adding the output to the residual stream. Chunks are tokens.
    Add,
    /// Choosing the units of a sparse layer. One chunk.
    Choose,
    /// Activations of units. Chunks are runs of items.
    Dots,
    /// Adding the units' columns. Chunks are parts of the width.
    Columns,
    /// The residual stream as far as it is known, to look ahead. One chunk.
    Peek,
    /// Foreseeing the next layer's units. One chunk.
    Foresee,
    /// The end of a sketched head: what can't be chosen. One chunk.
    Last,
}

impl Phase {
    fn of(code: u8) -> Self {
        [
            Self::Embed,
            Self::Input,
            Self::Rows,
            Self::Store,
            Self::Attend,
            Self::Add,
            Self::Choose,
            Self::Dots,
            Self::Columns,
            Self::Peek,
            Self::Foresee,
            Self::Last,
        ][usize::from(code)]
    }
}

/// A phase with its operands, packed into the two words of a [`Task`].
#[derive(Clone, Copy, Debug)]
pub struct Order {
    /// What to do.
    pub phase: Phase,
    /// For which step.
    pub step: u32,
    /// On the activations that look ahead.
    pub ahead: bool,
    /// First piece, for `Embed` and `Rows`; first of the groups handed over, for `Dots` and
    /// `Columns`.
    pub first: u32,
    /// Parts that each piece is cut into, for `Rows`; the end of the groups, for `Dots` and
    /// `Columns`; tokens of a chunk, for the others.
    pub split: u32,
}

impl Order {
    /// As a task of `chunks` chunks.
    pub fn task(self, chunks: u32) -> Task {
        Task {
            kind: u64::from(self.ahead) << 63 | u64::from(self.step) << 8 | self.phase as u64,
            arg: u64::from(self.first) << 32 | u64::from(self.split),
            chunks,
        }
    }

    pub(super) fn of(task: Task) -> Self {
        Self {
            phase: Phase::of(task.kind as u8),
            step: (task.kind >> 8) as u32,
            ahead: task.kind >> 63 != 0,
            first: (task.arg >> 32) as u32,
            split: task.arg as u32,
        }
    }
}

/// What the head computes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HeadMode {
    /// Nothing: a part of a prompt before its end.
    None,
    /// Logits of the batch's last token.
    Last,
    /// For every token, what its probability of the next token needs.
    Score,
}

/// The batch that is running. Written by the leader between tasks.
#[derive(Default)]
pub struct Batch {
    tokens: AtomicU32,
    first_position: AtomicU32,
    prompt: AtomicU32,
    score: AtomicU32,
}

impl Batch {
    /// Sets the batch: `tokens` tokens from position `first`; `prompt` takes the kernels for many
    /// tokens also where there is one, so that a prompt's result doesn't depend on how it is cut.
    pub fn set(&self, tokens: u32, first: u32, prompt: bool, mode: HeadMode) {
        self.tokens.store(tokens, Ordering::Relaxed);
        self.first_position.store(first, Ordering::Relaxed);
        self.prompt.store(u32::from(prompt), Ordering::Relaxed);
        self.score
            .store(u32::from(mode == HeadMode::Score), Ordering::Relaxed);
    }

    /// Tokens of the batch.
    pub fn tokens(&self) -> usize {
        self.tokens.load(Ordering::Relaxed) as usize
    }

    /// Position of its first token.
    pub fn first(&self) -> usize {
        self.first_position.load(Ordering::Relaxed) as usize
    }

    /// Whether it is a part of a prompt.
    pub fn prompt(&self) -> bool {
        self.prompt.load(Ordering::Relaxed) != 0
    }

    /// What its head computes.
    pub fn mode(&self) -> HeadMode {
        if self.score.load(Ordering::Relaxed) != 0 {
            HeadMode::Score
        } else {
            HeadMode::Last
        }
    }
}
