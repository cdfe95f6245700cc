//! The core's store over a recorded run, in virtual time: the same decisions as in a real one, against a
//! device of any speed, and with an oracle where a policy wants one.
//!
//! The device has one channel that reads pass one after the other, and a latency before each read's
//! first byte during which others pass. One processor computes: half of a layer's time before it
//! chooses (attention and the gate), half with its units, group by group as they arrive. The first
//! stage of the next layer is known when a layer has chosen, later ones when its first group has
//! been computed.

use std::cell::Cell;
use std::collections::VecDeque;

use leanstream_core::port::ReadOutcome;
use leanstream_core::sparse::retain::{Cause, Name, Policy, Refine, Retain, Rules, Seen};
use leanstream_core::sparse::store::slots_least;
use leanstream_core::sparse::tables::{Bank, Foreseen, Prior, Sizes};
use leanstream_core::sparse::{
    Choice, Chosen, Counters, Grouping, Reach, ReadRequest, Select, Store,
};
use leanstream_core::stream::Worth;
use leanstream_core::units::{FileId, ReadId};

use super::sets::Sets;
use crate::run::sparse::UnitTables;

/// Bytes of a staging slot, where a unit isn't larger.
const WINDOW: u32 = 128 << 10;

/// A device and a processor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Nanoseconds before a read's first byte.
    pub latency_ns: u64,
    /// Bytes per second.
    pub bytes_per_s: u64,
    /// Reads per second, at most; 0: as many as its bytes allow.
    pub iops: u64,
    /// Reads in flight, at most; 1 to 255.
    pub reads_max: u8,
    /// Alignment of reads, a power of two.
    pub align: u32,
    /// Unwanted bytes that are read rather than to start another read.
    pub gap: u32,
    /// Nanoseconds of computing a layer.
    pub compute_ns: u64,
    /// Nanoseconds of computing a stage of a layer.
    pub stage_ns: u64,
    /// Bytes of a unit.
    pub unit_bytes: u32,
}

/// What came of it, over the tokens that count.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcome {
    /// How many those are.
    pub tokens: u32,
    /// What the store counted.
    pub counters: Counters,
    /// Nanoseconds that they took.
    pub time_ns: u64,
    /// Of these, those in which the processor waited for units.
    pub stall_ns: u64,
    /// Those in which the channel was busy.
    pub busy_ns: u64,
}

impl Outcome {
    fn since(self, before: &Outcome) -> Outcome {
        Outcome {
            tokens: self.tokens - before.tokens,
            counters: self.counters.since(&before.counters),
            time_ns: self.time_ns - before.time_ns,
            stall_ns: self.stall_ns - before.stall_ns,
            busy_ns: self.busy_ns - before.busy_ns,
        }
    }
}

/// Slots below which no run of these sets is possible.
pub fn least_slots(sets: &Sets) -> u32 {
    slots_least(sets.units)
}

/// Tokens that use a unit, for each unit.
struct Uses {
    starts: Vec<usize>,
    tokens: Vec<u32>,
}

impl Uses {
    fn new(sets: &Sets) -> Self {
        let total = sets.layers as usize * sets.units as usize;
        let uses = || {
            (0..sets.tokens).flat_map(move |token| {
                (0..sets.layers).flat_map(move |layer| {
                    let first = layer * sets.units;
                    let units = sets.active(token, layer).iter();
                    units.map(move |unit| ((first + unit) as usize, token))
                })
            })
        };
        let mut starts = vec![0; total + 1];
        for (unit, _) in uses() {
            starts[unit + 1] += 1;
        }
        for unit in 0..total {
            starts[unit + 1] += starts[unit];
        }
        let mut ends = starts.clone();
        let mut tokens = vec![0; starts[total]];
        for (unit, token) in uses() {
            tokens[ends[unit]] = token;
            ends[unit] += 1;
        }
        Self { starts, tokens }
    }

