//! The one block of memory that weights stream into: equal slots inside one anonymous mapping.
//!
//! Core knows slot *numbers* and decides who may use them; the arena holds the bytes and keeps its
//! own witness of what happens to each slot. The two must agree: a slot that is filled while
//! somebody reads it, or read while it is being filled, is a bug in the program, so it panics.
//!
//! A slot's life:
//!
//! ```text
//! Free --begin_fill--> Filling --end_fill(ok)--> Ready --bytes()/drop--> Ready with n readers
//!   ^                     |                        |
//!   +----end_fill(!ok)----+                        +--begin_fill (evicts; no readers) or release
//! ```
//!
//! The mapping is untouched at first: a page costs memory only once it is written, and never more
//! than `slots * slot_bytes` in all.

use std::ops::Deref;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use leanstream_core::units::SlotId;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Slots start and end on multiples of this many bytes: the largest alignment O_DIRECT asks for on
/// common devices, and the smallest page.
pub const SLOT_ALIGN: usize = 4096;

/// Huge pages are this big on x86-64 and on AArch64 with 4 KiB pages.
const HUGE: usize = 2 << 20;

/// Below this many bytes huge pages aren't asked for: rounding would matter and misses wouldn't.
const HUGE_BYTES_MIN: usize = 16 << 20;

const FREE: u32 = 0;
const FILLING: u32 = 1;
/// Ready without readers; each reader adds one.
const READY: u32 = 2;

/// What a slot holds, as the arena saw it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lease {
    /// Nothing worth reading.
    Free,
    /// A read is writing into it.
    Filling,
    /// Filled; this many readers hold it.
    Ready(u32),
}

impl Lease {
    fn of(state: u32) -> Self {
        match state {
            FREE => Self::Free,
            FILLING => Self::Filling,
            n => Self::Ready(n - READY),
        }
    }
}

/// `slots` slots of `slot_bytes` bytes each. Shared as `Arc<Arena>`; freed when the last owner goes.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    /// Mapped bytes from `base`: `slots * slot_bytes`, rounded up to whole pages by the kernel.
    bytes: usize,
    slot_bytes: usize,
    states: Box<[AtomicU32]>,
}

// SAFETY: `base` is plain memory owned by the arena. Every access to it goes through a slot's state:
// `Fill` is the only writer of a Filling slot, `SlotBytes` are the readers of a Ready one.
unsafe impl Send for Arena {}
// SAFETY: as above; the states are atomics.
unsafe impl Sync for Arena {}

