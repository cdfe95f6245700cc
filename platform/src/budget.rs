//! Sizes as people write them, and what memory this machine has to give.
//!
//! "Free memory" is the smaller of what the kernel could make available and what the control groups
//! around the process leave; page cache that can be dropped counts as available in both.

use std::fmt;

/// One KiB and so on: sizes here are binary.
const UNITS: [(&str, u32); 4] = [("K", 10), ("M", 20), ("G", 30), ("T", 40)];

/// A text that is no size.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SizeError {
    text: String,
    percent: bool,
    reason: &'static str,
}

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = if self.percent { " or 40%" } else { "" };
        write!(
            f,
            "'{}' is no size ({}); write bytes like 300000, binary units like 48M or 1.5G \
             (K, M, G, T){percent}",
            self.text, self.reason
        )
    }
}

impl std::error::Error for SizeError {}

/// Parse `300000` (bytes), `48M`, `1.5G`, `2GiB`, or with `whole` given `40%` of it. K, M, G and T
/// are powers of 1024 in either case; fractions of a byte are dropped.
///
/// # Errors
/// [`SizeError`] with the text and the accepted forms.
pub fn parse_size(text: &str, whole: Option<u64>) -> Result<u64, SizeError> {
    let fail = |reason| {
        Err(SizeError {
            text: text.into(),
            percent: whole.is_some(),
            reason,
        })
    };
    let end = text
        .bytes()
        .position(|b| !b.is_ascii_digit() && b != b'.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let (units, decimals) = number.split_once('.').unwrap_or((number, ""));
    if units.is_empty() || decimals.contains('.') || number.ends_with('.') {
        return fail("not a number");
    }
    if number.contains('.') && unit.is_empty() {
        return fail("a fraction needs a unit");
    }
    // The value in units of 1 / 10^decimals, so that no float is needed. Ten decimals tell a byte
    // in 8 GiB; the rest can't matter for memory.
    let decimals = &decimals[..decimals.len().min(10)];
    let scale = 10u128.pow(decimals.len() as u32);
    let Some(value) = digits(units)
        .and_then(|n| n.checked_mul(scale))
        .and_then(|n| n.checked_add(digits(decimals)?))
    else {
        return fail("too large");
    };
    let bytes = match unit {
        "" => Some(value),
        "%" => match whole {
            None => return fail("a percentage of what?"),
            Some(whole) => value.checked_mul(u128::from(whole)).map(|v| v / 100),
        },
        _ => {
            let known = UNITS.iter().find(|(name, _)| {
                let (first, rest) = unit.split_at_checked(1).unwrap_or(("", unit));
                first.eq_ignore_ascii_case(name) && (rest.is_empty() || rest == "iB")
            });
            match known {
                None => return fail("unknown unit"),
                Some((_, shift)) => value.checked_mul(1 << shift),
            }
        }
    };
    match bytes.and_then(|b| u64::try_from(b / scale).ok()) {
        Some(bytes) => Ok(bytes),
        None => fail("too large"),
    }
}

/// The number that ASCII digits write; 0 for none. `None` when it is absurd.
fn digits(text: &str) -> Option<u128> {
    match text {
        "" => Some(0),
        // Shorter than what u128 holds, with room for the multiplications above.
        _ if text.trim_start_matches('0').len() <= 24 => text.parse().ok(),
        _ => None,
    }
}

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
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let mounts = read("/proc/self/mountinfo").unwrap_or_default();
    let hierarchies = memory_hierarchies(&groups, &mounts);
    let limited = hierarchies.iter().flat_map(|hierarchy| {
        let levels = hierarchy.levels();
        levels.filter_map(|level| {
            let bytes = hierarchy.version.left(&level.dir, read)?;
            Some(Available {
                bytes,
                limit: Limit::Cgroup(level.name),
            })
        })
    });
    // Ties go to the machine, then to the innermost group.
    machine.into_iter().chain(limited).min_by_key(|a| a.bytes)
}

