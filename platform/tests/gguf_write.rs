//! The GGUF writer: exact bytes, copies, and what is on disk when something goes wrong.

mod common;

use std::fs;
use std::path::Path;

use common::Scratch;
use leanstream::gguf_write::Header;
use leanstream_core::gguf::{Gguf, Value};
use leanstream_core::quant::QuantType;

/// More than the writer gathers before it writes.
const BIG: usize = 1 << 20;

#[test]
fn the_bytes_are_those_of_the_format() {
    let scratch = Scratch::new("bytes");
    let path = scratch.join("a.gguf");
    let mut header = Header::new();
    header.u32("n", 7).strs("s", ["a", "bc"]).bool("b", true);
    assert_eq!(header.tensor("t", QuantType::Q4_0, &[32, 2]), 36);
    assert_eq!(header.tensor("u", QuantType::F32, &[1]), 4);
    let mut writer = header.create(&path).unwrap();
    writer.write(&[1; 30]).unwrap();
    writer.write(&[2; 6]).unwrap();
    writer.write(&[3; 4]).unwrap();
    assert_eq!(scratch.names(), ["a.gguf.tmp"]);
    let len = writer.finish().unwrap();
    assert_eq!(scratch.names(), ["a.gguf"]);

    let mut want = Vec::new();
    want.extend(b"GGUF\x03\0\0\0\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\0");
    want.extend(b"\x01\0\0\0\0\0\0\0n\x04\0\0\0\x07\0\0\0");
    want.extend(b"\x01\0\0\0\0\0\0\0s\x09\0\0\0\x08\0\0\0\x02\0\0\0\0\0\0\0");
    want.extend(b"\x01\0\0\0\0\0\0\0a\x02\0\0\0\0\0\0\0bc");
    want.extend(b"\x01\0\0\0\0\0\0\0b\x07\0\0\0\x01");
    want.extend(b"\x01\0\0\0\0\0\0\0t\x02\0\0\0\x20\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0");
    want.extend(b"\x02\0\0\0\0\0\0\0\0\0\0\0");
    want.extend(b"\x01\0\0\0\0\0\0\0u\x01\0\0\0\x01\0\0\0\0\0\0\0");
    want.extend(b"\0\0\0\0\x40\0\0\0\0\0\0\0");
    want.resize(want.len().next_multiple_of(32), 0);
    want.extend([1; 30]);
    want.extend([2; 6]);
    want.resize(want.len().next_multiple_of(32), 0);
    want.extend([3; 4]);
    want.resize(want.len().next_multiple_of(32), 0);
    assert_eq!(fs::read(&path).unwrap(), want);
    assert_eq!(len, want.len() as u64);
}

#[test]
fn what_is_written_is_read_back_and_copied() {
    let scratch = Scratch::new("copy");
    let path = scratch.join("a.gguf");
    let mut header = Header::new();
    for value in [
        Value::U8(1),
        Value::I8(-2),
        Value::U16(3),
        Value::I16(-4),
        Value::U32(5),
        Value::I32(-6),
        Value::U64(7),
        Value::I64(-8),
        Value::F32(9.5),
        Value::F64(-10.5),
        Value::Bool(true),
        Value::Str(b"\xff text"),
    ] {
        header.value(value.ty().name(), &value);
    }
    header
        .strs("strings", ["", "b"])
        .i32s("ints", [-1, 2])
        .f32s("floats", [0.5]);
    header.tensor("t", QuantType::F32, &[3, 2]);
    let mut writer = header.create(&path).unwrap();
    writer.write(&[7; 24]).unwrap();
    writer.finish().unwrap();

    let first = fs::read(&path).unwrap();
    let gguf = Gguf::parse(&first, first.len() as u64).unwrap();
    let mut copy = Header::new();
    for (key, value) in gguf.metadata() {
        copy.value(key, &value);
    }
    let tensor = gguf.tensor("t").unwrap();
    copy.tensor(tensor.name, tensor.ty, &tensor.dims[..2]);
    let mut writer = copy.create(&path).unwrap();
    writer
        .write(&first[tensor.offset as usize..][..tensor.bytes as usize])
        .unwrap();
    writer.finish().unwrap();
    assert_eq!(fs::read(&path).unwrap(), first);

    assert_eq!(gguf.key_count(), 15);
    assert_eq!(gguf.get("int16").and_then(|v| v.as_i64()), Some(-4));
    assert_eq!(gguf.get("float64").and_then(|v| v.as_f32()), Some(-10.5));
    assert_eq!(
        gguf.get("string").and_then(|v| v.as_bytes()),
        Some(&b"\xff text"[..])
    );
    let array = |key| gguf.get(key).and_then(|v| v.as_array()).unwrap();
    assert!(array("strings").strings().unwrap().eq([&b""[..], b"b"]));
    assert!(array("ints").i32s().unwrap().eq([-1, 2]));
    assert!(array("floats").f32s().unwrap().eq([0.5]));
}

