//! `leanstream trace`: what a packed model uses, token by token, for `leanstream replay`.

use serde_json::json;

use super::args::PathArg;
use super::output::{Out, say};
use super::setup::{self, Machine, Need, runs_a_model};
use crate::budget::held;
use crate::error::Error;
use crate::run::session::{Memory, Session, Wanted};
use crate::text;
use crate::trace::{Meta, Recorder};

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
        /// the trace to write
        #[argh(option, short = 'o', long = "output")]
        output: PathArg,
        /// tokens to record (default: 512)
        #[argh(option, short = 'n', long = "tokens", default = "512")]
        tokens: u32,
        /// one JSON object on stdout
        #[argh(switch)]
        json: bool,
    }
}

impl Trace {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let machine = self.machine();
        let text = setup::text(self.prompt.as_ref(), self.file.as_ref(), Some(&machine))?;
        let (info, mut weights) = machine.load()?;
        let Some(packed) = &weights.packed else {
            return Err(Error::Usage(format!(
                "only packed models have units to record: leanstream pack {} OUT.lean",
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
        if rest.is_empty() {
            return Err(Error::Usage(
                "the text has one token; nothing follows it to record".into(),
            ));
        }
        let need = Need {
            context: tokens.len() as u32,
            prompt: 1,
            score: false,
            one_by_one: false,
            wanted: Wanted::BEST,
        };
        let options = machine.options(&info, &weights, need, held())?;
        let sha256 = sha256(&machine)?;
        let meta = Meta {
            layers: info.hyper.layers,
            units: info.hyper.ff,
            unit_bytes,
            source_sha256: sha256,
            name: &info.name,
            scores: true,
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

/// SHA-256 of the model that the pack was made from, as the pack says it.
fn sha256(machine: &Machine<'_>) -> Result<[u8; 32], Error> {
    let headers = crate::run::model::Headers::open(machine.model)?;
    headers.with(|shards, _| {
        let hex = shards[0]
            .get("lean.source.sha256")
            .and_then(|value| value.as_str())
            .unwrap_or_default();
        let mut out = [0; 32];
        for (byte, digits) in out.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).unwrap_or("0");
            *byte = u8::from_str_radix(digits, 16).unwrap_or(0);
        }
        Ok(out)
    })
}
