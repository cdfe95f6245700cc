//! `leanstream bench`: tokens per second under budgets, beside what the storage allows.
//!
//! Each test runs in a process of its own, so that its peak memory is its own; this one starts them,
//! probes the storage, and prints. JSON lines have llama-bench's keys and ours.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::output::{Out, say};
use super::setup::{self, Longest, Need, runs_a_model};
use crate::alloc::Counting;
use crate::budget::{Resident, held};
use crate::error::{Error, mib};
use crate::io::{Source, probe};
use crate::run::model::Info;
use crate::run::session::{Memory, Session};

/// How the storage is probed: as the engine reads, in pieces of this size, for this long.
const PROBE_BLOCK: u32 = 256 << 10;
const PROBE_DEPTH: u16 = 8;
const PROBE_TIME: Duration = Duration::from_millis(1500);

/// Given to the processes that this one starts: run one test and print its object.
const ONE: &str = "LEANSTREAM_BENCH_ONE";

runs_a_model! {
    /// Measure tokens per second, memory and reads under one or more budgets.
    #[argh(subcommand, name = "bench")]
    pub struct Bench {
        /// prompt tokens of the prompt test, a comma list; 0 for none (default: 512)
        #[argh(option, short = 'p', long = "prompt-tokens", default = "\"512\".into()")]
        prompt_tokens: String,
        /// tokens of the generation test, a comma list; 0 for none (default: 128)
        #[argh(option, short = 'n', long = "gen-tokens", default = "\"128\".into()")]
        gen_tokens: String,
        /// measured runs of each test, after one to warm up (default: 5)
        #[argh(option, short = 'r', long = "repeat", default = "5")]
        repeat: u32,
        /// output: md or jsonl (default: md)
        #[argh(option, short = 'o', default = "\"md\".into()")]
        output: String,
    }
}

/// A test: prompt tokens taken in, or tokens generated one by one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Test {
    prompt: u32,
    generated: u32,
}

impl Test {
    fn name(self) -> String {
        if self.prompt > 0 {
            format!("pp{}", self.prompt)
        } else {
            format!("tg{}", self.generated)
        }
    }

    fn tokens(self) -> u32 {
        self.prompt + self.generated
    }
}

impl Bench {
    pub(super) fn execute(&self, allocator: &Counting) -> Result<(), Error> {
        if self.repeat == 0 || self.repeat > 1000 {
            return Err(Error::Usage("-r: from 1 to 1000".into()));
        }
        let tests = tests(&self.prompt_tokens, &self.gen_tokens)?;
        if let Some(one) = std::env::var_os(ONE) {
            let index: usize = one.to_string_lossy().parse().unwrap_or(0);
            let test = *tests
                .get(index)
                .ok_or_else(|| Error::Usage(format!("{ONE}: no such test")))?;
            return self.one(test, allocator);
        }
        let markdown = match self.output.as_str() {
            "md" => true,
            "jsonl" => false,
            other => return Err(Error::Usage(format!("-o {other}: md or jsonl"))),
        };
        let bandwidth = self.probe()?;
        let mut out = Out::new();
        let mut head = markdown.then(table_head);
        let budgets: Vec<Option<&str>> = match &self.budget {
            None => vec![None],
            Some(list) => list.split(',').map(|item| Some(item.trim())).collect(),
        };
        let mut result = Ok(());
        for budget in &budgets {
            for index in 0..tests.len() {
                let mut object = self.start(*budget, index)?;
                if let Some(error) = too_small(&object) {
                    // One of several says so in its row, and the others are measured all the same.
                    if budgets.len() == 1 {
                        return Err(error);
                    }
                    say(&format!("leanstream: {error}"));
                    result = Err(Error::Told(error.exit_code()));
                    object.remove("table");
                } else {
                    finish(&mut object, bandwidth);
                }
                let line = if markdown {
                    table_row(&object)
                } else {
                    format!("{}\n", Value::Object(object))
                };
                let line = head.take().unwrap_or_default() + &line;
                out.write(line.as_bytes())?;
            }
        }
        if markdown {
            say(&format!(
                "\nstorage: {:.2} GB/s in reads of {} KiB, {PROBE_DEPTH} in flight",
                bandwidth / 1e9,
                PROBE_BLOCK >> 10
            ));
            for line in machine_state() {
                say(&line);
            }
        }
        result
    }

