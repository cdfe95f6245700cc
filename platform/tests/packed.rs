//! Packed models run: they compute what the model computes, and neither the budget nor the policy
//! nor the storage changes a bit of it.

mod common;

use common::packs::{options as pack_options, pack_with};
use common::{Scratch, relative_l2, run};
use leanstream::run::memory::MemoryPlan;
use leanstream::run::model;
use leanstream::run::session::{Memory, Options, Session};
use leanstream::run::setup::Without;
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;
use leanstream_core::sparse::retain::Name;
use leanstream_core::sparse::{Counters, Select};

const TOKENS: [u32; 14] = [3, 17, 90, 4, 200, 33, 61, 7, 120, 9, 250, 41, 77, 5];

/// A model and its pack.
fn both(scratch: &Scratch, name: &str, spec: &Spec) -> (std::path::PathBuf, std::path::PathBuf) {
    let (from, to) = (
        scratch.join(format!("{name}.gguf")),
        scratch.join(format!("{name}.lean")),
    );
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    pack_with(&from, &to, &pack_options()).expect("a pack");
    (from, to)
}

/// Large enough that a small budget holds a part of the units.
fn relu(ty: QuantType) -> Spec {
    Spec {
        d: 256,
        ff: 1024,
        layers: 4,
        activation: Some("relu"),
        ..Spec::small(Arch::Llama, ty, 7)
    }
}

/// With f32 activations a pack whose columns were moved computes what the model does, up to rounding
/// in another order; the prompt's last position and four decoded ones.
#[test]
fn a_pack_computes_what_its_model_computes() {
    let scratch = Scratch::new("packed-same");
    let specs = [
        ("relu-q8_0", relu(QuantType::Q8_0)),
        ("relu-q4_1", relu(QuantType::Q4_1)),
        (
            "silu-q4_0",
            Spec {
                activation: None,
                ..relu(QuantType::Q4_0)
            },
        ),
        (
            "silu-q5_1",
            Spec {
                activation: None,
                ..relu(QuantType::Q5_1)
            },
        ),
        (
            "gelu-q8_0",
            Spec {
                ff: 512,
                ..Spec::small(Arch::Gemma3, QuantType::Q8_0, 3)
            },
        ),
        (
            "arcee-q8_0",
            Spec {
                ff: 512,
                ..Spec::small(Arch::Arcee, QuantType::Q8_0, 4)
            },
        ),
    ];
    for (name, spec) in specs {
        let (from, to) = both(&scratch, name, &spec);
        let options = Options {
            exact: true,
            ..run::options(TOKENS.len())
        };
        let dense = run::logits(&from, &options, &TOKENS, 5).expect("a run");
        let packed = run::logits(&to, &options, &TOKENS, 5).expect("a run");
        for (position, (packed, dense)) in packed.iter().zip(&dense).enumerate() {
            let wide = |logits: &[f32]| logits.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
            let error = relative_l2(&wide(packed), &wide(dense));
            assert!(error < 2e-4, "{name}, position {position}: {error}");
        }
    }
}

#[test]
fn no_budget_policy_backend_or_thread_count_changes_a_bit() {
    let scratch = Scratch::new("packed-grid");
    let (_, path) = both(&scratch, "relu", &relu(QuantType::Q8_0));
    let policies = Name::ALL.into_iter().filter(|name| !name.needs_oracle());
    run::same_bits(&path, &run::options(TOKENS.len()), &TOKENS, policies);
}

/// Thirty tokens after a prompt: what the store counted for them, the last logits, and the memory plan.
fn thirty(path: &std::path::Path, options: &Options) -> (Counters, Vec<f32>, MemoryPlan) {
    let (info, mut weights) = model::load(path).expect("a model");
    let mut memory = Memory::new(&info, &mut weights, options, 0).expect("it fits");
    let plan = memory.plan.clone();
    let mut session = Session::start(&info, weights, &mut memory, options).expect("it starts");
    session.prompt(&TOKENS, true).expect("a prompt");
    let before = session.stats();
    let mut last = Vec::new();
    for token in 0..30 {
        last = session.decode(token, true).expect("a token").to_vec();
    }
    (session.stats().since(&before).units, last, plan)
}

