//! Sizes as people write them, and what memory this machine has to give.
//!
//! "Free memory" is the smaller of what the kernel could make available and what the control groups
//! around the process leave; page cache that can be dropped counts as available in both.

mod cgroup;
mod held;
mod size;

use std::fmt;

pub use held::held;
pub use size::{SizeError, parse_size};

/// What limits [`Available`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Limit {
    /// The machine's memory.
    Machine,
    /// A control group, by its path below the hierarchy's root.
    Cgroup(String),
}

/// Memory that the process can get without swapping or being killed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Available {
    /// How much.
    pub bytes: u64,
    /// Why no more.
    pub limit: Limit,
}

impl fmt::Display for Available {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.bytes >> 20;
        match &self.limit {
            Limit::Machine => write!(f, "{mib} MiB available on this machine"),
            Limit::Cgroup(path) => write!(f, "{mib} MiB left in the control group {path}"),
        }
    }
}

/// What this process can still get: `min(MemAvailable, limit - (current - droppable cache))` over
/// all control groups around it, version 1 and 2. `None` when /proc says nothing.
pub fn available() -> Option<Available> {
    available_from(&|path| std::fs::read_to_string(path).ok())
}

/// [`available`] over any reader of files by absolute path.
pub fn available_from(read: &dyn Fn(&str) -> Option<String>) -> Option<Available> {
    let machine = read("/proc/meminfo")
        .as_deref()
        .and_then(mem_available)
        .map(|bytes| Available {
            bytes,
            limit: Limit::Machine,
        });
    let limited = cgroup::limits(read)
        .into_iter()
        .map(|(bytes, path)| Available {
            bytes,
            limit: Limit::Cgroup(path),
        });
    // Ties go to the machine, then to the innermost group.
    machine.into_iter().chain(limited).min_by_key(|a| a.bytes)
}

/// The files in which the control groups around this process keep their limits: a number of bytes, or a
/// word where there is none.
pub fn limit_files() -> Vec<String> {
    cgroup::limit_files(&|path| std::fs::read_to_string(path).ok())
}

/// `MemAvailable` of /proc/meminfo, in bytes. Kernels before 3.14 don't have it; there, free memory
/// and page cache, which is what they would have called available.
fn mem_available(meminfo: &str) -> Option<u64> {
    let kib = |key: &str| field(meminfo.as_bytes(), key.as_bytes());
    let kib = kib("MemAvailable:").or_else(|| Some(kib("MemFree:")? + kib("Cached:")?))?;
    kib.checked_mul(1024)
}

/// Resident memory of this process, in bytes, as the kernel counts it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Resident {
    /// The most it ever was.
    pub peak: u64,
    /// Anonymous memory: heap, stacks, the arena.
    pub anon: u64,
    /// Mapped files: the program itself, a mapped header.
    pub file: u64,
    /// Shared memory.
    pub shmem: u64,
}

impl Resident {
    /// Everything resident now.
    pub fn now(&self) -> u64 {
        self.anon + self.file + self.shmem
    }

    /// Read it. Allocates nothing, so it can be asked in mid-run. `None` without /proc.
    pub fn read() -> Option<Self> {
        use rustix::fs::{Mode, OFlags, open};
        let file = open(
            c"/proc/self/status",
            OFlags::RDONLY | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .ok()?;
        // About 1.5 KiB on current kernels; many supplementary groups make it longer, and what we
        // look for comes after them.
        let mut text = [0u8; 8192];
        let mut len = 0;
        while len < text.len() {
            match rustix::io::read(&file, &mut text[len..]) {
                Ok(0) => break,
                Ok(bytes) => len += bytes,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return None,
            }
        }
        Self::parse(&text[..len])
    }

    /// The most that was ever resident. Where /proc can't be read it is what `getrusage` tells, which
    /// counts what the process was before it became this program too.
    pub fn peak() -> u64 {
        Self::read().map_or_else(peak_by_usage, |resident| resident.peak)
    }

    /// Read the text of /proc/self/status. Kernels before 4.5 have no split of the total; it then
    /// all counts as anonymous.
    pub fn parse(status: &[u8]) -> Option<Self> {
        let kib = |key: &str| field(status, key.as_bytes()).and_then(|kib| kib.checked_mul(1024));
        Some(Self {
            peak: kib("VmHWM:")?,
            anon: kib("RssAnon:").or_else(|| kib("VmRSS:"))?,
            file: kib("RssFile:").unwrap_or(0),
            shmem: kib("RssShmem:").unwrap_or(0),
        })
    }
}

/// The peak of resident memory by `getrusage`, in bytes.
fn peak_by_usage() -> u64 {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    usage.map_or(0, |usage| {
        u64::try_from(usage.max_rss()).unwrap_or(0) * 1024
    })
}

/// The number after `key` at the start of a line: `VmHWM:     1234 kB`, `active_file 4096`.
fn field(text: &[u8], key: &[u8]) -> Option<u64> {
    let line = text
        .split(|&b| b == b'\n')
        .find_map(|line| line.strip_prefix(key))?;
    let mut value = None::<u64>;
    for &b in line.trim_ascii_start() {
        if !b.is_ascii_digit() {
            break;
        }
        let digit = u64::from(b - b'0');
        value = Some(value.unwrap_or(0).checked_mul(10)?.checked_add(digit)?);
    }
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resident_memory_from_status() {
        let text = b"Name:\tx\nVmHWM:\t    5000 kB\nVmRSS:\t    4000 kB\nRssAnon:\t    2500 kB\n\
                     RssFile:\t    1400 kB\nRssShmem:\t     100 kB\n";
        let r = Resident::parse(text).unwrap();
        assert_eq!((r.peak, r.now()), (5000 << 10, 4000 << 10));
        assert_eq!(
            (r.anon, r.file, r.shmem),
            (2500 << 10, 1400 << 10, 100 << 10)
        );
        // Before Linux 4.5.
        let old = Resident::parse(b"VmHWM: 5000 kB\nVmRSS: 4000 kB\n").unwrap();
        assert_eq!(old.now(), 4000 << 10);
        for text in [
            "",
            "VmHWM:",
            "VmHWM: x kB\n",
            "VmHWM: 99999999999999999999999 kB\n",
        ] {
            assert_eq!(Resident::parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn this_process_is_measured() {
        // Other tests allocate and free meanwhile, but not so much every time.
        let grown = (0..20).find_map(|_| {
            let before = Resident::read().unwrap();
            let block = std::hint::black_box(vec![1u8; 32 << 20]);
            let after = Resident::read().unwrap();
            (after.anon > before.anon + (16 << 20)).then_some((after, block))
        });
        let (after, block) = grown.expect("memory that is held is measured");
        assert!(after.peak >= 32 << 20);
        // The other count may have more, from before, but not less; but the kernel counts by processor,
        // and what other threads free meanwhile is missing from one reading and not from the next.
        let (peak, by_usage) = (Resident::peak(), peak_by_usage());
        let least = after.peak - (8 << 20);
        assert!(peak >= least, "{peak} {after:?}");
        assert!(by_usage >= least && by_usage < 1 << 45, "{by_usage}");
        drop(block);
        let here = available().unwrap();
        assert!(here.bytes > 0 && here.bytes < 1 << 50, "{here}");
    }
}
