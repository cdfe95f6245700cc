//! From the process's arguments to a command: what `argh` can't do for us happens before it.
//!
//! - `--option=value` is split.
//! - Other spellings of llama.cpp's options are mapped to the one that the commands declare.
//! - An argument that isn't UTF-8 (a path, most likely), or is `-`, travels as [`ESCAPE`] and hex digits, and
//!   [`PathArg`] turns it back.

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use leanstream_core::quant::QuantType;

use crate::pack::quantize::encodes;
use crate::run::lora::Use;

/// Begins an argument that travels as hex digits: one that isn't UTF-8, or begins with this.
const ESCAPE: char = '\u{F8FF}';

/// Spellings that llama.cpp knows, and ours.
const ALIASES: [(&str, &str); 9] = [
    ("--n-predict", "--predict"),
    ("--temperature", "--temp"),
    ("--ctx", "--ctx-size"),
    ("--n-prompt", "--prompt-tokens"),
    ("--n-gen", "--gen-tokens"),
    ("--repetitions", "--repeat"),
    ("-V", "--version"),
    ("-h", "--help"),
    ("-tb", "--threads"),
];

/// Options without a value. What follows any other one is its value, whatever it looks like.
const SWITCHES: [&str; 18] = [
    "--help",
    "--version",
    "--buffered",
    "--exact-activations",
    "--ignore-eos",
    "--no-special",
    "--token-by-token",
    "--full",
    "--resume",
    "--json",
    "--json-stream",
    "--ids",
    "--no-bos",
    "--no-tensors",
    "--no-stages",
    "--blocks",
    "--sha256",
    "--",
];

/// The arguments as `argh` wants them.
pub fn normalise(args: impl IntoIterator<Item = OsString>) -> Vec<String> {
    let mut out = Vec::new();
    let mut value_next = false;
    for arg in args {
        if std::mem::take(&mut value_next) {
            out.push(value(&arg));
            continue;
        }
        // `argh` takes it for an option.
        if arg == "-" {
            out.push(escape(b"-"));
            continue;
        }
        let text = match arg.into_string() {
            Ok(text) => text,
            Err(raw) => {
                out.extend(escape_bytes(&raw));
                continue;
            }
        };
        let (name, value) = match text.split_once('=') {
            Some((name, value)) if name.starts_with("--") => (name, Some(value)),
            _ => (text.as_str(), None),
        };
        let name = ALIASES
            .iter()
            .find(|(theirs, _)| *theirs == name)
            .map_or(name, |(_, ours)| ours);
        value_next = value.is_none() && name.starts_with('-') && !SWITCHES.contains(&name);
        out.push(name.to_owned());
        out.extend(value.map(|value| self::value(OsStr::new(value))));
    }
    out
}

/// A value as it travels.
fn value(raw: &OsStr) -> String {
    match raw.to_str() {
        Some(text) if !text.starts_with(ESCAPE) => text.to_owned(),
        _ => escape(raw.as_bytes()),
    }
}

/// An argument that isn't UTF-8, split at `=` as the others are.
fn escape_bytes(raw: &OsStr) -> Vec<String> {
    let bytes = raw.as_bytes();
    if let Some(at) = bytes
        .iter()
        .position(|b| *b == b'=')
        .filter(|_| bytes.starts_with(b"--"))
        && let Ok(name) = std::str::from_utf8(&bytes[..at])
    {
        return vec![name.to_owned(), escape(&bytes[at + 1..])];
    }
    vec![escape(bytes)]
}

