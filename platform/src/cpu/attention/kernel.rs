//! One unit of attention: scores, running softmax and weighted sum, block by block.

use super::plan::{CHUNK, Scratch, Unit};
use super::{AttendJob, Out};
use crate::cpu::vector::lanes::{LANES_MAX, Lanes};
use crate::cpu::vector::{exp_lanes, tanh_lanes};
use crate::run::kv::{BLOCK, KvType};

/// Rows up to which half floats are widened where they are used, rather than once a block.
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
    let direct = rows <= DIRECT_ROWS_MAX && layout.ty() == KvType::F16;
    for block in job.oldest(first) / BLOCK..=last / BLOCK {
        let (keys, values) = job.kv.block(job.layer, unit.kv_head, block);
        if direct {
            let keys = Halves(keys.cast(), BLOCK);
            let values = Halves(values.cast(), width);
            // SAFETY: as above.
            unsafe { rows_of_block(l, job, &unit, &s, block, keys, values) };
        } else {
            // SAFETY: as above.
            unsafe {
                match layout.ty() {
                    KvType::F16 => {
                        widen_f16(l, keys.cast(), head_dim * BLOCK, s.keys);
                        widen_f16(l, values.cast(), BLOCK * width, s.values);
                    }
                    KvType::Q8_0 => {
                        widen_q8_keys(l, keys, head_dim, s.keys);
                        widen_q8_values(l, values, head_dim, s.values);
                    }
                }
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

/// Half floats to floats. `count` is a multiple of LANES_MAX.
///
/// # Safety
/// Both have `count` elements.
#[inline(always)]
unsafe fn widen_f16<L: Lanes>(l: L, from: *const u16, count: usize, to: *mut f32) {
    for at in (0..count).step_by(L::N) {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.store(to.add(at), l.load_f16(from.add(at))) };
    }
}

/// A q8_0 block of keys to floats (head_dim, BLOCK). Exact: the product has 18 bits at most.
///
/// # Safety
/// `from` is a whole block, `to` has `head_dim * BLOCK` floats.
#[inline(always)]
unsafe fn widen_q8_keys<L: Lanes>(l: L, from: *const u8, head_dim: usize, to: *mut f32) {
    for d in 0..head_dim {
        for at in (0..BLOCK).step_by(L::N) {
            // SAFETY: by the layout of blocks.
            unsafe {
                let scales = l.load_f16(from.cast::<u16>().add(d / 32 * BLOCK + at));
                let codes = from.add(head_dim / 32 * BLOCK * 2 + d * BLOCK + at);
                l.store(
                    to.add(d * BLOCK + at),
                    l.mul(l.load_i8(codes.cast()), scales),
                );
            }
        }
    }
}

/// A q8_0 block of values to floats (BLOCK, head_dim). Exact.
///
/// # Safety
/// `from` is a whole block, `to` has `head_dim * BLOCK` floats.
#[inline(always)]
unsafe fn widen_q8_values<L: Lanes>(l: L, from: *const u8, head_dim: usize, to: *mut f32) {
    let groups = head_dim / 32;
    // The scales of a block, widened together.
    for slot in 0..BLOCK {
        for group in 0..groups {
            // SAFETY: by the layout of blocks.
            unsafe {
                let bits = from.cast::<u16>().add(slot * groups + group).read();
                let scale = l.splat(half::f16::from_bits(bits).to_f32_const());
                let codes = from.add(groups * BLOCK * 2 + slot * head_dim + group * 32);
                let to = to.add(slot * head_dim + group * 32);
                for at in (0..32).step_by(L::N) {
                    l.store(to.add(at), l.mul(l.load_i8(codes.add(at).cast()), scale));
                }
            }
        }
    }
}

/// The right-hand matrix of a product: a vector of row `k` from column `column`.
pub(super) trait Source<L: Lanes>: Copy {
    /// # Safety
    /// The matrix has the elements.
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V;
}

/// Floats with a stride.
#[derive(Clone, Copy)]
struct Floats(*const f32, usize);

impl<L: Lanes> Source<L> for Floats {
    #[inline(always)]
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load(self.0.add(k * self.1 + column)) }
    }
}

