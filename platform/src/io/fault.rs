//! Storage that fails as told: a seeded injector for tests, simulations and trials on a real board.
//!
//! Two zones, each with what must survive it:
//!
//! - *Below* the backend, at the system call ([`FaultPlan::short`], [`interrupt`],
//!   [`refuse_direct_at`]): the kernel gives less than asked, asks to try again, or refuses O_DIRECT
//!   in mid-run. **Nobody above may notice**: every read still delivers the file's bytes.
//! - *Above* the backend, at the [`Storage`] port ([`Fault`]): a read fails, comes late, or comes
//!   corrupt. The engine must end in order, name the read, and never compute with a slot whose read
//!   didn't end as `Filled`. [`FaultPlan::flip`] corrupts *silently*, as flash does when nobody
//!   checks: only a checksum notices, and a test that flips without one must see wrong output.
//!
//! What happens to a read depends on the seed and on how many reads were started before it, never on
//! time or on the order in which reads end. A `wait` or `poll` behaves as the contract of the port
//! says, whatever is injected: each started read ends exactly once.
//!
//! [`interrupt`]: FaultPlan::interrupt
//! [`refuse_direct_at`]: FaultPlan::refuse_direct_at

use std::fmt;
use std::sync::Arc;

use leanstream_core::port::{Geometry, ReadCommand, ReadOutcome, Storage};
use leanstream_core::units::{Extent, ReadId, SlotId};

use super::hold::{Clock, Holds, Monotonic};
use super::reasons::Reasons;
use super::report::{Cause, ReadError};
use crate::arena::Arena;

/// What goes wrong, and how often. Rates are out of a million.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct FaultPlan {
    /// Same seed, same faults.
    pub seed: u64,
    /// Reads that end as `Failed`.
    pub fail: u32,
    /// The one read (counted from 0) that ends as `Failed`: for sweeps over every read.
    pub fail_at: Option<u64>,
    /// Reads that end as `Corrupt`.
    pub corrupt: u32,
    /// Reads that end as `Filled` with one bit of the extent wrong.
    pub flip: u32,
    /// Reads that end late.
    pub late: u32,
    /// How late, in microseconds.
    pub late_us: u32,
    /// Requests to the kernel that get half of what they ask, or less.
    pub short: u32,
    /// Requests to the kernel that are answered with EINTR.
    pub interrupt: u32,
    /// From this read on, direct requests are answered with EINVAL.
    pub refuse_direct_at: Option<u64>,
}

/// What happens to one request to the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum KernelFault {
    None,
    Short,
    Interrupt,
    RefuseDirect,
}

/// What happens to one read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ReadFault {
    None,
    Fail,
    Corrupt,
    Flip,
}

/// Keeps the decisions about one read independent of each other.
#[derive(Clone, Copy)]
enum Zone {
    Kernel = 1,
    Outcome = 2,
    Late = 3,
    Bit = 4,
}

/// A text that is no fault plan.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlanError {
    item: String,
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "fault plan: can't understand '{}'; write items like seed=7,fail=1%,fail_at=12,\
             corrupt=0.1%,flip=0.1%,late=5%,late_us=2000,short=20%,interrupt=20%,\
             refuse_direct_at=40 with commas between",
            self.item
        )
    }
}

impl std::error::Error for PlanError {}

impl FaultPlan {
    /// Parse `seed=7,fail=1%,late=5%,late_us=2000`: any of the plan's fields, rates in percent with
    /// up to four decimals.
    ///
    /// # Errors
    /// The item that can't be understood, with all accepted ones.
    pub fn parse(text: &str) -> Result<Self, PlanError> {
        let mut plan = Self::default();
        for item in text.split(',') {
            plan.set(item)
                .ok_or_else(|| PlanError { item: item.into() })?;
        }
        Ok(plan)
    }

    fn set(&mut self, item: &str) -> Option<()> {
        let (key, value) = item.split_once('=')?;
        let count = || value.parse().ok();
        match key {
            "seed" => self.seed = count()?,
            "fail" => self.fail = parse_rate(value)?,
            "fail_at" => self.fail_at = Some(count()?),
            "corrupt" => self.corrupt = parse_rate(value)?,
            "flip" => self.flip = parse_rate(value)?,
            "late" => self.late = parse_rate(value)?,
            "late_us" => self.late_us = u32::try_from(count()?).ok()?,
            "short" => self.short = parse_rate(value)?,
            "interrupt" => self.interrupt = parse_rate(value)?,
            "refuse_direct_at" => self.refuse_direct_at = Some(count()?),
            _ => return None,
        }
        Some(())
    }

    /// What happens to request number `attempt` of read number `ordinal`.
    pub(super) fn kernel(&self, ordinal: u64, attempt: u32) -> KernelFault {
        if self.refuse_direct_at.is_some_and(|first| ordinal >= first) {
            return KernelFault::RefuseDirect;
        }
        let dice = self.roll(Zone::Kernel, ordinal, attempt);
        if dice < self.short {
            KernelFault::Short
        } else if dice < self.short.saturating_add(self.interrupt) {
            KernelFault::Interrupt
        } else {
            KernelFault::None
        }
    }