fn escape(bytes: &[u8]) -> String {
    let mut out = String::from(ESCAPE);
    for byte in bytes {
        // Writing to a String can't fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

/// A path or a prompt, with whatever bytes it has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PathArg(pub PathBuf);

impl argh::FromArgValue for PathArg {
    fn from_arg_value(value: &str) -> Result<Self, String> {
        let Some(hex) = value.strip_prefix(ESCAPE) else {
            return Ok(Self(PathBuf::from(value)));
        };
        let digits = hex.as_bytes().chunks(2);
        let bytes: Option<Vec<u8>> = digits
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok())
            .collect();
        let bytes = bytes.ok_or("not a path")?;
        Ok(Self(PathBuf::from(OsString::from_vec(bytes))))
    }
}

/// An adapter and how strongly it is applied: `FILE` or `FILE:SCALE`. What follows the last colon is
/// part of the name where it is no number.
#[derive(Clone, PartialEq, Debug)]
pub struct LoraArg(pub Use);

impl argh::FromArgValue for LoraArg {
    fn from_arg_value(value: &str) -> Result<Self, String> {
        let path = PathArg::from_arg_value(value)?.0;
        let bytes = path.as_os_str().as_bytes();
        let colon = bytes.iter().rposition(|b| *b == b':').filter(|at| *at > 0);
        let scale = colon.and_then(|at| {
            let scale: f32 = std::str::from_utf8(&bytes[at + 1..]).ok()?.parse().ok()?;
            Some((OsStr::from_bytes(&bytes[..at]), scale)).filter(|_| scale.is_finite())
        });
        Ok(Self(match scale {
            Some((path, scale)) => Use {
                path: path.into(),
                scale,
            },
            None => Use { path, scale: 1.0 },
        }))
    }
}

/// A whole number from `LOW` to `HIGH`, for every option that takes one.
///
/// # Errors
/// What isn't one; the message names the range.
pub fn whole<T: TryFrom<i128>, const LOW: i128, const HIGH: i128>(text: &str) -> Result<T, String> {
    let number = text.parse::<i128>().ok();
    let number = number.filter(|number| (LOW..=HIGH).contains(number));
    let number = number.and_then(|number| T::try_from(number).ok());
    number.ok_or_else(|| format!("give a whole number from {LOW} to {HIGH}"))
}

/// Any number of 32 bits, from `LOW` on.
///
/// # Errors
/// As [`whole`].
pub fn count<const LOW: i128>(text: &str) -> Result<u32, String> {
    whole::<u32, LOW, { u32::MAX as i128 }>(text)
}

/// Any number of 64 bits, from `LOW` on.
///
/// # Errors
/// As [`whole`].
pub fn long<const LOW: i128>(text: &str) -> Result<u64, String> {
    whole::<u64, LOW, { u64::MAX as i128 }>(text)
}

/// Compute threads.
///
/// # Errors
/// As [`whole`].
pub fn threads(text: &str) -> Result<u32, String> {
    whole::<u32, 1, 1024>(text)
}

/// A type that weights can be stored as.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TypeArg(pub QuantType);

impl argh::FromArgValue for TypeArg {
    fn from_arg_value(value: &str) -> Result<Self, String> {
        let types = || QuantType::ALL.into_iter().filter(|ty| encodes(*ty));
        let found = types().find(|ty| ty.name().eq_ignore_ascii_case(value));
        found.map(Self).ok_or_else(|| {
            let known: Vec<_> = types().map(|ty| ty.name().to_ascii_lowercase()).collect();
            format!("weights can't be stored so; {}", known.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use argh::FromArgValue;

    #[test]
    fn an_adapter_may_have_a_scale() {
        for (text, path, scale) in [
            ("a.gguf", "a.gguf", 1.0),
            ("a.gguf:0.5", "a.gguf", 0.5),
            ("a:2:-1", "a:2", -1.0),
            ("a.gguf:b", "a.gguf:b", 1.0),
            ("a.gguf:", "a.gguf:", 1.0),
            ("a:nan", "a:nan", 1.0),
            (":1", ":1", 1.0),
        ] {
            let got = LoraArg::from_arg_value(text).unwrap().0;
            assert_eq!(
                (got.path.to_str(), got.scale),
                (Some(path), scale),
                "{text}"
            );
        }
        let raw = OsString::from_vec(b"\xff:3".to_vec());
        let text = normalise(["--lora".into(), raw]).remove(1);
        let got = LoraArg::from_arg_value(&text).unwrap().0;
        assert_eq!(
            (got.path.as_os_str().as_bytes(), got.scale),
            (&b"\xff"[..], 3.0)
        );
    }

    fn normal(args: &[&str]) -> Vec<String> {
        normalise(args.iter().map(OsString::from))
    }

    #[test]
    fn options_are_split_and_renamed() {
        assert_eq!(
            normal(&["run", "--n-predict=3", "-p", "a=b"]),
            ["run", "--predict", "3", "-p", "a=b"]
        );
        assert_eq!(normal(&["--budget=a=b"]), ["--budget", "a=b"]);
        // Values that look like options are values.
        assert_eq!(
            normal(&["--json", "-p", "--a=b", "-f", "-h", "-h"]),
            ["--json", "-p", "--a=b", "-f", "-h", "--help"]
        );
    }

    /// What follows a switch that isn't known as one would be taken for its value, and `=` stay in it.
    #[test]
    fn an_option_may_follow_a_switch() {
        for switch in ["--full", "--resume", "--token-by-token"] {
            assert_eq!(normal(&[switch, "--lr=1"]), [switch, "--lr", "1"]);
        }
    }

    #[test]
    fn a_dash_alone_is_an_argument() {
        let args = normal(&["replay", "-", "--json", "-f", "-"]);
        assert_eq!((args.len(), args[4].as_str()), (5, "-"));
        assert_eq!(
            PathArg::from_arg_value(&args[1]).unwrap().0.as_os_str(),
            "-"
        );
    }

    #[test]
    fn any_bytes_survive() {
        let raw = OsString::from_vec(b"m\xff\x00\xfe.gguf".to_vec());
        let text = normalise(["-m".into(), raw.clone()]).remove(1);
        assert_eq!(
            PathArg::from_arg_value(&text).unwrap().0.into_os_string(),
            raw
        );
        for like_ours in ["-p=\u{F8FF}41", "--prompt=\u{F8FF}41"] {
            let text = like_ours.split_once('=').unwrap();
            let args = if like_ours.starts_with("--") {
                normal(&[like_ours])
            } else {
                normal(&[text.0, text.1])
            };
            let path = PathArg::from_arg_value(&args[1]).unwrap().0;
            assert_eq!(path.as_os_str(), OsStr::new(text.1));
        }
        let option = OsString::from_vec(b"--model=\xff=".to_vec());
        let texts = normalise([option]);
        assert_eq!(texts[0], "--model");
        assert_eq!(
            PathArg::from_arg_value(&texts[1])
                .unwrap()
                .0
                .into_os_string()
                .into_vec(),
            b"\xff="
        );
    }
}
