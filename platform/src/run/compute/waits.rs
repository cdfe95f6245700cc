//! Whether a look ahead pays: it is free while the layer would wait for units longer than it takes, and
//! costs time otherwise. Both are measured as they happen.

use std::time::{Duration, Instant};

/// Sizes of waits that are told apart: by how often the number of missing units can be halved.
const SIZES: usize = 24;

/// Looks that a layer may be asked for.
const LOOKS_MAX: usize = 8;

/// A look that wasn't taken makes the next one seem cheaper by this much: costs change, and only a look
/// tells what one costs.
const FORGET: f32 = 1.0 / 512.0;

/// A moving average of microseconds.
#[derive(Clone, Copy, Default)]
struct Average(Option<f32>);

impl Average {
    /// Takes one more; a hiccup of the machine counts four times what is usual at most.
    fn add(&mut self, time: Duration) {
        let us = time.as_secs_f32() * 1e6;
        self.0 = Some(match self.0 {
            None => us,
            Some(usual) => usual + (us.min(4.0 * usual + 1.0) - usual) / 8.0,
        });
    }
}

/// What is known of waits and looks.
pub(super) struct Waits {
    /// From a moment with so many units missing until the last of them was there.
    waits: [Average; SIZES],
    look: Average,
    /// Moments of the running layer, with the size of what was missing.
    open: [(Instant, usize); LOOKS_MAX],
    count: usize,
    /// When the running layer's last group so far was handed over.
    ready: Option<Instant>,
    /// Looks that were taken.
    pub looks: u64,
}

impl Waits {
    pub fn new() -> Self {
        Self {
            waits: [Average::default(); SIZES],
            look: Average::default(),
            open: [(Instant::now(), 0); LOOKS_MAX],
            count: 0,
            ready: None,
            looks: 0,
        }
    }

    /// A layer has chosen.
    pub fn begin(&mut self) {
        self.count = 0;
        self.ready = None;
    }

    /// The layer waits for `missing` units: whether it will wait longer than a look takes. True while that
    /// isn't known.
    pub fn pays(&mut self, missing: u32, now: Instant) -> bool {
        let size = ((u32::BITS - missing.leading_zeros()) as usize).min(SIZES - 1);
        if let Some(open) = self.open.get_mut(self.count) {
            *open = (now, size);
            self.count += 1;
        }
        let (Some(wait), Some(look)) = (self.waits[size].0, &mut self.look.0) else {
            return true;
        };
        let pays = wait > *look;
        if !pays {
            *look -= *look * FORGET;
        }
        pays
    }

    /// A group's units are there.
    pub fn ready(&mut self, now: Instant) {
        if self.count > 0 {
            self.ready = Some(now);
        }
    }

    /// All groups of the layer have been computed.
    pub fn settle(&mut self) {
        if let Some(ready) = self.ready {
            for (since, size) in &self.open[..self.count] {
                // Not of groups that were there before.
                self.waits[*size].add(ready.saturating_duration_since(*since));
            }
        }
        self.begin();
    }

    /// A look has taken so long.
    pub fn looked(&mut self, time: Duration) {
        self.look.add(time);
        self.looks += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: Duration = Duration::from_micros(1);

    /// A layer that misses units and has them after `us` microseconds; whether a look would have paid.
    fn layer(waits: &mut Waits, missing: u32, us: u32) -> bool {
        let now = Instant::now();
        waits.begin();
        let pays = waits.pays(missing, now);
        waits.ready(now + us * US);
        waits.settle();
        pays
    }

    #[test]
    fn looks_are_taken_while_waits_are_longer() {
        let mut waits = Waits::new();
        assert!(layer(&mut waits, 100, 900), "nothing is known");
        waits.looked(300 * US);
        // Few units are there sooner, which has to be found out first.
        assert!(layer(&mut waits, 1, 90));
        assert!(layer(&mut waits, 127, 900) && !layer(&mut waits, 1, 90));
        // It gets slower: the average follows.
        for _ in 0..30 {
            layer(&mut waits, 1, 350);
        }
        assert!(layer(&mut waits, 1, 350));
    }

    #[test]
    fn one_slow_look_is_not_the_last() {
        let mut waits = Waits::new();
        layer(&mut waits, 9, 200);
        waits.looked(100 * US);
        waits.looked(Duration::from_secs(5));
        assert!(layer(&mut waits, 9, 200), "a hiccup counts little");
        for _ in 0..20 {
            waits.looked(400 * US);
        }
        assert!(!layer(&mut waits, 9, 200));
        let tries = (0..1000).position(|_| layer(&mut waits, 9, 200));
        assert!(tries.is_some_and(|tries| tries > 50), "{tries:?}");
    }

    #[test]
    fn a_layer_that_lacked_nothing_says_nothing() {
        let mut waits = Waits::new();
        waits.ready(Instant::now());
        waits.settle();
        assert!(waits.waits.iter().all(|wait| wait.0.is_none()));
    }
}
