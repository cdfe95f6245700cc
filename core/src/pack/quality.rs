//! What leaving out neurons costs a model, as it was measured when it was packed.

use crate::gguf::ValueType;
use crate::plan::Model;

use super::{PackError, value};

/// Shares of the neurons that had room in memory when the loss was measured; 0: as few as can be.
pub const SHARES: [f32; 4] = [0.0, 0.10, 0.25, 0.50];

/// Losses of packs that were written before it was measured with as few neurons in memory as can be.
const LOSSES_BEFORE: usize = 12;

/// Shares of a layer's active neurons that were read when they were missing; nothing is lost with 1.
pub const KEEPS: [f32; 4] = [0.9, 0.7, 0.5, 0.3];

/// The key of the losses: by share, then by keep.
pub const LOSS_KEY: &str = "lean.quality.loss";

/// The key of how many tokens they were measured on.
pub const TOKENS_KEY: &str = "lean.quality.tokens";

/// Relative increase of perplexity over that of all active neurons, by share in memory and keep.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Quality {
    loss: [[f32; KEEPS.len()]; SHARES.len()],
    /// Tokens that it was measured on.
    pub tokens: u32,
}

impl Quality {
    /// From what was measured. Less kept is never better: what chance has turned round is levelled.
    pub fn new(mut loss: [[f32; KEEPS.len()]; SHARES.len()], tokens: u32) -> Self {
        for row in &mut loss {
            let mut most = 0f32;
            for loss in row {
                most = most.max(*loss);
                *loss = most;
            }
        }
        Self { loss, tokens }
    }

    /// As the metadata says; `None` when it wasn't measured, or not with so few neurons in memory as there may be.
    ///
    /// # Errors
    /// Keys of another kind, or losses that are none.
    pub fn of(model: &Model<'_, '_>) -> Result<Option<Self>, PackError> {
        if model.first.get(LOSS_KEY).is_none() {
            return Ok(None);
        }
        let wrong = PackError::Key {
            key: LOSS_KEY,
            expected: "16 singles that are not negative",
        };
        let array = value(model, LOSS_KEY)?
            .as_array()
            .filter(|array| array.element_type() == ValueType::F32)
            .ok_or(wrong)?;
        if array.len() == LOSSES_BEFORE {
            return Ok(None);
        }
        if array.len() != SHARES.len() * KEEPS.len() {
            return Err(wrong);
        }
        let mut loss = [[0.0; KEEPS.len()]; SHARES.len()];
        for (index, loss) in loss.as_flattened_mut().iter_mut().enumerate() {
            *loss = array
                .get(index)
                .and_then(|value| value.as_f32())
                .filter(|loss| loss.is_finite() && *loss >= 0.0)
                .ok_or(wrong)?;
        }
        let tokens = value(model, TOKENS_KEY)?.as_u32().ok_or(PackError::Key {
            key: TOKENS_KEY,
            expected: "an unsigned number",
        })?;
        Ok(Some(Self::new(loss, tokens)))
    }

    /// The losses, by share, then by keep.
    pub fn losses(&self) -> &[f32] {
        self.loss.as_flattened()
    }

    /// The loss to be expected where `share` of the neurons have room in memory and `keep` of the
    /// active ones are read when missing: between what was measured on straight lines, beyond the largest
    /// share as at it. `None` below the least keep.
    pub fn loss(&self, share: f32, keep: f32) -> Option<f32> {
        let (mut above, mut least) = (1.0, 0.0);
        for (index, &below) in KEEPS.iter().enumerate() {
            let here = self.at(share, index);
            if keep >= below {
                return Some(between(keep, (below, here), (above, least)));
            }
            (above, least) = (below, here);
        }
        None
    }

    /// The least keep that loses no more than `tolerance`, with what it loses.
    pub fn keep_within(&self, share: f32, tolerance: f32) -> (f32, f32) {
        let (mut keep, mut loss) = (1.0, 0.0);
        for (index, &below) in KEEPS.iter().enumerate() {
            let here = self.at(share, index);
            if here > tolerance {
                let within = tolerance.max(loss);
                return (between(within, (loss, keep), (here, below)), within);
            }
            (keep, loss) = (below, here);
        }
        (keep, loss)
    }

    /// The loss with `KEEPS[keep]` at `share`.
    fn at(&self, share: f32, keep: usize) -> f32 {
        let (mut below, mut loss) = (SHARES[0], self.loss[0][keep]);
        if share <= below {
            return loss;
        }
        for (&above, row) in SHARES[1..].iter().zip(&self.loss[1..]) {
            if share <= above {
                return between(share, (below, loss), (above, row[keep]));
            }
            (below, loss) = (above, row[keep]);
        }
        // How much less is lost with more in memory wasn't measured, and a cache fills slowly.
        loss
    }
}

/// On the line through two points, at `x` between theirs.
fn between(x: f32, (x0, y0): (f32, f32), (x1, y1): (f32, f32)) -> f32 {
    if x1 == x0 {
        return y1;
    }
    y0 + (y1 - y0) * ((x - x0) / (x1 - x0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quality() -> Quality {
        let loss = [
            [0.03, 0.07, 0.20, 0.90],
            [0.02, 0.05, 0.15, 0.60],
            [0.01, 0.03, 0.09, 0.40],
            [0.00, 0.01, 0.04, 0.20],
        ];
        Quality::new(loss, 100)
    }

    fn near(a: f32, b: f32) -> bool {
        (a - b).abs() < 1e-5
    }

    #[test]
    fn what_was_measured_is_what_is_said() {
        let quality = quality();
        for (row, share) in quality.loss.iter().zip(SHARES) {
            for (loss, keep) in row.iter().zip(KEEPS) {
                assert!(near(quality.loss(share, keep).unwrap(), *loss));
                let (least, expected) = quality.keep_within(share, *loss);
                assert!(least <= keep && expected <= *loss + 1e-6);
            }
            assert!(near(quality.loss(share, 1.0).unwrap(), 0.0));
        }
        assert_eq!(quality.loss(0.25, 0.29), None);
    }

    #[test]
    fn between_points_the_line_counts() {
        let quality = quality();
        assert!(near(quality.loss(0.25, 0.6).unwrap(), 0.06));
        assert!(near(quality.loss(0.375, 0.7).unwrap(), 0.02));
        assert!(near(quality.loss(0.75, 0.7).unwrap(), 0.01));
        assert!(near(quality.loss(1.0, 0.3).unwrap(), 0.20));
        assert!(near(quality.loss(0.05, 0.7).unwrap(), 0.06));
        let (keep, loss) = quality.keep_within(0.25, 0.06);
        assert!(near(keep, 0.6) && near(loss, 0.06));
        let (keep, loss) = quality.keep_within(0.25, 9.0);
        assert!(near(keep, 0.3) && near(loss, 0.40));
        let (keep, loss) = quality.keep_within(0.25, 0.0);
        assert!(near(keep, 1.0) && near(loss, 0.0));
    }

    #[test]
    fn chance_is_levelled() {
        let level = Quality::new([[-0.01, 0.03, 0.02, 0.04]; SHARES.len()], 1);
        assert_eq!(level.loss[0], [0.0, 0.03, 0.03, 0.04]);
        // All of a plain row may be left out.
        assert!(near(level.keep_within(0.1, 0.035).0, 0.4));
    }
}
