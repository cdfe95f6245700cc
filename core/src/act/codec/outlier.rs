//! Columns whose values are far larger than others' would widen the grid of all that share a group with
//! them. A few of them per tensor can be kept apart in bf16, rounded by chance so that they stay
//! unbiased; their places in the groups take the value of a neighbour, and are put right after decoding.

use super::{GROUP_MAX, Grouping, Key, NotFinite, float};
use core::ops::Range;

/// The most columns of one tensor.
pub const OUTLIERS_MAX: usize = 16;

/// Columns that are kept apart, ascending.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Outliers {
    columns: [u32; OUTLIERS_MAX],
    len: usize,
}

impl Outliers {
    /// None.
    pub const NONE: Self = Self {
        columns: [0; OUTLIERS_MAX],
        len: 0,
    };

    /// The columns with the largest ranges, at most `max` (and [`OUTLIERS_MAX`]), of those whose range is more than
    /// `factor` times the mean of all. Shapes: `ranges` (cols), largest minus smallest value; of an
    /// earlier step's tensor, say.
    #[must_use]
    pub fn largest(ranges: &[f32], max: usize, factor: f32) -> Self {
        let mean = ranges.iter().sum::<f32>() / ranges.len().max(1) as f32;
        let mut all = Self::NONE;
        let mut bound = f32::INFINITY;
        while all.len < max.min(OUTLIERS_MAX) {
            // The next largest; of equals, the first that isn't in yet.
            let mut best: Option<usize> = None;
            for (column, &range) in ranges.iter().enumerate() {
                let known = all.columns().contains(&(column as u32));
                if range <= bound && !known && best.is_none_or(|best| range > ranges[best]) {
                    best = Some(column);
                }
            }
            let Some(column) = best.filter(|&best| ranges[best] > factor * mean) else {
                break;
            };
            bound = ranges[column];
            all.columns[all.len] = column as u32;
            all.len += 1;
        }
        all.columns[..all.len].sort_unstable();
        all
    }

    /// Their numbers, ascending.
    #[must_use]
    pub fn columns(&self) -> &[u32] {
        &self.columns[..self.len]
    }

    /// How many.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Which of the tensor's outliers, (rows, len) in order, are in a run of groups: a chunk's share.
    #[must_use]
    pub fn within(&self, grouping: &Grouping, groups: Range<usize>) -> Range<usize> {
        let before = |group: usize| {
            let start = group % grouping.per_row() * grouping.group();
            let in_row = self.columns().partition_point(|&c| (c as usize) < start);
            group / grouping.per_row() * self.len + in_row
        };
        before(groups.start)..before(groups.end)
    }

