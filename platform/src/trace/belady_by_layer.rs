//! Belady's rule where each layer has a cache of its own: an equal share of
//! the slots, which no other layer may use. In common they serve better, so this one misses more.

use std::collections::BTreeSet;

use super::sets::Sets;

/// Misses of Belady's rule with `slots` slots, split equally over the layers, what is left over unused; the
/// first `warm` tokens fill the caches and don't count.
///
/// As in [`simulate`](super::simulate()) a token's units are counted before any of them goes, each that isn't
/// resident then is a miss, and none passes by: it takes the slot of the unit of its layer whose next use is
/// farthest. That may be one of the same token: one that was computed may go. So a layer's share needn't hold
/// all that a token uses: as many as it has slots can be hits, the others miss and pass through it.
///
/// Here they come one after the other, where the simulation holds slots for all that is on its way. So its
/// Belady misses less than this one unless few slots are left beside one layer's missing units.
pub fn belady_by_layer(sets: &Sets, slots: u32, warm: u32) -> u64 {
    let share = slots.checked_div(sets.layers).unwrap_or(0) as usize;
    (0..sets.layers)
        .map(|layer| of_layer(sets, layer, share, warm))
        .sum()
}

fn of_layer(sets: &Sets, layer: u32, share: usize, warm: u32) -> u64 {
    let mut nexts = next_uses(sets, layer);
    // By the token of their next use. Those that the running token uses come first.
    let mut resident = BTreeSet::new();
    let mut missing = Vec::new();
    let mut misses = 0;
    for token in 0..sets.tokens {
        missing.clear();
        for &unit in sets.active(token, layer) {
            let next = nexts.pop().expect("each use has a next one");
            // Hits first: nothing that comes in takes the slot of one.
            if resident.remove(&(token, unit)) {
                resident.insert((next, unit));
            } else {
                missing.push((next, unit));
            }
        }
        if token >= warm {
            misses += missing.len() as u64;
        }
        if share == 0 {
            continue;
        }
        for &unit in &missing {
            if resident.len() == share {
                resident.pop_last();
            }
            resident.insert(unit);
        }
    }
    misses
}

/// For each use of a unit of `layer`, the last one first, the token of the next; `u32::MAX`: none.
fn next_uses(sets: &Sets, layer: u32) -> Vec<u32> {
    let mut next = vec![u32::MAX; sets.units as usize];
    let mut nexts = Vec::new();
    for token in (0..sets.tokens).rev() {
        for &unit in sets.active(token, layer).iter().rev() {
            nexts.push(std::mem::replace(&mut next[unit as usize], token));
        }
    }
    nexts
}

#[cfg(test)]
mod tests {
    use leanstream_core::sparse::retain::Name;

    use super::super::made_up::made_up;
    use super::super::{Machine, least_slots, simulate};
    use super::*;

    /// A trace of `tokens` tokens; `used` says what a token uses of a layer, lowest first.
    fn sets(
        name: &str,
        [tokens, layers, units]: [u32; 3],
        used: impl Fn(u32, u32) -> Vec<u16>,
    ) -> Sets {
        made_up(&format!("belady-{name}"), [layers, units], |recorder| {
            for token in 0..tokens {
                recorder.token(u64::from(token));
                for layer in 0..layers {
                    let units = used(token, layer);
                    recorder.layer(layer, &[], &units, &vec![1.0; units.len()]);
                }
            }
        })
    }

    #[test]
    fn by_hand() {
        // Layer 0, with two slots:
        //   token 0 uses 0 1: both miss; {0, 1}, needed again at 2 and 3.
        //   token 1 uses 2:   a miss, takes 1's slot, which is needed last; {0, 2}, again at 2 and 5.
        //   token 2 uses 0:   a hit; {0, 2}, again at 3 and 5.
        //   token 3 uses 0 1: 0 hits, 1 misses and takes 2's slot; {0, 1}, again at 4 and 4.
        //   token 4 uses 0 1 3: two hits, 3 misses; it takes the slot of 1, which was computed and is never
        //     needed again; {0, 3}, again at 5 and never.
        //   token 5 uses 0 2: 0 hits, 2 misses.
        // 2 + 1 + 0 + 1 + 1 + 1 = 6 misses; of the last four tokens 3.
        // Layer 1 uses 0 with every token: a miss of the first one, and a slot left that is of no use to layer 0.
        let layer: [&[u16]; 6] = [&[0, 1], &[2], &[0], &[0, 1], &[0, 1, 3], &[0, 2]];
        let sets = sets("hand", [6, 2, 4], |token, of| match of {
            0 => layer[token as usize].to_vec(),
            _ => vec![0],
        });
        assert_eq!(belady_by_layer(&sets, 4, 0), 6 + 1);
        assert_eq!(belady_by_layer(&sets, 5, 0), 6 + 1, "a slot is left over");
        assert_eq!(belady_by_layer(&sets, 4, 2), 3, "filled by the first two");
        // With room for all only the first uses miss, with room for none all do.
        assert_eq!(belady_by_layer(&sets, 8, 0), 4 + 1);
        assert_eq!(belady_by_layer(&sets, 1, 0), 11 + 6);
    }

    /// One slot for three units of every token: the one that came last stays.
    #[test]
    fn what_does_not_fit_passes_through() {
        let sets = sets("through", [5, 1, 4], |_, _| vec![0, 1, 2]);
        assert_eq!(belady_by_layer(&sets, 1, 0), 3 + 4 * 2);
        assert_eq!(belady_by_layer(&sets, 2, 0), 3 + 4);
    }

    /// Layers that need more take the slots of those that need less, where they may.
    #[test]
    fn a_cache_in_common_misses_less() {
        let machine = Machine {
            latency_ns: 10_000,
            bytes_per_s: 1_000_000_000,
            iops: 0,
            reads_max: 1,
            align: 512,
            gap: 0,
            compute_ns: 160_000,
            stage_ns: 0,
            unit_bytes: 1000,
        };
        // Layer 0 has two units in use, layer 5 up to twelve of which two thirds change.
        let sets = sets("common", [60, 6, 24], |token, layer| {
            let count = 2 * (layer + 1);
            let turn = |i| if i % 3 == 0 { i } else { i + token * 5 % 13 };
            let mut units: Vec<u16> = (0..count).map(|i| (turn(i) % 24) as u16).collect();
            units.sort_unstable();
            units.dedup();
            units
        });
        for slots in [least_slots(&sets), 60, 72, 84] {
            let common = simulate(&sets, Name::Belady, slots, machine, 15);
            let common = common.counters.misses();
            let by_layer = belady_by_layer(&sets, slots, 15);
            assert!(common < by_layer, "{slots}: {common}, {by_layer}");
        }
        assert_eq!(belady_by_layer(&sets, 6 * 24, 60), 0);
    }
}
