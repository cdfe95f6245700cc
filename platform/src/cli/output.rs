//! Data to stdout, talk to stderr, and what happens when they can't take it.

use std::io::{self, ErrorKind, Write};
use std::path::Path;

use crate::closed;
use crate::error::Error;

/// Standard output, written at once and checked.
pub struct Out {
    stdout: io::Stdout,
}

impl Out {
    /// The process's.
    pub fn new() -> Self {
        Self {
            stdout: io::stdout(),
        }
    }

    /// Writes all of `bytes` and flushes, so that a reader at the other end of a pipe sees them now.
    ///
    /// # Errors
    /// [`Error::ClosedPipe`] when the reader has gone, [`Error::Io`] when the disk is full or there is
    /// no stdout.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), Error> {
        if closed::stdout() {
            return Err(failed(io::Error::from_raw_os_error(libc::EBADF)));
        }
        let mut lock = self.stdout.lock();
        lock.write_all(bytes)
            .and_then(|()| lock.flush())
            .map_err(failed)
    }
}

fn failed(error: io::Error) -> Error {
    match error.kind() {
        ErrorKind::BrokenPipe => Error::ClosedPipe,
        _ => Error::io(Path::new("stdout"), "write the output", error),
    }
}

/// Writes text to stdout.
///
/// # Errors
/// As [`Out::write`].
pub fn print(text: &str) -> Result<(), Error> {
    Out::new().write(text.as_bytes())
}

/// Writes a line to stderr. Nobody may be there to read it, and that is no reason to stop.
pub fn say(line: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr
        .write_all(line.as_bytes())
        .and_then(|()| stderr.write_all(b"\n"));
}