/// `MemAvailable` of /proc/meminfo, in bytes. Kernels before 3.14 don't have it; there, free memory
/// and page cache, which is what they would have called available.
fn mem_available(meminfo: &str) -> Option<u64> {
    let kib = |key: &str| field(meminfo.as_bytes(), key.as_bytes());
    let kib = kib("MemAvailable:").or_else(|| Some(kib("MemFree:")? + kib("Cached:")?))?;
    kib.checked_mul(1024)
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Version {
    V1,
    V2,
}

impl Version {
    /// Bytes that the group at `dir` may still take. `None` when it has no limit.
    fn left(self, dir: &str, read: &dyn Fn(&str) -> Option<String>) -> Option<u64> {
        let number = |name: &str| read(&format!("{dir}/{name}"))?.trim().parse::<u64>().ok();
        let (limit, used, prefix) = match self {
            Self::V1 => (
                number("memory.limit_in_bytes"),
                number("memory.usage_in_bytes")?,
                "total_",
            ),
            // Above `high` the kernel slows the group down and reclaims: no place for a working set.
            Self::V2 => (
                [number("memory.max"), number("memory.high")]
                    .into_iter()
                    .flatten()
                    .min(),
                number("memory.current")?,
                "",
            ),
        };
        let limit = limit?;
        let stat = read(&format!("{dir}/memory.stat")).unwrap_or_default();
        let cache = |list: &str| {
            let key = format!("{prefix}{list} ");
            field(stat.as_bytes(), key.as_bytes()).unwrap_or(0)
        };
        // Only the file lists: shared memory is on the anonymous ones and can't be dropped.
        let droppable = cache("active_file").saturating_add(cache("inactive_file"));
        Some(limit.saturating_sub(used.saturating_sub(droppable)))
    }
}

/// A control group hierarchy that counts memory, and where this process is in it.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Hierarchy {
    version: Version,
    /// Where it is mounted.
    mount: String,
    /// The process's group below the mount: empty, or `/a/b`.
    below: String,
}

/// One group on the way up.
struct Level {
    dir: String,
    name: String,
}

impl Hierarchy {
    /// The process's own group first, then each around it.
    fn levels(&self) -> impl Iterator<Item = Level> + '_ {
        let below = self.below.as_str();
        let ends = below.rmatch_indices('/').map(|(at, _)| at);
        std::iter::once(below.len())
            .chain(ends)
            .map(move |end| Level {
                dir: format!("{}{}", self.mount, &below[..end]),
                name: if end == 0 { "/" } else { &below[..end] }.into(),
            })
    }
}

