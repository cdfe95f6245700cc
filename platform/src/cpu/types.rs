//! What goes into a kernel and comes out of it.

use std::marker::PhantomData;

use leanstream_core::quant::QuantType;

use super::prefetch::{PIECES, prefetch_start};

/// Activations of `tokens` tokens, in up to two forms. The form that a call doesn't use may be empty.
#[derive(Clone, Copy, Debug)]
pub struct Act<'a> {
    /// Activations a token.
    pub cols: usize,
    /// How many tokens.
    pub tokens: usize,
    /// f32 form, (tokens, cols).
    pub x: &'a [f32],
    /// int8 form, (tokens, cols); made by [`super::Kernels::quantize`].
    pub codes: &'a [i8],
    /// Scale of 32 codes, (tokens, cols / 32).
    pub scales: &'a [f32],
    /// Sum of 16 codes, (tokens, cols / 16).
    pub sums: &'a [i16],
}

/// Consecutive rows of a weight matrix, as they lie in the file. `bytes` may start at any address.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Block format.
    pub ty: QuantType,
    /// Weights a row: a multiple of the format's block.
    pub cols: usize,
    /// Whole rows, (rows, row bytes).
    pub bytes: &'a [u8],
}

impl Rows<'_> {
    /// Bytes of one row.
    ///
    /// # Panics
    /// `cols` isn't a positive multiple of the format's block length.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        row_bytes(self.ty, self.cols)
    }

    /// How many rows.
    ///
    /// # Panics
    /// `bytes` isn't a whole number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        let row_bytes = self.row_bytes();
        assert!(
            self.bytes.len().is_multiple_of(row_bytes),
            "bytes are whole rows"
        );
        self.bytes.len() / row_bytes
    }

    /// True where these weights meet f32 activations rather than int8 ones.
    #[must_use]
    pub fn uses_f32(&self, exact: bool) -> bool {
        uses_f32(self.ty, exact)
    }
}

/// The rows that a matvec goes through, in order: one after the other in memory, or anywhere.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowList<'a> {
    pub ty: QuantType,
    pub cols: usize,
    place: Place<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Place<'a> {
    /// Whole rows.
    Together(&'a [u8]),
    /// Each a whole row.
    Apart(&'a [&'a [u8]]),
}

impl<'a> RowList<'a> {
    pub(super) fn together(rows: &Rows<'a>) -> Self {
        Self {
            ty: rows.ty,
            cols: rows.cols,
            place: Place::Together(rows.bytes),
        }
    }

    /// Panics unless each of `rows` is a row of `cols` weights.
    pub(super) fn apart(ty: QuantType, cols: usize, rows: &'a [&'a [u8]]) -> Self {
        let row_bytes = row_bytes(ty, cols);
        assert!(
            rows.iter().all(|row| row.len() == row_bytes),
            "each row is {row_bytes} bytes"
        );
        Self {
            ty,
            cols,
            place: Place::Apart(rows),
        }
    }

    /// The bytes of each row.
    #[inline(always)]
    pub(super) fn iter(&self) -> RowIter<'a> {
        match self.place {
            Place::Together(bytes) => {
                RowIter::Together(bytes.chunks_exact(row_bytes(self.ty, self.cols)))
            }
            Place::Apart(rows) => {
                for row in rows.iter().take(PIECES) {
                    prefetch_start(row);
                }
                RowIter::Apart(rows)
            }
        }
    }

    /// See [`Rows::uses_f32`].
    pub(super) fn uses_f32(&self, exact: bool) -> bool {
        uses_f32(self.ty, exact)
    }
}

/// See [`RowList::iter`].
pub(super) enum RowIter<'a> {
    Together(std::slice::ChunksExact<'a, u8>),
    Apart(&'a [&'a [u8]]),
}

impl<'a> Iterator for RowIter<'a> {
    type Item = &'a [u8];

    #[inline(always)]
    fn next(&mut self) -> Option<&'a [u8]> {
        match self {
            // In order, where the processor's own prefetchers know what comes next.
            Self::Together(rows) => rows.next(),
            Self::Apart(rows) => {
                let (row, rest) = rows.split_first()?;
                if let Some(soon) = rest.get(PIECES - 1) {
                    prefetch_start(soon);
                }
                *rows = rest;
                Some(row)
            }
        }
    }
}

fn row_bytes(ty: QuantType, cols: usize) -> usize {
    assert!(cols > 0, "a row has weights");
    ty.row_bytes(cols)
        .expect("columns are whole blocks of the format")
}

fn uses_f32(ty: QuantType, exact: bool) -> bool {
    exact || matches!(ty, QuantType::F32 | QuantType::F16 | QuantType::BF16)
}

/// Where a matmul writes: element (token, row) goes to `start[token * stride + row]`.
///
/// Threads that compute different rows write into one buffer, interleaved; so this holds a pointer
/// rather than a slice, and whoever makes one from a pointer answers for the elements it names.
#[derive(Debug)]
pub struct OutTile<'a> {
    start: *mut f32,
    /// Floats from `start` that may be named.
    len: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

