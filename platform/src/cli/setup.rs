//! What commands that run a model share: their options, and the way from there to a session.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::args::{LoraArg, PathArg, whole};
use super::storage::{Storage, threads};
use crate::budget;
use crate::cpu::Kernels;
use crate::error::Error;
use crate::io;
use crate::run::advice::budget_for_units;
use crate::run::kv::KvType;
use crate::run::lora::{Lora, Use};
use crate::run::model::{self, Info, Weights};
use crate::run::packed::Packed;
use crate::run::session::{Options, Wanted};
use crate::signals;
use leanstream_core::plan::Head;
use leanstream_core::sparse::Select;
use leanstream_core::sparse::retain::Name;

/// Text longer than this is refused whatever the budget: a prompt of that size is a mistake.
pub(super) const TEXT_MAX: u64 = 256 << 20;

/// How often a wait for input looks whether a signal came.
const SIGNAL_CHECK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Declares a command's arguments, with those of every command that runs a model.
macro_rules! runs_a_model {
    ($(#[$meta:meta])* pub struct $name:ident { $($fields:tt)* }) => {
        #[derive(argh::FromArgs)]
        $(#[$meta])*
        pub struct $name {
            /// the model: a GGUF file, or any shard of a split one
            #[argh(option, short = 'm', long = "model")]
            model: $crate::cli::args::PathArg,
            /// bytes the process may hold: 48M, 1.5G, a share of the model's size such as 40%, or of a
            /// packed model ffn:25%, room for that share of its neurons and for all the rest (default:
            /// what the machine has, less a margin)
            #[argh(option)]
            budget: Option<String>,
            /// compute threads (default: one a core)
            #[argh(option, short = 't', from_str_fn($crate::cli::args::threads))]
            threads: Option<u32>,
            /// most prompt tokens that share one reading of the weights (default: as the budget allows)
            #[argh(option, short = 'b', long = "batch-size", from_str_fn($crate::cli::args::count::<1>))]
            batch_size: Option<u32>,
            /// type of the KV cache: f16 or q8_0 (default: f16)
            #[argh(option, long = "kv-type")]
            kv_type: Option<String>,
            /// how to read: auto, uring or pread (default: auto)
            #[argh(option)]
            io: Option<String>,
            /// read through the page cache instead of past it
            #[argh(switch)]
            buffered: bool,
            /// reads in flight (default: as many as keep the device busy)
            #[argh(option, long = "queue-depth", from_str_fn($crate::cli::setup::queue_depth))]
            queue_depth: Option<u16>,
            /// slow reads down, for trials: 300M or 300M,80us
            #[argh(option, long = "throttle-read")]
            throttle_read: Option<String>,
            /// make reads fail, for trials: seed=1,fail=2%,late=5% ...
            #[argh(option)]
            fault: Option<String>,
            /// of a packed model: exact computes every active neuron; sparse leaves out what is not in
            /// memory and matters little (default: exact; sparse with --keep, and of a pack with sketched gates)
            #[argh(option)]
            mode: Option<String>,
            /// share of a layer's active neurons, the most important ones, that are read when they are
            /// not in memory: 0 to 1 (default: 0.7); implies --mode sparse
            #[argh(option, from_str_fn($crate::cli::select::keep_from))]
            keep: Option<f32>,
            /// how much higher perplexity may get, such as 3%: chooses --keep by what was measured when the
            /// model was packed (pack --quality); implies --mode sparse
            #[argh(option)]
            tolerance: Option<String>,
            /// what of a packed model stays in memory: refine, lru-window, oneshot, static or lfu
            /// (default: refine)
            #[argh(option)]
            policy: Option<String>,
            /// parts of the sparse scheme to leave out, for trials, a comma list: order (units are taken as
            /// they stand in the file; sums are rounded in another order then, so texts may part from the
            /// default's), looks (nothing is read before its gate is known), retention (what was used last
            /// stays; of --policy refine only, where the others go with any)
            #[argh(option)]
            without: Option<String>,
            /// logits of a packed model: full computes all of them, exact those that can be among the most
            /// likely by a sketch of the head and a proven bound (the same text), fast by a bound of 8
            /// standard deviations (default: full; perplexity needs all logits and takes no other)
            #[argh(option)]
            head: Option<String>,
            /// f32 activations instead of int8: slower, for comparisons
            #[argh(switch, long = "exact-activations")]
            exact_activations: bool,
            /// a LoRA adapter (GGUF) to apply, FILE or FILE:SCALE; may be given several times
            #[argh(option)]
            lora: Vec<$crate::cli::args::LoraArg>,
            $($fields)*
        }

        impl $name {
            fn machine(&self) -> $crate::cli::setup::Machine<'_> {
                $crate::cli::setup::Machine {
                    model: &self.model.0,
                    budget: self.budget.as_deref(),
                    threads: self.threads,
                    batch: self.batch_size,
                    kv_type: self.kv_type.as_deref(),
                    io: self.io.as_deref(),
                    buffered: self.buffered,
                    queue_depth: self.queue_depth,
                    throttle: self.throttle_read.as_deref(),
                    fault: self.fault.as_deref(),
                    mode: self.mode.as_deref(),
                    keep: self.keep,
                    tolerance: self.tolerance.as_deref(),
                    policy: self.policy.as_deref(),
                    without: self.without.as_deref(),
                    head: self.head.as_deref(),
                    exact: self.exact_activations,
                    lora: &self.lora,
                }
            }
        }
    };
}
pub(super) use runs_a_model;

/// The shared options as they were given.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// Path of the model.
    pub model: &'a Path,
    /// Size or share.
    pub budget: Option<&'a str>,
    /// Compute threads.
    pub threads: Option<u32>,
    /// Largest batch.
    pub batch: Option<u32>,
    /// Name of the KV cache's type.
    pub kv_type: Option<&'a str>,
    /// Name of the backend.
    pub io: Option<&'a str>,
    /// Through the page cache.
    pub buffered: bool,
    /// Reads in flight.
    pub queue_depth: Option<u16>,
    /// Throttle.
    pub throttle: Option<&'a str>,
    /// Faults.
    pub fault: Option<&'a str>,
    /// `exact` or `sparse`.
    pub mode: Option<&'a str>,
    /// Share of active neurons that are read when they are missing.
    pub keep: Option<f32>,
    /// How much higher perplexity may get.
    pub tolerance: Option<&'a str>,
    /// Name of the retention policy.
    pub policy: Option<&'a str>,
    /// Parts of the sparse scheme to leave out.
    pub without: Option<&'a str>,
    /// `full`, `exact` or `fast`.
    pub head: Option<&'a str>,
    /// f32 activations.
    pub exact: bool,
    /// Adapters.
    pub lora: &'a [LoraArg],
}

