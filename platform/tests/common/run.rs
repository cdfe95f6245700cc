//! Runs a model through the program's own session, the way the command line does.

use std::path::Path;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::Kernels;
use leanstream::error::Error;
use leanstream::io::fault::FaultPlan;
use leanstream::io::{self, Direct, Kind};
use leanstream::run::model;
use leanstream::run::session::{KvType, Memory, Options, Session};
use leanstream_core::sparse::retain::Name;

static NO_SIGNAL: AtomicI32 = AtomicI32::new(0);

/// Plenty of memory, one thread, the best kernels.
pub fn options(tokens: usize) -> Options {
    Options {
        budget: 1 << 30,
        context: tokens as u32,
        prompt: tokens as u32,
        batch: None,
        score: false,
        threads: 1,
        kv_type: KvType::F16,
        exact: false,
        kernels: Kernels::detect(),
        direct: Direct::Auto,
        queue_depth: None,
        without: leanstream::run::setup::Without::default(),
        watched: false,
        gap: Some(0),
        one_by_one: false,
        wanted: leanstream::run::session::Wanted::BEST,
        select: leanstream_core::sparse::Select::All,
        policy: Name::Refine,
        io: io::Options::default(),
        stop: &NO_SIGNAL,
    }
}

/// Logits of the last `positions` of `tokens`, (position, token): the first of them comes from
/// the prompt, the others are decoded one by one.
pub fn logits(
    path: &Path,
    options: &Options,
    tokens: &[u32],
    positions: usize,
) -> Result<Vec<Vec<f32>>, Error> {
    let (info, mut weights) = model::load(path)?;
    let mut memory = Memory::new(&info, &mut weights, options, 0)?;
    let mut session = Session::start(&info, weights, &mut memory, options)?;
    let (prompt, decoded) = tokens.split_at(tokens.len() + 1 - positions);
    let mut out = vec![session.prompt(prompt, !decoded.is_empty())?.to_vec()];
    for (i, &token) in decoded.iter().enumerate() {
        out.push(session.decode(token, i + 1 < decoded.len())?.to_vec());
    }
    Ok(out)
}

/// The least budget that a model runs in, found by taking the refusals at their word.
pub fn least_budget(path: &Path, options: &Options) -> u64 {
    let mut budget = 1;
    for _ in 0..8 {
        let (info, mut weights) = model::load(path).expect("a model");
        let options = Options {
            budget,
            ..options.clone()
        };
        match Memory::new(&info, &mut weights, &options, 0) {
            Ok(_) => return budget,
            Err(Error::Budget { least, .. }) => budget = least,
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the least budget keeps growing: {budget} now")
}

/// Runs the pack at `path` with several budgets, backends, thread counts and gaps, with faults and without, and
/// checks that none of them, nor any of `policies`, changes a bit of what `plenty` gives.
pub fn same_bits(
    path: &Path,
    plenty: &Options,
    tokens: &[u32],
    policies: impl IntoIterator<Item = Name>,
) {
    const POSITIONS: usize = 8;
    let want = logits(path, plenty, tokens, POSITIONS).expect("a run");
    let one = Options {
        batch: Some(1),
        ..plenty.clone()
    };
    let least = least_budget(path, &one);
    let faults =
        FaultPlan::parse("seed=5,fail=0.3%,corrupt=0.2%,late=5%,short=10%").expect("a plan");
    for policy in policies {
        for extra in [0, 200 << 10, 1 << 20, 1 << 30] {
            for (kind, threads, gap) in [
                (Kind::Uring, 1, 0),
                (Kind::Uring, 2, 8192),
                (Kind::Pread, 3, 100),
            ] {
                let options = Options {
                    budget: least + extra + u64::from(threads) * (1 << 20),
                    batch: if extra == 0 { Some(1) } else { None },
                    threads,
                    policy,
                    gap: Some(gap),
                    io: io::Options {
                        kind,
                        faults: (threads == 2).then_some(faults),
                        ..plenty.io
                    },
                    ..plenty.clone()
                };
                let got = logits(path, &options, tokens, POSITIONS)
                    .unwrap_or_else(|e| panic!("{policy:?} {extra} {kind:?} {threads}: {e}"));
                assert!(
                    got == want,
                    "{policy:?} {extra} {kind:?}, {threads} threads: other bits"
                );
            }
        }
    }
}
