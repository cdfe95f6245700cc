//! A trace in the shape of a larger model: the model uses what the trace names, in the second half
//! alone, and foresees what its looks named.

mod common;

use std::path::{Path, PathBuf};

use common::packs::{options as pack_options, pack_with};
use common::{Scratch, run};
use leanstream::error::Error;
use leanstream::run::model;
use leanstream::run::session::{Memory, Options, Session};
use leanstream::synth::Spec;
use leanstream::synth::vocab::Vocab;
use leanstream::trace::{Meta, Recorder, Sets, Shape};
use leanstream_core::pack::Order;
use leanstream_core::sparse::Select;

/// The trace's layers and units: the model has 4 layers, of 9 times as many units.
const LAYERS: u32 = 3;
const UNITS: u32 = 128;
/// Its tokens; the first half has another pattern than the second.
const TOKENS: u32 = 40;
const HALF: u32 = TOKENS / 2;

/// What a neuron does in a token of the trace: a pattern that differs by each of them.
fn active(token: u32, layer: u32, unit: u32) -> bool {
    let mixed = (token * 31 + layer * 17 + unit * 7) % 23;
    mixed < if token < HALF { 2 } else { 5 }
}

/// What look `stage` names: the later, the more of what is used. Layer 2 had no look 2, so what the
/// one before it named stands for it.
fn named(stage: u8, token: u32, layer: u32, unit: u32) -> bool {
    let stage = if layer == 2 && stage == 2 { 1 } else { stage };
    active(token, layer, unit) && unit % 4 <= u32::from(stage)
}

fn importance(unit: u32) -> f32 {
    (unit % 16 + 1) as f32
}

/// Writes the trace.
fn record(path: &Path, units: u32) {
    let meta = Meta {
        layers: LAYERS,
        units,
        unit_bytes: 100,
        source_sha256: [0; 32],
        name: "small",
        scores: true,
        ranks: false,
    };
    let mut recorder = Recorder::begin(path, &meta).expect("a trace");
    for token in 0..TOKENS {
        recorder.token(u64::from(token));
        for layer in 0..LAYERS {
            let all = |named: &dyn Fn(u32) -> bool| -> Vec<u16> {
                let units = (0..units).filter(|unit| named(*unit));
                units.map(|unit| unit as u16).collect()
            };
            // A look of a number that no run of this program has is passed by.
            recorder.stage(layer, 9, &all(&|_| true));
            for stage in (0..4).filter(|stage| layer > 0 && (layer, *stage) != (2, 2)) {
                recorder.stage(layer, stage, &all(&|unit| named(stage, token, layer, unit)));
            }
            let used = all(&|unit| active(token, layer, unit));
            let sizes: Vec<f32> = used.iter().map(|u| importance(u32::from(*u))).collect();
            let gate: Vec<f32> = (0..units).map(|unit| unit as f32 - 50.0).collect();
            recorder.layer(layer, &gate, &used, &sizes);
        }
    }
    recorder.finish().expect("a trace");
}

/// A model of the tiny shape, packed without calibration, and the trace.
fn made(scratch: &Scratch) -> (PathBuf, PathBuf) {
    let [from, to, trace] = ["m.gguf", "m.lean", "t.trace"].map(|name| scratch.join(name));
    let spec = Spec::named("tiny-relu", 3).expect("a shape");
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let options = leanstream::pack::Options {
        order: Order::File,
        calibrate: None,
        ..pack_options()
    };
    pack_with(&from, &to, &options).expect("a pack");
    record(&trace, UNITS);
    (to, trace)
}

/// What the model's layers have in the trace: the first is never used again.
const STANDS_FOR: [u32; 4] = [0, 1, 2, 1];

