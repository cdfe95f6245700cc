//! A unit forward, and what it saved made again: convolution, batch norm, and ReLU where it follows.
//!
//! Where ReLU follows, its bits tell on which side of a point `center = -beta / gamma` an element of `xhat` lies. So only the
//! distance to it is saved, `|xhat - center|`, whose range is half as wide: as good as one bit more, for
//! nothing. A channel whose center is far from 0 has larger distances; they are divided by what makes them
//! as large as the others'.

use super::classifier::{Classifier, bits};
use super::{conv, norm, relu};
use crate::error::Error;

/// Added to variances before they divide.
const EPS: f32 = 1e-5;
/// Share of a batch's statistics in those that evaluation uses.
const MOMENTUM: f32 = 0.1;
/// A smaller `gamma` is taken for this, where it divides.
const GAMMA_MIN: f32 = 1e-3;
/// About the largest element of `xhat` among some hundred.
const REACH: f32 = 2.8;

/// How what is saved of each norm's channel relates to `xhat`: `xhat = center + spread * saved`, and to
/// ReLU's output: `gain * saved` where it isn't 0.
#[derive(Debug)]
pub(super) struct Folds {
    /// Where ReLU begins; 0 without ReLU.
    pub(super) center: Vec<f32>,
    /// With the sign of `gamma`; 1 without ReLU.
    pub(super) spread: Vec<f32>,
    /// Not negative where ReLU follows.
    pub(super) gain: Vec<f32>,
}

impl Folds {
    pub(super) fn new(channels: usize) -> Self {
        Self {
            center: vec![0.0; channels],
            spread: vec![1.0; channels],
            gain: vec![1.0; channels],
        }
    }

    /// Of a channel with ReLU.
    fn set(&mut self, channel: usize, gamma: f32, beta: f32) {
        let gamma = if gamma.abs() < GAMMA_MIN {
            GAMMA_MIN.copysign(gamma)
        } else {
            gamma
        };
        let center = -beta / gamma;
        let spread = (1.0 + center.abs() / REACH).copysign(gamma);
        self.center[channel] = center;
        self.spread[channel] = spread;
        self.gain[channel] = gamma * spread;
    }
}

impl Classifier<'_> {
    /// Forward. Shapes: `x` (images, in), `y` (images, out).
    pub(super) fn unit(
        &mut self,
        index: usize,
        x: &[f32],
        y: &mut [f32],
        train: bool,
    ) -> Result<(), Error> {
        let unit = self.net.units[index];
        let w = self.net.params[unit.param].range();
        conv::forward(
            &self.team,
            self.vector,
            &mut self.work,
            &unit.conv,
            &self.values[w],
            x,
            y,
            false,
        );
        if !train {
            self.affine_of_running(index, y);
            if let Some(mask) = unit.mask {
                let bits = bits(&mut self.exact, self.batch, mask, y.len());
                relu::relu(&self.team, self.vector, y, bits);
            }
            return Ok(());
        }
        self.normalize(index, y);
        let Some(mask) = unit.mask else {
            self.save(unit.xhat, y)?;
            let (gamma, beta) = self.norm_params(index);
            norm::affine(&self.team, self.vector, y, gamma, beta);
            return Ok(());
        };
        let outs = unit.conv.outs;
        let [factor, term] = &mut self.small;
        let (factor, term) = (&mut factor[..outs], &mut term[..outs]);
        let [gamma, beta] = [1, 2].map(|i| &self.values[self.net.params[unit.param + i].range()]);
        for i in 0..outs {
            let channel = unit.channel + i;
            self.folds.set(channel, gamma[i], beta[i]);
            factor[i] = 1.0 / self.folds.spread[channel];
            term[i] = -self.folds.center[channel] * factor[i];
        }
        norm::affine(&self.team, self.vector, y, factor, term);
        let bits_of = bits(&mut self.exact, self.batch, mask, y.len());
        relu::fold(&self.team, self.vector, y, bits_of);
        self.save(unit.xhat, y)?;
        self.relu_of_folded(index, y);
        Ok(())
    }

    /// What the unit saved becomes its output.
    fn relu_of_folded(&self, index: usize, y: &mut [f32]) {
        let unit = self.net.units[index];
        let mask = unit.mask.expect("what is folded has ReLU");
        let bits = &self.exact[mask.before * self.batch..][..relu::mask_bytes(y.len())];
        relu::relu_backward(&self.team, self.vector, y, bits);
        let gain = &self.folds.gain[unit.channel..unit.channel + unit.conv.outs];
        norm::scale(&self.team, self.vector, y, gain);
    }

    /// The output of a unit with ReLU, made again from what it saved. Shapes: `out` (images, out).
    pub(super) fn output(&self, index: usize, out: &mut [f32]) {
        self.load(self.net.units[index].xhat, out);
        self.relu_of_folded(index, out);
    }

    /// A unit's `xhat`, made again. Shapes: `out` (images, out).
    pub(super) fn hat(&self, index: usize, out: &mut [f32]) {
        let unit = self.net.units[index];
        self.load(unit.xhat, out);
        if let Some(mask) = unit.mask {
            let bits = &self.exact[mask.before * self.batch..][..relu::mask_bytes(out.len())];
            relu::unfold(&self.team, self.vector, out, bits);
            let channels = unit.channel..unit.channel + unit.conv.outs;
            let Folds { center, spread, .. } = &self.folds;
            let (spread, center) = (&spread[channels.clone()], &center[channels]);
            norm::affine(&self.team, self.vector, out, spread, center);
        }
    }

    /// `y` becomes `xhat`; running statistics follow.
    fn normalize(&mut self, index: usize, y: &mut [f32]) {
        let unit = self.net.units[index];
        let outs = unit.conv.outs;
        let [mean, variance] = &mut self.small;
        let (mean, variance) = (&mut mean[..outs], &mut variance[..outs]);
        norm::statistics(&self.team, self.vector, y, &mut self.sums, mean, variance);
        let rows = (y.len() / outs) as f32;
        // Of what the batch was drawn from.
        let drawn = rows / (rows - 1.0).max(1.0);
        let channels = unit.channel..unit.channel + outs;
        let (means, variances) = self.running.split_at_mut(self.net.channels);
        let rstd = &mut self.rstd[channels.clone()];
        for i in 0..outs {
            let channel = unit.channel + i;
            means[channel] += MOMENTUM * (mean[i] - means[channel]);
            variances[channel] += MOMENTUM * (variance[i] * drawn - variances[channel]);
            rstd[i] = 1.0 / (variance[i] + EPS).sqrt();
        }
        norm::normalize(&self.team, self.vector, y, mean, rstd);
    }

    /// The norm of evaluation.
    fn affine_of_running(&mut self, index: usize, y: &mut [f32]) {
        let unit = self.net.units[index];
        let outs = unit.conv.outs;
        let [factor, term] = &mut self.small;
        let (factor, term) = (&mut factor[..outs], &mut term[..outs]);
        let [gamma, beta] = [1, 2].map(|i| &self.values[self.net.params[unit.param + i].range()]);
        let (means, variances) = self.running.split_at(self.net.channels);
        for i in 0..outs {
            let channel = unit.channel + i;
            factor[i] = gamma[i] / (variances[channel] + EPS).sqrt();
            term[i] = beta[i] - means[channel] * factor[i];
        }
        norm::affine(&self.team, self.vector, y, factor, term);
    }
}
