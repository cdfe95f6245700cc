//! Reads through io_uring: one submission a read, no thread, completions seen without system calls.
//!
//! The ring, its registered files and (where the kernel lets us pin that much) the registered arena
//! are made once. Works from Linux 5.6; newer kernels save interrupts and system calls.

use std::collections::VecDeque;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};
use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, ReadId};

use super::fault::FaultPlan;
use super::reasons::Reasons;
use super::report::{Counters, Errno, ReadError, Stats};
use super::source::Source;
use super::transfer::{Next, Request, Transfer};
use crate::arena::Arena;

/// The kernel registers at most this many bytes as one buffer.
const BUFFER_MAX: usize = 1 << 30;

/// `user_data` of an operation that belongs to no read.
const NO_FLIGHT: u64 = u64::MAX;

/// The backend. Dropping it waits for the reads in flight, since the kernel writes into the arena.
pub struct Uring {
    ring: IoUring,
    arena: Arc<Arena>,
    source: Arc<Source>,
    faults: Option<FaultPlan>,
    counters: Counters,
    geometry: Geometry,
    /// Reads in flight, by the index that travels as `user_data`.
    flights: Box<[Option<(Transfer, Request)>]>,
    free: Vec<u16>,
    /// Reads that ended before the kernel heard of them.
    refused: VecDeque<(ReadId, ReadError)>,
    /// Operations queued or in the kernel.
    pending: usize,
    /// Slots in one registered buffer, when the arena is registered.
    slots_per_buffer: Option<u32>,
    files_registered: bool,
    /// The kernel can end a wait by itself (Linux 5.11).
    timed_waits: bool,
    started: u64,
    reasons: Reasons,
}

impl std::fmt::Debug for Uring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Uring")
            .field("pending", &self.pending)
            .field("slots_per_buffer", &self.slots_per_buffer)
            .field("files_registered", &self.files_registered)
            .finish_non_exhaustive()
    }
}

impl Uring {
    /// Make the ring, and show that it works by sending an empty operation through it.
    ///
    /// `register` asks for the arena to be pinned and mapped into the kernel once instead of at each
    /// read. It makes all of the arena resident at once; where the kernel refuses, reads go on
    /// without.
    ///
    /// # Errors
    /// The kernel's reason: EPERM in many containers, ENOSYS before Linux 5.1 (and here before 5.6,
    /// whose rings can't do plain reads).
    pub(super) fn new(
        source: Arc<Source>,
        arena: Arc<Arena>,
        depth: u16,
        register: bool,
        faults: Option<FaultPlan>,
    ) -> Result<Self, Errno> {
        let ring = make_ring(u32::from(depth)).map_err(|e| Errno::of(&e))?;
        Self::over(ring, source, arena, depth, register, faults)
    }

    fn over(
        mut ring: IoUring,
        source: Arc<Source>,
        arena: Arc<Arena>,
        depth: u16,
        register: bool,
        faults: Option<FaultPlan>,
    ) -> Result<Self, Errno> {
        let mut probe = Probe::new();
        let probed = ring.submitter().register_probe(&mut probe);
        if probed.is_err() || !probe.is_supported(opcode::Read::CODE) {
            return Err(Errno(libc::ENOSYS));
        }
        try_nop(&mut ring).map_err(|e| Errno::of(&e))?;
        let files: Vec<i32> = source.files().iter().flat_map(|f| f.raw_fds()).collect();
        let files_registered = ring.submitter().register_files(&files).is_ok();
        let slots_per_buffer = if register {
            register_arena(&ring, &arena)
        } else {
            None
        };
        Ok(Self {
            geometry: Geometry {
                align: source.align(),
                reads_max: depth,
            },
            flights: (0..depth).map(|_| None).collect(),
            free: (0..depth).rev().collect(),
            refused: VecDeque::with_capacity(depth.into()),
            pending: 0,
            slots_per_buffer,
            files_registered,
            timed_waits: ring.params().is_feature_ext_arg(),
            started: 0,
            reasons: Reasons::new(depth),
            counters: Counters::default(),
            ring,
            arena,
            source,
            faults,
        })
    }

