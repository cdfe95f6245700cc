//! Reading a file of text in pieces: plain text as it comes, JSONL by the line.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use serde_json::{Map, Value};

use super::items::Builder;
use crate::error::Error;
use crate::signals;

/// Bytes read at once.
const PART: usize = 64 << 10;

/// Longest line of JSONL.
const LINE_MAX: usize = 64 << 20;

/// How often a wait for input looks whether a signal came.
const SIGNAL_CHECK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// What comes before a text in some files and isn't part of it.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// An open file and what of it has been read but not used.
struct Input<'a> {
    path: &'a Path,
    file: OwnedFd,
    pending: Vec<u8>,
    part: Vec<u8>,
}

impl<'a> Input<'a> {
    fn open(path: &'a Path) -> Result<Self, Error> {
        // Without waiting for a pipe's writer, which would be deaf to signals.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let file = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|error| Error::io(path, "open it", error.into()))?;
        Ok(Self {
            path,
            file,
            pending: Vec::new(),
            part: vec![0; PART],
        })
    }

    /// Appends to what is pending; false at the end.
    fn more(&mut self) -> Result<bool, Error> {
        loop {
            signals::check()?;
            let mut ready = [PollFd::new(&self.file, PollFlags::IN)];
            match poll(&mut ready, Some(&SIGNAL_CHECK)) {
                Ok(0) | Err(Errno::INTR) => continue,
                // Whatever else is wrong with it, reading tells.
                _ => {}
            }
            match rustix::io::read(&self.file, &mut self.part[..]) {
                Ok(0) => return Ok(false),
                Ok(n) => {
                    self.pending.extend_from_slice(&self.part[..n]);
                    return Ok(true);
                }
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(Error::io(self.path, "read it", error.into())),
            }
        }
    }
}

/// Reads a file into `builder`.
pub(super) fn file(path: &Path, builder: &mut Builder<'_>) -> Result<(), Error> {
    let mut input = Input::open(path)?;
    while input.pending.len() < PART && input.more()? {}
    if input.pending.starts_with(BYTE_ORDER_MARK) {
        input.pending.drain(..BYTE_ORDER_MARK.len());
    }
    match kind(path, &input.pending) {
        Kind::Lines => lines(input, builder),
        Kind::Text => plain(input, builder),
        Kind::Array => Err(builder.fail(
            "it is one JSON value, not text or JSONL: write one object a line, {\"text\": ...} or \
             {\"prompt\": ..., \"completion\": ...}",
        )),
    }
}

enum Kind {
    Text,
    Lines,
    /// JSON, but of another shape.
    Array,
}

/// By the name, or by a first line that is an object of ours.
fn kind(path: &Path, start: &[u8]) -> Kind {
    let ends = |name: &str| {
        path.extension()
            .is_some_and(|e| e.eq_ignore_ascii_case(name))
    };
    let first = start
        .split(|&b| b == b'\n')
        .find(|line| !line.trim_ascii().is_empty())
        .unwrap_or_default();
    let ours = first.trim_ascii_start().starts_with(b"{")
        && serde_json::from_slice::<Map<String, Value>>(first)
            .is_ok_and(|map| map.contains_key("text") || map.contains_key("prompt"));
    if ours || ends("jsonl") || ends("ndjson") {
        Kind::Lines
    } else if ends("json") {
        Kind::Array
    } else {
        Kind::Text
    }
}

fn plain(mut input: Input<'_>, builder: &mut Builder<'_>) -> Result<(), Error> {
    // Bytes and lines before what is pending.
    let (mut bytes, mut lines) = (0, 0);
    loop {
        let end = !input.more()?;
        let valid = match str::from_utf8(&input.pending) {
            Ok(text) => text,
            // A character may go on in the next part.
            Err(error) if error.error_len().is_none() && !end => {
                let (valid, _) = input.pending.split_at(error.valid_up_to());
                str::from_utf8(valid).expect("it was just checked")
            }
            Err(error) => {
                let at = error.valid_up_to();
                let line = lines + newlines(&input.pending[..at]) + 1;
                return Err(builder.fail(format_args!(
                    "line {line}, byte {}: it isn't UTF-8; convert it (iconv -f latin1 -t utf8), or choose a text file",
                    bytes + at as u64
                )));
            }
        };
        let used = builder.text(valid, false, end)?;
        bytes += used as u64;
        lines += newlines(&input.pending[..used]);
        input.pending.drain(..used);
        if end {
            builder.end_text(false)?;
            return Ok(());
        }
    }
}

fn newlines(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|&&b| b == b'\n').count() as u64
}

fn lines(mut input: Input<'_>, builder: &mut Builder<'_>) -> Result<(), Error> {
    let mut number = 0;
    // How much of what is pending has no line's end.
    let mut searched = 0;
    loop {
        let mut used = 0;
        while let Some(at) = input.pending[searched..].iter().position(|&b| b == b'\n') {
            number += 1;
            line(&input.pending[used..searched + at], number, builder)?;
            searched += at + 1;
            used = searched;
        }
        input.pending.drain(..used);
        searched = input.pending.len();
        if searched > LINE_MAX {
            return Err(builder.fail(format_args!(
                "line {} is longer than {LINE_MAX} bytes; cut it into several",
                number + 1
            )));
        }
        if !input.more()? {
            return line(&input.pending, number + 1, builder);
        }
    }
}

/// One line of JSONL; blank ones are skipped.
fn line(bytes: &[u8], number: u64, builder: &mut Builder<'_>) -> Result<(), Error> {
    let bytes = bytes.trim_ascii();
    if bytes.is_empty() {
        return Ok(());
    }
    let text = str::from_utf8(bytes).map_err(|error| {
        builder.fail(format_args!(
            "line {number}, byte {} of it: it isn't UTF-8; convert the file (iconv -f latin1 -t utf8)",
            error.valid_up_to()
        ))
    })?;
    let value: Value = serde_json::from_str(text).map_err(|error| {
        let why = error.to_string();
        // Its line is always the first.
        let why = why.split(" at line ").next().unwrap_or_default();
        builder.fail(format_args!(
            "line {number}, column {}: it isn't JSON: {why}",
            error.column()
        ))
    })?;
    let field = |key: &str| match value.get(key) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.as_str())),
        Some(_) => Err(builder.fail(format_args!("line {number}: \"{key}\" is not a string"))),
    };
    match (field("text")?, field("prompt")?, field("completion")?) {
        (Some(text), None, None) => {
            builder.text(text, true, true)?;
            if !builder.end_text(true)? {
                return Err(builder.fail(format_args!("line {number}: its text is empty; remove the line")));
            }
            Ok(())
        }
        (None, Some(prompt), Some(completion)) => builder.pair(number, prompt, completion),
        _ => Err(builder.fail(format_args!(
            "line {number}: it must be an object with \"text\", or with \"prompt\" and \"completion\""
        ))),
    }
}
