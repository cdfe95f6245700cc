//! Packed models, right and wrong: each lie in a header has its own message.

#[allow(dead_code)]
mod build;

use build::Build;
use build::pack::{D, FF, LOSSES, Lie, SHA, UNIT, VOCAB, f32s, head_alone, model, pack, u32s};
use leanstream_core::gguf::{Gguf, TensorIndex};
use leanstream_core::pack::{Down, Order, Pack, PackError, PackedHead, PackedLayer, Quality};
use leanstream_core::plan::{self, Model, PlanError};
use leanstream_core::quant::QuantType;

struct Read {
    order: Order,
    tokens: u32,
    layers: Vec<PackedLayer>,
    head: Option<PackedHead>,
    quality: Option<Quality>,
}

fn read(file: &[u8]) -> Result<Option<Read>, PackError> {
    let files = [Gguf::parse(file, file.len() as u64).expect("a sound GGUF file")];
    let mut scratch = vec![0; TensorIndex::entries_needed(&files)];
    let tensors = TensorIndex::new(&files, &mut scratch).expect("no name twice");
    let model = Model {
        first: &files[0],
        tensors,
    };
    let hyper = plan::hyper(&model).expect("a llama");
    let Some(pack) = Pack::of(&model, &hyper)? else {
        return Ok(None);
    };
    assert_eq!((pack.source_sha256, pack.source_bytes), (SHA, 1234));
    let layers = (0..pack.layers()).map(|layer| pack.layer(layer));
    Ok(Some(Read {
        order: pack.order,
        tokens: pack.calibration_tokens,
        layers: layers.collect::<Result<_, _>>()?,
        head: pack.head()?,
        quality: pack.quality()?,
    }))
}

#[test]
fn a_model_without_the_key_is_no_pack() {
    assert!(read(&model().file()).unwrap().is_none());
}

#[test]
fn a_pack_says_where_everything_lies() {
    let file = pack(&Lie::default());
    let found = read(&file).unwrap().unwrap();
    assert_eq!((found.order, found.tokens), (Order::Frequency, 77));
    let [first, second] = &found.layers[..] else {
        panic!("two layers")
    };
    let quality = found.quality.unwrap();
    assert_eq!((quality.losses(), quality.tokens), (&LOSSES[..], 256));
    let down = |ty| Down::Moved { ty };
    assert_eq!(first.down, down(QuantType::Q8_0));
    assert_eq!(second.down, down(QuantType::Q4_1));
    assert_eq!((first.unit_bytes, second.unit_bytes), (136, 104));
    assert_eq!(first.layout.up, Some((QuantType::Q8_0, 68)));
    assert_eq!(
        (
            first.layout.down_at,
            first.layout.down_bytes,
            first.layout.crc_at
        ),
        (68, 64, 132)
    );
    assert!(first.scales.is_some() && first.mins.is_none() && second.mins.is_some());
    let head = found.head.unwrap();
    assert_eq!(
        (head.row, head.crc_at, head.unit_bytes),
        ((QuantType::Q8_0, 68), 68, 72)
    );
    let mut places: Vec<_> = found
        .layers
        .iter()
        .flat_map(|l| {
            [
                Some(l.units),
                l.scales,
                l.mins,
                Some(l.order),
                Some(l.stats),
            ]
        })
        .flatten()
        .collect();
    places.extend([head.sketch, head.sketch_error, head.units]);
    for place in places {
        assert_eq!(place.offset % 4096, 0);
        assert!(place.offset + place.bytes <= file.len() as u64);
    }
}

