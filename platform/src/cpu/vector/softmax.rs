//! Softmax, and the soft cap that some models put on their logits.

use super::exp::{exp_lanes, tanh_lanes};
use super::lanes::Lanes;
use super::reduce::max_body;

super::multiversion! {
    /// `x[i] = e^x[i] / sum(e^x)`, without overflow. Shapes: `x` (n). Elements of negative infinity
    /// become 0. If no element is finite, all become NaN.
    pub fn softmax(x: &mut [f32]) = softmax_body;

    /// `x[i] = cap * tanh(x[i] / cap)`. Shapes: `x` (n). `cap` is above 0.
    pub fn softcap(x: &mut [f32], cap: f32) = softcap_body;
}

#[inline(always)]
fn softmax_body<L: Lanes>(l: L, x: &mut [f32]) {
    let top = l.splat(max_body(l, x));
    let mut sum = l.splat(0.0);
    let mut chunks = x.chunks_exact_mut(L::N);
    for chunk in &mut chunks {
        let e = exp_lanes(l, l.sub(l.take(chunk), top));
        sum = l.add(sum, e);
        l.put(chunk, e);
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let e = exp_lanes(l, l.sub(l.take_part(rest, f32::NEG_INFINITY), top));
        sum = l.add(sum, e);
        l.put_part(rest, e);
    }
    let factor = 1.0 / l.sum(sum);
    for x in x {
        *x *= factor;
    }
}

#[inline(always)]
fn softcap_body<L: Lanes>(l: L, x: &mut [f32], cap: f32) {
    let (up, down) = (l.splat(cap), l.splat(1.0 / cap));
    let mut chunks = x.chunks_exact_mut(L::N);
    for chunk in &mut chunks {
        l.put(chunk, l.mul(up, tanh_lanes(l, l.mul(down, l.take(chunk)))));
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let y = tanh_lanes(l, l.mul(down, l.take_part(rest, 0.0)));
        l.put_part(rest, l.mul(up, y));
    }
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::{LENGTHS, Random, close};

    #[test]
    fn softmax_matches_double_precision() {
        let mut random = Random(7);
        for v in Vector::available() {
            for len in LENGTHS {
                let x = random.floats(len, 20.0);
                let mut out = x.clone();
                v.softmax(&mut out);
                let top = x.iter().copied().fold(f32::MIN, f32::max);
                let e = |x: f32| f64::from(x - top).exp();
                let sum: f64 = x.iter().map(|x| e(*x)).sum();
                for i in 0..len {
                    close(out[i], e(x[i]) / sum, 1e-6, 0.0);
                }
            }
        }
    }

    #[test]
    fn softmax_of_huge_and_masked_elements() {
        for v in Vector::available() {
            let mut x = [f32::NEG_INFINITY; 18];
            x[3] = 1e30;
            x[17] = 1e30;
            v.softmax(&mut x);
            for (i, got) in x.iter().enumerate() {
                assert_eq!(*got, if i == 3 || i == 17 { 0.5 } else { 0.0 }, "{v:?}");
            }
        }
    }

    #[test]
    fn softcap_matches_double_precision() {
        for v in Vector::available() {
            for cap in [30.0f32, 50.0] {
                let x: Vec<f32> = (-20_000..=20_000).map(|i| i as f32 * 0.01).collect();
                let mut out = x.clone();
                v.softcap(&mut out, cap);
                for (x, got) in x.iter().zip(out) {
                    let cap = f64::from(cap);
                    close(got, cap * (f64::from(*x) / cap).tanh(), 1e-6, 0.0);
                }
            }
        }
    }
}
