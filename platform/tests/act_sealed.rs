//! A step of saving, shrinking and loading allocates nothing, and gives memory back when it is told to.
//! Alone in its program, since the allocator and the kernel count every thread.

use leanstream::alloc::Counting;
use leanstream::tune::act::{Capacity, Room, Saved};
use leanstream::tune::team::Team;
use leanstream_core::act::Width;
use leanstream_core::act::pool::TensorId;

#[global_allocator]
static ALLOC: Counting = Counting::new();

const ROWS: usize = 512;
const COLS: usize = 2048;
const TENSORS: u32 = 32;

/// Bytes of this process that are in memory, as the kernel counts them.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("Linux");
    let pages = statm
        .split(' ')
        .nth(1)
        .and_then(|n| n.parse::<usize>().ok());
    pages.expect("a number") * rustix::param::page_size()
}

#[test]
fn a_step_allocates_nothing_and_memory_falls_with_the_budget() {
    let team = Team::new(2).unwrap();
    let x: Vec<f32> = (0..ROWS * COLS).map(|i| (i as f32 * 0.7).sin()).collect();
    let mut out = vec![0.0; ROWS * COLS];
    let mut squares = vec![0.0; ROWS];
    let page_bytes = rustix::param::page_size().max(4096);
    let bytes = (TENSORS as usize * ROWS * COLS).next_multiple_of(page_bytes);
    // Eight bits an element.
    let pages = (bytes / page_bytes) as u32;
    let capacity = Capacity::new(page_bytes, pages, TENSORS);
    let capacity = (0..TENSORS).fold(capacity, |c, _| c.and(ROWS, COLS));
    let mut room = Room::new(capacity).unwrap();
    let mut saved = Saved::new(&mut room, pages, 1).unwrap();
    let importance = [1.0; TENSORS as usize];

    ALLOC.seal();
    for step in 0..2 {
        saved.begin_step(step);
        saved.set_limit(&team, pages, &importance).unwrap();
        for tensor in 0..TENSORS {
            saved
                .save(&team, TensorId(tensor), &x, COLS, Width::Eight)
                .unwrap();
        }
        saved.set_limit(&team, pages / 2, &importance).unwrap();
        for tensor in (0..TENSORS).rev() {
            let tensor = TensorId(tensor);
            saved.load(&team, tensor, &mut out).unwrap();
            saved.squared_ranges(tensor, 0, &mut squares).unwrap();
            saved.release(tensor).unwrap();
        }
    }
    ALLOC.unseal();
    assert_eq!(ALLOC.since_seal().calls, 0);

    saved.set_limit(&team, pages, &importance).unwrap();
    for tensor in 0..TENSORS {
        saved
            .save(&team, TensorId(tensor), &x, COLS, Width::Eight)
            .unwrap();
    }
    let full = resident_bytes();
    assert!(full > bytes);
    for divisor in [2, 4, 8] {
        saved
            .set_limit(&team, pages / divisor, &importance)
            .unwrap();
        let (now, fell) = (bytes / divisor as usize, bytes - bytes / divisor as usize);
        assert_eq!(saved.resident_bytes().unwrap(), now);
        let seen = full - resident_bytes();
        assert!(seen.abs_diff(fell) < 1 << 20, "{seen} of {fell}");
    }
}
