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

/// Pages that are being written, one group after the other.
pub(super) struct Writer<'a, 'b> {
    pages: &'a mut [&'b mut [u8]],
    at: Cursor,
    room: [u8; GROUP_MAX],
    /// Bytes of the group that are in `room`.
    apart: usize,
}

impl<'a, 'b> Writer<'a, 'b> {
    pub(super) fn new(pages: &'a mut [&'b mut [u8]]) -> Self {
        Self {
            pages,
            at: Cursor::default(),
            room: [0; GROUP_MAX],
            apart: 0,
        }
    }

    /// Room for the next group's `len` bytes (at most [`GROUP_MAX`]): in place where they lie in one page, else
    /// aside, from where [`Writer::end`] takes them.
    ///
    /// # Panics
    /// The pages are full.
    #[inline(always)]
    pub(super) fn begin(&mut self, len: usize) -> &mut [u8] {
        let Self { pages, at, .. } = self;
        at.settle(pages.len(), |page| pages[page].len());
        let Cursor { page, at: start } = *at;
        if pages[page].len() - start >= len {
            at.at += len;
            &mut pages[page][start..start + len]
        } else {
            self.apart = len;
            &mut self.room[..len]
        }
    }

    /// Ends what [`Writer::begin`] began.
    #[inline(always)]
    pub(super) fn end(&mut self) {
        if self.apart > 0 {
            self.flush();
        }
    }

    #[inline(never)]
    fn flush(&mut self) {
        let mut bytes = &self.room[..self.apart];
        while !bytes.is_empty() {
            let (pages, at) = (&mut *self.pages, &mut self.at);
            at.settle(pages.len(), |page| pages[page].len());
            let left = &mut pages[at.page][at.at..];
            let len = left.len().min(bytes.len());
            left[..len].copy_from_slice(&bytes[..len]);
            bytes = &bytes[len..];
            at.at += len;
        }
        self.apart = 0;
    }
}
