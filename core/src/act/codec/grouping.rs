//! How the rows of a tensor are cut into groups.

use core::ops::Range;

/// Groups are whole multiples of this, so that their codes are whole bytes.
pub const GROUP_MULTIPLE: usize = 8;
/// The longest group.
pub const GROUP_MAX: usize = 256;
/// Shorter groups than this are padded longer ones instead, if rows are longer: 4 bytes of metadata
/// for each would be too many.
const GROUP_FAIR: usize = 64;

/// Groups of a tensor (rows, cols). Groups never cross rows; if their length doesn't divide `cols`, the last
/// one of a row is padded. Elements are numbered with the padding, so that group `j` starts at element
/// `j * group()`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Grouping {
    cols: usize,
    group: usize,
    per_row: usize,
}

impl Grouping {
    /// Of rows of `cols` elements.
    ///
    /// One group where it holds a row. Else the largest multiple of 8 that divides `cols`, up to 256, if it is
    /// at least 64; else as few groups as may be, of equal length.
    ///
    /// # Panics
    /// `cols` is 0.
    #[must_use]
    pub const fn of(cols: usize) -> Self {
        assert!(cols > 0, "rows have elements");
        let per_row = cols.div_ceil(GROUP_MAX);
        let mut group = cols.div_ceil(per_row).next_multiple_of(GROUP_MULTIPLE);
        let mut divisor = GROUP_MAX;
        while per_row > 1 && divisor >= GROUP_FAIR {
            if cols.is_multiple_of(divisor) {
                group = divisor;
                break;
            }
            divisor -= GROUP_MULTIPLE;
        }
        Self {
            cols,
            group,
            per_row: cols.div_ceil(group),
        }
    }

    /// Elements of a row.
    #[must_use]
    pub const fn cols(&self) -> usize {
        self.cols
    }

    /// Elements of a group, padding included: a multiple of 8, at most 256.
    #[must_use]
    pub const fn group(&self) -> usize {
        self.group
    }

    /// Groups of a row.
    #[must_use]
    pub const fn per_row(&self) -> usize {
        self.per_row
    }

    /// Groups of `rows` rows.
    #[must_use]
    pub const fn groups(&self, rows: usize) -> usize {
        rows * self.per_row
    }

    /// Elements of `rows` rows, padding included: what codes are stored for.
    #[must_use]
    pub const fn padded(&self, rows: usize) -> usize {
        self.groups(rows) * self.group
    }

    /// The columns of group number `group` of the tensor.
    #[must_use]
    pub const fn columns(&self, group: usize) -> Range<usize> {
        let start = group % self.per_row * self.group;
        let end = start + self.group;
        start..if end < self.cols { end } else { self.cols }
    }

    /// Where the elements of a run of groups lie in the tensor, padding left out: (rows * cols).
    #[must_use]
    pub const fn elements(&self, groups: Range<usize>) -> Range<usize> {
        self.start(groups.start)..self.start(groups.end)
    }

    const fn start(&self, group: usize) -> usize {
        group / self.per_row * self.cols + group % self.per_row * self.group
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_tile_rows() {
        for cols in 1..3000 {
            let g = Grouping::of(cols);
            assert!(
                g.group().is_multiple_of(8) && (8..=256).contains(&g.group()),
                "{g:?}"
            );
            let mut next = 0;
            for group in 0..g.groups(3) {
                let columns = g.columns(group);
                let elements = g.elements(group..group + 1);
                assert_eq!(elements.start, next);
                assert_eq!(elements.len(), columns.len());
                assert!(!columns.is_empty() && columns.len() <= g.group());
                next = elements.end;
            }
            assert_eq!(next, 3 * cols, "{g:?}");
            assert_eq!(g.elements(1..g.groups(3)), g.columns(0).len()..3 * cols);
            // Padding and metadata stay small.
            assert!(g.padded(1) - cols < 8 * g.per_row(), "{g:?}");
            assert!(cols <= 256 || g.group() >= 64, "{g:?}");
        }
    }

    #[test]
    fn shapes_of_models() {
        let group = |cols| (Grouping::of(cols).group(), Grouping::of(cols).per_row());
        assert_eq!(group(576), (192, 3));
        assert_eq!(group(1536), (256, 6));
        assert_eq!(group(640), (160, 4));
        assert_eq!(group(2048), (256, 8));
        assert_eq!(group(192), (192, 1));
        assert_eq!(group(64), (64, 1));
        assert_eq!(group(10), (16, 1));
        assert_eq!(group(8 * 131), (216, 5));
    }
}