#[test]
fn the_model_uses_and_foresees_what_the_trace_names() {
    let scratch = Scratch::new("shape-sets");
    let (path, trace) = made(&scratch);
    let options = run::options(2 * TOKENS as usize);
    let (info, mut weights) = model::load(&path).expect("a model");
    let ff = info.hyper.ff;
    let shape = Shape::load(&trace, ff).expect("it fits");
    assert_eq!((shape.copies(), shape.tokens()), (9, HALF));
    for unit in 0..ff {
        let neuron = unit / 9;
        let used = (0..HALF).filter(|token| active(*token, 1, neuron)).count();
        let prior = used as f32 / HALF as f32;
        assert_eq!(shape.prior(3, unit), prior, "of the first half alone");
        if used > 0 {
            let off = shape.mean(3, unit) / importance(neuron);
            assert!((0.97..1.03).contains(&off), "{off}");
        }
    }
    weights.packed.as_mut().expect("a pack").stand_in(shape);
    let mut memory = Memory::new(&info, &mut weights, &options, 0).expect("it fits");
    let mut session = Session::start(&info, weights, &mut memory, &options).expect("it starts");
    // The first pass fills the memory, so that every later one looks ahead.
    session.decode(1, true).expect("a token");
    let before = session.stats().units.chosen;
    let again = scratch.join("again.trace");
    let meta = Meta {
        layers: info.hyper.layers,
        units: ff,
        unit_bytes: 1,
        source_sha256: [0; 32],
        name: "shaped",
        scores: false,
        ranks: false,
    };
    session.record(Recorder::begin(&again, &meta).expect("a trace"));
    for token in 0..HALF {
        session.decode(token, true).expect("a token");
    }
    let chosen = session.stats().units.chosen - before;
    session.end_record().expect("it").finish().expect("a trace");
    // In as many tokens as the half has, each copy went through all of them.
    let wanted: u32 = STANDS_FOR
        .iter()
        .flat_map(|layer| (HALF..TOKENS).map(move |token| (token, *layer)))
        .map(|(token, layer)| (0..UNITS).filter(|u| active(token, layer, *u)).count() as u32)
        .sum();
    assert_eq!(chosen, u64::from(9 * wanted));

    let shape = Shape::load(&trace, ff).expect("it fits");
    let sets = Sets::load(&again, 1.0).expect("a trace");
    let mut differ = 0;
    for (token, layer) in (0..HALF).flat_map(|t| (0..4).map(move |l| (t, l))) {
        let by = |unit: u32| {
            let at = shape.recorded(token + 1, layer, unit);
            assert_eq!((at.layer, at.unit), (STANDS_FOR[layer as usize], unit / 9));
            assert!((HALF..TOKENS).contains(&at.token));
            at
        };
        let used: Vec<u32> = (0..ff)
            .filter(|unit| active(by(*unit).token, by(*unit).layer, unit / 9))
            .collect();
        assert_eq!(sets.active(token, layer), used, "{token} {layer}");
        for (unit, size) in used.iter().zip(sets.importance(token, layer)) {
            let off = size / importance(unit / 9);
            assert!((0.94..1.06).contains(&off), "{off}");
        }
        let alone = |unit: &&u32| *unit % 9 < 8 && !used.contains(&(**unit + 1));
        differ += used.iter().filter(alone).count();
        for stage in (0..4).filter(|_| layer > 0) {
            let seen: Vec<u32> = (0..ff)
                .filter(|unit| named(stage, by(*unit).token, by(*unit).layer, unit / 9))
                .collect();
            assert_eq!(
                sets.foreseen(stage, token, layer),
                seen,
                "{token} {layer} {stage}"
            );
        }
    }
    assert!(differ > 0, "copies of a neuron read other tokens");
}

/// With little memory units are read as the trace has them, in both modes, and looking ahead helps.
#[test]
fn a_shaped_model_streams_in_both_modes() {
    let scratch = Scratch::new("shape-streams");
    let (path, trace) = made(&scratch);
    let plenty = run::options(64);
    let least = run::least_budget(&path, &plenty);
    let read = |select: Select| {
        let options = Options {
            budget: least + (300 << 10),
            select,
            ..plenty.clone()
        };
        let (info, mut weights) = model::load(&path).expect("a model");
        let shape = Shape::load(&trace, info.hyper.ff).expect("it fits");
        let bytes = shape.bytes();
        let packed = weights.packed.as_mut().expect("a pack");
        let before = packed.bytes();
        packed.stand_in(shape);
        assert_eq!(packed.bytes(), before + bytes, "the budget knows of it");
        let mut memory = Memory::new(&info, &mut weights, &options, 0).expect("it fits");
        let mut session = Session::start(&info, weights, &mut memory, &options).expect("it starts");
        for token in 0..40 {
            session.decode(token, true).expect("a token");
        }
        session.stats().units
    };
    let (exact, sparse) = (read(Select::All), read(Select::Top(0.25)));
    assert_eq!(exact.chosen, sparse.chosen);
    assert_eq!(exact.skipped, 0);
    assert!(exact.misses() > 0 && sparse.skipped > 0);
    assert!(sparse.misses() * 2 < exact.misses(), "{exact:?} {sparse:?}");
}

#[test]
fn a_trace_that_cannot_stand_for_the_model_is_refused() {
    let scratch = Scratch::new("shape-refused");
    let trace = scratch.join("t.trace");
    record(&trace, UNITS);
    for copies in [1, 9, 64] {
        assert!(Shape::load(&trace, copies * UNITS).is_ok());
    }
    for ff in [64, 129, 1100, 65 * 128] {
        match Shape::load(&trace, ff).map(|_| ()) {
            Err(Error::Usage(why)) => assert!(why.contains(&ff.to_string()), "{why}"),
            other => panic!("{ff}: {other:?}"),
        }
    }
    let meta = Meta {
        layers: 1,
        units: UNITS,
        unit_bytes: 1,
        source_sha256: [0; 32],
        name: "no scores",
        scores: false,
        ranks: false,
    };
    let recorder = Recorder::begin(&trace, &meta).expect("a trace");
    recorder.finish().expect("a trace");
    match Shape::load(&trace, UNITS).map(|_| ()) {
        Err(Error::Usage(why)) => assert!(why.contains("leanstream trace"), "{why}"),
        other => panic!("{other:?}"),
    }
    std::fs::write(&trace, "LEANTRC").expect("a file");
    assert!(matches!(
        Shape::load(&trace, 128).map(|_| ()),
        Err(Error::Model { .. })
    ));
}
