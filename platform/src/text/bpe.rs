//! Byte-level BPE, the `gpt2` kind: text is cut into words, each word spelled in an alphabet of 256
//! printable characters, one a byte, and merged by a list of rules in order of rank.

use super::error::TextError;
use super::merge::{Merger, NONE, Pair};
use super::split::{Rule, split};
use super::vocab::{Vocab, filled, mix, room, scale};

/// Merge rules over a [`Vocab`] whose texts are spelled in the byte alphabet.
#[derive(Debug)]
pub(super) struct Bpe {
    rule: Rule,
    /// The token of each byte, or [`NONE`].
    byte_ids: [u32; 256],
    /// Left and right token of each rule, by rank; (rules).
    rules: Box<[(u32, u32)]>,
    /// Open addressing: ranks or [`NONE`].
    slots: Box<[u32]>,
}

/// Bytes that [`Bpe`] holds for so many merge rules.
pub(super) fn bytes(rules: u32) -> u64 {
    u64::from(rules) * 8 + u64::from(slot_count(rules)) * 4 + size_of::<[u32; 256]>() as u64
}

/// Merge rules, at most.
pub(super) const RULES_MAX: u32 = 1 << 28;

fn slot_count(rules: u32) -> u32 {
    rules + rules / 2 + 1
}

impl Bpe {
    /// `rules` are `count` texts of the form `LEFT RIGHT`.
    pub(super) fn new<'a>(
        vocab: &Vocab,
        rule: Rule,
        rules: impl Iterator<Item = &'a [u8]>,
        count: u32,
    ) -> Result<Self, TextError> {
        assert!(count <= RULES_MAX);
        let mut bpe = Self {
            rule,
            byte_ids: [NONE; 256],
            rules: Box::new([]),
            slots: filled(slot_count(count) as usize, NONE)?,
        };
        let mut spelled = Vec::new();
        for byte in 0..=255 {
            spelled.clear();
            spell(byte, &mut spelled);
            bpe.byte_ids[usize::from(byte)] = vocab.find(&spelled).unwrap_or(NONE);
        }

        let mut pairs = room(count as usize)?;
        for (rule, index) in rules.zip(0..) {
            let wrong = |what| TextError::Merge { index, what };
            // Neither part is empty, and a space can only stand at the very start of the left one.
            let space = rule.iter().skip(1).position(|&byte| byte == b' ');
            let Some(space) = space.map(|space| space + 1) else {
                return Err(wrong("it has no space between two tokens"));
            };
            let part = |text| {
                vocab
                    .find(text)
                    .ok_or(wrong("it names a text that is no token"))
            };
            let pair = (part(&rule[..space])?, part(&rule[space + 1..])?);
            spelled.clear();
            spelled.extend_from_slice(&rule[..space]);
            spelled.extend_from_slice(&rule[space + 1..]);
            if vocab.find(&spelled).is_none() {
                return Err(wrong("what it makes is no token"));
            }
            pairs.push(pair);
        }
        assert_eq!(pairs.len(), count as usize);
        bpe.rules = pairs.into_boxed_slice();
        for rank in 0..count {
            // A rule that is there twice keeps its first rank.
            if let Err(slot) = bpe.probe(bpe.rules[rank as usize]) {
                bpe.slots[slot] = rank;
            }
        }
        Ok(bpe)
    }

    /// The rank of the rule that merges this pair, or the slot where it would be.
    fn probe(&self, pair: (u32, u32)) -> Result<u32, usize> {
        let mut slot = scale(mix(mix(pair.0) ^ pair.1), self.slots.len());
        loop {
            match self.slots[slot] {
                NONE => return Err(slot),
                rank if self.rules[rank as usize] == pair => return Ok(rank),
                _ => {
                    slot = if slot + 1 == self.slots.len() {
                        0
                    } else {
                        slot + 1
                    }
                }
            }
        }
    }

    /// Appends the tokens of `text`. A byte that has no token is left out, as llama.cpp does: some
    /// vocabularies lack control characters and bytes that UTF-8 doesn't use.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let mut spelled = Vec::new();
        let mut merger = Merger::default();
        split(self.rule.split, text, &mut |word| {
            spelled.clear();
            merger.clear();
            for &byte in word {
                let start = spelled.len();
                spell(byte, &mut spelled);
                merger.push(
                    (spelled.len() - start) as u32,
                    self.byte_ids[usize::from(byte)],
                );
            }
            if self.rule.ignore_merges
                && let Some(id) = vocab.find(&spelled)
            {
                out.push(id);
                return;
            }
            merger.merge(|left, right| {
                let order = self.probe((left.id, right.id)).ok()?;
                let both = left.start as usize..(right.start + right.len) as usize;
                Some(Pair {
                    order,
                    id: vocab.find(&spelled[both])?,
                })
            });
            out.extend(
                merger
                    .symbols()
                    .map(|symbol| symbol.id)
                    .filter(|&id| id != NONE),
            );
        });
    }

    /// What the tables hold, in bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        (size_of_val(&self.byte_ids) + self.rules.len() * 8 + self.slots.len() * 4) as u64
    }
}

/// Appends the alphabet's character for a byte: printable Latin-1 stands for itself, the 68 others
/// are the characters from U+0100 on, in order.
pub(super) fn spell(byte: u8, out: &mut Vec<u8>) {
    let code = match byte {
        0x21..=0x7e => {
            out.push(byte);
            return;
        }
        0xa1..=0xac | 0xae..=0xff => u16::from(byte),
        0..=0x20 => 0x100 + u16::from(byte),
        0x7f..=0xa0 => 0x121 + u16::from(byte - 0x7f),
        0xad => 0x143,
    };
    out.extend_from_slice(&[0xc0 | (code >> 6) as u8, 0x80 | (code & 0x3f) as u8]);
}

/// The byte that a character of the alphabet stands for.
fn unspell(code: u32) -> Option<u8> {
    let byte = match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => code,
        0x100..=0x120 => code - 0x100,
        0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Appends the bytes that a token's text spells. What is not of the alphabet stays as it is.
pub(super) fn unspell_text(text: &[u8], out: &mut Vec<u8>) {
    let mut at = 0;
    while at < text.len() {
        let (code, len) = super::unicode::code_point(&text[at..]);
        match unspell(code) {
            Some(byte) => out.push(byte),
            None => out.extend_from_slice(&text[at..at + len]),
        }
        at += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_spells_every_byte_in_its_own_way() {
        let mut seen = Vec::new();
        for byte in 0..=255_u8 {
            let mut spelled = Vec::new();
            spell(byte, &mut spelled);
            let text = std::str::from_utf8(&spelled).unwrap();
            assert_eq!(text.chars().count(), 1);
            let mut back = Vec::new();
            unspell_text(&spelled, &mut back);
            assert_eq!(back, [byte]);
            seen.push(text.to_owned());
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 256);
        // As GPT-2 published it.
        for (byte, text) in [
            (b' ', "Ġ"),
            (b'\n', "Ċ"),
            (0x7f, "ġ"),
            (0xa0, "ł"),
            (0xad, "Ń"),
            (0xe9, "é"),
        ] {
            let mut spelled = Vec::new();
            spell(byte, &mut spelled);
            assert_eq!(spelled, text.as_bytes());
        }
    }

    #[test]
    fn text_outside_the_alphabet_is_kept() {
        let mut out = Vec::new();
        unspell_text("aĠ日 ".as_bytes(), &mut out);
        assert_eq!(out, "a 日 ".as_bytes());
    }
}
