//! Attention against its definition in double precision, and its gradients against differences of it.

use super::super::testing::{agree, differences, every_machine, same_bits, weighted, wide};
use super::*;
use crate::cpu::vector::Vector;
use crate::cpu::vector::testing::Random;
use crate::tune::team::Team;

struct Case {
    shape: AttentionShape,
    lens: &'static [usize],
}

const fn shape(
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
) -> AttentionShape {
    AttentionShape {
        heads,
        kv_heads,
        head_dim,
        window,
        scale: 0.4,
    }
}

/// Groups of one, two and three heads, odd heads, windows, sequences around the size of a tile.
const CASES: [Case; 7] = [
    Case {
        shape: shape(1, 1, 1, None),
        lens: &[1],
    },
    Case {
        shape: shape(2, 1, 5, None),
        lens: &[7, 1, 3],
    },
    Case {
        shape: shape(2, 2, 8, Some(3)),
        lens: &[9, 2],
    },
    Case {
        shape: shape(3, 1, 4, None),
        lens: &[33, 32],
    },
    Case {
        shape: shape(2, 1, 3, Some(20)),
        lens: &[70, 5],
    },
    Case {
        shape: shape(1, 1, 3, Some(1)),
        lens: &[40],
    },
    Case {
        shape: shape(2, 1, 19, Some(200)),
        lens: &[0, 34, 0],
    },
];

impl Case {
    fn segments(&self) -> Vec<(usize, usize)> {
        let mut start = 0;
        let place = |len: &usize| {
            start += len;
            (start - len, *len)
        };
        self.lens.iter().map(place).collect()
    }

    fn tokens(&self) -> usize {
        self.lens.iter().sum()
    }

    /// Queries, keys and values.
    fn inputs(&self, random: &mut Random) -> [Vec<f32>; 3] {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = self.shape;
        [heads, kv_heads, kv_heads].map(|n| random.floats(self.tokens() * n * head_dim, 2.0))
    }

    /// The definition, query by query.
    fn reference(&self, q: &[f64], k: &[f64], values: &[f64]) -> Vec<f64> {
        let s = &self.shape;
        let dim = s.head_dim;
        let mut o = vec![0.0; q.len()];
        for (start, len) in self.segments() {
            for t in 0..len {
                for head in 0..s.heads {
                    let at = ((start + t) * s.heads + head) * dim;
                    let key =
                        |p: usize| ((start + p) * s.kv_heads + head * s.kv_heads / s.heads) * dim;
                    let seen = (0..=t).filter(|p| s.window.is_none_or(|window| t - p < window));
                    let weight = |p: usize| {
                        let dot: f64 = (0..dim).map(|d| q[at + d] * k[key(p) + d]).sum();
                        (dot * f64::from(s.scale)).exp()
                    };
                    let weights: Vec<(usize, f64)> = seen.map(|p| (p, weight(p))).collect();
                    let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
                    for (p, weight) in weights {
                        for d in 0..dim {
                            o[at + d] += weight / sum * values[key(p) + d];
                        }
                    }
                }
            }
        }
        o
    }

    fn forward(&self, team: &Team, v: Vector, [q, k, values]: &[Vec<f32>; 3]) -> Vec<f32> {
        let (longest, segments) = (longest(&self.segments()), self.segments());
        let floats = self.shape.forward_floats(longest, team.threads());
        let (mut o, mut scratch) = (vec![f32::NAN; q.len()], vec![f32::NAN; floats]);
        attention(
            team,
            v,
            &self.shape,
            &segments,
            q,
            k,
            values,
            &mut o,
            &mut scratch,
        );
        o
    }

    fn backward(
        &self,
        team: &Team,
        v: Vector,
        [q, k, values]: &[Vec<f32>; 3],
        d_o: &[f32],
    ) -> [Vec<f32>; 3] {
        let (longest, segments) = (longest(&self.segments()), self.segments());
        let floats = self
            .shape
            .backward_floats(self.tokens(), longest, team.threads());
        let mut scratch = vec![f32::NAN; floats];
        let [mut dq, mut dk, mut dv] = [q, k, values].map(Vec::clone);
        attention_backward(
            team,
            v,
            &self.shape,
            &segments,
            &mut dq,
            &mut dk,
            &mut dv,
            d_o,
            &mut scratch,
        );
        [dq, dk, dv]
    }
}

#[test]
fn forward_is_the_definition_and_backward_its_gradient() {
    for (index, case) in CASES.iter().enumerate() {
        let mut random = Random(21 + index as u64);
        let inputs = case.inputs(&mut random);
        let d_o = random.floats(inputs[0].len(), 1.0);
        let [q, k, values] = [&inputs[0], &inputs[1], &inputs[2]].map(|x| wide(x));
        let o = case.reference(&q, &k, &values);
        let loss =
            |q: &[f64], k: &[f64], values: &[f64]| weighted(&case.reference(q, k, values), &d_o);
        let wanted = [
            differences(&q, |q| loss(q, &k, &values)),
            differences(&k, |k| loss(&q, k, &values)),
            differences(&values, |values| loss(&q, &k, values)),
        ];
        every_machine(|team, v| {
            agree(&case.forward(team, v, &inputs), &o, 2e-6, "o");
            let got = case.backward(team, v, &inputs, &d_o);
            for ((got, want), name) in got.iter().zip(&wanted).zip(["dq", "dk", "dv"]) {
                agree(got, want, 2e-5, &format!("{name} of case {index} on {v:?}"));
            }
        });
    }
}

#[test]
fn a_sequence_does_not_depend_on_its_neighbours() {
    let both = Case {
        shape: shape(4, 2, 16, Some(50)),
        lens: &[45, 70],
    };
    let alone = Case {
        lens: &[70],
        ..both
    };
    every_machine(|team, v| {
        let mut random = Random(31);
        let inputs = both.inputs(&mut random);
        let d_o = random.floats(inputs[0].len(), 1.0);
        let tail = |x: &[f32]| x[x.len() / 115 * 45..].to_vec();
        let own = [&inputs[0], &inputs[1], &inputs[2]].map(|x| tail(x));
        let o = both.forward(team, v, &inputs);
        assert_eq!(tail(&o), alone.forward(team, v, &own));
        let gradients = both.backward(team, v, &inputs, &d_o);
        let of_alone = alone.backward(team, v, &own, &tail(&d_o));
        for (gradient, own) in gradients.iter().zip(of_alone) {
            assert_eq!(tail(gradient), own);
        }
    });
}

#[test]
fn large_scores_do_not_overflow() {
    let case = &CASES[3];
    every_machine(|team, v| {
        let mut random = Random(32);
        let mut inputs = case.inputs(&mut random);
        inputs[..2].iter_mut().flatten().for_each(|x| *x *= 1e3);
        let d_o = random.floats(inputs[0].len(), 1.0);
        let o = case.forward(team, v, &inputs);
        let gradients = case.backward(team, v, &inputs, &d_o);
        assert!(gradients.iter().flatten().chain(&o).all(|x| x.is_finite()));
    });
}

#[test]
fn threads_do_not_matter() {
    let case = Case {
        shape: shape(6, 2, 24, None),
        lens: &[100, 31, 64],
    };
    same_bits(|team, v| {
        let mut random = Random(33);
        let inputs = case.inputs(&mut random);
        let d_o = random.floats(inputs[0].len(), 1.0);
        let [dq, dk, dv] = case.backward(team, v, &inputs, &d_o);
        [case.forward(team, v, &inputs), dq, dk, dv].concat()
    });
}
