//! How fast the CPU kernels are: `cargo bench --bench kernels -- [filter ...]`.
//!
//! For each type, shape and number of threads: bytes of weights per second through `matvec`, over
//! more weights than the last-level cache holds; multiply-adds per second through `matmul`. A line
//! is measured when it contains, for every filter, one of the filter's comma-separated parts.
//! The first lines are the ceiling: how fast the same threads can merely read. The last are the
//! sparse path's: neurons scattered over memory, [`NEURONS`] a call.

use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

use leanstream::cpu::units::{Columns, Stored, Term, UnitKernels};
use leanstream::cpu::{Act, Kernels, OutTile, Rows, Scratch};
use leanstream_core::quant::QuantType;

/// (rows, columns)
const SHAPES: [(usize, usize); 3] = [(576, 1536), (640, 2048), (3072, 8192)];
/// Bytes of weights a thread cycles through in `matvec`.
const FOOTPRINT: usize = 256 << 20;
/// Tokens of a `matmul`.
const TOKENS: usize = 256;
/// Neurons of a call on the sparse path.
const NEURONS: usize = 30;
/// Source blocks of 32 neurons: rows of scales.
const BLOCKS: usize = 48;
/// Rows of a head.
const HEAD: usize = 262_144;
/// Seconds a line takes, about.
const SECONDS: f64 = 0.15;

fn main() {
    let filters: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| a != "--bench")
        .collect();
    let wanted = |line: &str| {
        filters
            .iter()
            .all(|f| f.split(',').any(|part| line.contains(part)))
    };
    let kernels = match Kernels::from_env() {
        Ok(kernels) => kernels,
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(2);
        }
    };
    println!("instruction set: {}", kernels.isa());
    let memory = memory();
    for threads in [1, 2] {
        if wanted(&format!("read {threads}t")) {
            let bytes = run(threads, |i| read(&memory[i]));
            println!("read {threads}t: {:.1} GB/s", bytes / 1e9);
        }
    }
    for ty in QuantType::ALL {
        for (rows, cols) in SHAPES {
            if ty.row_bytes(cols).is_none() {
                continue;
            }
            for threads in [1, 2] {
                let line = format!("{} matvec {rows}x{cols} {threads}t", ty.name());
                if wanted(&line) {
                    let bytes = run(threads, |i| matvec(kernels, &memory[i], ty, rows, cols));
                    let macs = bytes / ty.row_bytes(cols).unwrap_or(1) as f64 * cols as f64;
                    println!("{line}: {:.1} GB/s {:.1} GMAC/s", bytes / 1e9, macs / 1e9);
                }
                let line = format!("{} matmul {rows}x{cols} {threads}t", ty.name());
                if wanted(&line) {
                    let macs = run(threads, |i| matmul(kernels, &memory[i], ty, rows, cols));
                    println!("{line}: {:.1} GMAC/s", macs / 1e9);
                }
            }
        }
    }
    sparse(kernels, &memory, &wanted);
}

/// The lines of the sparse path.
fn sparse(kernels: Kernels, memory: &[Vec<u8>; 2], wanted: &dyn Fn(&str) -> bool) {
    let columns = [
        ("Q8_0", Stored::Moved8, 576),
        ("Q4_0", Stored::Moved4, 4096),
        ("Q8_0 row", Stored::Row(QuantType::Q8_0), 576),
    ];
    let rows = [(QuantType::Q8_0, 576), (QuantType::Q4_0, 4096)];
    for threads in [1, 2] {
        let show = |line: String, size: usize, bytes: &dyn Fn() -> f64| {
            if wanted(&line) {
                let bytes = bytes();
                let ns = (threads * size) as f64 / bytes * 1e9;
                println!("{line}: {:.1} GB/s {ns:.1} ns a neuron", bytes / 1e9);
            }
        };
        for (name, stored, d) in columns {
            let size = stored.bytes(d).expect("whole blocks");
            show(format!("{name} columns_add {d} {threads}t"), size, &|| {
                run(threads, |i| columns_add(kernels, &memory[i], stored, d))
            });
        }
        for (ty, cols) in rows {
            let size = ty.row_bytes(cols).expect("whole blocks");
            show(format!("{ty} rows_dot {cols} {threads}t"), size, &|| {
                run(threads, |i| rows_dot(kernels, &memory[i], ty, cols))
            });
        }
        show(format!("above {HEAD} {threads}t"), 8, &|| {
            run(threads, |_| above(kernels))
        });
    }
}

