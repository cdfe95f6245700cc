//! What leaving out neurons costs the packed model: perplexity with some of its neurons in memory and
//! some of the missing ones left out, over that with none left out.

use std::path::Path;

use leanstream_core::pack::Quality;
use leanstream_core::pack::quality::{KEEPS, SHARES};
use leanstream_core::sparse::Select;

use super::Progress;
use crate::budget::held;
use crate::error::Error;
use crate::run::advice::budget_for_units;
use crate::run::model::{self, Info};
use crate::run::perplexity::{Sums, score_chunk};
use crate::run::session::{Memory, Options, Session};
use crate::text;

/// Tokens of a chunk, of which the second half is scored.
const CHUNK: usize = 512;

/// Chunks that are scored at most: a decoded token each, seventeen times over.
const CHUNKS_MAX: usize = 2;

/// The tokens of `text` that are measured on: whole chunks.
///
/// # Errors
/// A text that is too short.
pub fn tokens(info: &Info, text: &[u8], options: &Options) -> Result<Vec<u32>, Error> {
    let chunk = chunk(options);
    let mut tokens = Vec::new();
    let special = text::Options {
        add_special: true,
        parse_special: false,
    };
    info.tokenizer.encode(text, special, &mut tokens);
    if tokens.len() < chunk {
        return Err(Error::Usage(format!(
            "the text for --quality has {} tokens; give a longer one, {chunk} or {}",
            tokens.len(),
            CHUNKS_MAX * chunk
        )));
    }
    tokens.truncate(CHUNKS_MAX.min(tokens.len() / chunk) * chunk);
    tokens.shrink_to_fit();
    Ok(tokens)
}

fn chunk(options: &Options) -> usize {
    CHUNK.min(options.context as usize)
}

/// Measures the pack at `path` on [`tokens`], within the budget of `options`.
///
/// # Errors
/// A budget in which half of the neurons find no room, what stops a run.
pub fn measure(
    path: &Path,
    tokens: &[u32],
    options: &Options,
    progress: &mut Progress<'_>,
) -> Result<Quality, Error> {
    let runs = (SHARES.len() * KEEPS.len() + 1) as u64;
    let chunks = (tokens.len() / chunk(options)) as u64;
    let all = runs * chunks * (chunk(options) as u64 / 2 - 1);
    let mut done = 0;
    let mut run = |share: f32, keep: f32| {
        progress("measuring", done, all);
        one(path, tokens, options, (share, keep), &mut || {
            done += 1;
            progress("measuring", done, all);
        })
    };
    // The share doesn't matter where nothing is left out; the largest is the fastest.
    let whole = run(SHARES[SHARES.len() - 1], 1.0)?;
    let mut loss = [[0.0; KEEPS.len()]; SHARES.len()];
    for (row, share) in loss.iter_mut().zip(SHARES) {
        for (loss, keep) in row.iter_mut().zip(KEEPS) {
            let part = run(share, keep)?;
            *loss = (part.perplexity() / whole.perplexity() - 1.0) as f32;
        }
    }
    let losses = loss.as_flattened();
    if losses.iter().any(|loss| !loss.is_finite()) {
        return Err(Error::model(
            path,
            "its perplexity on the text for --quality is not a number: the weights are damaged (try 'leanstream verify \
             --blocks')",
        ));
    }
    Ok(Quality::new(loss, whole.count as u32))
}

/// One run with `share` of the neurons in memory; tells of every token that was scored.
fn one(
    path: &Path,
    tokens: &[u32],
    options: &Options,
    (share, keep): (f32, f32),
    scored: &mut dyn FnMut(),
) -> Result<Sums, Error> {
    let (info, mut weights) = model::load(path)?;
    let chunk = chunk(options);
    // Scoring writes BOS over a chunk's first token.
    let mut tokens = tokens.to_vec();
    let held = held() + tokens.len() as u64 * 4;
    let mut options = Options {
        context: chunk as u32,
        prompt: chunk as u32,
        score: true,
        one_by_one: true,
        select: Select::Top(keep),
        ..options.clone()
    };
    let units = info.hyper.layers * info.hyper.ff;
    let slots = (units as f32 * share) as u32;
    let request = options.request(held, options.open(&info)?.align());
    let least = budget_for_units(&info, &weights, &request, slots).unwrap_or(u64::MAX);
    if least > options.budget {
        return Err(Error::Usage(format!(
            "--quality measures with {:.0}% of the neurons in memory, which takes a budget of {}: give more, or leave it out",
            100.0 * share,
            crate::error::mib(least)
        )));
    }
    options.budget = least;
    let mut memory = Memory::new(&info, &mut weights, &options, held)?;
    let mut session = Session::start(&info, weights, &mut memory, &options)?;
    let mut sums = Sums::default();
    for part in tokens.chunks_exact_mut(chunk) {
        score_chunk(&mut session, &info, part, chunk / 2 + 1, |nll| {
            sums.add(nll);
            scored();
        })?;
    }
    Ok(sums)
}