/// Find the memory hierarchies in /proc/self/cgroup and /proc/self/mountinfo.
fn memory_hierarchies(groups: &str, mounts: &str) -> Vec<Hierarchy> {
    let mut found = Vec::new();
    for line in groups.lines() {
        // hierarchy-id:controllers:path
        let mut parts = line.splitn(3, ':');
        let (Some(id), Some(controllers), Some(path)) = (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        let version = if id == "0" && controllers.is_empty() {
            Version::V2
        } else if controllers.split(',').any(|name| name == "memory") {
            Version::V1
        } else {
            continue;
        };
        let mount = mounts.lines().find_map(|line| mount_of(line, version));
        let Some((root, mount)) = mount else { continue };
        found.push(Hierarchy {
            version,
            mount: mount.trim_end_matches('/').into(),
            below: below(path, &root),
        });
    }
    found
}

/// The path of a group below the mount of `root`. A container often sees only its own part of the
/// hierarchy: then the mount itself is the group, or the nearest thing to it.
fn below(path: &str, root: &str) -> String {
    let inside = match root {
        "/" => Some(path),
        _ => path.strip_prefix(root),
    };
    match inside {
        Some(rest) if rest.starts_with('/') && !rest.split('/').any(|part| part == "..") => {
            rest.trim_end_matches('/').into()
        }
        _ => String::new(),
    }
}

/// Root and mount point of a mountinfo line, if it mounts the wanted hierarchy.
fn mount_of(line: &str, version: Version) -> Option<(String, String)> {
    // id parent major:minor root mount options [optional fields] - type source super-options
    let (before, after) = line.split_once(" - ")?;
    let mut before = before.split(' ').skip(3);
    let (root, mount) = (before.next()?, before.next()?);
    let mut after = after.split(' ');
    let (kind, options) = (after.next()?, after.nth(1)?);
    let wanted = match version {
        Version::V2 => kind == "cgroup2",
        Version::V1 => kind == "cgroup" && options.split(',').any(|name| name == "memory"),
    };
    wanted.then(|| (unescape(root), unescape(mount)))
}

/// Mountinfo writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> String {
    let codes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    codes.iter().fold(text.to_owned(), |text, (code, byte)| {
        text.replace(code, byte)
    })
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
    use std::collections::HashMap;

    #[test]
    fn sizes_people_write() {
        let whole = Some(1000);
        for (text, bytes) in [
            ("0", 0),
            ("300000", 300_000),
            ("1K", 1024),
            ("48M", 48 << 20),
            ("48m", 48 << 20),
            ("1.5G", 3 << 29),
            ("2GiB", 2 << 30),
            ("0.5K", 512),
            ("1T", 1 << 40),
            ("40%", 400),
            ("12.5%", 125),
            ("150%", 1500),
            ("0.0001%", 0),
            ("16777215T", 16_777_215 << 40),
            ("18446744073709551615", u64::MAX),
            ("000000000000000000000000000000000001K", 1024),
            ("1.99999999999999999999999999999999999999999K", 2047),
        ] {
            assert_eq!(parse_size(text, whole), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn sizes_that_are_none() {
        for text in [
            "",
            "M",
            "%",
            ".",
            "1.",
            ".5G",
            "1.5",
            "1..5G",
            "-1",
            "+1",
            "1e9",
            "48MB",
            "48 M",
            " 48M",
            "48M ",
            "0x10",
            "16777216T",
            "18446744073709551616",
            "99999999999999999999999999G",
            "9999999999999999999999999999999999999999999999999",
            "１M",
            "1µ",
            "1Kib",
            "1é",
        ] {
            let said = parse_size(text, Some(1000)).expect_err(text).to_string();
            assert!(said.contains(&format!("'{text}'")), "{said}");
            assert!(said.contains("48M") && said.contains("40%"), "{said}");
        }
        let said = parse_size("40%", None).unwrap_err().to_string();
        assert!(!said.contains("or 40%"), "{said}");
    }

    const MEMINFO: &str = "MemTotal:       24684092 kB\nMemFree:          100 kB\n\
                           MemAvailable:    8000 kB\nCached:           50 kB\n";

    /// Files of an imagined machine.
    fn machine(files: &[(&str, &str)]) -> Option<Available> {
        let mut all: HashMap<String, String> = files
            .iter()
            .map(|(path, text)| ((*path).into(), (*text).into()))
            .collect();
        all.entry("/proc/meminfo".into()).or_insert(MEMINFO.into());
        available_from(&|path| all.get(path).cloned())
    }

    fn cgroup(bytes: u64, name: &str) -> Option<Available> {
        Some(Available {
            bytes,
            limit: Limit::Cgroup(name.into()),
        })
    }

    const ALL: Available = Available {
        bytes: 8000 << 10,
        limit: Limit::Machine,
    };

    #[test]
    fn a_machine_without_groups() {
        assert_eq!(machine(&[]), Some(ALL));
        // Before Linux 3.14.
        let old = [("/proc/meminfo", "MemFree: 100 kB\nCached: 50 kB\n")];
        assert_eq!(machine(&old).unwrap().bytes, 150 << 10);
        assert_eq!(machine(&[("/proc/meminfo", "")]), None);
    }

    const V2_MOUNT: &str = "25 20 0:22 / /sys rw - sysfs sysfs rw\n\
        31 25 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn version_2_takes_the_least_on_the_way_up() {
        let base = [
            ("/proc/self/cgroup", "0::/user.slice/job.scope\n"),
            ("/proc/self/mountinfo", V2_MOUNT),
            ("/sys/fs/cgroup/user.slice/job.scope/memory.max", "max\n"),
            (
                "/sys/fs/cgroup/user.slice/job.scope/memory.current",
                "999\n",
            ),
            ("/sys/fs/cgroup/user.slice/memory.max", "4000000\n"),
            ("/sys/fs/cgroup/user.slice/memory.current", "3500000\n"),
            // Page cache that can be dropped isn't used memory; shared memory is.
            (
                "/sys/fs/cgroup/user.slice/memory.stat",
                "anon 1\nfile 3000000\nshmem 500000\ninactive_file 1000000\nactive_file 1500000\n\
                 workingset_activate_file 7\n",
            ),
        ];
        assert_eq!(machine(&base), cgroup(3_000_000, "/user.slice"));
        let mut high = base.to_vec();
        high.push(("/sys/fs/cgroup/user.slice/memory.high", "2000000\n"));
        assert_eq!(machine(&high), cgroup(1_000_000, "/user.slice"));
        let mut inner = base.to_vec();
        inner[2].1 = "1000\n";
        assert_eq!(machine(&inner), cgroup(1, "/user.slice/job.scope"));
        let mut over = base.to_vec();
        over[2].1 = "10\n";
        assert_eq!(machine(&over).unwrap().bytes, 0, "over its limit already");
        let mut large = base.to_vec();
        large[4].1 = "9000000000\n";
        assert_eq!(machine(&large), Some(ALL));
    }

    #[test]
    fn version_1_and_its_unlimited_number() {
        let base = [
            (
                "/proc/self/cgroup",
                "5:cpu,cpuacct:/x\n4:hugetlb,memory:/docker/abc\n1:name=systemd:/y\n0::/z\n",
            ),
            (
                "/proc/self/mountinfo",
                "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,hugetlb,memory\n",
            ),
            (
                "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes",
                "2000000\n",
            ),
            (
                "/sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes",
                "1900000\n",
            ),
            (
                "/sys/fs/cgroup/memory/docker/abc/memory.stat",
                "inactive_file 1\nactive_file 2\ntotal_inactive_file 300000\ntotal_active_file 600000\n",
            ),
            (
                "/sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "77\n"),
        ];
        assert_eq!(machine(&base), cgroup(1_000_000, "/docker/abc"));
        let mut unlimited = base.to_vec();
        unlimited[2].1 = "9223372036854771712\n";
        assert_eq!(machine(&unlimited), Some(ALL));
    }

    #[test]
    fn containers_that_see_a_part_of_the_hierarchy() {
        let files = |cgroup, mountinfo| {
            [
                ("/proc/self/cgroup", cgroup),
                ("/proc/self/mountinfo", mountinfo),
                ("/sys/fs/cgroup/memory.max", "5000"),
                ("/sys/fs/cgroup/memory.current", "1000"),
                ("/sys/fs/cgroup/in/memory.max", "3000"),
                ("/sys/fs/cgroup/in/memory.current", "1000"),
            ]
        };
        let at = |root: &str| format!("31 25 0:27 {root} /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n");
        // The mount is the container's own group.
        let (own, whole) = (at("/docker/abc"), at("/"));
        assert_eq!(machine(&files("0::/docker/abc\n", &own)), cgroup(4000, "/"));
        assert_eq!(
            machine(&files("0::/docker/abc/in\n", &own)),
            cgroup(2000, "/in")
        );
        // A path outside the namespace, and one that only starts alike.
        assert_eq!(machine(&files("0::/../other\n", &whole)), cgroup(4000, "/"));
        assert_eq!(
            machine(&files("0::/docker/abcd\n", &own)),
            cgroup(4000, "/")
        );
    }

    #[test]
    fn weird_files_are_no_limits() {
        for (cgroup, mountinfo) in [
            ("", ""),
            ("\n::\n0:\n0::\n", V2_MOUNT),
            ("0::/x\n", "garbage - \n - \n1 2 3 - cgroup2\n"),
            (
                "4:memory:/x\n",
                "31 25 0:27 / /m rw - cgroup cgroup rw,cpu\n",
            ),
        ] {
            let files = [
                ("/proc/self/cgroup", cgroup),
                ("/proc/self/mountinfo", mountinfo),
                ("/sys/fs/cgroup/x/memory.max", "\u{fffd}"),
                ("/sys/fs/cgroup/x/memory.current", "-5"),
            ];
            assert_eq!(machine(&files), Some(ALL), "{cgroup:?}");
        }
        assert_eq!(unescape("/a\\040b\\134c"), "/a b\\c");
    }

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
        let before = Resident::read().unwrap();
        let block = std::hint::black_box(vec![1u8; 32 << 20]);
        let after = Resident::read().unwrap();
        // Other tests allocate and free meanwhile, but not tens of megabytes.
        assert!(
            after.anon > before.anon + (16 << 20),
            "{before:?} {after:?}"
        );
        assert!(after.peak >= 32 << 20);
        drop(block);
        let here = available().unwrap();
        assert!(here.bytes > 0 && here.bytes < 1 << 50, "{here}");
    }
}
