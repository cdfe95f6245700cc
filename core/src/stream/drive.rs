//! The one loop, shared by the device, the simulator and the fuzzers.

use super::engine::{Action, Engine, Event, Fault};
use super::policy::Policy;
use crate::port::{Compute, Storage};

/// Longest that [`Storage::wait`] is asked to block, so that a stop is seen in time.
const WAIT_US_MAX: u32 = 20_000;

/// What the loop's caller may look at and say. Every method has a default.
pub trait Watch {
    /// Asked every turn; true gives up the pass.
    fn stop(&mut self) -> bool {
        false
    }
    /// Nothing can be computed: the loop is about to block on the storage.
    fn stalls(&mut self) {}
    /// The loop is back from blocking.
    fn resumes(&mut self) {}
}

/// Watches nothing.
impl Watch for () {}

/// Runs the pass that was begun to its end. Reads for a following pass may still be in flight then.
///
/// # Errors
/// Why the pass was given up; nothing is in flight then.
///
/// # Panics
/// If no pass was begun, or a port breaks its contract.
pub fn pass<P: Policy>(
    engine: &mut Engine<'_, P>,
    storage: &mut impl Storage,
    compute: &mut impl Compute,
    watch: &mut impl Watch,
) -> Result<(), Fault> {
    assert!(!engine.idle(), "a pass is begun before it is run");
    // Work that the backend had no room for. There are at most two works, so the backend is busy with
    // the other one, and the engine gives out no third.
    let mut refused = None;
    loop {
        if watch.stop() {
            engine.stop();
        }
        if let Some(work) = refused.take() {
            refused = compute.submit(work, engine.homes(work)).err();
        }
        while let Some(action) = engine.poll() {
            match action {
                Action::Read(command) => storage.start(command),
                Action::Compute(work) => {
                    assert!(refused.is_none(), "one work at most is handed back");
                    refused = compute.submit(work, engine.homes(work)).err();
                }
                Action::Finish => return Ok(()),
                Action::Halt(fault) => return Err(fault),
            }
        }
        let mut moved = reads(engine, storage);
        let busy = compute.busy();
        if let Some(event) = compute.poll() {
            engine.handle(Event::Compute(event));
            moved = true;
        }
        if !moved && !busy {
            assert!(refused.is_none(), "a backend that isn't busy takes work");
            assert!(engine.reads_flying() > 0, "the engine waits for something");
            watch.stalls();
            storage.wait(WAIT_US_MAX);
            watch.resumes();
        }
    }
}

/// Between passes: takes in what has been read for the next one and starts more. Never blocks.
///
/// # Panics
/// While a pass runs.
pub fn pump<P: Policy>(engine: &mut Engine<'_, P>, storage: &mut impl Storage) {
    assert!(engine.idle(), "only between passes");
    reads(engine, storage);
    while let Some(action) = engine.poll() {
        match action {
            Action::Read(command) => storage.start(command),
            other => unreachable!("an idle engine only reads: {other:?}"),
        }
    }
}

/// Before the memory is given back: ends the read-ahead of an idle engine and waits for what flies.
///
/// # Panics
/// While a pass runs.
pub fn drain<P: Policy>(engine: &mut Engine<'_, P>, storage: &mut impl Storage) {
    assert!(engine.idle(), "only between passes");
    engine.stop();
    while engine.poll().is_none() {
        if !reads(engine, storage) {
            storage.wait(WAIT_US_MAX);
        }
    }
}

/// Takes in the reads that have ended; whether there were any.
fn reads<P: Policy>(engine: &mut Engine<'_, P>, storage: &mut impl Storage) -> bool {
    let mut any = false;
    while let Some((read, outcome)) = storage.poll() {
        engine.handle(Event::ReadEnded { read, outcome });
        any = true;
    }
    any
}
