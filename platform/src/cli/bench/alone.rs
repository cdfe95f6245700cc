//! A benchmark of one row: its test takes the place of the process that was asked for it. A control group
//! of the budget has no room for two.

use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::not_started;
use crate::error::Error;
use crate::signals;

/// Given to the test's process: what the one before found, as JSON.
const ALONE: &str = "LEANSTREAM_BENCH_ALONE";

/// What a test's process can't know by itself.
pub(super) struct Known {
    /// Of the storage, in bytes per second.
    pub bandwidth: f64,
    /// The trace that its active neurons come from, for scripts.
    pub trace: Option<Value>,
}

impl Known {
    /// What the process was given before it became a test; `None` where another one waits for it.
    pub fn take() -> Option<Self> {
        let given = std::env::var(ALONE).ok()?;
        let given: Value = serde_json::from_str(&given).ok()?;
        // They were held while the process became this one.
        signals::release();
        Some(Self {
            bandwidth: given["bandwidth"].as_f64()?,
            trace: Some(given["trace"].clone()).filter(|trace| !trace.is_null()),
        })
    }

    /// Becomes the process that `command` would start; returns where it can't.
    pub fn become_test(&self, mut command: Command) -> Error {
        if let Err(stopped) = signals::check() {
            return stopped;
        }
        // A signal that comes while nobody listens is kept for the test.
        signals::hold();
        let known = json!({ "bandwidth": self.bandwidth, "trace": self.trace });
        let error = command
            .stdin(Stdio::null())
            .env(ALONE, known.to_string())
            .exec();
        signals::release();
        not_started(error)
    }
}
