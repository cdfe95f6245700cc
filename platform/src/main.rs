//! The `leanstream` binary.

use leanstream::alloc::Counting;
use leanstream::{cli, signals};

/// Counts what the sealed loops allocate: nothing.
#[global_allocator]
static ALLOCATOR: Counting = Counting::new();

fn main() {
    signals::listen();
    let code = cli::main(std::env::args_os().skip(1), &ALLOCATOR);
    std::process::exit(code);
}