/// What a run needs besides the shared options.
#[derive(Clone, Copy)]
pub struct Need {
    /// Positions of the KV cache.
    pub context: u32,
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Whether tokens are scored.
    pub score: bool,
    /// Whether they are taken in one at a time.
    pub one_by_one: bool,
    /// Of which logits use is made.
    pub wanted: Wanted,
}

impl<'a> Machine<'a> {
    /// A model with everything else at its default.
    pub fn of(model: &'a Path) -> Self {
        Self {
            model,
            budget: None,
            threads: None,
            batch: None,
            kv_type: None,
            io: None,
            buffered: false,
            queue_depth: None,
            throttle: None,
            fault: None,
            mode: None,
            keep: None,
            tolerance: None,
            policy: None,
            without: None,
            head: None,
            exact: false,
            lora: &[],
        }
    }

    /// Loads the model's resident part, and adapters.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn load(&self) -> Result<(Info, Weights), Error> {
        let (info, mut weights) = model::load_with(self.model, self.head()?)?;
        if !self.lora.is_empty() {
            let uses: Vec<Use> = self.lora.iter().map(|lora| lora.0.clone()).collect();
            weights.lora = Some(Lora::load(&uses, &info, &weights)?);
        }
        Ok((info, weights))
    }

    /// How logits are computed.
    pub(super) fn head(&self) -> Result<Head, Error> {
        let Some(name) = self.head else {
            return Ok(Head::Full);
        };
        Head::from_name(name).ok_or_else(|| {
            Error::Usage(format!(
                "--head: '{name}' is not a way; full, exact or fast"
            ))
        })
    }

    /// The options of a session, once the model and the prompt are known, in a process that holds
    /// `held` bytes. The options that need neither are checked as well, so that a wrong one is an
    /// error of usage.
    ///
    /// # Errors
    /// An option that can't be understood or met.
    pub fn options(
        &self,
        info: &Info,
        weights: &Weights,
        need: Need,
        held: u64,
    ) -> Result<Options, Error> {
        let share = self.budget.and_then(|text| text.strip_prefix(FFN));
        let budget = match self.budget {
            // Known when the rest is.
            Some(_) if share.is_some() => u64::MAX,
            Some(text) => budget::parse_size(text, Some(info.file_bytes)).map_err(|error| {
                let share = match info.packed {
                    true => ", or ffn:25%, room for that share of the neurons",
                    false => "",
                };
                usage("--budget", &format_args!("{error}{share}"))
            })?,
            None => default_budget(info.file_bytes),
        };
        let threads = threads(self.threads);
        let kv_type = match self.kv_type {
            None => KvType::F16,
            Some(name) => KvType::from_name(name).ok_or_else(|| {
                usage(
                    "--kv-type",
                    &format_args!("'{name}' is not a type; f16 or q8_0"),
                )
            })?,
        };
        let storage = Storage {
            io: self.io,
            buffered: self.buffered,
            throttle: self.throttle,
            fault: self.fault,
        };
        let (direct, io) = storage.options()?;
        let packed = weights.packed.as_ref();
        let select = self.select(packed.is_some_and(Packed::sketched))?;
        let tolerance = self.tolerance()?;
        let without = self.without(select)?;
        let policy = match self.policy {
            None => Name::Refine,
            Some(name) => Name::from_name(name)
                .filter(|name| !name.needs_oracle())
                .ok_or_else(|| {
                    usage(
                        "--policy",
                        &format_args!(
                            "'{name}' is not a policy; refine, lru-window, oneshot, static or lfu"
                        ),
                    )
                })?,
        };
        if !info.packed
            && (select != Select::All || self.policy.is_some() || self.without.is_some())
        {
            return Err(Error::Usage(format!(
                "--mode sparse, --keep, --tolerance, --policy and --without need a model whose neurons are packed, which {} isn't: \
                 leanstream pack MODEL.gguf OUT.lean",
                info.paths[0].display()
            )));
        }
        let mut options = Options {
            budget,
            select,
            policy,
            context: need.context,
            prompt: need.prompt,
            batch: self.batch,
            score: need.score,
            wanted: need.wanted,
            one_by_one: need.one_by_one || select != Select::All,
            threads,
            kv_type,
            exact: self.exact,
            kernels: Kernels::from_env().map_err(|e| Error::Usage(e.to_string()))?,
            direct,
            queue_depth: self.queue_depth,
            without,
            gap: None,
            watched: false,
            io,
            stop: &signals::STOP,
        };
        if let Some(share) = share {
            options.budget = budget_for_share(share, info, weights, &options, held)?;
        }
        if let Some(tolerance) = tolerance {
            options.select = self.within(tolerance, info, weights, &options, held)?;
        }
        Ok(options)
    }

    /// The options again as arguments, for a process of this program.
    pub fn arguments(&self) -> Vec<OsString> {
        let named = |name: &str, value: Option<String>| {
            value.map(|value| [OsString::from(name), OsString::from(value)])
        };
        let number = |value: Option<u32>| value.map(|value| value.to_string());
        let text = |value: Option<&str>| value.map(str::to_owned);
        let pairs = [
            named("--budget", text(self.budget)),
            named("--threads", number(self.threads)),
            named("--batch-size", number(self.batch)),
            named("--kv-type", text(self.kv_type)),
            named("--io", text(self.io)),
            named("--queue-depth", number(self.queue_depth.map(u32::from))),
            named("--throttle-read", text(self.throttle)),
            named("--fault", text(self.fault)),
            named("--mode", text(self.mode)),
            named("--keep", self.keep.map(|keep| keep.to_string())),
            named("--tolerance", text(self.tolerance)),
            named("--policy", text(self.policy)),
            named("--without", text(self.without)),
            named("--head", text(self.head)),
        ];
        let switches = [
            (self.buffered, "--buffered"),
            (self.exact, "--exact-activations"),
        ];
        let adapters = self.lora.iter().flat_map(|LoraArg(lora)| {
            let mut value = lora.path.clone().into_os_string();
            value.push(format!(":{}", lora.scale));
            ["--lora".into(), value]
        });
        ["--model".into(), self.model.into()]
            .into_iter()
            .chain(adapters)
            .chain(pairs.into_iter().flatten().flatten())
            .chain(
                switches
                    .into_iter()
                    .filter(|(given, _)| *given)
                    .map(|(_, name)| name.into()),
            )
            .collect()
    }
}

