//! How fast the operations of a training step are, a layer of a model at a time:
//! `cargo run --release --example tune_ops -- [tokens [threads]]`.
//!
//! Multiply-adds that a causal mask spares don't count as work. The first line is the ceiling: a product
//! of f32 matrices of the same depth.

use std::time::Instant;

use leanstream::cpu::Kernels;
use leanstream::cpu::vector::Vector;
use leanstream::run::rope::RopeParams;
use leanstream::tune::gemm::{Mat, MatMut, Products};
use leanstream::tune::ops::{
    Angles, AttentionShape, Direction, Dropout, activate, activate_backward, attention,
    attention_backward, cross_entropy, dropout, rms_norm, rms_norm_backward,
};
use leanstream::tune::optim::{AdamW, Moments, Precision, Update};
use leanstream::tune::team::Team;
use leanstream_core::act::codec::Counter;
use leanstream_core::plan::{Activation, RopeStyle};

/// Seconds a line takes, about.
const SECONDS: f64 = 0.3;
/// Tokens whose logits exist at once.
const LOGITS: usize = 32;

struct Model {
    name: &'static str,
    d: usize,
    ff: usize,
    vocab: usize,
    act: Activation,
    shape: AttentionShape,
}

const MODELS: [Model; 2] = [
    Model {
        name: "SmolLM2 135M",
        d: 576,
        ff: 1536,
        vocab: 49_152,
        act: Activation::Silu,
        shape: AttentionShape {
            heads: 9,
            kv_heads: 3,
            head_dim: 64,
            window: None,
            scale: 0.125,
        },
    },
    Model {
        name: "Gemma 3 270M",
        d: 640,
        ff: 2048,
        vocab: 262_144,
        act: Activation::Gelu,
        shape: AttentionShape {
            heads: 4,
            kv_heads: 1,
            head_dim: 256,
            window: Some(512),
            scale: 0.0625,
        },
    },
];

fn main() {
    let number = |n: usize, usual: usize| {
        std::env::args()
            .nth(n)
            .map_or(usual, |arg| arg.parse().expect("a number"))
    };
    let (tokens, threads) = (number(1, 512), number(2, 1));
    let kernels = Kernels::from_env().expect("an instruction set of this machine");
    let v = Vector::beside(&kernels);
    let team = Team::new(threads).expect("threads");
    println!(
        "{tokens} tokens, {threads} threads, {}",
        kernels.isa().name()
    );
    for model in &MODELS {
        println!("{}", model.name);
        measure(model, &team, v, tokens);
    }
}

