//! The model's files, opened for streaming: with O_DIRECT where that works, and ready to go on
//! without it where it stops working.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};

use leanstream_core::units::FileId;
use rustix::fs::{Advice, AtFlags, OFlags, StatxFlags, fadvise, statx};

use super::report::{Errno, OpenError};
use crate::arena::SLOT_ALIGN;

/// Whether to ask for O_DIRECT.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Direct {
    /// Ask, and read through the page cache where it is refused.
    #[default]
    Auto,
    /// Read through the page cache.
    Off,
}

/// No device reads less than a sector of 512 bytes, whatever its driver allows for addresses.
const ALIGN_MIN: u32 = 512;

/// What is safe on all common devices, for kernels that don't tell (before 6.1).
const ALIGN_UNKNOWN: u32 = 4096;

/// An offset alignment beyond this is a misread number, not a device.
const ALIGN_MAX: u32 = 1 << 20;

/// One file of the model. Its length is what it was at opening; a file that shrinks later gives
/// failed reads, one that grows is read as if it hadn't.
#[derive(Debug)]
pub struct SourceFile {
    path: PathBuf,
    len: u64,
    align: u32,
    direct: Option<File>,
    buffered: File,
    /// Why O_DIRECT isn't used, as an errno; 0 when it is, or when nobody asked for it.
    refused: AtomicI32,
}

impl SourceFile {
    fn open(path: &Path, direct: Direct) -> Result<Self, OpenError> {
        let failed = |error| OpenError::File {
            path: path.into(),
            error,
        };
        // Asked before opening: opening a pipe would wait for its writer.
        if !std::fs::metadata(path).map_err(failed)?.is_file() {
            return Err(OpenError::NotAFile { path: path.into() });
        }
        let buffered = File::open(path).map_err(failed)?;
        let len = buffered.metadata().map_err(failed)?.len();
        // Read-ahead would fetch what nobody asked for and the budget doesn't know of. A file
        // system that can't take the advice reads more than needed, which is no error.
        let _ = fadvise(&buffered, 0, None, Advice::Random);
        let mut file = Self {
            path: path.into(),
            len,
            align: ALIGN_MIN,
            direct: None,
            buffered,
            refused: AtomicI32::new(0),
        };
        if direct == Direct::Auto {
            match file.try_direct() {
                Ok((direct, align)) => {
                    file.direct = Some(direct);
                    file.align = align;
                }
                Err(errno) => file.refused = AtomicI32::new(errno.0),
            }
        }
        Ok(file)
    }

    /// Open with O_DIRECT and find an alignment with which a read really works.
    fn try_direct(&self) -> Result<(File, u32), Errno> {
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(OFlags::DIRECT.bits() as i32)
            .open(&self.path)
            .map_err(|e| Errno::of(&e))?;
        let told = told_alignment(&file)?;
        let mut refusal = None;
        for align in [told, told.max(ALIGN_UNKNOWN)] {
            match test_read(&file, align, self.len) {
                Ok(()) => return Ok((file, align)),
                Err(errno) => refusal = refusal.or(Some(errno)),
            }
        }
        Err(refusal.unwrap_or(Errno(libc::EINVAL)))
    }

    /// As it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes when it was opened.
    #[expect(clippy::len_without_is_empty, reason = "a length, not a container")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True while reads go past the page cache.
    pub fn is_direct(&self) -> bool {
        self.direct.is_some() && self.refused.load(Ordering::Relaxed) == 0
    }

    /// Offsets, lengths and addresses of direct reads are multiples of this.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Why O_DIRECT isn't used, if it was asked for and refused.
    pub fn refused(&self) -> Option<Errno> {
        match self.refused.load(Ordering::Relaxed) {
            0 => None,
            errno => Some(Errno(errno)),
        }
    }

    /// The file without O_DIRECT: for reading its header or mapping it.
    pub fn file(&self) -> &File {
        &self.buffered
    }

    /// The descriptor for a direct or a buffered read.
    ///
    /// # Panics
    /// When a direct read is asked of a file that was opened without O_DIRECT.
    pub(super) fn fd(&self, direct: bool) -> BorrowedFd<'_> {
        if direct {
            self.direct.as_ref().expect("opened with O_DIRECT").as_fd()
        } else {
            self.buffered.as_fd()
        }
    }

    /// Both descriptors, for registration: direct first (the buffered one again if there is none).
    pub(super) fn raw_fds(&self) -> [i32; 2] {
        let buffered = self.buffered.as_raw_fd();
        let direct = self.direct.as_ref().map_or(buffered, AsRawFd::as_raw_fd);
        [direct, buffered]
    }

    /// A direct read was refused: use the page cache from now on.
    pub(super) fn refuse_direct(&self, errno: Errno) {
        self.refused.store(errno.0, Ordering::Relaxed);
    }

    /// Let the kernel drop what a buffered read of `offset .. offset + len` left in the page cache.
    /// Whole pages, so that the pages at both ends go too: their other half is read again later,
    /// from flash, like everything else.
    pub(super) fn drop_behind(&self, offset: u64, len: u64) {
        let page = rustix::param::page_size() as u64;
        let start = offset - offset % page;
        let end = (offset + len).next_multiple_of(page);
        // Advice: where it can't be taken the kernel's own reclaim is what remains.
        let _ = fadvise(
            &self.buffered,
            start,
            std::num::NonZeroU64::new(end - start),
            Advice::DontNeed,
        );
    }
}

