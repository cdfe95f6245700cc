//! The one loop, shared by the device, the simulator and the fuzzers.

use super::engine::{Action, Engine, Event, Fault};
use super::policy::Policy;
use crate::port::{Compute, ReadOutcome, Storage};
use crate::units::ReadId;

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

/// What runs beside the engine, with reads and computing of its own: sparse layers
/// ([`sparse::drive`](crate::sparse::drive)), or nothing (`()`).
pub trait Side<C> {
    /// Starts what can be started and takes in what `compute` has to say; whether there was any.
    fn turn(&mut self, storage: &mut impl Storage, compute: &mut C) -> bool;
    /// Takes in a read that has ended, if it is one of its own.
    fn read_ended(&mut self, read: ReadId, outcome: ReadOutcome, compute: &mut C) -> bool;
    /// Its reads that the storage has.
    fn reads_flying(&self) -> u32;
    /// Why the pass can't go on.
    fn fault(&self) -> Option<Fault>;
    /// Gives up the pass: nothing is started any more, and its work in `compute` comes to an end.
    fn stop(&mut self, compute: &mut C);
}

/// Nothing.
impl<C> Side<C> for () {
    fn turn(&mut self, _: &mut impl Storage, _: &mut C) -> bool {
        false
    }
    fn read_ended(&mut self, _: ReadId, _: ReadOutcome, _: &mut C) -> bool {
        false
    }
    fn reads_flying(&self) -> u32 {
        0
    }
    fn fault(&self) -> Option<Fault> {
        None
    }
    fn stop(&mut self, _: &mut C) {}
}

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
    pass_beside(engine, storage, compute, watch, &mut ())
}

/// [`pass`] with something beside the engine.
///
/// # Errors
/// As [`pass`].
///
/// # Panics
/// As [`pass`].
pub fn pass_beside<P: Policy, C: Compute>(
    engine: &mut Engine<'_, P>,
    storage: &mut impl Storage,
    compute: &mut C,
    watch: &mut impl Watch,
    side: &mut impl Side<C>,
) -> Result<(), Fault> {
    assert!(!engine.idle(), "a pass is begun before it is run");
    // Work that the backend had no room for. There are at most two works, so the backend is busy with
    // the other one, and the engine gives out no third.
    let mut refused = None;
    let mut stopped = false;
    loop {
        if !stopped {
            let fault = watch
                .stop()
                .then_some(Fault::Stopped)
                .or_else(|| side.fault());
            if let Some(fault) = fault {
                stopped = true;
                engine.fail(fault);
                side.stop(compute);
            }
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
                Action::Halt(fault) => {
                    if !stopped {
                        side.stop(compute);
                    }
                    while side.reads_flying() > 0 {
                        if !reads(engine, storage, compute, side) {
                            storage.wait(WAIT_US_MAX);
                        }
                    }
                    return Err(fault);
                }
            }
        }
        let mut moved = side.turn(storage, compute);
        moved |= reads(engine, storage, compute, side);
        let busy = compute.busy();
        if let Some(event) = compute.poll() {
            engine.handle(Event::Compute(event));
            moved = true;
        }
        if !moved && !busy {
            assert!(refused.is_none(), "a backend that isn't busy takes work");
            assert!(
                engine.reads_flying() + side.reads_flying() > 0,
                "the engine waits for something"
            );
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
    pump_beside(engine, storage, &mut (), &mut ());
}

/// [`pump`] with something beside the engine.
///
/// # Panics
/// While a pass runs.
pub fn pump_beside<P: Policy, C>(
    engine: &mut Engine<'_, P>,
    storage: &mut impl Storage,
    compute: &mut C,
    side: &mut impl Side<C>,
) {
    assert!(engine.idle(), "only between passes");
    reads(engine, storage, compute, side);
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
    drain_beside(engine, storage, &mut (), &mut ());
}

/// [`drain`] with something beside the engine.
///
/// # Panics
/// While a pass runs.
pub fn drain_beside<P: Policy, C>(
    engine: &mut Engine<'_, P>,
    storage: &mut impl Storage,
    compute: &mut C,
    side: &mut impl Side<C>,
) {
    assert!(engine.idle(), "only between passes");
    engine.stop();
    side.stop(compute);
    while side.reads_flying() > 0 || engine.poll().is_none() {
        if !reads(engine, storage, compute, side) {
            storage.wait(WAIT_US_MAX);
        }
    }
}

/// Takes in the reads that have ended; whether there were any.
fn reads<P: Policy, C>(
    engine: &mut Engine<'_, P>,
    storage: &mut impl Storage,
    compute: &mut C,
    side: &mut impl Side<C>,
) -> bool {
    let mut any = false;
    while let Some((read, outcome)) = storage.poll() {
        if !side.read_ended(read, outcome, compute) {
            engine.handle(Event::ReadEnded { read, outcome });
        }
        any = true;
    }
    any
}
