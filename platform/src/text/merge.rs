//! The loop that both tokenizers share: neighbouring symbols are merged, the best pair first, until
//! no pair can be.

use std::collections::BinaryHeap;

/// No symbol, no token.
pub(super) const NONE: u32 = u32::MAX;

/// A stretch of the text, not yet or already a token.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// First byte.
    pub start: u32,
    /// Length in bytes; 0 once merged into the symbol before.
    pub len: u32,
    /// Its token, or [`NONE`].
    pub id: u32,
    prev: u32,
    next: u32,
}

/// What a pair would become.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pair {
    /// Pairs with a smaller order merge first; among equals, the leftmost.
    pub order: u32,
    /// The token that results.
    pub id: u32,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Candidate {
    /// Complement of `order << 32 | left`: the heap gives the greatest first.
    rank: u64,
    /// Bytes of both symbols when they were looked at: another sum means that one has changed.
    len: u32,
    id: u32,
}

/// Scratch memory of the loop, kept from word to word.
#[derive(Default, Debug)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
    queue: BinaryHeap<Candidate>,
}

impl Merger {
    /// Forgets the last text.
    pub(super) fn clear(&mut self) {
        self.symbols.clear();
        self.queue.clear();
    }

    /// Appends the next symbol of the text, `len` bytes long.
    pub(super) fn push(&mut self, len: u32, id: u32) {
        let index = self.symbols.len() as u32;
        let (start, prev) = match self.symbols.last_mut() {
            Some(last) => {
                last.next = index;
                (last.start + last.len, index - 1)
            }
            None => (0, NONE),
        };
        self.symbols.push(Symbol {
            start,
            len,
            id,
            prev,
            next: NONE,
        });
    }

    /// Merges all there is to merge. `pair` says what two neighbours would become.
    pub(super) fn merge(&mut self, pair: impl Fn(&Symbol, &Symbol) -> Option<Pair>) {
        for left in 1..self.symbols.len() as u32 {
            self.look_at(left - 1, &pair);
        }
        while let Some(candidate) = self.queue.pop() {
            let left = !candidate.rank as u32;
            let symbol = self.symbols[left as usize];
            if symbol.len == 0 || symbol.next == NONE {
                continue;
            }
            let right = self.symbols[symbol.next as usize];
            // A symbol that took its neighbour in is longer than the pair was, without any other.
            if symbol.len + right.len != candidate.len {
                continue;
            }
            self.symbols[symbol.next as usize].len = 0;
            if right.next != NONE {
                self.symbols[right.next as usize].prev = left;
            }
            let merged = &mut self.symbols[left as usize];
            merged.len = candidate.len;
            merged.id = candidate.id;
            merged.next = right.next;
            if symbol.prev != NONE {
                self.look_at(symbol.prev, &pair);
            }
            self.look_at(left, &pair);
        }
    }

    fn look_at(&mut self, left: u32, pair: &impl Fn(&Symbol, &Symbol) -> Option<Pair>) {
        let symbol = &self.symbols[left as usize];
        if symbol.next == NONE {
            return;
        }
        let right = &self.symbols[symbol.next as usize];
        if let Some(found) = pair(symbol, right) {
            self.queue.push(Candidate {
                rank: !(u64::from(found.order) << 32 | u64::from(left)),
                len: symbol.len + right.len,
                id: found.id,
            });
        }
    }

    /// What is left, in order.
    pub(super) fn symbols(&self) -> impl Iterator<Item = &Symbol> {
        self.symbols.iter().filter(|symbol| symbol.len > 0)
    }
}
