//! What watches a pass: whether it is to be given up, and how long it could compute nothing.

use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

use leanstream_core::stream::drive;

/// Times the waits and carries the stop flag.
pub struct Stalls {
    /// Number of the signal that asks to stop, or 0.
    pub stop: &'static AtomicI32,
    since: Option<Instant>,
    /// How long it waited so far.
    pub total: Duration,
}

impl Stalls {
    /// Nothing was waited for yet; `stop` is the number of the signal that asks to stop, or 0.
    pub fn new(stop: &'static AtomicI32) -> Self {
        Self {
            stop,
            since: None,
            total: Duration::ZERO,
        }
    }
}

impl drive::Watch for Stalls {
    fn stop(&mut self) -> bool {
        self.stop.load(Ordering::Relaxed) != 0
    }

    fn stalls(&mut self) {
        self.since = Some(Instant::now());
    }

    fn resumes(&mut self) {
        if let Some(since) = self.since.take() {
            self.total += since.elapsed();
        }
    }
}
