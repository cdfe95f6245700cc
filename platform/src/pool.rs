//! A fixed pool of threads that share one kind of job; the caller is one of them.
//!
//! The caller (leader) publishes a [`Task`] of numbered chunks with [`Pool::begin`]; workers take
//! chunks at once, and the leader takes one with each [`Pool::step`], so that it can look at the
//! storage in between. Nothing is allocated after [`Pool::new`].
//!
//! A worker that finds nothing to do spins for a moment, since the next task of a token comes within
//! microseconds, then parks. A parked worker that wakes late never holds up a task: whoever is awake
//! takes the chunks, and a task has ended when its chunks have, not when its workers have.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it parks.
const SPIN: Duration = Duration::from_micros(60);

/// What the threads are to do: a meaning known to the [`Job`], and how many chunks it has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Task {
    /// Interpreted by the job.
    pub kind: u64,
    /// Interpreted by the job.
    pub arg: u64,
    /// Chunks, numbered from 0.
    pub chunks: u32,
}

/// The work of a pool. Chunks of one task run at the same time on several threads.
pub trait Job: Send + Sync + 'static {
    /// Do chunk `chunk` of `task` as thread `thread` (0 is the leader).
    fn run(&self, task: Task, chunk: u32, thread: usize);
}

struct State<J> {
    job: Arc<J>,
    /// High half: the task's number. Low half: chunks not yet taken. One word, so that a thread
    /// which takes a chunk knows of which task it is, however late it comes.
    ticket: AtomicU64,
    kind: AtomicU64,
    arg: AtomicU64,
    chunks: AtomicU32,
    ended: AtomicU32,
    stop: AtomicBool,
    panicked: AtomicBool,
    parked: Box<[AtomicBool]>,
}

impl<J: Job> State<J> {
    /// Take a chunk and run it. The task's words stay as they are while a taken chunk has not ended,
    /// so they are read after taking.
    fn take(&self, thread: usize) -> bool {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        loop {
            if ticket as u32 == 0 {
                return false;
            }
            match self.ticket.compare_exchange_weak(
                ticket,
                ticket - 1,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => break,
                Err(now) => ticket = now,
            }
        }
        let chunks = self.chunks.load(Ordering::Relaxed);
        let task = Task {
            kind: self.kind.load(Ordering::Relaxed),
            arg: self.arg.load(Ordering::Relaxed),
            chunks,
        };
        let guard = Ended { state: self };
        self.job.run(task, chunks - ticket as u32, thread);
        drop(guard);
        true
    }
}

/// Counts a chunk as ended also when its job panics, so that the leader reports instead of hanging.
struct Ended<'a, J> {
    state: &'a State<J>,
}

impl<J> Drop for Ended<'_, J> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.state.panicked.store(true, Ordering::Relaxed);
        }
        self.state.ended.fetch_add(1, Ordering::Release);
    }
}

/// The threads. Dropping it ends them.
pub struct Pool<J: Job> {
    state: Arc<State<J>>,
    workers: Vec<(Thread, JoinHandle<()>)>,
}

