//! The command line: one subcommand a file.

mod args;
mod bench;
mod demo;
mod inspect;
mod merge;
mod output;
mod pack;
mod perplexity;
mod plot;
mod replay;
mod run;
mod select;
mod setup;
mod storage;
mod tokenize;
mod trace;
mod tune;
mod verify;

use std::ffi::OsString;

use argh::{FromArgs, SubCommands};

use crate::alloc::Counting;
use crate::error::Error;

/// Run and tune language models larger than memory, inside a byte budget.
#[derive(FromArgs)]
struct Top {
    /// print the version
    #[argh(switch)]
    version: bool,
    #[argh(subcommand)]
    command: Option<Command>,
}

#[derive(FromArgs)]
#[argh(subcommand)]
enum Command {
    Run(run::Run),
    Perplexity(perplexity::Perplexity),
    Replay(replay::Replay),
    Tokenize(tokenize::Tokenize),
    Trace(trace::Trace),
    Tune(tune::Tune),
    Inspect(inspect::Inspect),
    Verify(verify::Verify),
    Pack(pack::Pack),
    Merge(merge::Merge),
    Bench(bench::Bench),
    Demo(demo::Demo),
}

/// Runs the process's command and returns its exit code. Whatever goes wrong is told on stderr.
pub fn main(args: impl IntoIterator<Item = OsString>, allocator: &Counting) -> i32 {
    let args = args::normalise(args);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match dispatch(&args, allocator) {
        Ok(()) => 0,
        Err(Error::Usage(why)) => {
            let command = args.first().filter(|first| is_command(first));
            let of = command.map_or(String::new(), |command| format!("{command} "));
            output::say(&format!(
                "leanstream: {}\nTry 'leanstream {of}--help'.",
                why.trim_end()
            ));
            Error::Usage(why).exit_code()
        }
        Err(error) => {
            // A reader that has gone away asked for no message, nor did a signal's sender.
            if !matches!(error, Error::ClosedPipe | Error::Signal(_) | Error::Told(_)) {
                output::say(&format!("leanstream: {error}"));
            }
            error.exit_code()
        }
    }
}

fn is_command(name: &str) -> bool {
    Command::COMMANDS.iter().any(|known| known.name == name)
}

fn dispatch(args: &[&str], allocator: &Counting) -> Result<(), Error> {
    let top = match Top::from_args(&["leanstream"], args) {
        Ok(top) => top,
        Err(early) if early.status.is_ok() => return output::print(&early.output),
        Err(early) => return Err(Error::Usage(early.output)),
    };
    if top.version {
        return output::print(concat!("leanstream ", env!("CARGO_PKG_VERSION"), "\n"));
    }
    match top.command {
        Some(Command::Run(command)) => command.execute(allocator),
        Some(Command::Perplexity(command)) => command.execute(),
        Some(Command::Replay(command)) => command.execute(),
        Some(Command::Tokenize(command)) => command.execute(),
        Some(Command::Trace(command)) => command.execute(),
        Some(Command::Tune(command)) => command.execute(allocator),
        Some(Command::Inspect(command)) => command.execute(),
        Some(Command::Verify(command)) => command.execute(),
        Some(Command::Pack(command)) => command.execute(),
        Some(Command::Merge(command)) => command.execute(),
        Some(Command::Bench(command)) => command.execute(allocator),
        Some(Command::Demo(command)) => command.execute(),
        None => Err(Error::Usage("no command was given".into())),
    }
}
