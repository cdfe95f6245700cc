//! The budget while training runs: a file that somebody rewrites, SIGUSR1, and the limits of control
//! groups. Looked at between layers; allocates nothing.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, open};
use rustix::io::Errno;

use crate::budget::{limit_files, parse_size};
use crate::error::Error;
use crate::signals::AGAIN;

/// How often files are looked at.
const EVERY: Duration = Duration::from_millis(50);
/// Bytes of a file that are looked at.
const TEXT: usize = 64;

/// What the budget depends on.
pub struct Watch {
    /// As it was given.
    given: u64,
    /// The file that may say another.
    file: Option<CString>,
    /// Control groups' limits.
    limits: Vec<CString>,
    /// What a share in the file is of.
    whole: u64,
    looked: Option<Instant>,
    budget: u64,
    /// As it would be without the control groups.
    wanted: u64,
    /// Why the file wasn't understood when it was last read.
    trouble: Option<Trouble>,
    /// Whether that has been told.
    told: bool,
}

/// Why a file says no budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Trouble {
    Unreadable(Errno),
    /// Not UTF-8, or no size: its first bytes, and how many they are.
    Nonsense([u8; TEXT], usize),
}

impl Watch {
    /// Watches what may change the `given` budget; a percentage in the file is of `whole`. The file
    /// need not exist yet.
    pub fn new(given: u64, file: Option<&Path>, whole: u64) -> Self {
        let c = |bytes: &[u8]| CString::new(bytes).ok();
        Self {
            given,
            file: file.and_then(|path| c(path.as_os_str().as_bytes())),
            limits: limit_files()
                .iter()
                .filter_map(|path| c(path.as_bytes()))
                .collect(),
            whole,
            looked: None,
            budget: given,
            wanted: given,
            trouble: None,
            told: false,
        }
    }

    /// Without files: the budget stays.
    pub fn fixed(given: u64) -> Self {
        Self {
            given,
            file: None,
            limits: Vec::new(),
            whole: 0,
            looked: None,
            budget: given,
            wanted: given,
            trouble: None,
            told: false,
        }
    }

    /// The budget as it was last seen.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// The budget to begin with: the least of what was given, what the file says, and the control groups'
    /// limits.
    ///
    /// # Errors
    /// The file is there, and can't be read or holds no size.
    pub fn begin(&mut self) -> Result<u64, Error> {
        let said = match self.said() {
            Ok(said) => said.unwrap_or(u64::MAX),
            Err(trouble) => return Err(Error::Usage(self.explain(trouble))),
        };
        self.wanted = self.given.min(said);
        self.budget = self.limited(self.wanted);
        Ok(self.budget)
    }

    /// The new budget, if it has changed. A file that is absent says nothing; what can't be understood leaves
    /// the budget as it is.
    pub fn look(&mut self) -> Option<u64> {
        if self.file.is_none() && self.limits.is_empty() {
            return None;
        }
        let asked = AGAIN.swap(false, Ordering::Relaxed);
        if !asked && self.looked.is_some_and(|looked| looked.elapsed() < EVERY) {
            return None;
        }
        self.looked = Some(Instant::now());
        let budget = match self.said() {
            Ok(said) => {
                (self.trouble, self.told) = (None, false);
                self.wanted = said.unwrap_or(self.given);
                self.wanted
            }
            // Who writes a file makes it empty first.
            Err(Trouble::Nonsense(_, 0)) => self.wanted,
            Err(trouble) => {
                self.trouble = Some(trouble);
                self.wanted
            }
        };
        let budget = self.limited(budget);
        (std::mem::replace(&mut self.budget, budget) != budget).then_some(budget)
    }

    /// Why the file isn't understood, in words: told once, until it has been understood again.
    pub fn take_trouble(&mut self) -> Option<String> {
        let trouble = self.trouble.filter(|_| !self.told)?;
        self.told = true;
        Some(self.explain(trouble))
    }

    /// What the file says; none where there is no file.
    fn said(&self) -> Result<Option<u64>, Trouble> {
        let Some(file) = &self.file else {
            return Ok(None);
        };
        let mut text = [0; TEXT];
        let len = match read(file, &mut text) {
            Ok(len) => len,
            Err(Errno::NOENT) => return Ok(None),
            Err(errno) => return Err(Trouble::Unreadable(errno)),
        };
        let size = std::str::from_utf8(&text[..len]).ok();
        let size = size.and_then(|text| parse_size(text.trim(), Some(self.whole)).ok());
        size.map(Some).ok_or(Trouble::Nonsense(text, len))
    }