#[test]
fn big_and_small_writes_keep_their_order() {
    let scratch = Scratch::new("order");
    let path = scratch.join("a.gguf");
    let data: Vec<u8> = (0..3 * BIG).map(|i| ((i * 31) >> 4) as u8).collect();
    let mut header = Header::new();
    header.tensor("t", QuantType::F32, &[data.len() as u64 / 4]);
    let mut writer = header.create(&path).unwrap();
    let (a, rest) = data.split_at(1000);
    let (b, rest) = rest.split_at(BIG + 1);
    let (c, d) = rest.split_at(BIG - 1);
    for part in [a, b, c, d] {
        writer.write(part).unwrap();
    }
    writer.finish().unwrap();
    assert!(fs::read(&path).unwrap().ends_with(&data));
}

#[test]
fn an_unfinished_file_leaves_the_old_one() {
    let scratch = Scratch::new("unfinished");
    let path = scratch.join("a.gguf");
    fs::write(&path, "old").unwrap();
    let mut header = Header::new();
    header.tensor("t", QuantType::F32, &[2]);
    let mut writer = header.create(&path).unwrap();
    writer.write(&[0; 4]).unwrap();
    drop(writer);
    assert_eq!(scratch.names(), ["a.gguf"]);
    assert_eq!(fs::read(&path).unwrap(), b"old");
}

#[test]
fn two_writers_of_one_file_exclude_each_other() {
    let scratch = Scratch::new("two");
    let path = scratch.join("a.gguf");
    // What a crashed writer left behind is no obstacle.
    fs::write(scratch.join("a.gguf.tmp"), [7; 100]).unwrap();
    let first = Header::new().create(&path).unwrap();
    let Err(error) = Header::new().create(&path) else {
        panic!("both write")
    };
    assert!(error.to_string().contains("another process"), "{error}");
    assert_eq!(first.finish().unwrap(), 32);
    assert_eq!(Header::new().create(&path).unwrap().finish().unwrap(), 32);
}

#[test]
fn a_missing_directory_is_named() {
    let path = Path::new("/nowhere/to/be/found/a.gguf");
    let Err(error) = Header::new().create(path) else {
        panic!("created")
    };
    assert!(
        error
            .to_string()
            .contains("can't create /nowhere/to/be/found/a.gguf"),
        "{error}"
    );
}

#[test]
#[should_panic(expected = "wants 4")]
fn more_than_the_tensor_holds_is_refused() {
    let scratch = Scratch::new("more");
    let mut header = Header::new();
    header.tensor("t", QuantType::F32, &[1]);
    let _ = header
        .create(&scratch.join("a.gguf"))
        .unwrap()
        .write(&[0; 5]);
}

#[test]
#[should_panic(expected = "wants 8 more bytes")]
fn an_incomplete_file_never_gets_its_name() {
    let scratch = Scratch::new("incomplete");
    let mut header = Header::new();
    header.tensor("t", QuantType::F32, &[2]);
    let _ = header.create(&scratch.join("a.gguf")).unwrap().finish();
}
