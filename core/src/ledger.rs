//! Who holds how many bytes of the one budget. Filled in before anything is allocated, so that a plan
//! that doesn't fit is refused with the whole table and the least budget that would do.

/// What bytes are held for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Code, static data and the runtime's own memory.
    Program,
    /// The mapped start of the model file and what was parsed from it.
    Header,
    /// Vocabulary, merges and their indexes.
    Tokenizer,
    /// Steps, pieces, and the engine's tables.
    Plan,
    /// Norms, biases and other weights that always stay.
    Vectors,
    /// Adapters that are used beside the weights.
    Adapters,
    /// Keys and values of past tokens.
    KvCache,
    /// Activations, quantized activations, logits.
    Scratch,
    /// The slots that weights stream through and stay in.
    Arena,
    /// The slots of single units of a packed model.
    Units,
    /// Storage that reads need besides the slots (rings, bounce buffers).
    ReadBuffers,
    /// Stacks of the compute and storage threads.
    Stacks,
    /// Prompt, generated text, and what prints it.
    Text,
    /// Tokens to train and evaluate on.
    Data,
    /// Trained parameters, their gradients, and the optimizer's averages.
    Trained,
    /// Activations saved for the backward pass: their pages and metadata.
    Activations,
    /// What is left to what can't be counted.
    Margin,
}

impl Kind {
    /// All of them, in the order of the table.
    pub const ALL: [Kind; 17] = [
        Kind::Program,
        Kind::Header,
        Kind::Tokenizer,
        Kind::Plan,
        Kind::Vectors,
        Kind::Adapters,
        Kind::KvCache,
        Kind::Scratch,
        Kind::Arena,
        Kind::Units,
        Kind::ReadBuffers,
        Kind::Stacks,
        Kind::Text,
        Kind::Data,
        Kind::Trained,
        Kind::Activations,
        Kind::Margin,
    ];

    /// For tables and JSON: lower case, words joined by `_`.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Program => "program",
            Kind::Header => "header",
            Kind::Tokenizer => "tokenizer",
            Kind::Plan => "plan",
            Kind::Vectors => "vectors",
            Kind::Adapters => "adapters",
            Kind::KvCache => "kv_cache",
            Kind::Scratch => "scratch",
            Kind::Arena => "arena",
            Kind::Units => "units",
            Kind::ReadBuffers => "read_buffers",
            Kind::Stacks => "stacks",
            Kind::Text => "text",
            Kind::Data => "data",
            Kind::Trained => "trained",
            Kind::Activations => "activations",
            Kind::Margin => "margin",
        }
    }
}

/// The ledger would pass 2^64 bytes: a hostile or broken size.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Overflow {
    /// The entry that was added to.
    pub kind: Kind,
    /// How much.
    pub bytes: u64,
}

/// The ledger doesn't fit the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Short {
    /// The least budget that would do.
    pub least: u64,
    /// How much is missing.
    pub missing: u64,
}

/// Bytes by [`Kind`]. The total always fits 64 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ledger {
    bytes: [u64; Kind::ALL.len()],
}

impl Ledger {
    /// Nobody holds anything.
    pub fn new() -> Self {
        Self::default()
    }

    /// `kind` holds `bytes` more.
    ///
    /// # Errors
    /// The ledger, unchanged, if the total would pass 64 bits.
    pub fn add(&mut self, kind: Kind, bytes: u64) -> Result<(), Overflow> {
        self.total()
            .checked_add(bytes)
            .ok_or(Overflow { kind, bytes })?;
        self.bytes[kind as usize] += bytes;
        Ok(())
    }

    /// `kind` holds `count` things of `each` bytes more.
    ///
    /// # Errors
    /// As [`add`](Self::add); also if the product passes 64 bits.
    pub fn add_many(&mut self, kind: Kind, count: u64, each: u64) -> Result<(), Overflow> {
        let bytes = count.checked_mul(each).ok_or(Overflow {
            kind,
            bytes: u64::MAX,
        })?;
        self.add(kind, bytes)
    }

    /// What `kind` holds.
    pub fn get(&self, kind: Kind) -> u64 {
        self.bytes[kind as usize]
    }

    /// What all hold.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    /// What is left of `budget`, or 0.
    pub fn left(&self, budget: u64) -> u64 {
        budget.saturating_sub(self.total())
    }

    /// Whether it all fits.
    ///
    /// # Errors
    /// The least budget that would do.
    pub fn check(&self, budget: u64) -> Result<(), Short> {
        let least = self.total();
        match least.checked_sub(budget) {
            None | Some(0) => Ok(()),
            Some(missing) => Err(Short { least, missing }),
        }
    }

    /// Entries that hold something, in the order of [`Kind::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (Kind, u64)> + '_ {
        Kind::ALL
            .into_iter()
            .map(|kind| (kind, self.get(kind)))
            .filter(|&(_, bytes)| bytes > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_and_says_the_least_budget() {
        let mut ledger = Ledger::new();
        ledger.add(Kind::Arena, 1000).unwrap();
        ledger.add(Kind::Program, 24).unwrap();
        ledger.add_many(Kind::Arena, 2, 500).unwrap();
        assert_eq!((ledger.total(), ledger.get(Kind::Arena)), (2024, 2000));
        assert_eq!(ledger.check(2024), Ok(()));
        assert_eq!(
            ledger.check(2023),
            Err(Short {
                least: 2024,
                missing: 1
            })
        );
        assert_eq!((ledger.left(3000), ledger.left(10)), (976, 0));
        assert!(ledger.iter().eq([(Kind::Program, 24), (Kind::Arena, 2000)]));
    }

    #[test]
    fn a_size_that_wraps_is_refused() {
        let mut ledger = Ledger::new();
        ledger.add(Kind::KvCache, u64::MAX - 1).unwrap();
        let before = ledger;
        assert_eq!(
            ledger.add(Kind::Arena, 2),
            Err(Overflow {
                kind: Kind::Arena,
                bytes: 2
            })
        );
        assert!(ledger.add_many(Kind::Arena, 1 << 42, 1 << 42).is_err());
        assert_eq!(ledger, before);
        ledger.add(Kind::Arena, 1).unwrap();
        assert_eq!(ledger.total(), u64::MAX);
    }

    #[test]
    fn the_table_has_every_kind_once() {
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(kind as usize, index);
        }
    }
}
