//! `leanstream trace`: what a packed model uses, token by token, for `leanstream replay`.

use std::path::PathBuf;

use serde_json::json;

use super::args::{PathArg, count};
use super::output::{Out, say};
use super::setup::{self, Need, runs_a_model};
use crate::budget::held;
use crate::error::{Error, refuse_input, refuse_special};
use crate::run::session::{Memory, Session, Wanted};
use crate::text;
use crate::trace::{Meta, Recorder};

/// Tokens of the shortest trace that tells anything: one to know beforehand, one to count.
const TOKENS_LEAST: u32 = 2;

runs_a_model! {
    /// Record which neurons a packed model uses along a text, and what each stage of looking ahead
    /// foresees of them.
    #[argh(subcommand, name = "trace")]
    pub struct Trace {
        /// the text
        #[argh(option, short = 'p')]
        prompt: Option<PathArg>,
        /// read the text from a file, '-' for stdin
        #[argh(option, short = 'f')]
        file: Option<PathArg>,
        /// the trace to write: a file, since what a trace begins with is known last
        #[argh(option, short = 'o', long = "output")]
        output: PathArg,
        /// tokens to record (default: 512)
        #[argh(option, short = 'n', long = "tokens", default = "512", from_str_fn(count::<0>))]
        tokens: u32,
        /// one JSON object on stdout
        #[argh(switch)]
        json: bool,
    }
}

impl Trace {
    pub(super) fn execute(&self) -> Result<(), Error> {
        if self.output.0.as_os_str() == "-" {
            return Err(Error::Usage(
                "-o -: what a trace begins with is written last, which a pipe can't do; name a file".into(),
            ));
        }
        refuse_special(&self.output.0)?;
        if self.tokens < TOKENS_LEAST {
            return Err(Error::Usage(format!(
                "-n {}: replay needs a trace of {TOKENS_LEAST} tokens at least",
                self.tokens
            )));
        }
        let machine = self.machine();
        let text = setup::text(self.prompt.as_ref(), self.file.as_ref(), Some(&machine))?;
        let (info, mut weights) = machine.load()?;
        let text_file = self.file.iter().map(|file| file.0.as_path());
        let models = info.paths.iter().map(PathBuf::as_path);
        refuse_input(&self.output.0, text_file.chain(models))?;
        let Some(packed) = weights.packed.as_ref().filter(|_| info.packed) else {
            return Err(Error::Usage(format!(
                "{} has no units to record: leanstream pack MODEL.gguf OUT.lean",
                self.model.0.display()
            )));
        };
        let unit_bytes = packed.unit_bytes_max();
        let mut tokens = Vec::new();
        let options = text::Options {
            add_special: true,
            parse_special: false,
        };
        info.tokenizer.encode(&text, options, &mut tokens);
        tokens.truncate(self.tokens as usize + 1);
        let [first, rest @ ..] = &tokens[..] else {
            return Err(Error::Usage("the text is empty".into()));
        };
        if rest.len() < TOKENS_LEAST as usize {
            return Err(Error::Usage(format!(
                "the text has {} tokens, the first of which is not recorded, and replay needs {TOKENS_LEAST}; give a longer text",
                tokens.len()
            )));
        }
        let need = Need {
            context: tokens.len() as u32,
            prompt: 1,
            score: false,
            one_by_one: false,
            wanted: Wanted::BEST,
        };
        let options = machine.options(&info, &weights, need, held())?;
        let meta = Meta {
            layers: info.hyper.layers,
            units: info.hyper.ff,
            unit_bytes,
            source_sha256: info.source_sha256.unwrap_or_default(),
            name: &info.name,
            scores: true,
            ranks: !info.hyper.act.sparse(),
        };
        let mut memory = Memory::new(&info, &mut weights, &options, held())?;
        let mut session = Session::start(&info, weights, &mut memory, &options)?;
        while let Some(notice) = session.take_notice() {
            say(&format!("leanstream: {notice}"));
        }
        session.prompt(&[*first], true)?;
        session.record(Recorder::begin(&self.output.0, &meta)?);
        for (index, token) in rest.iter().enumerate() {
            session.decode(*token, index + 1 < rest.len())?;
        }
        let recorder = session.end_record().expect("it was given");
        recorder.finish()?;
        let path = &self.output.0;
        if self.json {
            let summary = json!({
                "trace": path.to_string_lossy(),
                "tokens": rest.len(),
                "layers": info.hyper.layers,
                "units": info.hyper.ff,
                "unit_bytes": unit_bytes,
            });
            Out::new().write(format!("{summary}\n").as_bytes())?;
        }
        say(&format!(
            "leanstream: {} tokens of {} recorded in {}; leanstream replay {} shows what policies make of it",
            rest.len(),
            info.name,
            path.display(),
            path.display()
        ));
        Ok(())
    }
}
