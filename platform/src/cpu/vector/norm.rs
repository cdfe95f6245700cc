//! Root-mean-square normalisation.

use super::lanes::Lanes;
use super::reduce::dot_body;

super::multiversion! {
    /// `out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]`. Shapes: all (n); one token a call.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm_body;

    /// [`Vector::rms_norm`](super::Vector::rms_norm) of each row of `x`, in place, all with the same
    /// weight: the normalisation of queries and keys, one row a head. Shapes: `x` (rows, n),
    /// `weight` (n).
    ///
    /// # Panics
    /// `x` isn't whole rows.
    pub fn rms_norm_rows(x: &mut [f32], weight: &[f32], eps: f32) = rms_norm_rows_body;
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn factor<L: Lanes>(l: L, x: &[f32], eps: f32) -> f32 {
    1.0 / (dot_body(l, x, x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn rms_norm_body<L: Lanes>(l: L, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    assert_eq!(x.len(), weight.len(), "as many weights as inputs");
    assert_eq!(x.len(), out.len(), "as many outputs as inputs");
    let factor = factor(l, x, eps);
    for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
        *out = x * factor * weight;
    }
}

#[inline(always)]
fn rms_norm_rows_body<L: Lanes>(l: L, x: &mut [f32], weight: &[f32], eps: f32) {
    assert!(!weight.is_empty(), "a row has elements");
    assert!(x.len().is_multiple_of(weight.len()), "whole rows");
    for row in x.chunks_exact_mut(weight.len()) {
        let factor = factor(l, row, eps);
        for (x, weight) in row.iter_mut().zip(weight) {
            *x = *x * factor * weight;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::{LENGTHS, Random, close};

    #[test]
    fn matches_double_precision() {
        let mut random = Random(6);
        for v in Vector::available() {
            for len in LENGTHS {
                let x = random.floats(len, 5.0);
                let weight = random.floats(len, 2.0);
                let mut out = vec![f32::NAN; len];
                v.rms_norm(&x, &weight, 1e-5, &mut out);
                let squares: f64 = x.iter().map(|x| f64::from(*x).powi(2)).sum();
                let rms = (squares / len as f64 + f64::from(1e-5f32)).sqrt();
                for i in 0..len {
                    let want = f64::from(x[i]) / rms * f64::from(weight[i]);
                    close(out[i], want, 5e-7, 1e-30);
                }
                let mut rows = [x.clone(), x.clone()].concat();
                v.rms_norm_rows(&mut rows, &weight, 1e-5);
                assert_eq!(rows, [out.clone(), out].concat(), "{v:?} {len}");
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for v in Vector::available() {
            let mut out = [f32::NAN; 20];
            v.rms_norm(&[0.0; 20], &[1.0; 20], 1e-6, &mut out);
            assert_eq!(out, [0.0; 20]);
        }
    }
}
