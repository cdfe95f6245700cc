//! The budget is kept: the peak of resident memory with real models, as the kernel tells it, also in
//! a control group that would kill whoever takes more; and what is read for a token.

mod common;

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::Scratch;
use common::cli::{Ran, finish, program, with};
use common::models::model;
use leanstream::fetch::{GEMMA3, Published, SMOLLM2};

/// Budgets in MiB, each far below the model's size, or about half of it.
const SMOLLM2_MIB: [u64; 4] = [24, 32, 48, 64];
const GEMMA3_MIB: [u64; 2] = [48, 96];

const RUN: &str = "-p Gravity -n 4 --temp 0 --ignore-eos --json -c 512";

fn check(ran: &Ran, budget: u64, name: &str) {
    let summary = ran.json();
    assert_eq!(summary["budget_bytes"], budget);
    let peak = summary["peak_rss_bytes"].as_u64().expect("a number");
    assert!(peak <= budget, "{name}: VmHWM {peak} of {budget}");
    assert!(
        ran.max_rss <= budget,
        "{name}: ru_maxrss {} of {budget}",
        ran.max_rss
    );
    assert_eq!(summary["allocations"], 0, "{name}");
}

fn peaks(test: &str, published: &Published, budgets: &[u64]) {
    let Some(path) = model(test, published) else {
        return;
    };
    for mib in budgets {
        for io in ["auto", "pread"] {
            let ran = with("run", &path, &format!("{RUN} --budget {mib}M --io {io}"));
            check(&ran, mib << 20, &format!("{} {io}", published.file));
        }
    }
}

#[test]
fn smollm2_stays_within_its_budgets() {
    peaks("smollm2_stays_within_its_budgets", &SMOLLM2, &SMOLLM2_MIB);
}

#[test]
fn gemma3_stays_within_its_budgets() {
    peaks("gemma3_stays_within_its_budgets", &GEMMA3, &GEMMA3_MIB);
}

/// A long prompt makes large batches, and scoring has buffers of its own.
#[test]
fn long_prompts_and_scoring_stay_within_too() {
    let test = "long_prompts_and_scoring_stay_within_too";
    let Some(path) = model(test, &SMOLLM2) else {
        return;
    };
    let text = "The quick brown fox jumps over the lazy dog. ".repeat(40);
    for mib in [32, 64] {
        let mut command = program(["run", "-p", &text, "-m"]);
        command
            .arg(&path)
            .args(["-n", "2", "--json", "--budget", &format!("{mib}M")]);
        let ran = finish(command.spawn().expect("the program starts"));
        check(&ran, mib << 20, "long prompt");
        let mut command = program(["perplexity", "-p", &text, "-m"]);
        command
            .arg(&path)
            .args(["-c", "128", "--json", "--budget", &format!("{mib}M")]);
        let ran = finish(command.spawn().expect("the program starts"));
        let peak = ran.json()["peak_rss_bytes"].as_u64().expect("a number");
        assert!(peak <= mib << 20 && ran.max_rss <= mib << 20, "{peak}");
    }
}

/// A packed model in every mode: exact and sparse, each policy, each head, scoring, and sketched gates.
#[test]
fn packed_models_stay_within_and_allocate_nothing() {
    let test = "packed_models_stay_within_and_allocate_nothing";
    let Some(path) = model(test, &SMOLLM2) else {
        return;
    };
    let scratch = Scratch::new("packed-memory");
    let pack = scratch.join("smollm2.lean");
    let mut command = program(["pack", "--json"]);
    command.arg(&path).arg(&pack);
    let packed = finish(command.spawn().expect("the program starts"));
    assert_eq!(packed.code, 0, "{}", packed.stderr);
    let sketched = scratch.join("sketched.lean");
    let mut command = program(["pack", "--json", "--gates", "sketch"]);
    command.arg(&path).arg(&sketched);
    let packed = finish(command.spawn().expect("the program starts"));
    assert_eq!(packed.code, 0, "{}", packed.stderr);
    for (mib, args) in [(40, ""), (64, "--keep 1 -b 7"), (64, "--head fast")] {
        let ran = with("run", &sketched, &format!("{RUN} --budget {mib}M {args}"));
        check(&ran, mib << 20, args);
    }
    for (mib, args) in [
        (40, "--mode exact"),
        (64, "--mode exact --policy lru-window"),
        (64, "--keep 0.3"),
        (64, "--keep 0.5 --policy oneshot --io pread"),
        (96, "--keep 0.5 --head exact"),
        (110, "--head fast --policy static"),
    ] {
        let ran = with("run", &pack, &format!("{RUN} --budget {mib}M {args}"));
        assert_eq!(ran.code, 0, "{args}: {}", ran.stderr);
        check(&ran, mib << 20, args);
        let summary = ran.json();
        assert!(summary["miss_ratio"].as_f64().is_some(), "{args}");
    }
}

