//! Options of storage and threads that every command with a model has.

use std::fmt::Display;
use std::thread;

use crate::error::Error;
use crate::io::fault::FaultPlan;
use crate::io::throttle::Limits;
use crate::io::{self, Direct};

/// The options as they were given.
#[derive(Clone, Copy)]
pub struct Storage<'a> {
    /// Name of the backend.
    pub io: Option<&'a str>,
    /// Through the page cache.
    pub buffered: bool,
    /// Throttle.
    pub throttle: Option<&'a str>,
    /// Faults.
    pub fault: Option<&'a str>,
}

impl Storage<'_> {
    /// How to read.
    ///
    /// # Errors
    /// An option that can't be understood.
    pub fn options(&self) -> Result<(Direct, io::Options), Error> {
        let kind = match self.io {
            None | Some("auto") => io::Kind::Auto,
            Some("uring") => io::Kind::Uring,
            Some("pread") => io::Kind::Pread,
            Some(other) => {
                return Err(usage(
                    "--io",
                    &format_args!("'{other}' is not a way to read; auto, uring or pread"),
                ));
            }
        };
        let direct = if self.buffered {
            Direct::Off
        } else {
            Direct::Auto
        };
        let options = io::Options {
            kind,
            throttle: self
                .throttle
                .map(Limits::parse)
                .transpose()
                .map_err(|e| usage("--throttle-read", &e))?,
            faults: self
                .fault
                .map(FaultPlan::parse)
                .transpose()
                .map_err(|e| usage("--fault", &e))?,
            ..io::Options::default()
        };
        Ok((direct, options))
    }
}

/// How many threads, one a core where nothing is said.
pub fn threads(given: Option<u32>) -> u32 {
    given.unwrap_or_else(|| thread::available_parallelism().map_or(1, |n| n.get() as u32))
}

fn usage(name: &str, why: &dyn Display) -> Error {
    Error::Usage(format!("{name}: {why}"))
}
