//! A budget that changes while a step runs: what is saved becomes narrower or goes, what will be saved
//! is planned anew, weights that stayed stream, and the memory that comes free goes back to the system.

use std::sync::atomic::Ordering;

use super::decoder::Decoder;
use super::kind::Kind;
use crate::error::Error;
use crate::run::memory;
use crate::tune::memory::MemoryPlan;

impl Decoder<'_> {
    /// Looks whether a signal asks to stop, and whether the budget has changed.
    ///
    /// # Errors
    /// The signal, or [`Error::Budget`] when training can't go on in it.
    pub(super) fn heed(&mut self) -> Result<(), Error> {
        let signal = self.stop.load(Ordering::Relaxed);
        if signal != 0 {
            return Err(Error::Signal(signal));
        }
        match self.watch.look() {
            Some(budget) => self.set_budget(budget),
            None => Ok(()),
        }
    }

    /// Keeps to another budget from now on.
    ///
    /// # Errors
    /// [`Error::Budget`] when training can't go on in it.
    pub fn set_budget(&mut self, budget: u64) -> Result<(), Error> {
        let too_small = |plan: &MemoryPlan| {
            // Who goes on with what is named starts anew, and may hold a little more than this process.
            memory::too_small(&plan.least_ledger(), budget, u64::MAX)
        };
        let Some(plan) = self.memory.within(budget) else {
            return Err(too_small(&self.memory));
        };
        let pages = plan.pages;
        if self
            .allotment
            .choose(u64::from(pages), &mut self.plan)
            .is_err()
        {
            return Err(too_small(&self.memory));
        }
        self.memory = plan;
        for layer in 0..self.net.layers.len() {
            for kind in Kind::ALL {
                if !self.has(layer, kind) {
                    continue;
                }
                match self.plan[layer].width(kind) {
                    None => self.release(layer, kind),
                    Some(width) if width.is_codes() => {
                        self.saved
                            .narrow(&self.team, kind.id(layer), width)
                            .expect("a tensor that is held");
                    }
                    Some(_) => {}
                }
            }
        }
        self.saved
            .set_limit(&self.team, pages, self.allotment.by_tensor())
            .map_err(|error| Error::Runtime(error.to_string()))?;
        self.sizes.head_tokens = plan.sizes.head_tokens;
        self.buffers
            .shorten_head(&self.sizes, &self.net.hyper)
            .map_err(|error| Error::Runtime(format!("can't give memory back: {error}")))?;
        match &mut self.store {
            Some(store) => store.set_slots(plan.slots),
            None => Ok(()),
        }
    }

    /// Whether a layer's tensor is saved now.
    pub(super) fn has(&self, layer: usize, kind: Kind) -> bool {
        self.saved.pool().held(kind.id(layer)).is_some()
    }

    /// Gives back a layer's tensor, if it is saved.
    pub(super) fn release(&mut self, layer: usize, kind: Kind) {
        if self.has(layer, kind) {
            self.saved
                .release(kind.id(layer))
                .expect("a tensor that is held");
        }
    }
}
