//! What the process holds before a run, and what its own code will come to hold.

use super::Resident;
use crate::embedded::DEMO;

/// What the kernel maps around a page that is touched, at most (`fault_around_bytes`' default).
const AROUND: u64 = 64 << 10;

/// Bytes of the program that no run touches: the demo's model, which is read by that command alone.
fn untouched() -> u64 {
    (DEMO.bytes.len() as u64).saturating_sub(2 * AROUND)
}

/// Bytes that are resident now, with the program's own segments counted whole, but for what isn't ever
/// touched: its code is touched page by page while it runs, and then it counts. Where the kernel doesn't
/// tell, the executable's size stands for its segments.
pub fn held() -> u64 {
    let exe = std::fs::read_link("/proc/self/exe").unwrap_or_default();
    let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    from_smaps(&smaps, &exe.to_string_lossy(), untouched()).unwrap_or_else(|| {
        let resident = Resident::read().unwrap_or_default();
        let program = std::fs::metadata(exe).map_or(0, |meta| meta.len());
        let program = program.saturating_sub(untouched());
        resident.anon + resident.shmem + resident.file.max(program)
    })
}

/// [`held`] from the text of `/proc/self/smaps`; `None` where that says nothing.
fn from_smaps(smaps: &str, exe: &str, untouched: u64) -> Option<u64> {
    let kib = |line: &str| line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok();
    // Of the program: its size, and what is resident.
    let (mut program, mut resident) = (0u64, 0u64);
    let (mut own, mut size, mut others, mut any) = (false, 0, 0u64, false);
    for line in smaps.lines() {
        if line.starts_with("Size:") {
            size = kib(line)?;
        } else if line.starts_with("Rss:") {
            let rss = kib(line)?;
            if own {
                program += size;
                resident += rss;
            } else {
                others += rss;
            }
            any = true;
        } else if line
            .split_ascii_whitespace()
            .next()
            .is_some_and(|first| first.contains('-'))
        {
            own = !exe.is_empty() && line.ends_with(exe);
        }
    }
    let program = (program << 10).saturating_sub(untouched);
    any.then_some(program.max(resident << 10) + (others << 10))
}

#[cfg(test)]
mod tests {
    use super::{from_smaps, held};

    const SMAPS: &str = "\
5581a000-5581f000 r-xp 00000000 fe:00 17   /usr/bin/lean stream
Size:                400 kB
KernelPageSize:        4 kB
Rss:                  16 kB
Pss:                  16 kB
7f11c000-7f11f000 rw-p 00000000 00:00 0    [heap]
Size:               1000 kB
Rss:                  44 kB
VmFlags: rd wr mr mw me ac sd
";

    #[test]
    fn the_program_counts_whole_and_the_rest_as_resident() {
        assert_eq!(
            from_smaps(SMAPS, "/usr/bin/lean stream", 0),
            Some((400 + 44) << 10)
        );
        let other = from_smaps(SMAPS, "/usr/bin/other", 300 << 10);
        assert_eq!(other, Some((16 + 44) << 10));
        assert_eq!(from_smaps("", "x", 0), None);
    }

    #[test]
    fn what_is_never_touched_does_not_count_unless_it_is_there() {
        let held = |untouched: u64| from_smaps(SMAPS, "/usr/bin/lean stream", untouched << 10);
        assert_eq!(held(300), Some((100 + 44) << 10));
        assert_eq!(held(390), Some((16 + 44) << 10));
    }

    #[test]
    fn this_process_holds_something() {
        let held = held();
        assert!((100 << 10..1 << 40).contains(&held), "{held}");
    }
}
