//! What the store counts.

/// Totals since the store was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Units that layers chose.
    pub chosen: u64,
    /// Of these, those that [`Select`](super::choice::Select) left out.
    pub skipped: u64,
    /// Of the used ones, those resident when they were chosen.
    pub hits: u64,
    /// Of the used ones, those on their way when they were chosen.
    pub late: u64,
    /// Bytes of used units that were not resident.
    pub bytes_missed: u64,
    /// Reads started.
    pub reads: u64,
    /// Bytes of reads that succeeded, widening and gaps included.
    pub bytes_read: u64,
    /// Bytes of the units that reads brought, without widening and gaps.
    pub bytes_units: u64,
    /// Units read on speculation.
    pub foreseen: u64,
    /// Of these, used by the layer that they were read for.
    pub foreseen_used: u64,
    /// Bytes of units read on speculation and then not used.
    pub bytes_redundant: u64,
    /// Resident units that a layer passed by and that were listed anew.
    pub moved: u64,
    /// Reads that failed.
    pub failed: u64,
    /// Units that failed their checksum.
    pub corrupt: u64,
}

impl Counters {
    /// The same as numbers in the order of the fields.
    fn fields(&mut self) -> [&mut u64; 14] {
        [
            &mut self.chosen,
            &mut self.skipped,
            &mut self.hits,
            &mut self.late,
            &mut self.bytes_missed,
            &mut self.reads,
            &mut self.bytes_read,
            &mut self.bytes_units,
            &mut self.foreseen,
            &mut self.foreseen_used,
            &mut self.bytes_redundant,
            &mut self.moved,
            &mut self.failed,
            &mut self.corrupt,
        ]
    }

    /// Adds what `other` counted.
    pub fn add(&mut self, other: &Self) {
        let mut other = *other;
        for (a, b) in self.fields().into_iter().zip(other.fields()) {
            *a += *b;
        }
    }

    /// What was counted since `before`.
    pub fn since(&self, before: &Self) -> Self {
        let (mut now, mut before) = (*self, *before);
        for (a, b) in now.fields().into_iter().zip(before.fields()) {
            *a -= *b;
        }
        now
    }

    /// Used units that were not resident when they were chosen.
    pub fn misses(&self) -> u64 {
        self.chosen - self.skipped - self.hits
    }
}
