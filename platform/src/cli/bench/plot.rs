//! Tokens per second over the budget.

use serde_json::{Map, Value};

use crate::cli::plot::{Chart, Line};

/// What there is to draw.
pub(super) struct Figure {
    title: String,
    lines: Vec<Test>,
}

/// Tokens per second over MiB.
struct Test {
    name: String,
    generates: bool,
    points: Vec<(f64, f64)>,
}

impl Figure {
    /// An empty one about a model.
    pub fn new(title: &str) -> Self {
        Self {
            title: title.into(),
            lines: Vec::new(),
        }
    }

    /// Adds a test's result, if it has one.
    pub fn add(&mut self, object: &Map<String, Value>) {
        let number = |key: &str| object.get(key).and_then(Value::as_f64);
        let text = |key: &str| object.get(key).and_then(Value::as_str);
        let (Some(budget), Some(rate)) = (number("budget_bytes"), number("median_ts")) else {
            return;
        };
        let words = [text("policy"), text("test")];
        let name: Vec<&str> = words.into_iter().flatten().collect();
        let name = name.join(" ");
        let point = (budget / f64::from(1 << 20), rate);
        match self.lines.iter_mut().find(|line| line.name == name) {
            Some(line) => line.points.push(point),
            None => self.lines.push(Test {
                name,
                generates: number("n_gen") > Some(0.0),
                points: vec![point],
            }),
        }
    }

    /// The picture. Prompts are left out beside generation: they are many times as fast.
    pub fn draw(&self) -> String {
        let generates = self.lines.iter().any(|line| line.generates);
        let lines = self
            .lines
            .iter()
            .filter(|line| line.generates == generates)
            .map(|line| Line {
                name: line.name.clone(),
                points: line.points.clone(),
            })
            .collect();
        Chart {
            title: &self.title,
            x: "budget (MiB)",
            y: "tokens/s",
            from_zero: true,
            lines,
        }
        .draw()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn point(policy: &str, test: &str, budget: u64, rate: f64) -> Map<String, Value> {
        let generated = u32::from(test.starts_with("tg"));
        match json!({
            "policy": policy, "test": test, "budget_bytes": budget << 20, "median_ts": rate, "n_gen": generated,
        }) {
            Value::Object(object) => object,
            _ => unreachable!(),
        }
    }

    #[test]
    fn every_policy_has_a_line_inside_the_axes() {
        let mut figure = Figure::new("a <b> & c");
        for (budget, rate) in [(180, 31.5), (90, 7.25), (120, 19.0)] {
            figure.add(&point("lfu", "tg8", budget, rate));
            figure.add(&point("refine", "tg8", budget, rate * 1.5));
            figure.add(&point("refine", "pp8", budget, 900.0));
        }
        // A row without a result.
        figure.add(&Map::new());
        let svg = figure.draw();
        assert_eq!(svg.matches("<polyline").count(), 2, "{svg}");
        assert_eq!(svg.matches("<circle").count(), 6);
        assert!(svg.contains(">a &lt;b> &amp; c<") && !svg.contains("pp8"));
    }
}
