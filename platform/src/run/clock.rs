//! What deciding costs: the time that a pass spends between its calls of the storage and of the backend.
//!
//! Reading the clock around every call would cost more than most decisions do, so some passes are watched and
//! the others are not. A turn of the loop that did nothing, while other threads computed, is waiting.

use std::cell::Cell;
use std::time::{Duration, Instant};

use leanstream_core::port::{
    Compute, ComputeEvent, Geometry, ReadCommand, ReadOutcome, Storage, Work,
};
use leanstream_core::sparse::tables::{Foreseen, Item};
use leanstream_core::sparse::{Choice, Delivery, UnitEvent, Units};
use leanstream_core::units::{ReadId, SlotId};

use super::compute::Cpu;

/// A clock that runs while core decides.
pub struct Clock {
    on: Cell<bool>,
    since: Cell<Instant>,
    /// The running turn of the loop: what it decided in, and whether it did anything.
    turn: Cell<Stretches>,
    moved: Cell<bool>,
    decided: Cell<Stretches>,
    /// Stretches in which nothing was done.
    empty: Cell<Stretches>,
    /// Stretches until the next such one.
    until_empty: Cell<u32>,
}

/// One of so many stretches is followed by an empty one. In each stretch is one reading of the clock, and what that
/// takes depends on what the processor's caches hold at that moment.
const EMPTY_EVERY: u32 = 16;

/// Some stretches of time, as read off the clock.
#[derive(Clone, Copy, Default)]
struct Stretches {
    time: Duration,
    count: u32,
}

impl Stretches {
    fn add(&mut self, other: Self) {
        self.time += other.time;
        self.count += other.count;
    }

    /// Their time without reading the clock, which took all the time of `empty`.
    fn without_reading(self, empty: Self) -> Duration {
        let reading = empty.time.as_nanos() as u64 / u64::from(empty.count.max(1));
        let read = Duration::from_nanos(reading * u64::from(self.count));
        self.time.saturating_sub(read)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// A clock that stands still.
    pub fn new() -> Self {
        Self {
            on: Cell::new(false),
            since: Cell::new(Instant::now()),
            turn: Cell::default(),
            moved: Cell::new(false),
            decided: Cell::default(),
            empty: Cell::default(),
            until_empty: Cell::new(0),
        }
    }

    /// A pass begins, to be watched or not.
    pub fn begin(&self, on: bool) {
        self.on.set(on);
        self.turn.take();
        self.moved.set(false);
        self.since.set(Instant::now());
    }

    /// The pass has ended: how long it decided.
    pub fn end(&self) -> Duration {
        self.leave();
        self.turned(true);
        self.on.set(false);
        self.decided.take().without_reading(self.empty.take())
    }

    /// The stretch that runs ends here.
    fn stop(&self, stretches: &Cell<Stretches>) {
        let mut sum = stretches.get();
        sum.add(Stretches {
            time: self.since.get().elapsed(),
            count: 1,
        });
        stretches.set(sum);
    }

    /// Core calls somebody else.
    fn leave(&self) {
        if self.on.get() {
            self.stop(&self.turn);
        }
    }

    /// It goes on, after a call that meant something has happened, or not.
    fn enter(&self, moved: bool) {
        if !self.on.get() {
            return;
        }
        self.moved.set(self.moved.get() || moved);
        match self.until_empty.get().checked_sub(1) {
            Some(left) => self.until_empty.set(left),
            None => {
                self.until_empty.set(EMPTY_EVERY - 1);
                self.since.set(Instant::now());
                self.stop(&self.empty);
            }
        }
        self.since.set(Instant::now());
    }

    /// A turn of the loop is over.
    fn turned(&self, counts: bool) {
        let turn = self.turn.take();
        if counts || self.moved.take() {
            let mut decided = self.decided.get();
            decided.add(turn);
            self.decided.set(decided);
        }
        self.moved.set(false);
    }

    fn call<T>(&self, call: impl FnOnce() -> T, moved: impl FnOnce(&T) -> bool) -> T {
        self.leave();
        let result = call();
        self.enter(moved(&result));
        result
    }
}

/// A port whose calls stop a clock.
pub struct Clocked<'c, P> {
    /// The port.
    pub port: &'c mut P,
    /// The clock.
    pub clock: &'c Clock,
}

impl<S: Storage> Storage for Clocked<'_, S> {
    fn geometry(&self) -> Geometry {
        self.port.geometry()
    }

    fn start(&mut self, command: ReadCommand) {
        self.clock.call(|| self.port.start(command), |()| true);
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        self.clock.call(|| self.port.poll(), Option::is_some)
    }

    fn wait(&mut self, timeout_us: u32) {
        self.clock.call(|| self.port.wait(timeout_us), |()| false);
    }
}

impl Compute for Clocked<'_, Cpu> {
    fn submit(&mut self, work: Work, slots: &[SlotId]) -> Result<(), Work> {
        self.clock
            .call(|| self.port.submit(work, slots), Result::is_ok)
    }

    fn poll(&mut self) -> Option<ComputeEvent> {
        let event = self.clock.call(|| self.port.poll(), Option::is_some);
        // Once in every turn: one that found other threads at work was idle unless something moved.
        self.clock.turned(self.port.busy() && !self.port.waited());
        event
    }

    fn busy(&self) -> bool {
        self.port.busy()
    }
}

impl Units for Clocked<'_, Cpu> {
    fn poll_units(&mut self) -> Option<UnitEvent> {
        self.clock.call(|| self.port.poll_units(), Option::is_some)
    }

    fn choice(&self) -> Choice<'_> {
        self.port.choice()
    }

    fn group(&mut self, number: u32, items: &[Item]) {
        self.clock
            .call(|| self.port.group(number, items), |()| true);
    }

    fn settle(&mut self, groups: u32) {
        self.clock.call(|| self.port.settle(groups), |()| true);
    }

    fn abandon(&mut self) {
        self.port.abandon();
    }

    fn idle(&mut self, missing: u32) {
        self.clock.call(|| self.port.idle(missing), |()| false);
    }

    fn foreseen(&self) -> (u32, &[Foreseen]) {
        self.port.foreseen()
    }

    fn deliver(&mut self, staging: SlotId, delivery: Delivery) -> bool {
        self.clock
            .call(|| self.port.deliver(staging, delivery), |_| true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nanos(time: u64, count: u32) -> Stretches {
        Stretches {
            time: Duration::from_nanos(time),
            count,
        }
    }

    #[test]
    fn reading_the_clock_is_not_deciding() {
        let decided = nanos(5_000, 100);
        assert_eq!(decided.without_reading(nanos(200, 10)).as_nanos(), 3_000);
        assert_eq!(decided.without_reading(nanos(900, 10)).as_nanos(), 0);
        assert_eq!(decided.without_reading(nanos(0, 0)).as_nanos(), 5_000);
    }

    #[test]
    fn turns_that_did_nothing_count_only_where_that_was_not_waiting() {
        let clock = Clock::new();
        clock.begin(false);
        clock.call(|| (), |()| true);
        assert_eq!(clock.turn.get().count, 0);
        clock.begin(true);
        for (moved, counts, decided) in [
            (false, false, 0),
            (true, false, 2),
            (false, true, 4),
            (false, false, 4),
        ] {
            clock.call(|| (), |()| false);
            clock.call(|| (), |()| moved);
            clock.turned(counts);
            assert_eq!(clock.decided.get().count, decided);
        }
        assert_eq!(clock.empty.get().count, 1);
        clock.end();
        assert_eq!(clock.decided.get().count, 0);
    }
}
