//! The tokens' texts, and the way back from a text to its token.
//!
//! One blob of text, one offset a token, one open-addressing table of ids: about 4 + 6 + 1 bytes a
//! token beside its text.

use super::error::TextError;

/// What a token is; a token may be several of these.
pub(super) mod attr {
    /// Stands for text that no other token covers.
    pub(in crate::text) const UNKNOWN: u8 = 1;
    /// Markup, such as BOS or the start of a turn.
    pub(in crate::text) const CONTROL: u8 = 2;
    /// Added to the vocabulary as it is; matched in text before anything else.
    pub(in crate::text) const USER_DEFINED: u8 = 4;
    /// One byte, written `<0xNN>`.
    pub(in crate::text) const BYTE: u8 = 8;
    /// Ordinary.
    pub(in crate::text) const NORMAL: u8 = 16;
    /// Takes the white space after it with it.
    pub(in crate::text) const RSTRIP: u8 = 32;
}

/// Tokens, at most: ids leave at least 8 of 32 bits for tags.
pub(super) const TOKENS_MAX: u32 = (1 << 24) - 1;
/// Bytes of all texts together, at most.
pub(super) const TEXT_MAX: u64 = u32::MAX as u64;

const EMPTY: u32 = u32::MAX;

/// See the module.
#[derive(Debug)]
pub(super) struct Vocab {
    /// All texts, one after the other.
    text: Box<[u8]>,
    /// Where each token's text ends; (tokens).
    ends: Box<[u32]>,
    /// [`attr`]; (tokens).
    attrs: Box<[u8]>,
    /// `tag << id_bits | id` or [`EMPTY`]; the tag is a part of the text's hash.
    slots: Box<[u32]>,
    id_bits: u32,
}

/// Bytes that [`Vocab`] holds for `tokens` tokens with `text` bytes of text.
pub(super) fn bytes(tokens: u32, text: u64) -> u64 {
    text + u64::from(tokens) * 5 + u64::from(slot_count(tokens)) * 4
}

fn slot_count(tokens: u32) -> u32 {
    tokens + tokens / 2 + 1
}

impl Vocab {
    /// Tables over `texts`. `tokens` and `text_bytes` are their count and total length, within
    /// [`TOKENS_MAX`] and [`TEXT_MAX`]. Tokens without text get no way back.
    pub(super) fn new<'a>(
        texts: impl Iterator<Item = &'a [u8]>,
        tokens: u32,
        text_bytes: u64,
    ) -> Result<Self, TextError> {
        assert!(tokens <= TOKENS_MAX && text_bytes <= TEXT_MAX);
        let mut text = room(text_bytes as usize)?;
        let mut ends = room(tokens as usize)?;
        for token in texts {
            text.extend_from_slice(token);
            ends.push(text.len() as u32);
        }
        assert!(ends.len() == tokens as usize && text.len() as u64 == text_bytes);
        let mut vocab = Self {
            text: text.into_boxed_slice(),
            ends: ends.into_boxed_slice(),
            attrs: filled(tokens as usize, attr::NORMAL)?,
            slots: filled(slot_count(tokens) as usize, EMPTY)?,
            // The all-ones id stays free, so that no entry looks EMPTY.
            id_bits: u32::BITS - tokens.leading_zeros(),
        };
        for id in 0..tokens {
            vocab.insert(id)?;
        }
        Ok(vocab)
    }

    fn insert(&mut self, id: u32) -> Result<(), TextError> {
        if self.text(id).is_empty() {
            return Ok(());
        }
        let hash = Hash::of(self.text(id)).finish();
        match self.probe(hash, self.text(id)) {
            Ok(first) => Err(TextError::Duplicate { first, second: id }),
            Err(slot) => {
                self.slots[slot] = self.tag(hash) | id;
                Ok(())
            }
        }
    }

    /// The token with that text, or the slot where it would be.
    fn probe(&self, hash: u32, text: &[u8]) -> Result<u32, usize> {
        let tag = self.tag(hash);
        let mask = (1 << self.id_bits) - 1;
        let mut slot = scale(hash, self.slots.len());
        loop {
            let entry = self.slots[slot];
            if entry == EMPTY {
                return Err(slot);
            }
            if entry & !mask == tag && self.text(entry & mask) == text {
                return Ok(entry & mask);
            }
            // The table is a third empty, so the walk ends.
            slot = if slot + 1 == self.slots.len() {
                0
            } else {
                slot + 1
            };
        }
    }

    /// The low bits of the hash, put above the id: the high ones choose the slot.
    fn tag(&self, hash: u32) -> u32 {
        // An empty vocabulary has no id bits and a tag of 32.
        hash << self.id_bits
    }

    /// The token whose text this is.
    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        self.find_hashed(Hash::of(text).finish(), text)
    }

    /// [`Vocab::find`] where the hash is known.
    pub(super) fn find_hashed(&self, hash: u32, text: &[u8]) -> Option<u32> {
        self.probe(hash, text).ok()
    }

    /// The text of a token as the file has it. `id` is below [`Vocab::len`].
    pub(super) fn text(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.text[start as usize..self.ends[id] as usize]
    }

    /// [`attr`] of a token. `id` is below [`Vocab::len`].
    pub(super) fn attrs(&self, id: u32) -> u8 {
        self.attrs[id as usize]
    }

    /// Mutable [`attr`] of all tokens; (tokens).
    pub(super) fn attrs_mut(&mut self) -> &mut [u8] {
        &mut self.attrs
    }

    /// How many tokens there are.
    pub(super) fn len(&self) -> u32 {
        self.ends.len() as u32
    }

    /// What the tables hold, in bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        let words = self.ends.len() + self.slots.len();
        (self.text.len() + self.attrs.len() + words * 4) as u64
    }
}

