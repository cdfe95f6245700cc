//! The bytes of the page pool: equal pages inside one anonymous mapping.
//!
//! Core decides which page holds what; here are the bytes. A page costs memory from the first write on,
//! until [`Pages::discard`] gives it back to the system: then the resident size falls at once. Huge
//! pages are declined, since with them one byte written could cost 2 MiB.

use std::io;
use std::ops::Range;
use std::ptr::NonNull;

use leanstream_core::act::pool::PageId;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// Pages of equal size. All accesses are to byte ranges inside one page.
#[derive(Debug)]
pub struct Pages {
    base: NonNull<u8>,
    count: u32,
    page_bytes: usize,
}

// SAFETY: `base` is plain memory owned by the mapping; whoever shares it keeps to the contract of
// `bytes` and `bytes_mut`.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Maps room for `count` pages of `page_bytes` bytes; no memory is used yet.
    ///
    /// # Errors
    /// The kernel's refusal to map that much.
    ///
    /// # Panics
    /// `count` is 0, or `page_bytes` no multiple of the system's page.
    pub fn new(count: u32, page_bytes: usize) -> io::Result<Self> {
        let system = rustix::param::page_size();
        assert!(count > 0, "an arena needs a page");
        assert!(
            page_bytes > 0 && page_bytes.is_multiple_of(system),
            "pages of {page_bytes} bytes: no multiple of the system's {system}"
        );
        let bytes = page_bytes
            .checked_mul(count as usize)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        // SAFETY: the range is the mapping just made; the advice changes no content. A kernel without
        // huge pages refuses, and nothing is lost.
        let _ = unsafe { madvise(base, bytes, Advice::LinuxNoHugepage) };
        Ok(Self {
            base: NonNull::new(base.cast()).expect("mmap never maps address 0"),
            count,
            page_bytes,
        })
    }

    /// The smallest page that can be given back to the system alone: 4096 bytes, or the system's page.
    pub fn least_bytes() -> usize {
        rustix::param::page_size().max(4096)
    }

    /// Number of pages.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }

    /// Bytes `range` of a page.
    ///
    /// # Safety
    /// Nobody writes these bytes while the result lives.
    ///
    /// # Panics
    /// They aren't inside the page.
    pub unsafe fn bytes(&self, page: PageId, range: Range<usize>) -> &[u8] {
        let at = self.address(page, &range);
        // SAFETY: inside the mapping, initialised (anonymous memory starts as zeros), and by contract
        // not written.
        unsafe { std::slice::from_raw_parts(at, range.len()) }
    }

    /// Bytes `range` of a page, to be written.
    ///
    /// # Safety
    /// Nobody else reads or writes these bytes while the result lives.
    ///
    /// # Panics
    /// They aren't inside the page.
    #[expect(
        clippy::mut_from_ref,
        reason = "threads write disjoint parts of pages; the contract says so"
    )]
    pub unsafe fn bytes_mut(&self, page: PageId, range: Range<usize>) -> &mut [u8] {
        let at = self.address(page, &range);
        // SAFETY: inside the mapping, initialised, and by contract nobody else's.
        unsafe { std::slice::from_raw_parts_mut(at, range.len()) }
    }

    /// Copies page `from` to page `to`.
    pub fn copy(&mut self, from: PageId, to: PageId) {
        assert_ne!(from, to);
        let whole = 0..self.page_bytes;
        // SAFETY: two pages, both inside the mapping, which is borrowed exclusively.
        let (from, to) = unsafe { (self.bytes(from, whole.clone()), self.bytes_mut(to, whole)) };
        to.copy_from_slice(from);
    }

    /// Gives the memory of these pages back to the system. They are zeros from now on.
    ///
    /// # Errors
    /// The kernel refuses (locked memory).
    pub fn discard(&mut self, pages: Range<u32>) -> io::Result<()> {
        assert!(pages.start <= pages.end && pages.end <= self.count);
        if pages.is_empty() {
            return Ok(());
        }
        let bytes = (pages.end - pages.start) as usize * self.page_bytes;
        // SAFETY: whole pages inside the mapping, which is borrowed exclusively: no reference into it
        // exists.
        unsafe {
            let at = self.base.add(pages.start as usize * self.page_bytes);
            madvise(at.as_ptr().cast(), bytes, Advice::LinuxDontNeed)?;
        }
        Ok(())
    }

    /// Bytes of the arena that are in memory now, as the kernel counts them.
    ///
    /// # Errors
    /// The kernel's refusal.
    pub fn resident_bytes(&self) -> io::Result<usize> {
        let system = rustix::param::page_size();
        let mut resident = 0;
        let mut seen = [0u8; 1024];
        let bytes = self.count as usize * self.page_bytes;
        for start in (0..bytes).step_by(seen.len() * system) {
            let len = (bytes - start).min(seen.len() * system);
            // SAFETY: the range lies inside the mapping, and `seen` has a byte for each of its pages.
            let rc = unsafe {
                let at = self.base.add(start).as_ptr().cast();
                libc::mincore(at, len, seen.as_mut_ptr().cast())
            };
            if rc != 0 {
                return Err(io::Error::last_os_error());
            }
            let pages = &seen[..len / system];
            resident += pages.iter().filter(|&&page| page & 1 == 1).count() * system;
        }
        Ok(resident)
    }

    fn address(&self, page: PageId, range: &Range<usize>) -> *mut u8 {
        assert!(page.0 < self.count, "page {} of {}", page.0, self.count);
        assert!(
            range.start <= range.end && range.end <= self.page_bytes,
            "inside a page"
        );
        // SAFETY: page and range were just checked: the address is inside the mapping or at its end.
        unsafe {
            self.base
                .add(page.0 as usize * self.page_bytes + range.start)
                .as_ptr()
        }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        let bytes = self.count as usize * self.page_bytes;
        // SAFETY: the mapping is ours, and no reference into it outlives the arena.
        let unmapped = unsafe { munmap(self.base.as_ptr().cast(), bytes) };
        debug_assert!(unmapped.is_ok());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(pages: &mut Pages, page: u32, byte: u8) {
        // SAFETY: the arena is borrowed exclusively.
        unsafe { pages.bytes_mut(PageId(page), 0..pages.page_bytes()) }.fill(byte);
    }

    fn first(pages: &mut Pages, page: u32) -> u8 {
        // SAFETY: the arena is borrowed exclusively.
        let bytes = unsafe { pages.bytes(PageId(page), 0..pages.page_bytes()) };
        bytes[0]
    }

    #[test]
    fn memory_is_used_when_written_and_falls_when_discarded() {
        let size = Pages::least_bytes();
        let mut pages = Pages::new(3000, size).unwrap();
        assert_eq!(pages.resident_bytes().unwrap(), 0);
        for page in 0..2500 {
            fill(&mut pages, page, page as u8);
        }
        assert_eq!(pages.resident_bytes().unwrap(), 2500 * size);
        pages.discard(100..3000).unwrap();
        assert_eq!(pages.resident_bytes().unwrap(), 100 * size);
        pages.discard(3000..3000).unwrap();
        assert_eq!(first(&mut pages, 99), 99);
        assert_eq!(first(&mut pages, 100), 0);
    }

    #[test]
    fn copies_are_of_whole_pages() {
        let mut pages = Pages::new(3, Pages::least_bytes()).unwrap();
        for page in 0..3 {
            fill(&mut pages, page, page as u8 + 1);
        }
        pages.copy(PageId(2), PageId(0));
        assert_eq!([0, 1, 2].map(|page| first(&mut pages, page)), [3, 2, 3]);
    }

    #[test]
    #[should_panic(expected = "page 3 of 3")]
    fn a_page_beyond_the_end() {
        first(&mut Pages::new(3, Pages::least_bytes()).unwrap(), 3);
    }

    #[test]
    fn sizes_that_cannot_be() {
        let huge = (usize::MAX / 2) & !0xffff;
        assert!(Pages::new(1, huge).is_err());
        assert!(Pages::new(u32::MAX, huge).is_err());
    }
}
