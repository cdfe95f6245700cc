//! Any bytes as a GGUF file: refused or read, and everything that is read holds together.

#![no_main]

use leanstream_core::gguf::{
    Array, Gguf, GgufError, ShardName, TensorIndex, Value, ValueType, check_shards,
};
use leanstream_core::quant::{check, decode};
use libfuzzer_sys::fuzz_target;

/// Lookups that walk are tried for this many names: more would only fuzz slower.
const LOOKUPS_MAX: usize = 200;

fuzz_target!(|data: &[u8]| {
    let file_len = data.len() as u64;
    let whole = Gguf::parse(data, file_len);
    match &whole {
        Ok(gguf) => read_everything(gguf, data),
        Err(error) => {
            assert!(
                !matches!(error, GgufError::NeedMore { .. }),
                "it has everything"
            );
            assert!(!error.to_string().contains('\n'));
        }
    }

    // The start alone: asks for more, or comes to the same end.
    let cut = data.len() * usize::from(data.last().copied().unwrap_or(0)) / 256;
    match (Gguf::parse(&data[..cut], file_len), &whole) {
        (Err(GgufError::NeedMore { bytes }), _) => {
            assert!(bytes > cut as u64 && bytes <= file_len);
        }
        (Ok(part), Ok(whole)) => {
            assert_eq!(part.data_offset(), whole.data_offset());
            assert_eq!(part.key_count(), whole.key_count());
            assert!(part.tensors().eq(whole.tensors()));
        }
        // What a wrong magic looks like depends on how much is seen.
        (Err(GgufError::NotGguf { .. }), Err(GgufError::NotGguf { .. })) => {}
        (Err(part), Err(whole)) => assert_eq!(part, *whole),
        (part, whole) => panic!("the start is {part:?}, all of it is {whole:?}"),
    }

    if let Some(name) = ShardName::parse(data) {
        assert_eq!(name.shard(name.no), *data);
        assert_eq!(ShardName::parse(&name.shard(0)).unwrap().no, 0);
    }
});

fn read_everything(gguf: &Gguf<'_>, data: &[u8]) {
    let mut keys = 0;
    for (i, (key, value)) in gguf.metadata().enumerate() {
        keys += 1;
        if i < LOOKUPS_MAX {
            // Of keys that stand twice past the index, the first counts.
            let first = gguf.metadata().find(|(found, _)| *found == key);
            let (_, first) = first.expect("it is there");
            assert_eq!(gguf.get(key).expect("it is there").ty(), first.ty());
        }
        if let Value::Array(array) = value {
            read_array(&array, data);
        }
    }
    assert_eq!(keys, gguf.key_count());
    assert!(gguf.alignment().is_power_of_two());

    let files = [gguf.clone()];
    let mut scratch = vec![0; TensorIndex::entries_needed(&files)];
    let index = TensorIndex::new(&files, &mut scratch);
    let mut tensors = 0;
    let mut values = [0.0; 256];
    for (i, tensor) in gguf.tensors().enumerate() {
        tensors += 1;
        // Slicing is the check that it lies inside the file.
        let bytes = &data[tensor.offset as usize..][..tensor.bytes as usize];
        let (len, size) = (tensor.ty.block_len(), tensor.ty.block_bytes());
        assert_eq!(
            tensor.rows() * tensor.cols() / len as u64 * size as u64,
            tensor.bytes
        );
        assert!(tensor.offset.is_multiple_of(gguf.alignment()));
        let block = &bytes[..size];
        if let Some(ty) = tensor.ty.quant() {
            decode(ty, block, &mut values[..len]);
            let _ = check(ty, block);
        }
        if let Ok(index) = &index {
            assert_eq!(index.find(tensor.name), Some((0, tensor)));
            if i < LOOKUPS_MAX {
                assert_eq!(gguf.tensor(tensor.name), Some(tensor));
            }
        }
    }
    assert_eq!(tensors, gguf.tensor_count());
    let _ = check_shards(&files);
}

fn read_array(array: &Array<'_>, data: &[u8]) {
    let mut len = 0;
    for (i, value) in array.values().enumerate() {
        len += 1;
        assert_eq!(value.ty(), array.element_type());
        if !matches!(value.ty(), ValueType::Str | ValueType::Array) && i < LOOKUPS_MAX {
            assert_eq!(array.get(i).expect("it is there").ty(), value.ty());
        }
        if let Value::Array(inner) = value {
            read_array(&inner, data);
        }
    }
    assert_eq!(len, array.len());
    if let Some(strings) = array.strings() {
        assert_eq!(strings.clone().count(), array.len());
        for (offset, string) in strings.with_offsets() {
            assert_eq!(&data[offset as usize..][..string.len()], string);
        }
    }
    for numbers in [array.f32s().map(|n| n.len()), array.i32s().map(|n| n.len())] {
        assert!(numbers.is_none_or(|n| n == array.len()));
    }
}
