//! `leanstream tokenize`: text to token ids.

use std::fmt::Write as _;

use super::args::PathArg;
use super::output::print;
use super::setup;
use crate::error::Error;
use crate::run::model::Headers;
use crate::text::{self, Tokenizer};

/// Turn text into tokens and print them, a line each.
#[derive(argh::FromArgs)]
#[argh(subcommand, name = "tokenize")]
pub struct Tokenize {
    /// the model whose tokenizer is used
    #[argh(option, short = 'm', long = "model")]
    model: PathArg,
    /// the text
    #[argh(option, short = 'p')]
    prompt: Option<PathArg>,
    /// read the text from a file, '-' for stdin; at most 256 MiB
    #[argh(option, short = 'f')]
    file: Option<PathArg>,
    /// print a JSON list of ids
    #[argh(switch)]
    ids: bool,
    /// print a JSON list of objects with id and text
    #[argh(switch)]
    json: bool,
    /// add no token that begins or ends a text
    #[argh(switch, long = "no-bos")]
    no_bos: bool,
    /// take <|im_end|> and the like as text, not as the tokens they name
    #[argh(switch, long = "no-special")]
    no_special: bool,
}

impl Tokenize {
    pub(super) fn execute(&self) -> Result<(), Error> {
        let text = setup::text(self.prompt.as_ref(), self.file.as_ref(), None)?;
        let headers = Headers::open(&self.model.0)?;
        let tokenizer = headers.with(|shards, _| {
            Tokenizer::from_gguf(&shards[0]).map_err(|error| Error::model(&self.model.0, error))
        })?;
        let options = text::Options {
            add_special: !self.no_bos,
            parse_special: !self.no_special,
        };
        let mut ids = Vec::new();
        tokenizer.encode(&text, options, &mut ids);
        if self.ids {
            return print(&format!("{}\n", serde_json::json!(ids)));
        }
        let mut out = String::new();
        let mut pieces = Vec::new();
        for id in ids {
            let mut piece = Vec::new();
            tokenizer.piece_special(id, &mut piece);
            let piece = String::from_utf8_lossy(&piece).into_owned();
            if self.json {
                pieces.push(serde_json::json!({ "id": id, "text": piece }));
            } else {
                // Writing to a String can't fail.
                let _ = writeln!(out, "{id:>7}  {piece:?}");
            }
        }
        if self.json {
            out = format!("{}\n", serde_json::Value::Array(pieces));
        }
        print(&out)
    }
}
