//! One unit of attention: scores, running softmax and weighted sum, block by block.

use super::plan::{CHUNK, Scratch, Unit};
use super::product::{Matrix, multiply};
use super::source::{Floats, Halves, KeyCodes, Source, ValueCodes, widen};
use super::{AttendJob, Out};
use crate::cpu::vector::lanes::{LANES_MAX, Lanes};
use crate::cpu::vector::{exp_lanes, tanh_lanes};
use crate::run::kv::{BLOCK, KvType};

/// Rows up to which a block is widened where it is used, rather than once for all rows.
const DIRECT_ROWS_MAX: usize = 2 * CHUNK;

/// Compute one unit of a checked job.
#[inline(always)]
pub(super) fn unit<L: Lanes>(
    l: L,
    job: &AttendJob<'_>,
    index: usize,
    out: Out,
    scratch: &mut [f32],
) {
    let unit = job.cut().unit(index);
    let layout = job.kv.layout();
    let head_dim = layout.head_dim();
    let width = head_dim.next_multiple_of(LANES_MAX);
    let rows = unit.tokens.1 * unit.heads.1;
    let s = Scratch::cut(scratch, head_dim, rows);
    // SAFETY: here and below, the scratch has room for `rows` rows by `Scratch::cut`, the
    // queries and the output for every (token, head) by `AttendJob::check` and the contract of
    // `AttendJob::attend`, and blocks of the cache are whole.
    unsafe { open(l, job, &unit, &s) };
    let first = job.first_position + unit.tokens.0;
    let last = first + unit.tokens.1 - 1;
    let direct = rows <= DIRECT_ROWS_MAX;
    for block in job.oldest(first) / BLOCK..=last / BLOCK {
        let (keys, values) = job.kv.block(job.layer, unit.kv_head, block);
        // SAFETY: as above.
        unsafe {
            match layout.ty() {
                KvType::F16 => {
                    let keys = Halves(keys.cast(), BLOCK);
                    let values = Halves(values.cast(), width);
                    if direct {
                        rows_of_block(l, job, &unit, &s, block, keys, values);
                    } else {
                        widen(l, keys, head_dim, BLOCK, s.keys);
                        widen(l, values, BLOCK, width, s.values);
                    }
                }
                KvType::Q8_0 => {
                    let scales = s.scales.add(head_dim / 32 * BLOCK);
                    let keys = KeyCodes::of(l, keys, head_dim, s.scales);
                    let values = ValueCodes::of(l, values, head_dim, scales);
                    if direct {
                        rows_of_block(l, job, &unit, &s, block, keys, values);
                    } else {
                        widen(l, keys, head_dim, BLOCK, s.keys);
                        widen(l, values, BLOCK, width, s.values);
                    }
                }
            }
            if !direct {
                let keys = Floats(s.keys, BLOCK);
                let values = Floats(s.values, width);
                rows_of_block(l, job, &unit, &s, block, keys, values);
            }
        }
    }
    // SAFETY: as above.
    unsafe { close(l, job, &unit, &s, out) };
}

/// Scaled queries into the scratch; nothing seen yet.
///
/// # Safety
/// As in [`unit`].
#[inline(always)]
unsafe fn open<L: Lanes>(l: L, job: &AttendJob<'_>, unit: &Unit, s: &Scratch) {
    let head_dim = job.kv.layout().head_dim();
    let width = head_dim.next_multiple_of(LANES_MAX);
    let (rows, heads) = (unit.tokens.1 * unit.heads.1, unit.heads.1);
    for row in 0..rows {
        let token = unit.tokens.0 + row / heads;
        let head = unit.heads.0 + row % heads;
        let from = (token * job.heads + head) * head_dim;
        for d in 0..head_dim {
            // SAFETY: as in `unit`.
            unsafe { *s.q.add(row * head_dim + d) = job.q[from + d] * job.scale };
        }
        // SAFETY: as in `unit`.
        unsafe {
            *s.tops.add(row) = f32::NEG_INFINITY;
            for at in (0..LANES_MAX).step_by(L::N) {
                l.store(s.totals.add(row * LANES_MAX + at), l.splat(0.0));
            }
            for at in (0..width).step_by(L::N) {
                l.store(s.sums.add(row * width + at), l.splat(0.0));
            }
        }
    }
}

/// Outputs: the weighted sums over the sums of weights.
///
/// # Safety
/// As in [`unit`].
#[inline(always)]
unsafe fn close<L: Lanes>(l: L, job: &AttendJob<'_>, unit: &Unit, s: &Scratch, out: Out) {
    let head_dim = job.kv.layout().head_dim();
    let width = head_dim.next_multiple_of(LANES_MAX);
    let (rows, heads) = (unit.tokens.1 * unit.heads.1, unit.heads.1);
    for row in 0..rows {
        let token = unit.tokens.0 + row / heads;
        let head = unit.heads.0 + row % heads;
        // SAFETY: as in `unit`.
        unsafe {
            let factor = 1.0 / l.sum(l.load(s.totals.add(row * LANES_MAX)));
            let from = s.sums.add(row * width);
            let to = out.0.add((token * job.heads + head) * head_dim);
            for d in 0..head_dim {
                // A masked position may have turned -0 into 0; adding 0 makes both 0.
                *to.add(d) = *from.add(d) * factor + 0.0;
            }
        }
    }
}

