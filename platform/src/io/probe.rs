//! How fast is this device? Measured the way a run reads: the model's own files, the same backend.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leanstream_core::port::{ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, FileId, PieceId, ReadId, SlotId};

use super::{Backend, OpenError, Options, ReadError, Source};
use crate::arena::{Arena, SLOT_ALIGN};

/// Reads of a latency measurement, one after the other.
const LATENCY_READS: usize = 256;

/// Bytes of each.
const LATENCY_BYTES: u32 = 4096;

/// Wait for a read at most this long before looking at the clock again.
const WAIT_US: u32 = 10_000;

/// A measurement that couldn't be finished.
#[derive(Debug)]
pub enum ProbeError {
    /// The backend doesn't open.
    Open(OpenError),
    /// No memory for the blocks.
    Arena(std::io::Error),
    /// No file holds even one block.
    TooSmall {
        /// Bytes of a block.
        block: u32,
    },
    /// A read failed.
    Read(ReadError),
    /// A fault injector made a read corrupt.
    Corrupt,
}

impl std::fmt::Display for ProbeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Open(error) => error.fmt(f),
            Self::Arena(error) => write!(f, "no memory for the read blocks: {error}"),
            Self::TooSmall { block } => {
                write!(f, "no file is as long as one block of {block} bytes")
            }
            Self::Read(error) => error.fmt(f),
            Self::Corrupt => f.write_str("the injected faults made a read corrupt"),
        }
    }
}

impl std::error::Error for ProbeError {}

/// Which blocks are read one after the other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// As they lie in the files.
    Sequential,
    /// From all over the files.
    Scattered,
}

/// Reading with many reads in flight, measured.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Bandwidth {
    /// Bytes that arrived.
    pub bytes: u64,
    /// How long that took.
    pub elapsed: Duration,
    /// How it was read, like `uring+direct`.
    pub io_mode: String,
}

impl Bandwidth {
    /// Bytes per second.
    pub fn bytes_per_s(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64()
    }
}

/// Single small reads at scattered places, measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Latency {
    /// Half of the reads were faster.
    pub median: Duration,
    /// All but one in a hundred were faster.
    pub p99: Duration,
}

/// Read whole blocks in `order`, wrapping around at the end of the model, for about `duration`, with `options.depth` reads in flight. Takes `depth * block` bytes of memory.
///
/// # Errors
/// [`ProbeError`].
///
/// # Panics
/// When `block` is 0 or no multiple of [`SLOT_ALIGN`] and the source's alignment.
pub fn bandwidth(
    source: &Arc<Source>,
    options: &Options,
    block: u32,
    order: Order,
    duration: Duration,
) -> Result<Bandwidth, ProbeError> {
    let mut places = Places::new(source, block).ok_or(ProbeError::TooSmall { block })?;
    let mut backend = open(source, options, options.depth, block)?;
    let mut place = || match order {
        Order::Sequential => places.next(),
        Order::Scattered => places.jump(),
    };
    let start = Instant::now();
    let mut reading: Vec<Extent> = (0..options.depth).map(|_| place()).collect();
    for (slot, extent) in (0..).zip(&reading) {
        backend.start(command(slot, *extent));
    }
    let (mut bytes, mut in_flight) = (0, options.depth);
    while in_flight > 0 {
        while let Some((read, outcome)) = backend.poll() {
            let extent = &mut reading[usize::from(read.0)];
            check(&backend, extent, outcome)?;
            bytes += u64::from(block);
            if start.elapsed() < duration {
                *extent = place();
                backend.start(command(read.0, *extent));
            } else {
                in_flight -= 1;
            }
        }
        if in_flight > 0 {
            backend.wait(WAIT_US);
        }
    }
    Ok(Bandwidth {
        bytes,
        elapsed: start.elapsed(),
        io_mode: backend.io_mode(),
    })
}

/// Time single reads of 4 KiB (or the device's alignment, if more) scattered over the model, or of
/// the whole of a smaller file's blocks again and again.
///
/// # Errors
/// [`ProbeError`].
pub fn latency(source: &Arc<Source>, options: &Options) -> Result<Latency, ProbeError> {
    let block = LATENCY_BYTES.max(source.align());
    let mut places = Places::new(source, block).ok_or(ProbeError::TooSmall { block })?;
    let mut backend = open(source, options, 1, block)?;
    let mut times = Vec::with_capacity(LATENCY_READS);
    for _ in 0..LATENCY_READS {
        let start = Instant::now();
        let extent = places.jump();
        backend.start(command(0, extent));
        let outcome = loop {
            match backend.poll() {
                Some((_, outcome)) => break outcome,
                None => backend.wait(WAIT_US),
            }
        };
        times.push(start.elapsed());
        check(&backend, &extent, outcome)?;
    }
    times.sort_unstable();
    Ok(Latency {
        median: times[LATENCY_READS / 2],
        p99: times[LATENCY_READS * 99 / 100],
    })
}

