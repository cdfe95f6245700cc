//! Against sums in f64, on every instruction set and every format.

use leanstream_core::quant::{self, QuantType};

use super::*;
use crate::cpu::vector::testing::Random;

/// Rows of weights without infinities or huge values.
fn weights(random: &mut Random, ty: QuantType, rows: usize, cols: usize) -> Vec<u8> {
    let blocks = rows * cols / ty.block_len();
    let mut bytes = Vec::with_capacity(blocks * ty.block_bytes());
    let mut values = vec![0.0f32; ty.block_len()];
    for _ in 0..blocks {
        loop {
            let block: Vec<u8> = (0..ty.block_bytes())
                .map(|_| (random.unit() * 128.0 + 128.0) as u8)
                .collect();
            quant::decode(ty, &block, &mut values);
            if values.iter().all(|v| v.abs() < 1e3) {
                bytes.extend(block);
                break;
            }
        }
    }
    bytes
}

/// Panics unless every element of `got` (m, n) is near `old + alpha a b`, of (m, k) and (k, n).
#[track_caller]
fn check(
    what: &str,
    got: &dyn Fn(usize, usize) -> f32,
    old: &dyn Fn(usize, usize) -> f32,
    alpha: f32,
    a: &dyn Fn(usize, usize) -> f32,
    b: &dyn Fn(usize, usize) -> f32,
    (m, k, n): (usize, usize, usize),
) {
    for i in 0..m {
        for j in 0..n {
            let (mut sum, mut size) = (0.0, 0.0);
            for t in 0..k {
                let term = f64::from(a(i, t)) * f64::from(b(t, j));
                sum += term;
                size += term.abs();
            }
            let want = f64::from(old(i, j)) + f64::from(alpha) * sum;
            let bound = 3e-6 * (f64::from(alpha.abs()) * size + f64::from(old(i, j)).abs());
            let error = (f64::from(got(i, j)) - want).abs();
            assert!(
                error <= bound,
                "{what} {m}x{k}x{n} at ({i}, {j}): {} is off {want} by {error:e}, more than {bound:e}",
                got(i, j)
            );
        }
    }
}

#[test]
fn forward_and_backward_of_every_format() {
    let mut random = Random(1);
    for ty in QuantType::ALL {
        // (out, in): no multiples of a tile, and more columns than a block.
        let shapes = match ty.block_len() {
            1 => [(37, 45), (5, 601)],
            32 => [(37, 96), (50, 608)],
            _ => [(37, 256), (19, 768)],
        };
        for (outs, ins) in shapes {
            let bytes = weights(&mut random, ty, outs, ins);
            let w = Rows {
                ty,
                cols: ins,
                bytes: &bytes,
            };
            let mut floats = vec![0.0; outs * ins];
            quant::decode(ty, &bytes, &mut floats);
            for (v, tokens) in Vector::available().flat_map(|v| [1, 3, 17].map(|t| (v, t))) {
                let team = Team::new(2).unwrap();
                let products = Products::new(v, 2);
                let x = random.floats(tokens * ins, 1.0);
                let dy = random.floats(tokens * outs, 1.0);
                for add in [false, true] {
                    let old = random.floats(tokens * outs, 9.0);
                    let mut y = old.clone();
                    products.forward(&team, w, &x, &mut y, add);
                    check(
                        &format!("{v:?} {ty} forward"),
                        &|i, j| y[i * outs + j],
                        &|i, j| if add { old[i * outs + j] } else { 0.0 },
                        1.0,
                        &|i, k| x[i * ins + k],
                        &|k, j| floats[j * ins + k],
                        (tokens, ins, outs),
                    );
                    let old = random.floats(tokens * ins, 9.0);
                    let mut dx = old.clone();
                    products.backward(&team, w, &dy, &mut dx, add);
                    check(
                        &format!("{v:?} {ty} backward"),
                        &|i, j| dx[i * ins + j],
                        &|i, j| if add { old[i * ins + j] } else { 0.0 },
                        1.0,
                        &|i, k| dy[i * outs + k],
                        &|k, j| floats[k * ins + j],
                        (tokens, outs, ins),
                    );
                }
            }
        }
    }
}

/// A matrix of (rows, cols) in one of four layouts: plain, spaced, their transposes; and strides that
/// are neither.
fn layout(kind: usize, rows: usize, cols: usize) -> (usize, usize, usize) {
    let (row, col) = match kind {
        0 => (cols, 1),
        1 => (cols + 3, 1),
        2 => (1, rows),
        3 => (1, rows + 5),
        _ => (2 * cols + 1, 2),
    };
    (rows * row + cols * col, row, col)
}

