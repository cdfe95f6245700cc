//! The results as a Markdown table.

use leanstream_core::plan::Head;
use serde_json::{Map, Value};

use super::traced::SHORT;
use crate::error::mib;

/// A column: its heading, whether it is a number, and a row's entry.
type Column = (&'static str, bool, fn(&Row<'_>) -> String);

/// The columns that every model has.
const DENSE: [Column; 11] = [
    ("model", false, |row| row.text("model_type").into()),
    ("size", true, |row| row.mib("model_size")),
    ("budget", true, |row| row.mib("budget_bytes")),
    ("peak RSS", true, |row| row.mib("peak_rss_bytes")),
    ("threads", true, |row| row.fixed("n_threads", 1.0, 0, "")),
    ("test", false, |row| row.text("test").into()),
    ("t/s", true, |row| row.rate()),
    ("MB read/token", true, |row| {
        row.fixed("bytes_per_token", 1e-6, 2, "")
    }),
    ("storage ceiling t/s", true, |row| {
        row.fixed("ceiling_ts", 1.0, 2, "")
    }),
    ("reached", true, |row| {
        row.fixed("ceiling_share", 100.0, 2, "%")
    }),
    ("overlap", true, |row| row.percent("overlap")),
];

/// Those of a packed model.
const PACKED: [Column; 17] = [
    ("model", false, |row| row.model()),
    ("size", true, |row| row.mib("model_size")),
    ("budget", true, |row| row.mib("budget_bytes")),
    ("FFN cache", true, |row| row.percent("unit_slots_share")),
    ("peak RSS", true, |row| row.mib("peak_rss_bytes")),
    ("policy", false, |row| row.text("policy").into()),
    ("mode", false, |row| row.mode()),
    HEAD[0],
    ("test", false, |row| row.text("test").into()),
    ("t/s", true, |row| row.rate()),
    ("missed", true, |row| row.percent("miss_ratio")),
    ("MB read/token", true, |row| {
        row.fixed("bytes_per_token", 1e-6, 2, "")
    }),
    ("redundant", true, |row| row.percent("redundant_ratio")),
    ("late", true, |row| row.percent("late_ratio")),
    ("hidden", true, |row| row.percent("hidden")),
    HEAD[1],
    ("perplexity", true, |row| {
        row.fixed("perplexity", 1.0, 3, "")
    }),
];

/// How logits are computed, and of how many rows exactly for a token.
const HEAD: [Column; 2] = [
    ("head", false, |row| row.text("head").into()),
    ("head rows", true, |row| row.fixed("head_rows", 1.0, 0, "")),
];

/// A table that is printed row by row.
pub(super) struct Table {
    columns: Vec<Column>,
    begun: bool,
}

impl Table {
    /// Of a model whose neurons are packed, or of another, which may have a packed head all the same.
    pub fn new(packed: bool, head: Head) -> Self {
        let columns = match packed {
            true => PACKED.to_vec(),
            false if head.sketched() => [&DENSE[..], &HEAD].concat(),
            false => DENSE.to_vec(),
        };
        Self {
            columns,
            begun: false,
        }
    }

    /// A test's line; the headings come before the first one.
    pub fn row(&mut self, object: &Map<String, Value>) -> String {
        let mut out = String::new();
        if !std::mem::replace(&mut self.begun, true) {
            for (name, ..) in &self.columns {
                out.push_str(&format!("| {name} "));
            }
            out.push_str("|\n");
            for (_, number, _) in &self.columns {
                out.push_str(if *number { "|---:" } else { "|---" });
            }
            out.push_str("|\n");
        }
        for (.., entry) in &self.columns {
            out.push_str(&format!("| {} ", entry(&Row(object))));
        }
        out + "|\n"
    }
}

/// A test's object, by keys; `-` stands for what it hasn't.
struct Row<'a>(&'a Map<String, Value>);

