//! Codes that lie in several pieces: a run of groups goes over page after page, and a group may begin in
//! one and end in the next.

use leanstream_core::act::codec::GROUP_MAX;

/// A place in a list of pages.
#[derive(Clone, Copy, Default)]
pub(super) struct Cursor {
    page: usize,
    at: usize,
}

impl Cursor {
    /// The next `len` bytes (at most [`GROUP_MAX`]) to write: in place where they lie in one page, else in `room`,
    /// from where [`Cursor::flush`] takes them.
    ///
    /// # Panics
    /// The pages are full.
    #[inline(always)]
    pub(super) fn next<'a>(
        &mut self,
        pages: &'a mut [&mut [u8]],
        len: usize,
        room: &'a mut [u8; GROUP_MAX],
    ) -> (&'a mut [u8], bool) {
        self.settle(pages.len(), |page| pages[page].len());
        let (page, at) = (self.page, self.at);
        if pages[page].len() - at >= len {
            self.at += len;
            (&mut pages[page][at..at + len], false)
        } else {
            (&mut room[..len], true)
        }
    }

    /// Writes what didn't fit into one page.
    #[inline(never)]
    pub(super) fn flush(&mut self, pages: &mut [&mut [u8]], mut bytes: &[u8]) {
        while !bytes.is_empty() {
            self.settle(pages.len(), |page| pages[page].len());
            let left = &mut pages[self.page][self.at..];
            let len = left.len().min(bytes.len());
            left[..len].copy_from_slice(&bytes[..len]);
            bytes = &bytes[len..];
            self.at += len;
        }
    }

    /// The next `len` bytes to read, gathered in `room` if they lie in several pages.
    ///
    /// # Panics
    /// The pages are at an end.
    #[inline(always)]
    pub(super) fn read<'a>(
        &mut self,
        pages: &'a [&[u8]],
        len: usize,
        room: &'a mut [u8; GROUP_MAX],
    ) -> &'a [u8] {
        self.settle(pages.len(), |page| pages[page].len());
        let (page, at) = (self.page, self.at);
        if pages[page].len() - at >= len {
            self.at += len;
            &pages[page][at..at + len]
        } else {
            self.gather(pages, &mut room[..len]);
            &room[..len]
        }
    }

    #[inline(never)]
    fn gather(&mut self, pages: &[&[u8]], mut out: &mut [u8]) {
        while !out.is_empty() {
            self.settle(pages.len(), |page| pages[page].len());
            let left = &pages[self.page][self.at..];
            let len = left.len().min(out.len());
            out[..len].copy_from_slice(&left[..len]);
            out = &mut out[len..];
            self.at += len;
        }
    }

    /// Goes on to the next page at the end of one.
    #[inline(always)]
    fn settle(&mut self, pages: usize, len: impl Fn(usize) -> usize) {
        while self.page < pages && self.at == len(self.page) {
            *self = Self {
                page: self.page + 1,
                at: 0,
            };
        }
        assert!(self.page < pages, "the codes fit into the pages");
    }
}
