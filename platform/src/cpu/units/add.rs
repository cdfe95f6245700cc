//! Down columns times activations: `y += a * column`.

use half::f16;
use leanstream_core::quant::decode;

use super::super::vector::lanes::Lanes;
use super::super::vector::multiversion;
use super::column::CUT;
use super::{Column, Columns, Stored, Term, UnitKernels};

impl UnitKernels {
    /// `y[j] += a * column[j]`. Shapes: `y` (column).
    ///
    /// For the moved types `t = a * scale[j]`, then `y[j] += t * (code[j] - offset)`, then
    /// `y[j] += a * min[j]` where there are minimums; for rows `y[j] += a * value[j]`.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn column_add(&self, column: &Column<'_>, a: f32, y: &mut [f32]) {
        assert_eq!(y.len(), column.len(), "as many sums as elements");
        self.vector.column_add(column, a, y);
    }

    /// [`UnitKernels::column_add`] for many columns of a layer, in order, over the elements from
    /// `start`: `y[j] += sum of a * column[start + j]`. Faster than one after the other, and equal
    /// to it bit for bit.
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
        for term in terms {
            let column = columns.column(term.bytes, term.block);
            let part = column.range(start..start + y.len());
            self.vector.column_add(&part, term.a, y);
        }
    }
}

multiversion! {
    fn column_add(column: &Column<'_>, a: f32, y: &mut [f32]) = column_add_body;
}

#[inline(always)]
fn column_add_body<L: Lanes>(_: L, column: &Column<'_>, a: f32, y: &mut [f32]) {
    let half = |bits: u16| f16::from_bits(bits).to_f32();
    let offset = if column.mins.is_empty() {
        i16::from(column.stored.offset())
    } else {
        0
    };
    let moved = |y: &mut [f32], code: &dyn Fn(usize) -> i16| {
        for (j, y) in y.iter_mut().enumerate() {
            let t = a * half(column.scales[j]);
            *y += t * f32::from(code(j) - offset);
            if !column.mins.is_empty() {
                *y += a * half(column.mins[j]);
            }
        }
    };
    match column.stored {
        Stored::Moved8 => moved(y, &|j| i16::from(column.bytes[j].cast_signed())),
        Stored::Moved5 => moved(y, &|j| i16::from(column.bytes[j])),
        Stored::Moved4 => moved(y, &|j| i16::from(column.bytes[j / 2] >> (4 * (j % 2)) & 15)),
        Stored::Row(ty) => {
            let mut values = [0f32; 256];
            let len = ty.block_len();
            let (mut skip, mut at) = (column.skip, 0);
            let step = 256 / len * ty.block_bytes();
            for bytes in column.bytes.chunks(step) {
                let n = bytes.len() / ty.block_bytes() * len;
                decode(ty, bytes, &mut values[..n]);
                let n = (n - skip).min(y.len() - at);
                for (y, v) in y[at..at + n].iter_mut().zip(&values[skip..]) {
                    *y += a * v;
                }
                (at, skip) = (at + n, 0);
            }
        }
    }
    debug_assert!(y.len().is_multiple_of(CUT) || matches!(column.stored, Stored::Row(_)));
}
