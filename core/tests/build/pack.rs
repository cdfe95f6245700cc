//! A small packed model, byte by byte: two layers with columns moved from Q8_0 and Q4_1, a head in two
//! planes; with or without sketches of the gates. Data is zeros. Small enough for a fuzzer to grow from.

use super::{Build, array};

pub const D: u64 = 64;
pub const FF: u64 = 32;
pub const VOCAB: u64 = 10;
const LAYERS: u64 = 2;
/// A Q8_0 row of 64, 64 moved integers, the CRC.
pub const UNIT: u64 = 68 + 64 + 4;
pub const SHA: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

pub fn u32s(values: &[u32]) -> Vec<u8> {
    array(
        4,
        &values
            .iter()
            .map(|v| v.to_le_bytes().to_vec())
            .collect::<Vec<_>>(),
    )
}

pub fn f32s(values: &[f32]) -> Vec<u8> {
    array(
        6,
        &values
            .iter()
            .map(|v| v.to_le_bytes().to_vec())
            .collect::<Vec<_>>(),
    )
}

pub fn bools(values: &[u8]) -> Vec<u8> {
    array(7, &values.iter().map(|v| vec![*v]).collect::<Vec<_>>())
}

/// What leaving out neurons costs.
pub const LOSSES: [f32; 16] = [
    0.03, 0.07, 0.20, 0.90, 0.02, 0.05, 0.15, 0.60, 0.01, 0.03, 0.09, 0.40, 0.0, 0.01, 0.04, 0.20,
];

/// The keys of a llama model; `lean.*` come after.
pub fn model() -> Build {
    let mut build = Build::new();
    build.alignment = 4096;
    build
        .u32("general.alignment", 4096)
        .str("general.architecture", "llama")
        .u32("llama.embedding_length", D as u32)
        .u32("llama.block_count", LAYERS as u32)
        .u32("llama.feed_forward_length", FF as u32)
        .u32("llama.attention.head_count", 2)
        .u32("llama.context_length", 128)
        .raw(
            "llama.attention.layer_norm_rms_epsilon",
            6,
            &1e-5f32.to_le_bytes(),
        )
        .tensor("token_embd.weight", &[D, VOCAB], 8, VOCAB * 68)
}

/// What a test changes: a key that is left out or replaced, a tensor likewise. Of a pack with gates as
/// matrices, or sketched.
#[derive(Default)]
pub struct Lie {
    pub sketch: bool,
    pub key: &'static str,
    pub value: Option<(u32, Vec<u8>)>,
    pub tensor: &'static str,
    pub info: Option<(Vec<u64>, u32, u64)>,
}

/// A pack of the head alone, whose `lean.ffn` is `ffn`; with or without a stray tensor of units.
pub fn head_alone(ffn: &str, stray: bool) -> Vec<u8> {
    let mut build = model()
        .u32("lean.version", 1)
        .str("lean.source.sha256", SHA)
        .raw("lean.source.bytes", 10, &1234u64.to_le_bytes())
        .str("lean.ffn", ffn)
        .tensor("output.sketch", &[D, VOCAB], 2, VOCAB * 36)
        .tensor("output.sketch_error", &[VOCAB], 0, VOCAB * 4)
        .tensor("output.units", &[72, VOCAB], 24, 72 * VOCAB);
    if stray {
        build = build.tensor("blk.1.ffn_units", &[UNIT, FF], 24, UNIT * FF);
    }
    build.file()
}

pub fn pack(lie: &Lie) -> Vec<u8> {
    let mut build = model();
    let text = |s: &str| (8, super::string(s));
    let version = if lie.sketch { 2u32 } else { 1 };
    let mut keys: Vec<(&str, (u32, Vec<u8>))> = vec![
        ("lean.version", (4, version.to_le_bytes().to_vec())),
        ("lean.source.sha256", text(SHA)),
        ("lean.source.bytes", (10, 1234u64.to_le_bytes().to_vec())),
        ("lean.order", text("frequency")),
        ("lean.calibration.tokens", (4, 77u32.to_le_bytes().to_vec())),
        ("lean.down.types", (9, u32s(&[8, 3]))),
        ("lean.down.moved", (9, bools(&[1, 1]))),
        ("lean.up.types", (9, u32s(&[8, 8]))),
        ("lean.quality.loss", (9, f32s(&LOSSES))),
        ("lean.quality.tokens", (4, 256u32.to_le_bytes().to_vec())),
    ];
    // The gate's rows, Q8_0.
    let gate = if lie.sketch { 68 } else { 0 };
    if lie.sketch {
        keys.push(("lean.gate.types", (9, u32s(&[8, 8]))));
    }
    for (key, (ty, value)) in keys {
        if key != lie.key {
            build = build.raw(key, ty, &value);
        } else if let Some((ty, value)) = &lie.value {
            build = build.raw(key, *ty, value);
        }
    }
    let unit = UNIT + gate;
    let scales = (vec![D, FF / 32], 1, D * FF / 32 * 2);
    let mut tensors = vec![
        ("blk.0.ffn_units", (vec![unit, FF], 24, unit * FF)),
        ("blk.0.ffn_down.scales", scales.clone()),
        ("blk.0.ffn_order", (vec![FF], 26, FF * 4)),
        ("blk.0.ffn_stats", (vec![FF, 3], 0, FF * 12)),
        // Q4_1 columns: half as many bytes, and minimums.
        (
            "blk.1.ffn_units",
            (vec![unit - 32, FF], 24, (unit - 32) * FF),
        ),
        ("blk.1.ffn_down.scales", scales.clone()),
        ("blk.1.ffn_down.mins", scales),
        ("blk.1.ffn_order", (vec![FF], 26, FF * 4)),
        ("blk.1.ffn_stats", (vec![FF, 3], 0, FF * 12)),
        ("output.sketch", (vec![D, VOCAB], 2, VOCAB * 36)),
        ("output.sketch_error", (vec![VOCAB], 0, VOCAB * 4)),
        ("output.units", (vec![72, VOCAB], 24, 72 * VOCAB)),
    ];
    if lie.sketch {
        let rows = (vec![D, FF], 2, FF * 36);
        let crcs = (vec![FF], 26, FF * 4);
        tensors.extend([
            ("blk.0.ffn_gate.sketch", rows.clone()),
            ("blk.0.ffn_gate.sketch_crc", crcs.clone()),
            ("blk.1.ffn_gate.sketch", rows),
            ("blk.1.ffn_gate.sketch_crc", crcs),
        ]);
    }
    for (name, info) in tensors {
        if name != lie.tensor {
            build = build.tensor(name, &info.0, info.1, info.2);
        } else if let Some(info) = &lie.info {
            build = build.tensor(name, &info.0, info.1, info.2);
        }
    }
    build.file()
}
