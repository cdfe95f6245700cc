//! Random bits that are a function of (seed, step, tensor, element): no state, any order, any thread.
//!
//! A tensor's 64-bit [`Key`] is mixed from seed, step, tensor and purpose once. From it and a 32-bit count,
//! two multiplications make a word of 32 bits, which serves two elements: cheap in 32-bit vector lanes.

/// What random bits are drawn for. Equal counters give equal bits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Counter {
    /// Of the run.
    pub seed: u64,
    /// Optimizer step, or micro-batch: whatever saves the tensor anew.
    pub step: u64,
    /// Number of the saved tensor.
    pub tensor: u32,
}

/// A tensor's key for one purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key {
    /// Added to the count.
    pub add: u32,
    /// Mixed in half-way.
    pub xor: u32,
}

/// Multipliers and shifts of the word's mixer; vector kernels repeat it.
pub const FACTORS: [u32; 2] = [0x7feb_352d, 0x846c_a68b];
/// Right shifts before, between and after the multiplications.
pub const SHIFTS: [u32; 3] = [16, 15, 16];

/// A bijection of 64 bits (the finalizer of SplitMix64).
const fn mix(mut x: u64) -> u64 {
    x ^= x >> 30;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 27;
    x = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

impl Counter {
    /// The key of stochastic rounding.
    #[must_use]
    pub const fn rounding(self) -> Key {
        self.key(0)
    }

    /// The key of outliers' rounding to bf16.
    #[must_use]
    pub const fn outliers(self) -> Key {
        self.key(1)
    }

    /// The key of shrinking codes: independent of [`Counter::rounding`] and of other pairs of bits.
    #[must_use]
    pub const fn shrinking(self, from: super::Bits, to: super::Bits) -> Key {
        self.key((from.get() << 8 | to.get()) as u64)
    }

    const fn key(self, purpose: u64) -> Key {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let x = mix(self.seed.wrapping_add(STEP));
        let x = mix((x ^ self.step).wrapping_add(STEP));
        let x = mix((x ^ (self.tensor as u64) << 32 ^ purpose).wrapping_add(STEP));
        Key {
            add: x as u32,
            xor: (x >> 32) as u32,
        }
    }
}

impl Key {
    /// Word number `count`: 32 random bits.
    #[inline]
    #[must_use]
    pub const fn word(self, count: u32) -> u32 {
        let mut x = count.wrapping_add(self.add);
        x ^= x >> SHIFTS[0];
        x = x.wrapping_mul(FACTORS[0]) ^ self.xor;
        x ^= x >> SHIFTS[1];
        x = x.wrapping_mul(FACTORS[1]);
        x ^ x >> SHIFTS[2]
    }
}

/// The word that serves element `i` of a group of `group`, counted from the group's first word, and
/// whether its upper half does.
///
/// In each block of 32 the words serve elements `0 .. 16` with their lower halves and `16 .. 32` with their upper ones, so
/// that a vector of words makes two vectors of elements without moving lanes. The last block may be
/// 8, 16 or 24 long and is halved likewise.
#[inline]
#[must_use]
pub const fn word_of(i: usize, group: usize) -> (usize, bool) {
    let start = i - i % super::BLOCK;
    let half = if group - start < super::BLOCK {
        (group - start) / 2
    } else {
        super::BLOCK / 2
    };
    let at = i - start;
    (start / 2 + at % half, at >= half)
}

/// 16 random bits for element `i` of the group of `group` elements whose first element is number
/// `first` of the tensor. Words repeat after 2^33 elements of one tensor.
#[inline]
#[must_use]
pub const fn uniform(key: Key, first: usize, i: usize, group: usize) -> u32 {
    let (word, upper) = word_of(i, group);
    let word = key.word((first / 2 + word) as u32);
    if upper { word >> 16 } else { word & 0xffff }
}

#[cfg(test)]
mod tests {
    use super::super::Bits;
    use super::*;

    const COUNTER: Counter = Counter {
        seed: 1,
        step: 2,
        tensor: 3,
    };

    #[test]
    fn each_half_of_each_word_serves_one_element() {
        for group in (8..=256).step_by(8) {
            let mut used = [false; 256];
            for i in 0..group {
                let (word, upper) = word_of(i, group);
                let half = 2 * word + usize::from(upper);
                assert!(half < group && !used[half], "{group} {i}");
                used[half] = true;
            }
        }
    }

    #[test]
    fn anything_changes_the_key() {
        let c = COUNTER;
        let keys = [
            c.rounding(),
            c.outliers(),
            c.shrinking(Bits::Eight, Bits::Four),
            c.shrinking(Bits::Four, Bits::Two),
            Counter { seed: 2, ..c }.rounding(),
            Counter { step: 3, ..c }.rounding(),
            Counter { tensor: 4, ..c }.rounding(),
            Counter {
                seed: 2,
                step: 1,
                ..c
            }
            .rounding(),
        ];
        for (i, a) in keys.iter().enumerate() {
            for b in &keys[i + 1..] {
                assert!(a.add != b.add && a.xor != b.xor, "{a:?} {b:?}");
            }
        }
    }

    /// Both halves of words are uniform, and independent of each other, of the next word, and of the
    /// same word under a key whose counter is the next one.
    #[test]
    fn words_look_random() {
        let key = COUNTER.rounding();
        let later = Counter { step: 3, ..COUNTER }.rounding();
        let n = 1 << 16;
        let mut joint = [[0u32; 256]; 5];
        for i in 0..n {
            let (word, next, other) = (key.word(i), key.word(i + 1), later.word(i));
            let cells = [
                (word >> 28, word >> 12 & 15),
                (word >> 28, next >> 28),
                (word >> 12 & 15, next >> 12 & 15),
                (word >> 28, other >> 28),
                (word >> 12 & 15, other >> 12 & 15),
            ];
            for (joint, (a, b)) in joint.iter_mut().zip(cells) {
                joint[(a << 4 | b) as usize] += 1;
            }
        }
        let expected = f64::from(n) / 256.0;
        for joint in joint {
            let chi: f64 = joint
                .iter()
                .map(|&seen| (f64::from(seen) - expected) * (f64::from(seen) - expected) / expected)
                .sum();
            // 255 degrees of freedom: mean 255, standard deviation 22.6.
            assert!((165.0..370.0).contains(&chi), "{chi}");
        }
    }
}
