//! Reads by a few threads of our own, each in `pread`: works on every kernel and in every container.
//!
//! Threads and queues are made once; a read moves between them by value and nothing is allocated.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, ReadId};

use super::fault::FaultPlan;
use super::reasons::Reasons;
use super::report::{Counters, Errno, OpenError, ReadError, Stats};
use super::source::Source;
use super::transfer::{Next, Transfer};
use crate::arena::Arena;

/// More threads than this add switching, not bandwidth; further reads wait in the queue.
const THREADS_MAX: usize = 16;

/// A reader's stack: it makes a system call and little else. The platform's least may be larger.
const STACK_BYTES: usize = 128 << 10;

/// How one read ended.
type Ended = (ReadId, Result<(), ReadError>);

/// What the threads share.
#[derive(Debug)]
struct Shared {
    arena: Arc<Arena>,
    source: Arc<Source>,
    faults: Option<FaultPlan>,
    counters: Counters,
    jobs: Mutex<Jobs>,
    /// A job came, or it is time to stop.
    work: Condvar,
    ended: Mutex<VecDeque<Ended>>,
    /// Length of `ended`, so that `poll` needs no lock to see that nothing has happened.
    ended_count: AtomicUsize,
    news: Condvar,
}

#[derive(Debug)]
struct Jobs {
    queue: VecDeque<Transfer>,
    stop: bool,
}

/// A panic in a reader thread is a bug, and its mutex then tells of it here too.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("a reader thread panicked")
}

/// The backend. Dropping it waits for the reads that are in the kernel and forgets the others.
#[derive(Debug)]
pub struct Pread {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    geometry: Geometry,
    started: u64,
    in_flight: usize,
    reasons: Reasons,
}

impl Pread {
    /// Start the threads: one for each of `depth` reads in flight, 16 at most.
    ///
    /// # Errors
    /// [`OpenError::Thread`].
    pub(super) fn new(
        source: Arc<Source>,
        arena: Arc<Arena>,
        depth: u16,
        faults: Option<FaultPlan>,
    ) -> Result<Self, OpenError> {
        let room = usize::from(depth);
        let geometry = Geometry {
            align: source.align(),
            reads_max: depth,
        };
        let shared = Arc::new(Shared {
            arena,
            source,
            faults,
            counters: Counters::default(),
            jobs: Mutex::new(Jobs {
                queue: VecDeque::with_capacity(room),
                stop: false,
            }),
            work: Condvar::new(),
            ended: Mutex::new(VecDeque::with_capacity(room)),
            ended_count: AtomicUsize::new(0),
            news: Condvar::new(),
        });
        let mut backend = Self {
            shared,
            threads: Vec::new(),
            geometry,
            started: 0,
            in_flight: 0,
            reasons: Reasons::new(depth),
        };
        // A thread's start allocates; waiting for it here keeps that out of the sealed part.
        let up = Arc::new(std::sync::Barrier::new(2));
        for i in 0..room.min(THREADS_MAX) {
            let (shared, up_there) = (Arc::clone(&backend.shared), Arc::clone(&up));
            let thread = Builder::new()
                .name(format!("read-{i}"))
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    up_there.wait();
                    drop(up_there);
                    shared.serve();
                })
                .map_err(|error| OpenError::Thread { error })?;
            up.wait();
            backend.threads.push(thread);
        }
        Ok(backend)
    }

    /// Why the latest read of `extent` failed.
    pub(super) fn reason(&self, extent: &Extent) -> Option<ReadError> {
        self.reasons.of(extent)
    }

    /// Totals so far.
    pub fn stats(&self) -> Stats {
        self.shared.counters.snapshot()
    }

    /// Threads that read.
    pub fn threads(&self) -> usize {
        self.threads.len()
    }

    fn end(&mut self, (read, result): Ended) -> (ReadId, ReadOutcome) {
        self.in_flight -= 1;
        match result {
            Ok(()) => (read, ReadOutcome::Filled),
            Err(error) => {
                self.reasons.keep(read, error);
                (read, ReadOutcome::Failed)
            }
        }
    }
}

impl Storage for Pread {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn start(&mut self, command: ReadCommand) {
        assert!(
            self.in_flight < usize::from(self.geometry.reads_max),
            "more than {} reads in flight",
            self.geometry.reads_max
        );
        self.in_flight += 1;
        self.reasons.forget(command.read);
        let shared = &*self.shared;
        match Transfer::begin(&command, &shared.source, &shared.arena, self.started) {
            Ok(transfer) => {
                lock(&shared.jobs).queue.push_back(transfer);
                shared.work.notify_one();
            }
            Err(error) => {
                Counters::add(&shared.counters.failed, 1);
                shared.report((command.read, Err(error)));
            }
        }
        self.started += 1;
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        if self.shared.ended_count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let ended = {
            let mut queue = lock(&self.shared.ended);
            let ended = queue.pop_front();
            self.shared
                .ended_count
                .store(queue.len(), Ordering::Release);
            ended
        };
        ended.map(|ended| self.end(ended))
    }

    fn wait(&mut self, timeout_us: u32) {
        let queue = lock(&self.shared.ended);
        if queue.is_empty() {
            let timeout = Duration::from_micros(timeout_us.into());
            // Waking early is allowed, so no loop.
            drop(self.shared.news.wait_timeout(queue, timeout));
        }
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        if let Ok(mut jobs) = self.shared.jobs.lock() {
            jobs.stop = true;
            for transfer in jobs.queue.drain(..) {
                transfer.end(&self.shared.arena, false, &self.shared.counters);
            }
        }
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A reader that panicked has said so already.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// A reader thread's life.
    fn serve(&self) {
        loop {
            let mut jobs = lock(&self.jobs);
            let transfer = loop {
                if jobs.stop {
                    return;
                }
                match jobs.queue.pop_front() {
                    Some(transfer) => break transfer,
                    None => jobs = self.work.wait(jobs).expect("a reader thread panicked"),
                }
            };
            drop(jobs);
            self.report(self.carry(transfer));
        }
    }

    /// Ask the kernel until the read has ended.
    fn carry(&self, mut transfer: Transfer) -> Ended {
        let faults = self.faults.as_ref();
        loop {
            let request = transfer.request(&self.source, faults);
            let fd = self.source.file(request.file).fd(request.direct);
            // SAFETY: the request's range lies inside a slot that is being filled by this transfer
            // alone; the memory is initialised (the arena is mapped zeroed).
            let room = unsafe { std::slice::from_raw_parts_mut(request.ptr, request.len as usize) };
            let answer = match rustix::io::pread(fd, room, request.offset) {
                Ok(bytes) => Ok(bytes as u32),
                Err(errno) => Err(Errno(errno.raw_os_error())),
            };
            let next = transfer.answered(request, answer, &self.source, faults, &self.counters);
            let result = match next {
                Next::Again => continue,
                Next::Filled => Ok(()),
                Next::Failed(error) => Err(error),
            };
            let read = transfer.read;
            transfer.end(&self.arena, result.is_ok(), &self.counters);
            return (read, result);
        }
    }

    fn report(&self, ended: Ended) {
        let mut queue = lock(&self.ended);
        queue.push_back(ended);
        self.ended_count.store(queue.len(), Ordering::Release);
        drop(queue);
        self.news.notify_one();
    }
}
