//! Choosing the next token from its logits.
//!
//! The order and the defaults are llama.cpp's: repeat penalty, top-k, top-p, min-p, temperature, then
//! a draw. Everything is deterministic for a seed: the draw uses PCG32 (O'Neill 2014, PCG-XSH-RR), and
//! ties are broken by token id.

use std::fmt;

/// What is asked of the sampler.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Params {
    /// 0 takes the most likely token; larger is more random.
    pub temperature: f32,
    /// Only the `top_k` most likely tokens; 0 for all.
    pub top_k: u32,
    /// Only the most likely tokens that together have this probability; 1 for all.
    pub top_p: f32,
    /// Only tokens at least this likely, compared with the most likely one; 0 for all.
    pub min_p: f32,
    /// Logits of recent tokens are divided by it (multiplied where negative); 1 for none.
    pub repeat_penalty: f32,
    /// How many tokens are recent.
    pub repeat_last_n: u32,
    /// Start of the random numbers.
    pub seed: u64,
}

impl Params {
    /// How many of the most likely tokens it takes to choose; `None` for all of them.
    pub fn top(&self) -> Option<u32> {
        match self.top_k {
            _ if self.temperature <= 0.0 => Some(1),
            0 => None,
            k => Some(k),
        }
    }
}

impl Default for Params {
    fn default() -> Self {
        Self {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            seed: 0,
        }
    }
}

/// Logits from which nothing can be chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NotFinite {
    /// The first token whose logit is no number.
    pub token: u32,
}

impl fmt::Display for NotFinite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "the logit of token {} is not a number: the weights are damaged (try 'leanstream verify --blocks') or \
             the computation overflowed",
            self.token
        )
    }
}

impl std::error::Error for NotFinite {}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Candidate {
    token: u32,
    /// Logit, later a weight.
    weight: f32,
}

/// The sampler of one run. Allocates only when it is made.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: Params,
    random: Pcg32,
    candidates: Vec<Candidate>,
    /// The last tokens, a ring.
    recent: Vec<u32>,
    next_recent: usize,
}

impl Sampler {
    /// A sampler for a vocabulary of `vocab` tokens.
    pub fn new(params: Params, vocab: u32) -> Self {
        Self {
            params,
            random: Pcg32::new(params.seed),
            candidates: Vec::with_capacity(if params.temperature > 0.0 {
                vocab as usize
            } else {
                0
            }),
            recent: Vec::with_capacity(params.repeat_last_n as usize),
            next_recent: 0,
        }
    }

    /// Notes a token of the prompt, or one that was chosen.
    pub fn accept(&mut self, token: u32) {
        if self.recent.len() < self.params.repeat_last_n as usize {
            self.recent.push(token);
        } else if let Some(oldest) = self.recent.get_mut(self.next_recent) {
            *oldest = token;
            self.next_recent = (self.next_recent + 1) % self.recent.len();
        }
    }

    /// The penalty of recent tokens, and these, in no order and some of them repeatedly.
    pub fn recent(&self) -> (f32, &[u32]) {
        (self.params.repeat_penalty, &self.recent)
    }

    /// Chooses a token. `logits` (vocab) are changed where the penalty applies.
    ///
    /// # Errors
    /// A logit that is NaN.
    pub fn choose(&mut self, logits: &mut [f32]) -> Result<u32, NotFinite> {
        if let Some(token) = logits.iter().position(|logit| logit.is_nan()) {
            return Err(NotFinite {
                token: token as u32,
            });
        }
        self.penalise(logits);
        if self.params.temperature <= 0.0 {
            return Ok(most_likely(logits));
        }
        self.candidates.clear();
        self.candidates.extend(
            (0..)
                .zip(logits.iter())
                .map(|(token, &weight)| Candidate { token, weight }),
        );
        self.keep_top_k();
        self.keep_top_p();
        self.keep_min_p();
        Ok(self.draw())
    }

    fn penalise(&self, logits: &mut [f32]) {
        let penalty = self.params.repeat_penalty;
        if penalty == 1.0 {
            return;
        }
        for (index, &token) in self.recent.iter().enumerate() {
            // Once a token, however often it came.
            if self.recent[..index].contains(&token) {
                continue;
            }
            if let Some(logit) = logits.get_mut(token as usize) {
                *logit = penalised(*logit, penalty);
            }
        }
    }

    /// Leaves the candidates sorted, most likely first.
    fn keep_top_k(&mut self) {
        let by_weight = |a: &Candidate, b: &Candidate| {
            b.weight.total_cmp(&a.weight).then(a.token.cmp(&b.token))
        };
        let k = self.params.top_k as usize;
        if k > 0 && k < self.candidates.len() {
            self.candidates.select_nth_unstable_by(k - 1, by_weight);
            self.candidates.truncate(k);
        }
        self.candidates.sort_unstable_by(by_weight);
    }

    fn keep_top_p(&mut self) {
        if self.params.top_p >= 1.0 {
            return;
        }
        let top = self.candidates[0].weight;
        let weight = |c: &Candidate| f64::from(c.weight - top).exp();
        let total: f64 = self.candidates.iter().map(weight).sum();
        let wanted = f64::from(self.params.top_p) * total;
        let mut sum = 0.0;
        let enough = self.candidates.iter().position(|c| {
            sum += weight(c);
            sum >= wanted
        });
        self.candidates
            .truncate(enough.map_or(usize::MAX, |last| last + 1));
    }

