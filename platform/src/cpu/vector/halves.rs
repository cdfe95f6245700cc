//! Half floats (IEEE binary16) to single and back.

use super::lanes::Lanes;

super::multiversion! {
    /// `out[i] = x[i]`, rounded to nearest even. Shapes: both (n). Beyond the largest half float
    /// (65504) it is kept there, so that one outlier doesn't become infinite; NaN stays NaN.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn to_f16(x: &[f32], out: &mut [u16]) = to_f16_body;

    /// `out[i] = x[i]`, exactly. Shapes: both (n).
    ///
    /// # Panics
    /// The lengths differ.
    pub fn from_f16(x: &[u16], out: &mut [f32]) = from_f16_body;
}

/// The largest finite half float.
const F16_MAX: f32 = 65504.0;

#[inline(always)]
fn to_f16_body<L: Lanes>(l: L, x: &[f32], out: &mut [u16]) {
    assert_eq!(x.len(), out.len(), "as many outputs as inputs");
    let whole = x.len() - x.len() % L::N;
    let (x, x_rest) = x.split_at(whole);
    let (out, out_rest) = out.split_at_mut(whole);
    for (x, out) in x.chunks_exact(L::N).zip(out.chunks_exact_mut(L::N)) {
        let bounded = l.max(l.splat(-F16_MAX), l.min(l.splat(F16_MAX), l.take(x)));
        // SAFETY: the chunk is `N` long.
        unsafe { l.store_f16(out.as_mut_ptr(), bounded) };
    }
    if !out_rest.is_empty() {
        let x = l.take_part(x_rest, 0.0);
        let bounded = l.max(l.splat(-F16_MAX), l.min(l.splat(F16_MAX), x));
        let mut full = [0; super::lanes::LANES_MAX];
        // SAFETY: `full` is `LANES_MAX` long.
        unsafe { l.store_f16(full.as_mut_ptr(), bounded) };
        let len = out_rest.len();
        out_rest.copy_from_slice(&full[..len]);
    }
}

#[inline(always)]
fn from_f16_body<L: Lanes>(l: L, x: &[u16], out: &mut [f32]) {
    assert_eq!(x.len(), out.len(), "as many outputs as inputs");
    let whole = x.len() - x.len() % L::N;
    let (x, x_rest) = x.split_at(whole);
    let (out, out_rest) = out.split_at_mut(whole);
    for (x, out) in x.chunks_exact(L::N).zip(out.chunks_exact_mut(L::N)) {
        // SAFETY: the chunk is `N` long.
        let v = unsafe { l.load_f16(x.as_ptr()) };
        l.put(out, v);
    }
    if !out_rest.is_empty() {
        let mut full = [0; super::lanes::LANES_MAX];
        full[..x_rest.len()].copy_from_slice(x_rest);
        // SAFETY: `full` is `LANES_MAX` long.
        let v = unsafe { l.load_f16(full.as_ptr()) };
        l.put_part(out_rest, v);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::LENGTHS;
    use half::f16;

    #[test]
    fn every_half_float_survives_the_round_trip() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for v in Vector::available() {
            let mut wide = vec![0.0; all.len()];
            v.from_f16(&all, &mut wide);
            let mut back = vec![0; all.len()];
            v.to_f16(&wide, &mut back);
            for (bits, (x, back)) in all.iter().zip(wide.iter().zip(back)) {
                let want = f16::from_bits(*bits);
                if want.is_nan() {
                    assert!(
                        x.is_nan() && f16::from_bits(back).is_nan(),
                        "{v:?} {bits:#x}"
                    );
                } else if want.is_infinite() {
                    assert_eq!(
                        (*x, f16::from_bits(back).to_f32().abs()),
                        (want.to_f32(), 65504.0)
                    );
                } else {
                    assert_eq!((*x, back), (want.to_f32(), *bits), "{v:?} {bits:#x}");
                }
            }
        }
    }

    #[test]
    fn rounding_is_to_nearest_even_at_every_length() {
        for v in Vector::available() {
            for len in LENGTHS {
                let x: Vec<f32> = (0..len).map(|i| 1.0 + i as f32 / 4096.0).collect();
                let mut out = vec![0; len];
                v.to_f16(&x, &mut out);
                for (x, out) in x.iter().zip(&out) {
                    assert_eq!(*out, f16::from_f32(*x).to_bits(), "{v:?} {x}");
                }
                let mut wide = vec![f32::NAN; len];
                v.from_f16(&out, &mut wide);
                for (wide, out) in wide.iter().zip(out) {
                    assert_eq!(*wide, f16::from_bits(out).to_f32(), "{v:?}");
                }
            }
        }
    }
}
