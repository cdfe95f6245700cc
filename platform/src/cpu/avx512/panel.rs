//! How a matrix product is cut: blocks of columns, panels of rows, tiles of tokens.
//!
//! A panel holds the decoded weights of a few rows and one block of columns, laid out so that one
//! vector register takes the same column of many rows. It stays in the first- or second-level cache
//! while all tokens pass by, a tile at a time; the tile's sums stay in registers.
//!
//! Blocks of columns start at fixed columns, and each block's sum is added to the output as a whole.
//! So the order of additions for one (row, token) is the same however rows and tokens are cut.

use std::ops::Range;

/// Cuts `0..tokens` into as few tiles of at most `most` as possible, nearly equal in size.
pub(super) fn tiles(tokens: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = tokens.div_ceil(most);
    (0..count).map(move |i| i * tokens / count..(i + 1) * tokens / count)
}

/// Cuts `0..n` into steps of `step`; the last one may be shorter.
pub(super) fn steps(n: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    (0..n)
        .step_by(step)
        .map(move |start| start..n.min(start + step))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_all_tokens_evenly() {
        for tokens in 0..100 {
            let mut next = 0;
            let mut sizes = Vec::new();
            for tile in tiles(tokens, 6) {
                assert_eq!(tile.start, next);
                next = tile.end;
                sizes.push(tile.len());
            }
            assert_eq!(next, tokens);
            assert_eq!(sizes.len(), tokens.div_ceil(6));
            if let (Some(least), Some(most)) = (sizes.iter().min(), sizes.iter().max()) {
                assert!(*least >= 1 && *most <= 6 && most - least <= 1, "{sizes:?}");
            }
        }
    }

    #[test]
    fn steps_cover_all() {
        assert_eq!(steps(70, 32).collect::<Vec<_>>(), [0..32, 32..64, 64..70]);
        assert_eq!(steps(0, 32).count(), 0);
    }
}