    /// Tokens from `token` to the next use of `unit`.
    fn next(&self, unit: u32, token: u32) -> u32 {
        let unit = unit as usize;
        let uses = &self.tokens[self.starts[unit]..self.starts[unit + 1]];
        let at = uses.partition_point(|&used| used <= token);
        uses.get(at).map_or(u32::MAX, |used| used - token)
    }
}

/// A policy that is told the future, if it asks for it.
struct Told<'r> {
    policy: Policy,
    uses: Option<Uses>,
    token: &'r Cell<u32>,
}

impl Retain for Told<'_> {
    #[inline]
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth {
        let next = match &self.uses {
            Some(uses) => uses.next(seen.unit, self.token.get()),
            None => seen.next,
        };
        self.policy.worth(&Seen { next, ..*seen }, cause)
    }

    fn rules(&self) -> Rules {
        self.policy.rules()
    }
}

/// The device: reads end in the order in which they started.
#[derive(Default)]
struct Device {
    flying: VecDeque<(u64, ReadId)>,
    free_ns: u64,
    busy_ns: u64,
}

impl Device {
    fn start(&mut self, now: u64, request: ReadRequest, machine: &Machine) {
        let bytes = u64::from(request.extent.len);
        let through = bytes * 1_000_000_000 / machine.bytes_per_s;
        let each = 1_000_000_000u64.checked_div(machine.iops).unwrap_or(0);
        let cost = through.max(each);
        self.free_ns = self.free_ns.max(now + machine.latency_ns) + cost;
        self.busy_ns += cost;
        self.flying.push_back((self.free_ns, request.read));
    }

    fn next_end(&self) -> Option<u64> {
        self.flying.front().map(|read| read.0)
    }
}

/// The virtual machine while it runs.
struct Virtual<'s, 'm, 'r> {
    store: &'s mut Store<'m, Told<'r>>,
    machine: Machine,
    device: Device,
    now: u64,
    stall_ns: u64,
}

impl Virtual<'_, '_, '_> {
    fn start_reads(&mut self) {
        while let Some(request) = self.store.poll_read() {
            self.device.start(self.now, request, &self.machine);
        }
    }

    /// Reads that end until `until`, and those that start in their place.
    fn pass_until(&mut self, until: u64) {
        self.start_reads();
        while let Some(end) = self.device.next_end().filter(|&end| end <= until) {
            self.now = self.now.max(end);
            let (_, read) = self.device.flying.pop_front().expect("one ends");
            self.store.read_ended(read, ReadOutcome::Filled, |_| true);
            self.start_reads();
        }
        self.now = until;
    }

    fn foresee(&mut self, bank: u32, units: &[u32], score: f32) {
        // In the order of flash; the trace doesn't say which is likeliest.
        let units = units.iter().map(|&index| Foreseen { index, score });
        self.store.foresee(bank, units);
    }
}

