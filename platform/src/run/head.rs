//! The head by its sketch: which rows are computed exactly, in rounds.
//!
//! The step before left an estimate of every logit. The rows with the best estimates come first, and
//! those of tokens whose logits the sampler changes; then all that can still reach the k-th best of
//! them ([`leanstream_core::sparse::head`]). What is left can't be chosen, and becomes minus infinity. A
//! round has as many rows as a layer has units, so that the layers' tables do for the head.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use leanstream_core::pack::PackedHead;
use leanstream_core::plan::{Head, Op};
use leanstream_core::quant::QuantType;
use leanstream_core::sparse::head::{self, Bound, Products};

use super::pass::{Order, Shared, own, see};
use super::units::DOTS;
use crate::cpu::{Act, Rows};
use crate::sample::penalised;

/// Rows that are exact whatever their estimates say of each other.
const TOP_LEAST: u32 = 64;

/// By how much a softcapped logit may be off, as a part of the cap.
const SOFTCAP_OFF: f64 = 4e-6;

/// Of which logits the caller makes use.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Wanted {
    /// The `top` most likely tokens are told apart; the others may be minus infinity.
    pub top: u32,
    /// Tokens whose logits are changed before that, at most, each as often as it is named.
    pub changed_max: u32,
}

impl Wanted {
    /// The most likely token.
    pub const BEST: Self = Self {
        top: 1,
        changed_max: 0,
    };
}

/// A packed head as it was loaded.
pub struct HeadParts {
    /// How logits are computed.
    pub head: Head,
    /// Where its rows are.
    pub place: PackedHead,
    /// At least the L2 norm of what each sketch row is off `(vocab)`.
    pub errors: Vec<f32>,
}

/// A sketched head that runs.
pub struct HeadRoom {
    parts: HeadParts,
    top: u32,
    /// Whether its rows and its sketch meet f32 activations.
    pub floats: bool,
    /// The largest squared norm of a sketch row so far, as bits; whether that was all rows.
    norm_squared: AtomicU32,
    measured: AtomicBool,
    state: Mutex<State>,
    rows: AtomicU64,
    passes: AtomicU64,
}

/// Where a token's head stands.
struct State {
    penalty: f32,
    /// Tokens whose logits are changed, sorted.
    changed: Vec<u32>,
    /// Those and the best estimates, sorted; empty before they are found.
    first: Vec<u32>,
    /// Of these, how many are chosen.
    next: usize,
    /// The other rows: threshold and the bound's factor, and how far they have been looked through.
    rest: Option<(f32, f32)>,
    cursor: usize,
    /// A bit for each row that is exact `(vocab)`.
    exact: Vec<u64>,
    /// The rows of a round.
    found: Vec<u32>,
    values: Vec<f32>,
}

impl State {
    fn is_exact(&self, row: u32) -> bool {
        self.exact[row as usize / 64] >> (row % 64) & 1 != 0
    }
}

/// Most rows that come first.
fn first_max(wanted: Wanted, vocab: u32) -> u32 {
    first(wanted.top, vocab).saturating_add(wanted.changed_max.min(vocab))
}

fn first(top: u32, vocab: u32) -> u32 {
    top.saturating_mul(2).max(TOP_LEAST).min(vocab)
}

impl HeadRoom {
    /// For rounds of `round` rows. All memory is touched.
    pub fn new(parts: HeadParts, wanted: Wanted, round: usize, exact: bool) -> Self {
        let vocab = parts.errors.len() as u32;
        let first = first_max(wanted, vocab) as usize;
        let floats = matches!(
            parts.place.row.0,
            QuantType::F32 | QuantType::F16 | QuantType::BF16
        );
        Self {
            top: wanted.top.max(1),
            floats: exact || floats,
            norm_squared: AtomicU32::new(0),
            measured: AtomicBool::new(false),
            state: Mutex::new(State {
                penalty: 1.0,
                changed: Vec::with_capacity(wanted.changed_max as usize),
                first: Vec::with_capacity(first),
                next: 0,
                rest: None,
                cursor: 0,
                exact: vec![0; vocab.div_ceil(64) as usize],
                found: vec![0; round],
                values: Vec::with_capacity(first),
            }),
            rows: AtomicU64::new(0),
            passes: AtomicU64::new(0),
            parts,
        }
    }

    /// Bytes of [`HeadRoom::new`] beside the errors.
    pub fn bytes(wanted: Wanted, vocab: u32, round: u64) -> u64 {
        let first = u64::from(first_max(wanted, vocab));
        let changed = u64::from(wanted.changed_max);
        changed * 4 + first * 8 + u64::from(vocab.div_ceil(64)) * 8 + round * 4
    }

