//! The store of activations against a second account of every element: same codes whatever the threads,
//! the pages, and the budget's storms.

use leanstream::tune::act::{Capacity, Layout, Room, SaveError, Saved};
use leanstream::tune::team::Team;
use leanstream_core::act::Width;
use leanstream_core::act::codec::{Bits, Counter, Grouping, Meta, Range, decode, quantize, shrink};
use leanstream_core::act::error::PoolError;
use leanstream_core::act::pool::TensorId;

const PAGE: usize = 4096;
const SEED: u64 = 11;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 20
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Numbers of several sizes.
    fn floats(&mut self, n: usize) -> Vec<f32> {
        let size = [0.1, 1.0, 30.0][self.below(3) as usize];
        (0..n)
            .map(|_| (self.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0) * size)
            .collect()
    }
}

/// A tensor by the readable codec, without pages: each chunk's codes in one piece.
struct Reference {
    tensor: TensorId,
    layout: Layout,
    x: Vec<f32>,
    counter: Counter,
    width: Width,
    metas: Vec<Meta>,
    /// Codes and width now.
    chunks: Vec<(Vec<u8>, Width)>,
}

impl Reference {
    fn new(tensor: TensorId, x: Vec<f32>, cols: usize, width: Width, step: u64) -> Self {
        let layout = Layout::of(x.len() / cols, cols, PAGE);
        let counter = Counter {
            seed: SEED,
            step,
            tensor: tensor.0,
        };
        let mut this = Self {
            tensor,
            layout,
            counter,
            width,
            metas: Vec::new(),
            chunks: Vec::new(),
            x,
        };
        let Some(bits) = Bits::of(width) else {
            let shape = layout.shape(width);
            this.chunks = vec![(Vec::new(), width); shape.chunks() as usize];
            return this;
        };
        let group = layout.grouping.group();
        for number in 0..layout.groups() {
            if number % layout.chunk_groups == 0 {
                this.chunks.push((Vec::new(), width));
            }
            let x = &this.x[layout.grouping.elements(number..number + 1)];
            let mut codes = vec![0; bits.bytes(group)];
            let first = number * group;
            let meta = quantize(x, bits, counter.rounding(), first, &mut codes).unwrap();
            this.metas.push(meta);
            this.chunks.last_mut().unwrap().0.extend(codes);
        }
        this
    }

    fn shrink(&mut self, chunk: usize, to: Width) {
        let group = self.layout.grouping.group();
        let (codes, width) = &mut self.chunks[chunk];
        let (from, bits) = (Bits::of(*width).unwrap(), Bits::of(to).unwrap());
        let elements = from.elements(codes.len());
        let key = self.counter.shrinking(from, bits);
        let first = chunk * self.layout.chunk_groups * group;
        shrink(codes, elements, from, bits, key, first);
        codes.truncate(bits.bytes(elements));
        *width = to;
    }

    /// Follows what the store did to its chunks, one step at a time.
    fn follow(&mut self, saved: &Saved<'_>) {
        for chunk in 0..self.chunks.len() {
            let now = saved.pool().width(self.tensor, chunk as u32).unwrap();
            while self.chunks[chunk].1 != now {
                let next = self.chunks[chunk].1.narrower().expect("only narrower");
                self.shrink(chunk, next);
            }
        }
    }

    fn values(&self) -> Vec<f32> {
        let grouping = &self.layout.grouping;
        match self.width {
            Width::F32 => return self.x.clone(),
            Width::Bf16 => {
                let round = |x: &f32| half::bf16::from_f32(*x).to_f32();
                return self.x.iter().map(round).collect();
            }
            _ => {}
        }
        let mut out = vec![0.0; self.x.len()];
        for (number, meta) in self.metas.iter().enumerate() {
            let (codes, width) = &self.chunks[number / self.layout.chunk_groups];
            let stored = Bits::of(*width).unwrap();
            let bytes = stored.bytes(grouping.group());
            let codes = &codes[number % self.layout.chunk_groups * bytes..][..bytes];
            let out = &mut out[grouping.elements(number..number + 1)];
            decode(codes, stored, *meta, Bits::of(self.width).unwrap(), out);
        }
        out
    }

    #[track_caller]
    fn check(&self, saved: &Saved<'_>, team: &Team) {
        let mut out = vec![f32::NAN; self.x.len()];
        saved.load(team, self.tensor, &mut out).unwrap();
        assert_eq!(out, self.values());
    }
}

