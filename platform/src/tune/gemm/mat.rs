//! Matrices that lie anywhere in a slice, by strides.

/// A matrix to read: element (i, j) is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub struct Mat<'a> {
    /// Holds every element.
    pub data: &'a [f32],
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Floats from a row to the next.
    pub row_stride: usize,
    /// Floats from a column to the next.
    pub col_stride: usize,
}

/// A matrix to write: as [`Mat`], and no two elements share a place.
#[derive(Debug)]
pub struct MatMut<'a> {
    /// Holds every element.
    pub data: &'a mut [f32],
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Floats from a row to the next.
    pub row_stride: usize,
    /// Floats from a column to the next.
    pub col_stride: usize,
}

impl<'a> Mat<'a> {
    /// The first `rows * cols` floats of `data`, row after row.
    #[must_use]
    pub fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        Self::spaced(data, rows, cols, cols)
    }

    /// Row after row, `row_stride` floats from one to the next.
    #[must_use]
    pub fn spaced(data: &'a [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

    /// The transpose, which moves nothing.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Panics where an element lies outside of the slice.
    pub(super) fn check(&self) {
        check(self.data.len(), self.lines());
    }

    fn lines(&self) -> [(usize, usize); 2] {
        [(self.rows, self.row_stride), (self.cols, self.col_stride)]
    }
}

impl<'a> MatMut<'a> {
    /// The first `rows * cols` floats of `data`, row after row.
    #[must_use]
    pub fn new(data: &'a mut [f32], rows: usize, cols: usize) -> Self {
        Self::spaced(data, rows, cols, cols)
    }

    /// Row after row, `row_stride` floats from one to the next.
    #[must_use]
    pub fn spaced(data: &'a mut [f32], rows: usize, cols: usize, row_stride: usize) -> Self {
        Self {
            data,
            rows,
            cols,
            row_stride,
            col_stride: 1,
        }
    }

    /// The transpose, which moves nothing.
    #[must_use]
    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.cols,
            cols: self.rows,
            row_stride: self.col_stride,
            col_stride: self.row_stride,
        }
    }

    /// Panics where an element lies outside of the slice, or on another.
    pub(super) fn check(&self) {
        let mut lines = [(self.rows, self.row_stride), (self.cols, self.col_stride)];
        check(self.data.len(), lines);
        // The line with the smaller steps must end before the other's next step.
        lines.sort_by_key(|&(_, stride)| stride);
        let [(inner, step), (outer, stride)] = lines;
        let apart =
            (inner <= 1 || step > 0) && (outer <= 1 || stride > inner.saturating_sub(1) * step);
        assert!(
            apart || inner == 0 || outer == 0,
            "elements overlap: strides {step} and {stride}"
        );
    }
}

fn check(len: usize, lines: [(usize, usize); 2]) {
    if lines.iter().any(|&(count, _)| count == 0) {
        return;
    }
    let last: usize = lines.iter().map(|&(n, stride)| (n - 1) * stride).sum();
    assert!(last < len, "element {last} of a slice of {len}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_inside_and_apart_is_taken() {
        let mut data = [0.0; 12];
        Mat::new(&data, 3, 4).check();
        Mat::new(&data, 3, 4).t().check();
        Mat::spaced(&data, 3, 2, 5).check();
        Mat::new(&data, 0, 100).check();
        // Rows that overlap may be read.
        Mat::spaced(&data, 3, 4, 0).check();
        MatMut::spaced(&mut data, 3, 2, 5).t().check();
        MatMut::spaced(&mut data, 1, 12, 0).check();
    }

    #[test]
    #[should_panic(expected = "element 12 of a slice of 12")]
    fn an_element_outside_is_refused() {
        Mat::spaced(&[0.0; 12], 3, 3, 5).check();
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn an_output_on_itself_is_refused() {
        MatMut::spaced(&mut [0.0; 12], 3, 4, 3).check();
    }
}