impl Row<'_> {
    fn number(&self, key: &str) -> Option<f64> {
        self.0.get(key).and_then(Value::as_f64)
    }

    fn text(&self, key: &str) -> &str {
        self.0.get(key).and_then(Value::as_str).unwrap_or("-")
    }

    fn fixed(&self, key: &str, unit: f64, digits: usize, suffix: &str) -> String {
        self.number(key)
            .map_or("-".into(), |x| format!("{:.digits$}{suffix}", x * unit))
    }

    fn percent(&self, key: &str) -> String {
        self.fixed(key, 100.0, 1, "%")
    }

    fn mib(&self, key: &str) -> String {
        self.number(key).map_or("-".into(), |x| mib(x as u64))
    }

    /// Tokens per second, or why there are none.
    fn rate(&self) -> String {
        match (self.number("median_ts"), self.number("stddev_ts")) {
            (Some(median), Some(deviation)) => format!("{median:.2} ± {deviation:.2}"),
            _ => format!("error: {}", self.text("error")),
        }
    }

    /// What it is, and whether it is more than a shape.
    fn model(&self) -> String {
        let kind = self.text("model_type");
        match self.0.get("trace") {
            Some(_) => format!("{kind}, {SHORT}"),
            None => kind.into(),
        }
    }

    fn mode(&self) -> String {
        let mut mode = match self.number("keep") {
            Some(keep) => format!("{} {keep}", self.text("mode")),
            None => self.text("mode").to_owned(),
        };
        let without = self.0.get("without").and_then(Value::as_array);
        for part in without.into_iter().flatten().filter_map(Value::as_str) {
            mode += &format!(" -{part}");
        }
        mode
    }
}

/// Frequencies and temperatures where the board tells them: a throttled board explains slow numbers.
pub(super) fn machine_state() -> Vec<String> {
    let mut lines = Vec::new();
    let read = |path: String| {
        std::fs::read_to_string(path)
            .ok()
            .and_then(|text| text.trim().parse::<f64>().ok())
    };
    if let Some(khz) = read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq".into()) {
        let most =
            read("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq".into()).unwrap_or(khz);
        lines.push(format!("cpu0: {:.0} of {:.0} MHz", khz / 1e3, most / 1e3));
    }
    for zone in 0..8 {
        if let Some(milli) = read(format!("/sys/class/thermal/thermal_zone{zone}/temp")) {
            lines.push(format!("thermal zone {zone}: {:.1} C", milli / 1e3));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn rows_have_the_columns_of_the_headings() {
        let Value::Object(object) = json!({
            "model_type": "llama Q8_0", "policy": "lfu", "mode": "sparse", "keep": 0.5,
            "median_ts": 12.345, "stddev_ts": 0.5, "miss_ratio": 0.0625, "perplexity": null,
            "budget_bytes": 3 << 20, "head": "exact", "head_rows": 123.4,
        }) else {
            unreachable!()
        };
        for (packed, head, columns) in [
            (true, Head::Full, PACKED.len()),
            (false, Head::Full, DENSE.len()),
            (false, Head::Exact, DENSE.len() + 2),
        ] {
            let mut table = Table::new(packed, head);
            let first = table.row(&object);
            assert_eq!(first.lines().count(), 3);
            let bars = |line: &str| line.matches('|').count();
            assert!(
                first.lines().all(|line| bars(line) == columns + 1),
                "{first}"
            );
            assert_eq!(table.row(&object).lines().count(), 1);
            assert!(first.contains("| 3.0 MiB | - |") && first.contains("| 12.35 ± 0.50 |"));
            assert_eq!(first.contains("| lfu | sparse 0.5 | exact |"), packed);
            let rows = packed || head.sketched();
            assert_eq!(first.contains("| 123 |"), rows, "{first}");
            assert_eq!(first.contains("| 6.2% |"), packed);
            assert!(first.contains("| llama Q8_0 |"));
        }
        let mut object = object;
        object.insert("trace".into(), json!({}));
        assert!(
            Table::new(true, Head::Full)
                .row(&object)
                .contains("| llama Q8_0, sets of a trace |")
        );
    }
}
