//! Columns of a down matrix: the part of a unit that says what the neuron adds to the residual.

use std::ops::Range;

use leanstream_core::quant::QuantType;

/// Elements between two places where a column may be cut: a block of the moved types, a whole
/// number of bytes and of vectors.
pub const CUT: usize = 32;

/// How the elements of a column lie in a unit. Numbers are little endian, without alignment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stored {
    /// Integers of Q8_0, a signed byte each; scales apart.
    Moved8,
    /// Integers of Q4_0 or Q4_1, 0 to 15: element 2i in the low half of byte i, 2i + 1 in the high
    /// one; scales apart.
    Moved4,
    /// Integers of Q5_0 or Q5_1, 0 to 31, a byte each; scales apart.
    Moved5,
    /// A row of this type, scales inside: re-quantized columns, and float ones.
    Row(QuantType),
}

impl Stored {
    /// Bytes of a column of `d` elements; `None` when blocks don't divide it or the size overflows.
    #[must_use]
    pub const fn bytes(self, d: usize) -> Option<usize> {
        match self {
            Self::Row(ty) => ty.row_bytes(d),
            _ if !d.is_multiple_of(CUT) => None,
            Self::Moved4 => Some(d / 2),
            Self::Moved8 | Self::Moved5 => Some(d),
        }
    }

    /// Elements and bytes of the smallest piece: a block, or two nibbles.
    const fn piece(self) -> (usize, usize) {
        match self {
            Self::Moved8 | Self::Moved5 => (1, 1),
            Self::Moved4 => (2, 1),
            Self::Row(ty) => (ty.block_len(), ty.block_bytes()),
        }
    }
}

/// What all columns of one layer share.
#[derive(Clone, Copy, Debug)]
pub struct Columns<'a> {
    stored: Stored,
    d: usize,
    /// Half floats, (blocks, d); empty for rows.
    scales: &'a [u16],
    /// Half floats, (blocks, d); empty where an integer has an offset.
    mins: &'a [u16],
}

impl<'a> Columns<'a> {
    /// Columns of `d` elements. For the moved types, row `b` of `scales` (half-float bits,
    /// (blocks, d)) belongs to the columns of source block `b`; `mins` alike for Q4_1 and Q5_1, and
    /// empty for the others. Both are empty for [`Stored::Row`].
    ///
    /// # Panics
    /// `d` isn't whole blocks, or the lengths are wrong.
    #[must_use]
    pub fn new(stored: Stored, d: usize, scales: &'a [u16], mins: &'a [u16]) -> Self {
        assert!(
            d > 0 && stored.bytes(d).is_some(),
            "columns of {d} elements as {stored:?}"
        );
        if let Stored::Row(_) = stored {
            assert!(scales.is_empty() && mins.is_empty(), "rows have scales");
        } else {
            assert!(scales.len().is_multiple_of(d), "whole rows of scales");
            assert!(
                mins.is_empty() || (mins.len() == scales.len() && stored != Stored::Moved8),
                "as many minimums as scales, or none"
            );
        }
        Self {
            stored,
            d,
            scales,
            mins,
        }
    }

    /// How the elements lie.
    #[must_use]
    pub fn stored(&self) -> Stored {
        self.stored
    }

    /// Elements of a column.
    #[must_use]
    pub fn d(&self) -> usize {
        self.d
    }

    /// Bytes of a column.
    #[must_use]
    pub fn column_bytes(&self) -> usize {
        self.stored.bytes(self.d).expect("checked in `new`")
    }

    /// The column that lies in `bytes` ([`Columns::column_bytes`]) and came from source block
    /// `block` (its source neuron / 32; any for [`Stored::Row`]).
    ///
    /// # Panics
    /// `bytes` has another length, or there is no such block.
    #[must_use]
    pub fn column(&self, bytes: &'a [u8], block: usize) -> Column<'a> {
        let window = Window::new(self, 0..self.d);
        let part = window.part(&Term {
            bytes,
            block,
            a: 0.0,
        });
        Column {
            stored: self.stored,
            bytes: part.bytes,
            scales: part.scales,
            mins: part.mins,
            skip: 0,
            len: self.d,
        }
    }
}

/// One column, or a range of one.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    stored: Stored,
    /// Whole pieces.
    bytes: &'a [u8],
    /// (len), or none.
    scales: &'a [u16],
    /// (len), or none.
    mins: &'a [u16],
    /// Elements of the first block that come before this range.
    skip: usize,
    len: usize,
}

