//! The page pool against a second account of what lies where.

#[path = "common/act.rs"]
mod act;

use act::{Owned, Storm};
use leanstream_core::act::Width;
use leanstream_core::act::error::PoolError;
use leanstream_core::act::pool::{PageId, Pool, TensorId};
use leanstream_core::act::tables::{Shape, Sizes};

const SIZES: Sizes = Sizes {
    pages: 64,
    chunks: 16,
    tensors: 4,
};

/// Chunks of as many elements as a page of 64 bytes has bits.
fn shape(chunks: u64) -> Shape {
    Shape {
        elements: 512 * chunks,
        chunk_elements: 512,
        groups: 2 * chunks as u32,
    }
}

fn with(limit: u32, f: impl FnOnce(&mut Storm<'_>)) {
    let mut owned = Owned::new(SIZES);
    let pool = Pool::new(64, limit, 32, owned.lend()).unwrap();
    f(&mut Storm::new(pool, SIZES, 32));
}

#[test]
fn storms_from_seeds() {
    let mut state = 1u64;
    for seed in 0..3000 {
        let data: Vec<u8> = (0..40 + seed % 900)
            .map(|_| {
                state = state
                    .wrapping_mul(6364136223846793005)
                    .wrapping_add(1442695040888963407);
                (state >> 40) as u8
            })
            .collect();
        act::run(&data);
    }
}

/// Two tensors, every pair of widths, every limit: what fits is kept, and never more is in use.
#[test]
fn every_limit_on_two_tensors() {
    for first in Width::CODES {
        for second in Width::CODES {
            for limit in 0..=32 {
                with(64, |storm| {
                    storm.take(TensorId(0), shape(2), first).unwrap();
                    storm.take(TensorId(1), shape(2), second).unwrap();
                    storm.set_limit(limit);
                    let fits = storm.squeeze(&[2.0, 1.0]);
                    storm.check();
                    assert_eq!(fits, limit >= 4, "a page a chunk is the least");
                    if !fits {
                        storm.release(TensorId(1));
                    }
                    while storm.step_move().is_some() {
                        storm.check();
                    }
                    storm.trim();
                    storm.check();
                    if storm.pool.excess() == 0 {
                        assert_eq!(storm.pool.limit(), limit);
                    }
                });
            }
        }
    }
}

#[test]
fn a_chunk_gives_back_half_its_pages_with_each_step() {
    with(64, |storm| {
        storm.take(TensorId(3), shape(3), Width::Eight).unwrap();
        assert_eq!(storm.pool.in_use(), 24);
        for (to, left) in [(Width::Four, 20), (Width::Two, 18), (Width::One, 17)] {
            storm.shrink(TensorId(3), 1, to).unwrap();
            storm.check();
            assert_eq!(storm.pool.in_use(), left);
        }
        assert!(storm.shrink(TensorId(3), 1, Width::One).is_none());
        // Several steps at once end the same.
        storm.shrink(TensorId(3), 0, Width::One).unwrap();
        storm.check();
        assert_eq!(storm.pool.in_use(), 10);
    });
}

#[test]
fn a_lower_limit_moves_what_lies_past_it() {
    with(64, |storm| {
        storm.take(TensorId(0), shape(3), Width::Eight).unwrap();
        storm.take(TensorId(1), shape(1), Width::Four).unwrap();
        storm.release(TensorId(0));
        storm.set_limit(6);
        assert_eq!(storm.pool.limit(), 64, "memory is still there");
        storm.trim();
        assert_eq!(storm.pool.limit(), 28, "nothing lies past it");
        let mut moves = 0;
        while let Some(step) = storm.step_move() {
            assert_eq!(step.from, PageId(27 - moves));
            moves += 1;
            storm.check();
        }
        assert_eq!(moves, 4);
        storm.trim();
        assert_eq!(storm.pool.limit(), 6);
        // Growth is at once.
        storm.set_limit(64);
        storm.take(TensorId(0), shape(5), Width::Eight).unwrap();
        storm.check();
    });
}

#[test]
fn floats_stay_as_they_are() {
    with(64, |storm| {
        storm.take(TensorId(0), shape(1), Width::F32).unwrap();
        storm.take(TensorId(1), shape(1), Width::Bf16).unwrap();
        assert_eq!(storm.pool.in_use(), 48);
        for to in Width::ALL {
            assert!(storm.shrink(TensorId(0), 0, to).is_none());
        }
        storm.set_limit(47);
        assert!(!storm.squeeze(&[]));
        assert_eq!(storm.pool.excess(), 1);
    });
}

#[test]
fn refusals_change_nothing_and_say_what_to_do() {
    with(9, |storm| {
        storm.take(TensorId(0), shape(1), Width::Eight).unwrap();
        let mut said = Vec::new();
        let mut refused = |error: PoolError| said.push(error.to_string());
        for (tensor, shape, width) in [
            (1, shape(1), Width::Two),
            (0, shape(1), Width::One),
            (1, shape(0), Width::One),
        ] {
            refused(storm.take(TensorId(tensor), shape, width).unwrap_err());
        }
        refused(
            storm
                .pool
                .take(TensorId(4), shape(1), Width::One)
                .unwrap_err(),
        );
        let pool = &mut storm.pool;
        refused(pool.width(TensorId(0), 1).unwrap_err());
        refused(pool.release(TensorId(2)).unwrap_err());
        refused(pool.shrink(TensorId(0), 0, Width::F32).unwrap_err());
        refused(pool.set_limit(65).unwrap_err());
        storm.check();
        assert_eq!(
            said,
            [
                "activation 1: takes 2 pages, 1 are free: fewer bits, recompute it, or raise the \
                 budget",
                "activation 0: saved twice",
                "activation 1: impossible shape",
                "activation 4: there are 4",
                "activation 0: chunk 1 of 1",
                "activation 2: not saved",
                "a chunk of 8 bits can't shrink to f32",
                "a limit of 65 pages, in a pool made for 64: start again with the larger budget",
            ]
        );
    });
    with(64, |storm| {
        let wide = |groups, elements| Shape {
            elements,
            chunk_elements: 1,
            groups,
        };
        let full = storm.take(TensorId(0), wide(33, 1), Width::One);
        assert!(matches!(full, Err(PoolError::GroupsFull { .. })));
        let full = storm.take(TensorId(0), wide(32, 17), Width::One);
        assert!(matches!(full, Err(PoolError::ChunksFull { .. })));
        storm.take(TensorId(0), wide(32, 16), Width::One).unwrap();
        storm.check();
    });
}

/// A backward pass that releases in another order finds every entry again once it is through.
#[test]
fn entries_released_from_below_come_back_with_the_one_above() {
    with(64, |storm| {
        for tensor in 0..4 {
            storm.take(TensorId(tensor), shape(4), Width::One).unwrap();
        }
        for tensor in [1, 2] {
            storm.release(TensorId(tensor));
            storm.check();
        }
        // Its id is free, its entries are not yet.
        let full = storm.take(TensorId(1), shape(1), Width::One);
        assert!(matches!(full, Err(PoolError::ChunksFull { .. })));
        storm.release(TensorId(3));
        storm.take(TensorId(1), shape(12), Width::One).unwrap();
        storm.check();
    });
}

#[test]
fn peaks_are_of_pages_and_metadata_at_once() {
    with(64, |storm| {
        storm.take(TensorId(0), shape(2), Width::Two).unwrap();
        storm.take(TensorId(1), shape(4), Width::One).unwrap();
        storm.release(TensorId(1));
        storm.release(TensorId(0));
        let peak = storm.pool.peak();
        assert_eq!((peak.pages, peak.groups), (8, 12));
        assert_eq!(peak.bytes, 8 * 64 + 12 * 4);
        storm.pool.reset_peak();
        assert_eq!(storm.pool.peak().bytes, 0);
    });
}
