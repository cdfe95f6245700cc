//! Whole nets: gradients against differences in double precision, and what few bits do to them.

use leanstream_core::act::Width;

use super::allotment::{capacity, page_bytes};
use super::classifier::Classifier;
use super::net::{Builder, Net, Param, Step};
use super::reference;
use crate::cpu::vector::Vector;
use crate::cpu::vector::testing::Random;
use crate::tune::act::Room;
use crate::tune::ops::testing::{agree, wide};

const IMAGES: usize = 6;

fn nets() -> [Net; 4] {
    let shape = [6, 6, 2];
    [
        Builder::new(shape)
            .unit(8, 3, 1)
            .block(8, 1)
            .block(12, 2)
            .block(12, 1)
            .average()
            .linear(5, false)
            .build(),
        Builder::new(shape)
            .unit(8, 3, 1)
            .max_pool()
            .unit(12, 3, 1)
            .max_pool()
            .linear(5, false)
            .build(),
        // A block that takes in a max-pool's output, and a linear that takes in a block's.
        Builder::new(shape)
            .unit(8, 1, 1)
            .max_pool()
            .block(12, 2)
            .linear(5, false)
            .build(),
        Builder::new(shape)
            .linear(20, true)
            .linear(9, true)
            .linear(5, false)
            .build(),
    ]
}

/// The mean loss by the definition.
fn loss(net: &Net, values: &[f64], images: &[f64], labels: &[u32]) -> f64 {
    let n = labels.len();
    let param = |i: usize| &values[net.params[i].range()];
    let unit = |i: usize, x: &[f64], relu: bool| {
        let unit = &net.units[i];
        let y = reference::conv(&unit.conv, param(unit.param), x);
        let (gamma, beta) = (param(unit.param + 1), param(unit.param + 2));
        let y = reference::batch_norm(&y, gamma, beta, 1e-5);
        y.into_iter()
            .map(|y| if relu { y.max(0.0) } else { y })
            .collect::<Vec<f64>>()
    };
    let mut x = images.to_vec();
    for stage in &net.stages {
        x = match stage.step {
            Step::Unit(i) => unit(i, &x, true),
            Step::Block {
                first,
                second,
                shortcut,
                ..
            } => {
                let y = unit(second, &unit(first, &x, true), false);
                let skipped = shortcut.map_or_else(|| x.clone(), |i| unit(i, &x, false));
                let sums = y.iter().zip(&skipped);
                sums.map(|(y, x)| (y + x).max(0.0)).collect()
            }
            Step::MaxPool { pool, .. } => reference::max_pool(&pool, &x),
            Step::Average { channels } => reference::average(&x, n, channels),
            Step::Linear {
                ins,
                outs,
                param: at,
                mask,
                ..
            } => {
                let (w, bias) = (param(at), param(at + 1));
                let mut y = Vec::new();
                for x in x.chunks_exact(ins) {
                    y.extend((0..outs).map(|out| {
                        let terms = x.iter().zip(&w[out * ins..]);
                        let y = terms.map(|(x, w)| x * w).sum::<f64>() + bias[out];
                        if mask.is_some() { y.max(0.0) } else { y }
                    }));
                }
                y
            }
        };
    }
    let rows = x.chunks_exact(net.classes).zip(labels);
    let losses =
        rows.map(|(z, label)| z.iter().map(|z| z.exp()).sum::<f64>().ln() - z[*label as usize]);
    losses.sum::<f64>() / n as f64
}

fn problem(net: &Net) -> (Vec<f32>, Vec<f32>, Vec<u32>) {
    let mut random = Random(77);
    let mut values = vec![0.0; net.count()];
    for param in &net.params {
        let size = match param.fan_in {
            0 => 0.5,
            inputs => (6.0 / inputs as f32).sqrt(),
        };
        for value in &mut values[param.range()] {
            *value = param.constant + size * random.unit();
        }
    }
    let images = random.floats(IMAGES * net.image_len(), 1.0);
    let labels = (0..IMAGES as u32).map(|i| i * 7 % 5).collect();
    (values, images, labels)
}

/// The gradient of one step with everything at `width`; importances after it.
fn gradient(net: &Net, threads: usize, vector: Vector, width: Width, seed: u64) -> [Vec<f32>; 2] {
    gradient_at(net, threads, vector, &vec![width; net.kept.len()], seed)
}

/// The same with a width for each tensor.
fn gradient_at(
    net: &Net,
    threads: usize,
    vector: Vector,
    widths: &[Width],
    seed: u64,
) -> [Vec<f32>; 2] {
    let (values, images, labels) = problem(net);
    // Of all tensors as floats.
    let pages = net
        .kept
        .iter()
        .map(|kept| (kept.len.next_multiple_of(256) * IMAGES * 4).div_ceil(page_bytes()) + 4);
    let pages = pages.sum::<usize>() as u32;
    let mut room = Room::new(capacity(net, IMAGES, pages)).unwrap();
    let mut classifier =
        Classifier::new(net.clone(), IMAGES, threads, vector, &mut room, pages, seed).unwrap();
    classifier.values = values;
    classifier.widths.copy_from_slice(widths);
    classifier.learn = true;
    classifier.step(&images, &labels).unwrap();
    assert_eq!(
        classifier.saved.pool().in_use(),
        0,
        "everything is given back"
    );
    let importances = classifier.importance.by_tensor().to_vec();
    [classifier.grads, importances]
}

