//! Attention against its definition in double precision, and against itself cut differently.

use super::*;
use crate::cpu::vector::testing::{Random, close};
use crate::run::kv::{KvLayout, KvType, ring_capacity};

/// A shape of model and what its layer asks for.
#[derive(Clone, Copy, Debug)]
struct Case {
    ty: KvType,
    head_dim: usize,
    kv_heads: usize,
    group: usize,
    window: Option<usize>,
    softcap: Option<f32>,
}

const PLAIN: Case = Case {
    ty: KvType::F16,
    head_dim: 64,
    kv_heads: 2,
    group: 3,
    window: None,
    softcap: None,
};

/// Every variant, none of them large.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (head_dim, kv_heads, group) in
        [(64, 2, 3), (80, 1, 4), (128, 2, 1), (256, 1, 4), (20, 2, 7)]
    {
        for (window, softcap) in [
            (None, None),
            (None, Some(3.0)),
            (Some(50), None),
            (Some(64), Some(3.0)),
        ] {
            for ty in [KvType::F16, KvType::Q8_0] {
                if ty == KvType::F16 || head_dim % 32 == 0 {
                    cases.push(Case {
                        ty,
                        head_dim,
                        kv_heads,
                        group,
                        window,
                        softcap,
                    });
                }
            }
        }
    }
    cases.push(Case {
        window: Some(1),
        ..PLAIN
    });
    // More heads than a unit has rows.
    cases.push(Case {
        head_dim: 16,
        kv_heads: 1,
        group: 100,
        ..PLAIN
    });
    cases
}

/// A made-up history: queries, keys and values of `tokens` tokens.
struct History {
    case: Case,
    tokens: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl History {
    fn new(case: Case, tokens: usize) -> Self {
        let mut random = Random(tokens as u64 + 10);
        let width = case.kv_heads * case.head_dim;
        Self {
            case,
            tokens,
            q: random.floats(tokens * width * case.group, 2.0),
            k: random.floats(tokens * width, 2.0),
            v: random.floats(tokens * width, 2.0),
        }
    }

    fn cache(&self, capacity: usize) -> KvCache {
        let Case { ty, .. } = self.case;
        let layout =
            KvLayout::new(ty, self.case.kv_heads, self.case.head_dim, [64, capacity]).unwrap();
        // NaN everywhere: what wasn't stored must not matter.
        let region = vec![0xff; layout.bytes()];
        KvCache::new(layout, region).unwrap()
    }

    fn store(&self, cache: &mut KvCache, positions: std::ops::Range<usize>) {
        let width = self.case.kv_heads * self.case.head_dim;
        for position in positions {
            let at = position * width..(position + 1) * width;
            cache.store(
                Vector::detect(),
                1,
                position,
                &self.k[at.clone()],
                &self.v[at],
            );
        }
    }

    fn job<'a>(&'a self, kv: &'a KvCache, first: usize, tokens: usize) -> AttendJob<'a> {
        let heads = self.case.kv_heads * self.case.group;
        let width = heads * self.case.head_dim;
        AttendJob {
            kv,
            layer: 1,
            q: &self.q[first * width..(first + tokens) * width],
            heads,
            tokens,
            first_position: first,
            window: self.case.window,
            scale: 1.0 / (self.case.head_dim as f32).sqrt(),
            softcap: self.case.softcap,
            threads: 1,
        }
    }

    /// Attend in batches of the given sizes, each stored just before, on `threads` threads' cut.
    fn run(&self, vector: Vector, capacity: usize, batches: &[usize], threads: usize) -> Vec<f32> {
        let mut cache = self.cache(capacity);
        let mut scratch = vec![f32::NAN; scratch_floats(self.case.head_dim, self.case.group)];
        let mut out = Vec::new();
        let mut first = 0;
        for tokens in batches.iter().cycle() {
            let tokens = (*tokens).min(self.tokens - first);
            if tokens == 0 {
                break;
            }
            self.store(&mut cache, first..first + tokens);
            let mut job = self.job(&cache, first, tokens);
            job.threads = threads;
            let mut part = vec![f32::NAN; job.q.len()];
            job.attend_all(vector, &mut part, &mut scratch);
            out.extend(part);
            first += tokens;
        }
        out
    }

    /// The definition, over what the cache holds after rounding.
    fn reference(&self, first: usize) -> Vec<f64> {
        let Case {
            head_dim,
            kv_heads,
            group,
            window,
            softcap,
            ..
        } = self.case;
        let mut cache = self.cache(self.tokens);
        self.store(&mut cache, 0..self.tokens);
        let mut pairs = vec![(vec![0.0; head_dim], vec![0.0; head_dim]); self.tokens * kv_heads];
        for (i, (k, v)) in pairs.iter_mut().enumerate() {
            cache.load(1, i % kv_heads, i / kv_heads, k, v);
        }
        let mut out = Vec::new();
        for token in first..self.tokens {
            for head in 0..kv_heads * group {
                let at = (token * kv_heads * group + head) * head_dim;
                let q = &self.q[at..at + head_dim];
                let from = window.map_or(0, |window| (token + 1).saturating_sub(window));
                let mut total = 0.0;
                let mut sums = vec![0.0; head_dim];
                for position in from..=token {
                    let (k, v) = &pairs[position * kv_heads + head / group];
                    let dot: f64 = q
                        .iter()
                        .zip(k)
                        .map(|(q, k)| f64::from(*q) * f64::from(*k))
                        .sum();
                    let mut score = dot / (head_dim as f64).sqrt();
                    if let Some(cap) = softcap.map(f64::from) {
                        score = cap * (score / cap).tanh();
                    }
                    let weight = score.exp();
                    total += weight;
                    for (sum, v) in sums.iter_mut().zip(v) {
                        *sum += weight * f64::from(*v);
                    }
                }
                out.extend(sums.iter().map(|sum| sum / total));
            }
        }
        out
    }
}

#[track_caller]
fn same_bits(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert_eq!(
            a.to_bits(),
            b.to_bits(),
            "{what}, float {i}: {a:e} and {b:e}"
        );
    }
}

