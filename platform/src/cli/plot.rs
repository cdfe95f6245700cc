//! Lines over an axis, drawn as SVG, and the file that they go to.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use crate::aside::Aside;
use crate::error::Error;

/// The picture, and in it the axes' box: left, top, right, bottom.
const SIZE: (f64, f64) = (760.0, 440.0);
const BOX: [f64; 4] = [70.0, 48.0, 580.0, 380.0];

/// Colours that colour-blind readers can tell apart (Okabe and Ito's, without black and yellow).
const COLOURS: [&str; 6] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9",
];

/// A file being made, aside until it is whole. Dropped before [`Plot::finish`], it leaves nothing.
pub struct Plot {
    aside: Aside,
    file: File,
}

impl Plot {
    /// Makes sure that the file can be made, before anything is measured.
    ///
    /// # Errors
    /// [`Error::Io`] where it can't.
    pub fn begin(path: &Path) -> Result<Self, Error> {
        let failed = |error| Error::io(path, "create it", error);
        let (aside, file) = Aside::create(path).map_err(failed)?;
        Ok(Self { aside, file })
    }

    /// Writes it, and replaces what had its name.
    ///
    /// # Errors
    /// [`Error::Io`] where the disk is full or fails; the older file stays.
    pub fn finish(mut self, svg: &str) -> Result<(), Error> {
        self.file
            .write_all(svg.as_bytes())
            .and_then(|()| self.aside.finish(&self.file))
            .map_err(|error| Error::io(self.aside.path(), "write it", error))
    }
}

/// Points above which a line is drawn without dots.
const DOTS_MAX: usize = 64;

/// What there is to draw.
pub struct Chart<'a> {
    /// Above it.
    pub title: &'a str,
    /// What x is.
    pub x: &'a str,
    /// What y is.
    pub y: &'a str,
    /// Whether y begins at 0 rather than near the least value.
    pub from_zero: bool,
    /// Its lines.
    pub lines: Vec<Line>,
}

/// One line.
pub struct Line {
    /// Beside it.
    pub name: String,
    /// Its points, in any order.
    pub points: Vec<(f64, f64)>,
}

impl Chart<'_> {
    /// The picture.
    pub fn draw(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let range = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, 0.0f64), |(least, most), x| {
                (least.min(x), most.max(x))
            })
        };
        let (least, most) = range(&mut points().map(|point| point.0));
        let (low, high) = range(&mut points().map(|point| point.1));
        // Budgets of one kind of run lie close together: only their range is drawn.
        let x = Axis::over(if least * 3.0 < most { 0.0 } else { least }, most);
        let y = Axis::over(if self.from_zero { 0.0 } else { low }, high);
        let [left, top, right, bottom] = BOX;
        let at_x = |value: f64| left + x.part(value) * (right - left);
        let at_y = |value: f64| bottom - y.part(value) * (bottom - top);
        let (width, height) = SIZE;
        let middle = (left + right) / 2.0;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
             viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"{width}\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        let text = |x: f64, y: f64, anchor: &str, text: &str| {
            format!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>\n",
                escaped(text)
            )
        };
        svg += &text(middle, 28.0, "middle", self.title);
        svg += &text(middle, bottom + 46.0, "middle", self.x);
        let turned = text(-(top + bottom) / 2.0, 20.0, "middle", self.y);
        svg += &turned.replacen("<text", "<text transform=\"rotate(-90)\"", 1);
        let rule = |x1: f64, y1: f64, x2: f64, y2: f64| {
            format!(
                "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#dddddd\"/>\n"
            )
        };
        for value in x.ticks() {
            svg += &rule(at_x(value), top, at_x(value), bottom);
            svg += &text(at_x(value), bottom + 20.0, "middle", &x.label(value));
        }
        for value in y.ticks() {
            svg += &rule(left, at_y(value), right, at_y(value));
            svg += &text(left - 8.0, at_y(value) + 4.0, "end", &y.label(value));
        }
        // Writing to a String can't fail.
        let _ = writeln!(
            svg,
            "<path d=\"M{left} {top}V{bottom}H{right}\" fill=\"none\" stroke=\"#333333\"/>"
        );
        for (index, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let mut sorted = line.points.clone();
            sorted.sort_by(|a, b| a.0.total_cmp(&b.0));
            let spots: Vec<String> = sorted
                .iter()
                .map(|point| format!("{:.1},{:.1}", at_x(point.0), at_y(point.1)))
                .collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                spots.join(" ")
            );
            for point in sorted.iter().filter(|_| sorted.len() <= DOTS_MAX) {
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3.5\" fill=\"{colour}\"/>",
                    at_x(point.0),
                    at_y(point.1)
                );
            }
            let key = top + 10.0 + 22.0 * index as f64;
            let _ = writeln!(
                svg,
                "<rect x=\"{:.1}\" y=\"{:.1}\" width=\"18\" height=\"4\" fill=\"{colour}\"/>",
                right + 18.0,
                key - 6.0
            );
            svg += &text(right + 42.0, key, "start", &line.name);
        }
        svg + "</svg>\n"
    }
}

