//! Any bytes as a plan, a memory and a sequence of events: see the interpreter.

#![no_main]

#[path = "../../tests/common/mod.rs"]
mod common;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| common::ops::run(data));
