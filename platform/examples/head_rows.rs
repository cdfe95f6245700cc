//! How many rows of a packed model's head are computed exactly for a text, and whether the token is
//! the whole head's at every position, greedy and drawn from the 40 most likely:
//! `head_rows MODEL.lean TEXT [POSITIONS [BUDGET]]`.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::Path;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::Kernels;
use leanstream::error::Error;
use leanstream::io::{self, Direct};
use leanstream::run::model::load_with;
use leanstream::run::session::{KvType, Memory, Options, Session, Wanted};
use leanstream::sample::{Params, Sampler};
use leanstream::text;
use leanstream_core::plan::Head;
use leanstream_core::sparse::Select;
use leanstream_core::sparse::retain::Name;

static NO_SIGNAL: AtomicI32 = AtomicI32::new(0);

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (model, text) = match &args[..] {
        [model, text, ..] => (Path::new(model), std::fs::read(text)?),
        _ => return Err("head_rows MODEL.lean TEXT [POSITIONS [BUDGET]]".into()),
    };
    let positions = args.get(2).map_or(Ok(2000), |n| n.parse())?;
    let budget = args.get(3).map_or(Ok(1 << 30), |n| n.parse())?;
    let greedy = Params {
        temperature: 0.0,
        ..Params::default()
    };
    // All forty can be drawn.
    let sampling = Params {
        temperature: 1.0,
        top_k: 40,
        top_p: 1.0,
        min_p: 0.0,
        seed: 7,
        ..Params::default()
    };
    let ways = [greedy, sampling];
    let full = run(model, &text, positions, budget, Head::Full, &ways)?;
    println!("full: {} bytes read a token", full.bytes);
    for (way, params) in ways.into_iter().enumerate() {
        for head in [Head::Exact, Head::Fast] {
            let mut got = run(model, &text, positions, budget, head, &[params])?;
            let same =
                |got: &[u64], full: &[u64]| got.iter().zip(full).filter(|(a, b)| a == b).count();
            let all = got.rows.len();
            got.rows.sort_unstable();
            let mean = got.rows.iter().sum::<u64>() as f64 / all as f64;
            println!(
                "{}, top {}: of {all} tokens {} the same, of their candidates with all logits {}; rows median {}, mean \
                 {mean:.0}, p95 {}; {} bytes read a token",
                head.name(),
                params.top().expect("a few tokens"),
                same(&got.chosen[0], &full.chosen[way]),
                same(&got.candidates[0], &full.candidates[way]),
                got.rows[all / 2],
                got.rows[all * 95 / 100],
                got.bytes
            );
        }
    }
    Ok(())
}

/// What came of a text, a token at a time.
struct Ran {
    /// The token that each way of sampling chose at each position.
    chosen: Vec<Vec<u64>>,
    /// A hash of the tokens that it chose from, with their logits.
    candidates: Vec<Vec<u64>>,
    /// Rows computed exactly at each position.
    rows: Vec<u64>,
    /// Bytes read for a token, on average.
    bytes: u64,
}

/// Reads `text`; at each position each of `ways` draws a token, which is not gone on with.
fn run(
    path: &Path,
    text: &[u8],
    positions: usize,
    budget: u64,
    head: Head,
    ways: &[Params],
) -> Result<Ran, Error> {
    let (info, mut weights) = load_with(path, head)?;
    let options = text::Options {
        add_special: true,
        parse_special: false,
    };
    let mut tokens = Vec::new();
    info.tokenizer.encode(text, options, &mut tokens);
    tokens.truncate(positions);
    let options = Options {
        budget,
        context: tokens.len() as u32,
        prompt: 1,
        batch: Some(1),
        score: false,
        one_by_one: false,
        threads: 2,
        kv_type: KvType::F16,
        exact: false,
        kernels: Kernels::detect(),
        direct: Direct::Auto,
        queue_depth: None,
        wanted: Wanted {
            top: ways.iter().flat_map(Params::top).max().unwrap_or(1),
            changed_max: 0,
        },
        select: Select::All,
        policy: Name::Refine,
        without: leanstream::run::setup::Without::default(),
        watched: false,
        gap: Some(4 << 10),
        io: io::Options::default(),
        stop: &NO_SIGNAL,
    };
    let mut memory = Memory::new(&info, &mut weights, &options, 0)?;
    let mut session = Session::start(&info, weights, &mut memory, &options)?;
    let mut samplers: Vec<Sampler> = ways
        .iter()
        .map(|params| Sampler::new(*params, info.hyper.vocab))
        .collect();
    let mut ran = Ran {
        chosen: vec![Vec::new(); ways.len()],
        candidates: vec![Vec::new(); ways.len()],
        rows: Vec::new(),
        bytes: 0,
    };
    let mut order: Vec<u32> = Vec::new();
    for &token in &tokens {
        let before = session.stats().head_rows;
        let logits = session.decode(token, true)?;
        for (way, params) in ways.iter().enumerate() {
            let top = params.top().expect("a few tokens") as usize;
            order.clear();
            order.extend(0..logits.len() as u32);
            let by_logit = |a: &u32, b: &u32| {
                let [x, y] = [logits[*a as usize], logits[*b as usize]];
                y.total_cmp(&x).then(a.cmp(b))
            };
            order.select_nth_unstable_by(top - 1, by_logit);
            order[..top].sort_unstable();
            let mut hash = DefaultHasher::new();
            for &token in &order[..top] {
                (token, logits[token as usize].to_bits()).hash(&mut hash);
            }
            ran.candidates[way].push(hash.finish());
            let chosen = samplers[way].choose(logits).expect("numbers");
            ran.chosen[way].push(chosen.into());
        }
        ran.rows.push(session.stats().head_rows - before);
    }
    ran.bytes = session.stats().bytes_read() / tokens.len() as u64;
    Ok(ran)
}