impl Arena {
    /// Map room for `slots` slots of `slot_bytes` bytes. The start is 2 MiB aligned, and huge pages
    /// are asked for when the arena has at least 16 MiB.
    ///
    /// # Errors
    /// The kernel's refusal to map that many bytes.
    ///
    /// # Panics
    /// When `slot_bytes` is 0 or no multiple of [`SLOT_ALIGN`], or `slots` is 0.
    pub fn new(slots: u32, slot_bytes: usize) -> std::io::Result<Self> {
        assert!(slots > 0, "an arena needs a slot");
        assert!(
            slot_bytes > 0 && slot_bytes.is_multiple_of(SLOT_ALIGN),
            "slots of {slot_bytes} bytes: not a multiple of {SLOT_ALIGN}"
        );
        let too_big = || std::io::Error::from_raw_os_error(libc::ENOMEM);
        let bytes = slot_bytes.checked_mul(slots as usize).ok_or_else(too_big)?;
        let base = map_aligned(bytes).ok_or_else(too_big)??;
        if bytes >= HUGE_BYTES_MIN {
            // SAFETY: the range is the mapping just made; the advice changes no content. A kernel
            // without huge pages refuses, and nothing is lost.
            let _ = unsafe { madvise(base.as_ptr().cast(), bytes, Advice::LinuxHugepage) };
        }
        let states = (0..slots).map(|_| AtomicU32::new(FREE)).collect();
        Ok(Self {
            base,
            bytes,
            slot_bytes,
            states,
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.states.len() as u32
    }

    /// Bytes of one slot, a multiple of [`SLOT_ALIGN`].
    pub fn slot_bytes(&self) -> usize {
        self.slot_bytes
    }

    /// Bytes of all slots: what the arena can cost in memory.
    pub fn total_bytes(&self) -> usize {
        self.bytes
    }

    /// First byte of slot 0, 2 MiB aligned: for registering the arena with a device.
    pub fn as_base_ptr(&self) -> NonNull<u8> {
        self.base
    }

    /// What `slot` holds now.
    pub fn lease(&self, slot: SlotId) -> Lease {
        Lease::of(self.state(slot).load(Ordering::Acquire))
    }

    /// Take `slot` for writing. What it held is gone: core evicts by reusing a slot.
    ///
    /// # Panics
    /// When the slot is being filled already, or somebody reads it.
    pub fn begin_fill(&self, slot: SlotId) -> Fill {
        self.take(slot, "filled");
        Fill {
            slot,
            ptr: self.slot_ptr(slot),
            len: self.slot_bytes,
        }
    }

    /// Makes `slot` one that is being filled; `what` becomes of it is for the message.
    fn take(&self, slot: SlotId, what: &str) {
        let taken = self
            .state(slot)
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |s| {
                (s == FREE || s == READY).then_some(FILLING)
            })
            .map_err(Lease::of);
        assert!(
            taken.is_ok(),
            "slot {}: {what} while it is {:?}",
            slot.0,
            taken.unwrap_err()
        );
    }

    /// The write is over. With `ok` the slot's bytes may be read from now on, otherwise it is free.
    ///
    /// # Panics
    /// When the slot isn't being filled, or `fill` came from another arena.
    pub fn end_fill(&self, fill: Fill, ok: bool) {
        assert!(
            fill.ptr == self.slot_ptr(fill.slot),
            "slot {}: its fill belongs to another arena",
            fill.slot.0
        );
        let was = self
            .state(fill.slot)
            .swap(if ok { READY } else { FREE }, Ordering::Release);
        assert!(
            was == FILLING,
            "slot {}: its fill ended while it was {:?}",
            fill.slot.0,
            Lease::of(was)
        );
    }

    /// Forget what a ready slot holds; its memory stays mapped.
    ///
    /// # Panics
    /// When the slot isn't ready, or somebody reads it.
    pub fn release(&self, slot: SlotId) {
        let freed =
            self.state(slot)
                .compare_exchange(READY, FREE, Ordering::AcqRel, Ordering::Acquire);
        assert!(
            freed.is_ok(),
            "slot {}: released while it is {:?}",
            slot.0,
            freed.map_err(Lease::of).unwrap_err()
        );
    }

    /// Forgets what the slots from `first` on hold and gives their memory back to the system: the resident
    /// size falls at once. They may be filled again.
    ///
    /// # Errors
    /// The kernel refuses (locked memory); the slots are free all the same.
    ///
    /// # Panics
    /// When one of them is being filled, or somebody reads it.
    pub fn discard_from(&self, first: SlotId) -> std::io::Result<()> {
        let from = first.0 as usize;
        for slot in from..self.states.len() {
            self.take(SlotId(slot as u32), "discarded");
        }
        let start = (from * self.slot_bytes).next_multiple_of(rustix::param::page_size());
        let mut done = Ok(());
        if start < self.bytes {
            // SAFETY: whole pages inside the mapping, all in slots that are Filling by this call's doing, so
            // nobody else reads or writes them.
            unsafe {
                let at = self.base.add(start).as_ptr().cast();
                done = madvise(at, self.bytes - start, Advice::LinuxDontNeed);
                // Else the kernel may make the huge page whole again in which the slots before end.
                let _ = madvise(at, self.bytes - start, Advice::LinuxNoHugepage);
            }
        }
        for state in self.states.iter().skip(from) {
            state.store(FREE, Ordering::Release);
        }
        Ok(done?)
    }

    /// The bytes of a ready slot, `slot_bytes` long. The slot can't be refilled while the result
    /// lives.
    ///
    /// # Panics
    /// When the slot isn't ready.
    pub fn bytes(&self, slot: SlotId) -> SlotBytes<'_> {
        let state = self.state(slot);
        let read = state
            .fetch_update(Ordering::Acquire, Ordering::Relaxed, |s| {
                (s >= READY).then(|| s.checked_add(1).expect("fewer than 4 billion readers"))
            })
            .map_err(Lease::of);
        assert!(
            read.is_ok(),
            "slot {}: read while it is {:?}",
            slot.0,
            read.unwrap_err()
        );
        // SAFETY: the slot lies inside the mapping and is initialised (anonymous memory starts as
        // zeros). It is Ready with a reader, and stays so until the result is dropped, so no `Fill`
        // of it exists and nobody writes.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.slot_ptr(slot).as_ptr(), self.slot_bytes) };
        SlotBytes { bytes, state }
    }

