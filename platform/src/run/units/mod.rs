//! Sparse layers on the CPU: choosing units by the gate, and computing groups of them.
//!
//! A decoded token's groups are summed apart, `(group, d)`, and added up in order at the end, so the
//! order in which they become ready doesn't show in the result. A prompt batch takes all units in
//! order; their columns are decoded once for all its tokens.

mod prompt;

use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

use leanstream_core::plan::{Activation, Op};
use leanstream_core::quant::QuantType;
use leanstream_core::sparse::store::groups_max;
use leanstream_core::sparse::tables::{Foreseen, Item};
use leanstream_core::sparse::{Chosen, Delivery, Grouping, Select};
use leanstream_core::units::SlotId;

use super::cells::Cells;
use super::packed::Packed;
use super::pass::{Order, Shared, own, see};
use crate::cpu::units::{Term, UnitKernels};
use prompt::PANEL;

pub use prompt::scratch_sizes;

/// Units of a chunk of dot products.
pub(super) const DOTS: usize = 8;

/// How far below zero a sketched gate's estimate may be, in units of the layer's root mean square, for its
/// unit to be looked at. Measured on the ReLU-gated SmolLM2 (`DESIGN.md`): with Q4_0, off by a twelfth on average,
/// 0.05 makes an eighth more candidates, and what is still missed bears 0.1% of the importance, not 0.4%; with Q2_K it
/// takes 0.2 to get from 4% to 0.6%.
fn sketch_margin(sketch: QuantType) -> f32 {
    match sketch {
        QuantType::Q2_K => 0.2,
        _ => 0.05,
    }
}

/// How far below zero a gate may be seen ahead, in units of the layer's root mean square, for its unit to be named.
const LIKELY_LEAST: f32 = -0.25;

/// Size of an activation as far as the gate tells; times `|up . x|` and the column's norm it is what a neuron adds.
fn size(act: Activation, gate: f32) -> f32 {
    match act {
        Activation::Relu => gate.max(0.0),
        Activation::ReluSquared => gate.max(0.0).powi(2),
        // It falls between 0 and about its input, or slightly below 0: its size is near enough to the
        // input's positive part with a smooth corner.
        Activation::Silu | Activation::Gelu => (gate / (1.0 + (-gate).exp())).abs(),
    }
}

/// Puts the `count` units of largest size from `units` into `most`, the largest first, equal ones to a sixteenth
/// of an octave in their order; how many there are. Sizes aren't negative.
fn pick_most(
    units: &[Foreseen],
    most: &mut [Foreseen],
    count: usize,
    size: impl Fn(&Foreseen) -> f32,
) -> usize {
    // A counting sort: linear, and without branches that depend on the sizes. The bits of floats that aren't
    // negative are in order.
    let key = |unit: &Foreseen| size(unit).max(0.0).to_bits() >> 19;
    let largest = units.iter().map(key).max().unwrap_or(0);
    let place = |unit: &Foreseen| (largest - key(unit)).min(255) as usize;
    let mut starts = [0u32; 257];
    for unit in units {
        starts[place(unit) + 1] += 1;
    }
    for bucket in 0..256 {
        starts[bucket + 1] += starts[bucket];
    }
    for unit in units {
        let start = &mut starts[place(unit)];
        most[*start as usize] = *unit;
        *start += 1;
    }
    count.min(units.len())
}

/// Columns are cut between threads at multiples of this.
const CUT: usize = 32;

/// The units in memory, and what a layer that runs needs.
pub struct UnitRoom {
    /// What is known of the units.
    pub packed: Packed,
    kernels: UnitKernels,
    /// The slots `(slots, slot_bytes)`.
    memory: Cells<u8>,
    slot_bytes: usize,
    /// Which of a token's chosen units are used.
    pub select: Select,
    /// Whether a token's units are taken as they stand in the file, not by importance.
    pub in_order: bool,
    /// Whether the policy wants to know the gate's output.
    pub scores_wanted: bool,
    /// The running layer's choice; `count` of them.
    chosen: Cells<Chosen>,
    count: AtomicU32,
    /// The gate's output in units of its root mean square `(ff)`.
    scores: Cells<f32>,
    /// Items of the groups handed over, in the order of handing over `(ff)`.
    items: Cells<Item>,
    /// Activations of the items: `(ff)` of one token, `(tokens, RUN)` of a prompt's group.
    a: Cells<f32>,
    /// Sums of the groups of one token `(groups, d)`.
    sums: Cells<f32>,
    /// Groups handed over: number, first item, end.
    groups: Cells<[u32; 3]>,
    /// How many groups the layer has; valid once all are computed.
    group_count: AtomicU32,
    /// Units of the next layer that may be used, as they stand in the file `(ff)`.
    named: Cells<Foreseen>,
    /// Units of the next layer, likeliest first; `foreseen_count` of them.
    foreseen: Cells<Foreseen>,
    foreseen_count: AtomicU32,
}

