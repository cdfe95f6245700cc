//! Makes a byte-level BPE vocabulary from a text, for small models that are trained from nothing.
//!
//! Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016): words are cut
//! into bytes, and again and again the pair that stands side by side most often becomes one token. Which
//! pair wins a tie depends on nothing but the text: the one whose parts came first.

use std::collections::{HashMap, HashSet};

use super::bpe::spell;
use super::split::{RULES, split};

/// A pair of neighbours, by their numbers.
type Pair = (u32, u32);

/// A merge: the two pieces that become one, spelled in the alphabet of byte-level BPE.
pub type Merge = (String, String);

/// The first `count` merges of a text that the pre-tokenizer `pre` cuts into words, the most frequent
/// first; fewer when no pair is left that stands anywhere twice. `None` if `pre` isn't known.
///
/// Holds every different word of the text once.
pub fn merges(text: &[u8], pre: &str, count: usize) -> Option<Vec<Merge>> {
    let rule = RULES.iter().find(|(name, _)| *name == pre)?.1;
    let mut frequencies = HashMap::<Vec<u8>, u64>::new();
    split(rule.split, text, &mut |word| {
        if let Some(times) = frequencies.get_mut(word) {
            *times += 1;
        } else {
            frequencies.insert(word.to_vec(), 1);
        }
    });
    let mut learner = Learner::new(frequencies);
    Some((0..count).map_while(|_| learner.merge()).collect())
}

/// Words as sequences of pieces, and how often each pair of pieces stands in them.
struct Learner {
    words: Vec<(Vec<u32>, u64)>,
    /// Pieces by number: the bytes, then what was merged.
    pieces: Vec<String>,
    counts: HashMap<Pair, u64>,
    /// Words that have, or had, the pair.
    places: HashMap<Pair, HashSet<usize>>,
}

impl Learner {
    fn new(frequencies: HashMap<Vec<u8>, u64>) -> Self {
        let mut learner = Self {
            words: frequencies
                .into_iter()
                .map(|(word, times)| (word.into_iter().map(u32::from).collect(), times))
                .collect(),
            pieces: (0..=255).map(spelled).collect(),
            counts: HashMap::new(),
            places: HashMap::new(),
        };
        for word in 0..learner.words.len() {
            learner.count(word);
        }
        learner
    }

    /// Counts the pairs of a word.
    fn count(&mut self, word: usize) {
        let (pieces, times) = &self.words[word];
        for pair in pairs(pieces) {
            *self.counts.entry(pair).or_default() += times;
            self.places.entry(pair).or_default().insert(word);
        }
    }

    /// The reverse.
    fn discount(&mut self, word: usize) {
        let (pieces, times) = &self.words[word];
        for pair in pairs(pieces) {
            if let Some(count) = self.counts.get_mut(&pair) {
                *count -= times;
            }
        }
    }

    /// Merges the most frequent pair wherever it stands; `None` if none stands anywhere twice.
    fn merge(&mut self) -> Option<Merge> {
        let (&pair, _) = self
            .counts
            .iter()
            .filter(|&(_, &count)| count > 1)
            .max_by_key(|&(&pair, &count)| (count, std::cmp::Reverse(pair)))?;
        let merged = self.pieces.len() as u32;
        let [left, right] = [pair.0, pair.1].map(|piece| self.pieces[piece as usize].clone());
        self.pieces.push(format!("{left}{right}"));
        for word in self.places.remove(&pair).unwrap_or_default() {
            self.discount(word);
            join(&mut self.words[word].0, pair, merged);
            self.count(word);
        }
        self.counts.remove(&pair);
        Some((left, right))
    }
}

/// The pairs of neighbours in a word.
fn pairs(pieces: &[u32]) -> impl Iterator<Item = Pair> {
    pieces.windows(2).map(|two| (two[0], two[1]))
}

/// Puts `merged` for each `pair`, from the left.
fn join(pieces: &mut Vec<u32>, pair: Pair, merged: u32) {
    let (mut read, mut written) = (0, 0);
    while read < pieces.len() {
        let found = pieces.get(read..read + 2) == Some(&[pair.0, pair.1]);
        pieces[written] = if found { merged } else { pieces[read] };
        read += if found { 2 } else { 1 };
        written += 1;
    }
    pieces.truncate(written);
}

/// A byte as byte-level BPE writes it.
pub(crate) fn spelled(byte: u8) -> String {
    let mut bytes = Vec::new();
    spell(byte, &mut bytes);
    String::from_utf8(bytes).expect("the alphabet is UTF-8")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(text: &str, count: usize) -> Vec<String> {
        let merges = merges(text.as_bytes(), "smollm", count).expect("a known pre-tokenizer");
        let spaced = |(left, right): Merge| format!("{left} {right}");
        merges.into_iter().map(spaced).collect()
    }

    /// The example of the paper's figure 1, counts and all, with byte-level BPE's spaces.
    #[test]
    fn the_most_frequent_pairs_are_merged_first() {
        let text =
            " low".repeat(5) + &" lower".repeat(2) + &" newest".repeat(6) + &" widest".repeat(3);
        // es 9, est 9; then the space before l, lo and ow 7 each: the pair of the lowest numbers wins.
        assert_eq!(first(&text, 4), ["e s", "es t", "Ġ l", "o w"]);
    }

    #[test]
    fn words_are_not_crossed_and_digits_stand_alone() {
        for merge in first(&"a1b 22 22 ".repeat(9), 100) {
            assert!(!merge.contains(char::is_numeric), "{merge}");
        }
    }

    #[test]
    fn a_pair_that_overlaps_itself_is_merged_from_the_left() {
        let mut pieces = vec![7, 7, 7, 7, 7, 8];
        join(&mut pieces, (7, 7), 9);
        assert_eq!(pieces, [9, 9, 7, 8]);
        assert_eq!(first("aaaa aaaa", 9), ["a a", "aa aa", "Ġ aaaa"][..2]);
    }

    #[test]
    fn what_stands_once_is_not_merged() {
        assert!(first("abc", 9).is_empty());
        assert_eq!(merges(b"abc", "no such", 9), None);
    }
}