/// The head alone is packed; of units nothing is said.
#[test]
fn the_networks_may_stay_matrices() {
    let found = read(&head_alone("matrices", false)).unwrap().unwrap();
    assert_eq!(found.layers.len(), 0);
    assert_eq!((found.order, found.tokens), (Order::File, 0));
    assert_eq!(found.head.unwrap().unit_bytes, 72);
    let told = |file: &[u8]| read(file).err().map(|e| e.to_string()).unwrap_or_default();
    let stray = told(&head_alone("matrices", true));
    assert!(stray.contains("layer 1 has units"), "{stray}");
    let unknown = told(&head_alone("rows", false));
    assert!(
        unknown.contains("lean.ffn must be units or matrices"),
        "{unknown}"
    );
    // Sketched gates choose units.
    let mut second = head_alone("matrices", false);
    let key = b"lean.version";
    let at = second.windows(key.len()).position(|part| part == key);
    second[at.expect("the key") + key.len() + 4] = 2;
    let sketched = told(&second);
    assert!(
        sketched.contains("lean.ffn must be units in version 2"),
        "{sketched}"
    );
    // With units it must be said what they are.
    let units = told(&head_alone("units", false));
    assert!(units.contains("lacks lean.order"), "{units}");
}

#[test]
fn every_key_counts() {
    let text = |s: &str| Some((8, build::string(s)));
    for (key, value, message) in [
        (
            "lean.version",
            Some((4, vec![3, 0, 0, 0])),
            "version 3 of the format, this program reads versions 1 to 2",
        ),
        ("lean.version", text("1"), "lean.version is no number"),
        ("lean.source.sha256", None, "lacks lean.source.sha256"),
        ("lean.source.sha256", text("abc"), "64 hexadecimal digits"),
        (
            "lean.source.bytes",
            text("1"),
            "lean.source.bytes must be an unsigned number",
        ),
        (
            "lean.order",
            text("random"),
            "lean.order must be frequency, coactivation or file",
        ),
        (
            "lean.calibration.tokens",
            None,
            "lacks lean.calibration.tokens",
        ),
        (
            "lean.down.types",
            Some((9, u32s(&[8]))),
            "one value for each layer",
        ),
        (
            "lean.down.types",
            Some((9, u32s(&[8, 77]))),
            "lean.down.types must be types",
        ),
        // Columns can't be moved out of the super-blocks of Q4_K.
        (
            "lean.down.types",
            Some((9, u32s(&[8, 12]))),
            "lean.down.types must be types",
        ),
        (
            "lean.down.moved",
            Some((9, u32s(&[1, 1]))),
            "one value for each layer",
        ),
        ("lean.up.types", None, "lacks lean.up.types"),
        (
            "lean.quality.loss",
            Some((9, f32s(&LOSSES[1..]))),
            "lean.quality.loss must be 16 singles",
        ),
        (
            "lean.quality.loss",
            Some((9, f32s(&[-0.1; 16]))),
            "lean.quality.loss must be 16 singles",
        ),
        (
            "lean.quality.loss",
            Some((9, f32s(&[f32::NAN; 16]))),
            "lean.quality.loss must be 16 singles",
        ),
        (
            "lean.quality.loss",
            Some((9, u32s(&[0; 16]))),
            "lean.quality.loss must be 16 singles",
        ),
        ("lean.quality.tokens", None, "lacks lean.quality.tokens"),
        // Super-blocks of 256 don't divide rows of 64.
        (
            "lean.up.types",
            Some((9, u32s(&[12, 8]))),
            "can't be stored as layer 0 says",
        ),
    ] {
        let lie = Lie {
            key,
            value,
            ..Lie::default()
        };
        let error = read(&pack(&lie))
            .err()
            .map(|e| e.to_string())
            .unwrap_or_default();
        assert!(
            error.contains(message),
            "{key}: {error:?} has no {message:?}"
        );
    }
}

