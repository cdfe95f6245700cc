//! Which rows of the head can still win, by the estimates of a sketch of it.
//!
//! A sketch row `s` stands for an exact row `r`, and `|r - s|` is known. Both meet the same activation
//! `h`, so by Cauchy and Schwarz `|r . h - s . h| <= |r - s| |h|`. With the k-th best exact logit so far
//! as `tau`, only rows with `s . h + |r - s| |h| >= tau` can be among the k best.

use crate::plan::libm_sqrt;

/// Sigmas of [`Bound::likely`].
const SIGMAS: f64 = 8.0;

/// Half a unit in the last place of 1, in f32.
const HALF_ULP: f64 = 1.0 / (1u64 << 24) as f64;

/// How a kernel multiplies an exact row with an activation, and so what it rounds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Products {
    /// As floats, summed one by one at worst.
    Floats,
    /// Codes of integers in blocks of 16 at least; only blocks are summed in floats.
    Codes,
    /// The same with a minimum a block (Q4_1, Q4_K).
    CodesAndMinimums,
}

impl Products {
    /// How many times as large as the weight the parts may be that are rounded apart: codes and what
    /// is added to them. For blocks whose codes use their range, as those of every quantizer do.
    fn apart(self) -> f64 {
        match self {
            Self::Floats => 1.0,
            Self::Codes => 16.0,
            Self::CodesAndMinimums => 64.0,
        }
    }
}

/// The same for the sketch, whatever its codes, as its rows' norms are taken for the largest codes.
const SKETCH_APART: f64 = 4.0;

/// What an exact logit may differ from its estimate, for one activation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Bound {
    /// A row's error is multiplied by this.
    pub h: f32,
    /// Room for rounding, the same for all rows.
    pub pad: f64,
}

impl Bound {
    /// For the activation that the kernels multiply by (int8 codes times their scales, or floats):
    /// no row differs by more than `error * h + pad`.
    ///
    /// `norm` is its L2 norm at least, `cols` its length, `row_norm` the norm of every sketch row at
    /// least, if all its codes were of the largest size. What the kernels round is allowed for: a product is off by a part of `|s| |h|` that
    /// grows with the number of sums, wherever they are cut; with integers only blocks are summed in
    /// floats.
    pub fn proof(norm: f64, cols: u32, row_norm: f64, products: Products) -> Self {
        Self::new(norm, 1.0, cols, row_norm, products)
    }

    /// The same with eight standard deviations of a row's error, as if its elements and the
    /// activation's were independent, in place of the most that it could be. Nothing is proven.
    pub fn likely(norm: f64, cols: u32, row_norm: f64, products: Products) -> Self {
        let sigmas = SIGMAS / f64::from(libm_sqrt(cols as f32));
        Self::new(norm, sigmas.min(1.0), cols, row_norm, products)
    }

    fn new(norm: f64, share: f64, cols: u32, row_norm: f64, products: Products) -> Self {
        let sums = match products {
            Products::Floats => cols,
            Products::Codes | Products::CodesAndMinimums => cols / 16,
        };
        let sums = (f64::from(sums) + 64.0) * HALF_ULP;
        // Rounding of one product, as a part of the norms' product. The exact row's norm is the sketch's
        // and the error's at most.
        let off = sums / (1.0 - sums);
        let (sketch, exact) = (off * SKETCH_APART, off * products.apart());
        // And of the comparison that is made with them: `error * h + estimate`, twice rounded.
        let h = norm * (share + exact + 4.0 * HALF_ULP);
        let pad = norm * row_norm * (sketch + exact + 4.0 * HALF_ULP) + 1e-30;
        Self { h: up(h), pad }
    }

    /// Rows whose estimate and `error * h` sum to less than this stay below `tau`.
    pub fn threshold(&self, tau: f32) -> f32 {
        let exact = f64::from(tau) - self.pad;
        let near = exact as f32;
        if f64::from(near) > exact {
            near.next_down()
        } else {
            near
        }
    }
}

/// Rounded up to f32.
fn up(x: f64) -> f32 {
    let near = x as f32;
    if f64::from(near) < x {
        near.next_up()
    } else {
        near
    }
}

/// Fills `rows` with the numbers of the largest estimates, in ascending order of numbers, and returns
/// how many there are. NaN, of which nothing is known, counts as large.
pub fn best(estimates: &[f32], rows: &mut [u32]) -> usize {
    let count = rows.len().min(estimates.len());
    let heap = &mut rows[..count];
    for (row, place) in (0..).zip(heap.iter_mut()) {
        *place = row;
    }
    let rank = |row: u32| {
        let estimate = estimates[row as usize];
        if estimate.is_nan() {
            f32::INFINITY
        } else {
            estimate
        }
    };
    for root in (0..count / 2).rev() {
        sift(heap, root, &rank);
    }
    for (row, estimate) in (0..).zip(estimates).skip(count) {
        let Some(least) = heap.first_mut() else { break };
        if *estimate <= rank(*least) {
            continue;
        }
        *least = row;
        sift(heap, 0, &rank);
    }
    heap.sort_unstable();
    count
}

/// Puts `heap[at]` where it belongs: the least is first.
fn sift(heap: &mut [u32], mut at: usize, rank: &impl Fn(u32) -> f32) {
    loop {
        let mut least = at;
        for child in [2 * at + 1, 2 * at + 2] {
            if child < heap.len() && rank(heap[child]) < rank(heap[least]) {
                least = child;
            }
        }
        if least == at {
            return;
        }
        heap.swap(at, least);
        at = least;
    }
}

