//! A task with a score: lines of sensors in, answers as JSON of a fixed form out. See `--help`.
//!
//! ```text
//! sensor_task --seed 1 --items 2000 -o train.jsonl --held-out test.jsonl
//! sensor_task --score outputs.jsonl --held-out test.jsonl
//! ```
//!
//! An item is `{"prompt": LINE, "completion": ANSWER}`, where the line ends with a newline and the answer has none:
//!
//! ```text
//! barn-42: humidity 71 %, temperature 31.4 C, battery 3.38 V
//! {"id":"barn-42","temp":31.4,"heat":"high","hum":71,"damp":"high","battery":"low","do":"charge"}
//! ```
//!
//! The three readings stand in any order. Heat is `high` from 30 C and `low` below 15 C, else `ok`; damp is `high` from
//! 70 %; the battery is `low` below 3.50 V. What to do: `charge` when the battery is low, else `cool` or `heat` when heat
//! is not `ok`, else `dry` when damp is high, else `nothing`. Nothing of that is in the prompt, so a model that was not
//! trained on it can't know the form.
//!
//! Held-out items come from devices of their own: no device of theirs is in the training items, at any reading.
//!
//! With SmolLM2-135M-Instruct an item is 67 tokens, 40 of them the answer and EOS. In PyTorch (rank 8 on all linears,
//! alpha 16, AdamW, learning rate 1e-3 falling as a cosine, 8 items a step, seed 1) the score on held-out items is 0
//! before (of 20 items), 0.65 after 100 steps of 200, 0.87 after 150 (of 60) and 0.92 after all 200 (of 200).

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use argh::FromArgs;
use leanstream::synth::blocks::Rng;
use serde_json::{Value, json};

/// Make items to fine-tune on and others to be tested with, or score a model's answers.
#[derive(FromArgs)]
struct Args {
    /// other seed, other items (default 1)
    #[argh(option, default = "1")]
    seed: u64,
    /// how many to train on (default 2000)
    #[argh(option, default = "2000")]
    items: usize,
    /// how many to test with (default 200)
    #[argh(option, default = "200")]
    tests: usize,
    /// where the training items go, as JSON lines
    #[argh(option, short = 'o', long = "output")]
    output: Option<PathBuf>,
    /// where the test items go, or with --score are
    #[argh(option)]
    held_out: PathBuf,
    /// a model's answers, as JSON lines with "output", in the test items' order: print one JSON object with their
    /// score
    #[argh(option)]
    score: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args: Args = argh::from_env();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sensor_task: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), String> {
    if let Some(outputs) = &args.score {
        let score = score(&lines(&args.held_out)?, &lines(outputs)?)?;
        println!("{score}");
        return Ok(());
    }
    let output = args
        .output
        .as_deref()
        .ok_or("-o says where the training items go; or --score which answers are scored")?;
    let (train, test) = items(args.seed, args.items, args.tests)?;
    write(output, &train)?;
    write(&args.held_out, &test)
}

const PLACES: [&str; 20] = [
    "attic", "barn", "boiler", "cellar", "dock", "dryer", "garage", "garden", "hall", "kiln",
    "kitchen", "lab", "library", "mill", "office", "pump", "roof", "silo", "stable", "workshop",
];

/// One device of so many is for testing.
const TEST_ONE_IN: u64 = 5;

/// A prompt and its completion.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Item {
    prompt: String,
    completion: String,
}

/// Items to train on and items to test with, all different.
fn items(seed: u64, train: usize, test: usize) -> Result<(Vec<Item>, Vec<Item>), String> {
    // There are millions; a hundredth of them is found without long search.
    if train > 100_000 || test > 20_000 {
        return Err("at most 100000 items and 20000 tests".into());
    }
    let mut rng = Rng::new(seed, "sensors");
    let (mut training, mut testing) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    while training.len() < train || testing.len() < test {
        let place = rng.bits() % PLACES.len() as u64;
        let number = rng.bits() % 100;
        // Which devices are for testing is the same for every seed.
        let tests = Rng::new(place * 100 + number, "device")
            .bits()
            .is_multiple_of(TEST_ONE_IN);
        let item = item(&format!("{}-{number:02}", PLACES[place as usize]), &mut rng);
        let (list, most) = if tests {
            (&mut testing, test)
        } else {
            (&mut training, train)
        };
        if list.len() < most && seen.insert(item.clone()) {
            list.push(item);
        }
    }
    Ok((training, testing))
}