/// The sparse mode reads less than the exact one, and changes the result; with everything in memory
/// it changes nothing.
#[test]
fn the_sparse_mode_leaves_out_what_is_not_in_memory() {
    let scratch = Scratch::new("packed-sparse");
    let (_, path) = both(&scratch, "relu", &relu(QuantType::Q8_0));
    let plenty = run::options(64);
    let least = run::least_budget(&path, &plenty);
    let read = |budget: u64, select: Select| {
        let options = Options {
            budget,
            select,
            ..plenty.clone()
        };
        let (stats, last, _) = thirty(&path, &options);
        (stats, last)
    };
    let small = least + (300 << 10);
    let (exact, _) = read(small, Select::All);
    let (sparse, _) = read(small, Select::Top(0.25));
    assert_eq!(exact.skipped, 0);
    assert!(
        exact.misses() > 0 && sparse.skipped > 0,
        "{exact:?} {sparse:?}"
    );
    assert!(sparse.misses() * 2 < exact.misses(), "{exact:?} {sparse:?}");
    let (all, all_logits) = read(1 << 30, Select::All);
    let (none, none_logits) = read(1 << 30, Select::Top(0.0));
    assert_eq!(all.misses(), 0, "a prompt leaves everything in memory");
    assert_eq!(none.skipped, 0);
    assert_eq!(all_logits, none_logits);
}

/// What each part of the scheme does, and that none of them changes a result: but for the order, in
/// which sums are rounded.
#[test]
fn parts_can_be_left_out() {
    let scratch = Scratch::new("packed-without");
    let (_, path) = both(&scratch, "relu", &relu(QuantType::Q8_0));
    let plenty = run::options(64);
    let least = run::least_budget(&path, &plenty);
    let generate = |without: Without, policy: Name| {
        let options = Options {
            // All matrices stay, as a look ahead needs, and a part of the units.
            budget: least + (3 << 20),
            exact: true,
            without,
            policy,
            ..plenty.clone()
        };
        let (stats, last, plan) = thirty(&path, &options);
        assert_eq!(plan.kept(), plan.planned);
        let slots = plan.units.expect("units").slots;
        assert!((500..3000).contains(&slots), "{slots}");
        (stats, last)
    };
    let whole = Without::default();
    let (all, want) = generate(whole, Name::Refine);
    let looks = |counters: &Counters| counters.bytes_redundant + counters.late > 0;
    assert!(looks(&all), "{all:?}");

    let no_looks = Without {
        looks: true,
        ..whole
    };
    let no_retention = Without {
        retention: true,
        ..whole
    };
    let neither = Without {
        looks: true,
        ..no_retention
    };
    let (counters, got) = generate(no_looks, Name::Refine);
    assert!(got == want && !looks(&counters), "{counters:?}");
    let (counters, got) = generate(no_retention, Name::Refine);
    assert!(got == want && looks(&counters), "{counters:?}");
    let (counters, got) = generate(neither, Name::Refine);
    assert!(got == want && !looks(&counters), "{counters:?}");
    let (lru, got) = generate(whole, Name::LruWindow);
    assert_eq!((counters.hits, got == want), (lru.hits, true));

    let none = Without {
        order: true,
        ..neither
    };
    let (counters, got) = generate(none, Name::Refine);
    assert!(!looks(&counters), "{counters:?}");
    let wide = |logits: &[f32]| logits.iter().map(|x| f64::from(*x)).collect::<Vec<_>>();
    let error = relative_l2(&wide(&got), &wide(&want));
    assert!(error < 1e-5 && got != want, "{error}");
}
