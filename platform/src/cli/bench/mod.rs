//! `leanstream bench`: tokens per second under budgets, beside what the storage allows; of packed
//! models under policies too.
//!
//! Each test runs in a process of its own, so that its peak memory is its own; this one starts them,
//! probes the storage, and prints. JSON lines have llama-bench's keys and ours.

mod alone;
mod one;
mod plot;
mod table;
mod traced;

use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};

use self::alone::Known;
use self::plot::Figure;
use self::table::Table;
use self::traced::{Label, SHORT};
use super::args::{PathArg, whole};
use super::output::{Out, say};
use super::plot::Plot;
use super::setup::{self, Longest, Machine, Need, runs_a_model};
use crate::alloc::Counting;
use crate::error::{Error, refuse_input, refuse_special};
use crate::io::{Source, probe};
use crate::run::model::Info;
use crate::run::session::{Options, Wanted};
use leanstream_core::sparse::Select;

/// How the storage is probed: as the engine reads, in pieces of this size, for this long.
const PROBE_BLOCK: u32 = 256 << 10;
const PROBE_DEPTH: u16 = 8;
const PROBE_TIME: Duration = Duration::from_millis(1500);

/// Perplexity is measured over so many tokens a chunk, and so many chunks.
const CHUNK: &str = "512";
const CHUNKS: &str = "2";

/// Given to the processes that this one starts: run one test and print its object.
const ONE: &str = "LEANSTREAM_BENCH_ONE";

