//! Whether stdout was there when the process began.
//!
//! The standard library puts /dev/null in the place of a closed stdout before it calls `main`, and
//! what is written there is lost in silence. Nothing tells that from a caller's own /dev/null later:
//! some callers open theirs for reading and writing too. So it is asked before.

use std::sync::atomic::{AtomicBool, Ordering};

static CLOSED: AtomicBool = AtomicBool::new(false);

// SAFETY: the C runtime calls what this section points to once each, before `main` and in the only
// thread. It may pass `main`'s arguments, which a C function may leave alone, and `ask` needs
// nothing that is set up later: it makes one system call and sets an atomic.
#[used]
#[unsafe(link_section = ".init_array")]
static ASK: extern "C" fn() = ask;

extern "C" fn ask() {
    // SAFETY: this reads the flags of a descriptor, and any number may be asked about.
    let flags = unsafe { libc::fcntl(libc::STDOUT_FILENO, libc::F_GETFD) };
    CLOSED.store(flags == -1, Ordering::Relaxed);
}

/// True if the process was started without a stdout.
pub fn stdout() -> bool {
    CLOSED.load(Ordering::Relaxed)
}
