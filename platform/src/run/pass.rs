//! One pass on the CPU: what the threads do for each step of the plan.
//!
//! [`Shared`] is all they see: weights in the arena, resident vectors, the batch's activations, the
//! KV cache. A [`Task`] names a phase of a step; its chunks write disjoint parts.

use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock};

use leanstream_core::plan::pieces;
use leanstream_core::plan::{Activation, Hyper, Linear, Matrix, MatrixId, Op, StepPlan};
use leanstream_core::quant;
use leanstream_core::units::PieceId;

pub use super::order::{Batch, HeadMode, Order, Phase};

use super::buffers::Buffers;
use super::cells::Cells;
use super::head::HeadRoom;
use super::lora::LoraRoom;
use super::probe::Probe;
use super::score::Score;
use super::seats::Seats;
use super::units::UnitRoom;
use crate::arena::Arena;
use crate::cpu::vector::Vector;
use crate::cpu::{ACT_GROUP, Act, Kernels, OutTile, Rows, SUM_GROUP, Scratch};
use crate::pool::{Job, Task};
use crate::run::attend::Attention;
use crate::run::model::Vectors;

/// Rows that a chunk of a scoring head computes at once: its tile is `(tokens, rows)` floats a thread.
pub const SCORE_ROWS: usize = 64;

/// Rows below which a piece isn't cut further between threads.
const CHUNK_ROWS: u32 = 16;

/// Everything the threads share.
pub struct Shared {
    /// The model's numbers.
    pub hyper: Hyper,
    /// Its matrices, cut into pieces.
    pub matrices: Vec<Matrix>,
    /// The embedding matrix.
    pub embedding: MatrixId,
    /// Its steps.
    pub steps: Vec<StepPlan>,
    /// Its resident vectors.
    pub vectors: Vectors,
    /// Where the pieces are.
    pub seats: Arc<Seats>,
    /// Their bytes.
    pub arena: Arc<Arena>,
    /// Alignment that pieces were widened to.
    pub align: u32,
    /// First of the pieces that stand for single embedding rows.
    pub first_row_piece: u32,
    /// Token of each such piece.
    pub row_tokens: Cells<u32>,
    /// The running batch.
    pub batch: Batch,
    /// Its activations.
    pub buffers: Buffers,
    /// One token's, of the layer ahead, where layers are foreseen.
    pub ahead: Option<Buffers>,
    /// The KV cache and rotary tables.
    pub attention: Attention,
    /// For [`HeadMode::Score`].
    pub score: Score,
    /// Matrix kernels.
    pub kernels: Kernels,
    /// Elementwise kernels.
    pub vector: Vector,
    /// f32 activations instead of int8.
    pub exact: bool,
    /// Looks at the feed-forward networks, when somebody asked for it.
    pub probe: OnceLock<Arc<dyn Probe>>,
    /// The units of a packed model.
    pub units: Option<UnitRoom>,
    /// A sketched head.
    pub head: Option<HeadRoom>,
    /// Adapters.
    pub lora: Option<LoraRoom>,
    /// One a thread; a thread locks only its own.
    pub scratch: Vec<Mutex<ThreadScratch>>,
}

/// What one thread needs beside the shared buffers.
pub struct ThreadScratch {
    /// Panels of decoded weights.
    pub panel: Scratch,
    /// Attention's scores and sums.
    pub attention: Vec<f32>,
    /// A tile of a scoring head `(tokens, SCORE_ROWS)`; empty when nothing is scored.
    pub tile: Vec<f32>,
    /// Up rows of a prompt's units, side by side; empty where no model is packed.
    pub rows: Vec<u8>,
    /// Their decoded columns `(units, part of d)`.
    pub columns: Vec<f32>,
}