    fn keep_min_p(&mut self) {
        if self.params.min_p <= 0.0 {
            return;
        }
        let least = self.candidates[0].weight + self.params.min_p.ln();
        let below = self.candidates.iter().position(|c| c.weight < least);
        self.candidates.truncate(below.unwrap_or(usize::MAX).max(1));
    }

    fn draw(&mut self) -> u32 {
        let top = self.candidates[0].weight;
        let temperature = f64::from(self.params.temperature);
        let weight = |c: &Candidate| (f64::from(c.weight - top) / temperature).exp();
        let total: f64 = self.candidates.iter().map(weight).sum();
        let mut left = self.random.unit() * total;
        for candidate in &self.candidates {
            left -= weight(candidate);
            if left < 0.0 {
                return candidate.token;
            }
        }
        self.candidates[0].token
    }
}

/// A recent token's logit.
pub fn penalised(logit: f32, penalty: f32) -> f32 {
    if logit > 0.0 {
        logit / penalty
    } else {
        logit * penalty
    }
}

/// The first of the largest.
fn most_likely(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (token, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = token;
        }
    }
    best as u32
}

/// PCG-XSH-RR with 64 bits of state.
#[derive(Clone, Debug)]
struct Pcg32 {
    state: u64,
}

impl Pcg32 {
    const STREAM: u64 = 1_442_695_040_888_963_407;

    fn new(seed: u64) -> Self {
        let mut random = Self { state: 0 };
        random.next();
        random.state = random.state.wrapping_add(seed);
        random.next();
        random
    }

    fn next(&mut self) -> u32 {
        let old = self.state;
        self.state = old
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(Self::STREAM);
        let shifted = (((old >> 18) ^ old) >> 27) as u32;
        shifted.rotate_right((old >> 59) as u32)
    }

    /// In `0 .. 1`, 53 bits.
    fn unit(&mut self) -> f64 {
        let bits = u64::from(self.next()) << 32 | u64::from(self.next());
        (bits >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Params {
        Params {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Params::default()
        }
    }

    /// Shares of 20,000 draws over the logits.
    fn shares(params: Params, logits: &[f32]) -> Vec<f64> {
        let mut sampler = Sampler::new(params, logits.len() as u32);
        let mut counts = vec![0u32; logits.len()];
        for _ in 0..20_000 {
            counts[sampler.choose(&mut logits.to_vec()).unwrap() as usize] += 1;
        }
        counts.iter().map(|n| f64::from(*n) / 20_000.0).collect()
    }

    fn close(got: &[f64], want: &[f64]) {
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 0.015, "{got} not {want}");
        }
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(
            Params {
                temperature: 0.0,
                ..Params::default()
            },
            4,
        );
        assert_eq!(sampler.choose(&mut [1.0, 3.0, 3.0, -2.0]), Ok(1));
        assert_eq!(sampler.choose(&mut [f32::NEG_INFINITY; 4]), Ok(0));
    }

    #[test]
    fn nan_is_an_error() {
        let mut sampler = Sampler::new(all(), 3);
        assert_eq!(
            sampler.choose(&mut [0.0, f32::NAN, 0.0]),
            Err(NotFinite { token: 1 })
        );
    }

    #[test]
    fn draws_follow_the_distribution() {
        let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
        close(&shares(all(), &logits), &[0.4, 0.3, 0.2, 0.1]);
        // Temperature 2 takes square roots.
        let roots = [0.4f64, 0.3, 0.2, 0.1].map(f64::sqrt);
        let total: f64 = roots.iter().sum();
        close(
            &shares(
                Params {
                    temperature: 2.0,
                    ..all()
                },
                &logits,
            ),
            &roots.map(|r| r / total),
        );
    }

    #[test]
    fn each_filter_keeps_what_it_says() {
        let logits = [0.1f32, 0.4, 0.2, 0.3].map(f32::ln);
        close(
            &shares(Params { top_k: 2, ..all() }, &logits),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        // 0.4 + 0.3 reach 0.65.
        close(
            &shares(
                Params {
                    top_p: 0.65,
                    ..all()
                },
                &logits,
            ),
            &[0.0, 4.0 / 7.0, 0.0, 3.0 / 7.0],
        );
        // At least half of 0.4.
        close(
            &shares(
                Params {
                    min_p: 0.49,
                    ..all()
                },
                &logits,
            ),
            &[0.0, 4.0 / 9.0, 2.0 / 9.0, 3.0 / 9.0],
        );
    }

    #[test]
    fn the_penalty_counts_a_token_once_and_forgets() {
        let params = Params {
            temperature: 0.0,
            repeat_penalty: 2.0,
            repeat_last_n: 2,
            ..Params::default()
        };
        let mut sampler = Sampler::new(params, 3);
        sampler.accept(0);
        sampler.accept(0);
        let mut logits = [4.0, 3.0, -1.0];
        assert_eq!(sampler.choose(&mut logits), Ok(1));
        assert_eq!(logits, [2.0, 3.0, -1.0]);
        sampler.accept(2);
        sampler.accept(2);
        let mut logits = [4.0, 3.0, -1.0];
        assert_eq!(sampler.choose(&mut logits), Ok(0));
        assert_eq!(logits, [4.0, 3.0, -2.0]);
    }

    /// A seed means the same tokens on every machine and in every version.
    #[test]
    fn the_generator_is_pcg32() {
        let mut random = Pcg32::new(42);
        let first: Vec<u32> = (0..3).map(|_| random.next()).collect();
        assert_eq!(first, PCG_SEED_42);
    }

    /// By the definition, in Python with unbounded integers.
    const PCG_SEED_42: [u32; 3] = [3270867926, 1795671209, 1924641435];
}