impl<'a> OutTile<'a> {
    /// All of `out`, with `stride` floats between tokens.
    #[must_use]
    pub fn new(out: &'a mut [f32], stride: usize) -> Self {
        Self {
            start: out.as_mut_ptr(),
            len: out.len(),
            stride,
            owner: PhantomData,
        }
    }

    /// The part of a shared buffer that starts at `start`, with `stride` floats between tokens.
    ///
    /// # Safety
    /// `start .. start + len` lies in one allocation that outlives `'a`. While this tile lives, no
    /// one else reads or writes the elements that its calls write: `rows` floats from
    /// `start + token * stride`, for each token of the call.
    #[must_use]
    pub unsafe fn from_raw(start: *mut f32, len: usize, stride: usize) -> Self {
        Self {
            start,
            len,
            stride,
            owner: PhantomData,
        }
    }

    /// Floats between two tokens.
    #[must_use]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Address of element (0, 0).
    #[must_use]
    pub fn as_mut_ptr(&mut self) -> *mut f32 {
        self.start
    }

    /// Element (token, row).
    ///
    /// # Panics
    /// It lies outside.
    pub fn put(&mut self, token: usize, row: usize, value: f32) {
        let at = token * self.stride + row;
        assert!(at < self.len, "element inside the tile");
        // SAFETY: `at` is inside the buffer, and by the contract of the constructors nobody else
        // touches the elements of this tile.
        unsafe { self.start.add(at).write(value) };
    }

    /// Panics unless `tokens` times `rows` elements fit without overlap.
    pub(super) fn check(&self, rows: usize, tokens: usize) {
        assert!(
            tokens <= 1 || rows <= self.stride,
            "tokens overlap: stride {}",
            self.stride
        );
        let end = tokens.saturating_sub(1) * self.stride + rows;
        assert!(
            tokens == 0 || end <= self.len,
            "output of {} floats, {end} needed",
            self.len
        );
    }
}

/// Most columns whose decoded weights a [`Scratch`] holds at once; longer rows are done in blocks.
pub const SCRATCH_COLS: usize = 1024;

/// Working memory of one thread in [`super::Kernels::matmul`]: decoded weights of a few rows.
///
/// Allocated before the start, of a size that only depends on the widest matrix.
#[derive(Debug)]
pub struct Scratch {
    lines: Box<[Line]>,
    cols: usize,
}

/// A cache line, and the alignment of a whole vector register.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Line(#[allow(dead_code)] [u8; 64]);

impl Scratch {
    /// For matrices of up to `cols_max` columns.
    #[must_use]
    pub fn for_cols(cols_max: usize) -> Self {
        let lines = Self::bytes_for(cols_max) / 64;
        Self {
            lines: vec![Line([0; 64]); lines].into_boxed_slice(),
            cols: cols_max,
        }
    }

    /// Bytes that [`Scratch::for_cols`] allocates: for the ledger. A multiple of 64.
    #[must_use]
    pub const fn bytes_for(cols_max: usize) -> usize {
        let cols = 2 * cols_max.next_multiple_of(256);
        let cols = if cols < SCRATCH_COLS {
            cols
        } else {
            SCRATCH_COLS
        };
        // 64 bytes a column: 32 rows of codes with their scales and minima for all of the columns,
        // or 32 rows of f32 for half of them.
        // 16 KiB: whatever an instruction set keeps for a tile of tokens.
        cols * 64 + 16 * 1024
    }

    /// True where a matrix of `cols` columns may use it.
    #[must_use]
    pub fn fits(&self, cols: usize) -> bool {
        cols <= self.cols
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.lines.len() * 64
    }

    /// The memory, aligned to 64 bytes.
    #[must_use]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        let len = self.bytes();
        // SAFETY: the lines are `len` initialised bytes, and every bit pattern is a byte and a line.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<u8>(), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_aligned_and_as_big_as_the_ledger_says() {
        for cols in [32, 576, 1024, 100_000] {
            let mut scratch = Scratch::for_cols(cols);
            assert_eq!(scratch.bytes(), Scratch::bytes_for(cols));
            assert_eq!(scratch.as_mut_slice().len(), scratch.bytes());
            assert!(scratch.as_mut_slice().as_ptr().addr().is_multiple_of(64));
            assert!(scratch.fits(cols) && !scratch.fits(cols + 1));
        }
        assert_eq!(Scratch::bytes_for(512), Scratch::bytes_for(1 << 40));
    }

    #[test]
    #[should_panic(expected = "tokens overlap")]
    fn a_stride_below_the_rows_is_refused() {
        OutTile::new(&mut [0.0; 64], 7).check(8, 2);
    }

    #[test]
    #[should_panic(expected = "18 needed")]
    fn a_short_output_is_refused() {
        OutTile::new(&mut [0.0; 17], 10).check(8, 2);
    }
}
