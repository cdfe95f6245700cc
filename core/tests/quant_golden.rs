//! Every format decodes to exactly what the Python package `gguf` says, on blocks that
//! `golden/make_quant.py` made.

use leanstream_core::quant::{QuantType, check, decode};

#[test]
fn decodes_as_ggml_does() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/quant");
    for ty in QuantType::ALL {
        let path = format!("{directory}/{}.bin", ty.name().to_lowercase());
        let data = std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
        let (count, data) = data.split_at(4);
        let blocks = u32::from_le_bytes(count.try_into().unwrap()) as usize;
        assert!(blocks >= 3, "{path}: too few blocks to mean anything");
        let (bytes, values) = data.split_at(blocks * ty.block_bytes());
        assert_eq!(values.len(), blocks * ty.block_len() * 4, "{path}");

        let mut got = vec![f32::NAN; blocks * ty.block_len()];
        decode(ty, bytes, &mut got);
        for (i, (got, want)) in got.iter().zip(values.as_chunks::<4>().0).enumerate() {
            let want = f32::from_le_bytes(*want);
            // Bits, but for the sign of zero: `0 * -1` and `-0 * 1` are both right.
            assert!(*got == want, "{ty}, value {i}: {got:e}, expected {want:e}");
        }
        assert_eq!(check(ty, bytes), Ok(()), "{ty}");
    }
}
