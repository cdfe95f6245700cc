//! What containers and old kernels refuse, tried for real: a seccomp filter on the test's own thread
//! (and the threads it starts) answers the system calls as they would.

#![cfg(target_endian = "little")]

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use leanstream::arena::Arena;
use leanstream::io::{Backend, Direct, Errno, Kind, Notice, OpenError, Options, Source};
use leanstream_core::port::{ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, FileId, PieceId, ReadId, SlotId};

/// Which calls are refused.
#[derive(Clone, Copy)]
enum Which {
    All,
    /// Those whose argument of this number (its lower half) is this value.
    ArgIs(u32, u32),
    /// Those whose argument of this number has any of these bits.
    ArgHas(u32, u32),
}

/// From now on this thread gets `errno` for the system call.
fn refuse(call: libc::c_long, which: Which, errno: i32) {
    let step = |code: u32, k: u32| libc::sock_filter {
        code: code as u16,
        jt: 0,
        jf: 0,
        k,
    };
    let jump = |test: u32, k: u32, jf: u8| libc::sock_filter {
        jf,
        ..step(libc::BPF_JMP | test | libc::BPF_K, k)
    };
    let load = |offset: u32| step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, offset);
    // struct seccomp_data: number, architecture, instruction pointer, then 8 bytes an argument.
    let argument = |number: u32| load(16 + 8 * number);
    let skipped = if matches!(which, Which::All) { 1 } else { 3 };
    let mut filter = vec![load(0), jump(libc::BPF_JEQ, call as u32, skipped)];
    match which {
        Which::All => {}
        Which::ArgIs(number, value) => {
            filter.extend([argument(number), jump(libc::BPF_JEQ, value, 1)]);
        }
        Which::ArgHas(number, bits) => {
            filter.extend([argument(number), jump(libc::BPF_JSET, bits, 1)]);
        }
    }
    filter.push(step(
        libc::BPF_RET | libc::BPF_K,
        libc::SECCOMP_RET_ERRNO | errno as u32,
    ));
    filter.push(step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: `program` and its filter live until both calls have returned; they change only which
    // system calls this thread may make.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, mode, &program), 0);
    }
}

/// Run in a thread that ends with its filters.
fn apart(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let ended = scope.spawn(test).join();
        ended.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

struct TempFile(PathBuf, Vec<u8>);

impl TempFile {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
            .join(format!("leanstream-{}-{name}", std::process::id()));
        let bytes: Vec<u8> = (0..300_000u32).map(|i| (i / 7) as u8).collect();
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(&bytes).unwrap();
        file.sync_all().unwrap();
        Self(path, bytes)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        std::fs::remove_file(&self.0).unwrap();
    }
}

/// Open and read the file in one slot a piece; the bytes must be right.
fn open_and_read(file: &TempFile, kind: Kind) -> Result<(Backend, Vec<Notice>), OpenError> {
    let slot = 65_536;
    let source = Arc::new(Source::open(&[&file.0], Direct::Auto)?);
    let arena = Arc::new(Arena::new(5, slot).unwrap());
    let options = Options {
        kind,
        ..Options::default()
    };
    let mut backend = Backend::new(Arc::clone(&source), Arc::clone(&arena), &options)?;
    let notices = std::iter::from_fn(|| backend.take_notice()).collect();
    for (i, piece) in file.1.chunks(slot).enumerate() {
        backend.start(ReadCommand {
            read: ReadId(i as u16),
            slot: SlotId(i as u32),
            piece: PieceId(0),
            extent: Extent {
                file: FileId(0),
                offset: (i * slot) as u64,
                len: piece.len().next_multiple_of(source.align() as usize) as u32,
            },
        });
    }
    let mut ended = 0;
    while ended < 5 {
        backend.wait(1_000_000);
        while let Some((_, outcome)) = backend.poll() {
            assert_eq!(outcome, ReadOutcome::Filled);
            ended += 1;
        }
    }
    for (i, piece) in file.1.chunks(slot).enumerate() {
        assert_eq!(arena.bytes(SlotId(i as u32))[..piece.len()], *piece);
    }
    Ok((backend, notices))
}

fn has_uring(file: &TempFile) -> bool {
    let has = open_and_read(file, Kind::Uring).is_ok();
    if !has {
        eprintln!("no io_uring here to be refused");
    }
    has
}