fn room(pages: u32) -> Room {
    let mut capacity = Capacity::new(PAGE, pages, 8);
    for _ in 0..8 {
        capacity = capacity.and(700, 576).and(200, 100);
    }
    Room::new(capacity).unwrap()
}

fn teams() -> [Team; 3] {
    [1, 2, 3].map(|threads| Team::new(threads).unwrap())
}

/// Pages in an order that depends on `seed`: others are taken between them and released again.
fn scatter(saved: &mut Saved<'_>, team: &Team, seed: u64) {
    let mut random = Random(seed);
    for tensor in 1..8 {
        let x = vec![1.0; 576 * (1 + random.below(500) as usize)];
        saved
            .save(team, TensorId(tensor), &x, 576, Width::Two)
            .unwrap();
    }
    for tensor in [3, 1, 6, 4] {
        saved.release(TensorId(tensor)).unwrap();
    }
}

#[test]
fn what_is_loaded_is_what_the_codec_makes_of_it() {
    let mut random = Random(1);
    let teams = teams();
    for (rows, cols) in [
        (1, 8),
        (5, 3),
        (512, 576),
        (130, 1000),
        (97, 192),
        (3, 11008),
    ] {
        let x = random.floats(rows * cols);
        for width in Width::ALL {
            let mut reference = Reference::new(TensorId(0), x.clone(), cols, width, 4);
            for (layout, team) in teams.iter().enumerate() {
                let mut room = room(2000);
                let mut saved = Saved::new(&mut room, 2000, SEED).unwrap();
                scatter(&mut saved, team, layout as u64 + 1);
                saved.begin_step(4);
                saved.save(team, TensorId(0), &x, cols, width).unwrap();
                reference.check(&saved, team);
                let mut row = vec![0.0; cols];
                saved.load_rows(TensorId(0), rows - 1, &mut row).unwrap();
                assert_eq!(row, reference.values()[(rows - 1) * cols..]);
            }
            let mut narrow = width;
            while let Some(next) = narrow.narrower() {
                narrow = next;
                (0..reference.chunks.len()).for_each(|chunk| reference.shrink(chunk, next));
                for (layout, team) in teams.iter().enumerate() {
                    let mut room = room(2000);
                    let mut saved = Saved::new(&mut room, 2000, SEED).unwrap();
                    saved.begin_step(4);
                    saved.save(team, TensorId(0), &x, cols, width).unwrap();
                    scatter(&mut saved, team, layout as u64 + 1);
                    let mut step = width;
                    while step != next {
                        step = step.narrower().unwrap();
                        saved.narrow(team, TensorId(0), step).unwrap();
                    }
                    reference.check(&saved, team);
                }
            }
        }
    }
}

#[test]
fn several_steps_of_shrinking_at_once() {
    let team = Team::new(2).unwrap();
    let x = Random(9).floats(300 * 576);
    for (from, to) in [
        (Width::Eight, Width::Two),
        (Width::Eight, Width::One),
        (Width::Four, Width::One),
    ] {
        let mut room = room(500);
        let mut saved = Saved::new(&mut room, 500, SEED).unwrap();
        saved.save(&team, TensorId(2), &x, 576, from).unwrap();
        let mut reference = Reference::new(TensorId(2), x.clone(), 576, from, 0);
        let chunks = saved.narrow(&team, TensorId(2), to).unwrap();
        assert_eq!(chunks as usize, reference.chunks.len());
        (0..reference.chunks.len()).for_each(|chunk| reference.shrink(chunk, to));
        reference.check(&saved, &team);
        assert_eq!(saved.narrow(&team, TensorId(2), to).unwrap(), 0);
    }
}

