//! Every instruction set this machine has against f64 sums over the reference decoder, and the
//! promise that how a product is cut doesn't change a bit of it.

#[path = "common/inputs.rs"]
mod inputs;

use inputs::{Acts, FILLS, Fill, Guarded, Random, weights};
use leanstream::cpu::{Act, Isa, Kernels, OutTile, Rows, Scratch};
use leanstream_core::quant::{QuantType, decode};

fn matmul(kernels: &Kernels, rows: &Rows<'_>, act: &Act<'_>, exact: bool) -> Vec<f32> {
    let mut out = vec![f32::NAN; act.tokens * rows.rows()];
    let mut scratch = Scratch::for_cols(act.cols);
    let tile = OutTile::new(&mut out, rows.rows());
    kernels.matmul(rows, act, exact, tile, &mut scratch);
    out
}

fn matvec(kernels: &Kernels, rows: &Rows<'_>, act: &Act<'_>, exact: bool) -> Vec<f32> {
    let mut out = vec![f32::NAN; rows.rows()];
    kernels.matvec(rows, act, exact, &mut out);
    out
}

/// The value in f64 and the size of what was added up: an error is measured against the latter.
fn expected(ty: QuantType, row: &[u8], act: &Act<'_>, token: usize, exact: bool) -> (f64, f64) {
    let mut w = vec![0.0; act.cols];
    decode(ty, row, &mut w);
    let f32_activations = exact || ty.block_len() == 1;
    let (mut sum, mut squares) = (0.0, [0.0, 0.0]);
    for (k, &w) in w.iter().enumerate() {
        let at = token * act.cols + k;
        let x = if f32_activations {
            f64::from(act.x[at])
        } else {
            f64::from(act.codes[at]) * f64::from(act.scales[at / 32])
        };
        sum += f64::from(w) * x;
        squares[0] += f64::from(w) * f64::from(w);
        squares[1] += x * x;
    }
    (sum, (squares[0] * squares[1]).sqrt())
}

/// Block counts that reach every branch: part of a chunk, a whole one, several, several blocks of
/// columns and part of one.
fn columns(ty: QuantType) -> Vec<usize> {
    if ty.block_len() == 256 {
        vec![256, 512, 1280, 2304]
    } else {
        vec![32, 64, 96, 224, 256, 288, 576, 640, 960, 1024, 1536, 2144]
    }
}

/// Largest error found, as a share of the norms' product.
fn worst(kernels: &Kernels, ty: QuantType, fill: Fill, exact: bool) -> f64 {
    let mut random = Random(0x5eed + ty as u64);
    let mut worst: f64 = 0.0;
    for (i, cols) in columns(ty).into_iter().enumerate() {
        let (rows, tokens, skew) = ([1, 5, 16, 17, 35][i % 5], [1, 7, 13][i % 3], i % 3);
        let bytes = weights(ty, rows, cols, fill, skew, &mut random);
        let weights = Rows {
            ty,
            cols,
            bytes: &bytes[skew..],
        };
        let acts = Acts::random(kernels, cols, tokens, &mut random);
        let product = matmul(kernels, &weights, &acts.act(), exact);
        for token in 0..tokens {
            let vector = matvec(kernels, &weights, &acts.part(token, token + 1), exact);
            for (r, row) in weights.bytes.chunks(weights.row_bytes()).enumerate() {
                let (value, norm) = expected(ty, row, &acts.act(), token, exact);
                for got in [vector[r], product[token * rows + r]] {
                    let error = (f64::from(got) - value).abs();
                    if norm == 0.0 {
                        // A zero point may leave a rounding of the smallest scales.
                        assert!(got.abs() < 1e-40, "{ty} {fill:?}: {got}");
                    } else {
                        assert!(error.is_finite(), "{ty} {fill:?}: {got} for {value}");
                        worst = worst.max(error / norm);
                    }
                }
            }
        }
    }
    worst
}

