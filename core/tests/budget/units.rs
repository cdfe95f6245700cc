//! The same for units that are chosen while a pass runs: how many of the used ones were absent, by
//! policy, over a made-up run. Storage and compute take no time here; only decisions count.

use leanstream_core::port::ReadOutcome;
use leanstream_core::sparse::retain::{Cause, Name, Policy, Retain, Rules, Seen};
use leanstream_core::sparse::store::slots_least;
use leanstream_core::sparse::tables::{Bank, Foreseen, Prior, Sizes};
use leanstream_core::sparse::{Choice, Chosen, Counters, Grouping, Reach, Select, Store};
use leanstream_core::stream::Worth;
use leanstream_core::units::{FileId, ReadId};
use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt::Write;

use crate::tables::Owned;

const LAYERS: u32 = 24;
const UNITS: u32 = 128;
const UNIT_BYTES: u32 = 1160;
const TOKENS: u32 = 480;
/// Tokens that calibrate and warm up, and don't count.
const WARM: u32 = 160;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1, heaped at 0.
    fn noise(&mut self) -> f32 {
        let mut sum = 0.0;
        for _ in 0..4 {
            sum += (self.next() >> 40) as f32 / (1u32 << 24) as f32 - 0.5;
        }
        sum
    }
}

/// A run: for each token and layer the gate's output, which is above 0 where a unit is used.
struct Run {
    scores: Vec<Vec<f32>>,
}

impl Run {
    /// Some units are used often and most seldom; what a token uses depends on the one before and on
    /// a subject that changes every 80 tokens. Plain sums and products, so every machine sees the same.
    fn new() -> Self {
        let mut random = Random(3);
        let count = (LAYERS * UNITS) as usize;
        let mut state = vec![0.0f32; count];
        let mut subject = vec![0.0f32; count];
        let mut scores = Vec::new();
        for token in 0..TOKENS {
            for unit in 0..count {
                if token % 80 == 0 {
                    subject[unit] = random.noise() * 0.5;
                }
                state[unit] = 0.3 * state[unit] + random.noise();
            }
            for layer in 0..LAYERS {
                let first = layer * UNITS;
                let row = (0..UNITS).map(|unit| {
                    // Spread over flash, not sorted.
                    let rank = unit * 37 % UNITS;
                    let base = 2.4 / (1.0 + rank as f32 / 10.0) - 1.2;
                    let at = (first + unit) as usize;
                    base + subject[at] + state[at]
                });
                scores.push(row.collect());
            }
        }
        Self { scores }
    }

    fn layer(&self, token: u32, layer: u32) -> &[f32] {
        &self.scores[(token * LAYERS + layer) as usize]
    }

    /// Share of the tokens that warm up which use a unit.
    fn prior(&self, unit: u32) -> f32 {
        let (layer, index) = (unit / UNITS, (unit % UNITS) as usize);
        let uses = (0..WARM).filter(|&token| self.layer(token, layer)[index] > 0.0);
        uses.count() as f32 / WARM as f32
    }

    /// Tokens from `token` to the next use of a unit.
    fn next(&self, token: u32, unit: u32) -> u32 {
        let (layer, index) = (unit / UNITS, (unit % UNITS) as usize);
        (token + 1..TOKENS)
            .find(|&later| self.layer(later, layer)[index] > 0.0)
            .map_or(u32::MAX, |later| later - token)
    }
}

/// A policy that is told the future.
struct Told<'r> {
    policy: Policy,
    run: &'r Run,
    token: &'r Cell<u32>,
    foresight: bool,
}

impl Retain for Told<'_> {
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth {
        let next = if self.policy.name().needs_oracle() {
            self.run.next(self.token.get(), seen.unit)
        } else {
            seen.next
        };
        self.policy.worth(&Seen { next, ..*seen }, cause)
    }

    fn rules(&self) -> Rules {
        let rules = self.policy.rules();
        Rules {
            speculates: self.foresight && rules.speculates,
            ..rules
        }
    }
}