fn open(
    source: &Arc<Source>,
    options: &Options,
    depth: u16,
    block: u32,
) -> Result<Backend, ProbeError> {
    assert!(
        (block as usize).is_multiple_of(SLOT_ALIGN),
        "blocks of {block} bytes"
    );
    let arena = Arena::new(depth.into(), block as usize).map_err(ProbeError::Arena)?;
    let options = Options { depth, ..*options };
    Backend::new(Arc::clone(source), Arc::new(arena), &options).map_err(ProbeError::Open)
}

fn command(slot: u16, extent: Extent) -> ReadCommand {
    ReadCommand {
        read: ReadId(slot),
        slot: SlotId(slot.into()),
        piece: PieceId(0),
        extent,
    }
}

fn check(backend: &Backend, extent: &Extent, outcome: ReadOutcome) -> Result<(), ProbeError> {
    match outcome {
        ReadOutcome::Filled => Ok(()),
        ReadOutcome::Corrupt => Err(ProbeError::Corrupt),
        ReadOutcome::Failed => {
            let error = backend.reason(extent);
            Err(ProbeError::Read(error.expect("a failed read has a reason")))
        }
    }
}

/// Whole blocks of the files, in order or scattered.
struct Places {
    /// Whole blocks in each file.
    blocks: Box<[u64]>,
    total: u64,
    block: u32,
    at: u64,
}

impl Places {
    fn new(source: &Source, block: u32) -> Option<Self> {
        let files = source.files().iter();
        let blocks: Box<[u64]> = files.map(|f| f.len() / u64::from(block)).collect();
        let total = blocks.iter().sum();
        (total > 0).then_some(Self {
            blocks,
            total,
            block,
            at: 0,
        })
    }

    fn next(&mut self) -> Extent {
        let extent = self.extent(self.at);
        self.at = (self.at + 1) % self.total;
        extent
    }

    /// Steps of the golden ratio come evenly over the whole without coming twice to one place soon.
    fn jump(&mut self) -> Extent {
        self.at = self.at.wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.extent(self.at % self.total)
    }

    fn extent(&self, mut index: u64) -> Extent {
        for (file, &blocks) in (0..).zip(&self.blocks) {
            if index < blocks {
                return Extent {
                    file: FileId(file),
                    offset: index * u64::from(self.block),
                    len: self.block,
                };
            }
            index -= blocks;
        }
        unreachable!("the index is less than the number of blocks")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::fault::FaultPlan;
    use crate::io::throttle::Limits;
    use crate::io::{Direct, Kind};

    fn this_program() -> Arc<Source> {
        let this = std::env::current_exe().unwrap();
        Arc::new(Source::open(&[&this, &this], Direct::Auto).unwrap())
    }

    #[test]
    fn places_cover_all_files_and_wrap() {
        let source = this_program();
        let block = 64 << 10;
        let mut places = Places::new(&source, block).unwrap();
        let per_file = source.files()[0].len() / u64::from(block);
        let all: Vec<Extent> = (0..2 * per_file).map(|_| places.next()).collect();
        let (first, second) = all.split_at(per_file as usize);
        assert!(first.iter().all(|e| e.file == FileId(0)));
        assert!(second.iter().all(|e| e.file == FileId(1)));
        assert_eq!(second[1].offset, u64::from(block));
        assert_eq!(places.next(), all[0]);
        for _ in 0..1000 {
            let e = places.jump();
            assert!(e.offset + u64::from(e.len) <= source.file(e.file).len());
        }
    }

    #[test]
    fn limits_are_measured_as_set() {
        let source = this_program();
        for (kind, order) in [
            (Kind::Auto, Order::Sequential),
            (Kind::Pread, Order::Scattered),
        ] {
            let options = Options {
                kind,
                throttle: Some(Limits::parse("64M,3ms").unwrap()),
                ..Options::default()
            };
            let duration = Duration::from_millis(200);
            let measured = bandwidth(&source, &options, 256 << 10, order, duration);
            let measured = measured.unwrap();
            // A busy machine may be slower than the limit, never faster.
            assert!(measured.bytes_per_s() <= 1.01 * f64::from(64 << 20));
            assert!(measured.bytes >= u64::from(options.depth) * (256 << 10));
            let latency = latency(&source, &options).unwrap();
            assert!(latency.median >= Duration::from_millis(3));
            assert!(latency.p99 >= latency.median);
        }
    }

    #[test]
    fn failures_are_told() {
        let source = this_program();
        let options = |faults| Options {
            faults: Some(FaultPlan::parse(faults).unwrap()),
            ..Options::default()
        };
        let (second, order) = (Duration::from_secs(1), Order::Sequential);
        let failed = bandwidth(&source, &options("fail_at=20"), 64 << 10, order, second);
        assert!(matches!(failed, Err(ProbeError::Read(_))), "{failed:?}");
        let corrupt = latency(&source, &options("corrupt=10%"));
        assert!(matches!(corrupt, Err(ProbeError::Corrupt)), "{corrupt:?}");
        let large = bandwidth(&source, &Options::default(), 1 << 30, order, second);
        assert!(
            matches!(large, Err(ProbeError::TooSmall { .. })),
            "{large:?}"
        );
    }
}