/// Reads in flight.
pub(super) fn queue_depth(text: &str) -> Result<u16, String> {
    whole::<u16, 1, { io::DEPTH_MAX as i128 }>(text)
}

fn usage(name: &str, why: &dyn std::fmt::Display) -> Error {
    Error::Usage(format!("{name}: {why}"))
}

/// Begins a budget that is given as the share of a packed model's neurons that have room.
const FFN: &str = "ffn:";

/// The budget in which `share` of the units have slots and everything else stays in memory.
fn budget_for_share(
    share: &str,
    info: &Info,
    weights: &Weights,
    options: &Options,
    held: u64,
) -> Result<u64, Error> {
    let fail = |why: &str| Err(usage("--budget", &format_args!("'{FFN}{share}' {why}")));
    let Some(packed) = weights.packed.as_ref().filter(|_| info.packed) else {
        return fail(&format!(
            "needs a model whose neurons are packed, which {} isn't: leanstream pack MODEL.gguf OUT.lean",
            info.paths[0].display()
        ));
    };
    let units = (packed.layers().len() * packed.ff()) as u64;
    let slots = match budget::parse_size(share, Some(units)) {
        Ok(slots) if share.ends_with('%') && slots <= units => slots as u32,
        _ => return fail("is no share of the neurons; ffn:0% to ffn:100%"),
    };
    let request = options.request(held, options.open(info)?.align());
    match budget_for_units(info, weights, &request, slots) {
        Some(budget) => Ok(budget),
        None => fail("asks for more memory than any machine has; lower -c"),
    }
}