    /// Why the latest read of `extent` failed.
    pub(super) fn reason(&self, extent: &Extent) -> Option<ReadError> {
        self.reasons.of(extent)
    }

    /// Totals so far.
    pub fn stats(&self) -> Stats {
        self.counters.snapshot()
    }

    /// True when the arena is registered with the kernel.
    pub fn is_registered(&self) -> bool {
        self.slots_per_buffer.is_some()
    }

    /// Queue the next request of a flight and tell the kernel.
    fn request(&mut self, index: u16, mut transfer: Transfer) {
        let request = transfer.request(&self.source, self.faults.as_ref());
        let entry = self.entry(&transfer, request).user_data(index.into());
        self.flights[usize::from(index)] = Some((transfer, request));
        // SAFETY: the memory is a slot that stays Filling until the flight's completion is seen, of
        // an arena that outlives the ring (`Drop` drains the ring first); the descriptor belongs to
        // `source`, which lives as long.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        assert!(
            pushed.is_ok(),
            "the ring holds {} reads",
            self.flights.len()
        );
        self.pending += 1;
        self.enter();
    }

    fn entry(&self, transfer: &Transfer, request: Request) -> squeue::Entry {
        let Request {
            ptr, len, offset, ..
        } = request;
        let fixed = Fixed(u32::from(request.file.0) * 2 + u32::from(!request.direct));
        let plain = Fd(self
            .source
            .file(request.file)
            .fd(request.direct)
            .as_raw_fd());
        let buffer = self
            .slots_per_buffer
            .map(|slots| (transfer.slot() / slots) as u16);
        match (buffer, self.files_registered) {
            (Some(buffer), true) => opcode::ReadFixed::new(fixed, ptr, len, buffer)
                .offset(offset)
                .build(),
            (Some(buffer), false) => opcode::ReadFixed::new(plain, ptr, len, buffer)
                .offset(offset)
                .build(),
            (None, true) => opcode::Read::new(fixed, ptr, len).offset(offset).build(),
            (None, false) => opcode::Read::new(plain, ptr, len).offset(offset).build(),
        }
    }

    /// Give the kernel what is queued, and let it post completions that wait for us to come by.
    fn enter(&mut self) {
        loop {
            match self.ring.submit() {
                Ok(_) => return,
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The kernel is short of something; what is queued goes with the next call.
                    Some(libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => return,
                    // It took an empty operation at the start, so this is a bug here.
                    _ => panic!("io_uring_enter: {error}"),
                },
            }
        }
    }

    /// The next completion that ends a read. Those that don't are sent on their way.
    fn reap(&mut self) -> Option<(ReadId, ReadOutcome)> {
        loop {
            let (index, answer) = {
                let completion = self.ring.completion().next()?;
                (completion.user_data(), completion.result())
            };
            self.pending -= 1;
            let flight = self.flights[index as usize].take();
            let (mut transfer, request) = flight.expect("a completion has a flight");
            let answer = u32::try_from(answer).map_err(|_| Errno(-answer));
            let next = transfer.answered(
                request,
                answer,
                &self.source,
                self.faults.as_ref(),
                &self.counters,
            );
            let outcome = match next {
                Next::Again => {
                    self.request(index as u16, transfer);
                    continue;
                }
                Next::Filled => ReadOutcome::Filled,
                Next::Failed(error) => {
                    self.reasons.keep(transfer.read, error);
                    ReadOutcome::Failed
                }
            };
            let read = transfer.read;
            let ok = outcome == ReadOutcome::Filled;
            transfer.end(&self.arena, ok, &self.counters);
            self.free.push(index as u16);
            return Some((read, outcome));
        }
    }

    /// Submit and sleep until something completes or the time is over.
    fn sleep(&mut self, timeout: Timeout) {
        let want = 1;
        let slept = match timeout {
            Timeout::Never => self.ring.submit_and_wait(want),
            Timeout::Us(us) if self.timed_waits => {
                let time = Timespec::new()
                    .sec(u64::from(us / 1_000_000))
                    .nsec(us % 1_000_000 * 1000);
                let args = SubmitArgs::new().timespec(&time);
                self.ring.submitter().submit_with_args(want, &args)
            }
            // Before Linux 5.11 a wait has no timeout, but a ring can be polled.
            Timeout::Us(us) => {
                self.enter();
                let time = rustix::event::Timespec {
                    tv_sec: i64::from(us / 1_000_000),
                    tv_nsec: i64::from(us % 1_000_000 * 1000),
                };
                // SAFETY: the ring's descriptor is open as long as the ring.
                let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(self.ring.as_raw_fd()) };
                let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                    fd,
                    rustix::event::PollFlags::IN,
                )];
                let polled = rustix::event::poll(&mut fds, Some(&time));
                polled.map_err(std::io::Error::from)
            }
        };
        if let Err(error) = slept {
            let expected = matches!(
                error.raw_os_error(),
                Some(libc::EINTR | libc::ETIME | libc::EAGAIN | libc::EBUSY | libc::ENOMEM)
            );
            assert!(expected, "io_uring_enter: {error}");
        }
    }
}

