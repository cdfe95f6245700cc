//! Any bytes as a page pool and a storm of operations on it: see the interpreter.

#![no_main]

#[path = "../../tests/common/act.rs"]
mod act;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| act::run(data));