/// A scale with round numbers.
struct Axis {
    least: f64,
    step: f64,
    steps: u32,
}

impl Axis {
    /// Covers all from `least` to `most`, neither negative.
    fn over(least: f64, most: f64) -> Self {
        let least = if least.is_finite() { least } else { 0.0 };
        // About six steps of 1, 2 or 5 times a power of ten.
        let rough = (most - least).max(most / 100.0).max(1e-6) / 6.0;
        let power = 10f64.powf(rough.log10().floor());
        let factor = [1.0, 2.0, 5.0, 10.0]
            .into_iter()
            .find(|factor| factor * power >= rough);
        let step = factor.unwrap_or(10.0) * power;
        let first = (least / step).floor();
        Self {
            least: first * step,
            step,
            steps: ((most / step).ceil() - first).max(1.0) as u32,
        }
    }

    /// How far along it `value` is, 0 to 1.
    fn part(&self, value: f64) -> f64 {
        (value - self.least) / (self.step * f64::from(self.steps))
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        (0..=self.steps).map(|i| self.least + self.step * f64::from(i))
    }

    /// As many decimals as the steps need.
    fn label(&self, value: f64) -> String {
        let digits = (-self.step.log10().floor()).max(0.0) as usize;
        format!("{value:.digits$}")
    }
}

/// Text inside XML.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_lie_inside_the_axes_and_long_ones_have_no_dots() {
        let line = |name: &str, count: u32, scale: f64| Line {
            name: name.into(),
            points: (0..count)
                .rev()
                .map(|i| (f64::from(i), scale * f64::from(i % 7 + 1)))
                .collect(),
        };
        let chart = Chart {
            title: "a <b> & c",
            x: "step",
            y: "loss",
            from_zero: false,
            lines: vec![line("few", 5, 1.0), line("many", 300, 2.0)],
        };
        let svg = chart.draw();
        assert_eq!(
            (
                svg.matches("<polyline").count(),
                svg.matches("<circle").count()
            ),
            (2, 5),
            "{svg}"
        );
        assert!(
            svg.contains(">a &lt;b> &amp; c<") && svg.contains(">step<") && svg.contains(">loss<")
        );
        for points in svg.split("<polyline points=\"").skip(1) {
            let (points, _) = points.split_once('"').unwrap();
            let xs: Vec<f64> = points
                .split(' ')
                .map(|point| {
                    let (x, y) = point.split_once(',').unwrap();
                    let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                    assert!((BOX[0]..=BOX[2]).contains(&x) && (BOX[1]..=BOX[3]).contains(&y));
                    x
                })
                .collect();
            assert!(xs.is_sorted() && xs.len() >= 5, "{xs:?}");
        }
    }

    #[test]
    fn axes_cover_their_values_in_round_steps() {
        for (least, most, ticks) in [
            (0.0, 31.5, "0 10 20 30 40"),
            (90.0, 180.0, "80 100 120 140 160 180"),
            (0.0, 0.07, "0.00 0.02 0.04 0.06 0.08"),
            (0.0, 0.0, "0.0000000 0.0000002"),
            (100.0, 100.0, "100.0 100.2"),
        ] {
            let axis = Axis::over(least, most);
            let labels: Vec<String> = axis.ticks().map(|x| axis.label(x)).collect();
            assert_eq!(labels.join(" "), ticks);
            assert!(axis.part(least) >= 0.0 && axis.part(most) <= 1.0);
        }
    }
}