/// How long to sleep at most.
#[derive(Clone, Copy)]
enum Timeout {
    Us(u32),
    Never,
}

impl Storage for Uring {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn start(&mut self, command: ReadCommand) {
        let in_flight = self.flights.len() - self.free.len() + self.refused.len();
        assert!(
            in_flight < self.flights.len(),
            "more than {in_flight} reads in flight"
        );
        self.reasons.forget(command.read);
        let begun = Transfer::begin(&command, &self.source, &self.arena, self.started);
        self.started += 1;
        match begun {
            Ok(transfer) => {
                let index = self.free.pop().expect("there is room, as just asserted");
                self.request(index, transfer);
            }
            Err(error) => {
                Counters::add(&self.counters.failed, 1);
                self.refused.push_back((command.read, error));
            }
        }
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        if let Some((read, error)) = self.refused.pop_front() {
            self.reasons.keep(read, error);
            return Some((read, ReadOutcome::Failed));
        }
        if let Some(ended) = self.reap() {
            return Some(ended);
        }
        let submission = self.ring.submission();
        let called = !submission.is_empty() || submission.taskrun() || submission.cq_overflow();
        drop(submission);
        if !called {
            return None;
        }
        self.enter();
        self.reap()
    }

    fn wait(&mut self, timeout_us: u32) {
        if self.refused.is_empty() && self.ring.completion().is_empty() {
            self.sleep(Timeout::Us(timeout_us));
        }
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may write into a slot until its completion has been seen.
        while self.pending > 0 {
            if self.ring.completion().is_empty() {
                self.sleep(Timeout::Never);
            }
            while let Some(completion) = self.ring.completion().next() {
                self.pending -= 1;
                let flight = self.flights[completion.user_data() as usize].take();
                if let Some((transfer, _)) = flight {
                    transfer.end(&self.arena, false, &self.counters);
                }
            }
        }
    }
}

/// A ring whose completions don't interrupt computing, or a plain one where the kernel is older than
/// 5.19.
fn make_ring(entries: u32) -> std::io::Result<IoUring> {
    let entries = entries.max(2).next_power_of_two();
    let cooperative = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .build(entries);
    match cooperative {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => IoUring::new(entries),
        made => made,
    }
}