/// A hash that grows byte by byte, so that the prefixes of a text cost one pass: FNV-1a, mixed at
/// the end because its high bits choose the slot.
#[derive(Clone, Copy)]
pub(super) struct Hash(u32);

impl Hash {
    /// Of nothing.
    pub(super) fn new() -> Self {
        Self(0x811c_9dc5)
    }

    /// Of `text`.
    pub(super) fn of(text: &[u8]) -> Self {
        let mut hash = Self::new();
        for &byte in text {
            hash.push(byte);
        }
        hash
    }

    /// One byte more.
    pub(super) fn push(&mut self, byte: u8) {
        self.0 = (self.0 ^ u32::from(byte)).wrapping_mul(0x0100_0193);
    }

    /// The value for [`Vocab::find_hashed`].
    pub(super) fn finish(self) -> u32 {
        mix(self.0)
    }
}

/// The 32-bit finisher of MurmurHash3: every bit of the argument reaches every bit of the result.
pub(super) fn mix(mut value: u32) -> u32 {
    value = (value ^ (value >> 16)).wrapping_mul(0x85eb_ca6b);
    value = (value ^ (value >> 13)).wrapping_mul(0xc2b2_ae35);
    value ^ (value >> 16)
}

/// `hash` scaled to a place in a table of `len`.
pub(super) fn scale(hash: u32, len: usize) -> usize {
    ((u64::from(hash) * len as u64) >> 32) as usize
}

/// An empty vector with exactly that capacity.
pub(super) fn room<T>(len: usize) -> Result<Vec<T>, TextError> {
    let mut vec = Vec::new();
    vec.try_reserve_exact(len).map_err(|_| TextError::Memory {
        bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
    })?;
    Ok(vec)
}

/// `len` times `value`.
pub(super) fn filled<T: Copy>(len: usize, value: T) -> Result<Box<[T]>, TextError> {
    let mut vec = room(len)?;
    vec.resize(len, value);
    Ok(vec.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocab(texts: &[&[u8]]) -> Result<Vocab, TextError> {
        let bytes = texts.iter().map(|text| text.len() as u64).sum();
        Vocab::new(texts.iter().copied(), texts.len() as u32, bytes)
    }

    #[test]
    fn every_text_leads_back_to_its_token() {
        let texts: Vec<Vec<u8>> = (0..5000_u32).map(|n| n.to_string().into_bytes()).collect();
        let texts: Vec<&[u8]> = texts.iter().map(Vec::as_slice).collect();
        let vocab = vocab(&texts).unwrap();
        for (id, text) in texts.iter().enumerate() {
            assert_eq!(vocab.find(text), Some(id as u32));
            assert_eq!(vocab.text(id as u32), *text);
        }
        for absent in [&b""[..], b"5000", b"x", b"01"] {
            assert_eq!(vocab.find(absent), None);
        }
        let text_bytes = texts.iter().map(|text| text.len() as u64).sum();
        assert_eq!(vocab.table_bytes(), bytes(5000, text_bytes));
    }

    #[test]
    fn small_and_odd_vocabularies_work() {
        assert_eq!(vocab(&[]).unwrap().find(b"a"), None);
        let one = vocab(&[b"a"]).unwrap();
        assert_eq!((one.find(b"a"), one.find(b"b")), (Some(0), None));
        let gaps = vocab(&[b"", b"a", b"", b"b"]).unwrap();
        assert_eq!(
            (gaps.find(b""), gaps.find(b"b"), gaps.text(2)),
            (None, Some(3), &b""[..])
        );
    }

    /// These two have one FNV-1a hash, so only their texts tell them apart.
    #[test]
    fn texts_with_one_hash_are_two_texts() {
        let (a, b) = (&b"costarring"[..], &b"liquid"[..]);
        assert_eq!(Hash::of(a).finish(), Hash::of(b).finish());
        let both = vocab(&[a, b]).unwrap();
        assert_eq!((both.find(a), both.find(b)), (Some(0), Some(1)));
        assert_eq!(vocab(&[a]).unwrap().find(b), None);
    }

    #[test]
    fn two_tokens_of_one_text_are_refused() {
        let error = vocab(&[b"a", b"b", b"a"]).unwrap_err();
        assert_eq!(
            error,
            TextError::Duplicate {
                first: 0,
                second: 2
            }
        );
    }
}
