//! How well a model predicts a text: chunks of it, each from an empty cache, of which the later tokens
//! are scored.

use super::model::Info;
use super::session::Session;
use crate::error::Error;

/// Sums of the scored tokens' negative log-likelihoods.
#[derive(Clone, Copy, Default, Debug)]
pub struct Sums {
    /// Scored tokens.
    pub count: u64,
    /// Their sum.
    pub nll: f64,
    nll_squared: f64,
}

impl Sums {
    /// Takes one token's.
    pub fn add(&mut self, nll: f64) {
        self.count += 1;
        self.nll += nll;
        self.nll_squared += nll * nll;
    }

    /// `exp` of their mean.
    pub fn perplexity(&self) -> f64 {
        (self.nll / self.count as f64).exp()
    }

    /// One standard error of the perplexity, by propagation through the exponential.
    pub fn error(&self) -> f64 {
        let n = self.count as f64;
        let mean = self.nll / n;
        let variance = self.nll_squared / n - mean * mean;
        if n > 1.0 && variance > 0.0 {
            (variance / (n - 1.0)).sqrt() * self.perplexity()
        } else {
            0.0
        }
    }
}

/// Scores one chunk from an empty cache, its tokens from `first` on, each predicted by those before it.
/// BOS takes the place of the first token where the model wants one.
///
/// # Errors
/// As [`Session::score`].
pub fn score_chunk(
    session: &mut Session<'_>,
    info: &Info,
    chunk: &mut [u32],
    first: usize,
    each: impl FnMut(f64),
) -> Result<(), Error> {
    let mut targets = vec![u32::MAX; chunk.len()];
    let last = chunk.len() - 1;
    targets[first - 1..last].copy_from_slice(&chunk[first..]);
    if let Some(bos) = info.tokenizer.bos().filter(|_| info.tokenizer.add_bos()) {
        chunk[0] = bos;
    }
    session.reset();
    session.score(chunk, &targets, each)
}

#[cfg(test)]
mod tests {
    use super::Sums;

    #[test]
    fn equal_likelihoods_have_no_error() {
        let mut sums = Sums::default();
        for _ in 0..10 {
            sums.add(2.0);
        }
        assert!((sums.perplexity() - 2f64.exp()).abs() < 1e-12);
        assert!(sums.error() < 1e-6);
    }

    #[test]
    fn the_error_is_that_of_the_mean() {
        let mut sums = Sums::default();
        for nll in [1.0, 2.0, 3.0, 4.0] {
            sums.add(nll);
        }
        // Variance 1.25 over n - 1 = 3.
        let want = (1.25f64 / 3.0).sqrt() * 2.5f64.exp();
        assert!((sums.error() - want).abs() < 1e-12);
    }
}
