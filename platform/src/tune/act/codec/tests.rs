//! Every instruction set against core's reference, bit for bit.

use super::*;
use crate::cpu::vector::Vector;
use crate::cpu::vector::testing::Random;
use leanstream_core::act::codec::{Counter, float, mask};

const COUNTER: Counter = Counter {
    seed: 3,
    step: 4,
    tensor: 5,
};

fn coding(bits: Bits) -> Coding {
    Coding {
        bits,
        key: COUNTER.rounding(),
    }
}

/// Rows of `cols` with all kinds of groups in them: near and far from 0, tiny, huge, of one value, with
/// elements exactly at the ends, zeros of both signs.
fn tensor(random: &mut Random, rows: usize, cols: usize) -> Vec<f32> {
    let mut x = Vec::new();
    for row in 0..rows {
        let (size, middle) = [
            (1.0, 0.0),
            (2.0, 100.0),
            (1e-30, 0.0),
            (1e-42, 0.0),
            (1e37, 1e36),
            (0.0, 0.1),
            (0.0, -0.0),
            (3e-5, -1.0),
        ][row % 8];
        x.extend(random.floats(cols, size).iter().map(|x| x + middle));
        let start = row * cols;
        if row % 8 == 0 {
            for at in (0..cols).step_by(5) {
                x[start + at] = if at % 2 == 0 { 0.0 } else { -0.0 };
            }
        }
    }
    x
}

/// What the reference makes of a run: metadata, and codes without a gap.
fn reference(run: Run, bits: Bits, x: &[f32]) -> (Vec<Meta>, Vec<u8>) {
    let group = run.grouping.group();
    let mut codes = vec![0xaa; bits.bytes(run.codes())];
    let mut metas = Vec::new();
    let start = run.elements().start;
    for (i, out) in codes.chunks_exact_mut(bits.bytes(group)).enumerate() {
        let at = run.first + i;
        let elements = run.grouping.elements(at..at + 1);
        let x = &x[elements.start - start..elements.end - start];
        let key = COUNTER.rounding();
        metas.push(codec::quantize(x, bits, key, at * group, out).unwrap());
    }
    (metas, codes)
}

/// `bytes` cut into pages of `page` bytes.
fn cut(bytes: &mut [u8], page: usize) -> Vec<&mut [u8]> {
    bytes.chunks_mut(page).collect()
}

const COLS: [usize; 16] = [
    1, 8, 10, 16, 24, 32, 40, 63, 64, 96, 100, 192, 256, 300, 576, 1048,
];

#[test]
fn codes_are_the_reference_s_on_every_instruction_set() {
    let mut random = Random(7);
    for cols in COLS {
        let rows = 17;
        let grouping = Grouping::of(cols);
        let x = tensor(&mut random, rows, cols);
        for (first, groups) in [(0, grouping.groups(rows)), (3, grouping.groups(rows) - 4)] {
            let run = Run {
                grouping,
                first,
                groups,
            };
            let x = &x[run.elements()];
            for bits in Bits::ALL {
                let (metas, codes) = reference(run, bits, x);
                let mut ranges = vec![Range::NONE; groups];
                for v in Vector::available() {
                    for page in [4096, 32, 96] {
                        let mut got = vec![0x55; codes.len()];
                        let mut got_metas = vec![Meta::default(); groups];
                        let coding = coding(bits);
                        let mut pages = cut(&mut got, page);
                        v.quantize(run, coding, x, &mut got_metas, &mut pages)
                            .unwrap();
                        assert!(got_metas == metas, "{v:?} {cols} {bits:?} {page}");
                        assert!(got == codes, "{v:?} {cols} {bits:?} {page}");
                    }
                    // With ranges from a producer: the same.
                    ranges.fill(Range::NONE);
                    v.group_ranges(run, x, &mut ranges);
                    let mut got = vec![0x55; codes.len()];
                    let mut got_metas = vec![Meta::default(); groups];
                    let coding = coding(bits);
                    let pages = &mut [&mut got[..]];
                    v.quantize_ranged(run, coding, x, &ranges, &mut got_metas, pages)
                        .unwrap();
                    assert!(got_metas == metas && got == codes, "{v:?} {cols} {bits:?}");
                }
            }
        }
    }
}

