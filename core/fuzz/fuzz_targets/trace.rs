//! Any bytes as a trace. Whatever is accepted keeps the promises that a reader builds on.

#![no_main]

use leanstream_core::trace::{HAS_IMPORTANCE, HAS_RANKS, HAS_SCORES, Importances, RANKS_ADDED, Record, Trace};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(trace) = Importances::parse(data) {
        for token in 0..trace.tokens {
            for layer in 0..trace.layers {
                assert_eq!(trace.layer(token, layer).len(), trace.chunks as usize);
            }
        }
    }
    match Trace::parse(data) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok(trace) => sound(&trace, data),
    }
});

fn sound(trace: &Trace<'_>, data: &[u8]) {
    let header = trace.header();
    assert_eq!(data.first_chunk(), Some(&header.encode()));
    let _ = header.name();
    let (mut tokens, mut layers) = (0u32, 0u64);
    for record in trace.records() {
        match record {
            Record::Token { .. } => {
                assert_eq!(layers, u64::from(tokens) * u64::from(header.layers));
                tokens += 1;
            }
            Record::Stage {
                layer, predicted, ..
            } => {
                assert!(layer < header.layers);
                assert!(predicted.iter().all(|unit| unit < header.units));
            }
            Record::Layer {
                layer,
                active,
                importance,
                scores,
            } => {
                assert_eq!(layers % u64::from(header.layers), u64::from(layer));
                layers += 1;
                let units: Vec<u32> = active.iter().collect();
                assert!(units.is_sorted_by(|a, b| a < b));
                assert!(
                    units
                        .iter()
                        .all(|&unit| unit < header.units && active.has(unit))
                );
                let used = if header.flags & HAS_IMPORTANCE != 0 {
                    units.len()
                } else {
                    0
                };
                assert_eq!(importance.len(), used);
                let all = if header.flags & HAS_SCORES != 0 {
                    header.units
                } else {
                    0
                };
                assert_eq!(scores.len(), all as usize);
            }
            Record::Ranks { layer, of, ranks } => {
                assert!(layer < header.layers && of <= RANKS_ADDED);
                assert!(header.flags & HAS_RANKS != 0);
                assert_eq!(ranks.len(), header.units as usize);
            }
            Record::Read { .. } => {}
        }
    }
    assert_eq!(tokens, header.tokens);
    assert_eq!(layers, u64::from(tokens) * u64::from(header.layers));
}
