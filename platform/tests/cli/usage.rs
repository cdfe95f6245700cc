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

/// They said "invalid digit found in string", or a range that the value was in.
#[test]
fn numbers_out_of_range_are_told_the_range() {
    let scratch = Scratch::new("ranges");
    let model = small(scratch.join("m.gguf"));
    for (command, args, range) in [
        ("run", "-t -1", "from 1 to 1024"),
        ("run", "-t 1025", "from 1 to 1024"),
        ("run", "--queue-depth abc", "from 1 to 4096"),
        ("run", "--queue-depth 100000", "from 1 to 4096"),
        ("run", "-n 99999999999999999999", "from -1 to "),
        ("run", "-n -2", "from -1 to "),
        ("run", "-b 0", "from 1 to 4294967295"),
        ("run", "-s -1", "from 0 to 18446744073709551615"),
        ("run", "--repeat-last-n 65537", "from 0 to 65536"),
        (
            "run",
            "--temp 1e30",
            "--temp 1e30: must be from 0 to 1000000",
        ),
        ("run", "--temp inf", "from 0 to 1000000"),
        ("run", "--repeat-penalty inf", "above 0 and finite"),
        ("bench", "-r 0", "from 1 to 1000"),
        ("perplexity", "-c 3", "from 4 to "),
        ("inspect", "-c x", "from 0 to "),
        ("merge", "-t 0 -o x", "from 1 to 1024"),
        ("trace", "-n x -o x", "from 0 to "),
        ("tune", "--data x -o x --steps 0", "from 1 to "),
        ("tune", "--data x -o x --rank 1025", "from 1 to 1024"),
        ("tune", "--data x -o x --batch 65537", "from 1 to 65536"),
        ("tune", "--data x -o x --optim-bits x", "8 or 32"),
    ] {
        let text = if command == "run" { "-p a" } else { "" };
        let ran = with(command, &model, &format!("{args} {text}"));
        let told = ran.failed(2);
        assert!(told.contains(range), "{command} {args}: {told}");
    }
    let ran = run(["replay", "x", "--queue", "256"]);
    assert!(ran.failed(2).contains("from 1 to 255"), "{}", ran.stderr);
    let ran = run(["demo", "-n", "-1"]);
    assert!(ran.failed(2).contains("from 0 to "), "{}", ran.stderr);
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