#[test]
fn every_tensor_counts() {
    let none = None;
    for (tensor, info, message) in [
        (
            "blk.0.ffn_units",
            none.clone(),
            "lacks tensor blk.0.ffn_units",
        ),
        (
            "blk.0.ffn_units",
            Some((vec![UNIT + 4, FF], 24, (UNIT + 4) * FF)),
            "has 140 values along dimension 0, it must have 136",
        ),
        (
            "blk.1.ffn_units",
            Some((vec![UNIT - 32, FF - 1], 24, (UNIT - 32) * (FF - 1))),
            "has 31 values along dimension 1",
        ),
        (
            "blk.1.ffn_units",
            Some((vec![UNIT - 32, FF, 2], 24, (UNIT - 32) * FF * 2)),
            "has 2 values along dimension 2",
        ),
        (
            "blk.0.ffn_units",
            Some((vec![UNIT, FF], 26, UNIT * FF * 4)),
            "has type I32, it must have I8",
        ),
        (
            "blk.0.ffn_down.scales",
            none.clone(),
            "lacks tensor blk.0.ffn_down.scales",
        ),
        (
            "blk.1.ffn_down.mins",
            none.clone(),
            "lacks tensor blk.1.ffn_down.mins",
        ),
        (
            "blk.1.ffn_down.mins",
            Some((vec![D, FF / 32], 0, D * FF / 8)),
            "has type F32, it must have F16",
        ),
        (
            "blk.0.ffn_order",
            Some((vec![FF / 2, 2], 26, FF * 4)),
            "blk.0.ffn_order has 16 values",
        ),
        (
            "blk.0.ffn_stats",
            Some((vec![FF, 2], 0, FF * 8)),
            "has 2 values along dimension 1, it must have 3",
        ),
        (
            "output.sketch",
            Some((vec![D, VOCAB - 1], 2, (VOCAB - 1) * 36)),
            "output.sketch has 9 values along dimension 1",
        ),
        (
            "output.sketch_error",
            none.clone(),
            "lacks tensor output.sketch_error",
        ),
        (
            "output.units",
            Some((vec![68, VOCAB], 24, 68 * VOCAB)),
            "has 68 values along dimension 0, it must have 72",
        ),
    ] {
        let lie = Lie {
            tensor,
            info,
            ..Lie::default()
        };
        let error = read(&pack(&lie))
            .err()
            .map(|e| e.to_string())
            .unwrap_or_default();
        assert!(
            error.contains(message),
            "{tensor}: {error:?} has no {message:?}"
        );
    }
    let headless = Lie {
        tensor: "output.sketch",
        ..Lie::default()
    };
    assert!(read(&pack(&headless)).unwrap().unwrap().head.is_none());
}

#[test]
fn sketched_gates_stand_before_their_units_rows() {
    let of = |lie: Lie| {
        read(&pack(&Lie {
            sketch: true,
            ..lie
        }))
    };
    let found = of(Lie::default()).unwrap().unwrap();
    let [first, second] = &found.layers[..] else {
        panic!("two layers")
    };
    assert_eq!((first.unit_bytes, second.unit_bytes), (204, 172));
    let row = Some((QuantType::Q8_0, 68));
    let layout = first.layout;
    assert_eq!((layout.gate, layout.up), (row, row));
    assert_eq!(
        (layout.up_at, layout.down_at, layout.crc_at),
        (68, 136, 200)
    );
    let sketch = first.sketch.unwrap();
    assert_eq!((sketch.ty, sketch.row_bytes), (QuantType::Q4_0, 36));
    assert_eq!((sketch.rows.bytes, sketch.crcs.bytes), (FF * 36, FF * 4));

    let keys = [
        ("lean.gate.types", None, "lacks lean.gate.types"),
        (
            "lean.gate.types",
            Some((9, u32s(&[8]))),
            "one value for each layer",
        ),
        (
            "lean.gate.types",
            Some((9, u32s(&[8, 26]))),
            "lean.gate.types must be types",
        ),
        // Super-blocks of 256 don't divide rows of 64.
        (
            "lean.gate.types",
            Some((9, u32s(&[8, 12]))),
            "can't be stored as layer 1 says",
        ),
        (
            "lean.version",
            Some((4, vec![1, 0, 0, 0])),
            "lean.gate.types must be absent in version 1",
        ),
    ];
    for (key, value, message) in keys {
        let error = of(Lie {
            key,
            value,
            ..Lie::default()
        });
        let error = error.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(error.contains(message), "{key}: {error:?}, not {message:?}");
    }
    let tensors = [
        (
            "blk.1.ffn_gate.sketch",
            None,
            "lacks tensor blk.1.ffn_gate.sketch;",
        ),
        (
            "blk.0.ffn_gate.sketch",
            Some((vec![D, FF], 8, FF * 68)),
            "has type Q8_0, it must have Q4_0 or Q2_K",
        ),
        (
            "blk.0.ffn_gate.sketch",
            Some((vec![D, FF], 24, FF * D)),
            "has type I8, it must have Q4_0 or Q2_K",
        ),
        (
            "blk.0.ffn_gate.sketch",
            Some((vec![D, FF - 1], 2, (FF - 1) * 36)),
            "has 31 values along dimension 1",
        ),
        (
            "blk.0.ffn_gate.sketch_crc",
            None,
            "lacks tensor blk.0.ffn_gate.sketch_crc",
        ),
        (
            "blk.1.ffn_gate.sketch_crc",
            Some((vec![FF + 1], 26, (FF + 1) * 4)),
            "has 33 values along dimension 0",
        ),
        (
            "blk.1.ffn_units",
            Some((vec![UNIT, FF], 24, UNIT * FF)),
            "has 136 values along dimension 0, it must have 172",
        ),
    ];
    for (tensor, info, message) in tensors {
        let error = of(Lie {
            tensor,
            info,
            ..Lie::default()
        });
        let error = error.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(
            error.contains(message),
            "{tensor}: {error:?}, not {message:?}"
        );
    }
}

