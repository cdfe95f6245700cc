//! The norm of all gradients together, and the factor that keeps it below a limit.

use crate::cpu::vector::Vector;
use crate::tune::lent::Lent;
use crate::tune::team::Team;

/// Parts that a tensor's sum is cut into at most, whatever the number of threads.
const PARTS: usize = 64;
/// Floats summed in f32 before they join a sum in f64.
const RUN: usize = 1024;

/// The sum of squares, in a fixed order; NaN or infinite if an element is. Shapes: `x` (n).
pub fn sum_squares(team: &Team, v: Vector, x: &[f32]) -> f64 {
    let mut sums = [0.0; PARTS];
    let per = x.len().div_ceil(PARTS).next_multiple_of(RUN).max(RUN);
    let lent = Lent::new(&mut sums);
    team.each(x.len().div_ceil(per), &|chunk, _| {
        let part = &x[chunk * per..(chunk * per + per).min(x.len())];
        let runs = part.chunks(RUN).map(|run| f64::from(v.dot(run, run)));
        // SAFETY: each chunk has its own sum.
        unsafe { lent.part(chunk, 1)[0] = runs.sum::<f64>() };
    });
    sums.iter().sum()
}

/// What gradients of the norm `norm` are multiplied by, so that it is at most `max`; `None` if the norm
/// isn't finite, and no step should be taken.
///
/// `norm` is the root of the sum of [`sum_squares`] over all tensors, times whatever factor the step
/// applies besides.
#[must_use]
pub fn clip_factor(norm: f64, max: f32) -> Option<f32> {
    if !norm.is_finite() {
        None
    } else if norm <= f64::from(max) {
        Some(1.0)
    } else {
        Some((f64::from(max) / norm) as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::Random;
    use crate::tune::ops::testing::every_machine;

    #[test]
    fn sums_match_double_precision_with_any_number_of_threads() {
        let mut random = Random(40);
        for len in [0, 1, 1000, 1025, 100_001] {
            let x = random.floats(len, 3.0);
            let want: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
            let one = Team::new(1).unwrap();
            every_machine(|team, v| {
                let got = sum_squares(team, v, &x);
                assert!((got - want).abs() <= 1e-6 * want, "{len}");
                assert_eq!(got.to_bits(), sum_squares(&one, v, &x).to_bits());
            });
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        every_machine(|team, v| {
            for bad in [f32::NAN, f32::INFINITY, 1e30] {
                let mut x = vec![1.0; 5000];
                x[4321] = bad;
                assert_eq!(clip_factor(sum_squares(team, v, &x).sqrt(), 1.0), None);
            }
        });
    }

    #[test]
    fn factors() {
        assert_eq!(clip_factor(0.0, 1.0), Some(1.0));
        assert_eq!(clip_factor(1.0, 1.0), Some(1.0));
        assert_eq!(clip_factor(4.0, 1.0), Some(0.25));
        assert_eq!(clip_factor(f64::NAN, 1.0), None);
    }
}
