//! One test, in a process that was started for it.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::{Bench, Test};
use crate::alloc::Counting;
use crate::budget::{Resident, held};
use crate::cli::output::Out;
use crate::cli::select;
use crate::cli::setup::{self, Need};
use crate::error::Error;
use crate::pack::calibrate;
use crate::run::memory;
use crate::run::model::{Info, Weights};
use crate::run::session::{Memory, Options, Session, Stats, Wanted};
use crate::text;
use leanstream_core::ledger::Kind;

/// Before a packed model generates, it takes in a prompt of so many tokens, then so many one by one,
/// until its cache holds what the text uses.
const PROMPT: usize = 32;
pub(super) const UNTIMED: usize = 32;

/// What the model takes in. Which neurons of a packed model are active depends on it, so there it is
/// a text; of any other model all weights are used whatever it is, and a trace says itself which neurons
/// are active, so there it is made up.
enum Feed {
    MadeUp { vocab: u32 },
    Text { tokens: Vec<u32>, bos: Option<u32> },
}

impl Feed {
    /// The `index`-th token. A text that ends begins again.
    fn token(&self, index: usize) -> u32 {
        match self {
            Self::MadeUp { vocab } => ((index as u32).wrapping_mul(2_654_435_761) >> 8) % vocab,
            Self::Text { tokens, .. } => tokens[index % tokens.len()],
        }
    }

    /// Fills `into` from the `index`-th on, as the beginning of a context.
    fn begin(&self, index: usize, into: &mut [u32]) {
        for (i, token) in into.iter_mut().enumerate() {
            *token = self.token(index + i);
        }
        if let Self::Text { bos: Some(bos), .. } = self {
            into[0] = *bos;
        }
    }
}