#[test]
fn small_alignments_are_refused() {
    let file = Build::new()
        .u32("lean.version", 1)
        .str("general.architecture", "llama")
        .u32("llama.embedding_length", D as u32)
        .u32("llama.block_count", 1)
        .u32("llama.feed_forward_length", FF as u32)
        .u32("llama.attention.head_count", 2)
        .u32("llama.context_length", 128)
        .raw(
            "llama.attention.layer_norm_rms_epsilon",
            6,
            &1e-5f32.to_le_bytes(),
        )
        .tensor("token_embd.weight", &[D, VOCAB], 8, VOCAB * 68)
        .file();
    assert_eq!(
        read(&file).err(),
        Some(PackError::Alignment { alignment: 32 })
    );
}

#[test]
fn integers_are_no_weights() {
    let file = model()
        .tensor("blk.0.attn_norm.weight", &[D], 26, 4 * D)
        .file();
    let files = [Gguf::parse(&file, file.len() as u64).unwrap()];
    let mut scratch = vec![0; TensorIndex::entries_needed(&files)];
    let tensors = TensorIndex::new(&files, &mut scratch).unwrap();
    let model = Model {
        first: &files[0],
        tensors,
    };
    let error = plan::plan(&model, &mut Ignore, plan::Head::Full).unwrap_err();
    assert_eq!(
        error,
        PlanError::NotWeights {
            name: "blk.0.attn_norm.weight",
            ty: "I32"
        }
    );
    assert!(error.to_string().contains("holds no weights"));
}

struct Ignore;

impl plan::Sink for Ignore {
    fn matrix(&mut self, _: plan::Matrix) -> plan::MatrixId {
        plan::MatrixId(0)
    }

    fn vector(&mut self, _: plan::Vector) -> plan::VectorId {
        plan::VectorId(0)
    }

    fn step(&mut self, _: plan::StepPlan) {}

    fn embedding(&mut self, _: plan::MatrixId) {}

    fn rope_factors(&mut self, _: plan::VectorId) {}
}

/// A pack without the key was not measured.
#[test]
fn quality_may_be_unknown() {
    let lie = Lie {
        key: "lean.quality.loss",
        ..Lie::default()
    };
    assert_eq!(read(&pack(&lie)).unwrap().unwrap().quality, None);
    // It was not measured with little in memory.
    let lie = Lie {
        key: "lean.quality.loss",
        value: Some((9, f32s(&LOSSES[4..]))),
        ..Lie::default()
    };
    assert_eq!(read(&pack(&lie)).unwrap().unwrap().quality, None);
}