#[test]
fn every_variant_matches_double_precision() {
    for case in cases() {
        let history = History::new(case, 140);
        let want = history.reference(0);
        for vector in Vector::available() {
            for batch in [140, 1] {
                let got = history.run(vector, 140, &[batch], 1);
                for (got, want) in got.iter().zip(&want) {
                    close(*got, *want, 0.0, 4e-6);
                }
            }
        }
    }
}

#[test]
fn batches_tiles_and_threads_do_not_change_a_bit() {
    for case in cases() {
        let history = History::new(case, 150);
        for vector in Vector::available() {
            let want = history.run(vector, 150, &[150], 1);
            for (batches, threads) in [
                (&[1][..], 8),
                (&[13, 1, 5, 64, 2], 2),
                (&[70], 1),
                (&[150], 16),
            ] {
                let got = history.run(vector, 150, batches, threads);
                same_bits(
                    &got,
                    &want,
                    &format!("{case:?} {vector:?} {batches:?} {threads}"),
                );
            }
        }
    }
}

#[test]
fn a_ring_of_any_size_gives_the_same_bits() {
    for case in cases() {
        let Some(window) = case.window else { continue };
        let history = History::new(case, 300);
        for vector in Vector::available() {
            let want = history.run(vector, 300, &[300], 1);
            for (batches, batch_max) in [(&[3, 1][..], 3), (&[31, 1, 7], 31), (&[100, 3], 150)] {
                let capacity = ring_capacity(window, batch_max, 300);
                let got = history.run(vector, capacity, batches, 2);
                same_bits(&got, &want, &format!("{case:?} {vector:?} ring {capacity}"));
            }
        }
    }
}

#[test]
fn units_may_run_on_any_thread() {
    let history = History::new(PLAIN, 200);
    let vector = Vector::detect();
    let want = history.run(vector, 200, &[200], 1);
    let mut cache = history.cache(200);
    history.store(&mut cache, 0..200);
    let mut job = history.job(&cache, 0, 200);
    job.threads = 4;
    let mut out = vec![f32::NAN; job.q.len()];
    struct Shared(*mut f32);
    // SAFETY: each thread computes units of its own, and units write parts of their own.
    unsafe impl Sync for Shared {}
    let shared = Shared(out.as_mut_ptr());
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (job, shared) = (&job, &shared);
            scope.spawn(move || {
                let mut scratch = vec![f32::NAN; scratch_floats(64, 3)];
                for unit in (thread..job.units()).step_by(4) {
                    // SAFETY: as above, and nobody stores meanwhile.
                    unsafe { job.attend(vector, unit, shared.0, &mut scratch) };
                }
            });
        }
    });
    same_bits(&out, &want, "four threads");
}

#[test]
fn units_cover_every_token_and_head_once() {
    for (tokens, kv_heads, group, threads) in [
        (1, 1, 4, 2),
        (1, 3, 3, 2),
        (1, 1, 7, 3),
        (512, 3, 3, 2),
        (40, 1, 100, 6),
        (0, 2, 2, 2),
    ] {
        let case = Case {
            kv_heads,
            group,
            head_dim: 16,
            ..PLAIN
        };
        let history = History::new(case, tokens);
        let cache = history.cache(64);
        let mut job = history.job(&cache, 0, tokens);
        job.threads = threads;
        let mut seen = vec![0; tokens * kv_heads * group];
        let cut = job.cut();
        for index in 0..job.units() {
            let unit = cut.unit(index);
            for token in unit.tokens.0..unit.tokens.0 + unit.tokens.1 {
                for head in unit.heads.0..unit.heads.0 + unit.heads.1 {
                    assert_eq!(head / group, unit.kv_head);
                    seen[token * kv_heads * group + head] += 1;
                }
            }
        }
        assert!(seen.iter().all(|seen| *seen == 1), "{tokens} {group}");
        if tokens == 1 && kv_heads == 1 {
            assert!(job.units() >= threads);
        }
    }
}

#[test]
fn a_long_context_needs_no_more_scratch() {
    let case = Case {
        head_dim: 16,
        kv_heads: 1,
        group: 2,
        ..PLAIN
    };
    let tokens = 131_072; // enough for any length to show in the scratch
    let history = History::new(case, tokens);
    let mut cache = history.cache(tokens);
    history.store(&mut cache, 0..tokens);
    let want = history.reference(tokens - 1);
    let job = history.job(&cache, tokens - 1, 1);
    let mut scratch = vec![f32::NAN; scratch_floats(16, 2)];
    for vector in Vector::available() {
        let mut out = [f32::NAN; 32];
        job.attend_all(vector, &mut out, &mut scratch);
        for (got, want) in out.iter().zip(&want) {
            close(*got, *want, 0.0, 1e-6);
        }
    }
}

#[test]
fn huge_scores_do_not_overflow() {
    for scale in [1e4, 1e30] {
        let mut history = History::new(PLAIN, 100);
        history.q.iter_mut().for_each(|q| *q *= scale);
        for vector in Vector::available() {
            let out = history.run(vector, 100, &[100], 1);
            assert!(out.iter().all(|x| x.abs() <= 2.0), "{vector:?}");
        }
    }
}

#[test]
#[should_panic(expected = "still holds every position")]
fn a_ring_that_is_too_small_is_refused() {
    let case = Case {
        window: Some(100),
        ..PLAIN
    };
    History::new(case, 150).run(Vector::detect(), 128, &[60], 1);
}
