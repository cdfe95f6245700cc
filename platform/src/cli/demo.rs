//! `leanstream demo`: a real model in 48 MiB, with nothing to prepare.

use super::output::say;
use super::run::{self, Job, Print};
use super::setup::Machine;
use crate::alloc::Counting;
use crate::error::Error;
use crate::fetch::SMOLLM2;
use crate::sample::Params;

/// Half the model's size: its weights don't fit.
const BUDGET: &str = "48M";

const PROMPT: &str = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
                      Face<|im_end|>\n<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n";

/// Fetch a small model (92 MB, once) and run it in 48 MiB.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "demo")]
pub struct Demo {
    /// bytes the process may hold (default: 48M)
    #[argh(option)]
    budget: Option<String>,
    /// tokens to generate (default: 96)
    #[argh(option, short = 'n', long = "predict", default = "96")]
    predict: u32,
    /// print one JSON object instead of the text
    #[argh(switch)]
    json: bool,
}

impl Demo {
    pub(super) fn execute(&self, allocator: &Counting) -> Result<(), Error> {
        let model = SMOLLM2.get(&|line| say(&format!("leanstream: {line}")))?;
        let budget = self.budget.as_deref().unwrap_or(BUDGET);
        say(&format!(
            "leanstream: SmolLM2-135M-Instruct, {:.1} MiB of weights, in a budget of {budget}: 'What is gravity?'\n",
            std::fs::metadata(&model).map_or(0, |meta| meta.len()) as f64 / f64::from(1 << 20)
        ));
        run::execute(
            Job {
                machine: Machine {
                    budget: Some(budget),
                    ..Machine::of(&model)
                },
                prompt: PROMPT.as_bytes().to_vec(),
                predict: i64::from(self.predict),
                context: None,
                params: Params {
                    temperature: 0.0,
                    ..Params::default()
                },
                ignore_eos: false,
                no_special: false,
                print: if self.json { Print::Json } else { Print::Text },
            },
            allocator,
        )
    }
}
