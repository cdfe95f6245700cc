//! The learning rate by step: a linear warm-up, then constant, linear or cosine decay to a floor.

use std::f64::consts::PI;
use std::fmt;

/// How the rate falls after the warm-up.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Decay {
    /// Not at all.
    Constant,
    /// In a straight line.
    Linear,
    /// Half a cosine.
    #[default]
    Cosine,
}

impl Decay {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Constant, Self::Linear, Self::Cosine];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Linear => "linear",
            Self::Cosine => "cosine",
        }
    }

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|decay| decay.name() == name)
    }
}

/// Learning rates of a training run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Schedule {
    /// The highest rate.
    pub peak: f32,
    /// Steps of warm-up: the first has `peak / warmup`, the last `peak`.
    pub warmup: u64,
    /// Steps in all, the warm-up counted; later ones stay at the floor.
    pub steps: u64,
    /// How the rate falls after the warm-up.
    pub decay: Decay,
    /// What it falls to after the last step, as a share of `peak`.
    pub floor: f32,
}

/// Why a schedule can't be used.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum ScheduleError {
    /// The peak isn't a positive number.
    Peak(f32),
    /// The floor isn't in `0 ..= 1`.
    Floor(f32),
    /// More steps of warm-up than steps.
    Warmup {
        /// Steps of warm-up.
        warmup: u64,
        /// Steps in all.
        steps: u64,
    },
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Peak(peak) => write!(
                f,
                "the learning rate is {peak}; it must be a positive number"
            ),
            Self::Floor(floor) => write!(
                f,
                "the schedule ends at {floor} of the learning rate; a share from 0 to 1 is needed"
            ),
            Self::Warmup { warmup, steps } => write!(
                f,
                "{warmup} steps of warm-up don't fit into {steps} steps; take fewer, or more steps"
            ),
        }
    }
}

impl std::error::Error for ScheduleError {}

impl Schedule {
    /// The schedule itself, if it can be used.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn checked(self) -> Result<Self, ScheduleError> {
        if !(self.peak.is_finite() && self.peak > 0.0) {
            return Err(ScheduleError::Peak(self.peak));
        }
        if !(0.0..=1.0).contains(&self.floor) {
            return Err(ScheduleError::Floor(self.floor));
        }
        if self.warmup > self.steps {
            return Err(ScheduleError::Warmup {
                warmup: self.warmup,
                steps: self.steps,
            });
        }
        Ok(self)
    }

    /// The rate of a step; the first step is 0.
    #[must_use]
    pub fn at(&self, step: u64) -> f32 {
        if step < self.warmup {
            return (f64::from(self.peak) * (step + 1) as f64 / self.warmup as f64) as f32;
        }
        let length = self.steps.saturating_sub(self.warmup).max(1);
        let done = ((step - self.warmup) as f64 / length as f64).min(1.0);
        let left = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - done,
            Decay::Cosine => 0.5 * (1.0 + (PI * done).cos()),
        };
        let floor = f64::from(self.floor);
        (f64::from(self.peak) * (floor + (1.0 - floor) * left)) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Schedule = Schedule {
        peak: 0.5,
        warmup: 4,
        steps: 12,
        decay: Decay::Linear,
        floor: 0.0,
    };

    #[test]
    fn rates_rise_and_fall() {
        let rates = |schedule: Schedule| -> Vec<f32> {
            let schedule = schedule.checked().unwrap();
            (0..14).map(|step| schedule.at(step)).collect()
        };
        assert_eq!(
            rates(PLAIN),
            [
                0.125, 0.25, 0.375, 0.5, 0.5, 0.4375, 0.375, 0.3125, 0.25, 0.1875, 0.125, 0.0625,
                0.0, 0.0
            ]
        );
        let cosine = rates(Schedule {
            decay: Decay::Cosine,
            floor: 0.1,
            ..PLAIN
        });
        assert_eq!(cosine[4], 0.5);
        assert_eq!(cosine[8], 0.5 * (0.1 + 0.9 * 0.5));
        assert_eq!(
            cosine[6],
            (0.5 * (0.1 + 0.45 * (1.0 + 0.5f64.sqrt()))) as f32
        );
        assert_eq!(cosine[12..], [0.05; 2]);
        let constant = rates(Schedule {
            decay: Decay::Constant,
            warmup: 0,
            ..PLAIN
        });
        assert_eq!(constant, [0.5; 14]);
        let all_warmup = rates(Schedule {
            warmup: 12,
            ..PLAIN
        });
        assert_eq!(all_warmup[11..], [0.5, 0.5, 0.0]);
    }

    #[test]
    fn names_go_both_ways() {
        for decay in Decay::ALL {
            assert_eq!(Decay::from_name(decay.name()), Some(decay));
        }
        assert_eq!(Decay::from_name("step"), None);
    }

    #[test]
    fn bad_schedules_are_named() {
        let error = |schedule: Schedule| schedule.checked().unwrap_err().to_string();
        for peak in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(error(Schedule { peak, ..PLAIN }).contains("learning rate is"));
        }
        for floor in [-0.1, 1.1, f32::NAN] {
            assert!(error(Schedule { floor, ..PLAIN }).contains("ends at"));
        }
        let warmup = 13;
        assert!(error(Schedule { warmup, ..PLAIN }).contains("13 steps of warm-up"));
    }
}
