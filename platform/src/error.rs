//! What can go wrong, by what a script should do about it: each kind has an exit code of its own.

use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::aside;

/// An error with its way out. [`Error::exit_code`] is the process's exit code.
#[derive(Debug)]
pub enum Error {
    /// The command line asks for something that doesn't exist or doesn't go together.
    Usage(String),
    /// A model file that can't be used: not a GGUF, damaged, of an unsupported kind.
    Model {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and the way out.
        why: String,
    },
    /// The budget is below what this run needs at least.
    Budget {
        /// The budget that was given.
        budget: u64,
        /// The least that would do.
        least: u64,
        /// Who would hold what, as printed lines.
        table: String,
    },
    /// A file or device that can't be read or written.
    Io {
        /// The file.
        path: PathBuf,
        /// What was being done to it.
        what: &'static str,
        /// The operating system's reason.
        source: std::io::Error,
    },
    /// Numbers of a training step aren't finite any more: a damaged weight, or training that went too far.
    NotFinite(String),
    /// Anything else that stops a run.
    Runtime(String),
    /// A signal asked the program to stop.
    Signal(i32),
    /// The reader of our output has gone.
    ClosedPipe,
    /// Why the exit code is this has been told already.
    Told(i32),
}

impl Error {
    /// 1 runtime, 2 usage, 3 model file, 4 budget, 5 I/O, 128 + signal, 141 closed pipe.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::NotFinite(_) | Self::Runtime(_) => 1,
            Self::Usage(_) => 2,
            Self::Model { .. } => 3,
            Self::Budget { .. } => 4,
            Self::Io { .. } => 5,
            Self::Signal(signal) => 128 + signal,
            Self::ClosedPipe => 141,
            Self::Told(code) => *code,
        }
    }

    /// What went wrong on one line, without tables.
    pub fn headline(&self) -> String {
        let text = self.to_string();
        text.lines().next().unwrap_or_default().to_owned()
    }

    /// A model error.
    pub fn model(path: &Path, why: impl fmt::Display) -> Self {
        Self::Model {
            path: path.to_owned(),
            why: why.to_string(),
        }
    }

    /// An I/O error.
    pub fn io(path: &Path, what: &'static str, source: std::io::Error) -> Self {
        Self::Io {
            path: path.to_owned(),
            what,
            source,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(why) | Self::NotFinite(why) | Self::Runtime(why) => f.write_str(why),
            Self::Model { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Budget {
                budget,
                least,
                table,
            } => write!(
                f,
                "the budget of {} is too small: at least {} is needed (--budget {}M)\n{table}",
                mib(*budget),
                mib(*least),
                least.div_ceil(1 << 20)
            ),
            Self::Io { path, what, source } => {
                write!(f, "{}: cannot {what}: {source}", path.display())
            }
            Self::Signal(signal) => write!(f, "stopped by signal {signal}"),
            Self::ClosedPipe => f.write_str("the reader of the output has gone"),
            Self::Told(code) => write!(f, "failed with exit code {code}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } => Some(source),
            _ => None,
        }
    }
}

/// Bytes as people read them.
pub fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Refuses to write over what is read: neither `out` nor the file that it grows in is one of `inputs`.
///
/// # Errors
/// [`Error::Usage`] when it is, by whatever name.
pub fn refuse_input<'a>(
    out: &Path,
    inputs: impl IntoIterator<Item = &'a Path>,
) -> Result<(), Error> {
    let outs = [out.to_owned(), aside::name(out)];
    // A device such as /dev/null may be both.
    let files = |path: &&PathBuf| std::fs::metadata(path).is_ok_and(|meta| meta.is_file());
    let outs: Vec<_> = outs.iter().filter(files).collect();
    for input in inputs {
        if let Some(out) = outs.iter().find(|out| same(out, input)) {
            return Err(Error::Usage(format!(
                "the output {} is {}, which is read; give the output another name",
                out.display(),
                input.display()
            )));
        }
    }
    Ok(())
}

/// Refuses to replace what is no file: a directory, a device, a pipe; and an empty name.
///
/// # Errors
/// [`Error::Usage`] when `out` is there and is one of them, or names nothing.
pub fn refuse_special(out: &Path) -> Result<(), Error> {
    if out.as_os_str().is_empty() {
        return Err(Error::Usage(
            "the output's name is empty; give it one".into(),
        ));
    }
    let why = match std::fs::metadata(out) {
        Ok(meta) if meta.is_dir() => "is a directory; give the output a file name in it",
        Ok(meta) if !meta.is_file() => {
            "is there and is no file, and the output replaces what has its name; give it another name"
        }
        _ => return Ok(()),
    };
    Err(Error::Usage(format!("{} {why}", out.display())))
}

/// Refuses to write two files under one name.
///
/// # Errors
/// [`Error::Usage`] when `out`, or the file that it grows in, is one of `others`.
pub fn refuse_twice(out: &Path, others: &[&Path]) -> Result<(), Error> {
    let clash = |other: &Path| {
        same(out, other) || same(&aside::name(out), other) || same(out, &aside::name(other))
    };
    match others.iter().find(|other| clash(other)) {
        Some(other) => Err(Error::Usage(format!(
            "{} is written as {} too; give one of them another name",
            out.display(),
            other.display()
        ))),
        None => Ok(()),
    }
}

/// Whether two names are one file's, whether or not it is there.
fn same(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| std::fs::metadata(path).ok().map(|m| (m.dev(), m.ino()));
    match (id(a), id(b)) {
        (Some(a), Some(b)) => a == b,
        (None, None) => place(a).is_some_and(|a| place(b) == Some(a)),
        _ => false,
    }
}

/// Where a file that isn't there yet would be.
fn place(path: &Path) -> Option<PathBuf> {
    let parent = path.parent().filter(|parent| *parent != Path::new(""));
    let parent = parent.unwrap_or(Path::new(".")).canonicalize().ok()?;
    Some(parent.join(path.file_name()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Scripts branch on these; a changed code breaks them silently.
    #[test]
    fn an_output_has_a_name() {
        let refused = refuse_special(Path::new("")).expect_err("it is empty");
        assert_eq!(refused.exit_code(), 2);
        assert!(refused.to_string().contains("name is empty"), "{refused}");
        assert!(refuse_special(Path::new("not there")).is_ok());
    }

    #[test]
    fn exit_codes_are_fixed() {
        let io = || std::io::Error::from(std::io::ErrorKind::NotFound);
        let cases = [
            (Error::Runtime(String::new()), 1),
            (Error::NotFinite(String::new()), 1),
            (Error::Usage(String::new()), 2),
            (Error::model(Path::new("m"), "x"), 3),
            (
                Error::Budget {
                    budget: 1,
                    least: 2,
                    table: String::new(),
                },
                4,
            ),
            (Error::io(Path::new("m"), "read it", io()), 5),
            (Error::Signal(2), 130),
            (Error::Signal(15), 143),
            (Error::ClosedPipe, 141),
            (Error::Told(4), 4),
        ];
        for (error, code) in cases {
            assert_eq!(error.exit_code(), code, "{error}");
        }
    }
}