/// Calls `f` for a while; prints a line with the median time of a call and `work` by it.
fn line(name: &str, work: f64, unit: &str, mut f: impl FnMut()) {
    let mut times = Vec::new();
    while times.len() < 3 || times.iter().sum::<f64>() < SECONDS {
        let start = Instant::now();
        f();
        times.push(start.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    let time = times[times.len() / 2];
    println!(
        "  {name:24} {:9.3} ms {:8.2} {unit}",
        time * 1e3,
        work / time / 1e9
    );
}

fn measure(model: &Model, team: &Team, v: Vector, tokens: usize) {
    let Model {
        d,
        ff,
        vocab,
        act,
        shape,
        ..
    } = *model;
    let wave = |n: usize| -> Vec<f32> { (0..n).map(|i| (i as f32 * 0.7).sin()).collect() };
    let bytes = |floats: usize| 4.0 * floats as f64;

    let (dim, heads) = (shape.head_dim, shape.heads);
    let products = Products::new(v, team.threads());
    let (a, b) = (wave(tokens * dim), wave(tokens * dim));
    let mut c = vec![0.0; tokens * tokens];
    line(
        "product",
        2.0 * (tokens * tokens * dim) as f64,
        "GFLOP/s",
        || {
            let (a, b) = (Mat::new(&a, tokens, dim), Mat::new(&b, tokens, dim).t());
            products.product(team, a, b, 1.0, MatMut::new(&mut c, tokens, tokens), false);
        },
    );

    let (q, kv) = (tokens * heads * dim, tokens * shape.kv_heads * dim);
    let floats = shape
        .forward_floats(tokens, team.threads())
        .max(shape.backward_floats(tokens, tokens, team.threads()));
    let mut scratch = vec![0.0; floats];
    let (mut qs, mut ks, mut vs, mut o) = (wave(q), wave(kv), wave(kv), wave(q));
    let segments = [(0, tokens)];
    let seen: usize = (0..tokens)
        .map(|t| shape.window.map_or(t + 1, |window| window.min(t + 1)))
        .sum();
    let pairs = 2.0 * (seen * heads * dim) as f64;
    line("attention", 2.0 * pairs, "GFLOP/s", || {
        attention(
            team,
            v,
            &shape,
            &segments,
            &qs,
            &ks,
            &vs,
            &mut o,
            &mut scratch,
        );
    });
    line("attention backward", 5.0 * pairs, "GFLOP/s", || {
        attention_backward(
            team,
            v,
            &shape,
            &segments,
            &mut qs,
            &mut ks,
            &mut vs,
            &o,
            &mut scratch,
        );
    });
    let angles = Angles::new(
        &RopeParams {
            style: RopeStyle::Halves,
            head_dim: dim,
            n_rot: dim,
            base: 1e4,
            linear_factor: 1.0,
            freq_factors: None,
        },
        tokens,
    )
    .expect("parameters that can be used");
    let positions: Vec<u32> = (0..tokens as u32).collect();
    line("rope", 2.0 * bytes(q), "GB/s", || {
        angles.turn(team, v, &positions, &mut o, Direction::Forward);
    });

    let n = tokens * d;
    let (x, weight) = (wave(n), wave(d));
    let (mut y, mut xhat, mut rstd) = (vec![0.0; n], vec![0.0; n], vec![0.0; tokens]);
    line("norm", 3.0 * bytes(n), "GB/s", || {
        rms_norm(team, v, &x, &weight, 1e-5, &mut y, &mut xhat, &mut rstd);
    });
    line("norm backward", 4.0 * bytes(n), "GB/s", || {
        rms_norm_backward(team, v, &xhat, &rstd, &weight, &x, &mut y, true);
    });

    let n = tokens * ff;
    let (mut h, mut gate, mut up) = (wave(n), wave(n), wave(n));
    line("activation", 3.0 * bytes(n), "GB/s", || {
        activate(team, v, act, &gate, &up, &mut h);
    });
    line("activation backward", 6.0 * bytes(n), "GB/s", || {
        activate_backward(team, v, act, &mut h, &mut gate, &mut up);
    });

    let mask = Dropout {
        share: 0.1,
        counter: Counter {
            seed: 1,
            step: 2,
            tensor: 3,
        },
    };
    line("dropout", 2.0 * bytes(n), "GB/s", || {
        dropout(team, v, mask, &gate, &mut h, false);
    });

    let mut logits = wave(LOGITS * vocab);
    let (targets, mut losses) = (vec![7; LOGITS], vec![0.0; LOGITS]);
    for (name, cap) in [("cross-entropy", 0.0), ("cross-entropy, capped", 30.0)] {
        line(name, 2.0 * bytes(LOGITS * vocab), "GB/s", || {
            cross_entropy(team, v, &mut logits, vocab, &targets, 1.0, cap, &mut losses);
        });
    }

    let n = d * ff;
    let (mut w, g) = (wave(n), wave(n));
    for (name, precision, traffic) in [
        ("AdamW", Precision::F32, 7.0),
        ("AdamW, 8 bits", Precision::Bits8, 4.0),
    ] {
        let mut moments = Moments::new(precision, n);
        line(name, traffic * bytes(n), "GB/s", || {
            let update = Update::default();
            AdamW::default().step(team, v, &mut w, &g, &mut moments, &update);
        });
    }
}
