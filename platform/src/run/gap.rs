//! How many unwanted bytes between two units are better read than left out: as many as the device reads in
//! the time that one more read takes it, or the processor. Fast disks are bound by reads and slow ones by
//! bytes, so it is measured when a packed model starts.

use std::time::{Duration, Instant};

use leanstream_core::pack::Place;
use leanstream_core::port::{ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, FileId, PieceId, ReadId, SlotId};
use nix::time::{ClockId, clock_gettime};

/// Where it can't be measured: 12 KiB are what a virtual disk of 1.4 GB/s reads in the 9 us that another
/// read takes there.
pub const USUAL: u32 = 12 << 10;

/// Beyond this nothing is read across, whatever the device.
const MOST: u32 = 64 << 10;

/// Bytes of the two kinds of reads that are timed.
const SMALL: u32 = 4 << 10;
const LARGE: u32 = 64 << 10;

/// So many of each at most, and no longer than this.
const COUNT: u32 = 128;
const TIME: Duration = Duration::from_millis(50);

/// Wait for a read at most this long before looking at the clock again.
const WAIT_US: u32 = 10_000;

/// Where the reads go: staging slots from `slot` on, as reads from `read` on, as many at a time as `depth`.
#[derive(Clone, Copy, Debug)]
pub struct Staging {
    /// First staging slot.
    pub slot: u32,
    /// Bytes of one.
    pub bytes: u32,
    /// First read's number.
    pub read: u16,
    /// Reads in flight.
    pub depth: u16,
    /// Alignment of reads, a power of two.
    pub align: u32,
}

/// Measures it where `units` lie. Nothing may be in flight on `storage`, and nothing is afterwards.
pub fn measure(storage: &mut impl Storage, units: &[Place], staging: Staging) -> u32 {
    let large = LARGE.min(staging.bytes / staging.align * staging.align);
    let small = SMALL.max(staging.align);
    let units: Vec<Place> = units
        .iter()
        .filter(|units| units.bytes >= u64::from(large + staging.align))
        .copied()
        .collect();
    if large < 2 * small || units.is_empty() {
        return USUAL;
    }
    let units = &units[..];
    // The first reads may wake the device up.
    time(storage, units, staging, small);
    let busy = thread_time();
    let of_small = time(storage, units, staging, small);
    let busy = thread_time().saturating_sub(busy).as_secs_f64();
    let of_large = time(storage, units, staging, large);
    let (Some((of_small, reads)), Some((of_large, _))) = (of_small, of_large) else {
        return USUAL;
    };
    of_times(
        (small, of_small),
        (large, of_large),
        busy / f64::from(reads),
    )
}

/// How long the calling thread has computed; zero where the kernel doesn't say.
fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// From the seconds that reads of two sizes take, many at a time, and those that one costs the processor.
fn of_times((small, of_small): (u32, f64), (large, of_large): (u32, f64), busy: f64) -> u32 {
    let of_byte = (of_large - of_small) / f64::from(large - small);
    let of_read = (of_small - of_byte * f64::from(small)).max(busy);
    if of_byte > 0.0 {
        (of_read / of_byte).clamp(0.0, f64::from(MOST)) as u32
    } else {
        USUAL
    }
}

/// Seconds that a read of `bytes` takes, and how many were timed; `None` when reads fail.
fn time(
    storage: &mut impl Storage,
    units: &[Place],
    staging: Staging,
    bytes: u32,
) -> Option<(f64, u32)> {
    let Staging {
        slot,
        read,
        depth,
        align,
        ..
    } = staging;
    let mut places = Places {
        units,
        bytes,
        align,
        at: 0,
    };
    let mut start = |storage: &mut _, index: u16| {
        Storage::start(
            storage,
            ReadCommand {
                read: ReadId(read + index),
                slot: SlotId(slot + u32::from(index)),
                piece: PieceId(u32::MAX),
                extent: places.next(),
            },
        );
    };
    let begun = Instant::now();
    let (mut started, mut ended, mut failed) = (0, 0, false);
    for index in 0..depth {
        start(storage, index);
        started += 1;
    }
    while ended < started {
        while let Some((id, outcome)) = storage.poll() {
            ended += 1;
            failed |= outcome != ReadOutcome::Filled;
            if !failed && started < COUNT && begun.elapsed() < TIME {
                start(storage, id.0 - read);
                started += 1;
            }
        }
        if ended < started {
            storage.wait(WAIT_US);
        }
    }
    (!failed).then(|| (begun.elapsed().as_secs_f64() / f64::from(ended), ended))
}

