//! One read from its command to its end, whoever does the system calls.
//!
//! The kernel may give fewer bytes than asked, ask for patience (EINTR, EAGAIN) or change its mind
//! about O_DIRECT; a [`Transfer`] keeps account and says what to ask next. Backends only carry its
//! [`Request`]s to the kernel and the answers back.

use leanstream_core::port::ReadCommand;
use leanstream_core::units::{FileId, ReadId};

use super::fault::{FaultPlan, KernelFault};
use super::report::{Cause, Counters, Errno, ReadError};
use super::source::Source;
use crate::arena::{Arena, Fill};

/// EINTR and EAGAIN in a row before a read is given up. Each costs a system call, so this is well
/// under a second.
const RETRIES_MAX: u32 = 10_000;

/// A read in flight.
#[derive(Debug)]
pub(super) struct Transfer {
    pub read: ReadId,
    fill: Fill,
    file: FileId,
    offset: u64,
    /// Bytes asked for, a multiple of the alignment.
    asked: u32,
    /// Bytes of those that the file has: when they are in the slot, the read is filled.
    want: u32,
    /// Bytes in the slot. A multiple of the alignment as long as `direct`.
    done: u32,
    direct: bool,
    retries: u32,
    /// Which read of the backend this is, counted from 0: what the fault plan is keyed by.
    ordinal: u64,
    /// Requests made so far.
    attempt: u32,
}

/// What to ask of the kernel: `len` bytes at `offset` of `file` into `ptr`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub file: FileId,
    pub direct: bool,
    pub offset: u64,
    pub ptr: *mut u8,
    pub len: u32,
}

/// What a kernel's answer leads to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Next {
    /// Make another request.
    Again,
    /// Every byte is there.
    Filled,
    /// It won't be.
    Failed(ReadError),
}

impl Transfer {
    /// Take the slot for `command`.
    ///
    /// # Errors
    /// The extent isn't in the file. The slot is left free.
    ///
    /// # Panics
    /// When the command breaks the contract of [`ReadCommand`]: an unaligned extent, one larger than
    /// the slot, an unknown file, or a slot in use.
    pub fn begin(
        command: &ReadCommand,
        source: &Source,
        arena: &Arena,
        ordinal: u64,
    ) -> Result<Self, ReadError> {
        let extent = command.extent;
        let align = source.align();
        assert!(
            extent.offset.is_multiple_of(u64::from(align)) && extent.len.is_multiple_of(align),
            "{extent:?} isn't aligned to {align}"
        );
        assert!(
            extent.len as usize <= arena.slot_bytes(),
            "{extent:?} doesn't fit a slot of {} bytes",
            arena.slot_bytes()
        );
        let file = source.file(extent.file);
        let fill = arena.begin_fill(command.slot);
        let left = file.len().saturating_sub(extent.offset);
        let want = left.min(u64::from(extent.len)) as u32;
        if want == 0 || extent.len - want >= align {
            arena.end_fill(fill, false);
            return Err(ReadError {
                file: extent.file,
                offset: extent.offset,
                len: extent.len,
                cause: Cause::PastEnd {
                    file_len: file.len(),
                },
            });
        }
        Ok(Self {
            read: command.read,
            fill,
            file: extent.file,
            offset: extent.offset,
            asked: extent.len,
            want,
            done: 0,
            direct: file.is_direct(),
            retries: 0,
            ordinal,
            attempt: 0,
        })
    }

    /// The slot being filled.
    pub fn slot(&self) -> u32 {
        self.fill.slot().0
    }

    /// What to ask the kernel next.
    pub fn request(&mut self, source: &Source, faults: Option<&FaultPlan>) -> Request {
        // Another read may have learnt that O_DIRECT is over.
        self.direct &= source.file(self.file).is_direct();
        let end = if self.direct { self.asked } else { self.want };
        let mut len = end - self.done;
        if let Some(plan) = faults
            && plan.kernel(self.ordinal, self.attempt) == KernelFault::Short
        {
            // Really ask for less, so that the rest of the slot still holds its old bytes.
            let unit = if self.direct { source.align() } else { 1 };
            len = (len / 2).next_multiple_of(unit).max(unit).min(len);
        }
        assert!(self.done < end && end as usize <= self.fill.len());
        Request {
            file: self.file,
            direct: self.direct,
            offset: self.offset + u64::from(self.done),
            // SAFETY: `done` is less than the length of the slot, as just asserted.
            ptr: unsafe { self.fill.as_ptr().add(self.done as usize) },
            len,
        }
    }