impl Job for Shared {
    fn run(&self, task: Task, chunk: u32, thread: usize) {
        let order = Order::of(task);
        match order.phase {
            Phase::Embed => self.embed(PieceId(order.first + chunk)),
            Phase::Rows => self.rows(order, chunk, thread),
            Phase::Choose => self.choose(order),
            Phase::Dots => self.dots(order, chunk, thread),
            Phase::Columns => self.columns(order, chunk, thread),
            Phase::Peek => self.peek(order),
            Phase::Foresee => self.foresee(order),
            Phase::Last => self.last(order),
            Phase::Attend => {
                let Op::Attend { layer, .. } = self.step(order).op else {
                    unreachable!("only attention attends")
                };
                let mut scratch = self.scratch[thread].lock().expect("a panic ends the run");
                self.attention.attend(
                    self,
                    self.lane(order),
                    layer,
                    chunk as usize,
                    &mut scratch.attention,
                );
            }
            Phase::Input | Phase::Store | Phase::Add => {
                let tokens = self.batch.tokens();
                let mut first = (chunk * order.split) as usize;
                if order.phase == Phase::Input && self.one_logit(self.step(order)) {
                    first = tokens - 1;
                }
                for token in first..(first + order.split as usize).min(tokens) {
                    match order.phase {
                        Phase::Input => self.input(order, token),
                        Phase::Store => self.store(order, token),
                        _ => self.add(order, token),
                    }
                }
            }
        }
    }
}

impl Shared {
    /// The activations that an order is for.
    pub fn lane(&self, order: Order) -> &Buffers {
        match &self.ahead {
            Some(ahead) if order.ahead => ahead,
            _ => &self.buffers,
        }
    }

    fn step(&self, order: Order) -> &StepPlan {
        &self.steps[order.step as usize]
    }

    /// Whether a step is a head of which only the last token's logits are wanted.
    pub fn one_logit(&self, step: &StepPlan) -> bool {
        matches!(step.op, Op::Head { .. }) && self.batch.mode() == HeadMode::Last
    }

    fn matrix(&self, linear: Linear) -> &Matrix {
        &self.matrices[linear.matrix.0 as usize]
    }

    /// Phase `Embed`: the rows of one piece, for each token of the batch that they belong to.
    fn embed(&self, piece: PieceId) {
        let matrix = &self.matrices[self.embedding.0 as usize];
        let (first, count) = if piece.0 >= self.first_row_piece {
            (
                see(&self.row_tokens, one(piece.0 - self.first_row_piece))[0],
                1,
            )
        } else {
            matrix.piece_rows(piece.0 - matrix.first.0)
        };
        let slot = self.arena.bytes(self.seats.slot(piece));
        let skew = self.skew(matrix, first);
        let (d, row_bytes) = (self.hyper.d as usize, matrix.row_bytes as usize);
        let tokens = self.batch.tokens();
        for (index, &token) in see(&self.buffers.tokens, 0..tokens).iter().enumerate() {
            let Some(row) = token.checked_sub(first).filter(|row| *row < count) else {
                continue;
            };
            let at = skew + row as usize * row_bytes;
            let x = own(&self.buffers.x, row_of(index, d));
            quant::decode(matrix.ty, &slot[at..at + row_bytes], x);
            if self.hyper.embed_scale != 1.0 {
                self.vector.scale(x, self.hyper.embed_scale);
            }
        }
    }

    /// Bytes from the start of a slot to `row` of `matrix`, when it is the first row there.
    fn skew(&self, matrix: &Matrix, row: u32) -> usize {
        let from = matrix.offset + u64::from(row) * u64::from(matrix.row_bytes);
        (from & u64::from(self.align - 1)) as usize
    }

