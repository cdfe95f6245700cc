//! What noise in a saved tensor does to the gradient, from what the backward pass has at hand.
//!
//! Inputs of linears: noise in `x` of `dA = sum_t p_t x_t^T` has the variance that
//! [`leanstream_core::act::importance`] gives, exactly; an adapter's second gradient, `sum_t dy_t (A x_t)^T`,
//! has it through A. What is used in between (queries, keys, values,
//! gate, up) spoils what flows through it: by about the tensor's own noise-to-signal ratio, the
//! gradients of the linears before it, and its half's part of all gradients below. Scores see queries'
//! and keys' noise multiplied by their own size, since they are exponents.
//!
//! What is computed again from a saved tensor has that one's noise, relative to its length. It is taken for granted
//! that everything is, since nobody would save what gives the rest less well than that.
//!
//! All are relative to what is spoiled: the optimizer divides each weight's gradient by its own size, so that noise in
//! a small one is as harmful as in a large one. A trained tensor counts by its squared noise by its squared gradient, and
//! by its share of all parameters.

use leanstream_core::act::importance::importance;

use super::kind::Kind;
use super::net::Half;

/// What one layer showed.
#[derive(Clone, Copy, Debug, Default)]
struct Layer {
    /// Variance at one step of the grid, of inputs of linears.
    direct: [f32; Kind::COUNT],
    /// Noise at one step of the grid relative to the tensor's squared length.
    ratio: [f32; Kind::COUNT],
    halves: [Seen; 2],
    /// How much larger noise is in scores than in queries and keys.
    scores: f32,
}

/// What flowed back through a half.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Squared lengths of the gradients of its input linears, and of its output's, as if tokens were independent,
    /// as they count.
    gradients: [f64; 2],
    /// Its part of the squared gradient that is passed on.
    share: f64,
}

/// What the last backward pass showed, and importances from it.
pub struct Importance {
    layers: Vec<Layer>,
    by_tensor: Vec<f32>,
    /// Squared lengths of what rows of an input were multiplied with (tokens).
    rows: Vec<f32>,
    /// Squared ranges of its rows' groups (tokens).
    ranges: Vec<f32>,
}

/// What the estimates leave out, by kind: the curve of the activation, softmax' answer to errors. Inputs of linears
/// need none: what is said of them is their variance. Between what `tests/tune_variance.rs` finds on small models
/// and what `cargo run --release --example gradient_noise` finds on SmolLM2, which prints both sides.
pub const WEIGHTS: [f64; Kind::COUNT] = [1.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 1.0, 1.0];

/// What may be computed again from the layer's input; the last two also from the network's.
const FROM_STREAM: [Kind; 6] = [
    Kind::Q,
    Kind::K,
    Kind::V,
    Kind::FfnNorm,
    Kind::Gate,
    Kind::Up,
];

/// Importances are taken from the last micro-batch of every so many.
const EVERY: u64 = 4;

impl Importance {
    /// Nothing was seen yet; for micro-batches of `tokens` tokens.
    pub fn new(layers: usize, tokens: usize) -> Self {
        Self {
            layers: vec![Layer::default(); layers],
            by_tensor: vec![0.0; layers * Kind::COUNT],
            rows: vec![0.0; tokens],
            ranges: vec![0.0; tokens],
        }
    }

    /// Bytes of [`Importance::new`].
    pub fn bytes(layers: usize, tokens: usize) -> u64 {
        (layers * (size_of::<Layer>() + Kind::COUNT * 4) + tokens * 8) as u64
    }

    /// Whether this micro-batch is one to learn from.
    pub fn due(micro: u64) -> bool {
        micro % EVERY == 1 || micro <= EVERY
    }

    /// By tensor id, relative to squared gradients.
    pub fn by_tensor(&self) -> &[f32] {
        &self.by_tensor
    }

    /// A pass begins: nothing was seen of what it didn't save.
    pub fn begin(&mut self) {
        self.layers.fill(Layer::default());
    }

    /// Variance at one step of the grid of the gradients that a saved input of linears is multiplied for, in the last
    /// pass.
    pub fn of_products(&self, layer: usize, kind: Kind) -> f32 {
        self.layers[layer].direct[kind as usize]
    }

    /// Rows for [`super::linear::Linears::gradients`] to add to, cleared.
    pub fn rows(&mut self, tokens: usize) -> &mut [f32] {
        let rows = &mut self.rows[..tokens];
        rows.fill(0.0);
        rows
    }

