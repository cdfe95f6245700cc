//! SentencePiece BPE, the `llama` kind: spaces become `▁`, and the pair whose token has the highest
//! score is merged first. What is no token then is spelled in byte tokens.

use super::error::TextError;
use super::merge::{Merger, NONE, Pair};
use super::unicode::code_point;
use super::vocab::Vocab;

/// How a space is written in the tokens: U+2581.
pub(super) const SPACE: &[u8] = "▁".as_bytes();

/// Scores over a [`Vocab`].
#[derive(Debug)]
pub(super) struct Spm {
    /// What each token's score comes to as an order, small for high; (tokens).
    orders: Box<[u32]>,
    /// The token that stands for each byte: `<0xNN>`, else the byte itself, else the unknown token,
    /// else [`NONE`].
    byte_ids: [u32; 256],
    /// A space is put before text that starts the input or follows a special token.
    pub add_space_prefix: bool,
}

/// Bytes that [`Spm`] holds for so many tokens.
pub(super) fn bytes(tokens: u32) -> u64 {
    u64::from(tokens) * 4 + size_of::<[u32; 256]>() as u64
}

impl Spm {
    /// `orders` come from [`order`]; (tokens).
    pub(super) fn new(
        vocab: &Vocab,
        orders: Box<[u32]>,
        unknown: Option<u32>,
        add_space_prefix: bool,
    ) -> Self {
        let byte_ids = std::array::from_fn(|byte| {
            let byte = byte as u8;
            vocab
                .find(&byte_text(byte))
                .or_else(|| vocab.find(&[byte]))
                .or(unknown)
                .unwrap_or(NONE)
        });
        Self {
            orders,
            byte_ids,
            add_space_prefix,
        }
    }

    /// Appends the tokens of `text`, after the prefix.
    pub(super) fn encode(&self, vocab: &Vocab, text: &[u8], out: &mut Vec<u32>) {
        let spaces = text.iter().filter(|&&byte| byte == b' ').count();
        let mut escaped = Vec::with_capacity(text.len() + (spaces + 2) * (SPACE.len() - 1));
        if self.add_space_prefix {
            escaped.extend_from_slice(SPACE);
        }
        for &byte in text {
            match byte {
                b' ' => escaped.extend_from_slice(SPACE),
                _ => escaped.push(byte),
            }
        }

        let mut merger = Merger::default();
        let mut at = 0;
        while at < escaped.len() {
            // A byte that isn't UTF-8 stands alone and must not draw in the space after it.
            let (_, len) = code_point(&escaped[at..]);
            merger.push(
                len as u32,
                vocab.find(&escaped[at..at + len]).unwrap_or(NONE),
            );
            at += len;
        }
        merger.merge(|left, right| {
            let both = left.start as usize..(right.start + right.len) as usize;
            let id = vocab.find(&escaped[both])?;
            Some(Pair {
                order: self.orders[id as usize],
                id,
            })
        });
        for symbol in merger.symbols() {
            if symbol.id != NONE {
                out.push(symbol.id);
                continue;
            }
            let bytes = &escaped[symbol.start as usize..(symbol.start + symbol.len) as usize];
            let ids = bytes.iter().map(|&byte| self.byte_ids[usize::from(byte)]);
            out.extend(ids.filter(|&id| id != NONE));
        }
    }

    /// What the tables hold, in bytes.
    pub(super) fn table_bytes(&self) -> u64 {
        (self.orders.len() * 4 + size_of_val(&self.byte_ids)) as u64
    }
}

/// A score as an order: the higher the score, the smaller.
pub(super) fn order(id: u32, score: f32) -> Result<u32, TextError> {
    if score.is_nan() {
        return Err(TextError::Score { id });
    }
    // Adding zero makes -0.0 and 0.0 one.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 0 {
        bits | 1 << 31
    } else {
        !bits
    };
    Ok(!ascending)
}

/// `<0xNN>`
fn byte_text(byte: u8) -> [u8; 6] {
    let hex = |nibble: u8| b"0123456789ABCDEF"[usize::from(nibble)];
    [b'<', b'0', b'x', hex(byte >> 4), hex(byte & 15), b'>']
}

/// The byte of a text `<0xNN>`.
pub(super) fn text_byte(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    let digits = std::str::from_utf8(digits).ok()?;
    if digits.len() != 2 || digits.starts_with('+') {
        return None;
    }
    u8::from_str_radix(digits, 16).ok()
}

/// Appends a token's text with spaces for `▁`.
pub(super) fn unescape(text: &[u8], out: &mut Vec<u8>) {
    let mut at = 0;
    while at < text.len() {
        if text[at..].starts_with(SPACE) {
            out.push(b' ');
            at += SPACE.len();
        } else {
            out.push(text[at]);
            at += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_fall_as_scores_rise() {
        let scores = [
            f32::INFINITY,
            3.0,
            1e-40,
            0.0,
            -1e-40,
            -1.0,
            -1000.0,
            f32::NEG_INFINITY,
        ];
        let orders: Vec<u32> = scores
            .iter()
            .map(|&score| order(0, score).unwrap())
            .collect();
        assert!(orders.is_sorted() && orders.windows(2).all(|pair| pair[0] != pair[1]));
        assert_eq!(order(0, -0.0), order(0, 0.0));
        assert_eq!(order(7, f32::NAN), Err(TextError::Score { id: 7 }));
    }

    #[test]
    fn byte_texts_are_read_as_they_are_written() {
        for byte in 0..=255 {
            assert_eq!(text_byte(&byte_text(byte)), Some(byte));
        }
        for text in [
            &b"<0x0>"[..],
            b"<0x+1>",
            b"<0x100>",
            b"<0xGG>",
            b"0x00",
            b"",
        ] {
            assert_eq!(text_byte(text), None, "{text:?}");
        }
    }
}