impl<'a> Column<'a> {
    /// A column by itself; see [`Columns`]. Shapes: `bytes` ([`Stored::bytes`]), `scales` and `mins`
    /// (d) or none.
    ///
    /// # Panics
    /// As [`Columns::new`] and [`Columns::column`].
    #[must_use]
    pub fn new(
        stored: Stored,
        d: usize,
        bytes: &'a [u8],
        scales: &'a [u16],
        mins: &'a [u16],
    ) -> Self {
        Columns::new(stored, d, scales, mins).column(bytes, 0)
    }

    /// Elements.
    // A column of no elements is only the range of nothing.
    #[allow(clippy::len_without_is_empty)]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Elements `range` of this one.
    ///
    /// # Panics
    /// It ends outside, or starts at no multiple of [`CUT`], or ends at none before the end.
    #[must_use]
    pub fn range(&self, range: Range<usize>) -> Self {
        let pieces = Pieces::new(self.stored, self.len, self.skip, &range);
        let part = |halves: &'a [u16]| match halves {
            [] => halves,
            _ => &halves[range.clone()],
        };
        Self {
            stored: self.stored,
            bytes: &self.bytes[pieces.bytes],
            scales: part(self.scales),
            mins: part(self.mins),
            skip: pieces.skip,
            len: range.len(),
        }
    }

    /// How the elements lie.
    pub(super) fn stored(&self) -> Stored {
        self.stored
    }

    /// Elements of the first block that come before this range.
    pub(super) fn skip(&self) -> usize {
        self.skip
    }

    /// With its activation, for the kernels.
    pub(super) fn part(&self, a: f32) -> Part<'a> {
        Part {
            bytes: self.bytes,
            scales: self.scales,
            mins: self.mins,
            a,
        }
    }
}

/// Where a range of elements lies in the bytes of a column.
struct Pieces {
    bytes: Range<usize>,
    skip: usize,
}

impl Pieces {
    /// Elements `range` of `len`, the first of which is the element `skip` of its block.
    fn new(stored: Stored, len: usize, skip: usize, range: &Range<usize>) -> Self {
        let &Range { start, end } = range;
        assert!(start <= end && end <= len, "range inside the column");
        assert!(
            start.is_multiple_of(CUT) && (end.is_multiple_of(CUT) || end == len),
            "columns are cut at multiples of {CUT}"
        );
        let (n, size) = stored.piece();
        let first = (skip + start) / n;
        let last = (skip + end).div_ceil(n).max(first);
        Self {
            bytes: first * size..last * size,
            skip: (skip + start) % n,
        }
    }
}

/// A range of elements of all columns of a layer.
pub(super) struct Window<'a> {
    columns: Columns<'a>,
    column_bytes: usize,
    range: Range<usize>,
    pieces: Pieces,
}

impl<'a> Window<'a> {
    /// Panics unless columns may be cut so.
    pub(super) fn new(columns: &Columns<'a>, range: Range<usize>) -> Self {
        Self {
            columns: *columns,
            column_bytes: columns.column_bytes(),
            pieces: Pieces::new(columns.stored, columns.d, 0, &range),
            range,
        }
    }

    /// Elements of the first block that come before the range.
    pub(super) fn skip(&self) -> usize {
        self.pieces.skip
    }

    /// The range of one column. Panics if the term's length is wrong or there is no such block.
    #[inline]
    pub(super) fn part(&self, term: &Term<'a>) -> Part<'a> {
        assert_eq!(term.bytes.len(), self.column_bytes, "bytes of one column");
        let row = |halves: &'a [u16]| match halves {
            [] => halves,
            _ => &halves[term.block * self.columns.d..][self.range.clone()],
        };
        Part {
            bytes: &term.bytes[self.pieces.bytes.clone()],
            scales: row(self.columns.scales),
            mins: row(self.columns.mins),
            a: term.a,
        }
    }
}

/// What a kernel reads of a column, and its activation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part<'a> {
    /// Whole blocks, or whole bytes of nibbles.
    pub bytes: &'a [u8],
    /// A scale an element; none for rows.
    pub scales: &'a [u16],
    /// A minimum an element, or none.
    pub mins: &'a [u16],
    pub a: f32,
}

impl Part<'_> {
    /// Of no elements.
    pub(super) const EMPTY: Self = Part {
        bytes: &[],
        scales: &[],
        mins: &[],
        a: 0.0,
    };
}

/// A column and what it is multiplied by.
#[derive(Clone, Copy, Debug)]
pub struct Term<'a> {
    /// The column, ([`Columns::column_bytes`]).
    pub bytes: &'a [u8],
    /// Its row of scales: source neuron / 32. Any for [`Stored::Row`].
    pub block: usize,
    /// The activation.
    pub a: f32,
}