    /// A budget within the control groups' limits.
    fn limited(&self, mut budget: u64) -> u64 {
        for limit in &self.limits {
            let mut text = [0; TEXT];
            let len = read(limit, &mut text).unwrap_or(0);
            let limit = std::str::from_utf8(&text[..len]).ok();
            let limit = limit.and_then(|text| text.trim().parse().ok());
            budget = budget.min(limit.unwrap_or(u64::MAX));
        }
        budget
    }

    fn explain(&self, trouble: Trouble) -> String {
        let file = self.file.as_deref().unwrap_or_default().to_string_lossy();
        match trouble {
            Trouble::Unreadable(errno) => {
                let why = std::io::Error::from(errno);
                format!("--budget-file {file}: cannot read it: {why}")
            }
            Trouble::Nonsense(text, len) => match std::str::from_utf8(&text[..len]) {
                Ok(text) => match parse_size(text.trim(), Some(self.whole)) {
                    Ok(size) => format!("--budget-file {file}: {size} bytes"),
                    Err(error) => format!("--budget-file {file}: {error}"),
                },
                Err(_) => format!("--budget-file {file}: what it holds isn't text"),
            },
        }
    }
}

/// The first line of a file, as far as there is room for it: its bytes.
fn read(path: &CString, text: &mut [u8; TEXT]) -> Result<usize, Errno> {
    let file = open(
        path.as_c_str(),
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )?;
    let len = rustix::io::read(&file, &mut text[..])?;
    let end = text[..len].iter().position(|byte| *byte == b'\n');
    Ok(end.unwrap_or(len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_decides_when_it_changes_and_nonsense_says_nothing() {
        let path = std::env::temp_dir().join(format!("leanstream-watch-{}", std::process::id()));
        let mut watch = Watch {
            limits: Vec::new(),
            ..Watch::new(1000, Some(&path), 4000)
        };
        let mut look = |text: Option<&str>| {
            match text {
                Some(text) => std::fs::write(&path, text).expect("a file"),
                None => drop(std::fs::remove_file(&path)),
            }
            AGAIN.store(true, Ordering::Relaxed);
            watch.look()
        };
        assert_eq!(look(None), None);
        assert_eq!(look(Some("2K\n")), Some(2048));
        assert_eq!(look(Some(" 2048 ")), None);
        assert_eq!(look(Some("25%\nand more")), Some(1000));
        assert_eq!(look(Some("much")), None);
        assert_eq!(look(Some("500")), Some(500));
        assert_eq!(look(Some("")), None);
        assert_eq!(look(Some("more")), None);
        assert_eq!(look(None), Some(1000));
        assert!(watch.begin().is_ok_and(|budget| budget == 1000));
        assert_eq!(watch.take_trouble(), None);
        for (text, says) in [(&b"much"[..], "'much'"), (b"\xff\xfe", "isn't text")] {
            std::fs::write(&path, text).expect("a file");
            let error = watch.begin().expect_err("no size").to_string();
            assert!(error.contains(says), "{error}");
            AGAIN.store(true, Ordering::Relaxed);
            assert_eq!(watch.look(), None);
            let told = watch.take_trouble();
            assert!(told.is_some_and(|told| told == error));
            AGAIN.store(true, Ordering::Relaxed);
            assert_eq!(watch.look(), None);
            assert_eq!(watch.take_trouble(), None, "it is told once");
            std::fs::write(&path, "1000").expect("a file");
            AGAIN.store(true, Ordering::Relaxed);
            assert_eq!(watch.look(), None);
        }
        std::fs::write(&path, "600").expect("a file");
        assert!(watch.begin().is_ok_and(|budget| budget == 600));
        std::fs::write(&path, "2000").expect("a file");
        assert!(watch.begin().is_ok_and(|budget| budget == 1000));
        std::fs::remove_file(&path).expect("it is there");
        let directory = Watch::new(1000, Some(&std::env::temp_dir()), 4000).begin();
        let error = directory.expect_err("a directory").to_string();
        assert!(error.contains("cannot read it"), "{error}");
    }
}