#[test]
fn values_are_the_reference_s_on_every_instruction_set() {
    let mut random = Random(8);
    for cols in COLS {
        let rows = 9;
        let run = Run {
            grouping: Grouping::of(cols),
            first: 0,
            groups: Grouping::of(cols).groups(rows),
        };
        let x = tensor(&mut random, rows, cols);
        for encoded in Bits::ALL {
            let (metas, codes) = reference(run, encoded, &x);
            for stored in Bits::ALL.into_iter().filter(|&b| b <= encoded) {
                let mut codes = codes.clone();
                if stored < encoded {
                    let key = COUNTER.shrinking(encoded, stored);
                    codec::shrink(&mut codes, run.codes(), encoded, stored, key, 0);
                }
                codes.truncate(stored.bytes(run.codes()));
                let mut want = vec![f32::NAN; x.len()];
                let group = run.grouping.group();
                for (i, codes) in codes.chunks_exact(stored.bytes(group)).enumerate() {
                    let out = &mut want[run.grouping.elements(i..i + 1)];
                    codec::decode(codes, stored, metas[i], encoded, out);
                }
                for v in Vector::available() {
                    for page in [4096, 32] {
                        let pages: Vec<&[u8]> = codes.chunks(page).collect();
                        let mut got = vec![f32::NAN; x.len()];
                        v.dequantize(run, encoded, stored, &metas, &pages, &mut got);
                        let same = got
                            .iter()
                            .zip(&want)
                            .all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(same, "{v:?} {cols} {encoded:?} {stored:?} {page}");
                    }
                }
            }
        }
    }
}

/// A group whose maximum lies a hair above 255 steps for f32, and draws the largest `u`: 256, but for
/// saturation.
#[test]
fn the_maximum_never_wraps() {
    let run = Run {
        grouping: Grouping::of(64),
        first: 0,
        groups: 1,
    };
    let mut tried = 0;
    for seed in 0..20_000 {
        let counter = Counter { seed, ..COUNTER };
        let key = counter.rounding();
        let Some(at) = (0..64).find(|&i| codec::counter::uniform(key, 0, i, 64) == 0xffff) else {
            continue;
        };
        for mantissa in 128..256 {
            let top = 255.0 * mantissa as f32;
            let meta = Meta::new(Range { min: 0.0, max: top }, Bits::Eight).unwrap();
            let grid = meta.grid(Bits::Eight);
            if top * grid.inverse <= grid.top {
                continue;
            }
            tried += 1;
            let mut x = vec![0.5 * top; 64];
            (x[at], x[(at + 1) % 64]) = (top, 0.0);
            let coding = Coding {
                bits: Bits::Eight,
                key,
            };
            let mut want = vec![0; 64];
            codec::quantize(&x, Bits::Eight, key, 0, &mut want).unwrap();
            assert_eq!(want[at], 255);
            for v in Vector::available() {
                let (mut got, mut metas) = (vec![0; 64], [Meta::default()]);
                let pages = &mut [&mut got[..]];
                v.quantize(run, coding, &x, &mut metas, pages).unwrap();
                assert_eq!(got, want, "{v:?} {seed} {mantissa}");
            }
        }
    }
    assert!(tried > 100, "{tried}");
}

