//! A look at the feed-forward networks of a running model, for calibration.

/// Sees what goes into the activations.
pub trait Probe: Send + Sync {
    /// Shows one token of a layer's feed-forward network before its activation: the outputs of the
    /// gate and of the up matrix `(ff)` each. Of an ungated network the first is the up matrix's, and
    /// the second is empty.
    ///
    /// `step` is the number of the layer's `Down` step, `token` counts within the batch. Threads show
    /// different tokens of one step at a time.
    fn activations(&self, step: u32, token: usize, gate: &[f32], up: &[f32]);
}
