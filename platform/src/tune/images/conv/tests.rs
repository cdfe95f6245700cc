//! Against a convolution by its definition in f64, and its differences.

use super::*;
use crate::cpu::vector::testing::Random;
use crate::tune::images::reference;
use crate::tune::ops::testing::{agree, every_machine, same_bits, wide};

const SHAPES: [(usize, usize, usize, usize, usize, usize); 9] = [
    (5, 4, 1, 3, 3, 1),
    (4, 5, 3, 16, 3, 1),
    (7, 9, 2, 20, 3, 2),
    (8, 8, 16, 33, 3, 2),
    (6, 6, 5, 7, 1, 2),
    (7, 5, 4, 32, 1, 2),
    (3, 3, 6, 8, 1, 1),
    (1, 1, 2, 2, 3, 1),
    (2, 31, 3, 40, 3, 1),
];

fn shape(
    (height, width, ins, outs, kernel, stride): (usize, usize, usize, usize, usize, usize),
) -> Conv {
    Conv {
        height,
        width,
        ins,
        outs,
        kernel,
        stride,
    }
}

#[test]
fn forward_and_both_gradients() {
    every_machine(|team, v| {
        let mut random = Random(5);
        for conv in SHAPES.map(shape) {
            let images = 3;
            let mut work = Work::new(&[conv], team.threads());
            let x = random.floats(images * conv.in_len(), 1.0);
            let w = random.floats(conv.weights(), 1.0);
            let dy = random.floats(images * conv.out_len(), 1.0);
            let (wx, ww, wdy) = (wide(&x), wide(&w), wide(&dy));
            let mut y = vec![f32::NAN; dy.len()];
            forward(team, v, &mut work, &conv, &w, &x, &mut y, false);
            agree(&y, &reference::conv(&conv, &ww, &wx), 1e-5, "y");
            // It is linear in both, so that the gradients are inner products with unit vectors.
            let slope = |y: Vec<f64>| -> f64 { y.iter().zip(&wdy).map(|(y, dy)| y * dy).sum() };
            let along = |len: usize, f: &dyn Fn(&[f64]) -> Vec<f64>| -> Vec<f64> {
                let mut unit = vec![0.0; len];
                (0..len)
                    .map(|i| {
                        unit[i] = 1.0;
                        let slope = slope(f(&unit));
                        unit[i] = 0.0;
                        slope
                    })
                    .collect()
            };
            if x.len() * dy.len() > 1 << 21 {
                continue;
            }
            let want = along(x.len(), &|x| reference::conv(&conv, &ww, x));
            let mut dx = vec![f32::NAN; x.len()];
            input_gradient(team, v, &mut work, &conv, &w, &dy, &mut dx, false);
            agree(&dx, &want, 1e-5, "dx");
            let mut twice = dx.clone();
            input_gradient(team, v, &mut work, &conv, &w, &dy, &mut twice, true);
            let want: Vec<f64> = want.iter().map(|want| 2.0 * want).collect();
            agree(&twice, &want, 1e-5, "dx added");
            let want = along(w.len(), &|w| reference::conv(&conv, w, &wx));
            let mut dw = vec![1.0; w.len()];
            weight_gradient(team, v, &mut work, &conv, &x, &dy, &mut dw);
            let want: Vec<f64> = want.iter().map(|want| 1.0 + want).collect();
            agree(&dw, &want, 1e-5, "dw");
        }
    });
}

#[test]
fn gradients_of_larger_images_are_those_of_their_sum() {
    // Many images: several in a part of the weights' gradient.
    let conv = shape((6, 6, 3, 18, 3, 1));
    let images = 3 * PARTS + 5;
    every_machine(|team, v| {
        let mut random = Random(6);
        let mut work = Work::new(&[conv], team.threads());
        let x = random.floats(images * conv.in_len(), 1.0);
        let dy = random.floats(images * conv.out_len(), 1.0);
        let mut dw = vec![0.0; conv.weights()];
        weight_gradient(team, v, &mut work, &conv, &x, &dy, &mut dw);
        let mut want = vec![0.0; dw.len()];
        for (x, dy) in x.chunks(conv.in_len()).zip(dy.chunks(conv.out_len())) {
            let mut one = vec![0.0; dw.len()];
            weight_gradient(team, v, &mut work, &conv, x, dy, &mut one);
            want.iter_mut()
                .zip(one)
                .for_each(|(w, d)| *w += f64::from(d));
        }
        agree(&dw, &want, 1e-5, "dw");
    });
}

#[test]
fn threads_do_not_matter() {
    same_bits(|team, v| {
        let mut random = Random(7);
        let mut all = Vec::new();
        for conv in [
            (9, 9, 16, 16, 3, 1),
            (8, 8, 16, 32, 3, 2),
            (8, 8, 16, 32, 1, 2),
        ]
        .map(shape)
        {
            let images = 37;
            let mut work = Work::new(&[conv], team.threads());
            let x = random.floats(images * conv.in_len(), 1.0);
            let w = random.floats(conv.weights(), 1.0);
            let dy = random.floats(images * conv.out_len(), 1.0);
            let (mut y, mut dx) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
            let mut dw = vec![0.0; w.len()];
            forward(team, v, &mut work, &conv, &w, &x, &mut y, false);
            input_gradient(team, v, &mut work, &conv, &w, &dy, &mut dx, false);
            weight_gradient(team, v, &mut work, &conv, &x, &dy, &mut dw);
            all.extend([y, dx, dw].concat());
        }
        all
    });
}