/// A device's line and the answer.
fn item(id: &str, rng: &mut Rng) -> Item {
    let tenths = 50 + rng.bits() % 400;
    let humidity = 20 + rng.bits() % 80;
    let hundredths = 310 + rng.bits() % 100;
    let temperature = format!("{}.{}", tenths / 10, tenths % 10);
    let mut readings = [
        format!("temperature {temperature} C"),
        format!("humidity {humidity} %"),
        format!("battery {}.{:02} V", hundredths / 100, hundredths % 100),
    ];
    readings.swap(0, (rng.bits() % 3) as usize);
    readings.swap(1, 1 + (rng.bits() % 2) as usize);
    let heat = match tenths {
        300.. => "high",
        150.. => "ok",
        _ => "low",
    };
    let damp = if humidity >= 70 { "high" } else { "ok" };
    let battery = if hundredths < 350 { "low" } else { "ok" };
    let action = match (battery, heat, damp) {
        ("low", ..) => "charge",
        (_, "high", _) => "cool",
        (_, "low", _) => "heat",
        (.., "high") => "dry",
        _ => "nothing",
    };
    Item {
        prompt: format!("{id}: {}\n", readings.join(", ")),
        completion: format!(
            r#"{{"id":"{id}","temp":{temperature},"heat":"{heat}","hum":{humidity},"damp":"{damp}","battery":"{battery}","do":"{action}"}}"#
        ),
    }
}

/// Shares of answers that are right, and of each field. An answer is the first line of the output, as JSON: right when
/// it has all the fields, with the right values, and no other.
fn score(items: &[Value], outputs: &[Value]) -> Result<Value, String> {
    if items.is_empty() || items.len() != outputs.len() {
        let (items, outputs) = (items.len(), outputs.len());
        return Err(format!(
            "{items} items and {outputs} outputs; as many are needed, at least one"
        ));
    }
    let (mut right, mut valid) = (0, 0);
    let mut fields: Vec<(String, usize)> = Vec::new();
    for (number, (item, output)) in items.iter().zip(outputs).enumerate() {
        let text = |value: &Value, name| match value[name].as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(format!("item {}: no \"{name}\"", number + 1)),
        };
        let expected: Value = serde_json::from_str(&text(item, "completion")?)
            .map_err(|e| format!("item {}: {e}", number + 1))?;
        let expected = expected.as_object().ok_or("an answer that is no object")?;
        let output = text(output, "output")?;
        let answer = output.trim_start().lines().next().unwrap_or("").trim();
        let answer: Value = serde_json::from_str(answer).unwrap_or(Value::Null);
        let answer = answer.as_object();
        valid += usize::from(answer.is_some());
        right += usize::from(answer == Some(expected));
        for (name, value) in expected {
            if !fields.iter().any(|(known, _)| known == name) {
                fields.push((name.clone(), 0));
            }
            if answer.is_some_and(|answer| answer.get(name) == Some(value)) {
                let (_, count) = fields
                    .iter_mut()
                    .find(|(known, _)| known == name)
                    .expect("just made");
                *count += 1;
            }
        }
    }
    let share = |count: usize| count as f64 / items.len() as f64;
    let fields: serde_json::Map<_, _> = fields
        .into_iter()
        .map(|(name, count)| (name, json!(share(count))))
        .collect();
    Ok(json!({
        "items": items.len(),
        "score": share(right),
        "json": share(valid),
        "fields": fields,
    }))
}

