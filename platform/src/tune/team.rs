//! Fork and join: a function over numbered chunks, on all threads, borrowing what it works on.
//!
//! The training pass is a sequence of such forks. Results don't depend on which thread takes a chunk;
//! what is cut into chunks must not depend on the number of threads where sums are concerned.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::lent::Lent;
use crate::pool::{Job, Pool, Task};

/// Bytes of a worker's stack.
pub const STACK_BYTES: usize = 256 << 10;

type Chunk<'a> = &'a (dyn Fn(usize, usize) + Sync);

/// The pool's job: the closure whose address the task carries.
#[derive(Default)]
struct Errand {
    panicked: AtomicBool,
}

impl Job for Errand {
    fn run(&self, task: Task, chunk: u32, thread: usize) {
        let at = ptr::with_exposed_provenance::<Chunk<'_>>(task.arg as usize);
        // SAFETY: `Team::each` keeps the closure alive until all its chunks have ended, and no chunk
        // unwinds past here.
        let f = unsafe { *at };
        if catch_unwind(AssertUnwindSafe(|| f(chunk as usize, thread))).is_err() {
            self.panicked.store(true, Ordering::Relaxed);
        }
    }
}

/// Threads that work together; the caller is one of them. Dropping it ends them.
pub struct Team {
    pool: RefCell<Pool<Errand>>,
    threads: usize,
}

/// Rows of floats that a fork writes: `data` is whole rows of `row` floats.
pub struct Sheet<'a> {
    /// (rows, row)
    pub data: &'a mut [f32],
    /// Floats a row.
    pub row: usize,
}

impl Team {
    /// A team of `threads` threads, the caller counted; at least 1.
    ///
    /// # Errors
    /// The operating system refuses a thread.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Ok(Self {
            pool: RefCell::new(Pool::new(
                threads,
                STACK_BYTES,
                Arc::new(Errand::default()),
            )?),
            threads,
        })
    }

    /// Threads, the caller counted.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `f(chunk, thread)` once for each of `chunks` chunks, and returns when all have ended.
    /// Allocates nothing.
    ///
    /// # Panics
    /// A chunk panicked, or `f` forks itself.
    pub fn each(&self, chunks: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        if chunks == 0 {
            return;
        }
        let mut pool = self.pool.borrow_mut();
        let chunk: Chunk<'_> = f;
        let task = Task {
            kind: 0,
            arg: (&raw const chunk).expose_provenance() as u64,
            chunks: u32::try_from(chunks).expect("fewer than 2^32 chunks"),
        };
        pool.run(task);
        let panicked = pool.job().panicked.swap(false, Ordering::Relaxed);
        assert!(!panicked, "a chunk panicked");
    }

    /// Runs `f(first row, rows of each sheet, thread)` over blocks of at most `per` rows.
    ///
    /// # Panics
    /// A sheet isn't whole rows, sheets differ in their number of rows, a chunk panicked.
    pub fn rows<const N: usize>(
        &self,
        sheets: [Sheet<'_>; N],
        per: usize,
        f: impl Fn(usize, [&mut [f32]; N], usize) + Sync,
    ) {
        assert!(N > 0 && per > 0, "something to cut");
        let count = sheets[0].data.len() / sheets[0].row;
        let lent = sheets.map(|sheet| {
            assert_eq!(
                sheet.data.len(),
                count * sheet.row,
                "as many whole rows in each sheet"
            );
            (Lent::new(sheet.data), sheet.row)
        });
        self.each(count.div_ceil(per), &|chunk, thread| {
            let first = chunk * per;
            let rows = per.min(count - first);
            let parts = lent.each_ref().map(|(sheet, row)| {
                // SAFETY: rows that no other chunk takes.
                unsafe { sheet.part(first * row, rows * row) }
            });
            f(first, parts, thread);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_written_once_by_whoever_takes_them() {
        for threads in [1, 2, 3] {
            let team = Team::new(threads).unwrap();
            for (count, per) in [(0, 3), (1, 3), (7, 3), (9, 3), (5, 100)] {
                let (mut a, mut b) = (vec![0.0; count * 4], vec![0.0; count]);
                let sheets = [
                    Sheet {
                        data: &mut a,
                        row: 4,
                    },
                    Sheet {
                        data: &mut b,
                        row: 1,
                    },
                ];
                team.rows(sheets, per, |first, [a, b], _| {
                    for (i, (a, b)) in a.chunks_exact_mut(4).zip(b).enumerate() {
                        a.iter_mut().for_each(|a| *a += (first + i) as f32);
                        *b += (first + i) as f32;
                    }
                });
                for i in 0..count {
                    assert_eq!(a[4 * i..4 * i + 4], [i as f32; 4]);
                    assert_eq!(b[i], i as f32);
                }
            }
        }
    }

    #[test]
    fn a_panic_in_a_chunk_reaches_the_caller_after_all_have_ended() {
        let team = Team::new(2).unwrap();
        let seen = std::sync::atomic::AtomicUsize::new(0);
        let caught = catch_unwind(AssertUnwindSafe(|| {
            team.each(8, &|chunk, _| {
                seen.fetch_add(1, Ordering::Relaxed);
                assert_ne!(chunk, 3, "asked to");
            });
        }));
        assert!(caught.is_err());
        assert_eq!(seen.load(Ordering::Relaxed), 8);
        team.each(2, &|_, _| {});
    }
}