impl Bench {
    /// Runs it. Unless it is `alone`, a budget that is too small is told to the process that waits.
    pub(super) fn one(
        &self,
        test: Test,
        allocator: &Counting,
        alone: bool,
    ) -> Result<Map<String, Value>, Error> {
        let (info, mut weights) = self.machine().load()?;
        self.stand_in(&info, &mut weights)?;
        let pass_bytes = weights.pass_bytes();
        let feed = self.feed(&info)?;
        let (prompt, untimed) = self.before(test, &feed);
        let need = self.need(test, &feed);
        let held = held();
        let options = Options {
            watched: true,
            ..self.machine().options(&info, &weights, need, held)?
        };
        let mut memory = self
            .room_for_all(&feed, &info, &weights, held)
            .and_then(|()| Memory::new(&info, &mut weights, &options, held))
            .map_err(|error| match alone {
                true => error,
                false => tell(error, &info, &options, test),
            })?;
        self.refuse_large(&options)?;
        let arena = memory.plan.ledger.get(Kind::Arena);
        let batch = memory.plan.batch;
        let slots = memory.plan.unit_slots();
        let cached = info.packed.then(|| select::in_memory(&info, slots));
        let mut session = Session::start(&info, weights, &mut memory, &options)?;
        let mut begin = vec![0; prompt];
        let generated = test.generated as usize;
        // Every repetition goes on in the text, or a cache would be measured on what it holds already.
        let stretch = prompt + untimed + generated;
        let mut run = |session: &mut Session<'_>,
                       repetition: usize,
                       generated: usize|
         -> Result<(Duration, Stats), Error> {
            session.reset();
            let first = match (&feed, test.prompt) {
                (Feed::Text { .. }, 0) => repetition * stretch,
                _ => 0,
            };
            feed.begin(first, &mut begin);
            let (mut start, mut before) = (Instant::now(), session.stats());
            match *begin {
                [only] => session.decode(only, true)?,
                _ => session.prompt(&begin, true)?,
            };
            for index in 0..untimed + generated {
                if index == untimed {
                    (start, before) = (Instant::now(), session.stats());
                }
                session.decode(feed.token(first + prompt + index), true)?;
                session.pump();
            }
            Ok((start.elapsed(), session.stats().since(&before)))
        };
        let mut samples: Vec<u64> = Vec::with_capacity(self.repeat as usize);
        let before = session.stats();
        run(&mut session, 0, generated.min(4))?;
        let (mut total, mut wall) = (Stats::default(), Duration::ZERO);
        allocator.seal();
        for repetition in 0..self.repeat as usize {
            let (time, stats) = run(&mut session, repetition, generated)?;
            samples.push(time.as_nanos() as u64);
            total.add(&stats);
            wall += time;
        }
        allocator.unseal();
        let all = session.stats().since(&before);
        let tokens = u64::from(test.tokens());
        let rates: Vec<f64> = samples
            .iter()
            .map(|ns| tokens as f64 * 1e9 / *ns as f64)
            .collect();
        let times: Vec<f64> = samples.iter().map(|ns| *ns as f64).collect();
        let timed = tokens * u64::from(self.repeat);
        let mut object = json!({
            "build_commit": option_env!("LEANSTREAM_COMMIT").unwrap_or("unknown"),
            "build_number": 0,
            "cpu_info": cpu_info(),
            "gpu_info": "",
            "backends": "CPU",
            "isa": options.kernels.isa().name(),
            "model_filename": info.paths[0].display().to_string(),
            "model_type": info.kind,
            "model_size": info.file_bytes,
            "model_n_params": info.parameters,
            "n_batch": batch,
            "n_ubatch": batch,
            "n_threads": options.threads,
            "type_k": options.kv_type.name(),
            "type_v": options.kv_type.name(),
            "n_gpu_layers": 0,
            "use_mmap": false,
            "embeddings": false,
            "n_prompt": test.prompt,
            "n_gen": test.generated,
            "n_depth": 0,
            "test": test.name(),
            "test_time": SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs()),
            "avg_ns": mean(&times) as u64,
            "stddev_ns": deviation(&times) as u64,
            "avg_ts": mean(&rates),
            "stddev_ts": deviation(&rates),
            "median_ts": median(&rates),
            "samples_ns": samples,
            "samples_ts": rates,
            "budget_bytes": options.budget,
            "peak_rss_bytes": Resident::peak(),
            "arena_bytes": arena,
            "weights_bytes": pass_bytes,
            "io_mode": session.storage().io_mode(),
            "bytes_read": all.bytes_read(),
            "bytes_per_token": total.bytes_read() as f64 / timed as f64,
            "hit_rate": total.hit_rate(),
            "stall_ms": total.stalled.as_secs_f64() * 1e3,
            "overlap": total.overlap(),
            "allocations": allocator.since_seal().calls,
        });
        if let Value::Object(object) = &mut object {
            let reads = total.counters.reads + total.units.reads;
            if info.packed {
                object.insert("gap_bytes".into(), session.gap().into());
            }
            object.insert(
                "reads_per_token".into(),
                (reads as f64 / timed as f64).into(),
            );
        }
        let object = object.as_object_mut().expect("it was made as one");
        object.insert("controller_ms".into(), total.controller_ms().into());
        let share = total.controller_share();
        object.insert("controller_share".into(), share.into());
        object.insert("head".into(), info.head.name().into());
        object.insert("head_rows".into(), total.head_rows().into());
        if let Some(cached) = cached {
            object.insert("unit_slots_share".into(), cached.into());
            object.insert(
                "expected_loss".into(),
                select::expected_loss(&info, &options, slots).into(),
            );
            object.extend(sparse(&options, &total, wall, (test, timed)));
        }
        Ok(std::mem::take(object))
    }

    /// Tokens of the prompt, and those that are generated before it counts. The first pass of any model
    /// fills its cache, it isn't generation.
    fn before(&self, test: Test, feed: &Feed) -> (usize, usize) {
        match (feed, test.prompt) {
            (_, prompt @ 1..) => (prompt as usize, 0),
            // A prompt would go by the gates.
            (Feed::MadeUp { .. }, 0) if self.trace.is_some() => (1, UNTIMED),
            (Feed::MadeUp { .. }, 0) => (1, 0),
            (Feed::Text { .. }, 0) => (PROMPT, UNTIMED),
        }
    }

    /// What a test asks for.
    fn need(&self, test: Test, feed: &Feed) -> Need {
        let (prompt, untimed) = self.before(test, feed);
        Need {
            context: (prompt + untimed) as u32 + test.generated,
            prompt: prompt as u32,
            score: false,
            one_by_one: false,
            wanted: Wanted::BEST,
        }
    }

    /// Refuses a budget that is too small for one of the tests, before any of them is measured: what is named
    /// does for all.
    fn room_for_all(
        &self,
        feed: &Feed,
        info: &Info,
        weights: &Weights,
        held: u64,
    ) -> Result<(), Error> {
        let mut most = (0, Ok(()));
        for test in self.tests()? {
            let need = self.need(test, feed);
            let options = self.machine().options(info, weights, need, held)?;
            let request = options.request(held, options.open(info)?.align());
            match memory::plan(info, weights, &request) {
                Err(Error::Budget { least, .. }) if least <= most.0 => {}
                Err(error @ Error::Budget { least, .. }) => most = (least, Err(error)),
                other => {
                    other?;
                }
            }
        }
        most.1
    }

    /// What this model takes in.
    fn feed(&self, info: &Info) -> Result<Feed, Error> {
        // Which rows of a sketched head are computed depends on the text too.
        let random = !info.packed && !info.head.sketched();
        if random || self.trace.is_some() {
            return Ok(Feed::MadeUp {
                vocab: info.hyper.vocab,
            });
        }
        let given;
        let text = match &self.text {
            None => calibrate::TEXT.as_bytes(),
            Some(_) => {
                given = setup::text(None, self.text.as_ref(), Some(&self.machine()))?;
                &given
            }
        };
        let mut tokens = Vec::new();
        let options = text::Options {
            add_special: false,
            parse_special: false,
        };
        info.tokenizer.encode(text, options, &mut tokens);
        tokens.shrink_to_fit();
        if tokens.is_empty() {
            return Err(Error::Usage("--text: the text is empty".into()));
        }
        let bos = info.tokenizer.bos().filter(|_| info.tokenizer.add_bos());
        Ok(Feed::Text { tokens, bos })
    }
}