/// Runs `name` with `slots` slots; the first `warm` tokens calibrate and don't count.
///
/// # Panics
/// If there are fewer slots than [`least_slots`], or no tokens to count.
pub fn simulate(sets: &Sets, name: Name, slots: u32, machine: Machine, warm: u32) -> Outcome {
    assert!(warm < sets.tokens, "tokens are left to count");
    let bank_bytes = u64::from(sets.units) * u64::from(machine.unit_bytes);
    let banks: Vec<Bank> = (0..sets.layers)
        .map(|layer| Bank {
            file: FileId(0),
            offset: u64::from(layer) * bank_bytes.next_multiple_of(u64::from(machine.align)),
            unit_bytes: machine.unit_bytes,
            first: layer * sets.units,
            count: sets.units,
        })
        .collect();
    let priors = sets.frequencies(warm);
    let token = Cell::new(0);
    let units = sets.units as usize;
    let shares = priors.iter().map(|&prior| Prior::new(prior)).collect();
    let sizes = Sizes::of(&banks, slots, usize::from(machine.reads_max));
    let mut tables = UnitTables::of(banks, shares, sizes);
    let window = WINDOW.max(machine.unit_bytes.next_multiple_of(machine.align) + 2 * machine.align);
    let mut store = Store::new(
        tables.lend(),
        Told {
            policy: Policy::new(name, slots, priors.iter().copied()),
            uses: name.needs_oracle().then(|| Uses::new(sets)),
            token: &token,
        },
        Reach {
            align: machine.align,
            window_max: window,
            gap_max: machine.gap,
            ahead_max: u32::from(machine.reads_max / 2).max(1),
        },
    );
    let stages = stages_of(sets, name);
    let mut run = Virtual {
        store: &mut store,
        machine,
        device: Device::default(),
        now: 0,
        stall_ns: 0,
    };
    let mut before = Outcome::default();
    let mut total = Outcome::default();
    let mut chosen = Vec::with_capacity(units);
    let mut scores = Vec::with_capacity(units);
    for now in 0..sets.tokens {
        if now == warm {
            before = total;
        }
        token.set(now);
        run.store.begin(1);
        for layer in 0..sets.layers {
            run.pass_until(run.now + machine.compute_ns / 2);
            chosen.clear();
            let active = sets.active(now, layer).iter();
            chosen.extend(
                active
                    .zip(sets.importance(now, layer))
                    .map(|(&index, importance)| Chosen {
                        index,
                        importance,
                        share: 1.0,
                    }),
            );
            let scored = sets.scores(now, layer, &mut scores);
            run.store.choose(Choice {
                bank: layer,
                chosen: &chosen,
                scores: scored.then_some(&scores),
                grouping: Grouping::Importance,
                select: Select::All,
            });
            units_of_layer(&mut run, sets, now, layer, &stages);
        }
        total = Outcome {
            tokens: now + 1,
            counters: run.store.counters(),
            time_ns: run.now,
            stall_ns: run.stall_ns,
            busy_ns: run.device.busy_ns,
        };
    }
    total.since(&before)
}

/// The stages that a policy looks at: all, or one a layer; each with the score of what it names.
fn stages_of(sets: &Sets, name: Name) -> Vec<(u8, f32)> {
    let looked_at = match name {
        Name::Refine => usize::MAX,
        Name::Oneshot => 1,
        Name::LruWindow | Name::Static | Name::Lfu | Name::Belady => 0,
    };
    sets.recall()
        .iter()
        .filter(|stage| stage.stage > 0)
        .take(looked_at)
        .map(|stage| {
            let precision = stage.mean / stage.named.max(stage.mean).max(f64::MIN_POSITIVE);
            (stage.stage, Refine::score_of(precision as f32))
        })
        .collect()
}

/// Computes a layer's groups as they arrive, and looks at the next layer meanwhile.
fn units_of_layer(
    run: &mut Virtual<'_, '_, '_>,
    sets: &Sets,
    now: u32,
    layer: u32,
    stages: &[(u8, f32)],
) {
    // The layer after the last one is the next token's first: no stage can see it.
    let next = (layer + 1 < sets.layers).then_some(layer + 1);
    let (first, later) = stages.split_at(stages.len().min(1));
    let look = |run: &mut Virtual<'_, '_, '_>, stages: &[(u8, f32)]| {
        let Some(next) = next else { return };
        for &(stage, score) in stages {
            let units = sets.foreseen(stage, now, next);
            if !units.is_empty() {
                run.foresee(next, units, score);
                run.pass_until(run.now + run.machine.stage_ns);
            }
        }
    };
    look(run, first);
    let count = sets.active(now, layer).len().max(1) as u64;
    let mut looked = false;
    while !run.store.settled() {
        run.start_reads();
        if let Some(group) = run.store.poll_group() {
            let items = run.store.items(group).len() as u64;
            run.pass_until(run.now + run.machine.compute_ns / 2 * items / count);
            run.store.group_ended(group);
            if !looked {
                looked = true;
                look(run, later);
            }
        } else {
            let end = run
                .device
                .next_end()
                .expect("a layer waits for reads alone");
            run.stall_ns += end.saturating_sub(run.now);
            run.pass_until(end.max(run.now));
        }
    }
    run.store.finish();
}

