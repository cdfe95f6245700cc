//! Down columns times activations: `y += a * column`.
//!
//! Sums are kept in registers for as many groups of 32 elements as fit, while all columns of a batch
//! go by: a column costs its own bytes and its scales, and `y` is read and written once a batch.
//! Every element has a fixed sequence of operations, so that neither the groups nor the batches
//! show in the result.

use leanstream_core::quant::{QuantType, decode};

use super::super::prefetch::{PIECES, START, prefetch, prefetch_start};
use super::super::vector::multiversion;
use super::column::{Part, Stored, Window};
use super::kind::{Bf16, F16, F32, Kind, Moved4, Moved5, Moved8, Q8_0};
use super::unpack::{GROUP, Unpack};
use super::{Column, Columns, Term, UnitKernels};

/// Columns whose addresses are gathered before the kernel runs over them.
const BATCH: usize = 32;

impl UnitKernels {
    /// `y[j] += a * column[j]`. Shapes: `y` (column).
    ///
    /// For the moved types and rows of Q8_0 `t = a * scale`, then `y[j] += t * (code[j] - offset)`,
    /// then `y[j] += a * min[j]` where there are minimums; for other rows `y[j] += a * value[j]`.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn column_add(&self, column: &Column<'_>, a: f32, y: &mut [f32]) {
        assert_eq!(y.len(), column.len(), "as many sums as elements");
        let part = column.part(a);
        self.vector
            .add_parts(column.stored(), column.skip(), &[part], y);
    }

    /// [`UnitKernels::column_add`] for many columns of a layer, in order, over the elements from
    /// `start`: `y[j] += sum of a * column[start + j]`. Faster than one after the other, and equal
    /// to it bit for bit. Fastest if columns of one source block follow each other: its row of
    /// scales is then in the nearest cache.
    ///
    /// Threads may share the elements: `start` is a multiple of 32, and so is the length of `y`
    /// (range) unless it reaches the end of the columns.
    ///
    /// # Panics
    /// The range lies outside or is cut elsewhere, or a term has a wrong length or block.
    pub fn columns_add<'a>(
        &self,
        columns: &Columns<'a>,
        terms: impl IntoIterator<Item = Term<'a>>,
        start: usize,
        y: &mut [f32],
    ) {
        let window = Window::new(columns, start..start + y.len());
        let mut terms = terms.into_iter();
        let mut batch = [Part::EMPTY; BATCH];
        loop {
            let mut n = 0;
            for (part, term) in batch.iter_mut().zip(&mut terms) {
                *part = window.part(&term);
                n += 1;
            }
            if n > 0 {
                let parts = &batch[..n];
                self.vector
                    .add_parts(columns.stored(), window.skip(), parts, y);
            }
            if n < BATCH {
                return;
            }
        }
    }
}