/// What the machine has, less a margin for others and for what the kernel keeps for us; enough for
/// any model that we were asked for where the machine doesn't say.
pub(super) fn default_budget(file_bytes: u64) -> u64 {
    match budget::available() {
        Some(available) => available.bytes - (available.bytes / 16).min(512 << 20),
        None => file_bytes.saturating_mul(2).max(1 << 30),
    }
}

/// The longest text that is read, and why no more.
#[derive(Clone, Copy)]
pub(super) struct Longest {
    /// Bytes.
    pub bytes: u64,
    /// The reason and the way out, after "is larger than N bytes, ".
    pub why: &'static str,
}

impl Longest {
    /// For a trace.
    pub fn trace() -> Self {
        Self {
            bytes: 16 << 30,
            why: "the most that is read; record fewer tokens",
        }
    }
}

/// The text is held, and its tokens with it, before the budget is planned, so the budget bounds it.
fn longest(machine: Option<&Machine<'_>>) -> Result<Longest, Error> {
    let Some(machine) = machine else {
        return Ok(Longest {
            bytes: TEXT_MAX,
            why: "the most that is read; give a shorter text",
        });
    };
    let budget = match machine.budget {
        None => default_budget(u64::MAX),
        Some(text) => {
            let model = if text.ends_with('%') {
                let headers = model::Headers::open(machine.model)?;
                Some(headers.files().map(|(_, bytes)| bytes).sum())
            } else {
                None
            };
            // Room for a share of the neurons is more than that share of the file.
            let text = text.strip_prefix(FFN).unwrap_or(text);
            // What is no size is told with the other options.
            budget::parse_size(text, model).unwrap_or(u64::MAX)
        }
    };
    Ok(Longest {
        bytes: (budget / 16).clamp(64 << 10, TEXT_MAX),
        why: "a sixteenth of the budget; give a shorter text or a larger --budget",
    })
}

/// A prompt or document: text from the command line, or from a file (`-` is stdin). `machine` where
/// the text is for a run in its budget.
///
/// # Errors
/// Both or neither given, a file that can't be read, or a text too long for the budget.
pub fn text(
    prompt: Option<&PathArg>,
    file: Option<&PathArg>,
    machine: Option<&Machine<'_>>,
) -> Result<Vec<u8>, Error> {
    match (prompt, file.map(|file| file.0.as_path())) {
        (Some(prompt), None) => Ok(prompt.0.as_os_str().as_bytes().to_vec()),
        (None, Some(path)) if path == Path::new("-") => {
            read(&std::io::stdin(), Path::new("stdin"), longest(machine)?)
        }
        (None, Some(path)) => {
            // Without waiting for a pipe's writer, which would be deaf to signals.
            let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
            let file = rustix::fs::open(path, flags, Mode::empty())
                .map_err(|error| Error::io(path, "open it", error.into()))?;
            read(&file, path, longest(machine)?)
        }
        (Some(_), Some(_)) => Err(Error::Usage("give -p TEXT or -f FILE, not both".into())),
        (None, None) => Err(Error::Usage(
            "give the text with -p TEXT or -f FILE ('-f -' reads stdin)".into(),
        )),
    }
}

/// Reads all of it. A pipe may stay silent for ever, so a signal is looked for while waiting.
pub(super) fn read(from: &impl AsFd, path: &Path, longest: Longest) -> Result<Vec<u8>, Error> {
    let failed = |error: Errno| Error::io(path, "read it", error.into());
    let mut bytes = Vec::new();
    let mut part = vec![0; 64 << 10];
    loop {
        signals::check()?;
        let mut ready = [PollFd::new(from, PollFlags::IN)];
        match poll(&mut ready, Some(&SIGNAL_CHECK)) {
            Ok(0) | Err(Errno::INTR) => continue,
            // Whatever else is wrong with it, reading tells.
            _ => {}
        }
        match rustix::io::read(from, &mut part[..]) {
            Ok(0) => return Ok(bytes),
            Ok(n) => bytes.extend_from_slice(&part[..n]),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(failed(error)),
        }
        if bytes.len() as u64 > longest.bytes {
            return Err(Error::Usage(format!(
                "{}: is larger than {} bytes, {}",
                path.display(),
                longest.bytes,
                longest.why,
            )));
        }
    }
}