runs_a_model! {
    /// Measure tokens per second, memory and reads under one or more budgets; of a packed model also
    /// under more than one --policy, a comma list.
    #[argh(subcommand, name = "bench")]
    pub struct Bench {
        /// prompt tokens of the prompt test, a comma list; 0 for none (default: 512; 0 with --trace)
        #[argh(option, short = 'p', long = "prompt-tokens")]
        prompt_tokens: Option<String>,
        /// tokens of the generation test, a comma list; 0 for none (default: 128)
        #[argh(option, short = 'n', long = "gen-tokens", default = "\"128\".into()")]
        gen_tokens: String,
        /// measured runs of each test, after one to warm up (default: 5)
        #[argh(option, short = 'r', long = "repeat", default = "5", from_str_fn(whole::<_, 1, 1000>))]
        repeat: u32,
        /// output: md or jsonl (default: md)
        #[argh(option, short = 'o', default = "\"md\".into()")]
        output: String,
        /// text that a packed model reads and is made to generate, since which neurons are active
        /// depends on it (default: the built-in text that packs are calibrated on)
        #[argh(option)]
        text: Option<PathArg>,
        /// of a packed model with random weights: take the active neurons from this trace of a smaller one
        /// (leanstream trace), each for several; reads and arithmetic are real, the text is meaningless
        #[argh(option)]
        trace: Option<PathArg>,
        /// of a packed model, under every budget and policy: its perplexity over the first 1024
        /// tokens of this file, taken in one at a time
        #[argh(option)]
        perplexity: Option<PathArg>,
        /// draw tokens per second over the budget, a line for each policy, into this SVG file
        #[argh(option)]
        plot: Option<PathArg>,
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
        let tests = self.tests()?;
        if let Some(one) = std::env::var_os(ONE) {
            let index: usize = one.to_string_lossy().parse().unwrap_or(0);
            let test = *tests
                .get(index)
                .ok_or_else(|| Error::Usage(format!("{ONE}: no such test")))?;
            return match Known::take() {
                Some(known) => self.row(self.one(test, allocator, true)?, &known),
                None => {
                    let object = self.one(test, allocator, false)?;
                    Out::new().write(format!("{}\n", Value::Object(object)).as_bytes())
                }
            };
        }
        let markdown = self.markdown()?;
        // Closed, it would be an open /dev/null to the process that the test runs in.
        Out::new().write(b"")?;
        if let Some(plot) = &self.plot {
            let given = [&self.text, &self.trace, &self.perplexity];
            let given = given.into_iter().flatten().map(|path| path.0.as_path());
            refuse_special(&plot.0)?;
            refuse_input(&plot.0, given.chain([self.model.0.as_path()]))?;
        }
        let (budgets, policies) = (items(&self.budget), items(&self.policy));
        let (info, options) = self.check(&policies)?;
        let label = self.label(&info, &tests)?;
        if let Some(label) = &label {
            say(&format!("leanstream: {}", label.sentence()));
        }
        let plot = self.plot.as_ref().map(|path| Plot::begin(&path.0));
        let plot = plot.transpose()?;
        let bandwidth = bandwidth(&info, &options)?;
        if let ([_], [_], [_], None, None) = (
            &budgets[..],
            &policies[..],
            &tests[..],
            &self.perplexity,
            &plot,
        ) {
            let trace = label.as_ref().map(Label::json);
            let known = Known { bandwidth, trace };
            return Err(known.become_test(self.command(&self.machine(), 0)?));
        }
        let (packed, head, title) = (
            info.packed,
            info.head,
            title(&info, &options, label.as_ref()),
        );
        // While a test runs, this process holds as little as it can.
        drop((info, options));
        let mut rows = Rows {
            out: Out::new(),
            table: markdown.then(|| Table::new(packed, head)),
            figure: Figure::new(&title),
            failed: None,
        };
        for &budget in &budgets {
            for &policy in &policies {
                let machine = Machine {
                    budget,
                    policy,
                    ..self.machine()
                };
                let mut perplexity = None;
                let mut told = false;
                for index in 0..tests.len() {
                    let mut object = self.start(&machine, index)?;
                    if let Some(error) = too_small(&object) {
                        // One of several says so in its row, and the others are measured all the same.
                        if budgets.len() == 1 {
                            return Err(error);
                        }
                        // It is too small for all of its tests.
                        if !std::mem::replace(&mut told, true) {
                            say(&format!("leanstream: {error}"));
                        }
                        rows.failed = Some(error.exit_code());
                        object.remove("table");
                    } else {
                        finish(&mut object, bandwidth);
                        if let (Some(file), None) = (&self.perplexity, &perplexity) {
                            perplexity = Some(match score(&machine, &file.0) {
                                // It has been told, and the row has the rest.
                                Err(Error::Told(4)) => {
                                    rows.failed = Some(4);
                                    Value::Null
                                }
                                found => found?,
                            });
                        }
                        if packed {
                            let found = perplexity.clone().unwrap_or(Value::Null);
                            object.insert("perplexity".into(), found);
                        }
                    }
                    if let Some(label) = &label {
                        object.insert("trace".into(), label.json());
                    }
                    rows.add(object)?;
                }
            }
        }
        if markdown {
            say_storage(bandwidth);
        }
        if let Some(plot) = plot {
            plot.finish(&rows.figure.draw())?;
        }
        rows.failed.map_or(Ok(()), |code| Err(Error::Told(code)))
    }

    /// Whether the results are a table; otherwise JSON lines.
    fn markdown(&self) -> Result<bool, Error> {
        match self.output.as_str() {
            "md" => Ok(true),
            "jsonl" => Ok(false),
            other => Err(Error::Usage(format!("-o {other}: md or jsonl"))),
        }
    }

    /// Prints the only row.
    fn row(&self, mut object: Map<String, Value>, known: &Known) -> Result<(), Error> {
        finish(&mut object, known.bandwidth);
        if let Some(trace) = &known.trace {
            object.insert("trace".into(), trace.clone());
        }
        let packed = object.contains_key("policy");
        if packed {
            object.insert("perplexity".into(), Value::Null);
        }
        if !self.markdown()? {
            return Out::new().write(format!("{}\n", Value::Object(object)).as_bytes());
        }
        let mut table = Table::new(packed, self.machine().head()?);
        Out::new().write(table.row(&object).as_bytes())?;
        say_storage(known.bandwidth);
        Ok(())
    }

    /// Checks what can be checked before the first test is started.
    fn check(&self, policies: &[Option<&str>]) -> Result<(Info, Options), Error> {
        let (info, weights) = self.machine().load()?;
        let need = Need {
            context: 1,
            prompt: 1,
            score: false,
            one_by_one: false,
            wanted: Wanted::BEST,
        };
        let options = policies.iter().map(|&policy| {
            let machine = Machine {
                budget: None,
                policy,
                ..self.machine()
            };
            machine.options(&info, &weights, need, 0)
        });
        let mut options = options.collect::<Result<Vec<_>, _>>()?;
        let text = self.text.is_some() && !info.head.sketched();
        if !info.packed && (text || self.perplexity.is_some()) {
            return Err(Error::Usage(format!(
                "--text and --perplexity need a packed model: leanstream pack {} OUT.lean",
                info.paths[0].display()
            )));
        }
        let last = options.pop().expect("a list has an item");
        Ok((info, last))
    }

    /// The process that runs test `index` on `machine`.
    fn command(&self, machine: &Machine<'_>, index: usize) -> Result<Command, Error> {
        let mut command = program("bench", machine)?;
        command
            .args(["-p", self.prompts(), "-n", &self.gen_tokens])
            .args(["-r", &self.repeat.to_string(), "-o", &self.output])
            .env(ONE, index.to_string());
        if let Some(text) = &self.text {
            command.arg("--text").arg(&text.0);
        }
        if let Some(trace) = &self.trace {
            command.arg("--trace").arg(&trace.0);
        }
        Ok(command)
    }

    /// Runs it.
    fn start(&self, machine: &Machine<'_>, index: usize) -> Result<Map<String, Value>, Error> {
        let (status, said) = output(self.command(machine, index)?)?;
        match serde_json::from_slice(&said) {
            Ok(Value::Object(object)) if status.success() || too_small(&object).is_some() => {
                Ok(object)
            }
            _ => Err(ended(status)),
        }
    }
}