    /// Phase `Input`: one token's input of a step, as f32 and as int8 codes.
    fn input(&self, order: Order, token: usize) {
        let Hyper {
            d, ff, eps, act, ..
        } = self.hyper;
        let (d, ff) = (d as usize, ff as usize);
        let b = self.lane(order);
        match self.step(order).op {
            Op::Qkv { norm } | Op::Up { norm } | Op::Head { norm } => {
                let n = own(&b.n, row_of(token, d));
                self.vector
                    .rms_norm(see(&b.x, row_of(token, d)), self.vectors.get(norm), eps, n);
                self.quantize(b, n, token);
                self.lora_in(order, token, n);
            }
            Op::Out { .. } => {
                let width = self.hyper.q_dim() as usize;
                let o = see(&b.o, row_of(token, width));
                self.quantize(b, o, token);
                self.lora_in(order, token, o);
            }
            Op::Down { .. } => {
                let g = own(&b.g, row_of(token, ff));
                if let Some(probe) = self.probe.get() {
                    let up = if act.gated() { row_of(token, ff) } else { 0..0 };
                    probe.activations(order.step, token, g, see(&b.u, up));
                }
                if act == Activation::ReluSquared {
                    self.vector.relu_sq(g);
                } else {
                    let u = see(&b.u, row_of(token, ff));
                    match act {
                        Activation::Silu => self.vector.silu_mul(g, u),
                        Activation::Gelu => self.vector.gelu_tanh_mul(g, u),
                        _ => self.vector.relu_mul(g, u),
                    }
                }
                self.quantize(b, g, token);
                self.lora_in(order, token, g);
            }
            Op::Embed | Op::Attend { .. } | Op::Units { .. } | Op::HeadRows => {
                unreachable!("steps without matrices have no input")
            }
        }
    }

    /// `gate = act(gate) * up`.
    pub(super) fn gate_mul(&self, gate: &mut [f32], up: &[f32]) {
        match self.hyper.act {
            Activation::Silu => self.vector.silu_mul(gate, up),
            Activation::Gelu => self.vector.gelu_tanh_mul(gate, up),
            _ => self.vector.relu_mul(gate, up),
        }
    }