    /// The kernel answered a request with a byte count or an error.
    pub fn answered(
        &mut self,
        request: Request,
        answer: Result<u32, Errno>,
        source: &Source,
        faults: Option<&FaultPlan>,
        counters: &Counters,
    ) -> Next {
        let file = source.file(self.file);
        if !request.direct {
            Counters::add(&counters.buffered, 1);
            file.drop_behind(request.offset, u64::from(request.len));
        }
        let answer = match faults.map(|plan| plan.kernel(self.ordinal, self.attempt)) {
            Some(KernelFault::Interrupt) => Err(Errno(libc::EINTR)),
            Some(KernelFault::RefuseDirect) if request.direct => Err(Errno(libc::EINVAL)),
            _ => answer,
        };
        self.attempt = self.attempt.wrapping_add(1);
        match answer {
            Ok(0) => self.failed(Cause::Truncated {
                end: request.offset,
            }),
            Ok(bytes) => {
                Counters::add(&counters.bytes, u64::from(bytes));
                self.retries = 0;
                self.advance(bytes.min(request.len), source.align(), counters)
            }
            Err(errno @ (Errno(libc::EINTR) | Errno(libc::EAGAIN))) => {
                Counters::add(&counters.retries, 1);
                self.retries += 1;
                if self.retries > RETRIES_MAX {
                    return self.failed(Cause::TooManyRetries(errno));
                }
                Next::Again
            }
            // What a kernel says that can't do this read directly, whatever it did before.
            Err(errno @ (Errno(libc::EINVAL) | Errno(libc::EOPNOTSUPP))) if request.direct => {
                Counters::add(&counters.refused, 1);
                // The next request sees it, here and in every other read of the file.
                file.refuse_direct(errno);
                Next::Again
            }
            Err(errno) => self.failed(Cause::Os(errno)),
        }
    }

    /// `bytes` more are in the slot.
    fn advance(&mut self, bytes: u32, align: u32, counters: &Counters) -> Next {
        let done = self.done + bytes;
        if done >= self.want {
            return Next::Filled;
        }
        Counters::add(&counters.short, 1);
        // A direct read must go on from an aligned place. One that can't get past the unit it is in
        // gets the rest through the page cache, which needs no alignment.
        let kept = if self.direct {
            done - done % align
        } else {
            done
        };
        if kept == self.done {
            self.direct = false;
        }
        self.done = if self.direct { kept } else { done };
        Next::Again
    }

    fn failed(&self, cause: Cause) -> Next {
        Next::Failed(ReadError {
            file: self.file,
            offset: self.offset,
            len: self.asked,
            cause,
        })
    }

