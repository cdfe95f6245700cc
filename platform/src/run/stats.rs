//! What a session has done: the engine's counts, and the times that only the platform can take.

use std::time::Duration;

use leanstream_core::sparse;
use leanstream_core::stream::Counters;

/// What a session has done so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// The engine's counts.
    pub counters: Counters,
    /// The counts of a packed model's units.
    pub units: sparse::Counters,
    /// Rows of a sketched head that were computed exactly for tokens' logits.
    pub head_rows: u64,
    /// Those tokens.
    pub heads: u64,
    /// Time in which nothing could be computed because nothing had been read.
    pub stalled: Duration,
    /// Time in which reads were in flight.
    pub io_busy: Duration,
    /// Looks ahead of a sparse layer.
    pub looks: u64,
    /// Passes of decoded tokens that were watched.
    pub watched: u64,
    /// How long those passes took.
    pub watched_time: Duration,
    /// How long was spent in them on deciding what to read, keep and compute.
    pub decided: Duration,
}

impl Stats {
    /// Bytes that were read, widening and gaps included.
    pub fn bytes_read(&self) -> u64 {
        self.counters.bytes_read + self.units.bytes_read
    }

    /// Share of the pieces and units that were in memory when they were wanted.
    pub fn hit_rate(&self) -> f64 {
        let used = self.units.chosen - self.units.skipped;
        let hits = self.counters.hits + self.units.hits;
        match self.counters.pieces + used {
            0 => 1.0,
            wanted => hits as f64 / wanted as f64,
        }
    }

    /// Rows of a sketched head that a token's logits took, on average; `None` without a sketch.
    pub fn head_rows(&self) -> Option<f64> {
        (self.heads > 0).then(|| ratio(self.head_rows, self.heads))
    }

    /// Share of the active units that had to be read.
    pub fn miss_ratio(&self) -> f64 {
        ratio(self.units.misses(), self.units.chosen)
    }

    /// Of the bytes of units that were read, the share that was read on speculation and then not
    /// used.
    pub fn redundant_ratio(&self) -> f64 {
        ratio(self.units.bytes_redundant, self.units.bytes_units)
    }

    /// Of the units that were used without being in memory, the share that was on its way.
    pub fn late_ratio(&self) -> f64 {
        ratio(self.units.late, self.units.misses())
    }

    /// Share of a token's time that deciding takes, of the passes that were watched; `None` without any.
    pub fn controller_share(&self) -> Option<f64> {
        (self.watched > 0).then(|| self.decided.as_secs_f64() / self.watched_time.as_secs_f64())
    }

    /// Milliseconds of deciding a token, of the passes that were watched; `None` without any.
    pub fn controller_ms(&self) -> Option<f64> {
        (self.watched > 0).then(|| self.decided.as_secs_f64() * 1e3 / self.watched as f64)
    }

    /// Of the units that layers chose, the share that was left out.
    pub fn skipped_ratio(&self) -> f64 {
        ratio(self.units.skipped, self.units.chosen)
    }

    /// Share of the shorter of reading and computing that ran beside the other, in a run that took
    /// `wall`: 1 is the most that overlapping can do.
    pub fn hidden(&self, wall: Duration) -> f64 {
        let computing = wall.saturating_sub(self.stalled);
        let shorter = computing.min(self.io_busy).as_secs_f64();
        if shorter == 0.0 {
            return 1.0;
        }
        let both = self.io_busy.saturating_sub(self.stalled).as_secs_f64();
        (both / shorter).min(1.0)
    }

    /// Share of the reading time that was hidden behind computing.
    pub fn overlap(&self) -> f64 {
        if self.io_busy.is_zero() {
            return 1.0;
        }
        (1.0 - self.stalled.as_secs_f64() / self.io_busy.as_secs_f64()).max(0.0)
    }

    /// Adds what `other` did.
    pub fn add(&mut self, other: &Self) {
        self.counters.add(&other.counters);
        self.units.add(&other.units);
        self.head_rows += other.head_rows;
        self.heads += other.heads;
        self.stalled += other.stalled;
        self.io_busy += other.io_busy;
        self.looks += other.looks;
        self.watched += other.watched;
        self.watched_time += other.watched_time;
        self.decided += other.decided;
    }

    /// What was done since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            counters: self.counters.since(&before.counters),
            units: self.units.since(&before.units),
            head_rows: self.head_rows - before.head_rows,
            heads: self.heads - before.heads,
            stalled: self.stalled.saturating_sub(before.stalled),
            io_busy: self.io_busy.saturating_sub(before.io_busy),
            looks: self.looks - before.looks,
            watched: self.watched - before.watched,
            watched_time: self.watched_time.saturating_sub(before.watched_time),
            decided: self.decided.saturating_sub(before.decided),
        }
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    match whole {
        0 => 0.0,
        whole => part as f64 / whole as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_added_to_what_was_before_is_the_whole() {
        let counts = |k: u64| Stats {
            counters: Counters {
                passes: k,
                pieces: 3 * k,
                hits: 2 * k,
                reads: k + 1,
                bytes_read: 4096 * k,
                bytes_useful: 4000 * k,
                retries: k + 2,
                dropped: k + 3,
                rereads: k + 4,
                waits: k + 5,
            },
            units: sparse::Counters {
                chosen: 9 * k,
                hits: 8 * k,
                ..sparse::Counters::default()
            },
            head_rows: 11 * k,
            heads: 2 * k,
            stalled: Duration::from_millis(k),
            io_busy: Duration::from_millis(5 * k),
            looks: 7 * k,
            watched: k,
            watched_time: Duration::from_millis(20 * k),
            decided: Duration::from_millis(k),
        };
        let (before, after) = (counts(7), counts(100));
        let mut sum = after.since(&before);
        assert_eq!(sum.counters.passes, 93);
        sum.add(&before);
        assert_eq!(sum, after);
        assert_eq!(after.overlap(), 0.8);
        assert_eq!(after.controller_share(), Some(0.05));
        assert_eq!(
            (after.controller_ms(), Stats::default().controller_ms()),
            (Some(1.0), None)
        );
        // 500 ms of reading, 100 ms of waiting for it, in 300 ms: 200 ms of computing, all beside it.
        assert_eq!(after.hidden(Duration::from_millis(300)), 1.0);
        assert_eq!(after.hidden(Duration::from_millis(900)), 0.8);
    }
}
