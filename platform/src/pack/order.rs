//! In which order a layer's units stand, so that those which are read together lie together.

use std::cmp::Reverse;

/// Sampled tokens that co-activation is counted over.
pub const SAMPLE: usize = 1024;

/// Words of a neuron's bits.
pub const WORDS: usize = SAMPLE / 64;

/// Neurons by falling number of tokens that they were active in.
pub fn by_frequency(active: &[u32]) -> Vec<u32> {
    let mut order: Vec<u32> = (0..active.len() as u32).collect();
    order.sort_by_key(|neuron| (Reverse(active[*neuron as usize]), *neuron));
    order
}

/// A chain through the neurons: it begins at the most often active one and goes on to the one that
/// shares most of its tokens with the last (the Jaccard index of the sampled tokens), the more often
/// active one among equals. `bits` `(ff, WORDS)`: the sampled tokens that each was active in.
pub fn by_coactivation(active: &[u32], bits: &[u64]) -> Vec<u32> {
    let (bits, rest) = bits.as_chunks::<WORDS>();
    assert!(rest.is_empty() && bits.len() == active.len());
    let counts: Vec<u32> = bits.iter().map(ones).collect();
    // Candidates by frequency: the first of equals wins.
    let mut left = by_frequency(active);
    let mut order = Vec::with_capacity(left.len());
    let mut at = 0;
    while !left.is_empty() {
        let last = left.remove(at);
        order.push(last);
        let last = last as usize;
        let (mut best, mut best_shared, mut best_either) = (0, 0u64, 1u64);
        for (place, &neuron) in left.iter().enumerate() {
            let neuron = neuron as usize;
            let both = bits[last].iter().zip(&bits[neuron]);
            let shared: u32 = both.map(|(a, b)| (a & b).count_ones()).sum();
            let either = u64::from(counts[last] + counts[neuron] - shared).max(1);
            let shared = u64::from(shared);
            if shared * best_either > best_shared * either {
                (best, best_shared, best_either) = (place, shared, either);
            }
        }
        at = best;
    }
    order
}

fn ones(bits: &[u64; WORDS]) -> u32 {
    bits.iter().map(|word| word.count_ones()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_often_active_stand_first() {
        assert_eq!(by_frequency(&[3, 9, 3, 0, 4]), [1, 4, 0, 2, 3]);
    }

    #[test]
    fn neurons_of_a_group_stand_together() {
        // Three groups, interleaved; each group's tokens are its own, one neuron misses some.
        const GROUPS: usize = 3;
        let mut bits = vec![0u64; 12 * WORDS];
        let mut active = vec![0; 12];
        for neuron in 0..12 {
            let group = neuron % GROUPS;
            for token in (group..SAMPLE).step_by(GROUPS) {
                if token % 7 != neuron {
                    bits[neuron * WORDS + token / 64] |= 1 << (token % 64);
                    active[neuron] += 1;
                }
            }
        }
        let order = by_coactivation(&active, &bits);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..12).collect::<Vec<_>>());
        for group in order.chunks(4) {
            assert!(
                group.iter().all(|n| n % 3 == group[0] % 3),
                "groups are torn: {order:?}"
            );
        }
    }

    /// What counts is the share of tokens in common, or the busiest neurons would be next to all.
    #[test]
    fn busy_neurons_are_no_better_neighbours() {
        let spans = [0..600usize, 0..320, 250..840];
        let mut bits = vec![0u64; 3 * WORDS];
        for (neuron, span) in spans.iter().enumerate() {
            for token in span.clone() {
                bits[neuron * WORDS + token / 64] |= 1 << (token % 64);
            }
        }
        let active = spans.map(|span| span.len() as u32);
        assert_eq!(by_coactivation(&active, &bits), [0, 1, 2]);
    }

    #[test]
    fn silent_neurons_are_not_lost() {
        let order = by_coactivation(&[0, 0, 0], &[0; 3 * WORDS]);
        assert_eq!(order, [0, 1, 2]);
    }
}
