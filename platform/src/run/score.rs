//! What perplexity needs of a head: for every token the logit of the token that follows, and the
//! logarithm of the sum of all exponentials, without ever holding all logits.

use std::sync::Mutex;

use super::cells::Cells;
use super::pass::{own, see};
use crate::cpu::vector::Vector;

/// Running sums, a row of tokens for each thread.
pub struct Score {
    threads: Vec<Mutex<Sums>>,
    /// The token that follows each token of the batch; `u32::MAX` where it isn't scored.
    targets: Cells<u32>,
    /// Its logit.
    logits: Cells<f32>,
}

struct Sums {
    /// Largest logit so far `(tokens)`.
    top: Vec<f32>,
    /// Sum of `exp(logit - top)` `(tokens)`.
    sum: Vec<f64>,
}

impl Score {
    /// Room for `tokens` tokens (0 when nothing is scored) on each thread.
    pub fn new(tokens: usize, threads: usize) -> Self {
        let sums = || Sums {
            top: vec![f32::NEG_INFINITY; tokens],
            sum: vec![0.0; tokens],
        };
        Self {
            threads: (0..threads).map(|_| Mutex::new(sums())).collect(),
            targets: Cells::new(tokens),
            logits: Cells::new(tokens),
        }
    }

    /// Bytes of [`Score::new`].
    pub fn bytes(tokens: u64, threads: u64) -> u64 {
        tokens * (8 + threads * 12)
    }

    /// Begins a batch: `targets[i]` follows its `i`-th token.
    pub fn begin(&self, targets: &[u32]) {
        own(&self.targets, 0..targets.len()).copy_from_slice(targets);
        for sums in &self.threads {
            let mut sums = sums.lock().expect("a panic ends the run");
            sums.top.fill(f32::NEG_INFINITY);
            sums.sum.fill(0.0);
        }
        own(&self.logits, 0..self.logits.len()).fill(f32::NAN);
    }

    /// Adds rows `first .. first + rows` of every token; `tile` is `(tokens, rows)` and is used up.
    pub fn fold(&self, vector: Vector, thread: usize, first: usize, rows: usize, tile: &mut [f32]) {
        let mut sums = self.threads[thread].lock().expect("a panic ends the run");
        let tokens = tile.len() / rows;
        let targets = see(&self.targets, 0..tokens);
        for (token, logits) in tile.chunks_exact_mut(rows).enumerate() {
            if targets[token] == u32::MAX {
                continue;
            }
            if let Some(row) = (targets[token] as usize)
                .checked_sub(first)
                .filter(|row| *row < rows)
            {
                own(&self.logits, token..token + 1)[0] = logits[row];
            }
            let top = vector.max(logits);
            if top > sums.top[token] {
                sums.sum[token] *= f64::from(sums.top[token] - top).exp();
                sums.top[token] = top;
            }
            let base = sums.top[token];
            for logit in logits.iter_mut() {
                *logit -= base;
            }
            vector.exp(logits);
            sums.sum[token] += logits.iter().map(|e| f64::from(*e)).sum::<f64>();
        }
    }

    /// Negative log-likelihood of the token that follows `token`.
    pub fn nll(&self, token: usize) -> f64 {
        let sums: Vec<_> = self
            .threads
            .iter()
            .map(|s| s.lock().expect("a panic ends the run"))
            .collect();
        let top = sums
            .iter()
            .map(|s| s.top[token])
            .fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = sums
            .iter()
            .map(|s| s.sum[token] * f64::from(s.top[token] - top).exp())
            .sum();
        f64::from(top) + sum.ln() - f64::from(see(&self.logits, token..token + 1)[0])
    }
}

/// Negative log-likelihood of a token.
pub fn nll(logits: &[f32], token: u32) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - most).exp()).sum();
    sum.ln() - f64::from(logits[token as usize] - most)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folding_in_parts_gives_the_log_likelihood() {
        let score = Score::new(2, 2);
        score.begin(&[3, 70]);
        let logit =
            |token: usize, row: usize| ((token * 31 + row * 17) % 23) as f32 - 60.0 * token as f32;
        let vector = Vector::detect();
        for (thread, first, rows) in [(0, 0, 40), (1, 40, 50), (0, 90, 10)] {
            let mut tile: Vec<f32> = (0..2)
                .flat_map(|token| (first..first + rows).map(move |row| logit(token, row)))
                .collect();
            score.fold(vector, thread, first, rows, &mut tile);
        }
        for (token, target) in [(0, 3), (1, 70)] {
            let sum: f64 = (0..100).map(|row| f64::from(logit(token, row)).exp()).sum();
            let want = sum.ln() - f64::from(logit(token, target));
            assert!(
                (score.nll(token) - want).abs() < 1e-5,
                "{} not {want}",
                score.nll(token)
            );
        }
    }
}
