//! Storage as slow as one wants: what would this model do on an SD card?
//!
//! The device imitated has one channel of `bytes_per_s` that reads pass one after the other, and a
//! latency before each read's first byte during which other reads may pass. A read ends no earlier
//! than that device would end it, and no earlier than the real one does.

use std::sync::atomic::{AtomicI32, Ordering};

use std::fmt;

use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::ReadId;

use super::hold::{Clock, Holds, Monotonic};
use crate::budget::{SizeError, parse_size};

/// How slow.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Limits {
    /// Bytes per second through the channel, or as fast as the device.
    pub bytes_per_s: Option<u64>,
    /// Microseconds before a read's first byte.
    pub latency_us: u32,
}

/// Why a limit can't be understood.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum LimitsError {
    /// The bytes per second.
    Rate(SizeError),
    /// A rate of zero.
    Zero,
    /// The latency.
    Latency(String),
}

impl fmt::Display for LimitsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rate(error) => write!(f, "read limit: {error}"),
            Self::Zero => f.write_str("read limit: at 0 bytes per second nothing would ever end"),
            Self::Latency(text) => write!(
                f,
                "read limit: '{text}' is no latency; write microseconds or milliseconds, \
                 like 80us or 2ms"
            ),
        }
    }
}

impl std::error::Error for LimitsError {}

impl Limits {
    /// Parse `300M` (bytes per second, binary units as everywhere) or `300M,80us`.
    ///
    /// # Errors
    /// What couldn't be understood, and the accepted forms.
    pub fn parse(text: &str) -> Result<Self, LimitsError> {
        let (rate, latency) = match text.split_once(',') {
            Some((rate, latency)) => (rate, Some(latency)),
            None => (text, None),
        };
        let bytes_per_s = parse_size(rate, None).map_err(LimitsError::Rate)?;
        if bytes_per_s == 0 {
            return Err(LimitsError::Zero);
        }
        let latency_us = latency.map_or(Ok(0), parse_latency)?;
        Ok(Self {
            bytes_per_s: Some(bytes_per_s),
            latency_us,
        })
    }

    /// True when nothing is slowed down.
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

fn parse_latency(text: &str) -> Result<u32, LimitsError> {
    let bad = || LimitsError::Latency(text.into());
    let (digits, us) = match (text.strip_suffix("us"), text.strip_suffix("ms")) {
        (Some(digits), _) => (digits, 1),
        (_, Some(digits)) => (digits, 1000),
        _ => return Err(bad()),
    };
    // `parse` would take a sign.
    if !digits.bytes().all(|b| b.is_ascii_digit()) {
        return Err(bad());
    }
    let number: u32 = digits.parse().map_err(|_| bad())?;
    number.checked_mul(us).ok_or_else(bad)
}

/// The middleware. Without limits it only passes calls on.
#[derive(Debug)]
pub struct Throttle<S, C = Monotonic> {
    inner: S,
    limits: Limits,
    clock: C,
    holds: Holds,
    /// When the channel has passed all that was started.
    free_ns: u64,
    stop: Option<&'static AtomicI32>,
}

impl<S: Storage, C: Clock> Throttle<S, C> {
    /// Slow `inner` down to `limits`.
    pub fn new(inner: S, limits: Limits, clock: C) -> Self {
        Self {
            holds: Holds::new(inner.geometry().reads_max),
            inner,
            limits,
            clock,
            free_ns: 0,
            stop: None,
        }
    }

    /// Holds nothing back any more once `stop` isn't 0: whoever stops wants no trial of slowness.
    pub fn until(self, stop: Option<&'static AtomicI32>) -> Self {
        Self { stop, ..self }
    }

    /// What is slowed down.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// When a read of `len` bytes that starts now is through.
    fn due(&mut self, len: u32) -> u64 {
        let ready = self.clock.now_ns() + u64::from(self.limits.latency_us) * 1000;
        let Some(rate) = self.limits.bytes_per_s else {
            return ready;
        };
        let passing = u128::from(len) * 1_000_000_000 / u128::from(rate);
        let passing = u64::try_from(passing).unwrap_or(u64::MAX);
        self.free_ns = self.free_ns.max(ready).saturating_add(passing);
        self.free_ns
    }
}

impl<S: Storage, C: Clock> Storage for Throttle<S, C> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn start(&mut self, command: ReadCommand) {
        if !self.limits.is_none() {
            let due = self.due(command.extent.len);
            self.holds.started(command.read, due);
        }
        self.inner.start(command);
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        if self.limits.is_none() {
            return self.inner.poll();
        }
        self.holds.collect(&mut self.inner);
        let stopped = |stop: &AtomicI32| stop.load(Ordering::Relaxed) != 0;
        self.holds.pop(if self.stop.is_some_and(stopped) {
            u64::MAX
        } else {
            self.clock.now_ns()
        })
    }

