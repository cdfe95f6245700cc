//! Token ids in as few bytes as the vocabulary needs, and where sequences lie in them.

/// Ids one after the other, `width` bytes each, little-endian.
#[derive(Debug)]
pub(super) struct Ids {
    bytes: Vec<u8>,
    width: usize,
}

/// A sequence: `len` tokens, each with the id that follows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Span {
    /// The first stored id: the first token, or where BOS comes before it, the first target.
    pub start: u64,
    /// Tokens.
    pub len: u32,
    /// Targets at the beginning that aren't learned from; fewer than `len`.
    pub masked: u32,
}

impl Span {
    /// Targets that are learned from.
    pub fn targets(&self) -> u32 {
        self.len - self.masked
    }
}

impl Ids {
    /// Room for ids below `vocab`.
    pub fn new(vocab: u32) -> Self {
        Self {
            bytes: Vec::new(),
            width: match vocab {
                0..=0x1_0000 => 2,
                0x1_0001..=0x100_0000 => 3,
                _ => 4,
            },
        }
    }

    /// Appends ids.
    pub fn extend(&mut self, ids: &[u32]) {
        for id in ids {
            self.bytes
                .extend_from_slice(&id.to_le_bytes()[..self.width]);
        }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        (self.bytes.len() / self.width) as u64
    }

    /// Bytes that they take, without what growing took too much.
    pub fn used(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// One of them.
    pub fn get(&self, index: usize) -> u32 {
        let mut id = [0; 4];
        let at = index * self.width;
        id[..self.width].copy_from_slice(&self.bytes[at..at + self.width]);
        u32::from_le_bytes(id)
    }

    /// Gives back what growing took too much.
    pub fn shrink(&mut self) {
        self.bytes.shrink_to_fit();
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        self.bytes.capacity() as u64
    }

    /// CRC32C of all of them.
    pub fn checksum(&self) -> u32 {
        crc32c::crc32c(&self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_back_at_every_width() {
        for vocab in [300, 0x1_0000, 0x1_0001, 0x100_0000, 0x100_0001, u32::MAX] {
            let mut ids = Ids::new(vocab);
            let all = [0, 1, 255, vocab / 2, vocab - 1];
            ids.extend(&all);
            assert_eq!(ids.len(), 5);
            for (i, id) in all.into_iter().enumerate() {
                assert_eq!(ids.get(i), id, "{vocab}");
            }
        }
    }
}
