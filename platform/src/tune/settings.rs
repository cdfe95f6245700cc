//! What a training run is asked to do.

use leanstream_core::act::Width;

use super::model::params::Scheme;
use super::optim::{Precision, Schedule};

/// At which width activations are saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ActBits {
    /// As many bits as each tensor is worth under the budget.
    Auto,
    /// All at one width.
    Fixed(Width),
}

impl ActBits {
    /// The width that all have.
    pub fn fixed(self) -> Option<Width> {
        match self {
            Self::Auto => None,
            Self::Fixed(width) => Some(width),
        }
    }

    /// As it is written.
    pub fn name(self) -> String {
        match self {
            Self::Auto => "auto".into(),
            Self::Fixed(width) => width.to_string(),
        }
    }

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        if name == "auto" {
            return Some(Self::Auto);
        }
        Width::ALL
            .into_iter()
            .find(|width| width.to_string() == name)
            .map(Self::Fixed)
    }
}

/// What is computed again in the backward pass instead of saved.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Recompute {
    /// What saving isn't worth its pages, under the budget.
    Auto,
    /// Nothing.
    Never,
    /// Every layer, from its input alone.
    Layers,
}

impl Recompute {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Auto, Self::Never, Self::Layers];

    /// As it is written.
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Never => "never",
            Self::Layers => "layers",
        }
    }

    /// The one that is written so.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// A run's settings, checked.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Settings {
    /// What is trained.
    pub scheme: Scheme,
    /// Sequences of a step.
    pub batch: u32,
    /// Steps.
    pub steps: u64,
    /// Learning rate by step.
    pub schedule: Schedule,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Largest norm of the gradient.
    pub clip: f32,
    /// This times the mean output of ReLU, summed over layers, is added to each token's loss.
    pub sparsity: f32,
    /// Seed of the order of data, of the first adapters, of rounding and of dropout.
    pub seed: u64,
    /// At which width activations are saved.
    pub act: ActBits,
    /// What is computed again.
    pub recompute: Recompute,
    /// How the optimizer's moments are held.
    pub moments: Precision,
    /// Threads.
    pub threads: usize,
}