impl<J: Job> Pool<J> {
    /// A pool of `threads` threads, the caller counted; at least 1.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn new(threads: usize, stack_bytes: usize, job: Arc<J>) -> std::io::Result<Self> {
        assert!(threads > 0, "the caller is a thread of the pool");
        let state = Arc::new(State {
            job,
            ticket: AtomicU64::new(0),
            kind: AtomicU64::new(0),
            arg: AtomicU64::new(0),
            chunks: AtomicU32::new(0),
            ended: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
        });
        let mut pool = Self {
            state,
            workers: Vec::with_capacity(threads - 1),
        };
        // A thread's start allocates; waiting for it here keeps that out of the sealed part.
        let up = Arc::new(Barrier::new(2));
        for index in 1..threads {
            let (state, up_there) = (Arc::clone(&pool.state), Arc::clone(&up));
            let handle = thread::Builder::new()
                .name(format!("compute-{index}"))
                .stack_size(stack_bytes)
                .spawn(move || {
                    up_there.wait();
                    drop(up_there);
                    work(&state, index);
                })?;
            up.wait();
            pool.workers.push((handle.thread().clone(), handle));
        }
        Ok(pool)
    }

    /// Threads, the caller counted.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// What the threads work on.
    pub fn job(&self) -> &Arc<J> {
        &self.state.job
    }

    /// Publish a task. The one before must have ended.
    pub fn begin(&mut self, task: Task) {
        assert!(self.ended(), "a task begins after the one before has ended");
        let state = &*self.state;
        state.kind.store(task.kind, Ordering::Relaxed);
        state.arg.store(task.arg, Ordering::Relaxed);
        state.chunks.store(task.chunks, Ordering::Relaxed);
        state.ended.store(0, Ordering::Relaxed);
        let number =
            (state.ticket.load(Ordering::Relaxed) >> 32).wrapping_add(1) & u64::from(u32::MAX);
        state
            .ticket
            .store(number << 32 | u64::from(task.chunks), Ordering::SeqCst);
        if task.chunks > 1 {
            for (parked, (thread, _)) in state.parked.iter().zip(&self.workers) {
                if parked.load(Ordering::SeqCst) && parked.swap(false, Ordering::SeqCst) {
                    thread.unpark();
                }
            }
        }
    }

    /// Run one chunk on the calling thread; false when none is left to take.
    pub fn step(&mut self) -> bool {
        self.state.take(0)
    }

    /// Whether every chunk of the task has ended.
    ///
    /// # Panics
    /// A worker panicked: what it left behind can't be used.
    pub fn ended(&self) -> bool {
        let state = &*self.state;
        let all = state.ended.load(Ordering::Acquire) == state.chunks.load(Ordering::Relaxed);
        assert!(
            !all || !state.panicked.load(Ordering::Relaxed),
            "a compute thread panicked"
        );
        all
    }

    /// Run a whole task.
    pub fn run(&mut self, task: Task) {
        self.begin(task);
        while self.step() {}
        while !self.ended() {
            std::hint::spin_loop();
        }
    }
}

impl<J: Job> Drop for Pool<J> {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        for (thread, handle) in self.workers.drain(..) {
            thread.unpark();
            // A worker's panic was reported by `ended`; here it must not hide the first.
            drop(handle.join());
        }
    }
}

fn work<J: Job>(state: &State<J>, thread: usize) {
    let parked = &state.parked[thread - 1];
    let mut idle_since: Option<Instant> = None;
    loop {
        if state.take(thread) {
            idle_since = None;
            continue;
        }
        if state.stop.load(Ordering::Relaxed) {
            return;
        }
        for _ in 0..32 {
            std::hint::spin_loop();
        }
        if idle_since.get_or_insert_with(Instant::now).elapsed() < SPIN {
            continue;
        }
        parked.store(true, Ordering::SeqCst);
        // The leader stores the ticket before it reads `parked`, and we the other way about: one
        // of the two sees the other, so no task is slept through.
        if state.ticket.load(Ordering::SeqCst) as u32 == 0 && !state.stop.load(Ordering::SeqCst) {
            thread::park();
        }
        parked.store(false, Ordering::SeqCst);
        idle_since = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Marks(Vec<AtomicU32>);
    impl Job for Marks {
        fn run(&self, task: Task, chunk: u32, _thread: usize) {
            self.0[(task.arg + u64::from(chunk)) as usize].fetch_add(1, Ordering::Relaxed);
            if task.kind == 1 && chunk == 3 {
                panic!("asked to");
            }
        }
    }

    #[test]
    fn every_chunk_runs_once() {
        for threads in [1, 2, 5] {
            let job = Arc::new(Marks((0..4000).map(|_| AtomicU32::new(0)).collect()));
            let mut pool = Pool::new(threads, 64 << 10, Arc::clone(&job)).unwrap();
            let (mut first, mut chunks) = (0u32, 0u32);
            while first + chunks <= 4000 {
                pool.run(Task {
                    kind: 0,
                    arg: u64::from(first),
                    chunks,
                });
                first += chunks;
                chunks = (chunks + 1) % 23;
                if chunks == 7 {
                    // Long enough for the workers to park.
                    thread::sleep(Duration::from_micros(300));
                }
            }
            for (index, mark) in job.0.iter().enumerate() {
                assert_eq!(
                    mark.load(Ordering::Relaxed),
                    u32::from((index as u32) < first),
                    "chunk {index}"
                );
            }
        }
    }

    #[test]
    fn a_worker_that_panics_is_reported() {
        let job = Arc::new(Marks((0..8).map(|_| AtomicU32::new(0)).collect()));
        let mut pool = Pool::new(2, 64 << 10, job).unwrap();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(Task {
                kind: 1,
                arg: 0,
                chunks: 8,
            });
        }));
        assert!(caught.is_err());
    }
}