/// What statx says direct reads of `file` must be aligned to, within what the arena can give.
fn told_alignment(file: &File) -> Result<u32, Errno> {
    let Ok(stat) = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return Ok(ALIGN_UNKNOWN);
    };
    if stat.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(ALIGN_UNKNOWN);
    }
    choose_alignment(stat.stx_dio_mem_align, stat.stx_dio_offset_align)
}

/// One alignment for offsets, lengths and addresses. Zeros mean that the file can't be read
/// directly at all.
fn choose_alignment(mem: u32, offset: u32) -> Result<u32, Errno> {
    if mem == 0 || offset == 0 {
        return Err(Errno(libc::EOPNOTSUPP));
    }
    let sane = mem.is_power_of_two() && offset.is_power_of_two() && offset <= ALIGN_MAX;
    if !sane || mem as usize > SLOT_ALIGN {
        return Err(Errno(libc::EINVAL));
    }
    Ok(mem.max(offset).max(ALIGN_MIN))
}

/// Read one unit at an offset that isn't aligned to anything more, if the file reaches that far.
fn test_read(file: &File, align: u32, len: u64) -> Result<(), Errno> {
    let unit = align as usize;
    let mut room = vec![0u8; unit + unit.max(SLOT_ALIGN)];
    let lead = room.as_ptr().align_offset(unit.max(SLOT_ALIGN));
    let offset = if len > u64::from(align) {
        u64::from(align)
    } else {
        0
    };
    loop {
        match rustix::io::pread(file, &mut room[lead..lead + unit], offset) {
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Errno(errno.raw_os_error())),
        }
    }
}

/// All files of one model, in [`FileId`] order.
#[derive(Debug)]
pub struct Source {
    files: Box<[SourceFile]>,
    align: u32,
}

impl Source {
    /// Open every file of a model.
    ///
    /// # Errors
    /// The first file that can't be opened, and why. A refused O_DIRECT is no error: see
    /// [`SourceFile::refused`].
    pub fn open<P: AsRef<Path>>(paths: &[P], direct: Direct) -> Result<Self, OpenError> {
        if paths.is_empty() || paths.len() > usize::from(u16::MAX) {
            return Err(OpenError::Count { files: paths.len() });
        }
        let files: Box<[SourceFile]> = paths
            .iter()
            .map(|path| SourceFile::open(path.as_ref(), direct))
            .collect::<Result<_, _>>()?;
        let align = files.iter().map(SourceFile::align).max();
        Ok(Self {
            align: align.unwrap_or(ALIGN_MIN),
            files,
        })
    }

    /// The files, indexed by [`FileId`].
    pub fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// One file.
    ///
    /// # Panics
    /// When there is no such file.
    pub fn file(&self, id: FileId) -> &SourceFile {
        &self.files[usize::from(id.0)]
    }

    /// Offsets and lengths of reads are multiples of this many bytes: the strictest file's need.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Bytes of all files.
    pub fn total_bytes(&self) -> u64 {
        self.files.iter().map(SourceFile::len).sum()
    }

    /// The first file that is read through the page cache because O_DIRECT was refused.
    pub fn first_refused(&self) -> Option<(FileId, Errno)> {
        (0..).zip(self.files.iter()).find_map(|(i, file)| {
            let errno = file.refused()?;
            Some((FileId(i), errno))
        })
    }

    /// `direct`, `buffered`, `buffered(EINVAL)`, or `mixed(EINVAL)` when only some files refuse.
    pub fn mode(&self) -> String {
        let direct = self.files.iter().filter(|f| f.is_direct()).count();
        let name = match direct {
            n if n == self.files.len() => "direct",
            0 => "buffered",
            _ => "mixed",
        };
        match self.first_refused() {
            Some((_, errno)) => format!("{name}({errno})"),
            None => name.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_from_statx() {
        assert_eq!(choose_alignment(512, 512), Ok(512));
        assert_eq!(choose_alignment(4, 512), Ok(512));
        assert_eq!(choose_alignment(1, 1), Ok(512));
        assert_eq!(choose_alignment(512, 4096), Ok(4096));
        assert_eq!(choose_alignment(4096, 512), Ok(4096));
        assert_eq!(choose_alignment(4, 65536), Ok(65536));
        // The file system says "no direct reads of this file".
        assert_eq!(choose_alignment(0, 0), Err(Errno(libc::EOPNOTSUPP)));
        // Numbers that the arena can't follow or that make no sense.
        for (mem, offset) in [(8192, 512), (512, 3), (3, 512), (512, 1 << 31)] {
            assert_eq!(choose_alignment(mem, offset), Err(Errno(libc::EINVAL)));
        }
    }

    #[test]
    fn absent_files_and_directories_are_named() {
        let said = |path: &str| {
            let e = Source::open(&[path], Direct::Auto).unwrap_err();
            let text = e.to_string();
            assert!(text.contains(path), "{text}");
            text
        };
        assert!(said("/no/such/model.gguf").contains("No such file"));
        assert!(said("/").contains("not a regular file"));
        assert!(said("/dev/null").contains("not a regular file"));
        let none: [&str; 0] = [];
        assert!(Source::open(&none, Direct::Auto).is_err());
    }
}
