//! `bench --trace`: a model with random weights that uses the neurons which a trace of a smaller one
//! names; see [`Shape`].

use serde_json::{Value, json};

use super::one::UNTIMED;
use super::{Bench, Test, tests};
use crate::budget::Resident;
use crate::error::{Error, mib};
use crate::run::model::{Info, Weights};
use crate::run::session::Options;
use crate::trace::Shape;

/// What stands beside the model's name wherever there is room for few words.
pub(super) const SHORT: &str = "sets of a trace";

/// What has to be said of every result.
pub(super) struct Label {
    path: String,
    name: String,
    copies: u32,
    tokens: u32,
    bytes: u64,
}

impl Label {
    /// For people.
    pub fn sentence(&self) -> String {
        format!(
            "which neurons are active comes from {}, a trace of {}, where each stands for {} ({} tokens, over and \
             over); reads and arithmetic are real, the text is meaningless; the trace takes {} of the budget",
            self.path,
            self.name,
            self.copies,
            self.tokens,
            mib(self.bytes)
        )
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        json!({
            "file": self.path,
            "name": self.name,
            "copies": self.copies,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "note": "which neurons are active comes from the trace; the text is meaningless",
        })
    }
}

impl Bench {
    /// The tests. A prompt takes its neurons by the gates, so there is none with a trace.
    pub(super) fn tests(&self) -> Result<Vec<Test>, Error> {
        let tests = tests(self.prompts(), &self.gen_tokens)?;
        if self.trace.is_some() && tests.iter().any(|test| test.prompt > 0) {
            return Err(Error::Usage(
                "--trace says what single tokens use, not prompts: leave out -p".into(),
            ));
        }
        Ok(tests)
    }

    /// The prompt tests as given.
    pub(super) fn prompts(&self) -> &str {
        let default = if self.trace.is_some() { "0" } else { "512" };
        self.prompt_tokens.as_deref().unwrap_or(default)
    }

    /// Checks what `--trace` asks for, before the first test is started; `None` without it.
    pub(super) fn label(&self, info: &Info, tests: &[Test]) -> Result<Option<Label>, Error> {
        let Some(path) = &self.trace else {
            return Ok(None);
        };
        let usage = |why: String| Err(Error::Usage(why));
        if !info.packed {
            return usage(format!(
                "--trace needs a packed model: leanstream pack {} OUT.lean",
                info.paths[0].display()
            ));
        }
        if self.text.is_some() || self.perplexity.is_some() {
            return usage(
                "--trace makes text meaningless: leave out --text and --perplexity".into(),
            );
        }
        let shape = Shape::load(&path.0, info.hyper.ff)?;
        let longest = tests.iter().map(|test| test.generated).max().unwrap_or(0);
        let wanted = u64::from(longest) + UNTIMED as u64 + 1;
        if wanted > u64::from(shape.tokens()) {
            return usage(format!(
                "-n {longest}: with {} tokens before they are {wanted}, but the second half of {} has {}; record {} \
                 tokens or ask for fewer",
                UNTIMED + 1,
                path.0.display(),
                shape.tokens(),
                2 * wanted
            ));
        }
        Ok(Some(Label {
            path: path.0.to_string_lossy().into_owned(),
            name: shape.name().to_owned(),
            copies: shape.copies(),
            tokens: shape.tokens(),
            bytes: shape.bytes(),
        }))
    }

    /// Puts the trace into the model's place.
    pub(super) fn stand_in(&self, info: &Info, weights: &mut Weights) -> Result<(), Error> {
        if let (Some(path), Some(packed)) = (&self.trace, &mut weights.packed) {
            packed.stand_in(Shape::load(&path.0, info.hyper.ff)?);
        }
        Ok(())
    }

    /// Refuses a trace that took more memory to read than the budget has.
    pub(super) fn refuse_large(&self, options: &Options) -> Result<(), Error> {
        let peak = Resident::peak();
        match &self.trace {
            Some(path) if peak > options.budget => Err(Error::Usage(format!(
                "--trace {}: reading it took {}, more than the budget of {}; record fewer tokens",
                path.0.display(),
                mib(peak),
                mib(options.budget)
            ))),
            _ => Ok(()),
        }
    }
}