    /// The input of a packed layer's gate, which its units' up rows take too.
    pub(super) fn act_up(&self, tokens: usize) -> Act<'_> {
        // Any step but `Out` and `Down` takes the normed residual stream.
        self.act(&self.buffers, Op::Embed, 0, tokens, self.hyper.d as usize)
    }

    /// Int8 codes of `x`, where a kernel may want them.
    fn quantize(&self, b: &Buffers, x: &[f32], token: usize) {
        if self.exact || !x.len().is_multiple_of(ACT_GROUP) {
            return;
        }
        self.kernels.quantize(
            x,
            own(&b.codes, row_of(token, x.len())),
            own(&b.scales, row_of(token, x.len() / ACT_GROUP)),
            own(&b.sums, row_of(token, x.len() / SUM_GROUP)),
        );
    }

    /// What [`Shared::input`] made of `tokens` tokens for a step whose matrices have `cols` columns.
    pub(super) fn act<'b>(
        &self,
        b: &'b Buffers,
        op: Op,
        first: usize,
        tokens: usize,
        cols: usize,
    ) -> Act<'b> {
        let x = match op {
            Op::Out { .. } => &b.o,
            Op::Down { .. } => &b.g,
            _ => &b.n,
        };
        let rows = |width: usize| first * width..(first + tokens) * width;
        let coded = !self.exact && cols.is_multiple_of(ACT_GROUP);
        let part = |width: usize| if coded { rows(width) } else { 0..0 };
        Act {
            cols,
            tokens,
            x: see(x, rows(cols)),
            codes: see(&b.codes, part(cols)),
            scales: see(&b.scales, part(cols / ACT_GROUP)),
            sums: see(&b.sums, part(cols / SUM_GROUP)),
        }
    }

    /// The product that a piece of a step belongs to, which of the step's it is, and its matrix.
    fn linear_of(&self, step: &StepPlan, piece: PieceId) -> (usize, Linear, &Matrix) {
        for (index, linear) in step.linears.iter().flatten().enumerate() {
            let matrix = self.matrix(*linear);
            if piece.0 >= matrix.first.0 && piece.0 - matrix.first.0 < matrix.piece_count() {
                return (index, *linear, matrix);
            }
        }
        unreachable!("the engine computes a step's own pieces")
    }

    /// Phase `Rows`: a part of a piece times the input.
    fn rows(&self, order: Order, chunk: u32, thread: usize) {
        let step = self.step(order);
        let piece = PieceId(order.first + chunk / order.split);
        let (which, linear, matrix) = self.linear_of(step, piece);
        let (piece_first, piece_rows) = matrix.piece_rows(piece.0 - matrix.first.0);
        let part_rows = part_rows(piece_rows, order.split);
        let from = (chunk % order.split) * part_rows;
        let count = part_rows.min(piece_rows.saturating_sub(from)) as usize;
        if count == 0 {
            return;
        }
        let first = (piece_first + from) as usize;
        let row_bytes = matrix.row_bytes as usize;
        let slot = self.arena.bytes(self.seats.slot(piece));
        let at = self.skew(matrix, piece_first) + from as usize * row_bytes;
        let weights = Rows {
            ty: matrix.ty,
            cols: matrix.cols as usize,
            bytes: &slot[at..at + count * row_bytes],
        };
        let tokens = self.batch.tokens();
        let b = self.lane(order);
        let out = match (step.op, which) {
            (Op::Qkv { .. }, 0) => &b.q,
            (Op::Qkv { .. }, 1) => &b.k,
            (Op::Qkv { .. }, _) => &b.v,
            (Op::Up { .. }, 0) => &b.g,
            (Op::Up { .. }, _) => &b.u,
            (Op::Out { .. } | Op::Down { .. }, _) => &b.y,
            (Op::Head { .. }, _) if self.batch.mode() == HeadMode::Score => {
                return self.score_rows(order, &weights, first, thread);
            }
            (Op::Head { .. }, _) => &b.logits,
            (Op::Embed | Op::Attend { .. } | Op::Units { .. } | Op::HeadRows, _) => {
                unreachable!("steps without matrices have no rows")
            }
        };
        let head = matches!(step.op, Op::Head { .. });
        let bias = linear
            .bias
            .map(|bias| &self.vectors.get(bias)[first..first + count]);
        if head || !self.batch.prompt() {
            let token = if head { tokens - 1 } else { 0 };
            let act = self.act(b, step.op, token, 1, weights.cols);
            let out = own(out, first..first + count);
            let sketch = self.head.as_ref().filter(|_| head);
            // A sketch meets the same activations as the rows that it stands for.
            let exact = sketch.map_or(self.exact, |room| room.floats);
            self.kernels.matvec(&weights, &act, exact, out);
            if let Some(bias) = bias {
                self.vector.add_assign(out, bias);
            }
            self.lora_out(order, which, first..first + count, token, out);
            if let Some(room) = sketch {
                room.measure(&weights);
            } else if head && self.hyper.logit_softcap > 0.0 {
                self.vector.softcap(out, self.hyper.logit_softcap);
            }
            return;
        }
        let stride = matrix.rows as usize;
        let act = self.act(b, step.op, 0, tokens, weights.cols);
        let mut scratch = self.scratch[thread].lock().expect("a panic ends the run");
        let len = tokens * stride - first;
        assert!(
            first + len <= out.len(),
            "the buffer has room for the batch"
        );
        // SAFETY: the tile lies within the buffer, as just checked, and rows `first .. first + count`
        // of every token are this chunk's alone.
        let tile = unsafe { OutTile::from_raw(out.as_ptr().add(first), len, stride) };
        self.kernels
            .matmul(&weights, &act, self.exact, tile, &mut scratch.panel);
        drop(scratch);
        if bias.is_none() && self.lora.is_none() {
            return;
        }
        for token in 0..tokens {
            let at = token * stride + first;
            let out = own(out, at..at + count);
            if let Some(bias) = bias {
                self.vector.add_assign(out, bias);
            }
            self.lora_out(order, which, first..first + count, token, out);
        }
    }

    /// A part of the head for every token of the batch, folded into what scoring needs.
    fn score_rows(&self, order: Order, weights: &Rows<'_>, first: usize, thread: usize) {
        let tokens = self.batch.tokens();
        let op = self.step(order).op;
        let act = self.act(&self.buffers, op, 0, tokens, weights.cols);
        let mut scratch = self.scratch[thread].lock().expect("a panic ends the run");
        let ThreadScratch { panel, tile, .. } = &mut *scratch;
        let rows = weights.bytes.len() / weights.row_bytes();
        for start in (0..rows).step_by(SCORE_ROWS) {
            let count = SCORE_ROWS.min(rows - start);
            let bytes =
                &weights.bytes[start * weights.row_bytes()..(start + count) * weights.row_bytes()];
            let part = Rows {
                ty: weights.ty,
                cols: weights.cols,
                bytes,
            };
            let tile = &mut tile[..tokens * count];
            self.kernels
                .matmul(&part, &act, self.exact, OutTile::new(tile, count), panel);
            let rows = first + start..first + start + count;
            for (token, out) in tile.chunks_exact_mut(count).enumerate() {
                self.lora_out(order, 0, rows.clone(), token, out);
            }
            if self.hyper.logit_softcap > 0.0 {
                self.vector.softcap(tile, self.hyper.logit_softcap);
            }
            self.score
                .fold(self.vector, thread, first + start, count, tile);
        }
    }

    /// Phase `Store`: one token's queries and keys are normed and turned, keys and values stored.
    fn store(&self, order: Order, token: usize) {
        let Op::Attend {
            layer,
            q_norm,
            k_norm,
        } = self.step(order).op
        else {
            unreachable!("only attention stores")
        };
        let b = self.lane(order);
        let (q_dim, kv_dim) = (self.hyper.q_dim() as usize, self.hyper.kv_dim() as usize);
        let q = own(&b.q, row_of(token, q_dim));
        let k = own(&b.k, row_of(token, kv_dim));
        if let Some(norm) = q_norm {
            self.vector
                .rms_norm_rows(q, self.vectors.get(norm), self.hyper.eps);
        }
        if let Some(norm) = k_norm {
            self.vector
                .rms_norm_rows(k, self.vectors.get(norm), self.hyper.eps);
        }
        self.attention
            .store(self, layer, token, q, k, see(&b.v, row_of(token, kv_dim)));
    }

    /// Phase `Add`: one token's output joins the residual stream.
    fn add(&self, order: Order, token: usize) {
        let (Op::Out { post } | Op::Down { post } | Op::Units { post, .. }) = self.step(order).op
        else {
            unreachable!("only outputs are added")
        };
        let d = self.hyper.d as usize;
        let b = self.lane(order);
        let y = own(&b.y, row_of(token, d));
        if matches!(self.step(order).op, Op::Units { .. }) && !self.batch.prompt() {
            self.sum_groups(y);
        }
        if let Some(post) = post {
            self.vector
                .rms_norm_rows(y, self.vectors.get(post), self.hyper.eps);
        }
        self.vector.add_assign(own(&b.x, row_of(token, d)), y);
    }
}

