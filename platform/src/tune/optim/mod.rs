//! The optimizer: AdamW with moments in f32 or in 8 bits, schedules of the learning rate, clipping.
//!
//! Gradients of micro-batches accumulate by adding ([`crate::tune::ops::add`], or an operation's own `add`),
//! and a step takes their sum times a factor: that of clipping ([`clip_factor`]) and of the mean.

mod adamw;
mod bits8;
mod clip;
mod moments;
mod schedule;

pub use adamw::{AdamW, Update};
pub use clip::{clip_factor, sum_squares};
pub use moments::{Moments, Precision};
pub use schedule::{Decay, Schedule, ScheduleError};