/// What only a packed model has.
fn sparse(
    options: &Options,
    total: &Stats,
    wall: Duration,
    (test, timed): (Test, u64),
) -> Map<String, Value> {
    // A batch takes all units as they come by, so none counts as missed.
    let missed = (test.prompt == 0).then(|| total.miss_ratio());
    let pairs = [
        ("policy", json!(options.policy.as_str())),
        ("mode", json!(select::mode(options.select))),
        ("without", json!(select::left_out(options.without))),
        ("keep", json!(select::keep(options.select))),
        ("miss_ratio", json!(missed)),
        ("skipped_ratio", json!(total.skipped_ratio())),
        ("looks_per_token", json!(total.looks as f64 / timed as f64)),
        ("redundant_ratio", json!(total.redundant_ratio())),
        ("late_ratio", json!(total.late_ratio())),
        ("hidden", json!(total.hidden(wall))),
    ];
    let pairs = pairs.into_iter();
    pairs.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// A budget that is too small for a test, as an object for the process that started this one.
pub(super) fn tell(error: Error, info: &Info, options: &Options, test: Test) -> Error {
    let why = error.headline();
    let Error::Budget {
        budget,
        least,
        table,
    } = error
    else {
        return error;
    };
    let mut object = json!({
        "model_filename": info.paths[0].display().to_string(),
        "model_type": info.kind,
        "model_size": info.file_bytes,
        "n_threads": options.threads,
        "n_prompt": test.prompt,
        "n_gen": test.generated,
        "test": test.name(),
        "budget_bytes": budget,
        "least_budget_bytes": least,
        "error": why,
        "table": table,
    });
    object["head"] = info.head.name().into();
    if let (true, Value::Object(object)) = (info.packed, &mut object) {
        object.insert("policy".into(), options.policy.as_str().into());
        object.insert("mode".into(), select::mode(options.select).into());
    }
    match Out::new().write(format!("{object}\n").as_bytes()) {
        Ok(()) => Error::Told(4),
        Err(error) => error,
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn deviation(values: &[f64]) -> f64 {
    if values.len() < 2 {
        return 0.0;
    }
    let mean = mean(values);
    (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (values.len() - 1) as f64).sqrt()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let half = sorted.len() / 2;
    if sorted.len() % 2 == 1 {
        sorted[half]
    } else {
        (sorted[half - 1] + sorted[half]) / 2.0
    }
}

fn cpu_info() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let named = |key: &str| {
        text.lines()
            .find(|line| line.starts_with(key))
            .and_then(|line| line.split_once(':'))
            .map(|(_, name)| name.trim())
    };
    named("model name")
        .or_else(|| named("Model"))
        .unwrap_or(std::env::consts::ARCH)
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_and_deviations() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!((deviation(&[1.0, 3.0]) - 2f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn a_text_goes_on_from_where_it_ended_and_each_context_has_its_beginning() {
        let feed = Feed::Text {
            tokens: vec![5, 6, 7],
            bos: Some(1),
        };
        let mut into = [0; 4];
        feed.begin(2, &mut into);
        assert_eq!(into, [1, 5, 6, 7]);
        assert_eq!(feed.token(6), 5);
    }
}