/// Says how fast the storage is, and what state the machine is in.
fn say_storage(bandwidth: f64) {
    say(&format!(
        "\nstorage: {:.2} GB/s in reads of {} KiB, {PROBE_DEPTH} in flight",
        bandwidth / 1e9,
        PROBE_BLOCK >> 10
    ));
    for line in table::machine_state() {
        say(&line);
    }
}

/// What a figure is of.
fn title(info: &Info, options: &Options, label: Option<&Label>) -> String {
    let of = match label {
        Some(_) => format!("{}, {SHORT}", info.kind),
        None => info.kind.clone(),
    };
    match options.select {
        _ if !info.packed => of,
        Select::All => format!("{of}, every active neuron"),
        Select::Top(keep) => format!("{of}, --keep {keep}"),
    }
}

/// What comes of the tests.
struct Rows {
    out: Out,
    /// `None`: JSON lines.
    table: Option<Table>,
    figure: Figure,
    /// Exit code of a test that couldn't be run.
    failed: Option<i32>,
}

impl Rows {
    fn add(&mut self, object: Map<String, Value>) -> Result<(), Error> {
        self.figure.add(&object);
        let line = match &mut self.table {
            Some(table) => table.row(&object),
            None => format!("{}\n", Value::Object(object)),
        };
        self.out.write(line.as_bytes())
    }
}

/// The items of a comma list; one that says nothing where there is none.
fn items(list: &Option<String>) -> Vec<Option<&str>> {
    match list {
        None => vec![None],
        Some(list) => list.split(',').map(|item| Some(item.trim())).collect(),
    }
}

/// Bytes per second of the storage under the model.
fn bandwidth(info: &Info, options: &Options) -> Result<f64, Error> {
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
    let found = probe::bandwidth(
        &Arc::new(source),
        &io,
        least,
        probe::Order::Sequential,
        PROBE_TIME,
    )
    .map_err(|error| failed(&error))?;
    Ok(found.bytes_per_s())
}

/// Perplexity over the beginning of a file, measured in a process of its own.
fn score(machine: &Machine<'_>, file: &Path) -> Result<Value, Error> {
    // Scoring needs every logit, whichever way the tests choose theirs.
    let machine = Machine {
        head: None,
        ..*machine
    };
    let mut command = program("perplexity", &machine)?;
    command
        .args(["--ctx-size", CHUNK, "--chunks", CHUNKS, "--json", "-f"])
        .arg(file)
        .arg("--token-by-token");
    let (status, said) = output(command)?;
    match serde_json::from_slice::<Value>(&said) {
        Ok(object) if status.success() => Ok(object["perplexity"].clone()),
        _ => Err(ended(status)),
    }
}

/// This program again, with a subcommand and the shared options.
fn program(subcommand: &str, machine: &Machine<'_>) -> Result<Command, Error> {
    let mut command = Command::new(std::env::current_exe().map_err(not_started)?);
    command.arg(subcommand).args(machine.arguments());
    Ok(command)
}

/// Runs it and reads what it prints. A stop of this process stops it.
fn output(mut command: Command) -> Result<(ExitStatus, Vec<u8>), Error> {
    let command = command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(not_started)?;
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
    let status = child.wait().map_err(not_started)?;
    Ok((status, read?))
}

fn not_started(error: std::io::Error) -> Error {
    Error::Runtime(format!("cannot start a process for a test: {error}"))
}

/// A test's process that had no result; it has told why, if it could.
fn ended(status: ExitStatus) -> Error {
    match status.code() {
        Some(code) if code != 0 => Error::Told(code),
        _ => Error::Runtime(format!("a test's process ended with {status}")),
    }
}

/// The error again that [`one::tell`] told.
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

#[cfg(test)]
mod tests_of_lists {
    use super::*;

    #[test]
    fn lists_of_tests() {
        let found = tests("128,0,512", "32").unwrap();
        let names: Vec<String> = found.iter().map(|test| test.name()).collect();
        assert_eq!(names, ["pp128", "pp512", "tg32"]);
        assert!(tests("0", "0").is_err());
        assert!(tests("x", "1").is_err());
    }
}