#[test]
fn products_of_all_layouts() {
    let mut random = Random(2);
    let shapes = [
        (1, 1, 1),
        (3, 17, 5),
        (14, 64, 32),
        (16, 30, 40),
        (17, 3, 33),
        (40, 530, 70),
        (129, 20, 16),
        (5, 0, 4),
        (33, 64, 290),
    ];
    for v in Vector::available() {
        let team = Team::new(2).unwrap();
        let products = Products::new(v, 2);
        for (index, (m, k, n)) in shapes.into_iter().enumerate() {
            for kinds in 0..125 {
                // All layouts of small matrices, some of the others.
                if m * k * n > 10_000 && kinds % 8 != index % 8 {
                    continue;
                }
                let (a_len, ar, ac) = layout(kinds % 5, m, k);
                let (b_len, br, bc) = layout(kinds / 5 % 5, k, n);
                let (c_len, cr, cc) = layout(kinds / 25, m, n);
                let a = random.floats(a_len, 1.0);
                let b = random.floats(b_len, 1.0);
                let old = random.floats(c_len, 1.0);
                let (alpha, add) = ([1.0, -0.7, 0.3][kinds % 3], kinds % 2 == 1);
                let left = Mat {
                    data: &a,
                    rows: m,
                    cols: k,
                    row_stride: ar,
                    col_stride: ac,
                };
                let right = Mat {
                    data: &b,
                    rows: k,
                    cols: n,
                    row_stride: br,
                    col_stride: bc,
                };
                fn out(
                    data: &mut [f32],
                    (rows, cols): (usize, usize),
                    strides: (usize, usize),
                ) -> MatMut<'_> {
                    MatMut {
                        data,
                        rows,
                        cols,
                        row_stride: strides.0,
                        col_stride: strides.1,
                    }
                }
                let mut c = old.clone();
                products.product(
                    &team,
                    left,
                    right,
                    alpha,
                    out(&mut c, (m, n), (cr, cc)),
                    add,
                );
                check(
                    &format!("{v:?} layouts {kinds}"),
                    &|i, j| c[i * cr + j * cc],
                    &|i, j| if add { old[i * cr + j * cc] } else { 0.0 },
                    alpha,
                    &|i, k| a[i * ar + k * ac],
                    &|k, j| b[k * br + j * bc],
                    (m, k, n),
                );
                let mut alone = old.clone();
                let to = out(&mut alone, (m, n), (cr, cc));
                product_in(v, &mut products.scratch(1), left, right, alpha, to, add);
                assert_eq!(c, alone, "{v:?} alone");
                // What lies between the elements stays.
                let mut touched = vec![false; c_len];
                for i in 0..m {
                    for j in 0..n {
                        touched[i * cr + j * cc] = true;
                    }
                }
                for (at, touched) in touched.into_iter().enumerate() {
                    assert!(touched || c[at] == old[at], "{v:?} layouts {kinds}: {at}");
                }
            }
        }
    }
}

/// `f` on teams of one to four threads gives the same bits.
#[track_caller]
fn same_on_all_teams(v: Vector, f: impl Fn(&Products, &Team) -> Vec<f32>) -> Vec<f32> {
    let one = f(&Products::new(v, 1), &Team::new(1).unwrap());
    for threads in [2, 3, 4] {
        let many = f(&Products::new(v, threads), &Team::new(threads).unwrap());
        let same = one
            .iter()
            .zip(&many)
            .all(|(a, b)| a.to_bits() == b.to_bits());
        assert!(same, "{v:?}: {threads} threads differ from one");
    }
    one
}

#[test]
fn the_number_of_threads_and_tokens_changes_no_bit() {
    let mut random = Random(3);
    let (tokens, outs, ins) = (150, 330, 544);
    let bytes = weights(&mut random, QuantType::Q4_1, outs, ins);
    let w = Rows {
        ty: QuantType::Q4_1,
        cols: ins,
        bytes: &bytes,
    };
    let x = random.floats(tokens * ins, 1.0);
    let dy = random.floats(tokens * outs, 1.0);
    for v in Vector::available() {
        let y = same_on_all_teams(v, |products, team| {
            let mut y = vec![0.5; tokens * outs];
            products.forward(team, w, &x, &mut y, true);
            y
        });
        let dx = same_on_all_teams(v, |products, team| {
            let mut dx = vec![0.5; tokens * ins];
            products.backward(team, w, &dy, &mut dx, false);
            dx
        });
        // A weight gradient, (out, in).
        same_on_all_teams(v, |products, team| {
            let mut dw = vec![0.5; outs * ins];
            let (dy, x) = (Mat::new(&dy, tokens, outs).t(), Mat::new(&x, tokens, ins));
            products.product(team, dy, x, 0.1, MatMut::new(&mut dw, outs, ins), true);
            dw
        });
        let (products, team) = (Products::new(v, 1), Team::new(1).unwrap());
        for token in [0, 77, 149] {
            let mut alone = vec![0.5; outs];
            let x = &x[token * ins..][..ins];
            products.forward(&team, w, x, &mut alone, true);
            assert_eq!(alone, y[token * outs..][..outs], "{v:?} {token}");
            let mut alone = vec![0.5; ins];
            let dy = &dy[token * outs..][..outs];
            products.backward(&team, w, dy, &mut alone, false);
            assert_eq!(alone, dx[token * ins..][..ins], "{v:?} {token}");
        }
    }
}

#[test]
fn what_was_there_is_not_read_unless_added_to() {
    for v in Vector::available() {
        let (products, team) = (Products::new(v, 1), Team::new(1).unwrap());
        let (a, b) = (vec![1.0; 20 * 40], vec![1.0; 40 * 70]);
        let mut c = vec![f32::NAN; 20 * 70];
        let c_mat = MatMut::new(&mut c, 20, 70);
        products.product(
            &team,
            Mat::new(&a, 20, 40),
            Mat::new(&b, 40, 70),
            1.0,
            c_mat,
            false,
        );
        assert_eq!(c, vec![40.0; 20 * 70], "{v:?}");
    }
}

#[test]
#[should_panic(expected = "same depth")]
fn a_depth_that_differs_is_refused() {
    let (products, team) = (Products::new(Vector::detect(), 1), Team::new(1).unwrap());
    let (a, mut c) = ([0.0; 6], [0.0; 4]);
    let c = MatMut::new(&mut c, 2, 2);
    products.product(&team, Mat::new(&a, 2, 3), Mat::new(&a, 2, 2), 1.0, c, false);
}

#[test]
#[should_panic(expected = "as many tokens")]
fn a_short_output_is_refused() {
    let (products, team) = (Products::new(Vector::detect(), 1), Team::new(1).unwrap());
    let w = Rows {
        ty: QuantType::F32,
        cols: 2,
        bytes: &[0; 16],
    };
    products.forward(&team, w, &[0.0; 4], &mut [0.0; 2], false);
}