/// Scattered places in the units of all layers and of the head.
struct Places<'a> {
    units: &'a [Place],
    bytes: u32,
    align: u32,
    at: u64,
}

impl Places<'_> {
    fn next(&mut self) -> Extent {
        // Steps of the golden ratio come evenly over the whole.
        self.at = self.at.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let units = self.units[self.at as usize % self.units.len()];
        let align = u64::from(self.align);
        // They begin at multiples of the pack's alignment, but need not of the device's.
        let room = (units.bytes - u64::from(self.bytes)) / align;
        Extent {
            file: FileId(units.file.0),
            offset: units.offset.next_multiple_of(align) + (self.at >> 20) % room * align,
            len: self.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use leanstream_core::port::Geometry;

    use super::*;
    use crate::arena::Arena;
    use crate::io::fault::FaultPlan;
    use crate::io::throttle::Limits;
    use crate::io::{self, Backend, Direct, Source};

    #[test]
    fn what_another_read_costs_is_told_in_bytes() {
        // A virtual disk: 12 us for 4 KiB, 54 us for 64 KiB.
        let fast = of_times((4 << 10, 12e-6), (64 << 10, 54e-6), 8e-6);
        assert!((13_000..14_000).contains(&fast), "{fast}");
        // Bound by bytes alone: only the processor's time counts.
        let slow = |busy| of_times((4096, 4096.0 / 3e8), (65_536, 65_536.0 / 3e8), busy);
        assert_eq!(slow(0.0), 0);
        assert!((2350..2450).contains(&slow(8e-6)), "{}", slow(8e-6));
        // An eMMC of 20,000 reads and 300 MB a second.
        let flash = of_times((4096, 50e-6), (65_536, 50e-6 + 61_440.0 / 3e8), 8e-6);
        assert!((10_800..11_000).contains(&flash), "{flash}");
        // A disk with heads, and times that say nothing.
        assert_eq!(of_times((4096, 8e-3), (65_536, 8.4e-3), 8e-6), MOST);
        assert_eq!(of_times((4096, 2e-5), (65_536, 1e-5), 8e-6), USUAL);
    }

    /// Storage that counts what was asked of it.
    struct Counted {
        storage: Backend,
        started: u32,
    }

    impl Storage for Counted {
        fn geometry(&self) -> Geometry {
            self.storage.geometry()
        }

        fn start(&mut self, command: ReadCommand) {
            self.started += 1;
            self.storage.start(command);
        }

        fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
            self.storage.poll()
        }

        fn wait(&mut self, timeout_us: u32) {
            self.storage.wait(timeout_us);
        }
    }

    /// Any file's bytes will do for units.
    #[test]
    fn a_device_is_measured() {
        let this = std::env::current_exe().unwrap();
        let source = Arc::new(Source::open(&[&this], Direct::Auto).unwrap());
        let place = |bytes| Place {
            file: FileId(0),
            offset: 0,
            bytes,
        };
        let whole = place(source.files()[0].len() / 65_536 * 65_536);
        let staging = Staging {
            slot: 0,
            bytes: 128 << 10,
            read: 0,
            depth: 4,
            align: source.align(),
        };
        let measured = |units: &[Place], options: &str| {
            let options = io::Options {
                throttle: (!options.starts_with("fail")).then(|| Limits::parse(options).unwrap()),
                faults: options
                    .starts_with("fail")
                    .then(|| FaultPlan::parse(options).unwrap()),
                depth: 4,
                ..io::Options::default()
            };
            let arena = Arena::new(4, staging.bytes as usize).unwrap();
            let mut storage = Counted {
                storage: Backend::new(Arc::clone(&source), Arc::new(arena), &options).unwrap(),
                started: 0,
            };
            let gap = measure(&mut storage, units, staging);
            // Nothing is in flight: a read is answered for itself.
            assert!(storage.poll().is_none());
            (gap, storage.started)
        };
        // What comes out depends on the clock; that it was asked doesn't.
        let (gap, reads) = measured(&[whole, place(4096)], "64M,100us");
        assert!(gap <= MOST && reads >= 3 * 4, "{gap} {reads}");
        let (gap, reads) = measured(&[whole], "fail=100%");
        assert!(gap == USUAL && reads > 0, "{gap} {reads}");
        assert_eq!(measured(&[], "64M"), (USUAL, 0));
        assert_eq!(measured(&[place(4096)], "64M"), (USUAL, 0));
    }
}
