//! Writes small sound files into `corpus/`, so that the fuzzer begins behind the magic.

use std::{fs, path::Path};

#[allow(dead_code)]
#[path = "../../tests/build/mod.rs"]
mod build;

use build::pack::{Lie, bools, head_alone, pack, u32s};
use build::{Build, array, sample, string};

fn main() -> std::io::Result<()> {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/gguf");
    fs::create_dir_all(&corpus)?;
    let write = |name: &str, file: Vec<u8>| fs::write(corpus.join(name), file);

    let mut old = sample();
    old.version = 2;
    write("sample", sample().file())?;
    write("version-2", old.file())?;
    write("empty", Build::new().file())?;
    write(
        "one-key",
        Build::new().str("general.architecture", "llama").file(),
    )?;
    write("one-tensor", Build::new().tensor("a", &[1], 0, 4).file())?;
    write("shard-name", b"model-00002-of-00003.gguf".to_vec())?;

    let shard = Build::new()
        .raw("split.no", 2, &1u16.to_le_bytes())
        .raw("split.count", 2, &3u16.to_le_bytes())
        .raw("split.tensors.count", 5, &2i32.to_le_bytes());
    write("shard", shard.tensor("a", &[1], 0, 4).file())?;

    let mut aligned = Build::new();
    aligned.alignment = 128;
    write(
        "aligned",
        aligned
            .u32("general.alignment", 128)
            .tensor("a", &[1], 0, 4)
            .file(),
    )?;

    // One tensor of each type that can be decoded.
    let mut typed = Build::new();
    for ty in leanstream_core::quant::QuantType::ALL {
        let (len, bytes) = (ty.block_len() as u64, ty.block_bytes() as u64);
        typed = typed.tensor(ty.name(), &[2 * len, 3], ty as u32, 6 * bytes);
    }
    write("types", typed.file())?;

    // More keys than the parser's index holds.
    let mut keys = Build::new();
    for i in 0..150 {
        keys = keys.raw(format!("{i}"), 9, &array(8, &[string("x")]));
    }
    write("keys", keys.file())?;

    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/pack");
    fs::create_dir_all(&corpus)?;
    fs::write(corpus.join("moved"), pack(&Lie::default()))?;
    // Columns of other kinds: units then have other sizes, which the fuzzer has to find.
    let anew = Lie {
        key: "lean.down.moved",
        value: Some((9, bools(&[0, 0]))),
        ..Lie::default()
    };
    fs::write(corpus.join("anew"), pack(&anew))?;
    let singles = Lie {
        key: "lean.down.types",
        value: Some((9, u32s(&[0, 30]))),
        ..Lie::default()
    };
    fs::write(corpus.join("floats"), pack(&singles))?;
    fs::write(corpus.join("head"), head_alone("matrices", false))?;
    let sketched = Lie {
        sketch: true,
        ..Lie::default()
    };
    fs::write(corpus.join("sketched"), pack(&sketched))?;
    traces(&Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus/trace"))
}

/// A trace of each form.
fn traces(corpus: &Path) -> std::io::Result<()> {
    use leanstream_core::trace::{HAS_IMPORTANCE, HAS_RANKS, HAS_SCORES, Header, RANKS_CHOICE, tag};

    fs::create_dir_all(corpus)?;
    for flags in 0..=HAS_IMPORTANCE | HAS_SCORES | HAS_RANKS {
        let header = Header {
            flags,
            layers: 2,
            units: 12,
            unit_bytes: 1,
            tokens: 2,
            compute_ns: 0,
            source_sha256: [0; 32],
            name: [b'x'; 56],
        };
        let mut file = header.encode().to_vec();
        for _token in 0..header.tokens {
            file.extend([tag::TOKEN, 0, 0, 0, 0, 0, 0, 0, 0]);
            for layer in 0..header.layers as u8 {
                file.extend([tag::STAGE, layer, 0, 0, 0, 1, 0xff, 0xf]);
                file.extend([tag::LAYER, layer, 0, 0, 0, 5, 8]);
                if flags & HAS_IMPORTANCE != 0 {
                    file.extend([1, 2, 3]);
                }
                if flags & HAS_SCORES != 0 {
                    file.extend(0..header.units as u8);
                }
                if flags & HAS_RANKS != 0 {
                    file.extend([tag::RANKS, layer, 0, 0, 0, RANKS_CHOICE]);
                    file.extend((0..header.units as u8).map(|unit| unit * 21));
                }
            }
            file.push(tag::READ);
            file.extend([0; 17]);
        }
        file.push(tag::END);
        leanstream_core::trace::Trace::parse(&file).expect("seeds are sound");
        fs::write(corpus.join(format!("flags-{flags}")), file)?;
    }
    let mut importances = b"FFNTRC1\0".to_vec();
    for number in [2u32, 2, 3, 8, 1, 0] {
        importances.extend(number.to_le_bytes());
    }
    importances.extend([0; 12]);
    leanstream_core::trace::Importances::parse(&importances).expect("seeds are sound");
    fs::write(corpus.join("importances"), importances)
}