    /// A pass begins whose logits of `changed` tokens will be divided by `penalty` (multiplied where
    /// negative). Tokens outside of the vocabulary and more than were [announced](Wanted) are left out.
    pub fn expect(&self, penalty: f32, changed: impl Iterator<Item = u32>) {
        let state = &mut *self.state.lock().expect("a panic ends the run");
        let vocab = self.parts.errors.len() as u32;
        state.penalty = penalty;
        state.changed.clear();
        if penalty != 1.0 {
            let room = state.changed.capacity();
            let known = changed.filter(|token| *token < vocab);
            state.changed.extend(known.take(room));
            state.changed.sort_unstable();
            state.changed.dedup();
        }
    }

    /// Forgets where the last pass stood.
    pub fn begin(&self) {
        let state = &mut *self.state.lock().expect("a panic ends the run");
        state.first.clear();
        state.next = 0;
        state.rest = None;
        state.cursor = 0;
        state.exact.fill(0);
    }

    /// Rows computed exactly, and passes, since the start.
    pub fn counts(&self) -> (u64, u64) {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        (read(&self.rows), read(&self.passes))
    }

    /// Looks at sketch rows that a pass multiplies by, until all have been seen: the bound needs to
    /// know how large they get.
    pub fn measure(&self, rows: &Rows<'_>) {
        if self.measured.load(Ordering::Relaxed) {
            return;
        }
        for row in rows.bytes.chunks_exact(rows.row_bytes()) {
            let squared = norm_squared(row);
            // The bits of floats that aren't negative are in order, NaN above all.
            self.norm_squared
                .fetch_max((squared as f32).next_up().to_bits(), Ordering::Relaxed);
        }
    }

    /// The bound for the activation of this pass.
    fn bound(&self, act: &Act<'_>) -> Bound {
        let squares = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
        let squared = if self.floats {
            squares(act.x)
        } else {
            let groups = act.codes.chunks_exact(act.codes.len() / act.scales.len());
            let group = |codes: &[i8]| codes.iter().map(|c| i32::from(*c).pow(2)).sum::<i32>();
            groups
                .zip(act.scales)
                .map(|(codes, scale)| f64::from(*scale).powi(2) * f64::from(group(codes)))
                .sum()
        };
        let norm = squared.sqrt() * (1.0 + 1e-10);
        let row = f64::from(f32::from_bits(self.norm_squared.load(Ordering::Relaxed)));
        let bound = match self.parts.head {
            Head::Fast => Bound::likely,
            Head::Full | Head::Exact => Bound::proof,
        };
        let products = products(self.parts.place.row.0, self.floats);
        let row_norm = row.sqrt() * (1.0 + 1e-10);
        bound(norm, act.cols as u32, row_norm, products)
    }
}

/// How the kernels multiply rows of `ty`.
fn products(ty: QuantType, floats: bool) -> Products {
    use QuantType as Q;
    match ty {
        _ if floats => Products::Floats,
        Q::Q4_1 | Q::Q5_1 | Q::Q2_K | Q::Q4_K | Q::Q5_K => Products::CodesAndMinimums,
        _ => Products::Codes,
    }
}

/// At least the squared L2 norm of a Q4_0 row: codes are within 8.
fn norm_squared(row: &[u8]) -> f64 {
    let scales = row.chunks_exact(QuantType::Q4_0.block_bytes());
    let squared = scales.map(|block| {
        let scale = half::f16::from_le_bytes([block[0], block[1]]);
        scale.to_f64().powi(2)
    });
    squared.sum::<f64>() * f64::from(8 * 8 * 32)
}

impl Shared {
    /// A sketched head.
    pub fn head_room(&self) -> &HeadRoom {
        self.head
            .as_ref()
            .expect("only a sketch has rows to choose")
    }

