//! Asking for memory before it is needed.

/// Bytes of a cache line on every processor this runs on.
const LINE: usize = 64;

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
