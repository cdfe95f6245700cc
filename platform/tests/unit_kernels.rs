//! The kernels of the sparse path on every instruction set this machine has: against sums in f64,
//! and the promise that cuts, calls and alignment don't change a bit.

#[path = "common/inputs.rs"]
mod inputs;

use half::f16;
use inputs::{Acts, Fill, Guarded, Random, weights};
use leanstream::cpu::units::{Column, Columns, Stored, Term, UnitKernels};
use leanstream::cpu::{Kernels, Rows};
use leanstream_core::quant::{QuantType, decode};

/// Every way to store a column, and whether it has minimums.
fn ways() -> Vec<(Stored, bool)> {
    let moved = [
        (Stored::Moved8, false),
        (Stored::Moved4, false),
        (Stored::Moved4, true),
        (Stored::Moved5, false),
        (Stored::Moved5, true),
    ];
    let rows = QuantType::ALL.map(|ty| (Stored::Row(ty), false));
    moved.into_iter().chain(rows).collect()
}

/// Lengths that reach every branch: below a vector, part of a block, several and a rest.
fn lengths(stored: Stored) -> &'static [usize] {
    match stored {
        Stored::Row(ty) if ty.block_len() == 256 => &[256, 512, 1280],
        Stored::Row(ty) if ty.block_len() == 1 => &[1, 3, 17, 32, 33, 100, 576, 611],
        _ => &[32, 64, 96, 160, 224, 256, 288, 576, 640, 1120],
    }
}

/// A layer's columns: `count` of them one after the other behind `skew` bytes, from `blocks` source
/// blocks.
struct Layer {
    stored: Stored,
    d: usize,
    blocks: usize,
    skew: usize,
    bytes: Vec<u8>,
    scales: Vec<u16>,
    mins: Vec<u16>,
}

impl Layer {
    fn new(
        (stored, mins): (Stored, bool),
        d: usize,
        count: usize,
        skew: usize,
        random: &mut Random,
    ) -> Self {
        let blocks = 3;
        let mut layer = Self {
            stored,
            d,
            blocks,
            skew,
            bytes: Vec::new(),
            scales: Vec::new(),
            mins: Vec::new(),
        };
        if let Stored::Row(ty) = stored {
            layer.bytes = weights(ty, count, d, Fill::Random, skew, random);
            return layer;
        }
        let mask = if stored == Stored::Moved5 { 31 } else { 255 };
        let size = stored.bytes(d).unwrap();
        layer.bytes = (0..skew + count * size)
            .map(|_| random.bits() as u8 & mask)
            .collect();
        let mut halves = || -> Vec<u16> {
            (0..blocks * d)
                .map(|_| f16::from_f32(random.normal() / 8.0).to_bits())
                .collect()
        };
        layer.scales = halves();
        if mins {
            layer.mins = halves();
        }
        layer
    }

