//! The tensors of a layer that its backward pass needs, and how each of them can be had again.

use leanstream_core::act::Width;
use leanstream_core::act::pool::TensorId;
use leanstream_core::plan::Hyper;

use super::net::Half;

/// A saved tensor of a layer, in the order in which the forward pass makes them. Each is (tokens, width).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Kind {
    /// The residual stream before attention, divided by its root mean square.
    AttnNorm,
    /// Queries, turned; where heads are normed, before the norm's weight and turning.
    Q,
    /// Keys, likewise.
    K,
    /// Values.
    V,
    /// Attention's output.
    O,
    /// Its projection, normed, where a norm follows.
    AttnPost,
    /// The residual stream before the feed-forward network, normed.
    FfnNorm,
    /// The gate before its activation.
    Gate,
    /// The other input product.
    Up,
    /// The network's output, normed, where a norm follows.
    FfnPost,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 10] = [
        Self::AttnNorm,
        Self::Q,
        Self::K,
        Self::V,
        Self::O,
        Self::AttnPost,
        Self::FfnNorm,
        Self::Gate,
        Self::Up,
        Self::FfnPost,
    ];

    /// How many there are.
    pub const COUNT: usize = Self::ALL.len();

    /// As tables and JSON call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::AttnNorm => "attn_norm",
            Self::Q => "q",
            Self::K => "k",
            Self::V => "v",
            Self::O => "attn_out",
            Self::AttnPost => "attn_post",
            Self::FfnNorm => "ffn_norm",
            Self::Gate => "gate",
            Self::Up => "up",
            Self::FfnPost => "ffn_post",
        }
    }

    /// Floats a token; 0 where the architecture has none.
    pub fn width(self, hyper: &Hyper, posts: bool) -> usize {
        let width = match self {
            Self::AttnNorm | Self::FfnNorm => hyper.d,
            Self::Q | Self::O => hyper.q_dim(),
            Self::K | Self::V => hyper.kv_dim(),
            Self::AttnPost | Self::FfnPost if posts => hyper.d,
            Self::AttnPost | Self::FfnPost => 0,
            Self::Gate if !hyper.act.gated() => 0,
            Self::Gate | Self::Up => hyper.ff,
        };
        width as usize
    }

    /// The normed stream that a half begins with.
    pub fn normed(half: Half) -> Self {
        match half {
            Half::Attention => Self::AttnNorm,
            Half::Ffn => Self::FfnNorm,
        }
    }

    /// A half's normed output.
    pub fn output(half: Half) -> Self {
        match half {
            Half::Attention => Self::AttnPost,
            Half::Ffn => Self::FfnPost,
        }
    }

    /// The number of this tensor of a layer among all saved ones.
    pub fn id(self, layer: usize) -> TensorId {
        TensorId((layer * Self::COUNT + self as usize) as u32)
    }
}

/// At which width each tensor of a layer is saved; `None` is computed again from those that are.
///
/// What can be computed again: queries, keys and values from the attention's normed input, its output
/// from them, gate and up from the network's normed input; and everything from the attention's normed
/// input, which together with the exact norms is the residual stream itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LayerPlan(pub [Option<Width>; Kind::COUNT]);

impl LayerPlan {
    /// Everything at one width.
    pub fn all(width: Width) -> Self {
        Self([Some(width); Kind::COUNT])
    }

    /// The attention's normed input alone: the layer is computed again.
    pub fn input(width: Width) -> Self {
        let mut plan = Self([None; Kind::COUNT]);
        plan.0[Kind::AttnNorm as usize] = Some(width);
        plan
    }

    /// At which width `kind` is saved.
    pub fn width(&self, kind: Kind) -> Option<Width> {
        self.0[kind as usize]
    }
}