/// Some sandboxes let a ring be made and then refuse to enter it.
fn try_nop(ring: &mut IoUring) -> std::io::Result<()> {
    let nop = opcode::Nop::new().build().user_data(NO_FLIGHT);
    // SAFETY: an empty operation refers to no memory.
    let pushed = unsafe { ring.submission().push(&nop) };
    assert!(pushed.is_ok(), "a new ring is empty");
    while let Err(error) = ring.submit_and_wait(1) {
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
    match ring.completion().next() {
        Some(completion) if completion.result() == 0 => Ok(()),
        Some(completion) => Err(std::io::Error::from_raw_os_error(-completion.result())),
        None => Err(std::io::Error::from_raw_os_error(libc::EIO)),
    }
}

/// Pin the arena, in buffers of whole slots. `None` when the kernel won't: mostly ENOMEM, for
/// RLIMIT_MEMLOCK. Then each read pins its slot for itself, which costs a little time.
fn register_arena(ring: &IoUring, arena: &Arena) -> Option<u32> {
    let slots_per_buffer = u32::try_from(BUFFER_MAX / arena.slot_bytes()).ok()?;
    if slots_per_buffer == 0 {
        return None;
    }
    let base = arena.as_base_ptr().as_ptr();
    let bytes_per_buffer = slots_per_buffer as usize * arena.slot_bytes();
    let buffers: Vec<libc::iovec> = (0..arena.total_bytes())
        .step_by(bytes_per_buffer)
        .map(|start| libc::iovec {
            iov_base: base.wrapping_add(start).cast(),
            iov_len: bytes_per_buffer.min(arena.total_bytes() - start),
        })
        .collect();
    // SAFETY: the buffers are ranges of the arena, which outlives the ring: the backend owns both
    // and declares the ring first, so that it is dropped first.
    let registered = unsafe { ring.submitter().register_buffers(&buffers) };
    registered.ok().map(|()| slots_per_buffer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Direct;
    use leanstream_core::units::{Extent, FileId, PieceId, SlotId};

    /// Rings of old kernels: no cooperative completions, no timed waits. All reads still end.
    #[test]
    fn rings_of_old_kernels() {
        let this = std::env::current_exe().unwrap();
        let source = Arc::new(Source::open(&[&this], Direct::Auto).unwrap());
        let whole = std::fs::read(&this).unwrap();
        let (depth, len) = (4, 64 << 10);
        for (plain, timed) in [(false, false), (true, true), (true, false)] {
            let ring = if plain { IoUring::new(4) } else { make_ring(4) };
            let Ok(ring) = ring else {
                eprintln!("no io_uring here");
                return;
            };
            let arena = Arc::new(Arena::new(depth, len).unwrap());
            let shared = (Arc::clone(&source), Arc::clone(&arena));
            let made = Uring::over(ring, shared.0, shared.1, depth as u16, true, None);
            let mut uring = made.expect("it works with a new ring");
            uring.timed_waits &= timed;
            for round in 0..8u32 {
                for i in 0..depth {
                    let offset = u64::from(round * depth + i) * len as u64;
                    uring.start(ReadCommand {
                        read: ReadId(i as u16),
                        slot: SlotId(i),
                        piece: PieceId(0),
                        extent: Extent {
                            file: FileId(0),
                            offset,
                            len: len as u32,
                        },
                    });
                }
                let mut left = depth;
                while left > 0 {
                    // Shorter than a read takes, or long: neither may lose a completion.
                    uring.wait(if round % 2 == 0 { 1 } else { 10_000_000 });
                    while let Some((read, outcome)) = uring.poll() {
                        assert_eq!(outcome, ReadOutcome::Filled);
                        let at = (round * depth + u32::from(read.0)) as usize * len;
                        let bytes = arena.bytes(SlotId(read.0.into()));
                        assert!(bytes[..] == whole[at..at + len]);
                        left -= 1;
                    }
                }
            }
            // With nothing in flight a wait ends by its timeout.
            uring.wait(100);
            assert_eq!(uring.poll(), None);
        }
    }
}