    /// Bytes per second of the storage under the model.
    fn probe(&self) -> Result<f64, Error> {
        let (info, _) = self.machine().load()?;
        let options = setup::Machine {
            budget: None,
            ..self.machine()
        }
        .options(
            &info,
            Need {
                context: 1,
                prompt: 1,
                score: false,
                one_by_one: false,
            },
        )?;
        let failed = |error: &dyn std::fmt::Display| {
            Error::io(
                &info.paths[0],
                "measure its storage",
                std::io::Error::other(error.to_string()),
            )
        };
        let source = Source::open(&info.paths, options.direct).map_err(|error| failed(&error))?;
        let io = crate::io::Options {
            depth: PROBE_DEPTH,
            faults: None,
            ..options.io
        };
        let least = PROBE_BLOCK.min(
            (info.file_bytes as u32 / 64)
                .next_power_of_two()
                .max(source.align().max(4096)),
        );
        let found = probe::bandwidth(&Arc::new(source), &io, least, PROBE_TIME)
            .map_err(|error| failed(&error))?;
        Ok(found.bytes_per_s())
    }

    /// Runs test `index` under `budget` in a process of its own.
    fn start(&self, budget: Option<&str>, index: usize) -> Result<Map<String, Value>, Error> {
        let failed = |error: std::io::Error| {
            Error::Runtime(format!("cannot start a process for a test: {error}"))
        };
        let mut command = Command::new(std::env::current_exe().map_err(failed)?);
        let mut args = std::env::args_os().skip(1);
        let mut kept = Vec::new();
        while let Some(arg) = args.next() {
            let text = arg.to_string_lossy().into_owned();
            if text == "--budget" {
                args.next();
            } else if !text.starts_with("--budget=") {
                kept.push(arg);
            }
        }
        command
            .args(kept)
            .env(ONE, index.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        if let Some(budget) = budget {
            command.args(["--budget", budget]);
        }
        let mut child = command.spawn().map_err(failed)?;
        let output = child.stdout.take().expect("its output was asked for");
        let longest = Longest {
            bytes: setup::TEXT_MAX,
            why: "more than a test has to say",
        };
        let read = setup::read(&output, Path::new("a test's process"), longest);
        if read.is_err() {
            // Stopped: so must the test be, and what it says no longer matters.
            let _ = child.kill();
        }
        let status = child.wait().map_err(failed)?;
        match serde_json::from_slice(&read?) {
            Ok(Value::Object(object)) if status.success() || too_small(&object).is_some() => {
                Ok(object)
            }
            _ => Err(match status.code() {
                Some(code) if code != 0 => Error::Told(code),
                _ => Error::Runtime(format!("a test's process ended with {status}")),
            }),
        }
    }

    /// One test, in this process.
    fn one(&self, test: Test, allocator: &Counting) -> Result<(), Error> {
        let (info, mut weights) = self.machine().load()?;
        let pass_bytes = weights.pass_bytes();
        let context = test.prompt.max(1) + test.generated;
        let need = Need {
            context,
            prompt: test.prompt.max(1),
            score: false,
            one_by_one: false,
        };
        let options = self.machine().options(&info, need)?;
        let mut memory = match Memory::new(&info, &mut weights, &options, held()) {
            Ok(memory) => memory,
            Err(error) => return Err(tell(error, &info, options.threads, test)),
        };
        let arena = memory.plan.ledger.get(leanstream_core::ledger::Kind::Arena);
        let batch = memory.plan.batch;
        let mut session = Session::start(&info, weights, &mut memory, &options)?;
        let vocab = info.hyper.vocab;
        let token = |i: u32| (i.wrapping_mul(2_654_435_761) >> 8) % vocab;
        let prompt: Vec<u32> = (0..test.prompt).map(token).collect();
        let mut samples: Vec<u64> = Vec::with_capacity(self.repeat as usize);
        let mut before = session.stats();
        let run = |session: &mut Session<'_>,
                   warm: bool|
         -> Result<(Duration, crate::run::session::Stats), Error> {
            session.reset();
            if test.prompt > 0 {
                let start = Instant::now();
                let before = session.stats();
                session.prompt(&prompt, true)?;
                return Ok((start.elapsed(), session.stats().since(&before)));
            }
            // The first pass fills the cache; it isn't generation.
            session.decode(token(7), true)?;
            let before = session.stats();
            let start = Instant::now();
            for i in 0..if warm {
                test.generated.min(4)
            } else {
                test.generated
            } {
                session.decode(token(i), true)?;
                session.pump();
            }
            Ok((start.elapsed(), session.stats().since(&before)))
        };
        run(&mut session, true)?;
        let mut total = crate::run::session::Stats::default();
        allocator.seal();
        for _ in 0..self.repeat {
            let (time, stats) = run(&mut session, false)?;
            samples.push(time.as_nanos() as u64);
            total.add(&stats);
        }
        allocator.unseal();
        before = session.stats().since(&before);
        let tokens = u64::from(test.tokens());
        let rates: Vec<f64> = samples
            .iter()
            .map(|ns| tokens as f64 * 1e9 / *ns as f64)
            .collect();
        let times: Vec<f64> = samples.iter().map(|ns| *ns as f64).collect();
        let peak = Resident::peak();
        let all = tokens * u64::from(self.repeat);
        let object = json!({
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
            "peak_rss_bytes": peak,
            "arena_bytes": arena,
            "weights_bytes": pass_bytes,
            "io_mode": session.storage().io_mode(),
            "bytes_read": before.counters.bytes_read,
            "bytes_per_token": total.counters.bytes_read as f64 / all as f64,
            "hit_rate": total.hit_rate(),
            "stall_ms": total.stalled.as_secs_f64() * 1e3,
            "overlap": total.overlap(),
            "allocations": allocator.since_seal().calls,
        });
        Out::new().write(format!("{object}\n").as_bytes())
    }
}

/// A budget that is too small for a test, as an object for the process that started this one.
fn tell(error: Error, info: &Info, threads: u32, test: Test) -> Error {
    let why = error.headline();
    let Error::Budget {
        budget,
        least,
        table,
    } = error
    else {
        return error;
    };
    let object = json!({
        "model_filename": info.paths[0].display().to_string(),
        "model_type": info.kind,
        "model_size": info.file_bytes,
        "n_threads": threads,
        "n_prompt": test.prompt,
        "n_gen": test.generated,
        "test": test.name(),
        "budget_bytes": budget,
        "least_budget_bytes": least,
        "error": why,
        "table": table,
    });
    match Out::new().write(format!("{object}\n").as_bytes()) {
        Ok(()) => Error::Told(4),
        Err(error) => error,
    }
}

/// The error again that [`tell`] told.
fn too_small(object: &Map<String, Value>) -> Option<Error> {
    Some(Error::Budget {
        least: object.get("least_budget_bytes")?.as_u64()?,
        budget: object.get("budget_bytes")?.as_u64()?,
        table: object.get("table")?.as_str()?.to_owned(),
    })
}

/// Adds what only the starting process knows.
fn finish(object: &mut Map<String, Value>, bandwidth: f64) {
    let number = |key: &str| object.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    let (per_token, rate) = (number("bytes_per_token"), number("median_ts"));
    let ceiling = if per_token >= 1.0 {
        Some(bandwidth / per_token)
    } else {
        None
    };
    object.insert("probe_bandwidth".into(), json!(bandwidth));
    object.insert("ceiling_ts".into(), json!(ceiling));
    object.insert(
        "ceiling_share".into(),
        json!(ceiling.map(|ceiling| rate / ceiling)),
    );
}

fn tests(prompts: &str, generated: &str) -> Result<Vec<Test>, Error> {
    let list = |option: &str, text: &str| -> Result<Vec<u32>, Error> {
        let number = |item: &str| match item.trim().parse::<u32>() {
            Ok(n) if n <= 1 << 20 => Ok(n),
            _ => Err(Error::Usage(format!(
                "{option} {text}: a list of numbers, such as 128,512"
            ))),
        };
        text.split(',').map(number).collect()
    };
    let prompts = list("-p", prompts)?
        .into_iter()
        .filter(|n| *n > 0)
        .map(|prompt| Test {
            prompt,
            generated: 0,
        });
    let generated = list("-n", generated)?
        .into_iter()
        .filter(|n| *n > 0)
        .map(|generated| Test {
            prompt: 0,
            generated,
        });
    let tests: Vec<Test> = prompts.chain(generated).collect();
    if tests.is_empty() {
        return Err(Error::Usage("-p 0 -n 0: nothing to measure".into()));
    }
    Ok(tests)
}

fn table_head() -> String {
    "| model | size | budget | peak RSS | threads | test | t/s | MB read/token | storage ceiling t/s | reached | \
     overlap |\n|---|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|\n"
        .into()
}

fn table_row(object: &Map<String, Value>) -> String {
    let number = |key: &str| object.get(key).and_then(Value::as_f64).unwrap_or(0.0);
    let text = |key: &str| object.get(key).and_then(Value::as_str).unwrap_or("");
    let maybe = |key: &str, unit: f64, suffix: &str| {
        object
            .get(key)
            .and_then(Value::as_f64)
            .map_or("-".into(), |x| format!("{:.2}{suffix}", x * unit))
    };
    if object.contains_key("error") {
        return format!(
            "| {} | {} | {} | - | {} | {} | error: {} | - | - | - | - |\n",
            text("model_type"),
            mib(number("model_size") as u64),
            mib(number("budget_bytes") as u64),
            number("n_threads"),
            text("test"),
            text("error"),
        );
    }
    format!(
        "| {} | {} | {} | {} | {} | {} | {:.2} ± {:.2} | {:.2} | {} | {} | {:.0}% |\n",
        text("model_type"),
        mib(number("model_size") as u64),
        mib(number("budget_bytes") as u64),
        mib(number("peak_rss_bytes") as u64),
        number("n_threads"),
        text("test"),
        number("median_ts"),
        number("stddev_ts"),
        number("bytes_per_token") / 1e6,
        maybe("ceiling_ts", 1.0, ""),
        maybe("ceiling_share", 100.0, "%"),
        number("overlap") * 100.0,
    )
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

/// Frequencies and temperatures where the board tells them: a throttled board explains slow numbers.
fn machine_state() -> Vec<String> {
    let mut lines = Vec::new();
    let read = |path: String| {
        std::fs::read_to_string(path)
            .ok()
            .and_then(|text| text.trim().parse::<f64>().ok())
    };
    if let Some(khz) = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq".into()) {
        let most =
            read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq".into()).unwrap_or(khz);
        lines.push(format!("cpu0: {:.0} of {:.0} MHz", khz / 1e3, most / 1e3));
    }
    for zone in 0..8 {
        if let Some(milli) = read(format!("/sys/class/thermal/thermal_zone{zone}/temp")) {
            lines.push(format!("thermal zone {zone}: {:.1} C", milli / 1e3));
        }
    }
    lines
}

#[cfg(test)]
mod tests_of_bench {
    use super::*;

    #[test]
    fn lists_of_tests() {
        let found = tests("128,0,512", "32").unwrap();
        let names: Vec<String> = found.iter().map(|test| test.name()).collect();
        assert_eq!(names, ["pp128", "pp512", "tg32"]);
        assert!(tests("0", "0").is_err());
        assert!(tests("x", "1").is_err());
    }

    #[test]
    fn medians_and_deviations() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!((deviation(&[1.0, 3.0]) - 2f64.sqrt()).abs() < 1e-12);
    }
}