/// A memory control group, removed when it goes out of scope.
struct Group {
    dir: PathBuf,
    /// How many processes the kernel killed in it for want of memory.
    kills: fn(&Path) -> u64,
}

impl Group {
    /// With a limit in bytes, for one test at a time; the reason where there can be none.
    fn new(test: &str, limit: u64) -> Result<Self, String> {
        let name = format!("leanstream-{test}-{}", std::process::id());
        let (root, file, kills): (_, _, fn(&Path) -> u64) =
            if Path::new("/sys/fs/cgroup/memory/memory.limit_in_bytes").exists() {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", |dir| {
                    count(&dir.join("memory.oom_control"), "oom_kill ")
                })
            } else {
                ("/sys/fs/cgroup", "memory.max", |dir| {
                    count(&dir.join("memory.events"), "oom_kill ")
                })
            };
        let dir = Path::new(root).join(name);
        fs::create_dir(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
        let group = Self { dir, kills };
        let limit_file = group.dir.join(file);
        fs::write(&limit_file, limit.to_string())
            .map_err(|error| format!("{}: {error}", limit_file.display()))?;
        // Swap would hide what is too much; where it isn't accounted there is none to forbid.
        let _ = fs::write(group.dir.join("memory.swap.max"), "0");
        let _ = fs::write(
            group.dir.join("memory.memsw.limit_in_bytes"),
            limit.to_string(),
        );
        Ok(group)
    }
}

fn count(file: &Path, key: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines()
        .find_map(|line| line.strip_prefix(key)?.trim().parse().ok())
        .unwrap_or(0)
}

impl Group {
    /// Runs the program in it.
    fn run(&self, mut command: Command) -> Ran {
        let file = fs::File::options()
            .write(true)
            .open(self.dir.join("cgroup.procs"))
            .expect("the group takes processes");
        // SAFETY: between fork and exec the closure makes one system call, and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                use std::io::Write;
                (&file).write_all(b"0")
            });
        }
        finish(command.spawn().expect("the program starts"))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.dir);
    }
}

#[test]
fn a_control_group_of_the_budget_is_enough() {
    let test = "a_control_group_of_the_budget_is_enough";
    for (published, budgets) in [(&SMOLLM2, &SMOLLM2_MIB[..]), (&GEMMA3, &GEMMA3_MIB[..])] {
        let Some(path) = model(test, published) else {
            continue;
        };
        for mib in budgets {
            let group = match Group::new(test, mib << 20) {
                Ok(group) => group,
                Err(why) => {
                    eprintln!("skipped: {test}: no memory control group: {why}");
                    return;
                }
            };
            // A benchmark of one row leaves no process beside the one that is measured.
            for command in ["run", "bench"] {
                let args = match command {
                    "run" => RUN,
                    _ => "-p 0 -n 8 -r 2 -t 2 -o jsonl",
                };
                let mut started = program([command, "-m"]);
                started
                    .arg(&path)
                    .args(args.split(' '))
                    .args(["--budget", &format!("{mib}M")]);
                let ran = group.run(started);
                let name = format!("{command} {} {mib}", published.file);
                assert_eq!((group.kills)(&group.dir), 0, "{name}: {ran:?}");
                check(&ran, mib << 20, &name);
            }
        }
    }
}

