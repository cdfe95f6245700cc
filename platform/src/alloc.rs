//! The counting global allocator: proof that the loop allocates nothing after start.
//!
//! ```
//! use leanstream::alloc::Counting;
//! #[global_allocator]
//! static ALLOC: Counting = Counting::new();
//!
//! let ready = vec![1u8; 100];
//! ALLOC.seal();
//! let sum: u32 = ready.iter().map(|&b| u32::from(b)).sum();
//! assert_eq!(ALLOC.since_seal().calls, 0);
//! ALLOC.unseal();
//! assert_eq!(sum, 100);
//! ```
//!
//! It counts every thread of the process. Freeing is not counted.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Set this environment variable to `abort` to have the first allocation after sealing print where
/// it came from and abort. For debugging.
pub const STRICT_ENV: &str = "LEANSTREAM_SEAL";

/// Allocations counted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Count {
    /// Calls that allocated or grew a block.
    pub calls: usize,
    /// Bytes they asked for.
    pub bytes: usize,
}

/// The system's allocator, counted.
#[derive(Debug)]
pub struct Counting {
    calls: AtomicUsize,
    bytes: AtomicUsize,
    live: AtomicUsize,
    peak: AtomicUsize,
    sealed: AtomicBool,
    strict: AtomicBool,
    sealed_calls: AtomicUsize,
    sealed_bytes: AtomicUsize,
}

impl Default for Counting {
    fn default() -> Self {
        Self::new()
    }
}

impl Counting {
    /// For a `#[global_allocator]` static.
    pub const fn new() -> Self {
        Self {
            calls: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            live: AtomicUsize::new(0),
            peak: AtomicUsize::new(0),
            sealed: AtomicBool::new(false),
            strict: AtomicBool::new(false),
            sealed_calls: AtomicUsize::new(0),
            sealed_bytes: AtomicUsize::new(0),
        }
    }

    /// From now on count allocations as violations. Starts again from zero.
    pub fn seal(&self) {
        self.strict.store(
            std::env::var_os(STRICT_ENV).is_some_and(|value| value == "abort"),
            Ordering::Relaxed,
        );
        self.sealed_calls.store(0, Ordering::Relaxed);
        self.sealed_bytes.store(0, Ordering::Relaxed);
        self.sealed.store(true, Ordering::SeqCst);
    }

    /// Allocating is fine again: the work is done, or starts anew. The count since the seal stays.
    pub fn unseal(&self) {
        self.sealed.store(false, Ordering::SeqCst);
    }

    /// Allocations while sealed, since the last [`seal`](Self::seal).
    pub fn since_seal(&self) -> Count {
        Count {
            calls: self.sealed_calls.load(Ordering::Relaxed),
            bytes: self.sealed_bytes.load(Ordering::Relaxed),
        }
    }

    /// Allocations since the process started.
    pub fn total(&self) -> Count {
        Count {
            calls: self.calls.load(Ordering::Relaxed),
            bytes: self.bytes.load(Ordering::Relaxed),
        }
    }

    /// Bytes allocated and not freed, without the allocator's own overhead.
    pub fn live_bytes(&self) -> usize {
        self.live.load(Ordering::Relaxed)
    }

    /// The most that [`live_bytes`](Self::live_bytes) ever was.
    pub fn peak_bytes(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    /// `bytes` were asked for, of which `grown` are new.
    fn count(&self, bytes: usize, grown: usize) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let live = self.live.fetch_add(grown, Ordering::Relaxed) + grown;
        self.peak.fetch_max(live, Ordering::Relaxed);
        if self.sealed.load(Ordering::Relaxed) {
            self.violated(bytes);
        }
    }

    #[cold]
    fn violated(&self, bytes: usize) {
        self.sealed_calls.fetch_add(1, Ordering::Relaxed);
        self.sealed_bytes.fetch_add(bytes, Ordering::Relaxed);
        // A backtrace allocates, so the first one to come here takes the seal off.
        if self.strict.load(Ordering::Relaxed) && self.sealed.swap(false, Ordering::Relaxed) {
            let trace = std::backtrace::Backtrace::force_capture();
            eprintln!("{bytes} bytes allocated after sealing ({STRICT_ENV}=abort):\n{trace}");
            std::process::abort();
        }
    }
}

// SAFETY: every call is passed to `System` unchanged; counting touches only atomics, except before an
// abort.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size(), layout.size());
        // SAFETY: the caller keeps `alloc`'s contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.count(layout.size(), layout.size());
        // SAFETY: the caller keeps `alloc_zeroed`'s contract.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        self.live.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller keeps `dealloc`'s contract.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let shrunk = layout.size().saturating_sub(size);
        self.live.fetch_sub(shrunk, Ordering::Relaxed);
        self.count(size, size.saturating_sub(layout.size()));
        // SAFETY: the caller keeps `realloc`'s contract.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Not the global one, so other tests' allocations don't count here.
    fn touch(counting: &Counting, size: usize) {
        let layout = Layout::from_size_align(size, 8).unwrap();
        let larger = Layout::from_size_align(size * 2, 8).unwrap();
        // SAFETY: the size isn't 0, and each block is freed once with the layout it has.
        unsafe {
            let block = counting.alloc(layout);
            assert!(!block.is_null());
            let block = counting.realloc(block, layout, size * 2);
            assert!(!block.is_null());
            counting.dealloc(block, larger);
            let block = counting.alloc_zeroed(layout);
            assert_eq!(*block, 0);
            counting.dealloc(block, layout);
        }
    }

    #[test]
    fn counts_all_and_separately_since_the_seal() {
        let c = Counting::new();
        touch(&c, 100);
        let expected = Count {
            calls: 3,
            bytes: 400,
        };
        assert_eq!(c.total(), expected);
        assert_eq!(c.since_seal(), Count::default());
        assert_eq!((c.live_bytes(), c.peak_bytes()), (0, 200));
        c.seal();
        touch(&c, 10);
        c.unseal();
        touch(&c, 1000);
        assert_eq!(
            c.since_seal(),
            Count {
                calls: 3,
                bytes: 40
            }
        );
        c.seal();
        assert_eq!(c.since_seal(), Count::default(), "each seal starts at zero");
        assert_eq!(c.peak_bytes(), 2000);
    }
}
