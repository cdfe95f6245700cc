//! Traces for tests.

use super::record::{Meta, Recorder};
use super::sets::Sets;

/// What `record` records of `layers` layers of `units` units, loaded again. `name` is the test's own.
pub fn made_up(name: &str, [layers, units]: [u32; 2], record: impl FnOnce(&mut Recorder)) -> Sets {
    let path = std::env::temp_dir().join(format!("leanstream-trace-{}-{name}", std::process::id()));
    let meta = Meta {
        layers,
        units,
        unit_bytes: 1000,
        source_sha256: [0; 32],
        name: "made up",
        scores: false,
        ranks: false,
    };
    let mut recorder = Recorder::begin(&path, &meta).expect("a file can be made");
    record(&mut recorder);
    recorder.finish().expect("it can be written");
    let sets = Sets::load(&path, 0.0).expect("it is sound");
    std::fs::remove_file(&path).expect("it can go");
    sets
}