#[test]
fn gradients_of_whole_nets() {
    for net in nets() {
        let (values, images, labels) = problem(&net);
        let (values, images) = (wide(&values), wide(&images));
        for vector in Vector::available() {
            let [grads, _] = gradient(&net, 2, vector, Width::F32, 0);
            for param in &net.params {
                let mut random = Random(param.offset as u64 + 1);
                let some: Vec<usize> = match param.len {
                    few @ ..=20 => (param.offset..param.offset + few).collect(),
                    many => (0..20)
                        .map(|_| {
                            let share = (random.unit() + 1.0) / 2.0;
                            param.offset + (share * many as f32) as usize % many
                        })
                        .collect(),
                };
                let mut at = values.clone();
                let want: Vec<f64> = some
                    .iter()
                    .map(|&i| {
                        let mut value = |offset: f64| {
                            at[i] = values[i] + offset;
                            loss(&net, &at, &images, &labels)
                        };
                        let slope = (value(1e-6) - value(-1e-6)) / 2e-6;
                        at[i] = values[i];
                        slope
                    })
                    .collect();
                let got: Vec<f32> = some.iter().map(|&i| grads[i]).collect();
                agree(&got, &want, 2e-4, &param.name);
            }
        }
    }
}

#[test]
fn neither_threads_nor_the_order_of_pages_matter() {
    for net in nets() {
        for vector in Vector::available() {
            for width in [Width::F32, Width::Two] {
                let bits = |threads| -> Vec<u32> {
                    let all = gradient(&net, threads, vector, width, 3);
                    all.concat().iter().map(|x| x.to_bits()).collect()
                };
                let one = bits(1);
                assert!(one == bits(2) && one == bits(3), "{vector:?} {width}");
            }
        }
    }
}

fn distance(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum()
}

/// Squared distance to `exact` relative to its squared length: of each parameter, on average by its numbers.
fn relative(net: &Net, grads: &[f64], exact: &[f64]) -> f64 {
    let of = |param: &Param| {
        let range = param.range();
        let squared = exact[range.clone()].iter().map(|g| g * g).sum::<f64>();
        let off = distance(&grads[range.clone()], &exact[range]);
        param.len as f64 / exact.len() as f64 * off / squared
    };
    net.params.iter().map(of).sum()
}

/// The mean of gradients, the mean of what [`relative`] says of them, and the predicted one.
fn noise(
    net: &Net,
    widths: &[Width],
    steps: f64,
    seeds: u64,
    exact: &[f64],
) -> (Vec<f64>, f64, f64) {
    let (mut mean, mut each, mut predicted) = (vec![0.0; exact.len()], 0.0, 0.0);
    for seed in 0..seeds {
        let [grads, importances] = gradient_at(net, 1, Vector::detect(), widths, seed);
        let grads = wide(&grads);
        let share = 1.0 / seeds as f64;
        mean.iter_mut()
            .zip(&grads)
            .for_each(|(mean, g)| *mean += g * share);
        each += relative(net, &grads, exact) * share;
        let all = importances.iter().map(|i| f64::from(*i)).sum::<f64>();
        predicted += all / (steps * steps) * share;
    }
    (mean, each, predicted)
}

#[test]
fn few_bits_leave_the_gradient_where_it_is_on_average() {
    const SEEDS: u64 = 256;
    for net in nets() {
        let [exact, _] = gradient(&net, 1, Vector::detect(), Width::F32, 0);
        let exact = wide(&exact);
        for (width, steps) in [(Width::Four, 15.0), (Width::Eight, 255.0)] {
            let widths = vec![width; net.kept.len()];
            let (mean, each, _) = noise(&net, &widths, steps, SEEDS, &exact);
            // The mean of so many has the variance of one by their number, and hardly any bias.
            let rest = relative(&net, &mean, &exact) / each * SEEDS as f64;
            assert!(rest < 3.0, "{width}: {rest}");
        }
    }
}

#[test]
fn importances_foretell_what_each_tensor_does() {
    const SEEDS: u64 = 64;
    for net in nets() {
        let [exact, _] = gradient(&net, 1, Vector::detect(), Width::F32, 0);
        let exact = wide(&exact);
        for kept in 0..net.kept.len() {
            let mut widths = vec![Width::F32; net.kept.len()];
            widths[kept] = Width::Four;
            let (_, measured, predicted) = noise(&net, &widths, 15.0, SEEDS, &exact);
            let ratio = predicted / measured;
            let name = &net.kept[kept].name;
            println!("{name}: {predicted} foretold, {measured} measured");
            assert!((0.25..4.0).contains(&ratio), "{name}: {ratio}");
        }
    }
}
