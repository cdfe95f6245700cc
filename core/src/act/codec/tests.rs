//! What the codec promises: bounds, no bias, the variance of rounding by chance, nested grids.

use super::shrink::{offset, ratio, shrunk};
use super::*;

const COUNTER: Counter = Counter {
    seed: 5,
    step: 11,
    tensor: 2,
};

/// Pairs of bits that shrinking goes between.
const PAIRS: [(Bits, Bits); 6] = [
    (Bits::Eight, Bits::Four),
    (Bits::Eight, Bits::Two),
    (Bits::Eight, Bits::One),
    (Bits::Four, Bits::Two),
    (Bits::Four, Bits::One),
    (Bits::Two, Bits::One),
];

/// A generator (xorshift) of numbers in `-1 .. 1`, roughly bell-shaped.
struct Random(u64);

impl Random {
    fn unit(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    fn group<const N: usize>(&mut self, size: f32, middle: f32) -> [f32; N] {
        core::array::from_fn(|_| {
            let sum: f32 = (0..4).map(|_| self.unit()).sum();
            middle + size * sum / 4.0
        })
    }
}

/// Square root, which core lacks.
fn root(x: f64) -> f64 {
    let mut y = x.max(1e-300);
    // From 1e-300 halving the exponent takes a thousand steps at most; then it converges.
    for _ in 0..1100 {
        y = 0.5 * (y + x / y);
    }
    y
}

#[test]
fn every_element_comes_back_within_a_step() {
    let mut random = Random(1);
    for bits in Bits::ALL {
        for (size, middle) in [
            (1.0, 0.0),
            (1e-20, 0.0),
            (3e4, 1e5),
            (1e-3, -7.0),
            (1e37, 0.0),
        ] {
            let x: [f32; 200] = random.group(size, middle);
            for n in [1usize, 7, 8, 60, 64, 129, 200] {
                let (group, x) = (n.next_multiple_of(8), &x[..n]);
                let mut codes = [0; 200];
                let codes = &mut codes[..bits.bytes(group)];
                let meta = quantize(x, bits, COUNTER.rounding(), 0, codes).unwrap();
                let mut out = [f32::NAN; 200];
                decode(codes, bits, meta, bits, &mut out[..n]);
                let (range, step) = (Range::of(x), meta.span(bits) / bits.steps() as f32);
                let float = range.min.abs().max(range.max.abs()) * f32::EPSILON;
                for (x, out) in x.iter().zip(&out[..n]) {
                    assert!(
                        (x - out).abs() <= step * 1.0001 + float,
                        "{bits:?} {x} {out}"
                    );
                }
                for i in n..group {
                    let pad = pack::get(codes, bits, i);
                    assert!(pad == 0 || meta.is_constant(), "padding is code 0");
                }
            }
        }
    }
}

#[test]
fn metadata_hugs_the_group() {
    let mut random = Random(2);
    for bits in Bits::ALL {
        let x: [f32; 128] = random.group(3.0, 0.5);
        let mut codes = [0; 128];
        let meta = quantize(
            &x,
            bits,
            COUNTER.rounding(),
            0,
            &mut codes[..bits.bytes(128)],
        );
        let (meta, range) = (meta.unwrap(), Range::of(&x));
        assert!(meta.base() <= range.min && meta.base() + meta.span(bits) >= range.max);
        assert!(meta.span(bits) <= 1.02 * (range.max - range.min));
    }
}

/// Over all 2^16 values of `u` the mean of the codes is where the element lies on the grid, to 2^-17 of a step
/// and the rounding of f32; so what is decoded has the element as its mean.
///
/// Once seen elsewhere: quantizing with an f32 scale while a bf16 one is stored. The last lines do
/// that, and the mean is off by a thousandth of the range.
#[test]
fn no_bias_over_every_draw() {
    let mut random = Random(3);
    for bits in Bits::ALL {
        let (mut worst, mut worst_elsewhere) = (0.0f64, 0.0f64);
        for size in [1.0, 1e-8, 1e6] {
            let x: [f32; 24] = random.group(size, 0.3 * size);
            let range = Range::of(&x);
            let meta = Meta::new(range, bits).unwrap();
            let grid = meta.grid(bits);
            let span = f64::from(meta.span(bits));
            let step = span / f64::from(bits.steps());
            for &x in &x {
                let sum: u64 = (0..1 << 16).map(|u| u64::from(grid.code(x, u))).sum();
                let mean = f64::from(meta.base()) + step * sum as f64 / 65536.0;
                worst = worst.max((mean - f64::from(x)).abs() / span);
            }
            let elsewhere = meta::Grid {
                base: range.min,
                inverse: 65536.0 * bits.steps() as f32 / (range.max - range.min),
                ..grid
            };
            for &x in &x {
                let sum: u64 = (0..1 << 16).map(|u| u64::from(elsewhere.code(x, u))).sum();
                let mean = f64::from(meta.base()) + step * sum as f64 / 65536.0;
                worst_elsewhere = worst_elsewhere.max((mean - f64::from(x)).abs() / span);
            }
        }
        // Half of 2^-16 of a step, and three roundings of f32.
        let bound = 0.5 / 65536.0 / f64::from(bits.steps()) + 3.0 / f64::from(1 << 24);
        assert!(worst <= bound, "{bits:?}: {worst:e} above {bound:e}");
        assert!(worst_elsewhere > 1e-3, "{bits:?}: {worst_elsewhere:e}");
    }
}

/// Once seen elsewhere: without a clamp the maximum of a group, which rounding puts a hair above `B`, becomes
/// `B + 1`: in 8 bits that is 0, the minimum.
#[test]
fn the_maximum_never_wraps() {
    let mut would = 0;
    for bits in Bits::ALL {
        for mantissa in 128..256 {
            let scale = mantissa as f32 / 64.0;
            for base in [0.0, 1.0, -3.5, -128.0] {
                let max = base + scale * bits.steps() as f32;
                let meta = Meta::new(Range { min: base, max }, bits).unwrap();
                let grid = meta.grid(bits);
                let at = (max - base) * grid.inverse;
                would += u32::from(at > grid.top);
                for u in [0, 1, 0x7fff, 0xfffe, 0xffff] {
                    // It may also be a hair below `B`: one draw in 2^16 then goes a step down.
                    let code = u32::from(grid.code(max, u));
                    assert!(code == bits.steps() || u == 0 && code + 1 == bits.steps());
                    // Out of the range that was claimed: the nearest end.
                    assert_eq!(u32::from(grid.code(max + 1e6, u)), bits.steps());
                    assert_eq!(grid.code(base - 1e6, u), 0);
                    assert_eq!(grid.code(f32::NAN, u), 0);
                }
            }
        }
    }
    assert!(would > 100, "the case occurs: {would}");
}

#[test]
fn bias_and_variance_over_4096_seeds() {
    const SEEDS: u64 = 4096;
    let mut random = Random(4);
    // 88 = two whole blocks and a part.
    let x: [f32; 88] = random.group(2.0, -0.7);
    for bits in Bits::ALL {
        let (mut sum, mut square) = ([0.0f64; 88], [0.0f64; 88]);
        let mut total_square = 0.0;
        let mut meta = Meta::default();
        for seed in 0..SEEDS {
            // Half of them differ in their step.
            let counter = Counter {
                seed: seed / 2,
                step: seed % 2,
                tensor: 7,
            };
            let mut codes = [0; 88];
            let codes = &mut codes[..bits.bytes(88)];
            meta = quantize(&x, bits, counter.rounding(), 1 << 20, codes).unwrap();
            let mut out = [0.0; 88];
            decode(codes, bits, meta, bits, &mut out);
            let mut total = 0.0;
            for i in 0..88 {
                let error = f64::from(out[i]) - f64::from(x[i]);
                sum[i] += error;
                square[i] += error * error;
                total += error;
            }
            total_square += total * total;
        }
        let step = f64::from(meta.span(bits)) / f64::from(bits.steps());
        let n = SEEDS as f64;
        let (mut expected, mut seen) = (0.0, 0.0);
        for i in 0..88 {
            let at = (f64::from(x[i]) - f64::from(meta.base())) / step;
            let p = at - (at as u64) as f64;
            let variance = step * step * p * (1.0 - p);
            let sigma = root(variance / n) + 1e-6 * step;
            assert!(
                sum[i].abs() / n < 4.5 * sigma,
                "{bits:?} {i}: {}",
                sum[i] / n
            );
            // The square of an error is one of two numbers, with variance `s^4 p (1 - p) (1 - 2p)^2`.
            let spread = step * step * root(p * (1.0 - p) / n) * (1.0 - 2.0 * p).abs();
            let bound = 4.5 * spread + 1e-4 * step * step;
            assert!((square[i] / n - variance).abs() < bound, "{bits:?} {i}");
            expected += variance;
            seen += square[i] / n;
        }
        assert!(
            (seen / expected - 1.0).abs() < 0.01,
            "{bits:?}: {seen} {expected}"
        );
        // Errors of a group's elements are independent: the variance of their sum is the sum of variances.
        let sum = total_square / n / expected;
        assert!((sum - 1.0).abs() < 4.5 * root(2.0 / n), "{bits:?}: {sum}");
    }
}

/// All `u` and all `r`: the coarser code has exactly the distribution of rounding to the coarser grid at
/// once, that is `floor((t + v) / k)` with `v` uniform over the `k 2^16` numbers `r + u` can be.
#[test]
fn grids_nest_exactly() {
    let whole = 1u64 << 16;
    for (from, to) in PAIRS {
        let k = ratio(from, to);
        let range = Range {
            min: 0.0,
            max: from.steps() as f32,
        };
        let (fine, coarse) = (
            Meta::new(range, from).unwrap(),
            Meta::new(range, to).unwrap(),
        );
        assert_eq!(
            (fine.step(from, from), coarse.step(to, to)),
            (1.0, k as f32)
        );
        assert_eq!(
            fine.step(from, to),
            k as f32,
            "what a shrunk code is decoded with"
        );
        let places = (0..=from.steps() << 4)
            .step_by(from.steps().ilog2() as usize)
            .map(|i| i << 12);
        let odd = (0..from.steps())
            .step_by(from.steps().ilog2() as usize)
            .flat_map(|q| [1, 2, 777, 65534, 65535].map(|f| q << 16 | f));
        for place in places.chain(odd) {
            let x = place as f32 / 65536.0;
            let grid = fine.grid(from);
            let low = grid.code(x, 0);
            // Draws that give `low`; all others give the code above.
            let at_low = (0..1 << 16).filter(|&u| grid.code(x, u) == low).count() as u64;
            let mut exact = [0u64; 16];
            let mut drawn = [0u64; 16];
            for (code, count) in [(low, at_low), (low.saturating_add(1), whole - at_low)] {
                if count == 0 {
                    continue;
                }
                assert!(u32::from(code) <= from.steps());
                for r in 0..k {
                    exact[usize::from(shrunk(code, k, r))] += count;
                }
                for random in 0..1 << 16 {
                    drawn[usize::from(shrunk(code, k, offset(random, k)))] += count;
                }
            }
            let unit = u64::from(k) * whole;
            let (floor, above) = (u64::from(place) / unit, u64::from(place) % unit);
            let mut want = [0u64; 16];
            want[floor as usize] += unit - above;
            if above > 0 {
                want[floor as usize + 1] += above;
            }
            assert_eq!(exact, want, "{from:?} {to:?} {place}");
            // As drawn from 16 random bits, and as the coarser quantizer draws: to 2^-16.
            let grid = coarse.grid(to);
            let mut direct = [0u64; 16];
            for u in 0..1 << 16 {
                direct[usize::from(grid.code(x, u))] += 1;
            }
            for code in 0..16 {
                let share = want[code] as f64 / unit as f64;
                let drawn = drawn[code] as f64 / (whole * whole) as f64;
                let direct = direct[code] as f64 / whole as f64;
                assert!(
                    (drawn - share).abs() <= 1.0 / 65536.0,
                    "{from:?} {to:?} {place}"
                );
                assert!(
                    (direct - share).abs() <= 1.0 / 65536.0,
                    "{from:?} {to:?} {place}"
                );
            }
        }
    }
}

#[test]
fn steps_of_shrinking_compose() {
    // (q + r) / 17 and then (. + r') / 5 is (q + r + 17 r') / 85, and so on: all pairs, counted.
    for q in 0..=255u8 {
        let (mut two, mut one) = ([0; 4], [0; 2]);
        for r in 0..17 {
            for s in 0..5 {
                let code = shrunk(shrunk(q, 17, r), 5, s);
                two[usize::from(code)] += 1;
                for t in 0..3 {
                    one[usize::from(shrunk(code, 3, t))] += 1;
                }
            }
        }
        let (mut two_at_once, mut one_at_once) = ([0; 4], [0; 2]);
        (0..85).for_each(|r| two_at_once[usize::from(shrunk(q, 85, r))] += 1);
        (0..255).for_each(|r| one_at_once[usize::from(shrunk(q, 255, r))] += 1);
        assert_eq!((two, one), (two_at_once, one_at_once), "{q}");
    }
}

#[test]
fn shrinking_in_place_keeps_mean_and_variance() {
    let mut random = Random(5);
    let x: [f32; 64] = random.group(1.0, 0.0);
    let n = 4096;
    let (mut sum, mut square, mut expected) = ([0.0f64; 64], [0.0f64; 3], [0.0f64; 3]);
    let mut total_square = [0.0f64; 3];
    let targets = [Bits::Four, Bits::Two, Bits::One];
    for seed in 0..n {
        let counter = Counter { seed, ..COUNTER };
        let mut codes = [0; 64];
        let key = counter.rounding();
        let meta = quantize(&x, Bits::Eight, key, 64, &mut codes).unwrap();
        let mut from = Bits::Eight;
        for (j, to) in targets.into_iter().enumerate() {
            shrink(&mut codes, 64, from, to, counter.shrinking(from, to), 64);
            from = to;
            let mut out = [0.0; 64];
            decode(&codes, to, meta, Bits::Eight, &mut out);
            let step = f64::from(meta.step(Bits::Eight, to));
            let mut total = 0.0;
            for i in 0..64 {
                let error = f64::from(out[i]) - f64::from(x[i]);
                square[j] += error * error;
                total += error;
                if to == Bits::One {
                    sum[i] += error / step;
                }
                let at = (f64::from(x[i]) - f64::from(meta.base())) / step;
                let p = at - (at as u64) as f64;
                expected[j] += step * step * p * (1.0 - p);
            }
            total_square[j] += total * total;
        }
    }
    let bound = 4.5 * root(2.0 / n as f64);
    for ((square, total), expected) in square.iter().zip(total_square).zip(expected) {
        assert!(
            (square / expected - 1.0).abs() < 0.02,
            "{square} {expected}"
        );
        // Independent errors: the variance of their sum is the sum of their variances.
        assert!((total / expected - 1.0).abs() < bound, "{total} {expected}");
    }
    for sum in sum {
        // At one bit no standard deviation is above half a step.
        assert!(sum.abs() / (n as f64) < 4.5 * 0.5 / 64.0, "{sum}");
    }
}

/// The error of a gradient, which is a sum of products with quantized activations, falls with the root
/// of the number of steps that are averaged: nothing but noise is in it.
#[test]
fn errors_average_out_with_slope_one_half() {
    let mut random = Random(6);
    let (tokens, cols) = (16, 64);
    let x: [[f32; 64]; 16] = core::array::from_fn(|_| random.group(1.0, 0.2));
    let p: [f32; 16] = random.group(1.0, 0.0);
    let mut mean = [0.0f64; 64];
    let mut points = [(0.0f64, 0.0f64); 7];
    let mut point = 0;
    for n in 1..=4096u64 {
        let counter = Counter { step: n, ..COUNTER };
        for t in 0..tokens {
            let mut codes = [0; 16];
            let key = counter.rounding();
            let meta = quantize(&x[t], Bits::Two, key, t * cols, &mut codes).unwrap();
            let mut out = [0.0; 64];
            decode(&codes, Bits::Two, meta, Bits::Two, &mut out);
            for i in 0..cols {
                mean[i] += f64::from(p[t]) * (f64::from(out[i]) - f64::from(x[t][i]));
            }
        }
        if n == 1 << (2 * point) {
            let squares: f64 = mean.iter().map(|e| e * e).sum();
            // Logarithms to base 2: of n, and of the error by its square, with n^2 taken out.
            points[point] = (2.0 * point as f64, 0.5 * log2(squares / (n * n) as f64));
            point += 1;
        }
    }
    let (mx, my) = points
        .iter()
        .fold((0.0, 0.0), |(a, b), p| (a + p.0 / 7.0, b + p.1 / 7.0));
    let xy: f64 = points.iter().map(|p| (p.0 - mx) * (p.1 - my)).sum();
    let xx: f64 = points.iter().map(|p| (p.0 - mx) * (p.0 - mx)).sum();
    let slope = xy / xx;
    assert!((slope + 0.5).abs() < 0.04, "{slope}");
}

/// Logarithm to base 2, which core lacks, to a hundredth.
fn log2(mut x: f64) -> f64 {
    let mut log = 0.0;
    while x < 1.0 {
        x *= 2.0;
        log -= 1.0;
    }
    while x >= 2.0 {
        x /= 2.0;
        log += 1.0;
    }
    let mut part = 0.5;
    for _ in 0..10 {
        x *= x;
        if x >= 2.0 {
            x /= 2.0;
            log += part;
        }
        part /= 2.0;
    }
    log
}

#[test]
fn groups_of_one_value_are_exact_even_when_shrunk() {
    for value in [
        0.0,
        -0.0,
        0.1,
        -0.1,
        1.0 + f32::EPSILON,
        1e-45,
        f32::MAX,
        -3.3e38,
    ] {
        for from in Bits::ALL {
            let mut codes = [7; 40];
            let codes = &mut codes[..from.bytes(40)];
            let meta = quantize(&[value; 33], from, COUNTER.rounding(), 0, codes).unwrap();
            let mut out = [f32::NAN; 33];
            decode(codes, from, meta, from, &mut out);
            assert_eq!(out, [value; 33], "{from:?}");
            for to in Bits::ALL.into_iter().filter(|&to| to < from) {
                let mut codes: [u8; 40] = core::array::from_fn(|i| *codes.get(i).unwrap_or(&0));
                shrink(&mut codes, 40, from, to, COUNTER.shrinking(from, to), 0);
                let mut out = [f32::NAN; 33];
                decode(&codes, to, meta, from, &mut out);
                assert_eq!(out, [value; 33], "{from:?} {to:?}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_is_named() {
    let mut codes = [9; 8];
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 3, 15] {
            let mut x = [1.0; 16];
            x[at] = bad;
            let refused = quantize(&x, Bits::Four, COUNTER.rounding(), 160, &mut codes);
            assert_eq!(refused, Err(NotFinite { element: 160 + at }));
        }
        // A group of nothing else has one value, which isn't finite either.
        let refused = quantize(&[bad; 16], Bits::Four, COUNTER.rounding(), 160, &mut codes);
        assert_eq!(refused, Err(NotFinite { element: 160 }));
    }
    let wide = [-3e38, 3e38, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let refused = quantize(&wide, Bits::Four, COUNTER.rounding(), 8, &mut codes[..4]);
    assert_eq!(refused, Err(NotFinite { element: 8 }));
    assert_eq!(codes, [9; 8], "nothing was written");
}

#[test]
fn a_producer_s_range_gives_what_its_elements_do() {
    let mut random = Random(7);
    let x: [f32; 96] = random.group(1.0, 0.0);
    let (mut a, mut b) = ([0; 48], [0; 48]);
    let range = Range::of(&x[50..]).join(Range::of(&x[..50]));
    let key = COUNTER.rounding();
    let left = quantize(&x, Bits::Four, key, 0, &mut a);
    let right = quantize_ranged(&x, range, Bits::Four, key, 0, &mut b);
    assert_eq!((left, a), (right, b));
}

#[test]
fn results_depend_on_the_element_s_number_and_nothing_else() {
    let mut random = Random(8);
    let x: [f32; 64] = random.group(1.0, 0.0);
    let of = |counter: Counter, first| {
        let mut codes = [0; 32];
        quantize(&x, Bits::Four, counter.rounding(), first, &mut codes).unwrap();
        codes
    };
    let all = [
        of(COUNTER, 0),
        of(COUNTER, 64),
        of(COUNTER, 8),
        of(
            Counter {
                tensor: 3,
                ..COUNTER
            },
            0,
        ),
    ];
    assert_eq!(of(COUNTER, 64), all[1]);
    for i in 0..4 {
        for j in 0..i {
            assert_ne!(all[i], all[j]);
        }
    }
}