impl UnitRoom {
    /// Room for `slots` units of up to `slot_bytes` bytes, and batches of `tokens` tokens. All
    /// memory is touched.
    pub fn new(
        packed: Packed,
        kernels: UnitKernels,
        slots: u32,
        slot_bytes: usize,
        tokens: usize,
        d: usize,
    ) -> Self {
        let ff = packed.ff();
        let groups = groups_max(ff as u32) as usize;
        Self {
            kernels,
            memory: Cells::new(slots as usize * slot_bytes),
            slot_bytes,
            select: Select::All,
            in_order: false,
            scores_wanted: false,
            chosen: Cells::new(ff),
            count: AtomicU32::new(0),
            scores: Cells::new(ff),
            items: Cells::new(ff),
            a: Cells::new(ff.max(tokens * Grouping::RUN as usize)),
            sums: Cells::new(groups * d),
            groups: Cells::new(groups),
            group_count: AtomicU32::new(0),
            named: Cells::new(ff),
            foreseen: Cells::new(ff),
            foreseen_count: AtomicU32::new(0),
            packed,
        }
    }

    /// Bytes of [`UnitRoom::new`] beside the slots and what is [`Packed`].
    pub fn bytes(ff: u64, tokens: u64, d: u64) -> u64 {
        let groups = u64::from(groups_max(ff as u32));
        let each = size_of::<Chosen>() + 4 + size_of::<Item>() + 2 * size_of::<Foreseen>();
        ff * each as u64 + ff.max(tokens * u64::from(Grouping::RUN)) * 4 + groups * (d * 4 + 12)
    }

    /// What a layer that runs has chosen.
    pub fn chosen(&self) -> &[Chosen] {
        see(&self.chosen, 0..self.count.load(Ordering::Relaxed) as usize)
    }

    /// The gate's output by unit, in units of its root mean square.
    pub fn scores(&self) -> Option<&[f32]> {
        self.scores_wanted
            .then(|| see(&self.scores, 0..self.packed.ff()))
    }

    /// The units of the next layer that were foreseen, likeliest first.
    pub fn foreseen(&self) -> &[Foreseen] {
        see(
            &self.foreseen,
            0..self.foreseen_count.load(Ordering::Relaxed) as usize,
        )
    }

    /// Notes a group as the `handed`-th of the layer; its items follow those handed over before.
    pub fn hand_over(&self, handed: usize, number: u32, items: &[Item]) {
        let first = match handed.checked_sub(1) {
            Some(before) => see(&self.groups, before..handed)[0][2] as usize,
            None => 0,
        };
        let end = first + items.len();
        own(&self.items, first..end).copy_from_slice(items);
        own(&self.groups, handed..handed + 1)[0] = [number, first as u32, end as u32];
    }

    /// Number of the `handed`-th group.
    pub fn number(&self, handed: usize) -> u32 {
        see(&self.groups, handed..handed + 1)[0][0]
    }

    /// Items of some of the groups handed over.
    pub fn item_range(&self, handed: Range<usize>) -> Range<usize> {
        let groups = see(&self.groups, handed);
        match groups {
            [] => 0..0,
            [first, ..] => first[1] as usize..groups[groups.len() - 1][2] as usize,
        }
    }

    /// How many groups the layer has.
    pub fn set_group_count(&self, groups: u32) {
        self.group_count.store(groups, Ordering::Relaxed);
    }

    /// Copies a unit from `staged`, the bytes of a staging slot, to its own; whether its checksum
    /// holds.
    pub fn deliver(&self, delivery: Delivery, staged: &[u8]) -> bool {
        let bytes = &staged[delivery.skew as usize..][..delivery.bytes as usize];
        let (content, crc) = bytes.split_at(bytes.len() - 4);
        if crc32c::crc32c(content) != u32::from_le_bytes([crc[0], crc[1], crc[2], crc[3]]) {
            return false;
        }
        let at = delivery.slot.0 as usize * self.slot_bytes;
        own(&self.memory, at..at + bytes.len()).copy_from_slice(bytes);
        true
    }

