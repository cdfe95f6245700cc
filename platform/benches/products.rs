//! How fast the products of training are: `cargo bench --bench products -- [filter ...]`.
//!
//! For each type, shape and direction: floating-point operations a second with [`TOKENS`] tokens, on one
//! thread and on all, beside the ceiling: fused multiply-adds on registers alone. A line is measured
//! when it contains, for every filter, one of the filter's comma-separated parts.

use std::hint::black_box;
use std::time::Instant;

use leanstream::cpu::vector::Vector;
use leanstream::cpu::{Isa, Kernels, Rows};
use leanstream::tune::gemm::{Mat, MatMut, Products, product_in};
use leanstream::tune::team::{Sheet, Team};
use leanstream_core::quant::QuantType;

/// Tokens of a product.
const TOKENS: usize = 512;
/// (out, in)
const SHAPES: [(usize, usize); 5] = [
    (576, 1536),
    (1536, 576),
    (192, 576),
    (2048, 2048),
    (4096, 640),
];
/// Types that are measured.
const TYPES: [QuantType; 9] = [
    QuantType::F32,
    QuantType::F16,
    QuantType::Q4_0,
    QuantType::Q4_1,
    QuantType::Q5_0,
    QuantType::Q8_0,
    QuantType::Q4_K,
    QuantType::Q5_K,
    QuantType::Q6_K,
];
/// Tiles of attention a thread computes in a call.
const TILES: usize = 100;
/// Rank of an adapter.
const RANK: usize = 16;
/// Seconds a line takes, about.
const SECONDS: f64 = 0.1;

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
    let vector = Vector::beside(&kernels);
    println!("instruction set: {}", vector.isa());
    let all = std::thread::available_parallelism().map_or(1, usize::from);
    let mut counts = vec![1, all];
    counts.dedup();
    for threads in counts {
        let team = Team::new(threads).expect("threads");
        let products = Products::new(vector, threads);
        let ceiling = rate(1.0, || {
            team.each(threads, &|_, _| {
                black_box(peak(vector.isa()));
            });
        }) * threads as f64
            * peak(vector.isa());
        println!("multiply-adds {threads}t: {:.1} GFLOP/s", ceiling / 1e9);
        let report = |line: String, flops: f64, f: &mut dyn FnMut()| {
            if wanted(&line) {
                let speed = rate(flops, f);
                println!(
                    "{line}: {:.1} GFLOP/s, {:.0} %",
                    speed / 1e9,
                    100.0 * speed / ceiling
                );
            }
        };
        for ty in TYPES {
            for (outs, ins) in SHAPES {
                let Some(row_bytes) = ty.row_bytes(ins) else {
                    continue;
                };
                let bytes = vec![0x3c; outs * row_bytes];
                let w = Rows {
                    ty,
                    cols: ins,
                    bytes: &bytes,
                };
                let (x, mut y) = (vec![0.5; TOKENS * ins], vec![0.5; TOKENS * outs]);
                let flops = (2 * TOKENS * ins * outs) as f64;
                let name = ty.name();
                report(
                    format!("{name} forward {outs}x{ins} {threads}t"),
                    flops,
                    &mut || products.forward(&team, w, &x, &mut y, false),
                );
                let (dy, mut dx) = (y, x);
                report(
                    format!("{name} backward {outs}x{ins} {threads}t"),
                    flops,
                    &mut || products.backward(&team, w, &dy, &mut dx, true),
                );
            }
        }
        // A tile of attention on each thread: queries times keys, then weights times values.
        for head_dim in [64, 128] {
            let tile = vec![0.5; 64 * head_dim];
            let (tile, weights) = (Mat::new(&tile, 64, head_dim), vec![0.5; 64 * 64]);
            let mut outs = vec![vec![0.5; 64 * head_dim.max(64)]; threads];
            for scores in [true, false] {
                let what = if scores { "q k^T" } else { "p v" };
                report(
                    format!("product_in {what} 64x{head_dim} {threads}t"),
                    (2 * 64 * 64 * head_dim * TILES * threads) as f64,
                    &mut || {
                        let width = outs[0].len();
                        let mut all = outs.concat();
                        let sheet = Sheet {
                            data: &mut all,
                            row: width,
                        };
                        team.rows([sheet], 1, |_, [out], thread| {
                            let mut scratch = products.scratch(thread);
                            for _ in 0..TILES {
                                if scores {
                                    let c = MatMut::new(out, 64, 64);
                                    product_in(vector, &mut scratch, tile, tile.t(), 1.0, c, false);
                                } else {
                                    let p = Mat::new(&weights, 64, 64);
                                    let c = MatMut::new(out, 64, head_dim);
                                    product_in(vector, &mut scratch, p, tile, 1.0, c, true);
                                }
                            }
                        });
                        outs[0][0] = all[0];
                    },
                );
            }
        }
        for (outs, ins) in SHAPES {
            let (x, dy) = (vec![0.5; TOKENS * ins], vec![0.5; TOKENS * outs]);
            let (x, dy) = (Mat::new(&x, TOKENS, ins), Mat::new(&dy, TOKENS, outs));
            let flops = |inner: usize| (2 * TOKENS * inner) as f64;
            let mut dw = vec![0.5; outs * ins];
            report(
                format!("product dW {outs}x{ins} {threads}t"),
                flops(ins * outs),
                &mut || {
                    let dw = MatMut::new(&mut dw, outs, ins);
                    products.product(&team, dy.t(), x, 1.0, dw, true);
                },
            );
            let (a, b) = (vec![0.5; RANK * ins], vec![0.5; outs * RANK]);
            let (a, b) = (Mat::new(&a, RANK, ins), Mat::new(&b, outs, RANK));
            let mut low = vec![0.5; TOKENS * RANK];
            report(
                format!("product x A^T {RANK}x{ins} {threads}t"),
                flops(ins * RANK),
                &mut || {
                    let low = MatMut::new(&mut low, TOKENS, RANK);
                    products.product(&team, x, a.t(), 1.0, low, false);
                },
            );
            let mut y = vec![0.5; TOKENS * outs];
            let low = Mat::new(&low, TOKENS, RANK);
            report(
                format!("product u B^T {outs}x{RANK} {threads}t"),
                flops(outs * RANK),
                &mut || {
                    let y = MatMut::new(&mut y, TOKENS, outs);
                    products.product(&team, low, b.t(), 1.0, y, true);
                },
            );
            let mut db = vec![0.5; outs * RANK];
            report(
                format!("product dB {outs}x{RANK} {threads}t"),
                flops(outs * RANK),
                &mut || {
                    let db = MatMut::new(&mut db, outs, RANK);
                    products.product(&team, dy.t(), low, 1.0, db, true);
                },
            );
        }
    }
}

