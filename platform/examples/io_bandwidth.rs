//! What the storage under a file gives: MB/s and thousands of reads a second by size, depth and order.
//!
//!     cargo run --release --example io_bandwidth -- MODEL

use std::sync::Arc;
use std::time::Duration;

use leanstream::io::probe::{self, Order};
use leanstream::io::{Direct, Options, Source};

const TIME: Duration = Duration::from_millis(1000);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let path = std::env::args_os()
        .nth(1)
        .ok_or("usage: io_bandwidth FILE")?;
    let source = Arc::new(Source::open(&[path], Direct::Auto)?);
    println!("| order | KiB | reads in flight | MB/s | 1000 reads/s | |");
    println!("|---|---:|---:|---:|---:|---|");
    for order in [Order::Scattered, Order::Sequential] {
        for kib in [4u32, 8, 16, 64, 256, 1024] {
            for depth in [1, 8, 32, 64] {
                let options = Options {
                    depth,
                    ..Options::default()
                };
                let found = probe::bandwidth(&source, &options, kib << 10, order, TIME)?;
                let mb = found.bytes_per_s() / 1e6;
                let reads = found.bytes_per_s() / f64::from(kib << 10) / 1e3;
                println!(
                    "| {order:?} | {kib} | {depth} | {mb:.0} | {reads:.1} | {} |",
                    found.io_mode
                );
            }
        }
    }
    Ok(())
}