/// Counters of the tokens that count.
fn counts(run: &Run, name: Name, slots: u32, foresight: bool) -> Counters {
    let total = LAYERS * UNITS;
    let banks: Vec<Bank> = (0..LAYERS)
        .map(|layer| Bank {
            file: FileId(0),
            offset: 4096 + u64::from(layer) * u64::from(UNITS * UNIT_BYTES),
            unit_bytes: UNIT_BYTES,
            first: layer * UNITS,
            count: UNITS,
        })
        .collect();
    let priors = (0..total).map(|unit| run.prior(unit));
    let token = Cell::new(0);
    let shares = priors.clone().map(Prior::new).collect();
    let sizes = Sizes::of(&banks, slots, 8);
    let mut tables = Owned::new(banks, shares, sizes, UNITS);
    let mut store = Store::new(
        tables.lend(),
        Told {
            policy: Policy::new(name, slots, priors),
            run,
            token: &token,
            foresight,
        },
        Reach {
            align: 512,
            window_max: 16 << 10,
            gap_max: 0,
            ahead_max: 8,
        },
    );
    let mut before = Counters::default();
    for now in 0..TOKENS {
        token.set(now);
        if now == WARM {
            before = store.counters();
        }
        store.begin(1);
        for layer in 0..LAYERS {
            let scores = run.layer(now, layer);
            let chosen: Vec<Chosen> = (0..UNITS)
                .filter(|&index| scores[index as usize] > 0.0)
                .map(|index| Chosen {
                    index,
                    importance: scores[index as usize],
                    share: 1.0,
                })
                .collect();
            store.choose(Choice {
                bank: layer,
                chosen: &chosen,
                scores: Some(scores),
                grouping: Grouping::Importance,
                select: Select::All,
            });
            // A stage sees the next layer's gate a little blurred.
            let next = (layer + 1) % LAYERS;
            let ahead = (now * LAYERS + layer + 1) / LAYERS;
            if ahead < TOKENS {
                let mut blur = Random(u64::from(now * LAYERS + layer));
                let mut units: Vec<Foreseen> = (0..UNITS)
                    .map(|index| Foreseen {
                        index,
                        score: run.layer(ahead, next)[index as usize] + 0.1 * blur.noise(),
                    })
                    .filter(|unit| unit.score > 0.0)
                    .collect();
                units.sort_by(|a, b| b.score.total_cmp(&a.score));
                store.foresee(next, units.into_iter());
            }
            let mut flying: VecDeque<ReadId> = VecDeque::new();
            loop {
                while let Some(request) = store.poll_read() {
                    flying.push_back(request.read);
                }
                while let Some(group) = store.poll_group() {
                    store.group_ended(group);
                }
                // What is foreseen comes in behind what is demanded, before the layer ends.
                match flying.pop_front() {
                    Some(read) => store.read_ended(read, ReadOutcome::Filled, |_| true),
                    None if store.settled() => break,
                    None => {}
                }
            }
            store.finish();
        }
    }
    let mut after = store.counters();
    for (after, before) in [
        (&mut after.chosen, before.chosen),
        (&mut after.hits, before.hits),
        (&mut after.reads, before.reads),
        (&mut after.foreseen, before.foreseen),
        (&mut after.foreseen_used, before.foreseen_used),
    ] {
        *after -= before;
    }
    after
}

/// The table, and what it has to show whatever the numbers are.
pub fn table() -> String {
    let run = Run::new();
    let all = LAYERS * UNITS;
    let tokens = TOKENS - WARM;
    let mut table = String::new();
    let used = counts(&run, Name::LruWindow, all, false).chosen / u64::from(tokens);
    writeln!(
        table,
        "{LAYERS} layers of {UNITS} units, {used} used a token: units absent when chosen, a token"
    )
    .unwrap();
    writeln!(
        table,
        "    % | lru-window oneshot static  lfu refine belady | oneshot: read ahead  used, absent | refine: read ahead  used, absent"
    )
    .unwrap();
    for percent in [10, 18, 25, 33, 50, 75, 100] {
        let slots = (all * percent / 100).max(slots_least(UNITS));
        let absent = |name, foresight| {
            let counts = counts(&run, name, slots, foresight);
            (counts.misses() / u64::from(tokens), counts)
        };
        let misses = |name| absent(name, false).0;
        let [lru, oneshot, fixed, lfu, refine, belady] = [
            Name::LruWindow,
            Name::Oneshot,
            Name::Static,
            Name::Lfu,
            Name::Refine,
            Name::Belady,
        ]
        .map(misses);
        assert!(
            belady <= refine && refine <= lfu && lfu <= lru,
            "{percent}%: who knows more does better"
        );
        write!(
            table,
            "{percent:5} | {lru:10} {oneshot:7} {fixed:6} {lfu:4} {refine:6} {belady:6}"
        )
        .unwrap();
        for name in [Name::Oneshot, Name::Refine] {
            let (absent, counts) = absent(name, true);
            let ahead = counts.foreseen / u64::from(tokens);
            let used = counts.foreseen_used / u64::from(tokens);
            let indent = if name == Name::Oneshot { 19 } else { 18 };
            write!(table, " | {ahead:indent$} {used:5} {absent:7}").unwrap();
        }
        writeln!(table).unwrap();
    }
    table
}
