//! A budget that changes while a step runs: what is saved becomes narrower or goes, what will be saved
//! is planned anew, and the pages that come free go back to the system.

use std::sync::atomic::Ordering;

use super::decoder::Decoder;
use super::kind::Kind;
use crate::error::Error;
use crate::run::memory::table;

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
        let too_small = |decoder: &Self| Error::Budget {
            budget,
            least: decoder.memory.least(),
            table: table(&decoder.memory.ledger),
        };
        let Some(pages) = self.memory.pages_in(budget) else {
            return Err(too_small(self));
        };
        if self
            .allotment
            .choose(u64::from(pages), &mut self.plan)
            .is_err()
        {
            return Err(too_small(self));
        }
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
        Ok(())
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