/// The `k`-th largest of `values`, which are put into another order; minus infinity if there are fewer.
pub fn kth(values: &mut [f32], k: usize) -> f32 {
    if k == 0 || k > values.len() {
        return f32::NEG_INFINITY;
    }
    *values
        .select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a))
        .1
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Random(u64);

    impl Random {
        /// About normal.
        fn float(&mut self) -> f32 {
            let mut sum = 0.0;
            for _ in 0..4 {
                self.0 = self
                    .0
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                sum += (self.0 >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
            }
            sum
        }
    }

    fn norm(x: &[f32]) -> f64 {
        let square: f64 = x.iter().map(|x| f64::from(*x) * f64::from(*x)).sum();
        // Newton, from above.
        let mut root = square.max(1.0);
        for _ in 0..100 {
            root = 0.5 * (root + square / root);
        }
        root * (1.0 + 1e-12)
    }

    fn dot(a: &[f32], b: &[f32], lanes: usize) -> f32 {
        let mut sums = [0.0f32; 16];
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            sums[i % lanes] += a * b;
        }
        sums.iter().sum()
    }

    const COLS: usize = 576;

    /// A row, its sketch, and what they differ by. `along`: the difference is the activation's own
    /// direction, the worst there is.
    fn pair(random: &mut Random, h: &[f32], along: Option<f32>) -> ([f32; COLS], [f32; COLS], f32) {
        let (mut row, mut sketch) = ([0.0; COLS], [0.0; COLS]);
        for i in 0..COLS {
            sketch[i] = random.float();
            row[i] = sketch[i] + along.map_or_else(|| 0.1 * random.float(), |a| a * h[i]);
        }
        let mut off = [0.0; COLS];
        let mut square = 0.0;
        for i in 0..COLS {
            off[i] = row[i] - sketch[i];
            square += (f64::from(row[i]) - f64::from(sketch[i])).powi(2);
        }
        assert!(square > 0.0);
        (row, sketch, up(norm(&off) * (1.0 + 1e-6)))
    }

    #[test]
    fn no_row_passes_the_proven_bound() {
        let mut random = Random(3);
        for case in 0..400 {
            let mut h = [0.0; COLS];
            h.iter_mut().for_each(|h| *h = 40.0 * random.float());
            let along = [None, Some(0.05), Some(-0.05), Some(1e-6)][case % 4];
            let (row, sketch, error) = pair(&mut random, &h, along);
            let bound = Bound::proof(norm(&h), COLS as u32, norm(&sketch), Products::Floats);
            let estimate = dot(&sketch, &h, 1 + case % 16);
            let exact = dot(&row, &h, 1 + case / 16 % 16);
            assert!(
                error * bound.h + estimate >= bound.threshold(exact),
                "{case}: {exact} from {estimate}, {error} * {}",
                bound.h
            );
            if along == Some(0.05) {
                // And it isn't far from what can happen.
                let less = Bound {
                    h: bound.h * 0.95,
                    ..bound
                };
                assert!(error * less.h + estimate < less.threshold(exact));
            }
            let likely = Bound::likely(norm(&h), COLS as u32, norm(&sketch), Products::Floats);
            assert!(likely.h < bound.h * 0.34 && likely.h > bound.h * 0.33);
            if along.is_none() {
                assert!(
                    error * likely.h + estimate >= likely.threshold(exact),
                    "{case}"
                );
            }
        }
        let narrow = Bound::likely(1.0, 32, 1.0, Products::Floats);
        assert_eq!(narrow, Bound::proof(1.0, 32, 1.0, Products::Floats));
    }

    /// Equal rows with an exact sketch: a tie at the threshold is not lost.
    #[test]
    fn ties_reach_the_threshold() {
        let bound = Bound::proof(10.0, 64, 5.0, Products::CodesAndMinimums);
        for tau in [0.0f32, 1.0, -3.25, 1e-20, 812.5] {
            assert!(0.0 * bound.h + tau >= bound.threshold(tau));
            assert!(bound.threshold(tau) < tau);
        }
        assert_eq!(bound.threshold(f32::NEG_INFINITY), f32::NEG_INFINITY);
        assert_eq!(bound.threshold(f32::INFINITY), f32::INFINITY);
    }

    #[test]
    fn the_best_are_those_of_a_sort() {
        let mut random = Random(5);
        let mut estimates = [0.0; 300];
        for count in [0, 1, 2, 7, 64, 299, 300, 400] {
            estimates.iter_mut().for_each(|e| *e = random.float());
            estimates[17] = f32::NAN;
            estimates[250] = f32::NEG_INFINITY;
            let mut rows = [0; 400];
            let found = best(&estimates, &mut rows[..count]);
            assert_eq!(found, count.min(300));
            let rows = &rows[..found];
            assert!(rows.windows(2).all(|two| two[0] < two[1]));
            let mut sorted = estimates;
            sorted.sort_unstable_by(|a, b| b.total_cmp(a));
            for (row, estimate) in (0..).zip(estimates) {
                let among = found > 0 && estimate.total_cmp(&sorted[found - 1]).is_ge();
                assert_eq!(rows.contains(&row), among, "{row} of {count}");
            }
        }
    }

    #[test]
    fn the_kth_is_that_of_a_sort() {
        assert_eq!(kth(&mut [1.0, 3.0, 2.0, 3.0], 1), 3.0);
        assert_eq!(kth(&mut [1.0, 3.0, 2.0, 3.0], 3), 2.0);
        assert_eq!(kth(&mut [1.0, 3.0], 3), f32::NEG_INFINITY);
        assert_eq!(kth(&mut [], 0), f32::NEG_INFINITY);
    }
}