/// Weights for each thread. Bytes from 32 to 63: whatever number they are part of, it is neither
/// subnormal, which takes processors longer, nor infinite.
fn memory() -> [Vec<u8>; 2] {
    std::array::from_fn(|thread| {
        let mut bits = 0x9e37_79b9_7f4a_7c15 + thread as u64;
        (0..FOOTPRINT / 8)
            .flat_map(|_| {
                bits ^= bits << 13;
                bits ^= bits >> 7;
                bits ^= bits << 17;
                (bits & 0x1f1f_1f1f_1f1f_1f1f | 0x2020_2020_2020_2020).to_le_bytes()
            })
            .collect()
    })
}

/// Runs what `make` makes for each thread, again and again; the sum of work a second.
fn run<F: FnMut() -> f64>(threads: usize, make: impl Fn(usize) -> F + Sync) -> f64 {
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let handles: Vec<_> = (0..threads)
            .map(|thread| {
                let (make, barrier) = (&make, &barrier);
                scope.spawn(move || {
                    let mut step = make(thread);
                    step();
                    barrier.wait();
                    let (start, mut work) = (Instant::now(), 0.0);
                    while start.elapsed().as_secs_f64() < SECONDS {
                        work += step();
                    }
                    work / start.elapsed().as_secs_f64()
                })
            })
            .collect();
        handles
            .into_iter()
            .map(|h| h.join().expect("no panic"))
            .sum()
    })
}

/// Reads 16 MiB a step, cycling through `memory`; the work is bytes.
fn read(memory: &[u8]) -> impl FnMut() -> f64 {
    let (words, _) = memory.as_chunks::<8>();
    let mut parts = words.chunks(2 << 20).cycle();
    move || {
        let part = parts.next().expect("memory isn't empty");
        black_box(
            part.iter()
                .fold(0, |sum, &word| sum ^ u64::from_ne_bytes(word)),
        );
        (part.len() * 8) as f64
    }
}

/// Activations of some tokens.
struct Acts {
    x: Vec<f32>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i16>,
}

impl Acts {
    fn new(kernels: Kernels, n: usize) -> Self {
        let x: Vec<f32> = (0..n)
            .map(|i| ((i * 7919) % 1009) as f32 / 500.0 - 1.0)
            .collect();
        let (mut codes, mut scales, mut sums) = (vec![0; n], vec![0.0; n / 32], vec![0; n / 16]);
        kernels.quantize(&x, &mut codes, &mut scales, &mut sums);
        Self {
            x,
            codes,
            scales,
            sums,
        }
    }

    fn act(&self, cols: usize) -> Act<'_> {
        Act {
            cols,
            tokens: self.x.len() / cols,
            x: &self.x,
            codes: &self.codes,
            scales: &self.scales,
            sums: &self.sums,
        }
    }
}

/// One matrix a step, each time the next of `memory`; the work is bytes of weights.
fn matvec(
    kernels: Kernels,
    memory: &[u8],
    ty: QuantType,
    rows: usize,
    cols: usize,
) -> impl FnMut() -> f64 {
    let size = rows * ty.row_bytes(cols).expect("whole blocks");
    let acts = Acts::new(kernels, cols);
    let mut out = vec![0.0; rows];
    let mut matrices = memory.chunks_exact(size).cycle();
    move || {
        let bytes = matrices.next().expect("memory holds a matrix");
        kernels.matvec(&Rows { ty, cols, bytes }, &acts.act(cols), false, &mut out);
        black_box(&mut out);
        size as f64
    }
}

