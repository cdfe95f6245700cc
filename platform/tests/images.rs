//! A small classifier learns in few bits what it learns in f32, inside its budget, and its steps allocate
//! nothing. Alone in its program, since the allocator counts every thread.

use leanstream::alloc::Counting;
use leanstream::cpu::vector::Vector;
use leanstream::error::Error;
use leanstream::synth::blocks::Rng;
use leanstream::tune::act::Room;
use leanstream::tune::images::data::Images;
use leanstream::tune::images::net::Net;
use leanstream::tune::images::trainer::{Plan, Settings, Trainer};
use leanstream::tune::optim::{Decay, Schedule};
use leanstream_core::act::Width;

#[global_allocator]
static ALLOC: Counting = Counting::new();

const SIDE: usize = 12;
const SHAPE: [usize; 3] = [SIDE, SIDE, 1];
const BATCH: usize = 32;
const STEPS: u64 = 60;

/// Bars that lie, stand, fall and rise, anywhere, on a noisy ground.
fn bars(count: usize, seed: u64) -> Images {
    let mut random = Rng::new(seed, "bars");
    let (mut pixels, mut labels) = (Vec::new(), Vec::new());
    for image in 0..count {
        let class = image % 4;
        let mut below = |n: u64| (random.bits() % n) as usize;
        let (row, col) = (3 + below(6), 3 + below(6));
        let start = pixels.len();
        pixels.extend((0..SIDE * SIDE).map(|_| below(150) as u8));
        for along in 0..6 {
            let (y, x) = match class {
                0 => (row, col + along - 3),
                1 => (row + along - 3, col),
                2 => (row + along - 3, col + along - 3),
                _ => (row + along - 3, col + 3 - along),
            };
            pixels[start + y * SIDE + x] = 180 + below(76) as u8;
        }
        labels.push(class as u8);
    }
    Images::new(SHAPE, pixels, labels).unwrap()
}

fn settings(act: Option<Width>, budget: Option<u64>) -> Settings {
    Settings {
        batch: BATCH,
        act,
        budget,
        schedule: Schedule {
            peak: 1e-2,
            warmup: 5,
            steps: STEPS,
            decay: Decay::Cosine,
            floor: 0.0,
        },
        weight_decay: 0.01,
        threads: 2,
        seed: 5,
    }
}

/// Accuracy on other images after training, and the peak of saved bytes; in few bits within 1.3 times the
/// least budget, which falls to 1.1 times in the middle.
fn train(name: &str, act: Option<Width>) -> (f64, u64) {
    let (set, mut other) = (bars(800, 1), bars(400, 2));
    other.scale_as(&set);
    let net = Net::named(name, SHAPE, 4).unwrap();
    let least = Plan::new(&net, &settings(act, None)).unwrap().least;
    let mut budget = if act.is_none() {
        least * 13 / 10
    } else {
        u64::MAX
    };
    let settings = settings(act, Some(budget));
    let plan = Plan::new(&net, &settings).unwrap();
    let mut room = Room::new(plan.capacity).unwrap();
    let mut trainer = Trainer::new(net, Vector::detect(), plan, &mut room, settings).unwrap();
    ALLOC.seal();
    for step in 0..STEPS {
        if act.is_none() && step == STEPS / 2 {
            assert!(trainer.classifier.peak_bytes() > budget / 2, "it is used");
            budget = least * 11 / 10;
            trainer.set_budget(budget).unwrap();
            trainer.classifier.saved.reset_peak();
        }
        trainer.step(&set).unwrap();
        assert!(trainer.classifier.peak_bytes() <= budget);
    }
    ALLOC.unseal();
    assert_eq!(ALLOC.since_seal().calls, 0, "{name}: steps allocate");
    let (accuracy, _) = trainer.evaluate(&other).unwrap();
    (accuracy, trainer.classifier.peak_bytes())
}

#[test]
fn few_bits_learn_what_floats_learn() {
    for name in ["resnet8", "cnn"] {
        let (accuracy, floats) = train(name, Some(Width::F32));
        assert!(accuracy > 0.95, "{name} in f32: {accuracy}");
        let (accuracy, bits) = train(name, None);
        assert!(accuracy > 0.95, "{name} in few bits: {accuracy}");
        println!("{name}: {floats} bytes, {bits} bytes");
        assert!(bits * 9 < floats, "{name}: {bits} bytes of {floats}");
    }
    // What isn't enough is refused with what is.
    let net = Net::named("mlp", SHAPE, 4).unwrap();
    let refused = Plan::new(&net, &settings(None, Some(4096)));
    let Err(Error::Budget { least, table, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert!(table.contains("masks"), "{table}");
    let plan = Plan::new(&net, &settings(None, Some(least))).unwrap();
    let mut room = Room::new(plan.capacity).unwrap();
    let least = settings(None, Some(least));
    let mut trainer = Trainer::new(net, Vector::detect(), plan, &mut room, least).unwrap();
    trainer.step(&bars(64, 3)).unwrap();
}
