//! Asking for memory before it is needed.

/// Bytes of a cache line on every processor this runs on.
const LINE: usize = 64;

/// How many scattered pieces of memory are asked for before the first of them is used: some hundred
/// lines in flight at most, so that a piece costs what it takes to transfer rather than a latency.
pub(super) const PIECES: usize = 4;

/// Bytes from the start of a piece that are asked for at once. What comes after them is read in order,
/// and either the processor or a later request sees to it.
pub(super) const START: usize = 1024;

/// [`prefetch`] for the start of a piece.
#[inline(always)]
pub(super) fn prefetch_start(piece: &[u8]) {
    prefetch(&piece[..piece.len().min(START)]);
}

/// Starts to bring the lines of `bytes` into the nearest cache. Only a hint: it changes no result.
#[inline(always)]
pub(super) fn prefetch(bytes: &[u8]) {
    for line in bytes.chunks(LINE) {
        prefetch_line(line.as_ptr());
    }
}

#[inline(always)]
fn prefetch_line(at: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch reads nothing that the program sees and never faults; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(all(target_arch = "aarch64", not(miri)))]
    // SAFETY: as above; the instruction changes neither registers nor memory.
    unsafe {
        std::arch::asm!(
            "prfm pldl1keep, [{at}]",
            at = in(reg) at,
            options(nostack, preserves_flags, readonly)
        );
    }
    #[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
    let _ = at;
}
