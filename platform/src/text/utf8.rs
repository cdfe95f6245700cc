//! Text out of tokens, piece by piece: a token may end in the middle of a character.

/// Turns a stream of bytes into valid UTF-8 without ever showing half a character: an unfinished
/// tail of at most three bytes is held back until the bytes that finish it come. What can't become
/// valid is shown as U+FFFD, once for each maximal unfinished sequence, as `String::from_utf8_lossy`
/// does for the whole.
///
/// For JSON and other places that must be text. Raw output wants the bytes as they are.
#[derive(Clone, Default, Debug)]
pub struct Utf8Stream {
    /// A valid beginning of a character.
    held: [u8; 4],
    len: usize,
}

impl Utf8Stream {
    /// Nothing is held.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends to `out` all text that `bytes` completes. Allocates only when `out` has to grow;
    /// it grows by at most `3 * (bytes.len() + 3)` bytes.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        let mut rest = bytes;
        // Finish, or give up, the held character first.
        while self.len > 0 {
            let Some((&next, after)) = rest.split_first() else {
                return;
            };
            self.held[self.len] = next;
            match core::str::from_utf8(&self.held[..=self.len]) {
                Ok(text) => {
                    out.push_str(text);
                    self.len = 0;
                    rest = after;
                }
                Err(error) if error.error_len().is_none() => {
                    self.len += 1;
                    rest = after;
                }
                // `next` doesn't continue it: it starts something of its own.
                Err(_) => {
                    out.push(char::REPLACEMENT_CHARACTER);
                    self.len = 0;
                }
            }
        }
        let mut ahead = rest.len();
        for chunk in rest.utf8_chunks() {
            out.push_str(chunk.valid());
            let bad = chunk.invalid();
            ahead -= chunk.valid().len() + bad.len();
            // Only at the end may a beginning of a character still be finished.
            if ahead == 0 && core::str::from_utf8(bad).is_err_and(|e| e.error_len().is_none()) {
                self.held[..bad.len()].copy_from_slice(bad);
                self.len = bad.len();
            } else if !bad.is_empty() {
                out.push(char::REPLACEMENT_CHARACTER);
            }
        }
    }

    /// Ends the stream: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if self.len > 0 {
            out.push(char::REPLACEMENT_CHARACTER);
            self.len = 0;
        }
    }

    /// Bytes held back, 0 to 3.
    pub fn held(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every way of cutting the bytes in up to three parts gives what the whole gives.
    fn check(bytes: &[u8]) {
        let whole = String::from_utf8_lossy(bytes);
        for a in 0..=bytes.len() {
            for b in a..=bytes.len() {
                let mut stream = Utf8Stream::new();
                let mut out = String::new();
                for part in [&bytes[..a], &bytes[a..b], &bytes[b..]] {
                    stream.push(part, &mut out);
                }
                stream.finish(&mut out);
                assert_eq!(out, whole, "{bytes:x?} cut at {a} and {b}");
            }
        }
    }

    #[test]
    fn cuts_anywhere_give_the_text_of_the_whole() {
        check("aé日𝔸z".as_bytes());
        check(b"\xff\x80a\xe3\x81");
        check(b"\xf0\x9d\x94a\xf0\x9d\x94\xb8");
        check(b"\xe3\xe3\x81\x82\xed\xa0\x80\xc3");
        check(b"\xf4\x90\x80\x80\xf0\x80\xc0\xaf");
    }

    #[test]
    fn holds_a_tail_back_until_it_is_complete() {
        let mut stream = Utf8Stream::new();
        let mut out = String::new();
        stream.push(b"a\xe6\x97", &mut out);
        assert_eq!((out.as_str(), stream.held()), ("a", 2));
        stream.push(b"\xa5", &mut out);
        assert_eq!((out.as_str(), stream.held()), ("a日", 0));
    }
}