/// Saves, loads and releases while the limit falls and rises at any moment.
#[test]
fn budget_storms() {
    let teams = teams();
    for seed in 1..40 {
        let mut random = Random(seed);
        let mut room = room(600);
        let mut saved = Saved::new(&mut room, 300, SEED).unwrap();
        let importance: Vec<f32> = (0..8).map(|_| random.below(100) as f32).collect();
        let mut known: Vec<Reference> = Vec::new();
        let mut limit = 300;
        for step in 0..60 {
            let team = &teams[random.below(3) as usize];
            let tensor = TensorId(random.below(8) as u32);
            match random.below(8) {
                0..4 => {
                    let cols = [8, 100, 192, 576][random.below(4) as usize];
                    let rows = 1 + random.below(if cols > 100 { 700 } else { 200 }) as usize;
                    let width = Width::ALL[random.below(5) as usize];
                    let x = random.floats(rows * cols);
                    saved.begin_step(step);
                    match saved.save(team, tensor, &x, cols, width) {
                        Ok(()) => known.push(Reference::new(tensor, x, cols, width, step)),
                        Err(SaveError::Pool(PoolError::NoRoom { pages_needed, .. })) => {
                            let room = saved.make_room(team, pages_needed as u32, &importance);
                            if room.is_ok() {
                                saved.save(team, tensor, &x, cols, width).unwrap();
                                known.push(Reference::new(tensor, x, cols, width, step));
                            }
                        }
                        Err(SaveError::Pool(PoolError::Held(_))) => {}
                        Err(SaveError::Pool(PoolError::GroupsFull { .. })) => {}
                        Err(SaveError::Pool(PoolError::ChunksFull { .. })) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
                4 => {
                    if let Some(reference) = known.pop() {
                        saved.release(reference.tensor).unwrap();
                    }
                }
                5 => {
                    let held = known.iter().position(|k| k.tensor == tensor);
                    match held {
                        Some(at) => saved.release(known.remove(at).tensor).unwrap(),
                        None => assert!(saved.release(tensor).is_err()),
                    }
                }
                _ => {
                    limit = random.below(600) as u32;
                    let mut change = saved.set_limit(team, limit, &importance);
                    while let Err(error) = change {
                        assert!(matches!(error, SaveError::TooTight { .. }), "{error}");
                        let last = known.pop().expect("nothing is never too much");
                        saved.release(last.tensor).unwrap();
                        change = saved.settle(team, &importance);
                    }
                    assert_eq!(saved.pool().limit(), limit);
                    assert!(saved.resident_bytes().unwrap() <= limit as usize * PAGE);
                }
            }
            assert!(saved.pool().in_use() <= limit);
            for reference in &mut known {
                reference.follow(&saved);
                reference.check(&saved, team);
            }
        }
        saved.clear();
        assert_eq!(saved.pool().bytes_in_use(), 0);
        assert!(saved.peak_bytes() > 0);
    }
}

#[test]
fn memory_goes_back_to_the_system_when_the_budget_falls() {
    let team = Team::new(2).unwrap();
    let x = Random(2).floats(2048 * 2048);
    let capacity = Capacity::new(PAGE, 20_000, 8);
    let capacity = (0..8).fold(capacity, |c, _| c.and(2048, 2048));
    let mut room = Room::new(capacity).unwrap();
    let mut saved = Saved::new(&mut room, 20_000, SEED).unwrap();
    for tensor in 0..8 {
        saved
            .save(&team, TensorId(tensor), &x, 2048, Width::Eight)
            .unwrap();
    }
    assert_eq!(saved.pool().in_use(), 8 * 1024);
    // Half of it, in the middle of a step.
    let change = saved.set_limit(&team, 4 * 1024, &[1.0; 8]).unwrap();
    assert_eq!(
        (change.shrunk, change.returned),
        (8 * 128, 20_000 - 4 * 1024)
    );
    assert_eq!(saved.resident_bytes().unwrap(), 4 * 1024 * PAGE);
    for tensor in 0..8 {
        let mut reference = Reference::new(TensorId(tensor), x.clone(), 2048, Width::Eight, 0);
        reference.follow(&saved);
        reference.check(&saved, &team);
    }
    // And grows again at once.
    saved.set_limit(&team, 20_000, &[]).unwrap();
    saved.release(TensorId(7)).unwrap();
    saved
        .save(&team, TensorId(7), &x, 2048, Width::Eight)
        .unwrap();
    let peak = saved.pool().peak();
    assert_eq!(peak.pages, 8 * 1024);
    assert_eq!(saved.peak_bytes(), 8 * 1024 * 4096 + 8 * 2048 * 8 * 4);
}

#[test]
fn below_one_bit_is_an_error_and_releasing_is_the_way_out() {
    let team = Team::new(2).unwrap();
    let x = vec![0.5; 64 * 512];
    let mut room = room(100);
    let mut saved = Saved::new(&mut room, 40, SEED).unwrap();
    for tensor in 0..4 {
        saved
            .save(&team, TensorId(tensor), &x, 512, Width::Eight)
            .unwrap();
    }
    let tight = saved.set_limit(&team, 3, &[1.0; 4]).unwrap_err();
    assert_eq!(
        tight.to_string(),
        "activations take 4 pages at one bit, the budget leaves 3: recompute, shorten the sequences, \
         or raise the budget"
    );
    saved.release(TensorId(1)).unwrap();
    let change = saved.settle(&team, &[1.0; 4]).unwrap();
    assert_eq!((change.shrunk, saved.pool().limit()), (0, 3));
    let mut out = vec![0.0; x.len()];
    for tensor in [0, 2, 3] {
        saved.load(&team, TensorId(tensor), &mut out).unwrap();
        assert_eq!(out, x);
    }
    let gone = saved.load(&team, TensorId(1), &mut out).unwrap_err();
    assert_eq!(gone, PoolError::NotHeld(TensorId(1)));
}

#[test]
fn what_is_not_finite_is_named_and_not_saved() {
    let teams = teams();
    for team in &teams {
        let mut room = room(100);
        let mut saved = Saved::new(&mut room, 100, SEED).unwrap();
        let mut x = Random(3).floats(100 * 576);
        x[70 * 576 + 200] = f32::NAN;
        x[90 * 576 + 3] = f32::INFINITY;
        let error = saved
            .save(team, TensorId(5), &x, 576, Width::Four)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "activation 5, row 70, column 200: not finite: training has diverged (a lower --lr may \
             help) or a weight is not finite ('leanstream verify' finds it)"
        );
        assert_eq!(saved.pool().bytes_in_use(), 0);
        x[70 * 576 + 200] = 0.0;
        let error = saved
            .save(team, TensorId(5), &x, 576, Width::Four)
            .unwrap_err();
        assert!(matches!(
            error,
            SaveError::NotFinite {
                row: 90,
                col: 3,
                ..
            }
        ));
    }
}

/// Rows come in any order from whoever computes them, with ranges or without: the same codes.
#[test]
fn rows_from_their_producers() {
    let team = Team::new(3).unwrap();
    let (rows, cols) = (300, 1000);
    let x = Random(4).floats(rows * cols);
    let grouping = Grouping::of(cols);
    let mut room = room(2000);
    let mut saved = Saved::new(&mut room, 2000, SEED).unwrap();
    let reference = Reference::new(TensorId(1), x.clone(), cols, Width::Two, 0);
    for ranged in [false, true] {
        let filling = saved.begin(TensorId(1), rows, cols, Width::Two).unwrap();
        team.each(rows / 3, &|part, _| {
            let first = (rows / 3 - 1 - part) * 3;
            let x = &x[first * cols..(first + 3) * cols];
            let ranges: Vec<Range> = (0..grouping.groups(3))
                .map(|group| Range::of(&x[grouping.elements(group..group + 1)]))
                .collect();
            if ranged {
                filling.put_ranged(first, x, &ranges);
            } else {
                filling.put(first, x);
            }
        });
        filling.end().unwrap();
        reference.check(&saved, &team);
        let mut squares = [0.0; 2];
        saved
            .squared_ranges(TensorId(1), 298, &mut squares)
            .unwrap();
        for (row, got) in (298..300).zip(squares) {
            let want: f32 = (grouping.groups(row)..grouping.groups(row + 1))
                .map(|group| Range::of(&x[grouping.elements(group..group + 1)]))
                .map(|range| (range.max - range.min).powi(2))
                .sum();
            // The grid spans a little more than the range.
            assert!(got >= want && got < 1.05 * want, "{got} {want}");
        }
        saved.release(TensorId(1)).unwrap();
    }
    // Given up half-way, it is as if it had never begun.
    let filling = saved.begin(TensorId(1), rows, cols, Width::Two).unwrap();
    filling.put(0, &x[..cols]);
    drop(filling);
    assert_eq!(saved.pool().bytes_in_use(), 0);
}

#[test]
#[should_panic(expected = "row 7 is given once")]
fn a_row_given_twice() {
    let mut room = room(100);
    let mut saved = Saved::new(&mut room, 100, SEED).unwrap();
    let filling = saved.begin(TensorId(0), 10, 8, Width::Two).unwrap();
    filling.put(7, &[0.0; 8]);
    filling.put(6, &[0.0; 16]);
}

#[test]
#[should_panic(expected = "every row is given")]
fn a_row_that_is_missing() {
    let mut room = room(100);
    let mut saved = Saved::new(&mut room, 100, SEED).unwrap();
    let filling = saved.begin(TensorId(0), 10, 8, Width::Two).unwrap();
    filling.put(0, &[0.0; 72]);
    let _ = filling.end();
}
