//! A set of numbers, one bit each, in which the next one is found by words.

/// Whether `number` is in the set is what `put` says last.
#[inline]
pub(super) fn put(bits: &mut [u64], number: u32, is_in: bool) {
    let bit = 1 << (number % 64);
    let word = &mut bits[number as usize / 64];
    *word = if is_in { *word | bit } else { *word & !bit };
}

/// Whether `number` is in the set.
#[inline]
pub(super) fn has(bits: &[u64], number: u32) -> bool {
    bits[number as usize / 64] & (1 << (number % 64)) != 0
}

/// The lowest from `from` on and below `end`.
#[inline]
pub(super) fn lowest(bits: &[u64], from: u32, end: u32) -> Option<u32> {
    if from >= end {
        return None;
    }
    let mut word = from / 64;
    let mut left = bits[word as usize] & (u64::MAX << (from % 64));
    while left == 0 {
        word += 1;
        if word > (end - 1) / 64 {
            return None;
        }
        left = bits[word as usize];
    }
    let found = word * 64 + left.trailing_zeros();
    (found < end).then_some(found)
}

/// The highest from `from` on and below `end`.
#[inline]
pub(super) fn highest(bits: &[u64], from: u32, end: u32) -> Option<u32> {
    if from >= end {
        return None;
    }
    let mut word = (end - 1) / 64;
    let mut left = bits[word as usize] & (u64::MAX >> (63 - (end - 1) % 64));
    while left == 0 {
        if word <= from / 64 {
            return None;
        }
        word -= 1;
        left = bits[word as usize];
    }
    let found = word * 64 + 63 - left.leading_zeros();
    (found >= from).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_one_is_found_in_either_direction() {
        let numbers = [0u32, 1, 63, 64, 130, 191];
        let mut bits = [0u64; 3];
        put(&mut bits, 77, true);
        for number in numbers {
            put(&mut bits, number, true);
        }
        put(&mut bits, 77, false);
        for from in 0..192 {
            for end in 0..=192 {
                let within = || numbers.iter().copied().filter(|n| (from..end).contains(n));
                assert_eq!(lowest(&bits, from, end), within().min(), "{from}..{end}");
                assert_eq!(highest(&bits, from, end), within().max(), "{from}..{end}");
            }
        }
    }
}
