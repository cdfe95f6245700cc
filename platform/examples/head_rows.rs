//! How many rows of a packed model's head are computed exactly for a text, and whether the most likely
//! token is the whole head's at every position: `head_rows MODEL.lean TEXT [POSITIONS [BUDGET]]`.

use std::path::Path;
use std::sync::atomic::AtomicI32;

use leanstream::cpu::Kernels;
use leanstream::error::Error;
use leanstream::io::{self, Direct};
use leanstream::run::model::load_with;
use leanstream::run::session::{KvType, Memory, Options, Session, Wanted};
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
    let full = run(model, &text, positions, budget, Head::Full)?;
    println!("full: {} bytes read a token", full.bytes);
    for head in [Head::Exact, Head::Fast] {
        let mut got = run(model, &text, positions, budget, head)?;
        let same = got.best.iter().zip(&full.best).filter(|(a, b)| a == b);
        let (same, all) = (same.count(), full.best.len());
        got.rows.sort_unstable();
        let mean = got.rows.iter().sum::<u64>() as f64 / all as f64;
        println!(
            "{}: {same} of {all} tokens the same; rows median {}, mean {mean:.0}, p95 {}; {} bytes read a token",
            head.name(),
            got.rows[all / 2],
            got.rows[all * 95 / 100],
            got.bytes
        );
    }
    Ok(())
}

/// What came of a text, a token at a time.
struct Ran {
    /// The most likely token at each position.
    best: Vec<u32>,
    /// Rows computed exactly at each.
    rows: Vec<u64>,
    /// Bytes read for a token, on average.
    bytes: u64,
}

fn run(path: &Path, text: &[u8], positions: usize, budget: u64, head: Head) -> Result<Ran, Error> {
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
        wanted: Wanted::BEST,
        select: Select::All,
        policy: Name::Refine,
        gap: 4 << 10,
        io: io::Options::default(),
        stop: &NO_SIGNAL,
    };
    let mut memory = Memory::new(&info, &mut weights, &options, 0)?;
    let mut session = Session::start(&info, weights, &mut memory, &options)?;
    let mut ran = Ran {
        best: Vec::new(),
        rows: Vec::new(),
        bytes: 0,
    };
    for &token in &tokens {
        let before = session.stats().head_rows;
        let logits = session.decode(token, true)?;
        let mut best = 0;
        for (token, logit) in logits.iter().enumerate() {
            if *logit > logits[best] {
                best = token;
            }
        }
        ran.best.push(best as u32);
        ran.rows.push(session.stats().head_rows - before);
    }
    ran.bytes = session.stats().bytes_read() / tokens.len() as u64;
    Ok(ran)
}