    fn wait(&mut self, timeout_us: u32) {
        if self.limits.is_none() {
            self.inner.wait(timeout_us);
        } else {
            self.holds.wait(&mut self.inner, &self.clock, timeout_us);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::hold::testing::{Instantly, Manual};
    use super::*;
    use leanstream_core::units::{Extent, FileId, PieceId, SlotId};

    const MS: u64 = 1_000_000;

    fn read(id: u16, len: u32) -> ReadCommand {
        ReadCommand {
            read: ReadId(id),
            slot: SlotId(id.into()),
            piece: PieceId(0),
            extent: Extent {
                file: FileId(0),
                offset: 0,
                len,
            },
        }
    }

    /// Start reads of 1 MiB each; when does each end, in nanoseconds?
    fn ends(limits: &str, device_ns: u64, reads: u16) -> Vec<(u16, u64)> {
        let clock = Manual::default();
        let device = Instantly::new(&clock, device_ns);
        let limits = Limits::parse(limits).unwrap();
        let mut throttle = Throttle::new(device, limits, clock.clone());
        for id in 0..reads {
            throttle.start(read(id, 1 << 20));
        }
        let mut ends = Vec::new();
        while ends.len() < usize::from(reads) {
            match throttle.poll() {
                Some((read, outcome)) => {
                    assert_eq!(outcome, ReadOutcome::Filled);
                    ends.push((read.0, clock.now_ns()));
                }
                None => throttle.wait(3000),
            }
        }
        ends
    }

    #[test]
    fn reads_share_the_channel() {
        // 1 MiB at 100 MiB/s takes 10 ms; the latencies overlap.
        assert_eq!(
            ends("100M", 0, 3),
            [(0, 10 * MS), (1, 20 * MS), (2, 30 * MS)]
        );
        assert_eq!(ends("100M,5ms", 0, 2), [(0, 15 * MS), (1, 25 * MS)]);
        // A device slower than the limit sets the pace.
        assert_eq!(ends("1T", 40 * MS, 2), [(0, 40 * MS), (1, 40 * MS)]);
    }

    #[test]
    fn an_idle_channel_saves_nothing_up() {
        let clock = Manual::default();
        let limits = Limits::parse("100M").unwrap();
        let mut throttle = Throttle::new(Instantly::new(&clock, 0), limits, clock.clone());
        clock.sleep_ns(500 * MS);
        for id in 0..2 {
            throttle.start(read(id, 1 << 20));
        }
        throttle.wait(60_000_000);
        assert_eq!(clock.now_ns(), 510 * MS);
        assert!(throttle.poll().is_some());
        assert!(throttle.poll().is_none());
    }

    #[test]
    fn without_limits_it_passes_on() {
        let clock = Manual::default();
        let mut throttle =
            Throttle::new(Instantly::new(&clock, MS), Limits::default(), clock.clone());
        throttle.start(read(0, 1 << 20));
        assert_eq!(throttle.poll(), None);
        throttle.wait(60_000_000);
        assert_eq!(clock.now_ns(), MS);
        assert_eq!(throttle.poll(), Some((ReadId(0), ReadOutcome::Filled)));
    }

    #[test]
    fn limits_as_written() {
        let parsed = |text| Limits::parse(text).unwrap();
        let expected = |bytes_per_s, latency_us| Limits {
            bytes_per_s: Some(bytes_per_s),
            latency_us,
        };
        assert_eq!(parsed("300M"), expected(300 << 20, 0));
        assert_eq!(parsed("300M,80us"), expected(300 << 20, 80));
        assert_eq!(parsed("1.5G,2ms"), expected(3 << 29, 2000));
        for text in [
            "",
            "0",
            "M",
            "40%",
            "300M,",
            "300M,80",
            "300M,us",
            "300M,-1us",
            "300M,+1us",
            "300M,1.5us",
            "300M,80us,1",
            "300M,80s",
            "300M,4294968ms",
            ",80us",
        ] {
            let said = Limits::parse(text).expect_err(text).to_string();
            assert!(said.starts_with("read limit: "), "{said}");
        }
    }
}
