//! What middleware needs to make reads end later than they do: a clock and a list of held ends.

use std::time::{Duration, Instant};

use leanstream_core::port::{ReadOutcome, Storage};
use leanstream_core::units::ReadId;

/// Time for middleware: the real one, or a test's.
pub trait Clock {
    /// Nanoseconds since some fixed moment.
    fn now_ns(&self) -> u64;
    /// Let about `ns` nanoseconds pass.
    fn sleep_ns(&self, ns: u64);
}

/// The system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub struct Monotonic(Instant);

impl Default for Monotonic {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Monotonic {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.0.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn sleep_ns(&self, ns: u64) {
        std::thread::sleep(Duration::from_nanos(ns));
    }
}

#[derive(Clone, Copy, Debug)]
struct Held {
    read: ReadId,
    due_ns: u64,
    outcome: Option<ReadOutcome>,
}

/// Reads that were started, each with the earliest moment at which it may end. Made once with room
/// for all reads in flight.
#[derive(Debug)]
pub(super) struct Holds(Vec<Held>);

impl Holds {
    pub fn new(reads_max: u16) -> Self {
        Self(Vec::with_capacity(reads_max.into()))
    }

    /// `read` has started and mustn't end before `due_ns`.
    pub fn started(&mut self, read: ReadId, due_ns: u64) {
        assert!(self.0.len() < self.0.capacity(), "too many reads in flight");
        self.0.push(Held {
            read,
            due_ns,
            outcome: None,
        });
    }

    /// Take in what has ended below.
    pub fn collect<S: Storage>(&mut self, inner: &mut S) {
        while let Some((read, outcome)) = inner.poll() {
            let held = self.0.iter_mut().find(|held| held.read == read);
            let held = held.expect("only started reads end");
            held.outcome = Some(outcome);
        }
    }

    /// A read that has ended and is due: the one due first.
    pub fn pop(&mut self, now_ns: u64) -> Option<(ReadId, ReadOutcome)> {
        let ended = self
            .0
            .iter()
            .enumerate()
            .filter(|(_, h)| h.outcome.is_some());
        let (index, first) = ended.min_by_key(|(_, h)| h.due_ns)?;
        if first.due_ns > now_ns {
            return None;
        }
        let held = self.0.swap_remove(index);
        held.outcome.map(|outcome| (held.read, outcome))
    }

    /// Wait until a read may be due, at most `timeout_us`.
    pub fn wait<S: Storage, C: Clock>(&mut self, inner: &mut S, clock: &C, timeout_us: u32) {
        self.collect(inner);
        let now = clock.now_ns();
        let mut ns = u64::from(timeout_us) * 1000;
        let ended = self.0.iter().filter(|h| h.outcome.is_some());
        if let Some(due) = ended.map(|h| h.due_ns).min() {
            ns = ns.min(due.saturating_sub(now));
        }
        if ns == 0 {
            return;
        }
        if self.0.iter().any(|h| h.outcome.is_none()) {
            // Whole microseconds, rounded up: rounding down would spin.
            inner.wait(u32::try_from(ns.div_ceil(1000)).unwrap_or(u32::MAX));
        } else {
            clock.sleep_ns(ns);
        }
    }
}
