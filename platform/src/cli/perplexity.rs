//! `leanstream perplexity`: how well a model predicts a text, by llama.cpp's default method.
//!
//! The text is cut into chunks of the context's length; each starts with an empty cache (and with BOS
//! in place of its first token, where the model wants one), and the tokens of its second half are
//! scored. The result is `exp` of their mean negative log-likelihood.

use serde_json::json;

use super::args::{PathArg, count};
use super::output::{Out, say};
use super::select;
use super::setup::{self, Need, runs_a_model};
use crate::budget::{Resident, held};
use crate::error::Error;
use crate::run::perplexity::{Sums, score_chunk};
use crate::run::session::{Memory, Session, Wanted};
use crate::text;

runs_a_model! {
    /// Measure perplexity over a text.
    #[argh(subcommand, name = "perplexity")]
    pub struct Perplexity {
        /// the text
        #[argh(option, short = 'p')]
        prompt: Option<PathArg>,
        /// read the text from a file, '-' for stdin
        #[argh(option, short = 'f')]
        file: Option<PathArg>,
        /// tokens of a chunk, 4 or more (default: 512)
        #[argh(option, short = 'c', long = "ctx-size", default = "512", from_str_fn(count::<4>))]
        ctx_size: u32,
        /// most chunks to score (default: all)
        #[argh(option, from_str_fn(count::<1>))]
        chunks: Option<u32>,
        /// take tokens in one at a time, as generation does: slower (always so with --mode sparse)
        #[argh(switch, long = "token-by-token")]
        token_by_token: bool,
        /// print one JSON object instead of the running values
        #[argh(switch)]
        json: bool,
    }
}

impl Perplexity {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let text = setup::text(
            self.prompt.as_ref(),
            self.file.as_ref(),
            Some(&self.machine()),
        )?;
        let (info, mut weights) = self.machine().load()?;
        let chunk = self.ctx_size as usize;
        let mut tokens = Vec::new();
        let options = text::Options {
            add_special: true,
            parse_special: false,
        };
        info.tokenizer.encode(&text, options, &mut tokens);
        if tokens.len() < 2 * chunk {
            return Err(Error::Usage(format!(
                "the text has {} tokens; at least two chunks of {chunk} are needed: give a longer text (leanstream perplexity takes shorter chunks with -c)",
                tokens.len()
            )));
        }
        let chunks = (tokens.len() / chunk).min(self.chunks.map_or(usize::MAX, |n| n as usize));
        let need = Need {
            context: self.ctx_size,
            prompt: self.ctx_size,
            score: true,
            one_by_one: self.token_by_token,
            wanted: Wanted::BEST,
        };
        let held = held() + tokens.len() as u64 * 4;
        let options = self.machine().options(&info, &weights, need, held)?;
        let mut memory = Memory::new(&info, &mut weights, &options, held)?;
        let mut session = Session::start(&info, weights, &mut memory, &options)?;
        while let Some(notice) = session.take_notice() {
            say(&format!("leanstream: {notice}"));
        }
        let mut sums = Sums::default();
        let mut running = Vec::with_capacity(chunks);
        let mut out = Out::new();
        let started = std::time::Instant::now();
        for (index, part) in tokens.chunks_exact_mut(chunk).take(chunks).enumerate() {
            score_chunk(&mut session, &info, part, chunk / 2 + 1, |nll| {
                sums.add(nll)
            })?;
            running.push(sums.perplexity());
            if !self.json {
                out.write(format!("[{}]{:.4},", index + 1, sums.perplexity()).as_bytes())?;
            }
        }
        if !sums.nll.is_finite() {
            return Err(Error::Runtime(
                "the perplexity is not a number: the weights are damaged (try 'leanstream verify --blocks')".into(),
            ));
        }
        let stats = session.stats();
        let peak = Resident::peak();
        if self.json {
            let mut summary = json!({
                "perplexity": sums.perplexity(),
                "error": sums.error(),
                "running": running,
                "scored_tokens": sums.count,
                "chunks": chunks,
                "n_ctx": chunk,
                "budget_bytes": options.budget,
                "peak_rss_bytes": peak,
                "bytes_read": stats.bytes_read(),
                // A batch takes all units as they come by, so none counts as missed.
                "miss_ratio": self.token_by_token.then(|| stats.miss_ratio()),
                "redundant_ratio": stats.redundant_ratio(),
                "late_ratio": stats.late_ratio(),
                "stall_ms": stats.stalled.as_secs_f64() * 1e3,
                "reads": stats.counters.reads + stats.units.reads,
                "ms": started.elapsed().as_secs_f64() * 1e3,
                "io_mode": session.storage().io_mode(),
            });
            if let (true, Some(object)) = (info.packed, summary.as_object_mut()) {
                object.insert("policy".into(), options.policy.as_str().into());
                object.insert("mode".into(), select::mode(options.select).into());
                object.insert("keep".into(), select::keep(options.select).into());
                object.insert("skipped_ratio".into(), stats.skipped_ratio().into());
            }
            return out.write(format!("{summary}\n").as_bytes());
        }
        let last = format!(
            "\nFinal estimate: PPL = {:.4} +/- {:.5}\n",
            sums.perplexity(),
            sums.error()
        );
        out.write(last.as_bytes())
    }
}
