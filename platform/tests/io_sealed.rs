//! After start nothing is allocated and the arena costs what it says. Alone in its program, since
//! the allocator counts every thread.

use std::io::Write;
use std::sync::Arc;

use leanstream::alloc::{Count, Counting};
use leanstream::arena::Arena;
use leanstream::budget::Resident;
use leanstream::io::fault::FaultPlan;
use leanstream::io::throttle::Limits;
use leanstream::io::{Backend, Direct, Kind, Options, Source};
use leanstream_core::port::{ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, FileId, PieceId, ReadId, SlotId};

#[global_allocator]
static ALLOC: Counting = Counting::new();

const SLOT: usize = 256 << 10;
const DEPTH: u16 = 8;
/// More than 16 MiB, so that huge pages are asked for, and no multiple of 2 MiB.
const SLOTS: u32 = 75;
const FILE_BYTES: usize = 150 * SLOT + 4321;

/// Keep `DEPTH` reads in flight over the whole file and one that is past its end.
fn read_whole(backend: &mut Backend) -> (usize, usize) {
    let align = backend.geometry().align as usize;
    let pieces = FILE_BYTES.div_ceil(SLOT) + 1;
    let (mut next, mut filled, mut failed) = (0, 0, 0);
    let mut free: [bool; DEPTH as usize] = [true; DEPTH as usize];
    while filled + failed < pieces {
        for id in 0..DEPTH {
            if next < pieces && std::mem::take(&mut free[usize::from(id)]) {
                let left = FILE_BYTES.saturating_sub(next * SLOT);
                backend.start(ReadCommand {
                    read: ReadId(id),
                    // Each read has slots of its own.
                    slot: SlotId(u32::from(id) + (next as u32 % 9) * u32::from(DEPTH)),
                    piece: PieceId(next as u32),
                    extent: Extent {
                        file: FileId(0),
                        offset: (next * SLOT) as u64,
                        len: left.min(SLOT).next_multiple_of(align).max(align) as u32,
                    },
                });
                next += 1;
            }
        }
        backend.wait(10_000);
        while let Some((read, outcome)) = backend.poll() {
            free[usize::from(read.0)] = true;
            match outcome {
                ReadOutcome::Filled => filled += 1,
                _ => failed += 1,
            }
        }
        assert!(backend.take_notice().is_none() || backend.stats().refused > 0);
    }
    (filled, failed)
}

#[test]
fn nothing_is_allocated_after_start() {
    let path = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join(format!("leanstream-sealed-{}", std::process::id()));
    let mut file = std::fs::File::create(&path).unwrap();
    file.write_all(&vec![7u8; FILE_BYTES]).unwrap();
    file.sync_all().unwrap();

    // The canary: an allocation is seen.
    ALLOC.seal();
    drop(std::hint::black_box(Box::new(1u8)));
    ALLOC.unseal();
    assert_eq!(ALLOC.since_seal(), Count { calls: 1, bytes: 1 });

    let kernel = FaultPlan::parse("short=20%,interrupt=10%,refuse_direct_at=60").unwrap();
    let above = FaultPlan::parse("fail=5%,corrupt=5%,flip=5%,late=5%,late_us=100").unwrap();
    for kind in [Kind::Auto, Kind::Pread] {
        for direct in [Direct::Auto, Direct::Off] {
            for faults in [None, Some(kernel), Some(above)] {
                let options = Options {
                    kind,
                    depth: DEPTH,
                    faults,
                    throttle: faults.map(|_| Limits::parse("8G,10us").unwrap()),
                    ..Options::default()
                };
                let source = Arc::new(Source::open(&[&path], direct).unwrap());
                let before = Resident::read().unwrap();
                let arena = Arc::new(Arena::new(SLOTS, SLOT).unwrap());
                let mut backend =
                    Backend::new(Arc::clone(&source), Arc::clone(&arena), &options).unwrap();
                while backend.take_notice().is_some() {}

                ALLOC.seal();
                let (filled, failed) = read_whole(&mut backend);
                let resident = Resident::read();
                ALLOC.unseal();

                assert_eq!(ALLOC.since_seal(), Count::default(), "{options:?}");
                assert_eq!(filled + failed, 152);
                match faults == Some(above) {
                    true => assert!(failed > 1),
                    false => assert_eq!(failed, 1, "the one past the end"),
                }
                // Beside the arena: stacks, the ring, this test's page tables.
                let grown = resident.unwrap().anon.saturating_sub(before.anon);
                let most = arena.total_bytes() as u64 + (1 << 20);
                assert!(grown <= most, "{grown} bytes for {most}: {options:?}");
            }
        }
    }
    std::fs::remove_file(&path).unwrap();
}
