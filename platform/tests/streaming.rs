//! Streaming changes nothing but time: the same bits for every budget, backend, queue depth and
//! thread count, also when reads fail; and it reads what it must, once.

mod common;

use common::cases;
use common::{Scratch, run};
use leanstream::io::fault::FaultPlan;
use leanstream::io::{self, Direct, Kind};
use leanstream::run::model;
use leanstream::run::session::{Memory, Options, Session};

/// Large enough that a small budget holds a part of it: several pieces a matrix.
fn big(scratch: &Scratch) -> std::path::PathBuf {
    let mut case = cases::all()
        .into_iter()
        .find(|case| case.name == "llama-Q4_0")
        .expect("a case");
    case.spec.d = 512;
    case.spec.ff = 2048;
    case.spec.layers = 4;
    let path = scratch.join("big.gguf");
    case.spec
        .write(&leanstream::synth::vocab::Vocab::BuiltIn, &path)
        .expect("a model");
    path
}

const TOKENS: [u32; 14] = [3, 17, 90, 4, 200, 33, 61, 7, 120, 9, 250, 41, 77, 5];

#[test]
fn no_budget_backend_depth_or_thread_count_changes_a_bit() {
    let scratch = Scratch::new("grid");
    let path = big(&scratch);
    let plenty = run::options(TOKENS.len());
    let want = run::logits(&path, &plenty, &TOKENS, 5).expect("a run");
    let least = run::least_budget(
        &path,
        &Options {
            batch: Some(1),
            ..plenty.clone()
        },
    );
    let faults = FaultPlan::parse("seed=11,fail=0.3%,late=5%,short=10%").expect("a plan");
    for budget in [least, least + (1 << 20), least + (3 << 20), 1 << 30] {
        for kind in [Kind::Uring, Kind::Pread] {
            for (depth, direct) in [(1, Direct::Auto), (3, Direct::Off), (16, Direct::Auto)] {
                for threads in [1, 2, 3] {
                    let options = Options {
                        budget: budget + u64::from(threads) * (1 << 20),
                        batch: if budget == least { Some(1) } else { None },
                        threads,
                        direct,
                        queue_depth: Some(depth),
                        without: leanstream::run::setup::Without::default(),
                        watched: false,
                        gap: Some(0),
                        one_by_one: false,
                        select: leanstream_core::sparse::Select::All,
                        policy: leanstream_core::sparse::retain::Name::Refine,
                        io: io::Options {
                            kind,
                            faults: (threads == 2).then_some(faults),
                            ..plenty.io
                        },
                        ..plenty.clone()
                    };
                    let got = run::logits(&path, &options, &TOKENS, 5);
                    let got =
                        got.unwrap_or_else(|e| panic!("{budget} {kind:?} {depth} {threads}: {e}"));
                    assert!(
                        got == want,
                        "{budget} {kind:?} depth {depth}, {threads} threads: other bits"
                    );
                }
            }
        }
    }
}

/// Bytes read for a token are the weights less what is kept, and no piece is read twice in a pass.
#[test]
fn a_token_reads_the_weights_that_are_not_kept_and_each_once() {
    let scratch = Scratch::new("counts");
    let path = big(&scratch);
    let plenty = Options {
        context: 64,
        ..run::options(TOKENS.len())
    };
    let least = run::least_budget(&path, &plenty);
    for extra in [1 << 20, 2 << 20, 4 << 20, 64 << 20] {
        let options = Options {
            budget: least + extra,
            ..plenty.clone()
        };
        let (info, mut weights) = model::load(&path).expect("a model");
        let pass_bytes = weights.pass_bytes();
        let mut memory = Memory::new(&info, &mut weights, &options, 0).expect("it fits");
        let plan = memory.plan.clone();
        let mut session = Session::start(&info, weights, &mut memory, &options).expect("it starts");
        session.prompt(&TOKENS, true).expect("a prompt");
        for token in 0..8 {
            session.decode(token, true).expect("a token");
        }
        let before = session.stats();
        for token in 0..16 {
            session.decode(token, true).expect("a token");
        }
        let done = session.stats().since(&before).counters;
        let kept = f64::from(plan.kept()) / f64::from(plan.planned);
        let must = pass_bytes as f64 * (1.0 - kept);
        // The embedding row of each token comes on top, and the widening to the device's alignment.
        let rows = f64::from(info.hyper.d) * 4.0 + 8192.0;
        // What is on its way for the next token when counting begins and ends depends on the machine.
        let ring = f64::from(plan.slots - plan.kept()) * f64::from(plan.slot_bytes) / 16.0;
        let got = done.bytes_read as f64 / 16.0;
        assert!(
            got <= must * 1.02 + rows + ring,
            "{extra}: {got} bytes a token, {must} are not kept"
        );
        assert!(
            got >= must * 0.96 - ring,
            "{extra}: {got} bytes a token, {must} are not kept"
        );
        assert_eq!(done.rereads, 0, "{extra}");
        assert_eq!(session.stats().counters.rereads, 0, "{extra}");
    }
}
