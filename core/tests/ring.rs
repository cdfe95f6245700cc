//! How good the ring is that `Cyclic` chooses without knowing the device: passes timed in the simulator
//! against those with other rings.

mod common;

use common::Plan;
use common::machine::{Machine, Run, STEADY, run, shape};
use leanstream_core::stream::Cyclic;

/// Time of a steady pass in microseconds.
fn pass_us(cyclic: Cyclic, plan: &Plan, slots: usize, machine: Machine) -> u64 {
    let long = Run {
        plan,
        slots,
        machine,
        passes: 5,
        rows: (1, 1),
        tied: false,
        skips: false,
        stops: 0,
        seed: 3,
    };
    let short = Run { passes: 2, ..long };
    (run(cyclic, &long, || 0).us - run(cyclic, &short, || 0).us) / 3
}

#[test]
fn the_chosen_ring_is_near_the_best() {
    // A model of 135M parameters in 128 KiB pieces: 30 layers, then the head.
    let mut counts = vec![0];
    for _ in 0..30 {
        counts.extend([0, 5, 0, 3, 0, 14, 7]);
    }
    counts.extend([0, 234]);
    let plan = Plan::new(&counts, 0, 1);
    let (mut ratios, mut count, mut worst) = (0.0, 0.0, 1.0f64);
    for (transfer_us, reads_max, latency) in [(60, 16, 100), (60, 8, 400), (20, 16, 100)] {
        for percent in [25, 50, 75, 90, 97] {
            let slots = (plan.planned * percent / 100) as usize;
            let missing = u64::from(plan.planned) - slots as u64;
            // Computing takes half as long as reading, as long, and twice as long.
            for balance in [50, 100, 200] {
                let read_us = missing * transfer_us;
                let piece_us = (read_us * balance / 100 / u64::from(plan.planned)).max(1);
                let machine = Machine {
                    reads_max,
                    latency_us: (latency, latency + latency / 4),
                    transfer_us,
                    piece_us,
                    ..STEADY
                };
                let shape = shape(&plan, slots, reads_max);
                let chosen = pass_us(Cyclic::new(shape), &plan, slots, machine);
                let others = [4, 8, 12, 16, 24, 34];
                let others = others
                    .map(|ring| pass_us(Cyclic::with_ring(shape, ring), &plan, slots, machine));
                let best = others.into_iter().min().unwrap().min(chosen);
                let ratio = chosen as f64 / best as f64;
                ratios += ratio;
                count += 1.0;
                worst = worst.max(ratio);
            }
        }
    }
    println!(
        "a pass takes {:.3} times the best, at most {worst:.3} times",
        ratios / count
    );
    assert!(ratios / count < 1.02);
    assert!(worst < 1.10);
}
