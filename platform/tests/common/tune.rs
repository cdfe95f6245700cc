//! A trainer over a model, with plenty of memory unless a test says otherwise.

use std::path::Path;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::vector::Vector;
use leanstream::error::Error;
use leanstream::io::{self, Direct};
use leanstream::run::model::Info;
use leanstream::tune::memory::{self, MemoryPlan, Request};
use leanstream::tune::model::params::Scheme;
use leanstream::tune::optim::{Decay, Precision, Schedule};
use leanstream::tune::settings::{ActBits, Recompute, Settings};
use leanstream::tune::setup::{self, Reading};
use leanstream::tune::trainer::Parts;

static NO_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Adapters of rank 8 on all linears.
pub const LORA: Scheme = Scheme::Lora {
    rank: 8,
    alpha: 16.0,
    dropout: 0.0,
    sites: [true; 7],
};

/// Everything saved as f32, two threads.
pub fn settings(scheme: Scheme) -> Settings {
    Settings {
        scheme,
        batch: 1,
        steps: 100,
        schedule: Schedule {
            peak: 1e-3,
            warmup: 0,
            steps: 100,
            decay: Decay::Constant,
            floor: 0.0,
        },
        weight_decay: 0.01,
        clip: 1.0,
        sparsity: 0.0,
        seed: 1,
        act: ActBits::Fixed(leanstream_core::act::Width::F32),
        recompute: Recompute::Never,
        moments: Precision::F32,
        threads: 2,
    }
}

/// The parts of a trainer and its memory plan.
pub fn prepare(
    path: &Path,
    settings: &Settings,
    tokens: usize,
    budget: u64,
) -> Result<(Info, Parts, MemoryPlan), Error> {
    let reading = Reading {
        direct: Direct::Auto,
        io: io::Options::default(),
        stop: &NO_SIGNAL,
    };
    let (info, parts) = setup::prepare(path, settings.scheme, Vector::detect(), &reading)?;
    let request = Request {
        budget,
        held: 0,
        tokenizer: 0,
        vectors: 0,
        data: 0,
        tokens,
        longest: tokens,
    };
    let plan = memory::plan(
        &parts.net,
        parts.layout.as_ref(),
        &parts.params,
        settings,
        parts.vector,
        &request,
    )?;
    Ok((info, parts, plan))
}

/// Numbers that look random, by a name: what `platform/benches/torch_block.py` calls `fill`.
pub fn fill(name: &str, scale: f32, out: &mut [f32]) {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in name.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    }
    let start = mix(hash);
    for (i, out) in out.iter_mut().enumerate() {
        let word = mix(start.wrapping_add(i as u64));
        *out = ((word >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * scale;
    }
}

/// SplitMix64's output function.
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