/// Training within 160 MiB, where weights stream, and with more, where they stay: the control group would kill it for a
/// byte that isn't planned.
#[test]
fn tuning_stays_within_a_control_group_of_the_budget() {
    let test = "tuning_stays_within_a_control_group_of_the_budget";
    let Some(path) = model(test, &SMOLLM2) else {
        return;
    };
    let scratch = Scratch::new("tune-memory");
    let data = scratch.join("data.txt");
    let text: String = (0..400)
        .map(|i| {
            format!(
                "Chapter {i}. The {i} dogs of the town met {} cats. ",
                i * 7 % 31
            )
        })
        .collect();
    fs::write(&data, text).expect("a file");
    for mib in [160u64, 200, 300] {
        let group = match Group::new(test, mib << 20) {
            Ok(group) => group,
            Err(why) => {
                eprintln!("skipped: {test}: no memory control group: {why}");
                return;
            }
        };
        let mut command = program(["tune", "--seq", "512", "--steps", "2", "--json", "-m"]);
        command.arg(&path).arg("--data").arg(&data);
        command.arg("-o").arg(scratch.join(format!("{mib}.gguf")));
        command.args(["--budget", &format!("{mib}M")]);
        let ran = group.run(command);
        assert_eq!((group.kills)(&group.dir), 0, "{mib} MiB: {ran:?}");
        let summary = ran.json();
        assert_eq!(summary["steps"], 2, "{mib} MiB");
        assert_eq!(summary["tokens"], 1024, "{mib} MiB");
        let number = |key: &str| summary[key].as_u64().expect("a number");
        let peak = number("peak_rss_bytes");
        assert!(peak <= mib << 20, "{mib} MiB: VmHWM {peak}");
        assert!(ran.max_rss <= mib << 20, "{mib} MiB: {}", ran.max_rss);
        // Less than half in use would be a plan that wastes what it is given.
        assert!(
            peak >= (mib << 20) / 2,
            "{mib} MiB: only {peak} bytes were used"
        );
        let (kept, file) = (
            number("weights_kept_bytes"),
            fs::metadata(&path).expect("it").len(),
        );
        assert_eq!(
            kept < file / 2,
            mib == 160,
            "{mib} MiB: {kept} bytes of weights stay"
        );
    }
}

/// Dense streaming has a floor: what isn't kept is read once for each token, and nothing twice.
#[test]
fn a_token_reads_what_is_not_kept() {
    let test = "a_token_reads_what_is_not_kept";
    let Some(path) = model(test, &SMOLLM2) else {
        return;
    };
    for mib in [32u64, 48, 64] {
        let args = format!("-c 512 --json --budget {mib}M -t 2 -b 1");
        let plan = with("inspect", &path, &args).json()["plans"][0].clone();
        let number = |key: &str| plan[key].as_f64().expect("a number");
        let args = format!("{RUN} --budget {mib}M -t 2 -b 1");
        let told = with("run", &path, &args).json();
        let read = told["bytes_read_per_token"].as_f64().expect("a number");
        let floor = number("weights_bytes") - number("resident_bytes");
        assert!(
            (read / floor - 1.0).abs() < 0.02,
            "{mib} MiB: {read} bytes a token, the floor is {floor}"
        );
        assert_eq!(told["rereads"], 0, "{mib} MiB");
    }
}

/// A text is held before anything is planned, so one that is too long is refused while it is read.
#[test]
fn a_text_too_long_for_the_budget_is_refused_within_it() {
    let Some(path) = model("a_text_too_long_for_the_budget", &SMOLLM2) else {
        return;
    };
    let mut command = program(["run", "-n", "1", "--budget", "24M", "-m"]);
    // The model itself as a prompt: 98 MB.
    command.arg(&path).arg("-f").arg(&path);
    let ran = finish(command.spawn().expect("the program starts"));
    assert_eq!(ran.code, 2, "{}", ran.stderr);
    assert!(
        ran.stderr.contains("a sixteenth of the budget"),
        "{}",
        ran.stderr
    );
    assert!(ran.max_rss <= 24 << 20, "{}", ran.max_rss);
}
