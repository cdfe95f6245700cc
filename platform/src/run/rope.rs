//! Rotary position embedding: pairs of a head's elements turned by an angle that grows with position.
//!
//! The angles of one position are the same for all heads (and for all layers with one base), so their
//! cosines and sines are computed once per position, in double precision, into a caller's table row
//! ([`Rope::fill`]) and then applied to many heads ([`Rope::apply`]).

use std::fmt;

use leanstream_core::plan::RopeStyle;

use crate::cpu::vector::{Vector, lanes::Lanes, multiversion};

/// What a model's metadata says about its rotary embedding.
#[derive(Clone, Copy, Debug)]
pub struct RopeParams<'a> {
    /// Which elements form a pair.
    pub style: RopeStyle,
    /// Elements of a head.
    pub head_dim: usize,
    /// How many of them turn, from the first: even, at most `head_dim`. The others pass unchanged.
    pub n_rot: usize,
    /// The base of the frequencies: pair `i` turns by `base^(-2 i / n_rot)` a position.
    pub base: f32,
    /// Linear scaling (`rope.scaling.factor` where the type is `linear`): angles are divided by it.
    /// 1 for none.
    pub linear_factor: f32,
    /// The tensor `rope_freqs.weight` (n_rot / 2), which divides each pair's frequency (Llama 3).
    pub freq_factors: Option<&'a [f32]>,
}

/// Why parameters can't be used.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeError {
    /// `n_rot` is odd, zero or above `head_dim`.
    Dimensions {
        /// How many elements should turn.
        n_rot: usize,
        /// How many there are.
        head_dim: usize,
    },
    /// A base, factor or frequency factor that isn't a positive finite number.
    NotPositive {
        /// What it is called.
        name: &'static str,
        /// Its value.
        value: f32,
    },
    /// The tensor of frequency factors doesn't have one a pair.
    Factors {
        /// How many it has.
        found: usize,
        /// How many pairs there are.
        pairs: usize,
    },
}

impl fmt::Display for RopeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dimensions { n_rot, head_dim } => write!(
                f,
                "rope.dimension_count is {n_rot}; it must be even, above 0 and at most the head size {head_dim}"
            ),
            Self::NotPositive { name, value } => {
                write!(f, "{name} is {value}; it must be a positive number")
            }
            Self::Factors { found, pairs } => write!(
                f,
                "rope_freqs.weight has {found} elements; one for each of {pairs} rotated pairs is needed"
            ),
        }
    }
}

impl std::error::Error for RopeError {}

/// The rotary embedding of one kind of layer.
#[derive(Clone, Debug)]
pub struct Rope {
    style: RopeStyle,
    head_dim: usize,
    /// Radians a position, (n_rot / 2).
    frequencies: Box<[f64]>,
}

impl Rope {
    /// Checks the parameters. Allocates `4 * n_rot` bytes.
    ///
    /// # Errors
    /// [`RopeError`] names the parameter that can't be used.
    pub fn new(params: &RopeParams<'_>) -> Result<Self, RopeError> {
        let RopeParams {
            n_rot, head_dim, ..
        } = *params;
        if n_rot == 0 || !n_rot.is_multiple_of(2) || n_rot > head_dim {
            return Err(RopeError::Dimensions { n_rot, head_dim });
        }
        positive("rope.freq_base", params.base)?;
        positive("rope.scaling.factor", params.linear_factor)?;
        let pairs = n_rot / 2;
        if let Some(factors) = params.freq_factors {
            if factors.len() != pairs {
                let found = factors.len();
                return Err(RopeError::Factors { found, pairs });
            }
            for factor in factors {
                positive("rope_freqs.weight", *factor)?;
            }
        }
        let frequency = |pair: usize| {
            let exponent = -2.0 * pair as f64 / n_rot as f64;
            let factor = params.freq_factors.map_or(1.0, |f| f64::from(f[pair]));
            f64::from(params.base).powf(exponent) / f64::from(params.linear_factor) / factor
        };
        Ok(Self {
            style: params.style,
            head_dim,
            frequencies: (0..pairs).map(frequency).collect(),
        })
    }