    fn columns(&self) -> Columns<'_> {
        Columns::new(self.stored, self.d, &self.scales, &self.mins)
    }

    fn bytes(&self, i: usize) -> &[u8] {
        let size = self.columns().column_bytes();
        &self.bytes[self.skew + i * size..][..size]
    }

    fn column(&self, i: usize) -> Column<'_> {
        self.columns().column(self.bytes(i), i % self.blocks)
    }

    fn term(&self, i: usize, a: f32) -> Term<'_> {
        Term {
            bytes: self.bytes(i),
            block: i % self.blocks,
            a,
        }
    }

    /// The elements of column `i`, worked out here in f64.
    fn values(&self, i: usize) -> Vec<f64> {
        let bytes = self.bytes(i);
        if let Stored::Row(ty) = self.stored {
            let mut out = vec![0.0; self.d];
            decode(ty, bytes, &mut out);
            return out.into_iter().map(f64::from).collect();
        }
        let half = |halves: &[u16], j: usize| {
            f16::from_bits(halves[i % self.blocks * self.d + j]).to_f64()
        };
        (0..self.d)
            .map(|j| {
                let (code, offset) = match self.stored {
                    Stored::Moved8 => (f64::from(bytes[j].cast_signed()), 0.0),
                    Stored::Moved4 => (f64::from(bytes[j / 2] >> (j % 2 * 4) & 15), 8.0),
                    _ => (f64::from(bytes[j]), 16.0),
                };
                match self.mins.is_empty() {
                    true => half(&self.scales, j) * (code - offset),
                    false => half(&self.scales, j) * code + half(&self.mins, j),
                }
            })
            .collect()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Panics unless every sum is near its value, measured against the size of what was added.
#[track_caller]
fn near(got: &[f32], want: &[f64], sizes: &[f64], what: &str) {
    for (j, ((&got, want), size)) in got.iter().zip(want).zip(sizes).enumerate() {
        let error = (f64::from(got) - want).abs();
        assert!(error <= 1e-6 * size, "{what}: {got} for {want} at {j}");
    }
}

/// Some activations: of either sign, with a zero.
fn activations(n: usize, random: &mut Random) -> Vec<f32> {
    (0..n)
        .map(|i| if i == 4 { 0.0 } else { random.normal() })
        .collect()
}

#[test]
fn columns_add_up_to_what_f64_says() {
    for units in UnitKernels::available() {
        for way in ways() {
            for (round, &d) in lengths(way.0).iter().enumerate() {
                let mut random = Random(0xadd + d as u64);
                let count = [1, 7, 33, 70][round % 4];
                let layer = Layer::new(way, d, count, round % 3, &mut random);
                let a = activations(count, &mut random);
                let start: Vec<f32> = (0..d).map(|_| random.normal()).collect();
                let mut want: Vec<f64> = start.iter().map(|&v| f64::from(v)).collect();
                let mut sizes: Vec<f64> = want.iter().map(|v| v.abs()).collect();
                let values: Vec<Vec<f64>> = (0..count).map(|i| layer.values(i)).collect();
                for (values, &a) in values.iter().zip(&a) {
                    for (j, value) in values.iter().enumerate() {
                        want[j] += f64::from(a) * value;
                        // A code next to an offset or a minimum is larger than their sum.
                        sizes[j] += 2.0 * f64::from(a.abs()) * (value.abs() + 4.0);
                    }
                }
                let what = format!("{} {way:?} {d}", units.kernels().isa());
                let mut together = start.clone();
                let terms = || (0..count).map(|i| layer.term(i, a[i]));
                units.columns_add(&layer.columns(), terms(), 0, &mut together);
                near(&together, &want, &sizes, &what);

                let mut single = start.clone();
                for (i, &a) in a.iter().enumerate() {
                    units.column_add(&layer.column(i), a, &mut single);
                }
                assert_eq!(bits(&single), bits(&together), "{what}: one by one");

                let mut panel = vec![f32::NAN; d];
                for (i, values) in values.iter().enumerate() {
                    units.panel(&layer.column(i), &mut panel);
                    let sizes: Vec<f64> = values.iter().map(|v| v.abs() + 4.0).collect();
                    near(&panel, values, &sizes, &what);
                }
            }
        }
    }
}

#[test]
fn cuts_of_columns_change_no_bit() {
    for units in UnitKernels::available() {
        for way in ways() {
            for &d in lengths(way.0) {
                let mut random = Random(0xc07 + d as u64);
                let count = 41;
                let layer = Layer::new(way, d, count, 0, &mut random);
                let a = activations(count, &mut random);
                let mut whole = vec![0.5; d];
                let terms = |from: usize, to: usize| (from..to).map(|i| layer.term(i, a[i]));
                units.columns_add(&layer.columns(), terms(0, count), 0, &mut whole);
                for round in 0..4 {
                    let what = format!("{} {way:?} {d} {round}", units.kernels().isa());
                    let moved = Layer {
                        skew: 1 + round,
                        bytes: [&[0; 8][..1 + round], &layer.bytes].concat(),
                        scales: layer.scales.clone(),
                        mins: layer.mins.clone(),
                        ..layer
                    };
                    // Other cuts of the elements, other calls, another alignment of the sums.
                    let mut parts = vec![0.5; round + d];
                    let mut at = 0;
                    while at < d {
                        let end = (at + 32 * (1 + random.below(12))).min(d);
                        let y = &mut parts[round + at..round + end];
                        let cut = random.below(count + 1);
                        let first = (0..cut).map(|i| moved.term(i, a[i]));
                        units.columns_add(&moved.columns(), first, at, y);
                        for (i, &a) in a.iter().enumerate().skip(cut) {
                            units.column_add(&moved.column(i).range(at..end), a, y);
                        }
                        at = end;
                    }
                    assert_eq!(bits(&parts[round..]), bits(&whole), "{what}");
                }
            }
        }
    }
}

#[test]
fn a_range_of_a_range_is_a_range() {
    let units = UnitKernels::beside(&Kernels::detect());
    for way in ways() {
        let d = *lengths(way.0).last().unwrap();
        let mut random = Random(5);
        let layer = Layer::new(way, d, 1, 1, &mut random);
        let column = layer.column(0);
        let mut whole = vec![0.0; d];
        units.panel(&column, &mut whole);
        for (from, to) in [(0, d), (32, d), (96, 352), (288, 544), (64, 64)] {
            for (inner, end) in [(0, to - from), ((to - from) / 32 * 32, to - from)] {
                let part = column.range(from..to).range(inner..end);
                let mut out = vec![f32::NAN; part.len()];
                units.panel(&part, &mut out);
                assert_eq!(
                    out,
                    whole[from + inner..from + end],
                    "{way:?} {from} {inner}"
                );
            }
        }
    }
}

#[test]
fn prompts_add_up_to_what_f64_says_token_by_token() {
    for units in UnitKernels::available() {
        for (k, d, tokens) in [
            (1, 1, 1),
            (5, 33, 4),
            (64, 576, 7),
            (300, 100, 3),
            (31, 640, 9),
        ] {
            let mut random = Random(0x0e + d as u64);
            let (stride, first) = (k + 13, 5);
            let panel: Vec<f32> = (0..k * d).map(|_| random.normal()).collect();
            // Two of three activations are zero, of either sign.
            let a: Vec<f32> = (0..tokens * stride)
                .map(|_| match random.below(6) {
                    0 | 1 => random.normal(),
                    2 => -0.0,
                    _ => 0.0,
                })
                .collect();
            let start: Vec<f32> = (0..tokens * d).map(|_| random.normal()).collect();
            let mut together = start.clone();
            units.outer_add(&panel, d, &a, stride, first, &mut together);
            let what = format!("{} {k} {d}", units.kernels().isa());
            for t in 0..tokens {
                let a = &a[t * stride + first..][..k];
                let start = &start[t * d..][..d];
                let (want, sizes): (Vec<f64>, Vec<f64>) = (0..d)
                    .map(|j| {
                        let terms = a
                            .iter()
                            .enumerate()
                            .map(|(i, &a)| f64::from(a) * f64::from(panel[i * d + j]));
                        let y = f64::from(start[j]);
                        let size = terms.clone().map(f64::abs).sum::<f64>() + y.abs();
                        (y + terms.sum::<f64>(), size)
                    })
                    .unzip();
                let together = &together[t * d..][..d];
                near(together, &want, &sizes, &what);
                let mut alone = start.to_vec();
                units.outer_add(&panel, d, a, k, 0, &mut alone);
                assert_eq!(bits(&alone), bits(together), "{what}: token {t} alone");
                // Panels of fewer columns, one after the other.
                let mut parts = start.to_vec();
                let cut = random.below(k + 1);
                units.outer_add(&panel[..cut * d], d, a, k, 0, &mut parts);
                units.outer_add(&panel[cut * d..], d, a, k, cut, &mut parts);
                assert_eq!(bits(&parts), bits(together), "{what}: cut at {cut}");
            }
        }
    }
}

#[test]
fn an_activation_of_zero_leaves_its_column_out() {
    for units in UnitKernels::available() {
        let mut panel = vec![1.0; 3 * 40];
        panel[40..80].fill(f32::NAN);
        let mut y = vec![0.0; 80];
        units.outer_add(&panel, 40, &[2.0, 0.0, 3.0, 4.0, -0.0, 5.0], 3, 0, &mut y);
        assert_eq!(y[..40], [5.0; 40]);
        assert_eq!(y[40..], [9.0; 40]);
    }
}

#[test]
fn scattered_rows_give_the_bits_of_matvec() {
    for units in UnitKernels::available() {
        let kernels = units.kernels();
        for ty in QuantType::ALL {
            let columns: &[usize] = match ty.block_len() {
                256 => &[256, 768, 1536],
                _ => &[32, 96, 256, 576, 608, 1056],
            };
            for &cols in columns {
                let mut random = Random(0xd07 + cols as u64);
                let acts = Acts::random(&kernels, cols, 1, &mut random);
                let rows = 37;
                let bytes = weights(ty, rows, cols, Fill::Random, 0, &mut random);
                let all = Rows {
                    ty,
                    cols,
                    bytes: &bytes,
                };
                for exact in [false, true] {
                    let mut want = vec![0.0; rows];
                    kernels.matvec(&all, &acts.act(), exact, &mut want);
                    // Each at an address of its own, in no order.
                    let order: Vec<usize> = (0..29).map(|_| random.below(rows)).collect();
                    let copies: Vec<Vec<u8>> = order
                        .iter()
                        .map(|&r| {
                            let n = all.row_bytes();
                            let skew = r % 5;
                            [&[0; 5][..skew], &bytes[r * n..][..n]].concat()
                        })
                        .collect();
                    for take in [0, 1, 3, 4, 11, 29] {
                        let scattered = order[..take]
                            .iter()
                            .zip(&copies)
                            .map(|(r, copy)| &copy[r % 5..]);
                        let mut out = vec![f32::NAN; take];
                        units.rows_dot(scattered, ty, &acts.act(), exact, &mut out);
                        let want: Vec<f32> = order[..take].iter().map(|&r| want[r]).collect();
                        let what = format!("{} {ty} {cols} exact {exact}", kernels.isa());
                        assert_eq!(bits(&out), bits(&want), "{what}: {take} rows");
                    }
                }
            }
        }
    }
}

#[test]
fn positive_elements_are_found_in_order() {
    for units in UnitKernels::available() {
        for n in [0, 1, 15, 16, 17, 31, 33, 64, 100, 1536, 65536] {
            for share in [0, 1, 5, 10] {
                let mut random = Random(0x9 + n as u64);
                let mut g: Vec<f32> = (0..n)
                    .map(|_| match random.below(10) < share {
                        true => random.normal().abs() + f32::from_bits(1),
                        false => -random.normal().abs(),
                    })
                    .collect();
                let odd = [f32::NAN, 0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY];
                for (g, odd) in g.iter_mut().step_by(7).zip(odd) {
                    *g = odd;
                }
                let want: Vec<u16> = (0..n).filter(|&i| g[i] > 0.0).map(|i| i as u16).collect();
                let mut index = vec![7; n];
                let count = units.positives(&g, &mut index);
                assert_eq!(index[..count], want, "{} {n}", units.kernels().isa());
            }
        }
    }
}

#[test]
fn rows_that_reach_the_threshold_are_found_until_there_is_no_room() {
    for units in UnitKernels::available() {
        for n in [0, 1, 15, 16, 17, 63, 64, 65, 1000, 4099] {
            let mut random = Random(0xab + n as u64);
            // Quarters: nothing is rounded, and some sums meet the threshold exactly.
            let mut quarters = |size: i32| -> Vec<f32> {
                let size = size.cast_unsigned() as usize;
                (0..n)
                    .map(|_| (random.below(2 * size) as f32 - size as f32) / 4.0)
                    .collect()
            };
            let mut estimate = quarters(64);
            let error: Vec<f32> = quarters(16).into_iter().map(f32::abs).collect();
            if n > 20 {
                estimate[20] = f32::NAN;
                estimate[3] = f32::INFINITY;
                estimate[4] = f32::NEG_INFINITY;
            }
            for threshold in [-100.0, 0.0, 12.0, 100.0, f32::NEG_INFINITY] {
                let (h, first) = (1.5, 1000);
                let want: Vec<u32> = (0..n)
                    .filter(|&v| {
                        let sum = estimate[v] + error[v] * h;
                        sum >= threshold || sum.is_nan()
                    })
                    .map(|v| first + v as u32)
                    .collect();
                let what = format!("{} {n} {threshold}", units.kernels().isa());
                let above = |room: usize| {
                    let mut rows = vec![7; room];
                    let n = units.above(&estimate, &error, h, threshold, first, &mut rows);
                    (n, rows)
                };
                for room in [want.len(), want.len() + 1, want.len() + 40] {
                    let (count, rows) = above(room);
                    assert_eq!(count, Some(want.len()), "{what} {room}");
                    assert_eq!(rows[..want.len()], want, "{what} {room}");
                }
                for short in [1, 2, 17] {
                    if let Some(room) = want.len().checked_sub(short) {
                        let (count, rows) = above(room);
                        assert_eq!(count, None, "{what} {room}");
                        assert_eq!(rows, want[..room], "{what} {room}");
                    }
                }
            }
        }
    }
}

#[test]
fn nothing_is_read_past_the_end_of_a_unit() {
    for units in UnitKernels::available() {
        for way in ways() {
            for &d in lengths(way.0) {
                let mut random = Random(11);
                let layer = Layer::new(way, d, 1, 0, &mut random);
                let bytes = Guarded::new(&layer.bytes);
                let (scales, mins) = (Guarded::of(&layer.scales), Guarded::of(&layer.mins));
                let columns = Columns::new(layer.stored, d, scales.values(), mins.values());
                let mut y = vec![0.0; d];
                // The last row of scales ends where memory ends.
                let term = Term {
                    bytes: bytes.bytes(),
                    block: layer.blocks - 1,
                    a: 1.0,
                };
                units.columns_add(&columns, [term; 3], 0, &mut y);
                if let Stored::Row(ty) = way.0
                    && d % 32 == 0
                {
                    let acts = Acts::random(&units.kernels(), d, 1, &mut random);
                    units.rows_dot([bytes.bytes()], ty, &acts.act(), false, &mut [0.0]);
                }
            }
        }
        let numbers = Guarded::of(&[1f32; 37]);
        let x = numbers.values();
        let mut y = vec![0.0; x.len()];
        units.outer_add(x, x.len(), &[1.0], 1, 0, &mut y);
        units.positives(x, &mut [0; 37]);
        let found = units.above(x, x, 1.0, 0.0, 0, &mut [0; 37]);
        assert_eq!(found, Some(37));
    }
}

#[test]
#[should_panic(expected = "cut at multiples of 32")]
fn a_cut_inside_a_block_is_refused() {
    let scales = [0; 64];
    let _ = Column::new(Stored::Moved8, 64, &[0; 64], &scales, &[]).range(16..64);
}

#[test]
#[should_panic(expected = "bytes of one column")]
fn a_unit_that_is_too_short_is_refused() {
    let scales = [0; 64];
    let _ = Columns::new(Stored::Moved4, 64, &scales, &[]).column(&[0; 31], 0);
}
