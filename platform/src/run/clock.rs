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
    turn: Cell<Duration>,
    moved: Cell<bool>,
    decided: Cell<Duration>,
    /// What reading the clock takes, once of which is in every stretch.
    reading: Duration,
}

/// Readings that their cost is found by.
const READINGS: u32 = 1000;

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock {
    /// A clock that stands still.
    pub fn new() -> Self {
        let since = Instant::now();
        for _ in 1..READINGS {
            std::hint::black_box(Instant::now());
        }
        Self {
            reading: since.elapsed() / READINGS,
            on: Cell::new(false),
            since: Cell::new(Instant::now()),
            turn: Cell::new(Duration::ZERO),
            moved: Cell::new(false),
            decided: Cell::new(Duration::ZERO),
        }
    }

    /// A pass begins, to be watched or not.
    pub fn begin(&self, on: bool) {
        self.on.set(on);
        self.turn.set(Duration::ZERO);
        self.moved.set(false);
        if on {
            self.since.set(Instant::now());
        }
    }

    /// The pass has ended: how long it decided.
    pub fn end(&self) -> Duration {
        self.leave();
        self.turned(true);
        self.on.set(false);
        self.decided.take()
    }

    /// Core calls somebody else.
    fn leave(&self) {
        if self.on.get() {
            let stretch = self.since.get().elapsed().saturating_sub(self.reading);
            self.turn.set(self.turn.get() + stretch);
        }
    }

    /// It goes on, after a call that meant something has happened, or not.
    fn enter(&self, moved: bool) {
        if self.on.get() {
            self.moved.set(self.moved.get() || moved);
            self.since.set(Instant::now());
        }
    }

    /// A turn of the loop is over.
    fn turned(&self, counts: bool) {
        let turn = self.turn.take();
        if counts || self.moved.take() {
            self.decided.set(self.decided.get() + turn);
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