fn write(path: &Path, items: &[Item]) -> Result<(), String> {
    let mut text = String::new();
    for Item { prompt, completion } in items {
        let line = json!({"prompt": prompt, "completion": completion});
        writeln!(text, "{line}").expect("a string takes everything");
    }
    std::fs::write(path, text).map_err(|e| format!("{}: {e}", path.display()))
}

fn lines(path: &Path) -> Result<Vec<Value>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let line = |(number, line)| {
        serde_json::from_str(line)
            .map_err(|e| format!("{}, line {}: {e}", path.display(), number + 1))
    };
    text.lines().enumerate().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(items: &[Item], name: &str) -> Vec<Value> {
        items
            .iter()
            .map(|item| json!({name: item.completion.clone(), "completion": item.completion}))
            .collect()
    }

    fn device(item: &Item) -> &str {
        item.prompt.split(':').next().unwrap()
    }

    #[test]
    fn the_same_seed_makes_the_same_items_and_no_device_is_on_both_sides() {
        let (train, test) = items(1, 1000, 200).unwrap();
        assert_eq!((train.len(), test.len()), (1000, 200));
        assert_eq!(items(1, 1000, 200).unwrap(), (train.clone(), test.clone()));
        // Another seed, other items, but the same devices for testing.
        let (other, _) = items(2, 1000, 0).unwrap();
        assert_ne!(train, other);
        let trained: HashSet<&str> = train.iter().chain(&other).map(device).collect();
        assert!(test.iter().all(|item| !trained.contains(device(item))));
        let all: HashSet<&Item> = train.iter().chain(&test).collect();
        assert_eq!(all.len(), 1200);
    }

    #[test]
    fn answers_follow_from_the_line() {
        let (train, _) = items(3, 500, 0).unwrap();
        let mut actions = HashSet::new();
        for Item { prompt, completion } in &train {
            let answer: Value = serde_json::from_str(completion).unwrap();
            let reading = |name: &str| -> f64 {
                let rest = prompt.split(name).nth(1).unwrap();
                rest.split_whitespace().next().unwrap().parse().unwrap()
            };
            let temperature = reading("temperature");
            assert_eq!(answer["temp"], temperature);
            assert_eq!(answer["hum"], reading("humidity") as u64);
            let heat = if temperature >= 30.0 {
                "high"
            } else if temperature < 15.0 {
                "low"
            } else {
                "ok"
            };
            assert_eq!(answer["heat"], heat);
            assert_eq!(answer["battery"] == "low", reading("battery") < 3.5);
            assert_eq!(answer["damp"] == "high", reading("humidity") >= 70.0);
            assert_eq!(answer["do"] == "charge", answer["battery"] == "low");
            actions.insert(answer["do"].as_str().unwrap().to_owned());
        }
        assert_eq!(actions.len(), 5);
    }

    #[test]
    fn scores_count_whole_answers_and_fields() {
        let (_, test) = items(1, 0, 4).unwrap();
        let expected = values(&test, "prompt");
        let mut outputs = values(&test, "output");
        assert_eq!(score(&expected, &outputs).unwrap()["score"], 1.0);
        // What follows the first line doesn't count; no JSON, a wrong field and one too many do.
        outputs[0]["output"] = json!(format!(" {}\nmore", test[0].completion));
        outputs[1]["output"] = json!("The barn is hot.");
        outputs[2]["output"] = json!(test[2].completion.replace("\"id\":\"", "\"id\":\"x"));
        outputs[3]["output"] = json!(test[3].completion.replace('}', ",\"more\":1}"));
        let result = score(&expected, &outputs).unwrap();
        assert_eq!(result["score"], 0.25);
        assert_eq!(result["json"], 0.75);
        assert_eq!(result["fields"]["id"], 0.5);
        assert_eq!(result["fields"]["do"], 0.75);
        assert!(
            score(&expected, &outputs[..3])
                .unwrap_err()
                .contains("3 outputs")
        );
    }
}
