//! The order of an epoch as a function: a permutation that takes no memory, by a keyed Feistel network
//! on as many bits as the count needs, walked until it falls below the count.

/// Rounds of the network; four make a permutation look random, six leave a margin.
const ROUNDS: u64 = 6;

/// Where the sequence at `index` of an epoch stands among `count`; one to one for each seed and epoch.
///
/// # Panics
/// `index` is not below `count`.
pub(in crate::tune) fn place(seed: u64, epoch: u64, index: u64, count: u64) -> u64 {
    assert!(index < count);
    let bits = (u64::BITS - (count - 1).leading_zeros()).max(2);
    let half = bits.div_ceil(2);
    let mask = (1 << half) - 1;
    let key = mix(mix(seed) ^ epoch);
    let mut value = index;
    // At most four values in one are beyond the count on average.
    loop {
        let (mut left, mut right) = (value >> half, value & mask);
        for round in 0..ROUNDS {
            (left, right) = (right, left ^ (mix(key ^ right ^ round << 32) & mask));
        }
        value = left << half | right;
        if value < count {
            return value;
        }
    }
}

/// The finalizer of SplitMix64: every bit of the result hangs on every bit given.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_comes_once() {
        for count in [1, 2, 3, 4, 5, 16, 17, 1000] {
            for epoch in 0..3 {
                let mut seen: Vec<u64> = (0..count).map(|i| place(7, epoch, i, count)).collect();
                seen.sort_unstable();
                assert!(seen.into_iter().eq(0..count), "{count}");
            }
        }
    }

    /// Each of the 24 orders of four comes about as often as the others.
    #[test]
    fn orders_are_spread() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..2400 {
            let order = [0, 1, 2, 3].map(|i| place(seed, 0, i, 4));
            *counts.entry(order).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24, "{counts:?}");
        assert!(counts.values().all(|&n| n > 40 && n < 200), "{counts:?}");
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order =
            |seed, epoch| -> Vec<u64> { (0..50).map(|i| place(seed, epoch, i, 50)).collect() };
        assert_ne!(order(1, 0), order(1, 1));
        assert_ne!(order(1, 0), order(2, 0));
        assert_eq!(order(1, 5), order(1, 5));
    }
}