/// What `f` does a second, when one call does `work`: the best of several stretches.
fn rate(work: f64, mut f: impl FnMut()) -> f64 {
    f();
    let (begin, mut best) = (Instant::now(), 0.0f64);
    while begin.elapsed().as_secs_f64() < SECONDS {
        let (start, mut calls) = (Instant::now(), 0);
        while calls == 0 || start.elapsed().as_secs_f64() < SECONDS / 10.0 {
            f();
            calls += 1;
        }
        best = best.max(f64::from(calls) * work / start.elapsed().as_secs_f64());
    }
    best
}

/// Rounds of the ceiling's loop.
const ROUNDS: usize = 100_000;

/// Multiply-adds on registers; returns how many floating-point operations that was.
fn peak(isa: Isa) -> f64 {
    /// A function of $sums chains of the instruction set's widest multiply-add.
    #[cfg(target_arch = "x86_64")]
    macro_rules! chains {
        ($features:literal, $set:ident, $fma:ident, $sums:literal, $lanes:literal) => {{
            #[target_feature(enable = $features)]
            fn run() -> f64 {
                use std::arch::x86_64::*;
                let (a, b) = (black_box($set(0.5)), black_box($set(0.25)));
                let mut sums = [$set(1.0); $sums];
                for _ in 0..ROUNDS {
                    for sum in &mut sums {
                        *sum = $fma(a, *sum, b);
                    }
                }
                black_box(sums);
                (2 * $lanes * $sums * ROUNDS) as f64
            }
            // SAFETY: the caller's instruction set was seen to be there.
            unsafe { run() }
        }};
    }
    match isa {
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => chains!("avx512f", _mm512_set1_ps, _mm512_fmadd_ps, 16, 16),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 | Isa::AvxVnni => chains!("avx2,fma", _mm256_set1_ps, _mm256_fmadd_ps, 12, 8),
        _ => {
            let (a, b) = (black_box(0.5f32), black_box(0.25f32));
            let mut sums = [1.0f32; 64];
            for _ in 0..ROUNDS {
                for sum in &mut sums {
                    *sum = if cfg!(target_arch = "aarch64") {
                        a.mul_add(*sum, b)
                    } else {
                        a * *sum + b
                    };
                }
            }
            black_box(sums);
            (2 * 64 * ROUNDS) as f64
        }
    }
}
