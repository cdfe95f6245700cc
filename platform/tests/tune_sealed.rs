//! A training step allocates nothing, whatever is saved, streamed, or taken away meanwhile.

mod common;

use common::tune::{LORA, prepare, settings};
use leanstream::alloc::Counting;
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream::tune::data::{Data, Options};
use leanstream::tune::model::params::Scheme;
use leanstream::tune::optim::Precision;
use leanstream::tune::settings::{ActBits, Recompute, Settings};
use leanstream::tune::setup;
use leanstream::tune::trainer::Trainer;
use leanstream::tune::watch::Watch;
use leanstream_core::act::Width;
use leanstream_core::quant::QuantType;

#[global_allocator]
static ALLOC: Counting = Counting::new();

#[test]
fn a_step_allocates_nothing() {
    let scratch = common::Scratch::new("tune-sealed");
    let text = scratch.join("data.txt");
    std::fs::write(
        &text,
        "all work and no play makes for a dull day. ".repeat(40),
    )
    .expect("a file");
    for arch in [Arch::Llama, Arch::Gemma3, Arch::Arcee] {
        let path = scratch.join(arch.name());
        Spec::small(arch, QuantType::Q8_0, 3)
            .write(&Vocab::BuiltIn, &path)
            .expect("a model");
        let dropout = Scheme::Lora {
            rank: 4,
            alpha: 8.0,
            dropout: 0.1,
            sites: [true; 7],
        };
        let auto = |scheme| Settings {
            act: ActBits::Auto,
            recompute: Recompute::Auto,
            batch: 3,
            ..settings(scheme)
        };
        let cases = [
            auto(LORA),
            auto(dropout),
            auto(Scheme::Full),
            Settings {
                act: ActBits::Fixed(Width::Four),
                moments: Precision::Bits8,
                ..settings(LORA)
            },
            Settings {
                recompute: Recompute::Layers,
                ..auto(LORA)
            },
        ];
        for settings in cases {
            let (info, parts, plan) = prepare(&path, &settings, 64, 1 << 30).expect("it fits");
            let options = Options {
                seq: 32,
                seed: 1,
                bytes_max: 1 << 20,
            };
            let data = Data::load(&text, &info.tokenizer, options).expect("data");
            let mut room = setup::room(&parts, &plan).expect("memory");
            let least = plan.least();
            let watch = Watch::fixed(1 << 30);
            let mut trainer =
                Trainer::new(parts, plan, &mut room, settings, watch).expect("it starts");
            trainer.begin(&info.paths).expect("first values");
            // What is lazily made by the system's libraries is made here.
            trainer.step(&data).expect("a step");
            ALLOC.seal();
            for _ in 0..9 {
                trainer.step(&data).expect("a step");
            }
            trainer.decoder.set_budget(least).expect("the least does");
            trainer.step(&data).expect("a step");
            let count = ALLOC.since_seal();
            ALLOC.unseal();
            assert_eq!(count.calls, 0, "{}, {settings:?}: {count:?}", arch.name());
        }
    }
}
