//! The `leanstream` binary.
fn main() {}
