//! Every way of reading gives the bytes of the file: backends x depths x direct or not x file
//! systems x lengths, undisturbed and with the kernel misbehaving, against `std::fs::read`.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use leanstream::arena::{Arena, Lease};
use leanstream::io::fault::FaultPlan;
use leanstream::io::throttle::Limits;
use leanstream::io::{Backend, Cause, Direct, Errno, Kind, Notice, Options, Source};
use leanstream_core::port::{ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, FileId, PieceId, ReadId, SlotId};

const SLOT: usize = 64 << 10;

/// A file that is gone when the test is over.
struct TempFile(PathBuf);

impl TempFile {
    /// `len` bytes, each telling where it is, in `dir`.
    fn new(dir: &Path, name: &str, len: usize) -> Self {
        // Tests run beside each other, and several ask for a probe.
        static FILES: AtomicU32 = AtomicU32::new(0);
        let number = FILES.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("leanstream-{}-{number}-{name}", std::process::id()));
        let bytes: Vec<u8> = (0..len as u64).map(byte_at).collect();
        let mut file = File::create(&path).unwrap();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

/// Differs between neighbours, blocks and files of different shift.
fn byte_at(at: u64) -> u8 {
    (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8
}

/// Where the build puts temporary files: a disk, most often. And tmpfs, where there is one.
fn dirs() -> Vec<PathBuf> {
    let shm = PathBuf::from("/dev/shm");
    let mut dirs = vec![PathBuf::from(env!("CARGO_TARGET_TMPDIR"))];
    dirs.extend(shm.is_dir().then_some(shm));
    dirs
}

/// The backends that this machine has.
fn kinds() -> Vec<Kind> {
    let file = TempFile::new(&dirs()[0], "probe", 5000);
    let source = Arc::new(Source::open(&[&file.0], Direct::Off).unwrap());
    let options = Options {
        kind: Kind::Uring,
        ..Options::default()
    };
    match Backend::new(source, Arc::new(Arena::new(1, 4096).unwrap()), &options) {
        Ok(_) => vec![Kind::Uring, Kind::Pread],
        Err(refused) => {
            eprintln!("only threads are tested here: {refused}");
            vec![Kind::Pread]
        }
    }
}

/// All pieces of a file: slot-sized, except for the last.
fn extents(source: &Source) -> Vec<Extent> {
    let align = u64::from(source.align());
    let mut all = Vec::new();
    for (file, number) in source.files().iter().zip(0..) {
        for offset in (0..file.len()).step_by(SLOT) {
            let len = (file.len() - offset).min(SLOT as u64);
            all.push(Extent {
                file: FileId(number),
                offset,
                len: len.next_multiple_of(align) as u32,
            });
        }
    }
    all
}

/// Read `extents` in order with all slots in flight; give each outcome and, when filled, hand the
/// slot's bytes to `seen`.
fn read_all(
    backend: &mut Backend,
    arena: &Arena,
    extents: &[Extent],
    mut seen: impl FnMut(&Extent, &[u8]),
) -> Vec<ReadOutcome> {
    let depth = usize::from(backend.geometry().reads_max).min(arena.slots() as usize);
    let mut outcomes = vec![None; extents.len()];
    let mut flying = vec![None; depth];
    let (mut next, mut ended) = (0, 0);
    while ended < extents.len() {
        for (slot, flight) in flying.iter_mut().enumerate() {
            if flight.is_none() && next < extents.len() {
                *flight = Some(next);
                backend.start(ReadCommand {
                    read: ReadId(slot as u16),
                    slot: SlotId(slot as u32),
                    piece: PieceId(next as u32),
                    extent: extents[next],
                });
                next += 1;
            }
        }
        while let Some((read, outcome)) = backend.poll() {
            let index = flying[usize::from(read.0)].take();
            let index: usize = index.expect("each read ends once");
            outcomes[index] = Some(outcome);
            ended += 1;
            let slot = SlotId(read.0.into());
            if outcome == ReadOutcome::Filled {
                seen(&extents[index], &arena.bytes(slot));
            } else {
                assert_eq!(arena.lease(slot), Lease::Free, "a failed read's slot");
            }
            let reason = backend.reason(&extents[index]);
            assert_eq!(
                reason.is_some(),
                outcome == ReadOutcome::Failed,
                "{reason:?}"
            );
        }
        if flying.iter().any(Option::is_some) {
            backend.wait(1_000_000);
        }
    }
    outcomes.into_iter().map(Option::unwrap).collect()
}

/// Read whole files and compare. Slots hold other bytes before, so missing ones show.
fn compare(backend: &mut Backend, arena: &Arena, contents: &[Vec<u8>], what: &str) {
    let extents = extents(backend.source());
    let mut bytes = 0;
    let outcomes = read_all(backend, arena, &extents, |extent, slot| {
        let whole = &contents[usize::from(extent.file.0)];
        let start = extent.offset as usize;
        let end = whole.len().min(start + extent.len as usize);
        assert!(
            slot[..end - start] == whole[start..end],
            "{what}: {extent:?}"
        );
        bytes += end - start;
    });
    assert!(outcomes.iter().all(|&o| o == ReadOutcome::Filled), "{what}");
    let all: usize = contents.iter().map(Vec::len).sum();
    assert_eq!(bytes, all, "{what}");
}

fn open(source: &Arc<Source>, options: &Options) -> (Backend, Arc<Arena>) {
    let arena = Arc::new(Arena::new(options.depth.into(), SLOT).unwrap());
    let backend = Backend::new(Arc::clone(source), Arc::clone(&arena), options).unwrap();
    (backend, arena)
}

#[test]
fn every_way_gives_the_same_bytes() {
    let lengths = [1, 511, 512, 4096, 5000, SLOT, SLOT + 1, 7 * SLOT + 4097];
    for dir in dirs() {
        let files: Vec<TempFile> = lengths
            .iter()
            .map(|len| TempFile::new(&dir, &format!("grid{len}"), *len))
            .collect();
        let paths: Vec<&PathBuf> = files.iter().map(|f| &f.0).collect();
        let contents: Vec<Vec<u8>> = paths.iter().map(|p| std::fs::read(p).unwrap()).collect();
        for kind in kinds() {
            for direct in [Direct::Auto, Direct::Off] {
                let source = Arc::new(Source::open(&paths, direct).unwrap());
                for (depth, register) in [(1, true), (2, false), (7, true), (32, true)] {
                    let options = Options {
                        kind,
                        depth,
                        register,
                        ..Options::default()
                    };
                    let what = format!("{} {options:?} {direct:?}", dir.display());
                    let (mut backend, arena) = open(&source, &options);
                    compare(&mut backend, &arena, &contents, &what);
                    // Again, into slots that hold other pieces now.
                    compare(&mut backend, &arena, &contents, &what);
                    let stats = backend.stats();
                    assert_eq!(stats.failed, 0, "{what}");
                    assert_eq!(stats.reads as usize, 2 * extents(&source).len(), "{what}");
                    if direct == Direct::Off {
                        assert!(backend.io_mode().ends_with("+buffered"), "{what}");
                        assert_eq!(stats.buffered, stats.reads, "{what}");
                        assert_eq!(backend.take_notice(), None, "{what}");
                    }
                }
            }
        }
    }
}

/// The kernel gives halves, interrupts, and refuses O_DIRECT in mid-run: nobody may notice.
#[test]
fn a_misbehaving_kernel_is_not_noticed() {
    let file = TempFile::new(&dirs()[0], "kernel", 40 * SLOT + 777);
    let contents = [std::fs::read(&file.0).unwrap()];
    for kind in kinds() {
        for direct in [Direct::Auto, Direct::Off] {
            for seed in 0..4 {
                let source = Arc::new(Source::open(&[&file.0], direct).unwrap());
                let plan = FaultPlan::parse(&format!("seed={seed},short=40%,interrupt=30%"));
                let options = Options {
                    kind,
                    depth: 5,
                    faults: Some(plan.unwrap()),
                    ..Options::default()
                };
                let what = format!("{options:?} {direct:?}");
                let (mut backend, arena) = open(&source, &options);
                compare(&mut backend, &arena, &contents, &what);
                let stats = backend.stats();
                assert!(stats.short > 0 && stats.retries > 0, "{what}: {stats:?}");
            }
        }
    }
}

/// O_DIRECT that works at open and is refused with EINVAL later, as some SD card readers do.
#[test]
fn refused_in_mid_run_goes_on_through_the_page_cache() {
    let file = TempFile::new(&dirs()[0], "refuse", 40 * SLOT + 777);
    let contents = [std::fs::read(&file.0).unwrap()];
    for kind in kinds() {
        let source = Arc::new(Source::open(&[&file.0], Direct::Auto).unwrap());
        if !source.files()[0].is_direct() {
            eprintln!("no O_DIRECT here to be refused: {}", source.mode());
            return;
        }
        let options = Options {
            kind,
            depth: 4,
            faults: Some(FaultPlan::parse("refuse_direct_at=10,short=30%").unwrap()),
            ..Options::default()
        };
        let (mut backend, arena) = open(&source, &options);
        assert!(backend.io_mode().ends_with("+direct"));
        assert_eq!(backend.take_notice(), None);
        compare(&mut backend, &arena, &contents, "refused");
        assert!(backend.io_mode().ends_with("+buffered(EINVAL)"));
        let notice = backend.take_notice();
        let expected = Notice::BufferedAtRead {
            file: FileId(0),
            errno: Errno(libc::EINVAL),
        };
        assert_eq!(notice, Some(expected));
        assert_eq!(backend.take_notice(), None, "it is said once");
        let stats = backend.stats();
        assert!(stats.refused >= 1 && stats.refused <= 4, "{stats:?}");
        assert!(stats.buffered >= 30, "{stats:?}");
    }
}

#[test]
fn what_is_not_in_the_file_fails_with_a_reason() {
    let file = TempFile::new(&dirs()[0], "end", 10_000);
    for kind in kinds() {
        let source = Arc::new(Source::open(&[&file.0], Direct::Auto).unwrap());
        let options = Options {
            kind,
            depth: 2,
            ..Options::default()
        };
        let (mut backend, arena) = open(&source, &options);
        let extent = |offset, len| Extent {
            file: FileId(0),
            offset,
            len,
        };
        let far = [
            extent(12_288, 4096),
            extent(1 << 40, 4096),
            extent(u64::MAX - 4095, 4096),
            // One unit more than the file's last.
            extent(8192, 8192),
            extent(0, 0),
        ];
        for bad in far {
            let good = extent(8192, 1808u32.next_multiple_of(source.align()));
            let outcomes = read_all(&mut backend, &arena, &[bad, good], |_, _| {});
            assert_eq!(outcomes, [ReadOutcome::Failed, ReadOutcome::Filled]);
            let error = backend.reason(&bad).unwrap();
            assert_eq!((error.offset, error.len), (bad.offset, bad.len));
            assert_eq!(error.cause, Cause::PastEnd { file_len: 10_000 });
            let said = backend.explain(&error);
            assert!(
                said.contains("leanstream-") && said.contains("10000"),
                "{said}"
            );
        }
    }
}

#[test]
fn a_file_cut_while_in_use_fails() {
    for kind in kinds() {
        for direct in [Direct::Auto, Direct::Off] {
            let file = TempFile::new(&dirs()[0], &format!("cut{kind:?}{direct:?}"), 3 * SLOT);
            let source = Arc::new(Source::open(&[&file.0], direct).unwrap());
            let options = Options {
                kind,
                depth: 1,
                ..Options::default()
            };
            let (mut backend, arena) = open(&source, &options);
            let cut = File::options().write(true).open(&file.0).unwrap();
            cut.set_len(SLOT as u64 + 100).unwrap();
            let all = extents(&source);
            let outcomes = read_all(&mut backend, &arena, &all, |_, _| {});
            let (ok, no) = (ReadOutcome::Filled, ReadOutcome::Failed);
            assert_eq!(outcomes, [ok, no, no], "{kind:?} {direct:?}");
            let cause = backend.reason(&all[2]).unwrap().cause;
            assert!(matches!(cause, Cause::Truncated { .. }), "{cause:?}");
        }
    }
}

#[test]
fn injected_outcomes_are_the_same_each_time_and_tell_why() {
    let file = TempFile::new(&dirs()[0], "inject", 60 * SLOT);
    let whole = std::fs::read(&file.0).unwrap();
    let text = "seed=3,fail=10%,corrupt=10%,flip=10%,late=20%,late_us=300,fail_at=41";
    let mut first: Option<(Vec<ReadOutcome>, Vec<u64>)> = None;
    for kind in kinds() {
        for depth in [1, 6] {
            let source = Arc::new(Source::open(&[&file.0], Direct::Auto).unwrap());
            let options = Options {
                kind,
                depth,
                faults: Some(FaultPlan::parse(text).unwrap()),
                throttle: Some(Limits::parse("4G,20us").unwrap()),
                ..Options::default()
            };
            let (mut backend, arena) = open(&source, &options);
            let mut flipped = Vec::new();
            let outcomes = read_all(&mut backend, &arena, &extents(&source), |extent, slot| {
                let start = extent.offset as usize;
                let pairs = slot.iter().zip(&whole[start..start + SLOT]);
                let bits: u32 = pairs.map(|(a, b)| (a ^ b).count_ones()).sum();
                assert!(bits <= 1);
                flipped.extend((bits == 1).then_some(extent.offset));
            });
            flipped.sort_unstable();
            let count = |o| outcomes.iter().filter(|&&x| x == o).count();
            assert!(count(ReadOutcome::Failed) > 1 && count(ReadOutcome::Corrupt) > 1);
            assert!(!flipped.is_empty());
            assert_eq!(outcomes[41], ReadOutcome::Failed);
            let now = (outcomes, flipped);
            assert_eq!(
                *first.get_or_insert_with(|| now.clone()),
                now,
                "{kind:?} {depth}"
            );
        }
    }
}

#[test]
fn each_of_many_failed_reads_has_its_own_reason() {
    let file = TempFile::new(&dirs()[0], "reasons", 4 * SLOT);
    for kind in kinds() {
        let source = Arc::new(Source::open(&[&file.0], Direct::Auto).unwrap());
        let options = Options {
            kind,
            depth: 4,
            faults: Some(FaultPlan::parse("fail=100%").unwrap()),
            ..Options::default()
        };
        let (mut backend, arena) = open(&source, &options);
        let mut all = extents(&source);
        // Not in the file: this one fails beneath the injector, and first.
        all[0].offset = 1 << 40;
        read_all(&mut backend, &arena, &all, |_, _| {});
        let cause = |extent| backend.reason(extent).unwrap().cause;
        let file_len = 4 * SLOT as u64;
        assert_eq!(cause(&all[0]), Cause::PastEnd { file_len });
        for extent in &all[1..] {
            assert_eq!(cause(extent), Cause::Injected);
        }
    }
}

/// A backend dropped with reads in flight gives its slots back and leaves the arena usable.
#[test]
fn dropping_with_reads_in_flight() {
    let file = TempFile::new(&dirs()[0], "drop", 32 * SLOT);
    let source = Arc::new(Source::open(&[&file.0], Direct::Auto).unwrap());
    for kind in kinds() {
        let options = Options {
            kind,
            depth: 32,
            ..Options::default()
        };
        for _ in 0..20 {
            let (mut backend, arena) = open(&source, &options);
            for (i, extent) in (0..).zip(extents(&source)) {
                backend.start(ReadCommand {
                    read: ReadId(i),
                    slot: SlotId(i.into()),
                    piece: PieceId(0),
                    extent,
                });
            }
            drop(backend);
            for slot in 0..32 {
                assert_ne!(arena.lease(SlotId(slot)), Lease::Filling, "{kind:?}");
            }
            assert_eq!(Arc::strong_count(&arena), 1, "nobody is left who writes");
        }
    }
}

#[test]
#[should_panic(expected = "isn't aligned")]
fn unaligned_reads_are_a_bug() {
    let file = TempFile::new(&dirs()[0], "unaligned", SLOT);
    let source = Arc::new(Source::open(&[&file.0], Direct::Auto).unwrap());
    let (mut backend, _arena) = open(&source, &Options::default());
    backend.start(ReadCommand {
        read: ReadId(0),
        slot: SlotId(0),
        piece: PieceId(0),
        extent: Extent {
            file: FileId(0),
            offset: 100,
            len: 4096,
        },
    });
}