    fn outcome(&self, ordinal: u64) -> ReadFault {
        if self.fail_at == Some(ordinal) {
            return ReadFault::Fail;
        }
        let dice = self.roll(Zone::Outcome, ordinal, 0);
        let fail = self.fail;
        let corrupt = fail.saturating_add(self.corrupt);
        let flip = corrupt.saturating_add(self.flip);
        match dice {
            d if d < fail => ReadFault::Fail,
            d if d < corrupt => ReadFault::Corrupt,
            d if d < flip => ReadFault::Flip,
            _ => ReadFault::None,
        }
    }

    /// 0 .. 1,000,000, evenly.
    fn roll(&self, zone: Zone, ordinal: u64, attempt: u32) -> u32 {
        (self.hash(zone, ordinal, attempt) % 1_000_000) as u32
    }

    fn hash(&self, zone: Zone, ordinal: u64, attempt: u32) -> u64 {
        let mut x = self.seed;
        for word in [zone as u64, ordinal, u64::from(attempt)] {
            // The finalizer of SplitMix64 (Steele, Lea, Flood 2014) over each word.
            x = (x ^ word).wrapping_add(0x9E37_79B9_7F4A_7C15);
            x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            x ^= x >> 31;
        }
        x
    }
}

/// `1%`, `0.25%`: parts of a million, at most all of them.
fn parse_rate(text: &str) -> Option<u32> {
    let number = text.strip_suffix('%')?;
    let (whole, decimals) = number.split_once('.').unwrap_or((number, ""));
    let digits = |s: &str| s.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || decimals.len() > 4 || !digits(whole) || !digits(decimals) {
        return None;
    }
    let padded = format!("{decimals:0<4}");
    let rate = whole.parse::<u32>().ok()?.checked_mul(10_000)?;
    let rate = rate.checked_add(padded.parse().ok()?)?;
    (rate <= 1_000_000).then_some(rate)
}

/// A read on its way through the injector.
#[derive(Clone, Copy, Debug)]
struct Marked {
    read: ReadId,
    ordinal: u64,
    slot: SlotId,
    extent: Extent,
}

/// The middleware at the storage port.
#[derive(Debug)]
pub struct Fault<S, C = Monotonic> {
    inner: S,
    arena: Arc<Arena>,
    plan: FaultPlan,
    clock: C,
    holds: Holds,
    marked: Vec<Marked>,
    started: u64,
    reasons: Reasons,
}

impl<S: Storage, C: Clock> Fault<S, C> {
    /// Inject `plan` above `inner`, whose reads go to `arena`.
    pub fn new(inner: S, arena: Arc<Arena>, plan: FaultPlan, clock: C) -> Self {
        let reads_max = inner.geometry().reads_max;
        Self {
            holds: Holds::new(reads_max),
            marked: Vec::with_capacity(reads_max.into()),
            inner,
            arena,
            plan,
            clock,
            started: 0,
            reasons: Reasons::new(reads_max),
        }
    }

    /// What is beneath.
    pub fn inner(&self) -> &S {
        &self.inner
    }

    /// Why the latest read of `extent` failed, if it was made to fail here.
    pub(super) fn reason(&self, extent: &Extent) -> Option<ReadError> {
        self.reasons.of(extent)
    }

    /// Do to an ended read what the plan says.
    fn strike(&mut self, read: ReadId, outcome: ReadOutcome) -> ReadOutcome {
        let index = self.marked.iter().position(|m| m.read == read);
        let marked = self
            .marked
            .swap_remove(index.expect("only started reads end"));
        if outcome != ReadOutcome::Filled {
            // The reason is kept beneath.
            return outcome;
        }
        match self.plan.outcome(marked.ordinal) {
            ReadFault::None => ReadOutcome::Filled,
            ReadFault::Fail => {
                let error = ReadError {
                    file: marked.extent.file,
                    offset: marked.extent.offset,
                    len: marked.extent.len,
                    cause: Cause::Injected,
                };
                self.reasons.keep(read, error);
                self.arena.release(marked.slot);
                ReadOutcome::Failed
            }
            ReadFault::Corrupt => {
                self.arena.release(marked.slot);
                ReadOutcome::Corrupt
            }
            ReadFault::Flip => {
                let bit = self.plan.hash(Zone::Bit, marked.ordinal, 0)
                    % (u64::from(marked.extent.len) * 8);
                let fill = self.arena.begin_fill(marked.slot);
                assert!(marked.extent.len as usize <= fill.len());
                // SAFETY: the byte lies inside the slot, as just asserted, and the fill is the only
                // right to write to it.
                unsafe { *fill.as_ptr().add((bit / 8) as usize) ^= 1 << (bit % 8) };
                self.arena.end_fill(fill, true);
                ReadOutcome::Filled
            }
        }
    }
}