#[cfg(test)]
mod tests {
    use super::super::made_up::made_up;
    use super::*;

    /// 40 tokens of 6 layers of 64 units: four that are always used, and eight of the others by turns.
    /// With `stage` a stage names what all layers but the first will use.
    fn sets(name: &str, stage: bool) -> Sets {
        made_up(&format!("simulate-{name}"), [LAYERS, 64], |recorder| {
            for token in 0..40u16 {
                recorder.token(u64::from(token));
                let mut units: Vec<u16> = (0..4).collect();
                units.extend((0..8).map(|i| 4 + (token * 7 + i * 11) % 60));
                units.sort_unstable();
                units.dedup();
                for layer in 0..LAYERS {
                    if stage && layer > 0 {
                        recorder.stage(layer, 2, &units);
                    }
                    recorder.layer(layer, &[], &units, &vec![1.0; units.len()]);
                }
            }
        })
    }

    const LAYERS: u32 = 6;

    const MACHINE: Machine = Machine {
        latency_ns: 10_000,
        bytes_per_s: 1_000_000_000,
        iops: 0,
        reads_max: 8,
        align: 512,
        gap: 0,
        compute_ns: 160_000,
        stage_ns: 0,
        unit_bytes: 1000,
    };

    #[test]
    fn what_fits_costs_computing_alone() {
        let outcome = simulate(&sets("fits", false), Name::Lfu, 64 * LAYERS, MACHINE, 20);
        assert_eq!(outcome.tokens, 20);
        assert_eq!(outcome.counters.misses(), 0);
        assert_eq!((outcome.stall_ns, outcome.busy_ns), (0, 0));
        // Groups share a layer's time by whole nanoseconds.
        let least = 20 * u64::from(LAYERS) * (MACHINE.compute_ns - 8);
        assert!((least..=20 * u64::from(LAYERS) * MACHINE.compute_ns).contains(&outcome.time_ns));
    }

    #[test]
    fn time_is_computing_and_stalls() {
        let sets = sets("small", false);
        for name in Name::ALL {
            let least = least_slots(&sets);
            assert!(least < 64 * LAYERS);
            let slow = Machine {
                iops: 2000,
                ..MACHINE
            };
            let machines = [MACHINE, slow].map(|machine| {
                let outcome = simulate(&sets, name, least, machine, 20);
                let computing = outcome.time_ns - outcome.stall_ns;
                assert!(computing <= 20 * u64::from(LAYERS) * MACHINE.compute_ns);
                assert!(computing >= 20 * u64::from(LAYERS) * (MACHINE.compute_ns - 16));
                outcome
            });
            assert_eq!(
                machines[0].counters.hits, machines[1].counters.hits,
                "without foresight the device changes no choice"
            );
            assert!(machines[0].time_ns <= machines[1].time_ns);
        }
    }

    #[test]
    fn foresight_hides_reads_and_never_changes_what_is_used() {
        let (blind, seeing) = (sets("blind", false), sets("seeing", true));
        let slots = least_slots(&blind);
        let recall = seeing.recall();
        assert_eq!((recall[0].mean, recall[0].least), (1.0, 1.0));
        // Longer than the hits of a layer keep the processor busy.
        let machine = Machine {
            latency_ns: 100_000,
            ..MACHINE
        };
        let run = |sets: &Sets| simulate(sets, Name::Refine, slots, machine, 20);
        let (without, with) = (run(&blind), run(&seeing));
        assert_eq!(without.counters.chosen, with.counters.chosen);
        assert!(with.counters.foreseen_used > 0);
        assert!(with.counters.misses() < without.counters.misses());
        assert!(with.stall_ns < without.stall_ns);
    }
}