#[test]
fn no_ring_may_be_made() {
    let file = TempFile::new("setup");
    for errno in [libc::EPERM, libc::ENOSYS, libc::ENOMEM] {
        apart(|| {
            refuse(libc::SYS_io_uring_setup, Which::All, errno);
            let (backend, notices) = open_and_read(&file, Kind::Auto).unwrap();
            assert!(backend.io_mode().starts_with("pread+"));
            let errno = Errno(errno);
            assert!(notices.contains(&Notice::NoRing { errno }), "{notices:?}");
            let asked = open_and_read(&file, Kind::Uring).unwrap_err();
            let said = asked.to_string();
            assert!(said.contains(errno.name().unwrap()), "{said}");
        });
    }
}

#[test]
fn a_ring_may_be_made_but_not_used() {
    let file = TempFile::new("enter");
    if !has_uring(&file) {
        return;
    }
    apart(|| {
        refuse(libc::SYS_io_uring_enter, Which::All, libc::EPERM);
        let (backend, notices) = open_and_read(&file, Kind::Auto).unwrap();
        assert!(backend.io_mode().starts_with("pread+"));
        let errno = Errno(libc::EPERM);
        assert!(notices.contains(&Notice::NoRing { errno }), "{notices:?}");
    });
}

#[test]
fn nothing_may_be_registered() {
    let file = TempFile::new("register");
    if !has_uring(&file) {
        return;
    }
    apart(|| {
        let (backend, _) = open_and_read(&file, Kind::Uring).unwrap();
        assert!(backend.is_registered() || rustix::process::getuid().as_raw() != 0);
        // IORING_REGISTER_BUFFERS and IORING_REGISTER_FILES.
        refuse(
            libc::SYS_io_uring_register,
            Which::ArgIs(1, 0),
            libc::ENOMEM,
        );
        let (backend, _) = open_and_read(&file, Kind::Uring).unwrap();
        assert!(!backend.is_registered());
        refuse(
            libc::SYS_io_uring_register,
            Which::ArgIs(1, 2),
            libc::ENOMEM,
        );
        let (backend, notices) = open_and_read(&file, Kind::Uring).unwrap();
        assert!(backend.io_mode().starts_with("uring+"), "{notices:?}");
    });
}

#[test]
fn o_direct_may_not_be_opened() {
    let file = TempFile::new("direct");
    apart(|| {
        let direct = rustix::fs::OFlags::DIRECT.bits();
        refuse(libc::SYS_openat, Which::ArgHas(2, direct), libc::EINVAL);
        for kind in [Kind::Auto, Kind::Pread] {
            let (backend, notices) = open_and_read(&file, kind).unwrap();
            assert!(backend.io_mode().ends_with("+buffered(EINVAL)"));
            let expected = Notice::BufferedAtOpen {
                file: FileId(0),
                errno: Errno(libc::EINVAL),
            };
            assert!(notices.contains(&expected), "{notices:?}");
        }
    });
}

/// The file opens, but a first read with O_DIRECT is refused. (The filter refuses every read by
/// offset, so nothing is read here.)
#[test]
fn o_direct_may_not_be_read() {
    let file = TempFile::new("test-read");
    apart(|| {
        refuse(libc::SYS_pread64, Which::All, libc::EINVAL);
        let source = Source::open(&[&file.0], Direct::Auto).unwrap();
        assert_eq!(source.mode(), "buffered(EINVAL)");
        assert_eq!(
            source.first_refused(),
            Some((FileId(0), Errno(libc::EINVAL)))
        );
    });
}

/// Kernels before 6.1 don't tell the alignment, and those before 4.11 have no statx.
#[test]
fn the_alignment_may_not_be_asked() {
    let file = TempFile::new("statx");
    let told = Source::open(&[&file.0], Direct::Auto).unwrap().align();
    apart(|| {
        refuse(libc::SYS_statx, Which::All, libc::ENOSYS);
        let source = Source::open(&[&file.0], Direct::Auto).unwrap();
        if source.files()[0].is_direct() {
            assert_eq!(source.align(), 4096.max(told));
        }
        let (_, notices) = open_and_read(&file, Kind::Auto).unwrap();
        assert_eq!(notices, []);
    });
}