/// How many parts a run of `pieces` pieces is cut into, each, so that all threads have work.
pub fn split(pieces: u32, rows_per_piece: u32, threads: u32) -> u32 {
    let wanted = (4 * threads).div_ceil(pieces.max(1));
    wanted.min(rows_per_piece.div_ceil(CHUNK_ROWS)).max(1)
}

/// Rows of each part but the last.
fn part_rows(piece_rows: u32, split: u32) -> u32 {
    piece_rows
        .div_ceil(split)
        .next_multiple_of(pieces::ROW_TILE)
}

fn row_of(token: usize, width: usize) -> Range<usize> {
    token * width..(token + 1) * width
}

fn one(index: u32) -> Range<usize> {
    index as usize..index as usize + 1
}

/// A part of a buffer that an earlier task wrote.
///
/// Private to this room, whose tasks keep the promise of [`Cells`]: a chunk writes a part of its
/// own, and reads what it wrote itself or what tasks before the running one wrote.
pub(super) fn see<T: Copy + Default>(cells: &Cells<T>, range: Range<usize>) -> &[T] {
    // SAFETY: as said above: nobody writes what a running task reads.
    unsafe { cells.read(range) }
}

/// A part of a buffer that is the running chunk's own. Private to this room, as [`see`].
#[allow(clippy::mut_from_ref)]
pub(super) fn own<T: Copy + Default>(cells: &Cells<T>, range: Range<usize>) -> &mut [T] {
    // SAFETY: as said above: chunks of a task write disjoint parts.
    unsafe { cells.write(range) }
}
