//! What the storage side has to say: errors, notices and counters. All of them are values; printing
//! is the caller's business.

use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use leanstream_core::units::FileId;

/// An operating system error number, printed by its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Errno(pub i32);

impl Errno {
    /// The number inside an [`std::io::Error`], or `EIO` when it has none.
    pub fn of(error: &std::io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// The symbolic name, for the numbers that storage is known to give.
    pub fn name(self) -> Option<&'static str> {
        Some(match self.0 {
            libc::EPERM => "EPERM",
            libc::ENOENT => "ENOENT",
            libc::EINTR => "EINTR",
            libc::EIO => "EIO",
            libc::ENXIO => "ENXIO",
            libc::EBADF => "EBADF",
            libc::EAGAIN => "EAGAIN",
            libc::ENOMEM => "ENOMEM",
            libc::EACCES => "EACCES",
            libc::EFAULT => "EFAULT",
            libc::EBUSY => "EBUSY",
            libc::ENODEV => "ENODEV",
            libc::EISDIR => "EISDIR",
            libc::EINVAL => "EINVAL",
            libc::EMFILE => "EMFILE",
            libc::ENOSYS => "ENOSYS",
            libc::ENODATA => "ENODATA",
            libc::EOPNOTSUPP => "EOPNOTSUPP",
            libc::ETIMEDOUT => "ETIMEDOUT",
            libc::ESTALE => "ESTALE",
            libc::EREMOTEIO => "EREMOTEIO",
            libc::ECANCELED => "ECANCELED",
            _ => return None,
        })
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

/// Why the model's files or the backend can't be used at all.
#[derive(Debug)]
pub enum OpenError {
    /// A file can't be opened or looked at.
    File {
        /// As it was given.
        path: PathBuf,
        /// The operating system's reason.
        error: std::io::Error,
    },
    /// A directory, pipe or device.
    NotAFile {
        /// As it was given.
        path: PathBuf,
    },
    /// More files than [`FileId`] can name, or none.
    Count {
        /// How many were given.
        files: usize,
    },
    /// io_uring was asked for by name and the kernel has none for us.
    NoRing {
        /// Its reason.
        errno: Errno,
    },
    /// A reader thread can't be started.
    Thread {
        /// The operating system's reason.
        error: std::io::Error,
    },
}

impl fmt::Display for OpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { path, error } => write!(f, "cannot open {}: {error}", path.display()),
            Self::NotAFile { path } => write!(
                f,
                "cannot open {}: not a regular file, and a model is read out of order",
                path.display()
            ),
            Self::Count { files } => write!(f, "a model of {files} files"),
            Self::NoRing { errno } => write!(
                f,
                "io_uring is refused here ({errno}); the `pread` backend works everywhere"
            ),
            Self::Thread { error } => write!(f, "cannot start a reader thread: {error}"),
        }
    }
}

impl std::error::Error for OpenError {}

/// Why one read failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Cause {
    /// The operating system said so.
    Os(Errno),
    /// The extent starts at or passes the end of the file.
    PastEnd {
        /// Length of the file when it was opened.
        file_len: u64,
    },
    /// The file has become shorter since it was opened.
    Truncated {
        /// Where it ends now.
        end: u64,
    },
    /// The kernel kept asking to try again.
    TooManyRetries(Errno),
    /// The fault injector said so.
    Injected,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Os(errno) => {
                let text = std::io::Error::from_raw_os_error(errno.0);
                match errno.name() {
                    Some(name) => write!(f, "{name}: {text}"),
                    None => write!(f, "{text}"),
                }
            }
            Self::PastEnd { file_len } => {
                write!(f, "past the end of the file ({file_len} bytes long)")
            }
            Self::Truncated { end } => write!(
                f,
                "the file has shrunk to {end} bytes while it was in use; was it replaced?"
            ),
            Self::TooManyRetries(errno) => write!(f, "gave up after too many retries ({errno})"),
            Self::Injected => f.write_str("injected fault"),
        }
    }
}