/// One matrix times [`TOKENS`] tokens a step; the work is multiply-adds.
fn matmul(
    kernels: Kernels,
    memory: &[u8],
    ty: QuantType,
    rows: usize,
    cols: usize,
) -> impl FnMut() -> f64 {
    // Slices of a big matrix, so that a step is short; the weights come from memory all the same.
    let rows = rows.min(320);
    let size = rows * ty.row_bytes(cols).expect("whole blocks");
    let acts = Acts::new(kernels, TOKENS * cols);
    let mut out = vec![0.0; rows * TOKENS];
    let mut scratch = Scratch::for_cols(cols);
    let mut matrices = memory.chunks_exact(size).cycle();
    move || {
        let bytes = matrices.next().expect("memory holds a matrix");
        let tile = OutTile::new(&mut out, rows);
        kernels.matmul(
            &Rows { ty, cols, bytes },
            &acts.act(cols),
            false,
            tile,
            &mut scratch,
        );
        black_box(&mut out);
        (rows * cols * TOKENS) as f64
    }
}

/// Pieces of `size` bytes, in an order that no prefetcher foresees.
fn scattered(memory: &[u8], size: usize) -> impl Iterator<Item = &[u8]> {
    let pieces = memory.len() / size;
    let mut at = 0;
    std::iter::repeat_with(move || {
        at = (at + 7919 * 31) % pieces;
        &memory[at * size..][..size]
    })
}

/// [`NEURONS`] columns a step; the work is bytes of columns, without their scales.
fn columns_add(kernels: Kernels, memory: &[u8], stored: Stored, d: usize) -> impl FnMut() -> f64 {
    let units = UnitKernels::beside(&kernels);
    let size = stored.bytes(d).expect("whole blocks");
    let apart = !matches!(stored, Stored::Row(_));
    let scales: Vec<u16> = (0..BLOCKS * d)
        .map(|i| 0x2000 + (i * 7919 % 0x1000) as u16)
        .collect();
    let mut pieces = scattered(memory, size);
    let mut y = vec![0.0; d];
    move || {
        let columns = Columns::new(stored, d, if apart { &scales } else { &[] }, &[]);
        let terms = (&mut pieces)
            .take(NEURONS)
            .enumerate()
            .map(|(i, bytes)| Term {
                bytes,
                block: i * BLOCKS / NEURONS,
                a: 1e-3,
            });
        units.columns_add(&columns, terms, 0, &mut y);
        black_box(&mut y);
        (NEURONS * size) as f64
    }
}

/// [`NEURONS`] rows a step; the work is their bytes.
fn rows_dot(kernels: Kernels, memory: &[u8], ty: QuantType, cols: usize) -> impl FnMut() -> f64 {
    let units = UnitKernels::beside(&kernels);
    let size = ty.row_bytes(cols).expect("whole blocks");
    let acts = Acts::new(kernels, cols);
    let mut pieces = scattered(memory, size);
    let mut out = [0.0; NEURONS];
    move || {
        let rows = (&mut pieces).take(NEURONS);
        units.rows_dot(rows, ty, &acts.act(cols), false, &mut out);
        black_box(&mut out);
        (NEURONS * size) as f64
    }
}

/// One head a step, of which no row reaches the threshold; the work is bytes.
fn above(kernels: Kernels) -> impl FnMut() -> f64 {
    let units = UnitKernels::beside(&kernels);
    let (estimate, error) = (vec![0.5; HEAD], vec![0.25; HEAD]);
    let mut rows = [0; 64];
    move || {
        let (estimate, error) = (black_box(&estimate), black_box(&error));
        black_box(units.above(estimate, error, 1.0, 1.0, 0, &mut rows));
        (8 * HEAD) as f64
    }
}