    /// Room for a tensor's squared ranges.
    pub fn ranges(&mut self, tokens: usize) -> &mut [f32] {
        &mut self.ranges[..tokens]
    }

    /// An input of linears: its groups' squared ranges are in `ranges`, what its rows were multiplied
    /// with in `rows`; elements are multiplied by `weight` squared on the way.
    pub fn saw_input(
        &mut self,
        layer: usize,
        kind: Kind,
        group: usize,
        tokens: usize,
        weight: f32,
    ) {
        let rows = self.rows[..tokens].iter().zip(&self.ranges[..tokens]);
        let rows = rows.map(|(factor, ranges)| (*factor, *ranges));
        self.layers[layer].direct[kind as usize] = weight * importance(group as u32, rows);
    }

    /// A tensor that is used in between, of squared length `energy`; its squared ranges are in `ranges`.
    pub fn saw_between(
        &mut self,
        layer: usize,
        kind: Kind,
        group: usize,
        tokens: usize,
        energy: f64,
    ) {
        let ranges: f64 = self.ranges[..tokens].iter().map(|r| f64::from(*r)).sum();
        let noise = group as f64 / 6.0 * ranges;
        let ratio = if energy > 0.0 { noise / energy } else { 0.0 };
        self.layers[layer].ratio[kind as usize] = ratio as f32;
    }

    /// How large scores are, from the squared lengths of queries and keys.
    pub fn saw_scores(&mut self, layer: usize, mean_square: f64) {
        self.layers[layer].scores = mean_square.max(1.0) as f32;
    }

    /// Squared gradient of a half's linears on one of its sides: `inputs` or output. `rows` has what
    /// their input was multiplied with; `energy` is that input's squared length.
    pub fn saw_linears(
        &mut self,
        layer: usize,
        half: Half,
        output: bool,
        tokens: usize,
        energy: f64,
    ) {
        let rows: f64 = self.rows[..tokens].iter().map(|r| f64::from(*r)).sum();
        let gradient = rows * energy / tokens as f64;
        self.layers[layer].halves[half as usize].gradients[usize::from(output)] = gradient;
    }

    /// A half's part of the squared gradient that is passed on below.
    pub fn saw_share(&mut self, layer: usize, half: Half, share: f64) {
        self.layers[layer].halves[half as usize].share = share.clamp(0.0, 1.0);
    }

    /// The pass has ended.
    pub fn finish(&mut self) {
        let mut below = 0.0;
        let out = self.by_tensor.chunks_exact_mut(Kind::COUNT);
        for (layer, out) in self.layers.iter().zip(out) {
            let [attention, ffn] = layer.halves;
            // What a tensor spoils that is as much noise as signal.
            let spoils = |kind| {
                let (before, through) = match kind {
                    Kind::Q | Kind::K => {
                        let scores = f64::from(layer.scores);
                        (scores * attention.gradients[0], scores * attention.share)
                    }
                    Kind::V => (attention.gradients[0], attention.share),
                    Kind::FfnNorm => (ffn.gradients[0], 0.0),
                    Kind::Gate | Kind::Up => (ffn.gradients[0] + ffn.gradients[1], ffn.share),
                    _ => (0.0, 0.0),
                };
                // The feed-forward network comes after attention: its noise reaches that too.
                let under = match kind {
                    Kind::Gate | Kind::Up => below + attention.gradients.iter().sum::<f64>(),
                    _ => below,
                };
                WEIGHTS[kind as usize] * (before + through * under)
            };
            let all_spoil = |kinds: &[Kind]| kinds.iter().map(|kind| spoils(*kind)).sum::<f64>();
            for kind in Kind::ALL {
                let spoiled = match kind {
                    Kind::AttnNorm => all_spoil(&FROM_STREAM),
                    Kind::FfnNorm => all_spoil(&FROM_STREAM[4..]),
                    _ => spoils(kind),
                };
                let direct = WEIGHTS[kind as usize] * f64::from(layer.direct[kind as usize]);
                let all = direct + f64::from(layer.ratio[kind as usize]) * spoiled;
                out[kind as usize] = all as f32;
            }
            below += attention
                .gradients
                .iter()
                .chain(&ffn.gradients)
                .sum::<f64>();
        }
    }
}