/// All rows of a unit against one block.
///
/// # Safety
/// As in [`unit`].
#[inline(always)]
unsafe fn rows_of_block<L: Lanes, K: Source<L>, V: Source<L>>(
    l: L,
    job: &AttendJob<'_>,
    unit: &Unit,
    s: &Scratch,
    block: usize,
    keys: K,
    values: V,
) {
    let head_dim = job.kv.layout().head_dim();
    let width = head_dim.next_multiple_of(LANES_MAX);
    let (rows, heads) = (unit.tokens.1 * unit.heads.1, unit.heads.1);
    // The slots of this block that a row sees.
    let seen = |row: usize| {
        let position = job.first_position + unit.tokens.0 + row / heads;
        let from = job.oldest(position).saturating_sub(block * BLOCK);
        let to = (position + 1).saturating_sub(block * BLOCK).min(BLOCK);
        (from, to)
    };
    let mut first = 0;
    while first < rows {
        let count = CHUNK.min(rows - first);
        // The first row of a chunk reaches furthest back, the last furthest ahead.
        let (from, to) = (seen(first).0, seen(first + count - 1).1);
        if from < to {
            // SAFETY: as in `unit`; `to` is at most a block.
            unsafe {
                let q = Matrix {
                    at: s.q.add(first * head_dim),
                    stride: head_dim,
                    count,
                    depth: (0, head_dim),
                };
                multiply::<L, K, false>(l, q, keys, to, s.weights, BLOCK, core::ptr::null());
                for row in 0..count {
                    let weights = s.weights.add(row * BLOCK);
                    cap(l, job.softcap, weights, to);
                    let (from, to) = seen(first + row);
                    for slot in (0..from.min(BLOCK)).chain(to..BLOCK) {
                        *weights.add(slot) = f32::NEG_INFINITY;
                    }
                }
                let mut factors = [1.0; LANES_MAX];
                soften(l, s, first, count, &mut factors);
                let p = Matrix {
                    at: s.weights,
                    stride: BLOCK,
                    count,
                    depth: (from, to),
                };
                let sums = s.sums.add(first * width);
                multiply::<L, V, true>(l, p, values, width, sums, width, factors.as_ptr());
            }
        }
        first += count;
    }
}

/// Soft cap on the first `count` scores of a row (rounded up to vectors).
///
/// # Safety
/// `scores` has BLOCK elements and `count` is at most that.
#[inline(always)]
unsafe fn cap<L: Lanes>(l: L, softcap: Option<f32>, scores: *mut f32, count: usize) {
    if let Some(cap) = softcap {
        for at in (0..count).step_by(L::N) {
            // SAFETY: BLOCK is a multiple of every vector's length.
            unsafe {
                let x = l.mul(l.load(scores.add(at)), l.splat(1.0 / cap));
                l.store(scores.add(at), l.mul(l.splat(cap), tanh_lanes(l, x)));
            }
        }
    }
}

/// Turn the scores of a chunk into weights against the largest score so far, and say by what factor
/// the older sums shrink.
///
/// # Safety
/// As in [`unit`]; rows `first .. first + count`, `count` at most CHUNK.
#[inline(always)]
unsafe fn soften<L: Lanes>(
    l: L,
    s: &Scratch,
    first: usize,
    count: usize,
    factors: &mut [f32; LANES_MAX],
) {
    let mut references = [0.0; CHUNK];
    for row in 0..count {
        // SAFETY: as in `unit`.
        unsafe {
            let scores = s.weights.add(row * BLOCK);
            let mut top = l.load(scores);
            for at in (L::N..BLOCK).step_by(L::N) {
                top = l.max(top, l.load(scores.add(at)));
            }
            let top = l.top(top);
            let old = *s.tops.add(first + row);
            let new = if top > old { top } else { old };
            *s.tops.add(first + row) = new;
            // Where nothing was seen yet, any finite reference gives weights of 0.
            let reference = if new == f32::NEG_INFINITY { 0.0 } else { new };
            references[row] = reference;
            factors[row] = old - reference;
        }
    }
    for at in (0..CHUNK).step_by(L::N) {
        let factor = exp_lanes(l, l.take(&factors[at..]));
        l.put(&mut factors[at..], factor);
    }
    for row in 0..count {
        // SAFETY: as in `unit`.
        unsafe {
            let scores = s.weights.add(row * BLOCK);
            let total = s.totals.add(row_lanes(first + row));
            let reference = l.splat(references[row]);
            let mut sum = l.mul(l.load(total), l.splat(factors[row]));
            for at in (0..BLOCK).step_by(L::N) {
                let e = exp_lanes(l, l.sub(l.load(scores.add(at)), reference));
                sum = l.add(sum, e);
                l.store(scores.add(at), e);
            }
            l.store(total, sum);
        }
    }
}

#[inline(always)]
const fn row_lanes(row: usize) -> usize {
    row * LANES_MAX
}
