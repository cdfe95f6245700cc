//! What the command line accepts: help, errors of usage.

use crate::common::Scratch;
use crate::common::cli::{run, small, with};

#[test]
fn help_and_version_are_output() {
    for args in [
        &["--help"][..],
        &["help"],
        &["run", "--help"],
        &["bench", "-h"],
        &["--version"],
        &["-V"],
    ] {
        let ran = run(args);
        assert_eq!(ran.code, 0, "{args:?}: {ran:?}");
        assert!(!ran.stdout.is_empty() && ran.stderr.is_empty(), "{ran:?}");
    }
    let version = run(["--version"]).text();
    assert_eq!(
        version,
        format!("leanstream {}\n", env!("CARGO_PKG_VERSION"))
    );
    // Every subcommand and option has a line.
    let help = run(["--help"]).text();
    for command in [
        "run",
        "perplexity",
        "tokenize",
        "inspect",
        "verify",
        "bench",
        "merge",
        "demo",
    ] {
        assert!(help.contains(command), "{command}");
        let own = run([command, "--help"]).text();
        assert!(own.contains("Usage:"), "{command}: {own}");
    }
    // What doesn't go together is told where it is offered.
    let words = |command: &str| {
        run([command, "--help"])
            .text()
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(" ")
    };
    for (command, told) in [
        (
            "perplexity",
            "perplexity needs all logits and takes no other",
        ),
        ("run", "of --policy refine only"),
        ("run", "texts may part"),
        ("pack", "the first 1,024 tokens are taken"),
        ("replay", "fewer misses than it"),
    ] {
        assert!(words(command).contains(told), "{command}: {told}");
    }
}

#[test]
fn errors_of_usage_exit_2() {
    let scratch = Scratch::new("usage");
    let model = small(scratch.join("m.gguf"));
    for args in [
        &[][..],
        &["nonsense"],
        &["--nonsense"],
        &["run"],
        &["run", "--nonsense", "1"],
        &["run", "-m"],
        &["tokenize", "-m", "x"],
        &["tokenize", "-m", "x", "-p", "a", "-f", "b"],
    ] {
        let ran = run(args);
        ran.failed(2);
        assert!(
            ran.stderr.starts_with("leanstream: "),
            "{args:?}: {}",
            ran.stderr
        );
    }
    for args in [
        "-n 4",
        "-p a -n four",
        "-p a -n -2",
        "-p a --predict=-128",
        "-p a --budget 12X",
        "-p a --threads 0",
        "-p a --threads 5000",
        "-p a --kv-type f64",
        "-p a --io mmap",
        "-p a --queue-depth 0",
        "-p a -b 0",
        "-p a --throttle-read fast",
        "-p a --fault often",
        "-p a --temp -1",
        "-p a --temp nan",
        "-p a --top-p 0",
        "-p a --min-p 2",
        "-p a --repeat-penalty 0",
        "-p a --repeat-last-n 1000000",
        "-p abcdefgh -c 3",
        "-p a -p b",
    ] {
        let ran = with("run", &model, args);
        assert_eq!(ran.code, 2, "{args}: {ran:?}");
        ran.failed(2);
    }
    for (command, args) in [
        ("bench", "-o xml"),
        ("bench", "-p 0 -n 0"),
        ("bench", "-r 0"),
        ("bench", "-p x"),
        ("inspect", "--bandwidth fast"),
        ("inspect", "--bandwidth 0"),
        ("perplexity", "-p short -c 512"),
        ("perplexity", "-p short -c 1"),
    ] {
        let ran = with(command, &model, args);
        assert_eq!(ran.code, 2, "{command} {args}: {ran:?}");
    }
}

#[test]
fn an_error_of_usage_points_to_the_command_s_own_help() {
    let scratch = Scratch::new("hint");
    let model = small(scratch.join("m.gguf"));
    let path = model.to_str().unwrap();
    for (args, hint) in [
        (&[][..], "'leanstream --help'"),
        (&["nonsense"], "'leanstream --help'"),
        (&["run", "--nonsense"], "'leanstream run --help'"),
        (&["run", "-m", path], "'leanstream run --help'"),
        (&["verify"], "'leanstream verify --help'"),
        (
            &["inspect", "-m", path, "--bandwidth", "x"],
            "'leanstream inspect --help'",
        ),
    ] {
        let ran = run(args);
        let last = ran.failed(2).trim_end().lines().last();
        assert_eq!(last, Some(format!("Try {hint}.").as_str()), "{args:?}");
    }
}