    /// Hand the slot back. The kernel must have stopped writing to it.
    pub fn end(self, arena: &Arena, ok: bool, counters: &Counters) {
        let counter = if ok {
            &counters.reads
        } else {
            &counters.failed
        };
        Counters::add(counter, 1);
        arena.end_fill(self.fill, ok);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::Direct;
    use leanstream_core::units::{Extent, PieceId, SlotId};
    use std::sync::atomic::Ordering;

    /// A kernel played by the test.
    struct Rig {
        source: Source,
        arena: Arena,
        counters: Counters,
        transfer: Transfer,
    }

    impl Rig {
        /// A read of the first 64 KiB of this program. `None` where it can't be read directly.
        fn new(direct: Direct) -> Option<Self> {
            let this = std::env::current_exe().unwrap();
            let source = Source::open(&[this], direct).unwrap();
            if direct == Direct::Auto && !source.files()[0].is_direct() {
                eprintln!("no O_DIRECT here");
                return None;
            }
            let arena = Arena::new(1, 64 << 10).unwrap();
            let command = ReadCommand {
                read: ReadId(0),
                slot: SlotId(0),
                piece: PieceId(0),
                extent: Extent {
                    file: FileId(0),
                    offset: 0,
                    len: 64 << 10,
                },
            };
            let transfer = Transfer::begin(&command, &source, &arena, 0).unwrap();
            Some(Self {
                source,
                arena,
                counters: Counters::default(),
                transfer,
            })
        }

        /// Answer the next request; give what was asked (offset, length, direct) and what follows.
        fn answer(&mut self, answer: Result<u32, i32>) -> ((u64, u32, bool), Next) {
            let request = self.transfer.request(&self.source, None);
            let start = self.arena.as_base_ptr().as_ptr() as u64;
            assert_eq!(
                request.ptr as u64 - start,
                request.offset,
                "bytes go to their place"
            );
            let answer = answer.map_err(Errno);
            let next = self
                .transfer
                .answered(request, answer, &self.source, None, &self.counters);
            ((request.offset, request.len, request.direct), next)
        }
    }

    #[test]
    fn direct_reads_go_on_from_an_aligned_place() {
        let Some(mut rig) = Rig::new(Direct::Auto) else {
            return;
        };
        let align = rig.source.align();
        let all = 64 << 10;
        // Some whole units and a bit: the bit is read again.
        let (asked, next) = rig.answer(Ok(3 * align + 17));
        assert_eq!((asked, next), ((0, all, true), Next::Again));
        let at = 3 * align;
        // Less than a unit: that can't go on directly, so it does without.
        let (asked, next) = rig.answer(Ok(5));
        assert_eq!((asked, next), ((at.into(), all - at, true), Next::Again));
        let (asked, next) = rig.answer(Ok(1));
        let at = at + 5;
        assert_eq!((asked, next), ((at.into(), all - at, false), Next::Again));
        let (asked, next) = rig.answer(Ok(all - at - 1));
        let at = at + 1;
        assert_eq!((asked, next), ((at.into(), all - at, false), Next::Filled));
        assert_eq!(rig.counters.short.load(Ordering::Relaxed), 3);
        assert!(
            rig.source.files()[0].is_direct(),
            "only this read gave it up"
        );
    }

    #[test]
    fn refusals_reach_every_read_of_the_file() {
        let Some(mut rig) = Rig::new(Direct::Auto) else {
            return;
        };
        let (_, next) = rig.answer(Err(libc::EINVAL));
        assert_eq!(next, Next::Again);
        assert_eq!(rig.source.mode(), "buffered(EINVAL)");
        // The same answer without O_DIRECT is the end.
        let (asked, next) = rig.answer(Err(libc::EINVAL));
        assert!(!asked.2);
        let failed = |next| match next {
            Next::Failed(error) => error.cause,
            other => panic!("{other:?}"),
        };
        assert_eq!(failed(next), Cause::Os(Errno(libc::EINVAL)));
        let (_, next) = rig.answer(Err(libc::EIO));
        assert_eq!(failed(next), Cause::Os(Errno(libc::EIO)));
        let (_, next) = rig.answer(Ok(0));
        assert_eq!(failed(next), Cause::Truncated { end: 0 });
    }

    #[test]
    fn patience_ends_but_starts_anew_with_each_byte() {
        let mut rig = Rig::new(Direct::Off).unwrap();
        for _ in 0..2 {
            for _ in 0..RETRIES_MAX {
                assert_eq!(rig.answer(Err(libc::EAGAIN)).1, Next::Again);
            }
            assert_eq!(rig.answer(Ok(1)).1, Next::Again);
        }
        for _ in 0..RETRIES_MAX {
            assert_eq!(rig.answer(Err(libc::EINTR)).1, Next::Again);
        }
        let Next::Failed(error) = rig.answer(Err(libc::EINTR)).1 else {
            panic!("it must end");
        };
        assert_eq!(error.cause, Cause::TooManyRetries(Errno(libc::EINTR)));
    }
}
