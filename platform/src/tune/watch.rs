//! The budget while training runs: a file that somebody rewrites, SIGUSR1, and the limits of control
//! groups. Looked at between layers; allocates nothing.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, open};

use crate::budget::{limit_files, parse_size};
use crate::error::Error;
use crate::signals::AGAIN;

/// How often files are looked at.
const EVERY: Duration = Duration::from_millis(50);

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
        }
    }

    /// The budget as it was last seen.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Checks the file once, loudly.
    ///
    /// # Errors
    /// It is there, and holds no size.
    pub fn check(&self) -> Result<(), Error> {
        let mut text = [0; 64];
        let Some(text) = self.file.as_ref().and_then(|file| read(file, &mut text)) else {
            return Ok(());
        };
        match parse_size(text, Some(self.whole)) {
            Ok(_) => Ok(()),
            Err(error) => Err(Error::Usage(format!("--budget-file: {error}"))),
        }
    }

    /// The new budget, if it has changed. A file that is absent or can't be understood says nothing.
    pub fn look(&mut self) -> Option<u64> {
        if self.file.is_none() && self.limits.is_empty() {
            return None;
        }
        let asked = AGAIN.swap(false, Ordering::Relaxed);
        if !asked && self.looked.is_some_and(|looked| looked.elapsed() < EVERY) {
            return None;
        }
        self.looked = Some(Instant::now());
        let mut text = [0; 64];
        let mut budget = self
            .file
            .as_ref()
            .and_then(|file| read(file, &mut text))
            .and_then(|text| parse_size(text, Some(self.whole)).ok())
            .unwrap_or(self.given);
        for limit in &self.limits {
            let mut text = [0; 64];
            let limit = read(limit, &mut text).and_then(|text| text.parse::<u64>().ok());
            budget = budget.min(limit.unwrap_or(u64::MAX));
        }
        (std::mem::replace(&mut self.budget, budget) != budget).then_some(budget)
    }
}

/// The first line of a file, without spaces around it.
fn read<'a>(path: &CString, text: &'a mut [u8; 64]) -> Option<&'a str> {
    let file = open(
        path.as_c_str(),
        OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK,
        Mode::empty(),
    )
    .ok()?;
    let len = rustix::io::read(&file, &mut text[..]).ok()?;
    let line = text[..len].split(|byte| *byte == b'\n').next()?;
    Some(std::str::from_utf8(line).ok()?.trim())
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
        assert_eq!(look(Some("")), Some(1000));
        assert_eq!(look(None), None);
        std::fs::write(&path, "much").expect("a file");
        assert!(watch.check().is_err());
        std::fs::remove_file(&path).expect("it is there");
        assert!(watch.check().is_ok());
    }
}
