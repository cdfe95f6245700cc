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

#[cfg(test)]
pub(super) mod testing {
    //! A clock that moves when told, and a storage that ends reads when told.

    use super::*;
    use leanstream_core::port::{Geometry, ReadCommand};
    use std::cell::Cell;
    use std::rc::Rc;

    /// Moves when somebody sleeps.
    #[derive(Clone, Default)]
    pub struct Manual(pub Rc<Cell<u64>>);

    impl Clock for Manual {
        fn now_ns(&self) -> u64 {
            self.0.get()
        }

        fn sleep_ns(&self, ns: u64) {
            self.0.set(self.0.get() + ns);
        }
    }

    /// Ends every read at once, or `after_ns` later by the clock, in the order of starting.
    pub struct Instantly {
        pub clock: Manual,
        pub after_ns: u64,
        pub flying: Vec<(ReadId, u64)>,
    }

    impl Instantly {
        pub fn new(clock: &Manual, after_ns: u64) -> Self {
            Self {
                clock: clock.clone(),
                after_ns,
                flying: Vec::new(),
            }
        }
    }

    impl Storage for Instantly {
        fn geometry(&self) -> Geometry {
            Geometry {
                align: 512,
                reads_max: 8,
            }
        }

        fn start(&mut self, command: ReadCommand) {
            let end = self.clock.now_ns() + self.after_ns;
            self.flying.push((command.read, end));
        }

        fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
            let &(read, end) = self.flying.first()?;
            if end > self.clock.now_ns() {
                return None;
            }
            self.flying.remove(0);
            Some((read, ReadOutcome::Filled))
        }

        fn wait(&mut self, timeout_us: u32) {
            let timeout = u64::from(timeout_us) * 1000;
            let first = self.flying.first().map_or(u64::MAX, |f| f.1);
            let ns = timeout.min(first.saturating_sub(self.clock.now_ns()));
            self.clock.sleep_ns(ns);
        }
    }
}
