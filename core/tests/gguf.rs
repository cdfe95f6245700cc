//! GGUF files as they should be: values, arrays, tensors, shards, prefixes.

#[allow(dead_code)]
mod build;

use build::{Build, array, sample, string};
use leanstream_core::gguf::{Gguf, GgufError, TensorIndex, Value, ValueType, check_shards};
use leanstream_core::quant::QuantType;

/// Miri takes a thousand times as long; it gets a sample of the sweeps.
const STEP: usize = if cfg!(miri) { 61 } else { 1 };

fn parse(file: &[u8]) -> Gguf<'_> {
    Gguf::parse(file, file.len() as u64).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn values_of_every_type() {
    for version in [2, 3] {
        let file = Build {
            version,
            ..sample()
        }
        .file();
        let gguf = parse(&file);
        assert_eq!(gguf.version(), version);
        assert_eq!(gguf.key_count(), 20);
        assert_eq!(gguf.metadata().count(), 20);
        let get = |key: &str| gguf.get(key).unwrap_or_else(|| panic!("no {key}"));
        assert_eq!(get("general.architecture").as_str(), Some("llama"));
        assert_eq!(get("u8").as_u32(), Some(200));
        assert_eq!(get("i8").as_i64(), Some(-56));
        assert_eq!(get("u16").as_u32(), Some(60000));
        assert_eq!(get("i16").as_i64(), Some(-2));
        assert_eq!(get("i16").as_u64(), None);
        assert_eq!(get("u32").as_u32(), Some(4_000_000_000));
        assert_eq!(get("i32").as_i64(), Some(-3));
        assert_eq!(get("f32").as_f32(), Some(0.5));
        assert_eq!(get("true").as_bool(), Some(true));
        assert_eq!(get("false").as_bool(), Some(false));
        assert_eq!(get("u64").as_u64(), Some(u64::MAX));
        assert_eq!(get("u64").as_u32(), None);
        assert_eq!(get("u64").as_i64(), None);
        assert_eq!(get("i64").as_i64(), Some(-4));
        assert_eq!(get("f64").as_f32(), Some(0.25));
        assert_eq!(get("bytes").as_bytes(), Some(&b"\xff\x00"[..]));
        assert_eq!(get("bytes").as_str(), None);
        assert_eq!(get("last").as_u32(), Some(9));
        let at = |key: &str| gguf.value_offset(key).map(|at| at as usize);
        for (key, bytes) in [
            ("u8", &[200][..]),
            ("u32", &4_000_000_000u32.to_le_bytes()),
            ("bytes", &[2, 0, 0, 0, 0, 0, 0, 0, 0xff, 0]),
            // Behind arrays.
            ("last", &9u32.to_le_bytes()),
        ] {
            let at = at(key).unwrap_or_else(|| panic!("no {key}"));
            assert_eq!(&file[at..at + bytes.len()], bytes, "{key}");
        }
        assert_eq!(at("lastly"), None);
        assert!(gguf.get("lastly").is_none());
        assert!(gguf.get("").is_none());
    }
}

#[test]
fn arrays() {
    let file = sample().file();
    let gguf = parse(&file);
    let get = |key: &str| gguf.get(key).and_then(|value| value.as_array()).unwrap();

    let words = ["", "a", "Ġthe", "\u{1f600}"].map(str::as_bytes);
    let array = get("words");
    assert_eq!((array.element_type(), array.len()), (ValueType::Str, 4));
    assert_eq!(array.strings().unwrap().collect::<Vec<_>>(), words);
    assert_eq!(
        array
            .values()
            .map(|v| v.as_bytes().unwrap())
            .collect::<Vec<_>>(),
        words
    );
    for (offset, word) in array.strings().unwrap().with_offsets() {
        assert_eq!(&file[offset as usize..][..word.len()], word);
    }
    assert!(array.f32s().is_none());
    assert!(array.get(0).is_none());

    let array = get("numbers");
    assert_eq!(
        array.f32s().unwrap().collect::<Vec<_>>(),
        [1.5, -0.0, f32::MAX]
    );
    assert_eq!(array.get(2).unwrap().as_f32(), Some(f32::MAX));
    assert!(array.get(3).is_none());
    assert!(array.get(usize::MAX).is_none());
    assert!(array.strings().is_none());
    assert!(array.i32s().is_none());
    assert_eq!(get("kinds").i32s().unwrap().collect::<Vec<_>>(), [1, -1, 3]);
    assert_eq!(
        get("counts").u32s().unwrap().collect::<Vec<_>>(),
        [7, 0, u32::MAX]
    );
    assert_eq!(
        &file[get("counts").offset() as usize..][..4],
        7u32.to_le_bytes()
    );

    let nested: Vec<_> = get("nested")
        .values()
        .map(|value| value.as_array().unwrap())
        .collect();
    assert_eq!(nested.len(), 3);
    assert_eq!(nested[0].strings().unwrap().collect::<Vec<_>>(), words);
    for (offset, word) in nested[0].strings().unwrap().with_offsets() {
        assert_eq!(&file[offset as usize..][..word.len()], word);
    }
    let bools: Vec<_> = nested[1]
        .values()
        .map(|value| value.as_bool().unwrap())
        .collect();
    assert_eq!(bools, [true, false]);
    assert!(nested[2].is_empty());
}

