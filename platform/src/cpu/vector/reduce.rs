//! Many numbers to one: dot product, sum of squares, largest element and its place.

use super::lanes::Lanes;

super::multiversion! {
    /// `sum(x[i] * y[i])`, in a fixed order. Shapes: both (n).
    ///
    /// # Panics
    /// The lengths differ.
    #[must_use]
    pub fn dot(x: &[f32], y: &[f32]) -> f32 = dot_body;

    /// The largest element, NaN passed over; negative infinity if there is none.
    #[must_use]
    pub fn max(x: &[f32]) -> f32 = max_body;

    /// The place of the largest element, the first of equals, NaN passed over; 0 if there is none.
    #[must_use]
    pub fn argmax(x: &[f32]) -> usize = argmax_body;
}

/// The dot product: four sums per lane, so that additions don't wait for each other.
#[inline(always)]
pub(super) fn dot_body<L: Lanes>(l: L, x: &[f32], y: &[f32]) -> f32 {
    assert_eq!(x.len(), y.len(), "as many factors on both sides");
    let mut sums = [l.splat(0.0); 4];
    let mut xs = x.chunks_exact(4 * L::N);
    let mut ys = y.chunks_exact(4 * L::N);
    for (x, y) in (&mut xs).zip(&mut ys) {
        for (k, sum) in sums.iter_mut().enumerate() {
            *sum = l.fma(l.take(&x[k * L::N..]), l.take(&y[k * L::N..]), *sum);
        }
    }
    let mut xs = xs.remainder().chunks_exact(L::N);
    let mut ys = ys.remainder().chunks_exact(L::N);
    for (x, y) in (&mut xs).zip(&mut ys) {
        sums[0] = l.fma(l.take(x), l.take(y), sums[0]);
    }
    let (x, y) = (xs.remainder(), ys.remainder());
    if !x.is_empty() {
        sums[1] = l.fma(l.take_part(x, 0.0), l.take_part(y, 0.0), sums[1]);
    }
    l.sum(l.add(l.add(sums[0], sums[2]), l.add(sums[1], sums[3])))
}

/// The larger, with NaN in `x` passed over.
#[inline(always)]
fn larger<L: Lanes>(l: L, best: L::V, x: L::V) -> L::V {
    l.where_less(best, x, x, best)
}

#[inline(always)]
pub(super) fn max_body<L: Lanes>(l: L, x: &[f32]) -> f32 {
    let mut best = [l.splat(f32::NEG_INFINITY); 4];
    let mut chunks = x.chunks_exact(4 * L::N);
    for chunk in &mut chunks {
        for (k, best) in best.iter_mut().enumerate() {
            *best = larger(l, *best, l.take(&chunk[k * L::N..]));
        }
    }
    let mut chunks = chunks.remainder().chunks_exact(L::N);
    for chunk in &mut chunks {
        best[0] = larger(l, best[0], l.take(chunk));
    }
    let rest = chunks.remainder();
    if !rest.is_empty() {
        best[1] = larger(l, best[1], l.take_part(rest, f32::NEG_INFINITY));
    }
    let best = larger(l, larger(l, best[0], best[1]), larger(l, best[2], best[3]));
    l.top(best)
}

#[inline(always)]
fn argmax_body<L: Lanes>(l: L, x: &[f32]) -> usize {
    let best = max_body(l, x);
    x.iter().position(|&x| x == best).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::{LENGTHS, Random, close};

    #[test]
    fn dot_matches_double_precision() {
        let mut random = Random(3);
        for v in Vector::available() {
            for len in LENGTHS {
                let x = random.floats(len, 1.0);
                let y = random.floats(len, 1.0);
                let pairs = || x.iter().zip(&y).map(|(x, y)| f64::from(*x) * f64::from(*y));
                let size: f64 = pairs().map(f64::abs).sum();
                close(v.dot(&x, &y), pairs().sum(), 0.0, 3e-7 * size);
            }
        }
    }

    #[test]
    fn dot_does_not_depend_on_alignment() {
        let mut random = Random(4);
        let x = random.floats(1016, 1.0);
        let y = random.floats(1016, 1.0);
        for v in Vector::available() {
            let want = v.dot(&x[..1000], &y[..1000]);
            for shift in 1..16 {
                let mut moved = x.clone();
                moved.copy_within(..1000, shift);
                let got = v.dot(&moved[shift..shift + 1000], &y[..1000]);
                assert_eq!(got.to_bits(), want.to_bits(), "{v:?}");
            }
        }
    }

    #[test]
    fn the_largest_is_found_wherever_it_is() {
        let mut random = Random(5);
        for v in Vector::available() {
            for len in LENGTHS {
                let mut x = random.floats(len, 1.0);
                for place in [0, len / 2, len - 1] {
                    let old = std::mem::replace(&mut x[place], 2.0);
                    assert_eq!((v.argmax(&x), v.max(&x)), (place, 2.0), "{v:?} {len}");
                    x[place] = old;
                }
            }
        }
    }

    #[test]
    fn ties_nan_and_nothing() {
        for v in Vector::available() {
            let mut x = [-1.0; 40];
            assert_eq!(v.argmax(&x), 0);
            x[0] = f32::NAN;
            x[20] = f32::NAN;
            x[21] = 3.0;
            x[35] = 3.0;
            assert_eq!((v.argmax(&x), v.max(&x)), (21, 3.0), "{v:?}");
            assert_eq!(v.argmax(&[f32::NAN; 20]), 0);
            assert_eq!((v.argmax(&[]), v.max(&[])), (0, f32::NEG_INFINITY));
        }
    }
}