    /// Names the head's rows of a round, in ascending order.
    pub fn set_chosen(&self, rows: &[u32]) {
        let chosen = own(&self.chosen, 0..rows.len());
        for (chosen, &index) in chosen.iter_mut().zip(rows) {
            *chosen = Chosen {
                index,
                importance: 0.0,
                share: 1.0,
            };
        }
        self.count.store(rows.len() as u32, Ordering::Relaxed);
    }

    /// Items that were handed over.
    pub fn items(&self, range: Range<usize>) -> &[Item] {
        see(&self.items, range)
    }

    /// The kernels.
    pub fn kernels(&self) -> &UnitKernels {
        &self.kernels
    }

    /// A part of a unit in memory.
    pub fn unit(&self, slot: SlotId, part: Range<usize>) -> &[u8] {
        let at = slot.0 as usize * self.slot_bytes;
        see(&self.memory, at + part.start..at + part.end)
    }

    /// Terms of items `range` for the kernels that add columns.
    fn terms(&self, layer: u32, range: Range<usize>) -> impl Iterator<Item = Term<'_>> {
        let layout = self.packed.layers()[layer as usize].layout;
        let down = layout.down_at as usize..(layout.down_at + layout.down_bytes) as usize;
        let blocks = self.packed.blocks(layer);
        let a = see(&self.a, range.clone());
        see(&self.items, range)
            .iter()
            .zip(a)
            .map(move |(item, a)| Term {
                bytes: self.unit(item.slot, down.clone()),
                block: usize::from(blocks[item.index as usize]),
                a: *a,
            })
    }
}

/// Chunks that adding columns is cut into, and the width of each but the last.
pub fn column_chunks(d: usize, threads: usize) -> (u32, usize) {
    let width = d.div_ceil(2 * threads).next_multiple_of(CUT);
    (d.div_ceil(width) as u32, width)
}

impl Shared {
    /// The units of a packed model.
    pub fn unit_room(&self) -> &UnitRoom {
        self.units.as_ref().expect("only a packed model has units")
    }

    /// The bank of the head's rows, behind those of the packed layers.
    pub fn head_bank(&self) -> u32 {
        self.unit_room().packed.layers().len() as u32
    }

    fn is_head(&self, order: Order) -> bool {
        self.steps[order.step as usize].op == Op::HeadRows
    }

    fn unit_layer(&self, order: Order) -> u32 {
        match self.steps[order.step as usize].op {
            Op::Units { layer, .. } => layer,
            other => unreachable!("{other:?} has no units"),
        }
    }

    /// Phase `Choose`: which units the layer uses, by the gate's output.
    pub fn choose(&self, order: Order) {
        if self.is_head(order) {
            return self.choose_rows();
        }
        let room = self.unit_room();
        let layer = self.unit_layer(order);
        let ff = room.packed.ff();
        let tokens = self.batch.tokens();
        let g = see(&self.buffers.g, 0..tokens * ff);
        let norms = room.packed.norms(layer);
        let chosen = own(&room.chosen, 0..ff);
        let mut count = 0;
        let act = self.hyper.act;
        let sparse = act.sparse();
        if self.batch.prompt() {
            let d = self.hyper.d as usize;
            own(&self.buffers.y, 0..tokens * d).fill(0.0);
            for index in 0..ff {
                let active = g
                    .iter()
                    .skip(index)
                    .step_by(ff)
                    .filter(|g| **g > 0.0)
                    .count();
                let share = active as f32 / tokens as f32;
                if active > 0 || !sparse || room.packed.sketched() {
                    chosen[count] = Chosen {
                        index: index as u32,
                        importance: 0.0,
                        share: if sparse { share } else { 1.0 },
                    };
                    count += 1;
                }
            }
        } else {
            let rms = (self.vector.dot(g, g) / ff as f32).sqrt();
            // Estimates near zero may be wrong about their sign; the exact gates will tell.
            let least = match room.packed.layers()[layer as usize].sketch {
                Some(sketch) => -sketch_margin(sketch.ty) * rms,
                None => 0.0,
            };
            if room.scores_wanted {
                let scale = 1.0 / rms.max(f32::MIN_POSITIVE);
                let scores = own(&room.scores, 0..ff);
                scores.copy_from_slice(g);
                self.vector.scale(scores, scale);
            }
            // Without a branch: which gates are open can't be predicted.
            for (index, (&g, &norm)) in (0u32..).zip(g.iter().zip(norms)) {
                chosen[count] = Chosen {
                    index,
                    importance: size(act, g) * norm,
                    share: 1.0,
                };
                count += usize::from((g > least) | !sparse);
            }
            if let Some(shape) = room.packed.shape() {
                let scores = room.scores_wanted.then(|| own(&room.scores, 0..ff));
                count = shape.choose(layer, chosen, scores);
            }
        }
        room.count.store(count as u32, Ordering::Relaxed);
    }