/// A failed read: which, and why.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ReadError {
    /// Which file of the model.
    pub file: FileId,
    /// First byte asked for.
    pub offset: u64,
    /// Bytes asked for.
    pub len: u32,
    /// Why.
    pub cause: Cause,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            offset,
            len,
            cause,
        } = self;
        write!(
            f,
            "read of {len} bytes at {offset} in file {}: {cause}",
            file.0
        )
    }
}

impl std::error::Error for ReadError {}

/// Something the user should hear once, though the work goes on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Notice {
    /// O_DIRECT was refused when the file was opened or tried.
    BufferedAtOpen {
        /// The first such file.
        file: FileId,
        /// The kernel's reason.
        errno: Errno,
    },
    /// O_DIRECT worked at first and was refused by a later read.
    BufferedAtRead {
        /// The first such file.
        file: FileId,
        /// The kernel's reason.
        errno: Errno,
    },
    /// There is no io_uring here; threads read instead.
    NoRing {
        /// The kernel's reason.
        errno: Errno,
    },
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let buffered = "reading through the page cache and dropping it behind";
        match self {
            Self::BufferedAtOpen { file, errno } => {
                write!(f, "file {}: O_DIRECT refused ({errno}); {buffered}", file.0)
            }
            Self::BufferedAtRead { file, errno } => write!(
                f,
                "file {}: O_DIRECT refused by a read ({errno}); from now on {buffered}",
                file.0
            ),
            Self::NoRing { errno } => {
                write!(f, "io_uring refused ({errno}); reading with threads")
            }
        }
    }
}

/// Totals since the backend was made. Bytes are those asked of the kernel and delivered.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Stats {
    /// Reads that ended well.
    pub reads: u64,
    /// Bytes delivered, repeated ones included.
    pub bytes: u64,
    /// Reads that failed.
    pub failed: u64,
    /// Times the kernel gave fewer bytes than asked and the rest was asked again.
    pub short: u64,
    /// Times a read was repeated for EINTR or EAGAIN.
    pub retries: u64,
    /// Requests that went through the page cache.
    pub buffered: u64,
    /// Times O_DIRECT was refused by a read.
    pub refused: u64,
}

/// [`Stats`] being counted, from any thread.
#[derive(Default, Debug)]
pub(super) struct Counters {
    pub reads: AtomicU64,
    pub bytes: AtomicU64,
    pub failed: AtomicU64,
    pub short: AtomicU64,
    pub retries: AtomicU64,
    pub buffered: AtomicU64,
    pub refused: AtomicU64,
}

impl Counters {
    /// Counts are only ever read as totals, so no order between them is needed.
    pub fn add(counter: &AtomicU64, n: u64) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    pub fn snapshot(&self) -> Stats {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        Stats {
            reads: get(&self.reads),
            bytes: get(&self.bytes),
            failed: get(&self.failed),
            short: get(&self.short),
            retries: get(&self.retries),
            buffered: get(&self.buffered),
            refused: get(&self.refused),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_thing_and_the_reason() {
        let e = ReadError {
            file: FileId(2),
            offset: 4096,
            len: 512,
            cause: Cause::Os(Errno(libc::EIO)),
        };
        let said = e.to_string();
        // The C library's words: glibc and musl have their own.
        let words = std::io::Error::from_raw_os_error(libc::EIO).to_string();
        for part in ["512 bytes", "at 4096", "file 2", "EIO", &words] {
            assert!(said.contains(part), "{said}");
        }
        assert_eq!(Errno(9999).to_string(), "errno 9999");
        let n = Notice::BufferedAtRead {
            file: FileId(0),
            errno: Errno(libc::EINVAL),
        };
        assert!(n.to_string().contains("EINVAL"));
        let e = OpenError::NoRing {
            errno: Errno(libc::EPERM),
        };
        assert!(e.to_string().contains("pread"), "the way out is named");
    }
}
