//! Llama 3's rotary scaling, without the library's powers: those may differ between machines.

/// What each of the `head_dim / 2` rotary frequencies is divided by: 1 where the wave is shorter
/// than a quarter of the original context, `factor` where it is longer than all of it, and in
/// between a blend that is linear in the number of waves the context holds.
pub(super) fn llama3(factor: f32, original_ctx: u32, head_dim: u32, rope_base: f32) -> Vec<f32> {
    const LOW: f64 = 1.0;
    const HIGH: f64 = 4.0;
    let half = head_dim / 2;
    let step = 1.0 / root(rope_base.into(), half);
    let mut frequency = 1.0f64;
    let mut out = Vec::with_capacity(half as usize);
    for _ in 0..half {
        let waves = f64::from(original_ctx) * frequency / (2.0 * std::f64::consts::PI);
        out.push(if waves > HIGH {
            1.0
        } else if waves < LOW {
            factor
        } else {
            let smooth = (waves - LOW) / (HIGH - LOW);
            (1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)) as f32
        });
        frequency *= step;
    }
    out
}

/// The `n`th root of `x` by Newton's method.
fn root(x: f64, n: u32) -> f64 {
    // From above the iteration falls steadily: it is done when it stops falling.
    let mut guess = x.max(1.0);
    loop {
        let mut power = 1.0;
        for _ in 1..n {
            power *= guess;
        }
        let next = guess - (guess - x / power) / f64::from(n);
        if next >= guess {
            return guess;
        }
        guess = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn factors_turn_where_the_waves_say() {
        // Llama 3.2 1B: base 500000, 64 values per head, factor 32 over 8192. Frequency i makes
        // 8192 / 2 pi * 500000^(-i/32) waves: more than 4 up to i = 14, less than 1 from i = 18.
        let factors = llama3(32.0, 8192, 64, 500_000.0);
        assert_eq!(factors.len(), 32);
        assert!(factors[..15].iter().all(|&f| f == 1.0), "{factors:?}");
        assert!(factors[18..].iter().all(|&f| f == 32.0), "{factors:?}");
        let blend = &factors[14..19];
        assert!(blend.windows(2).all(|w| w[0] < w[1]), "{factors:?}");
    }

    #[test]
    fn roots_are_roots() {
        for (x, n) in [
            (10_000.0, 32),
            (500_000.0, 64),
            (1e6, 128),
            (2.0, 1),
            (1.0, 7),
        ] {
            assert!(
                (root(x, n).powi(n as i32) / x - 1.0).abs() < 1e-12,
                "{x} {n}"
            );
        }
    }
}
