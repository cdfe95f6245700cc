//! The program as scripts see it: exit codes, what goes to stdout, what is said on stderr.

#[path = "../common/mod.rs"]
mod common;

mod bench_packed;
mod bench_trace;
mod budget;
mod commands;
mod errors;
mod json;
mod outputs;
mod run;
mod scripts;
mod trace;
mod tune;
mod tune_budget;
mod tune_damaged;
mod tune_memory;
mod usage;