multiversion! {
    fn add_parts(stored: Stored, skip: usize, parts: &[Part<'_>], y: &mut [f32]) = add_parts_body;
}

/// All of `y`; `skip` elements of each part's first block come before it.
#[inline(always)]
fn add_parts_body<L: Unpack>(l: L, stored: Stored, skip: usize, parts: &[Part<'_>], y: &mut [f32]) {
    let mins = parts.iter().any(|part| !part.mins.is_empty());
    match (stored, mins) {
        (Stored::Moved8, _) => all::<L, Moved8>(l, parts, y),
        (Stored::Moved4, false) => all::<L, Moved4<false>>(l, parts, y),
        (Stored::Moved4, true) => all::<L, Moved4<true>>(l, parts, y),
        (Stored::Moved5, false) => all::<L, Moved5<false>>(l, parts, y),
        (Stored::Moved5, true) => all::<L, Moved5<true>>(l, parts, y),
        (Stored::Row(QuantType::Q8_0), _) => all::<L, Q8_0>(l, parts, y),
        (Stored::Row(QuantType::F32), _) => all::<L, F32>(l, parts, y),
        (Stored::Row(QuantType::F16), _) => all::<L, F16>(l, parts, y),
        (Stored::Row(QuantType::BF16), _) => all::<L, Bf16>(l, parts, y),
        (Stored::Row(ty), _) => {
            for part in parts {
                add_decoded(l, ty, skip, part, y);
            }
        }
    }
}

/// A row of any type: decoded by blocks, then added.
#[inline(always)]
fn add_decoded<L: Unpack>(l: L, ty: QuantType, skip: usize, part: &Part<'_>, y: &mut [f32]) {
    const CHUNK: usize = 256;
    let mut values = [0f32; CHUNK];
    let (len, size) = (ty.block_len(), ty.block_bytes());
    let (mut skip, mut rest) = (skip, y);
    for blocks in part.bytes.chunks(CHUNK / len * size) {
        let decoded = &mut values[..blocks.len() / size * len];
        decode(ty, blocks, decoded);
        let decoded = &decoded[skip..];
        let n = decoded.len().min(rest.len());
        let (y, after) = rest.split_at_mut(n);
        let (vectors, _) = decoded.as_chunks::<GROUP>();
        for (y, values) in y.as_chunks_mut::<GROUP>().0.iter_mut().zip(vectors) {
            for (y, v) in y.chunks_exact_mut(L::N).zip(values.chunks_exact(L::N)) {
                l.put(y, l.fma(l.splat(part.a), l.take(v), l.take(y)));
            }
        }
        (skip, rest) = (0, after);
    }
}

/// All parts over all of `y`, in runs of groups as long as the registers allow.
#[inline(always)]
fn all<L: Unpack, K: Kind>(l: L, parts: &[Part<'_>], y: &mut [f32]) {
    for part in parts {
        K::check(part, y.len());
    }
    for part in parts.iter().take(PIECES) {
        prefetch_start(part.bytes);
    }
    let (groups, tail) = y.as_chunks_mut::<GROUP>();
    let mut at = 0;
    if L::RUN >= 8 {
        at = add_runs::<L, K, 8>(l, parts, at, groups);
    }
    if L::RUN >= 2 {
        at = add_runs::<L, K, 2>(l, parts, at, groups);
    }
    at = add_runs::<L, K, 1>(l, parts, at, groups);
    if !tail.is_empty() {
        add_tail::<L, K>(l, parts, at, tail);
    }
}

/// Runs of `G` groups from group `at`, as many as fit; returns where they end.
#[inline(always)]
fn add_runs<L: Unpack, K: Kind, const G: usize>(
    l: L,
    parts: &[Part<'_>],
    at: usize,
    groups: &mut [[f32; GROUP]],
) -> usize {
    let runs = groups[at..].as_chunks_mut::<G>().0;
    let ends = at + runs.len() * G;
    for (i, run) in runs.iter_mut().enumerate() {
        add_run::<L, K, G>(l, parts, at + i * G, run);
    }
    ends
}

/// `G` groups, from group `first`.
#[inline(always)]
fn add_run<L: Unpack, K: Kind, const G: usize>(
    l: L,
    parts: &[Part<'_>],
    first: usize,
    y: &mut [[f32; GROUP]; G],
) {
    let mut sums = [[l.splat(0.0); 8]; G];
    for (sums, y) in sums.iter_mut().zip(y.iter()) {
        for (sum, y) in sums.iter_mut().zip(y.chunks_exact(L::N)) {
            *sum = l.take(y);
        }
    }
    for (p, part) in parts.iter().enumerate() {
        if let Some(soon) = parts.get(p + PIECES) {
            if first == 0 {
                prefetch_start(soon.bytes);
            }
            // The starts have been asked for: of long columns as much more as this run uses up.
            let more = first * K::BYTES + START;
            if let Some(more) = soon.bytes.get(more..) {
                prefetch(&more[..more.len().min(G * K::BYTES)]);
            }
        }
        let a = l.splat(part.a);
        for (g, sums) in sums.iter_mut().enumerate() {
            // SAFETY: `all` has checked that the part has as many elements as `y`, and these groups
            // lie in `y`.
            unsafe { K::add(l, part, first + g, a, sums) };
        }
    }
    for (sums, y) in sums.iter().zip(y) {
        for (sum, y) in sums.iter().zip(y.chunks_exact_mut(L::N)) {
            l.put(y, *sum);
        }
    }
}

/// The last elements of float columns, less than a group: `group` filled up with zeros.
#[inline(always)]
fn add_tail<L: Unpack, K: Kind>(l: L, parts: &[Part<'_>], group: usize, tail: &mut [f32]) {
    let mut y = [[0f32; GROUP]];
    y[0][..tail.len()].copy_from_slice(tail);
    for part in parts {
        let from = &part.bytes[group * K::BYTES..];
        let mut bytes = [0; GROUP * size_of::<f32>()];
        bytes[..from.len()].copy_from_slice(from);
        let part = Part {
            bytes: &bytes[..K::BYTES],
            ..*part
        };
        add_run::<L, K, 1>(l, &[part], 0, &mut y);
    }
    tail.copy_from_slice(&y[0][..tail.len()]);
}
