//! Sums and products, element by element.

use super::lanes::Lanes;

super::multiversion! {
    /// `x[i] += y[i]`. Shapes: both (n).
    ///
    /// # Panics
    /// The lengths differ.
    pub fn add_assign(x: &mut [f32], y: &[f32]) = add_assign_body;

    /// `x[i] *= y[i]`. Shapes: both (n).
    ///
    /// # Panics
    /// The lengths differ.
    pub fn mul_assign(x: &mut [f32], y: &[f32]) = mul_assign_body;

    /// `x[i] *= factor`. Shapes: `x` (n).
    pub fn scale(x: &mut [f32], factor: f32) = scale_body;

    /// `x[i] += factor * y[i]`. Shapes: both (n).
    ///
    /// # Panics
    /// The lengths differ.
    pub fn add_scaled(x: &mut [f32], factor: f32, y: &[f32]) = add_scaled_body;
}

// One correctly rounded operation a float leaves the compiler no freedom, so plain loops will do:
// they are vectorised with whatever features the caller carries.

#[inline(always)]
fn add_assign_body<L: Lanes>(_: L, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "as many terms on both sides");
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

#[inline(always)]
fn mul_assign_body<L: Lanes>(_: L, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "as many factors on both sides");
    for (x, y) in x.iter_mut().zip(y) {
        *x *= y;
    }
}

#[inline(always)]
fn scale_body<L: Lanes>(_: L, x: &mut [f32], factor: f32) {
    for x in x {
        *x *= factor;
    }
}

#[inline(always)]
fn add_scaled_body<L: Lanes>(_: L, x: &mut [f32], factor: f32, y: &[f32]) {
    assert_eq!(x.len(), y.len(), "as many terms on both sides");
    for (x, y) in x.iter_mut().zip(y) {
        *x += factor * y;
    }
}

#[cfg(test)]
mod tests {
    use super::super::Vector;
    use super::super::testing::{LENGTHS, Random};

    #[test]
    fn every_element_is_the_plain_sum_or_product() {
        let mut random = Random(1);
        for v in Vector::available() {
            for len in LENGTHS {
                let x = random.floats(len, 3.0);
                let y = random.floats(len, 3.0);
                let check = |op: &dyn Fn(&mut [f32]), want: &dyn Fn(f32, f32) -> f32| {
                    let mut got = x.clone();
                    op(&mut got);
                    for i in 0..len {
                        assert_eq!(got[i], want(x[i], y[i]), "{v:?} {len}");
                    }
                };
                check(&|x| v.add_assign(x, &y), &|x, y| x + y);
                check(&|x| v.mul_assign(x, &y), &|x, y| x * y);
                check(&|x| v.scale(x, 0.3), &|x, _| x * 0.3);
                check(&|x| v.add_scaled(x, 0.3, &y), &|x, y| x + 0.3 * y);
            }
        }
    }

    #[test]
    #[should_panic(expected = "as many terms")]
    fn lengths_must_agree() {
        Vector::detect().add_assign(&mut [0.0; 4], &[0.0; 5]);
    }
}