#[test]
fn every_instruction_set_agrees_with_f64() {
    let mut failures = Vec::new();
    for kernels in Kernels::available() {
        for ty in QuantType::ALL {
            for fill in FILLS {
                for exact in [false, true] {
                    let worst = worst(&kernels, ty, fill, exact);
                    // Codes next to a zero point of 128 leave little of what is added up, and scales
                    // near the end of f32 leave few bits.
                    let hard = matches!(fill, Fill::Highest | Fill::Subnormal) && !exact;
                    if worst > if hard { 1e-5 } else { 4e-7 } {
                        let isa = kernels.isa();
                        failures.push(format!("{isa} {ty} {fill:?} exact {exact}: {worst:.1e}"));
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A copy of some rows at an address of another alignment.
fn moved(rows: &Rows<'_>, from: usize, to: usize, skew: usize) -> Vec<u8> {
    let n = rows.row_bytes();
    let mut bytes = vec![0; skew];
    bytes.extend_from_slice(&rows.bytes[from * n..to * n]);
    bytes
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn cuts_and_alignment_change_no_bit() {
    let (rows, tokens) = (53, 15);
    for kernels in Kernels::available() {
        for ty in QuantType::ALL {
            let cols = if ty.block_len() == 256 { 1280 } else { 1120 };
            let mut random = Random(0xc07 + ty as u64);
            let bytes = weights(ty, rows, cols, Fill::Random, 0, &mut random);
            let all = Rows {
                ty,
                cols,
                bytes: &bytes,
            };
            let acts = Acts::random(&kernels, cols, tokens, &mut random);
            for exact in [false, true] {
                let what = format!("{} {ty} exact {exact}", kernels.isa());
                let product = bits(&matmul(&kernels, &all, &acts.act(), exact));
                let vectors: Vec<Vec<u32>> = (0..tokens)
                    .map(|t| bits(&matvec(&kernels, &all, &acts.part(t, t + 1), exact)))
                    .collect();
                for round in 0..6 {
                    let from = random.below(rows);
                    let to = from + 1 + random.below(rows - from);
                    let first = random.below(tokens);
                    let last = first + 1 + random.below(tokens - first);
                    let skew = 1 + round;
                    let copy = moved(&all, from, to, skew);
                    let part = Rows {
                        ty,
                        cols,
                        bytes: &copy[skew..],
                    };
                    let got = bits(&matmul(&kernels, &part, &acts.part(first, last), exact));
                    for t in first..last {
                        let n = to - from;
                        let got = &got[(t - first) * n..][..n];
                        let expected = &product[t * rows + from..t * rows + to];
                        assert_eq!(
                            got, expected,
                            "{what}: rows {from}..{to} of {first}..{last}"
                        );
                    }
                    let got = bits(&matvec(
                        &kernels,
                        &part,
                        &acts.part(first, first + 1),
                        exact,
                    ));
                    assert_eq!(got, vectors[first][from..to], "{what}: rows {from}..{to}");
                }
            }
        }
    }
}

#[test]
fn a_tile_is_written_and_nothing_else() {
    let (rows, tokens, stride, cols) = (19, 9, 40, 256);
    for kernels in Kernels::available() {
        for (ty, exact) in [
            (QuantType::Q4_K, false),
            (QuantType::Q4_K, true),
            (QuantType::F16, true),
        ] {
            let mut random = Random(7);
            let bytes = weights(ty, rows, cols, Fill::Random, 0, &mut random);
            let weights = Rows {
                ty,
                cols,
                bytes: &bytes,
            };
            let acts = Acts::random(&kernels, cols, tokens, &mut random);
            let dense = matmul(&kernels, &weights, &acts.act(), exact);
            let mut out = vec![f32::MAX; (tokens - 1) * stride + rows];
            let mut scratch = Scratch::for_cols(cols);
            let tile = OutTile::new(&mut out, stride);
            kernels.matmul(&weights, &acts.act(), exact, tile, &mut scratch);
            for (i, &value) in out.iter().enumerate() {
                let (t, r) = (i / stride, i % stride);
                let expected = if r < rows {
                    dense[t * rows + r]
                } else {
                    f32::MAX
                };
                assert_eq!(value, expected, "{} {ty} token {t} row {r}", kernels.isa());
            }
        }
    }
}

#[test]
fn quantizing_is_the_same_everywhere() {
    let mut random = Random(99);
    let mut x: Vec<f32> = (0..64 * 32).map(|_| random.normal()).collect();
    for (i, group) in x.chunks_mut(32).enumerate() {
        match i {
            0 => group.fill(0.0),
            1 => group.fill(-3e-31),
            2 => group[31] = 1e-30,
            3 => group[5] = f32::INFINITY,
            4 => group[0] = f32::NEG_INFINITY,
            5 => group[17] = f32::NAN,
            6 => group.fill(f32::MAX),
            7 => group.fill(f32::MIN_POSITIVE / 8.0),
            // The scale becomes 1, so that halves are ties.
            8 => group
                .iter_mut()
                .enumerate()
                .for_each(|(k, v)| *v = 111.5 + k as f32 / 2.0),
            9 => group
                .iter_mut()
                .enumerate()
                .for_each(|(k, v)| *v = -127.0 + k as f32 / 2.0),
            _ => group
                .iter_mut()
                .for_each(|v| *v *= (i as f32 - 30.0).exp2()),
        }
    }
    let scalar = Kernels::get(Isa::Scalar).expect("the reference");
    let expected = Acts::new(&scalar, 32, x.clone());
    assert!(expected.scales[..2].iter().all(|&s| s == 0.0));
    assert!(expected.scales[3..6].iter().all(|s| !s.is_finite()));
    assert_eq!(expected.codes[3 * 32..6 * 32], [0; 96]);
    assert_eq!(expected.codes[6 * 32..7 * 32], [127; 32]);
    assert_eq!(expected.codes[8 * 32..8 * 32 + 4], [112, 112, 112, 113]);
    assert_eq!(expected.codes[9 * 32..9 * 32 + 4], [-127, -126, -126, -126]);
    for kernels in Kernels::available() {
        let got = Acts::new(&kernels, 32, x.clone());
        let isa = kernels.isa();
        for group in 0..x.len() / 32 {
            let (codes, sums) = (32 * group..32 * group + 32, 2 * group..2 * group + 2);
            assert_eq!(
                got.codes[codes.clone()],
                expected.codes[codes],
                "{isa} group {group}"
            );
            assert_eq!(
                got.sums[sums.clone()],
                expected.sums[sums],
                "{isa} group {group}"
            );
            let (got, expected) = (got.scales[group], expected.scales[group]);
            let same = got.to_bits() == expected.to_bits() || got.is_nan() && expected.is_nan();
            assert!(same, "{isa} group {group}: {got} for {expected}");
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let cols = 512;
    for kernels in Kernels::available() {
        for ty in QuantType::ALL {
            let mut random = Random(3);
            let bytes = weights(ty, 18, cols, Fill::Random, 0, &mut random);
            let weights = Rows {
                ty,
                cols,
                bytes: &bytes,
            };
            for bad in [f32::NAN, f32::INFINITY] {
                for at in [0, 70, 511] {
                    let mut x: Vec<f32> = (0..cols).map(|_| random.normal()).collect();
                    x[at] = bad;
                    let acts = Acts::new(&kernels, cols, x);
                    for exact in [false, true] {
                        let mut out = matvec(&kernels, &weights, &acts.act(), exact);
                        out.extend(matmul(&kernels, &weights, &acts.act(), exact));
                        for value in out {
                            assert!(!value.is_finite(), "{} {ty} {bad} at {at}", kernels.isa());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn nothing_is_read_past_the_end() {
    for kernels in Kernels::available() {
        for ty in QuantType::ALL {
            for cols in columns(ty).into_iter().take(7) {
                let mut random = Random(11);
                let (rows, tokens) = (3, 7);
                let bytes = Guarded::new(&weights(ty, rows, cols, Fill::Random, 0, &mut random));
                let weights = Rows {
                    ty,
                    cols,
                    bytes: bytes.bytes(),
                };
                let acts = Acts::random(&kernels, cols, tokens, &mut random);
                let (x, codes) = (Guarded::of(&acts.x), Guarded::of(&acts.codes));
                let (scales, sums) = (Guarded::of(&acts.scales), Guarded::of(&acts.sums));
                let all = Act {
                    cols,
                    tokens,
                    x: x.values(),
                    codes: codes.values(),
                    scales: scales.values(),
                    sums: sums.values(),
                };
                let last = Act {
                    cols,
                    tokens: 1,
                    x: &all.x[(tokens - 1) * cols..],
                    codes: &all.codes[(tokens - 1) * cols..],
                    scales: &all.scales[(tokens - 1) * cols / 32..],
                    sums: &all.sums[(tokens - 1) * cols / 16..],
                };
                for exact in [false, true] {
                    let out = matmul(&kernels, &weights, &all, exact);
                    assert_eq!(out, matmul(&kernels, &weights, &acts.act(), exact));
                    matvec(&kernels, &weights, &last, exact);
                }
            }
        }
    }
}
