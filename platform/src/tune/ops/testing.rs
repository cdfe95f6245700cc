//! What tests of this room share: machines to run on, and gradients by differences in f64.

use crate::cpu::vector::Vector;
use crate::tune::team::Team;

/// Runs `f` on every instruction set that this machine has, with 1, 2 and 3 threads.
pub(crate) fn every_machine(f: impl Fn(&Team, Vector)) {
    for threads in [1, 2, 3] {
        let team = Team::new(threads).unwrap();
        Vector::available().for_each(|v| f(&team, v));
    }
}

/// The same, and panics unless the floats that `f` returns are the same bits for any number of threads.
pub(crate) fn same_bits(f: impl Fn(&Team, Vector) -> Vec<f32>) {
    for v in Vector::available() {
        let bits = |threads| -> Vec<u32> {
            let team = Team::new(threads).unwrap();
            f(&team, v).iter().map(|x| x.to_bits()).collect()
        };
        let one = bits(1);
        assert!(one == bits(2) && one == bits(3), "{v:?}: threads matter");
    }
}

/// Doubles of floats.
pub(crate) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| f64::from(*x)).collect()
}

/// The gradient of `f` at `x` by central differences.
pub(crate) fn differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-5;
    let mut at = x.to_vec();
    let mut along = |i: usize| {
        let mut value = |offset: f64| {
            at[i] = x[i] + offset;
            f(&at)
        };
        let slope = (value(STEP) - value(-STEP)) / (2.0 * STEP);
        at[i] = x[i];
        slope
    };
    (0..x.len()).map(&mut along).collect()
}

/// Weighted sum of outputs: a loss whose gradient at the outputs is `weights`.
pub(crate) fn weighted(outputs: &[f64], weights: &[f32]) -> f64 {
    assert_eq!(outputs.len(), weights.len());
    let terms = outputs.iter().zip(weights);
    terms.map(|(y, w)| y * f64::from(*w)).sum()
}

/// Panics unless every element of `got` is within `relative` of `want`, measured against its size and the
/// root mean square of all.
#[track_caller]
pub(crate) fn agree(got: &[f32], want: &[f64], relative: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let squares: f64 = want.iter().map(|w| w * w).sum();
    let size = (squares / want.len() as f64).sqrt();
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(
            error <= relative * (want.abs() + size) + 1e-9,
            "{what}: element {i} is {got:e}, not {want:e}"
        );
    }
}