/// Half floats with a stride.
#[derive(Clone, Copy)]
struct Halves(*const u16, usize);

impl<L: Lanes> Source<L> for Halves {
    #[inline(always)]
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load_f16(self.0.add(k * self.1 + column)) }
    }
}

/// The left-hand matrix: `count` rows, of which the columns `depth.0 .. depth.1` take part.
#[derive(Clone, Copy)]
struct Matrix {
    at: *const f32,
    stride: usize,
    count: usize,
    depth: (usize, usize),
}

/// `out = a * b`, or `out = factors * out + a * b` row by row where `ADD`. Computes `columns` columns,
/// rounded up to vectors. Each element is a sum over the depth in order.
///
/// # Safety
/// The matrices have the elements, `out` the rows of `a` and the columns; `factors` has LANES_MAX
/// elements where `ADD`.
#[inline(always)]
unsafe fn multiply<L: Lanes, B: Source<L>, const ADD: bool>(
    l: L,
    a: Matrix,
    b: B,
    columns: usize,
    out: *mut f32,
    stride: usize,
    factors: *const f32,
) {
    macro_rules! rows {
        ($columns:literal, $column:expr) => {
            match a.count {
                1 => tile::<L, B, 1, $columns, ADD>(l, a, b, $column, out, stride, factors),
                2 => tile::<L, B, 2, $columns, ADD>(l, a, b, $column, out, stride, factors),
                3 => tile::<L, B, 3, $columns, ADD>(l, a, b, $column, out, stride, factors),
                4 => tile::<L, B, 4, $columns, ADD>(l, a, b, $column, out, stride, factors),
                5 => tile::<L, B, 5, $columns, ADD>(l, a, b, $column, out, stride, factors),
                _ => tile::<L, B, 6, $columns, ADD>(l, a, b, $column, out, stride, factors),
            }
        };
    }
    let mut column = 0;
    while column < columns {
        let left = (columns - column).div_ceil(L::N);
        // SAFETY: the caller vouches for the elements.
        unsafe {
            if L::PANEL >= 4 && left >= 4 {
                rows!(4, column);
                column += 4 * L::N;
            } else if L::PANEL >= 2 && left >= 2 {
                rows!(2, column);
                column += 2 * L::N;
            } else {
                rows!(1, column);
                column += L::N;
            }
        }
    }
}

/// One register tile of [`multiply`].
///
/// # Safety
/// As there.
#[inline(always)]
unsafe fn tile<L: Lanes, B: Source<L>, const ROWS: usize, const COLUMNS: usize, const ADD: bool>(
    l: L,
    a: Matrix,
    b: B,
    column: usize,
    out: *mut f32,
    stride: usize,
    factors: *const f32,
) {
    let mut sums = [[l.splat(0.0); COLUMNS]; ROWS];
    // SAFETY: the caller vouches for the elements.
    unsafe {
        if ADD {
            for (r, sums) in sums.iter_mut().enumerate() {
                let factor = l.splat(*factors.add(r));
                for (c, sum) in sums.iter_mut().enumerate() {
                    *sum = l.mul(l.load(out.add(r * stride + column + c * L::N)), factor);
                }
            }
        }
        for k in a.depth.0..a.depth.1 {
            let mut right = [l.splat(0.0); COLUMNS];
            for (c, right) in right.iter_mut().enumerate() {
                *right = b.at(l, k, column + c * L::N);
            }
            for (r, sums) in sums.iter_mut().enumerate() {
                let left = l.splat(*a.at.add(r * a.stride + k));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = l.fma(left, right, *sum);
                }
            }
        }
        for (r, sums) in sums.iter().enumerate() {
            for (c, sum) in sums.iter().enumerate() {
                l.store(out.add(r * stride + column + c * L::N), *sum);
            }
        }
    }
}