    /// Phase `Peek`: the residual stream with what is computed of the layer's groups, to look ahead.
    pub fn peek(&self, order: Order) {
        let room = self.unit_room();
        let Op::Units { post, .. } = self.steps[order.step as usize].op else {
            unreachable!("only sparse layers are looked ahead of")
        };
        if let Some(shape) = room.packed.shape() {
            let computed = room.item_range(0..order.split as usize).len();
            shape.look(computed, room.chosen().len());
        }
        let b = self.lane(order);
        let d = self.hyper.d as usize;
        let x = own(&b.x, 0..d);
        x.copy_from_slice(see(&self.buffers.x, 0..d));
        let y = own(&b.y, 0..d);
        y.fill(0.0);
        for [number, ..] in see(&room.groups, 0..order.split as usize) {
            let row = *number as usize * d;
            self.vector.add_assign(y, see(&room.sums, row..row + d));
        }
        if let Some(post) = post {
            self.vector
                .rms_norm_rows(y, self.vectors.get(post), self.hyper.eps);
        }
        self.vector.add_assign(x, y);
    }

    /// Sizes of what the units of a sparse step are expected to add, by the gate's output on the batch's
    /// activations or on those ahead, into `out` `(ff)`.
    pub fn sizes(&self, layer: u32, ahead: bool, out: &mut [f32]) {
        let buffers = match &self.ahead {
            Some(buffers) if ahead => buffers,
            _ => &self.buffers,
        };
        let g = see(&buffers.g, 0..out.len());
        let norms = self.unit_room().packed.norms(layer);
        for (out, (&g, &norm)) in out.iter_mut().zip(g.iter().zip(norms)) {
            *out = size(self.hyper.act, g) * norm;
        }
    }

    /// Sizes of what the units of a decoded token's first `handed` groups added to the layer's output, by unit,
    /// into `out` `(ff)`; whether those are all units. `norms` keeps the norms of columns `(ff)`, NaN where not
    /// yet known; `column` is room for one `(d)`.
    pub fn added(
        &self,
        layer: u32,
        handed: usize,
        norms: &mut [f32],
        column: &mut [f32],
        out: &mut [f32],
    ) -> bool {
        let room = self.unit_room();
        let columns = room.packed.columns(layer);
        let range = room.item_range(0..handed);
        let all = range.len() == out.len();
        let items = see(&room.items, range.clone());
        for (item, term) in items.iter().zip(room.terms(layer, range)) {
            let index = item.index as usize;
            if norms[index].is_nan() {
                let whole = 0..column.len();
                let stored = columns.column(term.bytes, term.block).range(whole);
                room.kernels.panel(&stored, column);
                norms[index] = self.vector.dot(column, column).sqrt();
            }
            out[index] = term.a.abs() * norms[index];
        }
        all
    }

    /// Phase `Foresee`: which units the next layer will use, by its gate's output on a residual stream
    /// that isn't complete. `order` names its sparse step.
    pub fn foresee(&self, order: Order) {
        let room = self.unit_room();
        let layer = self.unit_layer(order);
        let ff = room.packed.ff();
        let g = see(&self.lane(order).g, 0..ff);
        let rms = (self.vector.dot(g, g) / ff as f32)
            .sqrt()
            .max(f32::MIN_POSITIVE);
        let named = own(&room.named, 0..ff);
        let norms = room.packed.norms(layer);
        let mut count = 0;
        let mut likely = 0;
        // A neuron a little below zero may turn out above.
        let least = if self.hyper.act.sparse() {
            LIKELY_LEAST
        } else {
            f32::MIN
        };
        let scale = 1.0 / rms;
        for (index, &g) in (0u32..).zip(g) {
            let score = g * scale;
            named[count] = Foreseen { index, score };
            count += usize::from(score > least);
            likely += usize::from(g > 0.0);
        }
        if let Some(shape) = room.packed.shape() {
            (count, likely) = shape.foresee(layer, named);
        }
        let named = &named[..count];
        let foreseen = own(&room.foreseen, 0..count);
        let wanted = match room.select {
            Select::Top(share) => {
                let size = |unit: &Foreseen| unit.score.abs() * norms[unit.index as usize];
                pick_most(named, foreseen, (likely as f32 * share) as usize, size)
            }
            Select::All if self.hyper.act.sparse() => {
                let size = |unit: &Foreseen| unit.score - LIKELY_LEAST;
                pick_most(named, foreseen, likely + likely / 4, size)
            }
            // All will be used: in the order of the file they make the fewest reads.
            Select::All => {
                foreseen.copy_from_slice(named);
                count
            }
        };
        room.foreseen_count.store(wanted as u32, Ordering::Relaxed);
    }