    /// Floats of one position's table row: `n_rot`.
    #[must_use]
    pub fn row_len(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// Write one position's table row: the cosines (n_rot / 2), then the sines (n_rot / 2).
    ///
    /// # Panics
    /// `row` isn't [`Rope::row_len`] long.
    pub fn fill(&self, position: usize, row: &mut [f32]) {
        assert_eq!(row.len(), self.row_len(), "a row of the table");
        let (cosines, sines) = row.split_at_mut(self.frequencies.len());
        for ((cosine, sine), frequency) in cosines.iter_mut().zip(sines).zip(&self.frequencies) {
            let (s, c) = (position as f64 * frequency).sin_cos();
            (*cosine, *sine) = (c as f32, s as f32);
        }
    }

    /// Turn every head of one token in place.
    ///
    /// Shapes: `row` (n_rot) from [`Rope::fill`] for the token's position, `x` (heads, head_dim).
    /// The same bits on every instruction set.
    ///
    /// # Panics
    /// `row` isn't [`Rope::row_len`] long, or `x` isn't whole heads.
    pub fn apply(&self, vector: Vector, row: &[f32], x: &mut [f32]) {
        assert_eq!(row.len(), self.row_len(), "a row of the table");
        assert!(x.len().is_multiple_of(self.head_dim), "whole heads");
        match self.style {
            RopeStyle::Adjacent => vector.turn_neighbours(x, self.head_dim, row),
            RopeStyle::Halves => vector.turn_halves(x, self.head_dim, row),
        }
    }
}

fn positive(name: &'static str, value: f32) -> Result<(), RopeError> {
    if value.is_finite() && value > 0.0 {
        Ok(())
    } else {
        Err(RopeError::NotPositive { name, value })
    }
}

multiversion! {
    fn turn_neighbours(x: &mut [f32], head_dim: usize, row: &[f32]) = neighbours_body;
    fn turn_halves(x: &mut [f32], head_dim: usize, row: &[f32]) = halves_body;
}

#[inline(always)]
fn neighbours_body<L: Lanes>(_: L, x: &mut [f32], head_dim: usize, row: &[f32]) {
    let (cosines, sines) = row.split_at(row.len() / 2);
    for head in x.chunks_exact_mut(head_dim) {
        let (pairs, _) = head[..row.len()].as_chunks_mut::<2>();
        for (pair, (c, s)) in pairs.iter_mut().zip(cosines.iter().zip(sines)) {
            let [a, b] = *pair;
            *pair = [a * c - b * s, a * s + b * c];
        }
    }
}

#[inline(always)]
fn halves_body<L: Lanes>(_: L, x: &mut [f32], head_dim: usize, row: &[f32]) {
    let (cosines, sines) = row.split_at(row.len() / 2);
    for head in x.chunks_exact_mut(head_dim) {
        let (low, high) = head[..row.len()].split_at_mut(row.len() / 2);
        for ((a, b), (c, s)) in low.iter_mut().zip(high).zip(cosines.iter().zip(sines)) {
            (*a, *b) = (*a * c - *b * s, *a * s + *b * c);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::vector::testing::{Random, close};

    const PLAIN: RopeParams<'_> = RopeParams {
        style: RopeStyle::Adjacent,
        head_dim: 64,
        n_rot: 64,
        base: 10_000.0,
        linear_factor: 1.0,
        freq_factors: None,
    };

    /// The definition, in double precision, written apart from the code above.
    fn reference(params: &RopeParams<'_>, position: usize, head: &[f32]) -> Vec<f64> {
        let mut out: Vec<f64> = head.iter().map(|x| f64::from(*x)).collect();
        for i in 0..params.n_rot / 2 {
            let mut angle = position as f64;
            angle /= f64::from(params.base).powf(2.0 * i as f64 / params.n_rot as f64);
            angle /= f64::from(params.linear_factor);
            if let Some(factors) = params.freq_factors {
                angle /= f64::from(factors[i]);
            }
            let (j, k) = match params.style {
                RopeStyle::Adjacent => (2 * i, 2 * i + 1),
                RopeStyle::Halves => (i, i + params.n_rot / 2),
            };
            let (a, b) = (f64::from(head[j]), f64::from(head[k]));
            out[j] = a * angle.cos() - b * angle.sin();
            out[k] = a * angle.sin() + b * angle.cos();
        }
        out
    }

    fn check(params: &RopeParams<'_>) {
        let mut random = Random(8);
        let rope = Rope::new(params).unwrap();
        let mut row = vec![f32::NAN; rope.row_len()];
        for vector in Vector::available() {
            for position in [0, 1, 77, 4095, 131_071] {
                let x = random.floats(3 * params.head_dim, 2.0);
                let mut got = x.clone();
                rope.fill(position, &mut row);
                rope.apply(vector, &row, &mut got);
                let heads = x.chunks_exact(params.head_dim);
                for (head, got) in heads.zip(got.chunks_exact(params.head_dim)) {
                    for (want, got) in reference(params, position, head).iter().zip(got) {
                        close(*got, *want, 0.0, 1e-6);
                    }
                }
            }
        }
    }

    #[test]
    fn every_variant_matches_the_definition() {
        let factors: Vec<f32> = (0..32).map(|i| 1.0 + i as f32 * 0.25).collect();
        for style in [RopeStyle::Adjacent, RopeStyle::Halves] {
            let plain = RopeParams { style, ..PLAIN };
            check(&plain);
            check(&RopeParams {
                n_rot: 20,
                head_dim: 80,
                ..plain
            });
            check(&RopeParams {
                base: 1e6,
                linear_factor: 8.0,
                n_rot: 256,
                head_dim: 256,
                ..plain
            });
            check(&RopeParams {
                base: 500_000.0,
                freq_factors: Some(&factors),
                ..plain
            });
        }
    }

    #[test]
    fn what_does_not_turn_is_untouched() {
        let rope = Rope::new(&RopeParams { n_rot: 16, ..PLAIN }).unwrap();
        let mut row = [0.0; 16];
        rope.fill(5, &mut row);
        let mut x = [1.5; 64];
        rope.apply(Vector::detect(), &row, &mut x);
        assert_eq!(x[16..], [1.5; 48]);
        assert_ne!(x[0], 1.5);
    }

    #[test]
    fn bad_parameters_are_named() {
        let error = |params: RopeParams<'_>| Rope::new(&params).unwrap_err().to_string();
        for n_rot in [0, 3, 66] {
            assert!(error(RopeParams { n_rot, ..PLAIN }).contains("dimension_count"));
        }
        for base in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            assert!(error(RopeParams { base, ..PLAIN }).contains("freq_base"));
        }
        let linear_factor = 0.0;
        assert!(
            error(RopeParams {
                linear_factor,
                ..PLAIN
            })
            .contains("scaling.factor")
        );
        let freq_factors = Some(&[1.0; 31][..]);
        assert!(
            error(RopeParams {
                freq_factors,
                ..PLAIN
            })
            .contains("31 elements")
        );
        let freq_factors = Some(&[0.0; 32][..]);
        assert!(
            error(RopeParams {
                freq_factors,
                ..PLAIN
            })
            .contains("rope_freqs.weight is 0")
        );
    }
}