#[test]
fn shrinking_is_the_reference_s_over_any_pages() {
    let mut random = Random(9);
    for from in Bits::ALL {
        for to in Bits::ALL.into_iter().filter(|&to| to < from) {
            for elements in [8, 24, 32, 96, 200, 1024, 5000] {
                let mut codes = vec![0; from.bytes(elements)];
                codes.fill_with(|| (random.unit() * 1e6) as i32 as u8);
                let first = 1 << 12;
                let key = COUNTER.shrinking(from, to);
                let mut want = codes.clone();
                codec::shrink(&mut want, elements, from, to, key, first);
                let used = to.bytes(elements);
                for v in Vector::available() {
                    for page in [32, 64, 4096] {
                        let mut got = codes.clone();
                        let mut pages = cut(&mut got, page);
                        v.shrink_codes(elements, from, to, key, first, &mut pages);
                        assert!(
                            got[..used] == want[..used],
                            "{v:?} {from:?} {to:?} {elements} {page}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn elements_outside_of_a_claimed_range_become_its_ends() {
    let mut x = vec![0.5; 64];
    (x[3], x[40], x[50]) = (-9.0, 1e30, f32::NAN);
    let run = Run {
        grouping: Grouping::of(64),
        first: 0,
        groups: 1,
    };
    let claimed = Range { min: 0.0, max: 1.0 };
    for bits in Bits::ALL {
        let mut want = vec![0; bits.bytes(64)];
        let key = COUNTER.rounding();
        codec::quantize_ranged(&x, claimed, bits, key, 0, &mut want).unwrap();
        for v in Vector::available() {
            let (mut got, mut metas) = (vec![0; bits.bytes(64)], [Meta::default()]);
            let pages = &mut [&mut got[..]];
            v.quantize_ranged(run, coding(bits), &x, &[claimed], &mut metas, pages)
                .unwrap();
            assert_eq!(got, want, "{v:?} {bits:?}");
            let mut out = vec![0.0; 64];
            v.dequantize(run, bits, bits, &metas, &[&got], &mut out);
            assert_eq!((out[3], out[50]), (0.0, 0.0), "{v:?} {bits:?}");
            assert!((1.0..1.01).contains(&out[40]), "{v:?} {bits:?}");
        }
    }
}

#[test]
fn what_is_not_finite_is_refused_wherever_it_is() {
    let grouping = Grouping::of(100);
    let run = Run {
        grouping,
        first: 2,
        groups: 3,
    };
    for v in Vector::available() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in [0, 1, 31, 64, 99, 100, 250, 299] {
                let mut x = vec![1.0; 300];
                x[17] = 2.0;
                x[at] = bad;
                let mut codes = vec![0; 3 * 104];
                let mut metas = [Meta::default(); 3];
                let element = (2 + at / 100) * 104 + at % 100;
                let pages = &mut [&mut codes[..]];
                let got = v.quantize(run, coding(Bits::Eight), &x, &mut metas, pages);
                assert_eq!(got, Err(NotFinite { element }), "{v:?} {bad} {at}");
                let mut ranges = [Range::NONE; 3];
                v.group_ranges(run, &x, &mut ranges);
                for (i, range) in ranges.iter().enumerate() {
                    assert_eq!(range.min.is_nan(), i == at / 100, "{v:?} {bad} {at}");
                }
            }
        }
    }
}

#[test]
fn outliers_are_split_as_the_reference_splits_them() {
    use leanstream_core::act::codec::outlier::Outliers;
    let mut random = Random(11);
    for cols in [40, 576, 1048] {
        let mut ranges = vec![1.0; cols];
        for column in [0, 7, cols / 2, cols - 1] {
            ranges[column] = 50.0;
        }
        let outliers = Outliers::largest(&ranges, 4, 3.0);
        let grouping = Grouping::of(cols);
        let run = Run {
            grouping,
            first: 1,
            groups: grouping.groups(9) - 1,
        };
        let mut x = random.floats(9 * cols, 1.0);
        x.iter_mut()
            .enumerate()
            .for_each(|(i, x)| *x *= ranges[i % cols]);
        let x = &x[run.elements()];
        let within = outliers.within(&grouping, 1..1 + run.groups);
        // Group by group, with the reference.
        let mut want = vec![0; within.len()];
        let mut plain = Vec::new();
        for group in 1..1 + run.groups {
            let elements = grouping.elements(group..group + 1);
            let start = run.elements().start;
            let own = outliers.within(&grouping, group..group + 1);
            let own = &mut want[own.start - within.start..own.end - within.start];
            let x = &x[elements.start - start..elements.end - start];
            let mut room = [0.0; GROUP_MAX];
            let rest = outliers.split(x, &grouping, group, COUNTER.outliers(), own, &mut room);
            plain.extend_from_slice(rest.unwrap());
        }
        for bits in Bits::ALL {
            let (metas, codes) = reference(run, bits, &plain);
            for v in Vector::available() {
                let (mut got, mut got_metas) = (vec![0; codes.len()], metas.clone());
                got_metas.fill(Meta::default());
                let mut values = vec![0; within.len()];
                let apart = Apart {
                    outliers: &outliers,
                    key: COUNTER.outliers(),
                    values: &mut values,
                };
                let mut pages = cut(&mut got, 96);
                v.quantize_apart(run, coding(bits), apart, x, &mut got_metas, &mut pages)
                    .unwrap();
                assert!(got == codes && got_metas == metas, "{v:?} {cols} {bits:?}");
                assert_eq!(values, want, "{v:?} {cols} {bits:?}");
                let mut out = vec![0.0; x.len()];
                v.dequantize(run, bits, bits, &metas, &[&got], &mut out);
                put_back(run, &outliers, &values, &mut out);
                for (i, (x, out)) in x.iter().zip(out).enumerate() {
                    let column = (run.elements().start + i) % cols;
                    let bound = if ranges[column] > 1.0 {
                        x.abs() / 128.0
                    } else {
                        2.05 / bits.steps() as f32
                    };
                    assert!((x - out).abs() <= bound, "{v:?} {cols} {bits:?} {x} {out}");
                }
            }
        }
    }
}

#[test]
fn bf16_and_masks_are_the_reference_s() {
    let mut random = Random(10);
    for n in [0, 1, 7, 8, 31, 32, 33, 100, 1000] {
        let mut x = random.floats(n, 2.0);
        for (i, x) in x.iter_mut().enumerate() {
            match i % 11 {
                3 => *x = 0.0,
                5 => *x = -0.0,
                7 => *x = f32::NAN,
                9 => *x = f32::MAX,
                _ => {}
            }
        }
        let (mut wide, mut bits) = (vec![0; 2 * n], vec![0; n.div_ceil(8)]);
        float::encode_bf16(&x, &mut wide);
        mask::positive(&x, &mut bits);
        let mut values = vec![0.0; n];
        float::decode_bf16(&wide, &mut values);
        let mut kept = x.clone();
        mask::keep(&bits, &mut kept);
        let bytes = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for v in Vector::available() {
            let (mut got, mut got_bits) = (vec![0; 2 * n], vec![0xff; n.div_ceil(8)]);
            v.to_bf16(&x, &mut got);
            v.positive_mask(&x, &mut got_bits);
            assert_eq!((&got, &got_bits), (&wide, &bits), "{v:?} {n}");
            let mut out = vec![1.0; n];
            v.from_bf16(&got, &mut out);
            assert_eq!(bytes(&out), bytes(&values), "{v:?} {n}");
            let mut out = x.clone();
            v.keep_masked(&bits, &mut out);
            assert_eq!(bytes(&out), bytes(&kept), "{v:?} {n}");
        }
    }
}

#[test]
#[should_panic(expected = "the codes fit into the pages")]
fn pages_must_hold_the_codes() {
    let run = Run {
        grouping: Grouping::of(64),
        first: 0,
        groups: 2,
    };
    let mut metas = [Meta::default(); 2];
    let (mut a, mut b) = ([0; 64], [0; 63]);
    let pages: &mut [&mut [u8]] = &mut [&mut a, &mut b];
    let x: Vec<f32> = (0..128).map(|i| i as f32).collect();
    let _ = Vector::detect().quantize(run, coding(Bits::Eight), &x, &mut metas, pages);
}