#[test]
fn tensors() {
    let file = sample().file();
    let gguf = parse(&file);
    let data = gguf.data_offset();
    assert!(data.is_multiple_of(32) && data >= sample().header().len() as u64);
    assert_eq!(gguf.tensor_count(), 3);
    let names: Vec<_> = gguf.tensors().map(|tensor| tensor.name).collect();
    assert_eq!(
        names,
        ["token_embd.weight", "norm.weight", "experts.weight"]
    );

    let embd = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!(
        (embd.ty, embd.cols(), embd.rows()),
        (QuantType::Q8_0.into(), 64, 3)
    );
    assert_eq!((embd.offset, embd.bytes), (data, 204));
    let norm = gguf.tensor("norm.weight").unwrap();
    assert_eq!((norm.dims, norm.n_dims), ([5, 1, 1, 1], 1));
    assert_eq!((norm.offset, norm.bytes), (data + 224, 20));
    let experts = gguf.tensor("experts.weight").unwrap();
    assert_eq!(
        (experts.cols(), experts.rows(), experts.n_dims),
        (256, 12, 4)
    );
    assert_eq!(experts.offset + experts.bytes, file.len() as u64);
    assert!(gguf.tensor("missing").is_none());
}

#[test]
fn a_larger_alignment() {
    let build = Build {
        alignment: 4096,
        ..Build::new()
    };
    let build = build.u32("general.alignment", 4096);
    let file = build.tensor("a", &[1], 0, 4).tensor("b", &[2], 0, 8).file();
    let gguf = parse(&file);
    assert_eq!((gguf.alignment(), gguf.data_offset()), (4096, 4096));
    assert_eq!(gguf.tensor("b").unwrap().offset, 8192);
}

/// The first shard of a split may hold no tensors; then the file ends with its header.
#[test]
fn no_tensors_no_padding() {
    let file = Build::new().str("general.architecture", "llama").header();
    assert!(!file.len().is_multiple_of(32));
    assert_eq!(parse(&file).tensors().count(), 0);
}

/// Mapping only the start is enough, and a start that is too short says how much more to map.
#[test]
fn a_prefix_asks_for_more() {
    let file = sample().file();
    let header = sample().header().len();
    let file_len = file.len() as u64;
    for mapped in (0..header).step_by(STEP) {
        match Gguf::parse(&file[..mapped], file_len) {
            Err(GgufError::NeedMore { bytes }) => {
                assert!(
                    bytes > mapped as u64 && bytes <= file_len,
                    "{bytes} after {mapped}"
                );
            }
            other => panic!("{mapped} bytes: {other:?}"),
        }
    }
    for mapped in [header, header + 1, file.len()] {
        let gguf = Gguf::parse(&file[..mapped], file_len).unwrap();
        assert_eq!(gguf.get("last").unwrap().as_u32(), Some(9));
        assert_eq!(gguf.tensors().count(), 3);
    }
    // What is mapped past the end, up to a whole page, isn't the file's.
    let page = [&file[..], &[0xaa; 100]].concat();
    assert_eq!(Gguf::parse(&page, file_len).unwrap().tensors().count(), 3);
}

/// A caller that maps as little as it is told to must not end up parsing once per string.
#[test]
fn a_prefix_grows_in_few_steps() {
    let count = if cfg!(miri) { 200 } else { 20_000 };
    let words: Vec<_> = (0..count).map(|i| string(format!("word {i}"))).collect();
    let file = Build::new().raw("words", 9, &array(8, &words)).file();
    let (mut mapped, mut steps) = (0, 0);
    while let Err(error) = Gguf::parse(&file[..mapped], file.len() as u64) {
        let GgufError::NeedMore { bytes } = error else {
            panic!("{error}");
        };
        mapped = bytes as usize;
        steps += 1;
    }
    assert!(steps <= 10, "{steps} steps to {} bytes", file.len());
}