impl<S: Storage, C: Clock> Storage for Fault<S, C> {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn start(&mut self, command: ReadCommand) {
        let ordinal = self.started;
        self.started += 1;
        let late = self.plan.roll(Zone::Late, ordinal, 0) < self.plan.late;
        let due = if late {
            self.clock.now_ns() + u64::from(self.plan.late_us) * 1000
        } else {
            0
        };
        self.reasons.forget(command.read);
        self.holds.started(command.read, due);
        self.marked.push(Marked {
            read: command.read,
            ordinal,
            slot: command.slot,
            extent: command.extent,
        });
        self.inner.start(command);
    }

    fn poll(&mut self) -> Option<(ReadId, ReadOutcome)> {
        self.holds.collect(&mut self.inner);
        let (read, outcome) = self.holds.pop(self.clock.now_ns())?;
        Some((read, self.strike(read, outcome)))
    }

    fn wait(&mut self, timeout_us: u32) {
        self.holds.wait(&mut self.inner, &self.clock, timeout_us);
    }
}

#[cfg(test)]
mod tests {
    use super::super::hold::testing::{Instantly, Manual};
    use super::*;
    use leanstream_core::units::{FileId, PieceId};

    #[test]
    fn plans_as_written() {
        let plan = FaultPlan::parse(
            "seed=7,fail=1%,fail_at=12,corrupt=0.1%,flip=0.0001%,late=5.25%,late_us=2000,short=20%,\
             interrupt=100%,refuse_direct_at=40",
        );
        let expected = FaultPlan {
            seed: 7,
            fail: 10_000,
            fail_at: Some(12),
            corrupt: 1000,
            flip: 1,
            late: 52_500,
            late_us: 2000,
            short: 200_000,
            interrupt: 1_000_000,
            refuse_direct_at: Some(40),
        };
        assert_eq!(plan, Ok(expected));
        for text in [
            "",
            "fail",
            "fail=",
            "fail=1",
            "fail=101%",
            "fail=1.00001%",
            "fail=-1%",
            "fail=%",
            "fail=.5%",
            "fail=9999999999%",
            "seed=x",
            "late_us=4294967296",
            "what=1",
            "seed=1,,",
        ] {
            let said = FaultPlan::parse(text).expect_err(text).to_string();
            assert!(said.contains("refuse_direct_at"), "{said}");
        }
    }

    #[test]
    fn rates_come_out_and_zones_are_independent() {
        let plan = FaultPlan {
            seed: 1,
            fail: 250_000,
            short: 250_000,
            interrupt: 250_000,
            ..FaultPlan::default()
        };
        let n = 10_000;
        let failed = |o: &u64| plan.outcome(*o) == ReadFault::Fail;
        let short = |o: &u64| plan.kernel(*o, 0) == KernelFault::Short;
        let both = (0..n).filter(|o| failed(o) && short(o)).count();
        assert!((2300..2700).contains(&(0..n).filter(failed).count()));
        assert!((2300..2700).contains(&(0..n).filter(short).count()));
        assert!((525..725).contains(&both), "{both}");
        let other = FaultPlan { seed: 2, ..plan };
        assert!((0..n).any(|o| plan.outcome(o) != other.outcome(o)));
        let retried = (0..n).filter(|&o| plan.kernel(o, 0) != plan.kernel(o, 1));
        assert!(retried.count() > 1000, "a repeated request has new luck");
    }

    /// The storage of the test doesn't touch the arena, so this fills the slot as a backend would.
    fn ready(arena: &Arena, slot: SlotId) {
        arena.end_fill(arena.begin_fill(slot), true);
    }

    #[test]
    fn late_reads_are_overtaken() {
        let clock = Manual::default();
        let arena = Arc::new(Arena::new(8, 4096).unwrap());
        let plan = FaultPlan::parse("seed=5,late=50%,late_us=700").unwrap();
        let device = Instantly::new(&clock, 1000);
        let mut fault = Fault::new(device, Arc::clone(&arena), plan, clock.clone());
        for id in 0..8 {
            ready(&arena, SlotId(id.into()));
            fault.start(ReadCommand {
                read: ReadId(id),
                slot: SlotId(id.into()),
                piece: PieceId(0),
                extent: Extent {
                    file: FileId(0),
                    offset: 0,
                    len: 4096,
                },
            });
        }
        let mut ends = Vec::new();
        while ends.len() < 8 {
            match fault.poll() {
                Some((read, _)) => ends.push((read.0, clock.now_ns())),
                None => fault.wait(1_000_000),
            }
        }
        let late: Vec<u16> = ends
            .iter()
            .filter(|e| e.1 == 700_000)
            .map(|e| e.0)
            .collect();
        let on_time = ends.iter().filter(|e| e.1 == 1000).count();
        assert_eq!(on_time + late.len(), 8, "{ends:?}");
        assert!(on_time > 0 && late.iter().any(|&id| id < 7), "{ends:?}");
    }
}