    /// What the head's rows are multiplied by.
    fn head_act(&self) -> Act<'_> {
        let last = self.batch.tokens() - 1;
        // Any step but `Out` and `Down` takes the normed residual stream.
        self.act(&self.buffers, Op::HeadRows, last, 1, self.hyper.d as usize)
    }

    /// Phase `Choose` of the head: the next round's rows; none when all are exact that have to be.
    pub fn choose_rows(&self) {
        let room = self.head_room();
        let state = &mut *room.state.lock().expect("a panic ends the run");
        let vocab = self.hyper.vocab;
        let logits = see(&self.buffers.logits, 0..vocab as usize);
        if state.first.is_empty() {
            room.measured.store(true, Ordering::Relaxed);
            state.first.resize(first(room.top, vocab) as usize, 0);
            head::best(logits, &mut state.first);
            state.first.extend_from_slice(&state.changed);
            state.first.sort_unstable();
            state.first.dedup();
            room.passes.fetch_add(1, Ordering::Relaxed);
        }
        let left = &state.first[state.next..];
        let mut count = left.len().min(state.found.len());
        state.found[..count].copy_from_slice(&left[..count]);
        state.next += count;
        if count == 0 {
            let (threshold, h) = match state.rest {
                Some(rest) => rest,
                None => {
                    let bound = room.bound(&self.head_act());
                    let rest = (bound.threshold(self.least(room.top, state)), bound.h);
                    *state.rest.insert(rest)
                }
            };
            while count == 0 && state.cursor < vocab as usize {
                let cursor = state.cursor;
                let found = self.unit_room().kernels().above(
                    &logits[cursor..],
                    &room.parts.errors[cursor..],
                    h,
                    threshold,
                    cursor as u32,
                    &mut state.found,
                );
                let all = found.unwrap_or(state.found.len());
                state.cursor = match found {
                    Some(_) => vocab as usize,
                    None => state.found[all - 1] as usize + 1,
                };
                for index in 0..all {
                    let row = state.found[index];
                    if !state.is_exact(row) {
                        state.found[count] = row;
                        count += 1;
                    }
                }
            }
        }
        for &row in &state.found[..count] {
            state.exact[row as usize / 64] |= 1 << (row % 64);
        }
        room.rows.fetch_add(count as u64, Ordering::Relaxed);
        self.unit_room().set_chosen(&state.found[..count]);
    }

    /// What a logit that isn't exact yet must reach to be among the `top` best.
    fn least(&self, top: u32, state: &mut State) -> f32 {
        let logits = see(&self.buffers.logits, 0..self.hyper.vocab as usize);
        let cap = self.hyper.logit_softcap;
        state.values.clear();
        let exact = state.first.iter().map(|row| logits[*row as usize]);
        state.values.extend(exact);
        if cap > 0.0 {
            self.vector.softcap(&mut state.values, cap);
        }
        for (value, row) in state.values.iter_mut().zip(&state.first) {
            if state.changed.binary_search(row).is_ok() {
                *value = penalised(*value, state.penalty);
            }
        }
        let least = head::kth(&mut state.values, top as usize);
        if cap > 0.0 {
            uncapped(least, cap)
        } else {
            least
        }
    }

    /// Phase `Dots` of the head: exact logits of some rows.
    pub fn row_dots(&self, range: Range<usize>) {
        let (ty, bytes) = self.head_room().parts.place.row;
        let items = self.unit_room().items(range);
        let mut products = [0.0; DOTS];
        let products = &mut products[..items.len()];
        let rows = items
            .iter()
            .map(|item| self.unit_room().unit(item.slot, 0..bytes as usize));
        self.unit_room()
            .kernels()
            .rows_dot(rows, ty, &self.head_act(), self.exact, products);
        for (item, product) in items.iter().zip(products) {
            let row = item.index as usize;
            own(&self.buffers.logits, row..row + 1)[0] = *product;
        }
    }

    /// Phase `Last`: what isn't exact can't be chosen.
    pub fn last(&self, _: Order) {
        let room = self.head_room();
        let state = &*room.state.lock().expect("a panic ends the run");
        let logits = own(&self.buffers.logits, 0..self.hyper.vocab as usize);
        if self.hyper.logit_softcap > 0.0 {
            self.vector.softcap(logits, self.hyper.logit_softcap);
        }
        for (logit, row) in logits.iter_mut().zip(0..) {
            if !state.is_exact(row) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

/// What a logit must reach for its softcapped value to be `capped`, rounding allowed for.
fn uncapped(capped: f32, cap: f32) -> f32 {
    let share = f64::from(capped) / f64::from(cap) - SOFTCAP_OFF;
    if share >= 1.0 {
        return f32::INFINITY;
    }
    // Below -1 there is no logarithm, and nothing that isn't reached.
    let logit = share.atanh() * f64::from(cap);
    if logit.is_nan() {
        return f32::NEG_INFINITY;
    }
    ((logit - logit.abs() * 1e-6) as f32).next_down()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::Vector;

    #[test]
    fn what_stays_below_the_threshold_stays_below_the_capped_one() {
        for vector in Vector::available() {
            for cap in [30.0f32, 50.0] {
                for step in -700..700 {
                    let tau = step as f32 * 0.2001;
                    let mut capped = [tau];
                    vector.softcap(&mut capped, cap);
                    let least = uncapped(capped[0], cap);
                    assert!(least <= tau);
                    let mut below = [least.next_down()];
                    vector.softcap(&mut below, cap);
                    assert!(below[0] < capped[0], "{tau}: {least}");
                }
                assert_eq!(uncapped(cap * 1.01, cap), f32::INFINITY);
                assert_eq!(uncapped(-cap * 1.01, cap), f32::NEG_INFINITY);
                assert_eq!(uncapped(f32::NEG_INFINITY, cap), f32::NEG_INFINITY);
            }
        }
    }

    #[test]
    fn norms_are_bounds() {
        let mut row = [0u8; 36];
        row[..2].copy_from_slice(&half::f16::from_f32(0.5).to_le_bytes());
        row[18..20].copy_from_slice(&half::f16::from_f32(-2.0).to_le_bytes());
        // Code 0 is -8: as large as it gets.
        let mut values = [0.0; 64];
        leanstream_core::quant::decode(QuantType::Q4_0, &row, &mut values);
        let squared: f64 = values.iter().map(|v| f64::from(*v).powi(2)).sum();
        assert_eq!(norm_squared(&row), squared);
    }
}