    fn state(&self, slot: SlotId) -> &AtomicU32 {
        assert!(
            (slot.0 as usize) < self.states.len(),
            "slot {} of an arena of {}",
            slot.0,
            self.states.len()
        );
        &self.states[slot.0 as usize]
    }

    fn slot_ptr(&self, slot: SlotId) -> NonNull<u8> {
        assert!((slot.0 as usize) < self.states.len());
        // SAFETY: the slot's number was just checked, so the result is inside the mapping.
        unsafe { self.base.add(slot.0 as usize * self.slot_bytes) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and no `SlotBytes` outlives the arena. A `Fill` holds only an
        // address; its holder owns the arena with an `Arc` while a device may write there.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

/// The right to write one slot, given by [`Arena::begin_fill`] and handed back to
/// [`Arena::end_fill`]. Whoever holds it keeps the arena alive (an `Arc<Arena>`) until the device
/// has stopped writing.
#[derive(Debug)]
#[must_use = "a slot stays Filling until its fill is ended"]
pub struct Fill {
    slot: SlotId,
    ptr: NonNull<u8>,
    len: usize,
}

// SAFETY: a `Fill` is the only right to write its slot and may be used from any thread.
unsafe impl Send for Fill {}

impl Fill {
    /// The slot it fills.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// First byte of the slot, aligned to [`SLOT_ALIGN`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// Bytes of the slot.
    #[expect(clippy::len_without_is_empty, reason = "slots are never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

/// A ready slot's bytes. Counts as a reader of the slot until dropped.
#[derive(Debug)]
pub struct SlotBytes<'a> {
    bytes: &'a [u8],
    state: &'a AtomicU32,
}

impl Deref for SlotBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl Drop for SlotBytes<'_> {
    fn drop(&mut self) {
        self.state.fetch_sub(1, Ordering::Release);
    }
}

/// Gives the whole pages of `floats` back to the system: they are zero from now on, and cost memory again
/// once they are written.
///
/// # Errors
/// The kernel refuses (locked memory).
pub fn discard(floats: &mut [f32]) -> std::io::Result<()> {
    let page = rustix::param::page_size();
    let bytes = size_of_val(floats);
    let start = floats.as_mut_ptr().cast::<u8>();
    let first = start.align_offset(page);
    if bytes < first || bytes - first < page {
        return Ok(());
    }
    let whole = (bytes - first) / page * page;
    // SAFETY: whole pages inside a slice that is borrowed exclusively. The heap's memory is private and
    // anonymous, so they become zeros, which are floats.
    unsafe { madvise(start.add(first).cast(), whole, Advice::LinuxDontNeed)? };
    Ok(())
}

/// Map `bytes` anonymous bytes that start on a huge page. `None` if no address space could hold them.
fn map_aligned(bytes: usize) -> Option<std::io::Result<NonNull<u8>>> {
    let kept = bytes.checked_next_multiple_of(rustix::param::page_size())?;
    let padded = kept.checked_add(HUGE)?;
    // SAFETY: a fresh private mapping at an address of the kernel's choice aliases nothing.
    let mapped = unsafe {
        mmap_anonymous(
            std::ptr::null_mut(),
            padded,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
        )
    };
    let start = match mapped {
        Ok(start) => start.cast::<u8>(),
        Err(errno) => return Some(Err(errno.into())),
    };
    let head = start.align_offset(HUGE);
    let tail = HUGE - head;
    // SAFETY: head and tail are whole pages inside the mapping just made (both it and the huge page
    // are multiples of a page), nothing refers to them, and `base` lies between them.
    let base = unsafe {
        if head > 0 {
            let _ = munmap(start.cast(), head);
        }
        if tail > 0 {
            let _ = munmap(start.add(head + kept).cast(), tail);
        }
        start.add(head)
    };
    Some(Ok(NonNull::new(base).expect("mmap never maps address 0")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn arena() -> Arena {
        Arena::new(3, 8192).unwrap()
    }

    /// Fill `slot` with `byte` as a backend would.
    fn fill(arena: &Arena, slot: SlotId, byte: u8) {
        let fill = arena.begin_fill(slot);
        // SAFETY: the fill is the only right to write these bytes.
        unsafe { fill.as_ptr().write_bytes(byte, fill.len()) };
        arena.end_fill(fill, true);
    }

    #[track_caller]
    fn refused(what: &str, f: impl FnOnce()) {
        let panic = catch_unwind(AssertUnwindSafe(f)).expect_err(what);
        let said = panic.downcast_ref::<String>().expect("a formatted message");
        assert!(said.contains("slot 1"), "{said}");
    }

    #[test]
    fn slots_are_aligned_and_apart() {
        let a = arena();
        assert_eq!(a.as_base_ptr().as_ptr() as usize % HUGE, 0);
        for i in 0..3 {
            fill(&a, SlotId(i), i as u8 + 1);
        }
        for i in 0..3 {
            let b = a.bytes(SlotId(i));
            assert_eq!(b.len(), 8192);
            assert!(b.iter().all(|&x| x == i as u8 + 1), "slot {i}");
        }
    }

    #[test]
    fn a_life_in_order() {
        let (a, s) = (arena(), SlotId(1));
        assert_eq!(a.lease(s), Lease::Free);
        let f = a.begin_fill(s);
        assert_eq!(a.lease(s), Lease::Filling);
        a.end_fill(f, false);
        assert_eq!(a.lease(s), Lease::Free);
        fill(&a, s, 7);
        {
            let (_x, _y) = (a.bytes(s), a.bytes(s));
            assert_eq!(a.lease(s), Lease::Ready(2));
        }
        assert_eq!(a.lease(s), Lease::Ready(0));
        a.release(s);
        assert_eq!(a.lease(s), Lease::Free);
        fill(&a, s, 8);
        // Reuse without release is how core evicts.
        fill(&a, s, 9);
        assert_eq!(a.bytes(s)[8191], 9);
    }

    #[test]
    fn discarded_slots_are_zero_and_the_others_stay() {
        let a = arena();
        (0..3).for_each(|i| fill(&a, SlotId(i), 9));
        a.discard_from(SlotId(1)).expect("memory isn't locked");
        assert!(a.bytes(SlotId(0)).iter().all(|byte| *byte == 9));
        for i in 1..3 {
            assert_eq!(a.lease(SlotId(i)), Lease::Free);
            let fill = a.begin_fill(SlotId(i));
            a.end_fill(fill, true);
            if rustix::param::page_size() == SLOT_ALIGN {
                assert!(a.bytes(SlotId(i)).iter().all(|byte| *byte == 0));
            }
        }
        let mut floats = vec![1.0; 1 << 20];
        discard(&mut floats[1000..]).expect("memory isn't locked");
        assert!(floats[..1000].iter().all(|x| *x == 1.0));
        assert!(floats[(1 << 20) / 2] == 0.0);
    }

    #[test]
    fn misuse_panics_and_names_the_slot() {
        let (a, s) = (arena(), SlotId(1));
        refused("read a free slot", || drop(a.bytes(s)));
        refused("release a free slot", || a.release(s));
        let f = a.begin_fill(s);
        refused("read while filling", || drop(a.bytes(s)));
        refused("fill twice", || drop(a.begin_fill(s)));
        refused("release while filling", || a.release(s));
        let other = arena();
        refused("a fill of another arena", || other.end_fill(f, true));
        let (a, s) = (arena(), SlotId(1));
        fill(&a, s, 1);
        let held = a.bytes(s);
        refused("refill while read", || drop(a.begin_fill(s)));
        refused("release while read", || a.release(s));
        refused("discard while read", || drop(a.discard_from(s)));
        drop(held);
        fill(&a, s, 2);
    }

    #[test]
    #[should_panic(expected = "slot 3 of an arena of 3")]
    fn a_slot_beyond_the_end() {
        let _ = arena().begin_fill(SlotId(3));
    }

    #[test]
    #[should_panic(expected = "not a multiple of 4096")]
    fn odd_slot_sizes() {
        let _ = Arena::new(1, 4097);
    }

    #[test]
    fn sizes_that_cannot_be() {
        let huge = usize::MAX & !(SLOT_ALIGN - 1);
        assert!(Arena::new(1, huge).is_err());
        assert!(Arena::new(u32::MAX, huge).is_err());
    }

    #[test]
    fn big_arenas_map_and_unmap_whole() {
        for _ in 0..4 {
            let a = Arena::new(65, 1 << 18).unwrap();
            assert_eq!(a.as_base_ptr().as_ptr() as usize % HUGE, 0);
            fill(&a, SlotId(64), 3);
            assert_eq!(a.bytes(SlotId(64))[(1 << 18) - 1], 3);
        }
    }
}
