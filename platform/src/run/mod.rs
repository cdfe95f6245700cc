//! What a running model keeps between tokens, and the operations that depend on positions.

pub mod kv;
pub mod rope;
