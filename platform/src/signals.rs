//! SIGINT and SIGTERM ask the running loop to stop; it does so at its next turn.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};

use crate::error::Error;

/// The signal that came first, 0 while there is none.
pub static STOP: AtomicI32 = AtomicI32::new(0);

/// Signals that ask to stop.
const ASKS: [Signal; 3] = [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP];

/// Set when SIGUSR1 came: settings that may change are to be read again.
pub static AGAIN: AtomicBool = AtomicBool::new(false);

extern "C" fn again(_signal: i32) {
    AGAIN.store(true, Ordering::Relaxed);
}

/// Listens for SIGUSR1 from now on, which otherwise ends the process.
pub fn listen_again() {
    let action = SigAction::new(
        SigHandler::Handler(again),
        SaFlags::SA_RESTART,
        SigSet::empty(),
    );
    // SAFETY: the handler only touches an atomic, which is allowed in a signal handler.
    let _ = unsafe { sigaction(Signal::SIGUSR1, &action) };
}

extern "C" fn note(signal: i32) {
    let _ = STOP.compare_exchange(0, signal, Ordering::Relaxed, Ordering::Relaxed);
}

/// The signal that asked to stop as an error, once there is one.
///
/// # Errors
/// [`Error::Signal`].
pub fn check() -> Result<(), Error> {
    match STOP.load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => Err(Error::Signal(signal)),
    }
}

/// Keeps the signals that ask to stop until [`release`], through an `exec` too.
pub fn hold() {
    // It fails for arguments that it isn't given here.
    let _ = SigSet::from_iter(ASKS).thread_block();
}

/// Takes in what came since [`hold`].
pub fn release() {
    let _ = SigSet::from_iter(ASKS).thread_unblock();
}

/// Listens from now on. A second signal of the same kind ends the process at once, so that a stuck
/// device can't hold it.
pub fn listen() {
    let action = SigAction::new(
        SigHandler::Handler(note),
        SaFlags::SA_RESETHAND,
        SigSet::empty(),
    );
    // A limit on the size of files is an error of the write that meets it.
    let ignore = SigAction::new(SigHandler::SigIgn, SaFlags::empty(), SigSet::empty());
    // SAFETY: nothing runs when the signal comes.
    let _ = unsafe { sigaction(Signal::SIGXFSZ, &ignore) };
    for signal in ASKS {
        // SAFETY: the handler only touches an atomic, which is allowed in a signal handler.
        let before = unsafe { sigaction(signal, &action) };
        // What the caller had us ignore (`nohup`, a job in the background) stays ignored.
        if let Ok(before) = before
            && before.handler() == SigHandler::SigIgn
        {
            // SAFETY: this puts back what was there.
            let _ = unsafe { sigaction(signal, &before) };
        }
    }
}
