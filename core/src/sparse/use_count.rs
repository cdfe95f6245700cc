//! How often a unit is used: the share of tokens, the latest weighing most, as a logarithm in fixed point. Adding to
//! it takes a table, and fading it a product.

use super::log2::log2;
use super::tables::{LOG_STEPS, to_fixed_log};

/// log2 of what is left of a share after a token, in fixed point and in 1024ths: a 32nd is taken away.
const FADE: u32 = 96_054;

/// Tokens after which little is left; a share fades no further.
const AGE_MAX: u32 = 255;

/// `log` after `age` tokens without use.
#[inline]
pub(super) fn faded(log: u16, age: u32) -> u16 {
    let lost = age.min(AGE_MAX) * FADE / 1024;
    log.saturating_sub(lost as u16)
}

/// What a token weighs, of `tokens` at once.
fn weight(tokens: u32) -> f32 {
    let mut left = 1.0;
    for _ in 0..tokens.min(AGE_MAX) {
        left *= 31.0 / 32.0;
    }
    1.0 - left
}

/// Entries an octave, of so many steps each.
const STEP: u16 = 128;
/// Octaves below which what is added doesn't count.
const OCTAVES: usize = 12;
const ENTRIES: usize = OCTAVES * LOG_STEPS as usize / STEP as usize;

/// Adds to shares.
#[derive(Clone, Debug)]
pub(super) struct UseCount {
    /// log2 of `1 + 2^-(i / 16)`, in fixed point.
    sums: [u16; ENTRIES + 1],
    tokens: u32,
    weight: f32,
    /// log2 of the weight, in fixed point.
    log_weight: u16,
}

impl UseCount {
    pub fn new() -> Self {
        // 2^-(1/16).
        const RATIO: f32 = 0.957_603_3;
        let mut sums = [0; ENTRIES + 1];
        let mut less = 1.0;
        for sum in &mut sums {
            *sum = (log2(1.0 + less) * LOG_STEPS + 0.5) as u16;
            less *= RATIO;
        }
        let mut count = Self {
            sums,
            tokens: 0,
            weight: 0.0,
            log_weight: 0,
        };
        count.begin(1);
        count
    }

    /// A pass over `tokens` tokens begins.
    pub fn begin(&mut self, tokens: u32) {
        if tokens != self.tokens {
            self.tokens = tokens;
            self.weight = weight(tokens);
            self.log_weight = to_fixed_log(self.weight);
        }
    }

    /// Tokens of the pass.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }

    /// `log`, faded, when this share of the pass's tokens use the unit.
    #[inline]
    pub fn used(&self, log: u16, share: f32) -> u16 {
        let added = match share {
            1.0 => self.log_weight,
            share => to_fixed_log(share * self.weight),
        };
        let (more, apart) = (log.max(added), log.abs_diff(added));
        let (entry, rest) = (usize::from(apart / STEP), u32::from(apart % STEP));
        if entry >= ENTRIES {
            return more;
        }
        let (from, to) = (u32::from(self.sums[entry]), u32::from(self.sums[entry + 1]));
        let sum = from - (from - to) * rest / u32::from(STEP);
        more.saturating_add(sum as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tables::from_fixed_log;
    use super::*;

    #[test]
    fn shares_fade_and_grow_as_a_moving_average_does() {
        let mut count = UseCount::new();
        let mut seed = 7u32;
        let (mut log, mut true_share, mut age) = (to_fixed_log(0.1), 0.1f64, 0u32);
        for _ in 0..5000 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            age += 1;
            true_share *= 31.0 / 32.0;
            if seed >> 16 & 7 == 0 {
                log = count.used(faded(log, age), 1.0);
                (true_share, age) = (true_share + 1.0 / 32.0, 0);
                let near = f64::from(from_fixed_log(log)).exp2();
                assert!(
                    (near / true_share - 1.0).abs() < 0.01,
                    "{near} for {true_share}"
                );
            }
        }
        for _ in 0..2000 {
            log = count.used(faded(log, 1), 1.0);
        }
        let near = f64::from(from_fixed_log(log)).exp2();
        assert!((near - 1.0).abs() < 0.01, "always used: {near}");
        count.begin(64);
        let half = count.used(faded(0, 64), 0.5);
        let near = f64::from(from_fixed_log(half)).exp2();
        let expected = 0.5 * (1.0 - (31.0f64 / 32.0).powi(64));
        assert!(
            (near / expected - 1.0).abs() < 0.01,
            "{near} for {expected}"
        );
    }

    #[test]
    fn nothing_is_left_of_what_is_never_used() {
        assert_eq!(faded(0, 1), 0);
        assert_eq!(faded(1000, u32::MAX), 0);
    }
}
