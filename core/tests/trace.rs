//! Traces written by hand, sound and damaged.

use leanstream_core::trace::*;

/// Records, written down by hand, of 2 layers with 10 units.
fn sample() -> Vec<u8> {
    let mut name = [0; 56];
    name[..4].copy_from_slice(b"tiny");
    let header = Header {
        flags: HAS_IMPORTANCE | HAS_SCORES,
        layers: 2,
        units: 10,
        unit_bytes: 100,
        tokens: 2,
        compute_ns: 7,
        source_sha256: [3; 32],
        name,
    };
    let mut out = header.encode().to_vec();
    for time in [0u64, 500] {
        out.push(tag::TOKEN);
        out.extend(time.to_le_bytes());
        for layer in 0..2u32 {
            out.push(tag::STAGE);
            out.extend(layer.to_le_bytes());
            out.push(2);
            out.extend([0b1000_0001, 0b10]);
            out.push(tag::LAYER);
            out.extend(layer.to_le_bytes());
            out.extend([0b1, 0b10]);
            out.extend([100, 112]);
            out.extend([0u8, 1, 2, 3, 4, 5, 6, 7, 8, 0xff]);
        }
        out.push(tag::READ);
        out.extend((time + 10).to_le_bytes());
        out.extend(80u32.to_le_bytes());
        out.extend(4096u32.to_le_bytes());
        out.push(1);
    }
    out.push(tag::END);
    out
}

#[test]
fn records_come_back() {
    let file = sample();
    let trace = Trace::parse(&file).expect("it is sound");
    assert_eq!(trace.header().name(), "tiny");
    assert_eq!(trace.header().compute_ns, 7);
    assert_eq!(trace.header().source_sha256, [3; 32]);
    let records: Vec<_> = trace.records().collect();
    assert_eq!(records.len(), 2 * 6);
    assert_eq!(records[6], Record::Token { time_us: 500 });
    let Record::Stage {
        layer: 1,
        stage: 2,
        predicted,
    } = records[3]
    else {
        panic!("{:?}", records[3]);
    };
    assert_eq!(predicted.iter().collect::<Vec<_>>(), [0, 7, 9]);
    assert_eq!(predicted.count(), 3);
    let Record::Layer {
        layer: 1,
        active,
        importance,
        scores,
    } = records[4]
    else {
        panic!("{:?}", records[4]);
    };
    assert_eq!(active.iter().collect::<Vec<_>>(), [0, 9]);
    assert!(active.has(9) && !active.has(8) && !active.has(1000));
    assert_eq!(importance, [100, 112]);
    assert_eq!(scores.len(), 10);
    assert_eq!(
        records[5],
        Record::Read {
            time_us: 10,
            took_us: 80,
            bytes: 4096,
            kind: 1
        }
    );
}

/// Every shorter file is refused as cut, whichever byte it ends at; a longer one too.
#[test]
fn a_cut_trace_is_told() {
    let file = sample();
    for len in 8..file.len() {
        assert!(
            matches!(Trace::parse(&file[..len]), Err(TraceError::Cut { .. })),
            "at {len}"
        );
    }
    for len in 0..8 {
        assert_eq!(Trace::parse(&file[..len]).err(), Some(TraceError::Magic));
    }
    let mut longer = file.clone();
    longer.push(0);
    let offset = file.len() as u64;
    assert_eq!(
        Trace::parse(&longer).err(),
        Some(TraceError::After { offset })
    );
}

#[test]
fn damage_is_told() {
    let file = sample();
    let with = |at: usize, byte: u8| {
        let mut file = file.clone();
        file[at] = byte;
        Trace::parse(&file).err()
    };
    assert_eq!(with(8, 2), Some(TraceError::Version { version: 2 }));
    assert_eq!(with(12, 8), Some(TraceError::Header { field: "flags" }));
    let counts = Some(TraceError::Header {
        field: "layers or units",
    });
    assert_eq!(with(16, 0), counts);
    assert_eq!(with(19, 1), counts, "2^24 + 2 layers");
    assert_eq!(with(22, 0x80), counts, "2^25 units in all");
    assert_eq!(with(20, 0), counts);
    assert_eq!(
        with(24, 0),
        Some(TraceError::Header {
            field: "unit bytes"
        })
    );
    // Tokens in the header.
    let end = file.len() as u64 - 1;
    assert_eq!(with(28, 3), Some(TraceError::Order { offset: end }));
    assert!(matches!(with(28, 1), Some(TraceError::Order { .. })));
    let first = HEADER_BYTES;
    let offset = first as u64;
    assert_eq!(with(first, 9), Some(TraceError::Tag { offset, tag: 9 }));
    let stage = first + 9;
    let offset = stage as u64;
    assert_eq!(
        with(stage + 1, 2),
        Some(TraceError::Layer { offset, layer: 2 })
    );
    assert_eq!(
        with(stage + 5, 16),
        Some(TraceError::Stage { offset, stage: 16 })
    );
    let offset = (stage + 6) as u64;
    assert_eq!(with(stage + 7, 0b100), Some(TraceError::Units { offset }));
    let layer = stage + 8;
    let offset = layer as u64;
    assert_eq!(
        with(layer + 1, 1),
        Some(TraceError::Order { offset }),
        "out of order"
    );
    // A stage of a layer that is over.
    let second = layer + 1 + 4 + 2 + 2 + 10;
    let offset = second as u64;
    assert_eq!(with(second + 1, 0), Some(TraceError::Order { offset }));
}