    /// Phase `Dots`: activations of some items.
    pub fn dots(&self, order: Order, chunk: u32, thread: usize) {
        let room = self.unit_room();
        let handed = order.first as usize..order.split as usize;
        let range = room.item_range(handed);
        let head = self.is_head(order);
        let prompt = self.batch.prompt() && !head;
        let step = if prompt { PANEL } else { DOTS };
        let from = range.start + chunk as usize * step;
        let range = from..(from + step).min(range.end);
        if head {
            self.row_dots(range);
        } else if prompt {
            self.prompt_dots(order, range, thread);
        } else {
            self.token_dots(order, range);
        }
    }

    fn token_dots(&self, order: Order, range: Range<usize>) {
        let room = self.unit_room();
        let layout = room.packed.layers()[self.unit_layer(order) as usize].layout;
        let items = see(&room.items, range.clone());
        let a = own(&room.a, range);
        let act = self.act_up(1);
        let rows_dot = |at: u32, (ty, bytes): (QuantType, u32), out: &mut [f32]| {
            let part = at as usize..(at + bytes) as usize;
            let rows = items.iter().map(|item| room.unit(item.slot, part.clone()));
            room.kernels.rows_dot(rows, ty, &act, self.exact, out);
        };
        match layout.gate {
            None => {
                let g = see(&self.buffers.g, 0..room.packed.ff());
                for (a, item) in a.iter_mut().zip(items) {
                    *a = g[item.index as usize];
                }
            }
            // What chose the unit was an estimate.
            Some(row) => {
                rows_dot(0, row, a);
                if let Some(bias) = self.gate_bias(order) {
                    for (a, item) in a.iter_mut().zip(items) {
                        *a += bias[item.index as usize];
                    }
                }
            }
        }
        match layout.up {
            None => self.vector.relu_sq(a),
            Some(row) => {
                let mut products = [0.0; DOTS];
                let products = &mut products[..items.len()];
                rows_dot(layout.up_at, row, products);
                self.gate_mul(a, products);
            }
        }
    }

    /// What is added to the gate of a sparse step `(ff)`.
    fn gate_bias(&self, order: Order) -> Option<&[f32]> {
        let gate = self.steps[order.step as usize - 1].linears[0]?;
        gate.bias.map(|bias| self.vectors.get(bias))
    }

    /// Phase `Columns`: adds the columns of some groups, over a part of the width.
    pub fn columns(&self, order: Order, chunk: u32, thread: usize) {
        let room = self.unit_room();
        let layer = self.unit_layer(order);
        let d = self.hyper.d as usize;
        let (_, width) = column_chunks(d, self.scratch.len());
        let from = chunk as usize * width;
        let part = from..(from + width).min(d);
        let columns = room.packed.columns(layer);
        for handed in order.first as usize..order.split as usize {
            let [number, first, end] = see(&room.groups, handed..handed + 1)[0];
            let range = first as usize..end as usize;
            if self.batch.prompt() {
                self.prompt_columns(layer, &columns, range, part.clone(), thread);
            } else {
                let row = number as usize * d;
                let sum = own(&room.sums, row + part.start..row + part.end);
                sum.fill(0.0);
                room.kernels
                    .columns_add(&columns, room.terms(layer, range), part.start, sum);
            }
        }
    }

    /// The sum over a decoded token's groups, in order.
    pub fn sum_groups(&self, y: &mut [f32]) {
        let room = self.unit_room();
        y.fill(0.0);
        for group in 0..room.group_count.load(Ordering::Relaxed) as usize {
            self.vector
                .add_assign(y, see(&room.sums, group * y.len()..(group + 1) * y.len()));
        }
    }
}

/// Chunks of `items` items in phase `Dots`.
pub fn dot_chunks(items: usize, prompt: bool) -> u32 {
    items.div_ceil(if prompt { PANEL } else { DOTS }) as u32
}
