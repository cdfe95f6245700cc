//! Why reads failed, kept with the read: many are in flight, and the one that somebody asks about
//! need not be the one that failed last.

use leanstream_core::units::{Extent, ReadId};

use super::report::ReadError;

/// The reasons of reads whose latest attempt failed. Allocates nothing after it was made, as long as
/// no more ids are in use than there may be reads in flight; of more, the oldest reason goes.
#[derive(Debug)]
pub(super) struct Reasons {
    /// By age, the newest last; at most one for each id.
    list: Vec<(ReadId, ReadError)>,
}

impl Reasons {
    /// Room for `reads_max` ids.
    pub fn new(reads_max: u16) -> Self {
        Self {
            list: Vec::with_capacity(usize::from(reads_max).max(1)),
        }
    }

    /// `read` starts (again), or has ended otherwise than by failing here: what it was is forgotten.
    pub fn forget(&mut self, read: ReadId) {
        self.list.retain(|(id, _)| *id != read);
    }

    /// `read` failed.
    pub fn keep(&mut self, read: ReadId, error: ReadError) {
        self.forget(read);
        if self.list.len() == self.list.capacity() {
            self.list.remove(0);
        }
        self.list.push((read, error));
    }

    /// Why the latest read of `extent` failed.
    pub fn of(&self, extent: &Extent) -> Option<ReadError> {
        let same = |error: &ReadError| {
            (error.file, error.offset, error.len) == (extent.file, extent.offset, extent.len)
        };
        let newest_first = self.list.iter().rev().map(|(_, error)| *error);
        newest_first.into_iter().find(same)
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::{Cause, Errno};
    use super::*;
    use leanstream_core::units::FileId;

    fn extent(offset: u64) -> Extent {
        Extent {
            file: FileId(0),
            offset,
            len: 4096,
        }
    }

    fn error(offset: u64, errno: i32) -> ReadError {
        ReadError {
            file: FileId(0),
            offset,
            len: 4096,
            cause: Cause::Os(Errno(errno)),
        }
    }

    /// The last failure used to be given for whichever read was asked about.
    #[test]
    fn each_read_has_its_own_reason() {
        let mut reasons = Reasons::new(2);
        reasons.keep(ReadId(0), error(0, libc::EIO));
        reasons.keep(ReadId(1), error(4096, libc::ENODATA));
        assert_eq!(reasons.of(&extent(0)), Some(error(0, libc::EIO)));
        assert_eq!(reasons.of(&extent(4096)), Some(error(4096, libc::ENODATA)));
        assert_eq!(reasons.of(&extent(8192)), None);
        // Another try, another reason; then a read of something else by the same id.
        reasons.keep(ReadId(0), error(0, libc::ENXIO));
        assert_eq!(reasons.of(&extent(0)), Some(error(0, libc::ENXIO)));
        reasons.keep(ReadId(0), error(8192, libc::EIO));
        assert_eq!(reasons.of(&extent(0)), None);
        reasons.forget(ReadId(1));
        assert_eq!(reasons.of(&extent(4096)), None);
        // More ids than there is room for.
        for id in 0..9 {
            reasons.keep(ReadId(id), error(u64::from(id) * 4096, libc::EIO));
        }
        assert_eq!(
            reasons.of(&extent(8 * 4096)),
            Some(error(8 * 4096, libc::EIO))
        );
        assert_eq!(reasons.list.len(), 2);
    }
}
