//! What the control groups around this process leave it: version 1 and 2, nested, and as seen from
//! inside a container.

use super::field;

/// Bytes left in each group with a limit, the innermost first, with the group's path below its
/// hierarchy's root.
pub(super) fn limits(read: &dyn Fn(&str) -> Option<String>) -> Vec<(u64, String)> {
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let mounts = read("/proc/self/mountinfo").unwrap_or_default();
    let hierarchies = memory_hierarchies(&groups, &mounts);
    let levels = hierarchies
        .iter()
        .flat_map(|hierarchy| hierarchy.levels().map(move |level| (hierarchy, level)));
    levels
        .filter_map(|(hierarchy, level)| {
            let left = hierarchy.version.left(&level.dir, read)?;
            Some((left, level.name))
        })
        .collect()
}

/// The files that hold the limits of the groups around this process, whether or not they have one now.
pub(super) fn limit_files(read: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    let mounts = read("/proc/self/mountinfo").unwrap_or_default();
    let hierarchies = memory_hierarchies(&groups, &mounts);
    let files = hierarchies.iter().flat_map(|hierarchy| {
        let names: &[&str] = match hierarchy.version {
            Version::V1 => &["memory.limit_in_bytes"],
            Version::V2 => &["memory.max", "memory.high"],
        };
        hierarchy.levels().flat_map(move |level| {
            names
                .iter()
                .map(move |name| format!("{}/{name}", level.dir))
        })
    });
    files.filter(|path| read(path).is_some()).collect()
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

#[cfg(test)]
mod tests {
    use super::super::{Available, Limit, available_from};
    use super::*;
    use std::collections::HashMap;

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
}
