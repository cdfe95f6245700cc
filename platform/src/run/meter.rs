//! Storage that knows how long it was busy.

use std::time::{Duration, Instant};

use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::ReadId;

/// Adds up the time in which at least one read was in flight.
pub struct Metered<S> {
    inner: S,
    flying: u32,
    since: Instant,
    busy: Duration,
}

impl<S> Metered<S> {
    /// Meters `inner`, which has nothing in flight.
    pub fn new(inner: S) -> Self {
        Self {
            inner,
            flying: 0,
            since: Instant::now(),
            busy: Duration::ZERO,
        }
    }

    /// The storage beneath.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// The storage beneath, to change.
    pub fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// How long reads were in flight so far.
    pub fn busy(&self) -> Duration {
        if self.flying > 0 {
            self.busy + self.since.elapsed()
        } else {
            self.busy
        }
    }
}

impl<S: Storage> Storage for Metered<S> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn start(&mut self, command: ReadCommand) {
        if self.flying == 0 {
            self.since = Instant::now();
        }
        self.flying += 1;
        self.inner.start(command);
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        let ended = self.inner.poll()?;
        self.flying -= 1;
        if self.flying == 0 {
            self.busy += self.since.elapsed();
        }
        Some(ended)
    }

    fn wait(&mut self, timeout_us: u32) {
        self.inner.wait(timeout_us);
    }
}
