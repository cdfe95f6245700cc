//! Runs a model through the program's own session, the way the command line does.

use std::path::Path;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::Kernels;
use leanstream::error::Error;
use leanstream::io::{self, Direct};
use leanstream::run::model;
use leanstream::run::session::{KvType, Memory, Options, Session};

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
        gap: Some(0),
        one_by_one: false,
        wanted: leanstream::run::session::Wanted::BEST,
        select: leanstream_core::sparse::Select::All,
        policy: leanstream_core::sparse::retain::Name::Refine,
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