#[test]
fn importances_are_read_and_checked() {
    let mut file = b"FFNTRC1\0".to_vec();
    for number in [2u32, 3, 4, 8, 1, 0] {
        file.extend(number.to_le_bytes());
    }
    file.extend(0..24u8);
    let trace = Importances::parse(&file).expect("it is sound");
    assert_eq!((trace.tokens, trace.layers, trace.chunks), (2, 3, 4));
    assert_eq!((trace.chunk_neurons, trace.first_text), (8, 1));
    assert_eq!(trace.layer(1, 2), [20, 21, 22, 23]);
    for len in 8..file.len() {
        assert!(matches!(
            Importances::parse(&file[..len]),
            Err(TraceError::Cut { .. })
        ));
    }
    let mut wrong = file.clone();
    wrong.push(0);
    assert!(matches!(
        Importances::parse(&wrong),
        Err(TraceError::After { offset: 56 })
    ));
    let mut huge = file.clone();
    huge[8..20].fill(0xff);
    assert!(matches!(
        Importances::parse(&huge),
        Err(TraceError::Header { .. })
    ));
    let mut wide = file;
    wide[8..12].fill(0xff);
    assert!(matches!(
        Importances::parse(&wide),
        Err(TraceError::Cut { .. })
    ));
    assert!(!Importances::sniff(b"FFNTRC2\0"));
}

/// A token of one layer with three units, and these records around its choice.
fn ranked(flags: u32, before: &[u8], after: &[u8]) -> Vec<u8> {
    let header = Header {
        flags,
        layers: 1,
        units: 3,
        unit_bytes: 100,
        tokens: 1,
        compute_ns: 0,
        source_sha256: [0; 32],
        name: [0; 56],
    };
    let mut out = header.encode().to_vec();
    out.extend([tag::TOKEN, 0, 0, 0, 0, 0, 0, 0, 0]);
    out.extend(before);
    out.extend([tag::LAYER, 0, 0, 0, 0, 0b111]);
    out.extend(after);
    out.push(tag::END);
    out
}

#[test]
fn ranks_stand_where_they_belong() {
    let look = [tag::RANKS, 0, 0, 0, 0, 3, 0, 85, 170];
    let choice = [tag::RANKS, 0, 0, 0, 0, RANKS_CHOICE, 85, 0, 170];
    let added = [tag::RANKS, 0, 0, 0, 0, RANKS_ADDED, 0, 170, 85];
    let file = ranked(HAS_RANKS, &look, &[choice, added].concat());
    let trace = Trace::parse(&file).expect("it is sound");
    let ranks = trace.records().filter_map(|record| match record {
        Record::Ranks { layer, of, ranks } => Some((layer, of, ranks.to_vec())),
        _ => None,
    });
    let want = [
        (0, 3, vec![0, 85, 170]),
        (0, RANKS_CHOICE, vec![85, 0, 170]),
        (0, RANKS_ADDED, vec![0, 170, 85]),
    ];
    assert_eq!(ranks.collect::<Vec<_>>(), want);
    let wrong = |file: Vec<u8>| Trace::parse(&file).expect_err("it is not sound");
    let order = |error: TraceError| matches!(error, TraceError::Order { .. });
    assert!(order(wrong(ranked(HAS_RANKS, &choice, &[]))));
    assert!(order(wrong(ranked(HAS_RANKS, &added, &[]))));
    assert!(order(wrong(ranked(HAS_RANKS, &[], &look))));
    let mut nobody = choice;
    nobody[5] = RANKS_ADDED + 1;
    assert!(matches!(
        wrong(ranked(HAS_RANKS, &[], &nobody)),
        TraceError::Stage { .. }
    ));
    assert!(matches!(
        wrong(ranked(0, &look, &[])),
        TraceError::Tag { .. }
    ));
}