/// Both keys have one hash (FNV-1a, 32 bits), and are two keys all the same.
#[test]
fn keys_that_collide() {
    let file = Build::new().u32("costarring", 1).u32("liquid", 2).file();
    let gguf = parse(&file);
    assert_eq!(gguf.get("costarring").unwrap().as_u32(), Some(1));
    assert_eq!(gguf.get("liquid").unwrap().as_u32(), Some(2));
}

/// Keys past the index are found by walking, over arrays too.
#[test]
fn more_keys_than_are_indexed() {
    let count = if cfg!(miri) { 200 } else { 1000 };
    let mut build = Build::new();
    for i in 0..count {
        build = match i % 100 {
            99 => build.raw(format!("key.{i}"), 9, &array(8, &[string("x"), string("")])),
            _ => build.u32(&format!("key.{i}"), i),
        };
    }
    let file = build.file();
    let gguf = parse(&file);
    for i in (0..count).filter(|i| i % 100 != 99) {
        assert_eq!(gguf.get(&format!("key.{i}")).unwrap().as_u32(), Some(i));
    }
    assert_eq!(
        gguf.get(&format!("key.{}", count - 1))
            .unwrap()
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert!(gguf.get(&format!("key.{count}")).is_none());
    let keys: Vec<_> = gguf.metadata().map(|(key, _)| key.to_owned()).collect();
    assert_eq!(
        keys,
        (0..count).map(|i| format!("key.{i}")).collect::<Vec<_>>()
    );
}

fn shard(no: u16, count: u16, total: i32, names: &[&str]) -> Vec<u8> {
    let mut build = Build::new()
        .u16("split.no", no)
        .u16("split.count", count)
        .raw("split.tensors.count", 5, &total.to_le_bytes());
    for name in names {
        build = build.tensor(name, &[4], 0, 16);
    }
    build.file()
}

#[test]
fn shards_of_one_model() {
    let shards = [
        shard(0, 3, 3, &[]),
        shard(1, 3, 3, &["b", "c"]),
        shard(2, 3, 3, &["a"]),
    ];
    let files = [parse(&shards[0]), parse(&shards[1]), parse(&shards[2])];
    let split = files[1].split().unwrap();
    assert_eq!((split.no, split.count, split.tensors), (1, 3, Some(3)));
    assert_eq!(check_shards(&files), Ok(()));

    let mut scratch = vec![0; TensorIndex::entries_needed(&files)];
    let index = TensorIndex::new(&files, &mut scratch).unwrap();
    for (name, file) in [("a", 2), ("b", 1), ("c", 1)] {
        assert_eq!(
            index.find(name),
            Some((file, files[file].tensor(name).unwrap()))
        );
    }
    assert_eq!(index.find(""), None);
    assert_eq!(index.find("d"), None);
}

/// A model in one file, whether it says so or not.
#[test]
fn one_file_is_a_whole_model() {
    let unsplit = sample().file();
    let once = shard(0, 1, 1, &["a"]);
    for file in [&unsplit, &once] {
        let gguf = parse(file);
        assert_eq!(gguf.split(), None);
        assert_eq!(check_shards(&[gguf]), Ok(()));
    }
}

/// The index must not depend on how many names share a beginning, or on their order.
#[test]
fn every_tensor_of_a_large_model_is_found() {
    let mut build = Build::new();
    // 7 is coprime to both: all numbers, in disorder.
    let count = if cfg!(miri) { 100 } else { 3000 };
    for i in 0..count {
        build = build.tensor(&format!("blk.{}.weight", i * 7 % count), &[1], 0, 4);
    }
    let file = build.file();
    let files = [parse(&file)];
    let mut scratch = vec![u64::MAX; count as usize + 5];
    let index = TensorIndex::new(&files, &mut scratch).unwrap();
    for tensor in files[0].tensors() {
        assert_eq!(index.find(tensor.name), Some((0, tensor)));
    }
}

#[test]
fn values_know_their_types() {
    let file = sample().file();
    let gguf = parse(&file);
    for (key, value) in gguf.metadata() {
        let name = value.ty().name();
        let expected = match key {
            "u8" => "uint8",
            "i8" => "int8",
            "u16" => "uint16",
            "i16" => "int16",
            "u32" | "last" => "uint32",
            "i32" => "int32",
            "u64" => "uint64",
            "i64" => "int64",
            "f32" => "float32",
            "f64" => "float64",
            "true" | "false" => "bool",
            "general.architecture" | "bytes" => "string",
            _ => "array",
        };
        assert_eq!(name, expected, "{key}");
        assert_eq!(matches!(value, Value::Array(_)), expected == "array");
    }
}
