//! Units of a prompt's batch: taken in the order of the file, each decoded once for all tokens.

use std::ops::Range;

use leanstream_core::quant::QuantType;
use leanstream_core::sparse::Grouping;
use leanstream_core::sparse::tables::Item;

use super::column_chunks;
use crate::cpu::units::Columns;
use crate::cpu::{OutTile, Rows};
use crate::run::pass::{Order, Shared, ThreadScratch, own, see};

/// Units whose up rows a chunk multiplies at once.
pub(super) const PANEL: usize = 16;

impl Shared {
    /// Activations of some items, for all tokens.
    pub(super) fn prompt_dots(&self, order: Order, range: Range<usize>, thread: usize) {
        let room = self.unit_room();
        let layout = room.packed.layers()[self.unit_layer(order) as usize].layout;
        let ff = room.packed.ff();
        let tokens = self.batch.tokens();
        let run = Grouping::RUN as usize;
        // A prompt's groups come one after the other, each at the front of what is its own.
        let first = range.start % run;
        let items = see(&room.items, range);
        let count = items.len();
        let a = |token: usize| token * run + first..token * run + first + count;
        let gate = |token: usize, item: &Item| {
            let at = token * ff + item.index as usize;
            at..at + 1
        };
        if let Some(row) = layout.gate {
            self.prompt_rows(items, 0, row, first, thread);
            let bias = self.gate_bias(order);
            for token in 0..tokens {
                for (exact, item) in see(&room.a, a(token)).iter().zip(items) {
                    let bias = bias.map_or(0.0, |bias| bias[item.index as usize]);
                    // A unit's gates are its chunk's own.
                    own(&self.buffers.g, gate(token, item))[0] = exact + bias;
                }
            }
        }
        if let Some(row) = layout.up {
            self.prompt_rows(items, layout.up_at, row, first, thread);
        }
        for token in 0..tokens {
            let a = own(&room.a, a(token));
            let mut gates = [0.0; PANEL];
            let gates = &mut gates[..count];
            for (g, item) in gates.iter_mut().zip(items) {
                *g = see(&self.buffers.g, gate(token, item))[0];
            }
            match layout.up {
                Some(_) => self.gate_mul(gates, a),
                None => self.vector.relu_sq(gates),
            }
            a.copy_from_slice(gates);
        }
    }

    /// Multiplies a row of each unit, which begins at byte `at`, by all tokens' inputs, into `room.a` from column
    /// `first` of its group.
    fn prompt_rows(
        &self,
        items: &[Item],
        at: u32,
        (ty, bytes): (QuantType, u32),
        first: usize,
        thread: usize,
    ) {
        let room = self.unit_room();
        let tokens = self.batch.tokens();
        let run = Grouping::RUN as usize;
        let (count, bytes) = (items.len(), bytes as usize);
        let mut scratch = self.scratch[thread].lock().expect("a panic ends the run");
        let ThreadScratch { panel, rows, .. } = &mut *scratch;
        for (row, item) in rows.chunks_exact_mut(bytes).zip(items) {
            row.copy_from_slice(room.unit(item.slot, at as usize..at as usize + bytes));
        }
        let weights = Rows {
            ty,
            cols: self.hyper.d as usize,
            bytes: &rows[..count * bytes],
        };
        let len = tokens * run - first;
        assert!(
            first + len <= room.a.len(),
            "the buffer has room for the batch"
        );
        // SAFETY: the tile lies within the buffer, as just checked, and columns `first .. first +
        // count` of every token are this chunk's alone.
        let tile = unsafe { OutTile::from_raw(room.a.as_ptr().add(first), len, run) };
        room.kernels
            .kernels()
            .matmul(&weights, &self.act_up(tokens), self.exact, tile, panel);
    }
    /// Adds the columns of a group over `part` of the width, to every token's sum.
    pub(super) fn prompt_columns(
        &self,
        layer: u32,
        columns: &Columns<'_>,
        range: Range<usize>,
        part: Range<usize>,
        thread: usize,
    ) {
        let room = self.unit_room();
        let d = self.hyper.d as usize;
        let run = Grouping::RUN as usize;
        let count = range.len();
        let mut scratch = self.scratch[thread].lock().expect("a panic ends the run");
        let decoded = &mut scratch.columns[..count * part.len()];
        for (out, term) in decoded
            .chunks_exact_mut(part.len())
            .zip(room.terms(layer, range))
        {
            let column = columns.column(term.bytes, term.block).range(part.clone());
            room.kernels.panel(&column, out);
        }
        for token in 0..self.batch.tokens() {
            let a = see(&room.a, token * run..token * run + count);
            let y = own(
                &self.buffers.y,
                token * d + part.start..token * d + part.end,
            );
            room.kernels.outer_add(decoded, part.len(), a, run, 0, y);
        }
    }
}

/// Bytes of a thread's scratch for a prompt's up rows, and floats for its columns.
pub fn scratch_sizes(row_bytes: usize, d: usize, threads: usize) -> (usize, usize) {
    let (_, width) = column_chunks(d, threads);
    (PANEL * row_bytes, Grouping::RUN as usize * width.min(d))
}