    /// A group without its outliers: they go to `apart`, their places take the value of an element that
    /// is none (0 if all are). Returns the group, in `room`.
    ///
    /// Shapes: `x` (n), the elements of group number `group`; `apart` as many as [`Outliers::within`] has for it;
    /// `key` is [`super::Counter::outliers`].
    ///
    /// # Errors
    /// [`NotFinite`]: an outlier isn't. (Others are found when the group is quantized.)
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn split<'a>(
        &self,
        x: &[f32],
        grouping: &Grouping,
        group: usize,
        key: Key,
        apart: &mut [u16],
        room: &'a mut [f32; GROUP_MAX],
    ) -> Result<&'a [f32], NotFinite> {
        let columns = grouping.columns(group);
        let inside = self.inside(&columns);
        let slot = self.within(grouping, group..group + 1).start;
        assert_eq!(apart.len(), inside.len(), "room for each outlier");
        let copy = &mut room[..x.len()];
        copy.copy_from_slice(x);
        let is_outlier = |i: usize| inside.contains(&((columns.start + i) as u32));
        let plain = (0..x.len()).find(|&i| !is_outlier(i)).map_or(0.0, |i| x[i]);
        for (i, (apart, &column)) in apart.iter_mut().zip(inside).enumerate() {
            let at = column as usize - columns.start;
            if !x[at].is_finite() {
                return Err(NotFinite {
                    element: group * grouping.group() + at,
                });
            }
            *apart = float::to_bf16_by_chance(x[at], key.word((slot + i) as u32) >> 16);
            copy[at] = plain;
        }
        Ok(copy)
    }

    /// Puts outliers back into a decoded group. Shapes: as in [`Outliers::split`].
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn merge(&self, grouping: &Grouping, group: usize, apart: &[u16], out: &mut [f32]) {
        let columns = grouping.columns(group);
        let inside = self.inside(&columns);
        assert_eq!(apart.len(), inside.len(), "a value for each outlier");
        for (&apart, &column) in apart.iter().zip(inside) {
            out[column as usize - columns.start] = float::from_bf16(apart);
        }
    }

    fn inside(&self, columns: &Range<usize>) -> &[u32] {
        let all = self.columns();
        let start = all.partition_point(|&c| (c as usize) < columns.start);
        let end = all.partition_point(|&c| (c as usize) < columns.end);
        &all[start..end]
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Bits, Counter, decode, quantize};
    use super::*;

    #[test]
    fn the_largest_columns_are_found() {
        let mut ranges = [1.0; 100];
        ranges[70] = 50.0;
        ranges[3] = 90.0;
        ranges[40] = 50.0;
        ranges[41] = 2.0;
        let columns = |max, factor| Outliers::largest(&ranges, max, factor);
        assert_eq!(columns(8, 4.0).columns(), [3, 40, 70]);
        assert_eq!(columns(2, 4.0).columns(), [3, 40]);
        assert_eq!(columns(0, 4.0).columns(), []);
        assert_eq!(columns(99, 0.0).len(), OUTLIERS_MAX);
        assert!(Outliers::largest(&[], 4, 1.0).is_empty());
        assert!(Outliers::largest(&[f32::NAN; 5], 4, 1.0).is_empty());
    }

    #[test]
    fn outliers_do_not_widen_the_grid_of_others() {
        let grouping = Grouping::of(600);
        assert_eq!((grouping.group(), grouping.per_row()), (200, 3));
        let mut ranges = [1.0; 600];
        for column in [5, 199, 200, 599] {
            ranges[column] = 100.0;
        }
        let outliers = Outliers::largest(&ranges, 8, 4.0);
        let counter = Counter {
            seed: 1,
            step: 1,
            tensor: 1,
        };
        let mut slots = 0;
        for group in 0..grouping.groups(2) {
            let columns = grouping.columns(group);
            let within = outliers.within(&grouping, group..group + 1);
            assert_eq!(within.start, slots);
            assert_eq!(within.len(), [2, 1, 1][group % 3]);
            slots = within.end;
            let mut x = [0.0; 200];
            for (i, x) in x.iter_mut().enumerate() {
                *x = ranges[columns.start + i] * (1.0 + 0.5 * (i % 3) as f32);
            }
            let (mut apart, mut room) = ([0; 2], [0.0; GROUP_MAX]);
            let apart = &mut apart[..within.len()];
            let rest = outliers
                .split(&x, &grouping, group, counter.outliers(), apart, &mut room)
                .unwrap();
            let mut codes = [0; 100];
            let key = counter.rounding();
            let meta = quantize(rest, Bits::Four, key, group * 200, &mut codes).unwrap();
            assert!(meta.span(Bits::Four) <= 1.01);
            let mut out = [0.0; 200];
            decode(&codes, Bits::Four, meta, Bits::Four, &mut out);
            outliers.merge(&grouping, group, apart, &mut out);
            for (x, out) in x.iter().zip(out) {
                let bound = if *x > 50.0 { x / 128.0 } else { 1.01 / 15.0 };
                assert!((x - out).abs() <= bound, "{x} {out}");
            }
            x[5] = f32::INFINITY;
            if group % 3 == 0 {
                let split = outliers.split(&x, &grouping, group, key, apart, &mut room);
                let element = group * 200 + 5;
                assert_eq!(split.unwrap_err(), NotFinite { element });
            }
        }
        assert_eq!(outliers.within(&grouping, 0..6), 0..8);
        assert_eq!(outliers.within(&grouping, 1..5), 2..7);
    }
}
