//! A pack that isn't finished leaves nothing behind, and an older one as it was. Alone in its program,
//! since the signal it raises is the whole process's.

mod common;

use std::fs;
use std::sync::atomic::Ordering;

use common::Scratch;
use common::packs::{Read, options, pack_with};
use leanstream::error::Error;
use leanstream::pack::{self, Options};
use leanstream::run::model;
use leanstream::signals::STOP;
use leanstream::synth::vocab::Vocab;
use leanstream::synth::{Arch, Spec};
use leanstream_core::quant::QuantType;

#[test]
fn an_interrupted_pack_leaves_nothing() {
    let scratch = Scratch::new("pack-interrupted");
    let (from, to) = (scratch.join("model.gguf"), scratch.join("model.lean"));
    let spec = Spec::small(Arch::Llama, QuantType::Q8_0, 5);
    spec.write(&Vocab::BuiltIn, &from).expect("a model");
    let options = Options {
        calibrate: None,
        ..options()
    };
    for old in [None, Some(b"older")] {
        if let Some(old) = old {
            fs::write(&to, old).unwrap();
        }
        for (stage, nth) in [
            ("hashing", 0),
            ("packing", 0),
            ("packing", 12),
            ("sketching the head", 0),
            // Nothing is read after this: only the name is missing.
            ("packing the head", 0),
        ] {
            let (info, weights) = model::load(&from).unwrap();
            let mut heard = 0;
            let ended = pack::pack(&from, &to, (&info, weights), &options, &mut |what, _, _| {
                if what == stage {
                    if heard == nth {
                        STOP.store(15, Ordering::Relaxed);
                    }
                    heard += 1;
                }
            });
            STOP.store(0, Ordering::Relaxed);
            match ended {
                Err(Error::Signal(15)) => {}
                other => panic!(
                    "stopped while {stage}: {:?}",
                    other.map(|report| report.bytes)
                ),
            }
            match old {
                None => assert_eq!(scratch.names(), ["model.gguf"]),
                Some(old) => {
                    assert_eq!(scratch.names(), ["model.gguf", "model.lean"]);
                    assert_eq!(fs::read(&to).unwrap(), old);
                }
            }
        }
    }
    // And then it works.
    pack_with(&from, &to, &options).unwrap();
    assert_eq!(scratch.names(), ["model.gguf", "model.lean"]);
    assert_eq!(Read::open(&to).layers.len(), 2);
}
