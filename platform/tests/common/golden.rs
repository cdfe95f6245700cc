//! Logits that llama.cpp computed: `tests/golden/logits.bin`, made by `make_logits.py` beside it.
//!
//! A record is: length of the name (u32), name, SHA-256 of the model file (32 bytes), positions
//! (u32), tokens of the vocabulary (u32), logits (f32, positions x vocabulary). Little endian.

use std::path::Path;

use sha2::{Digest, Sha256};

/// What llama.cpp gave for one [`super::cases::Case`].
pub struct Golden {
    /// The case.
    pub name: String,
    /// SHA-256 of the model that llama.cpp read.
    pub model: [u8; 32],
    /// Logits, (position, token), of the prompt's last positions.
    pub logits: Vec<Vec<f64>>,
}

/// Reads every record.
pub fn load() -> Vec<Golden> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/logits.bin");
    let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut rest = &bytes[..];
    let mut records = Vec::new();
    while !rest.is_empty() {
        let name_len = take_u32(&mut rest) as usize;
        let name = String::from_utf8(take(&mut rest, name_len).to_vec()).expect("an ASCII name");
        let model = take(&mut rest, 32).try_into().expect("32 bytes");
        let positions = take_u32(&mut rest);
        let vocab = take_u32(&mut rest) as usize;
        let mut row = || {
            let (floats, _) = take(&mut rest, 4 * vocab).as_chunks::<4>();
            floats
                .iter()
                .map(|bytes| f32::from_le_bytes(*bytes).into())
                .collect()
        };
        let logits = (0..positions).map(|_| row()).collect();
        records.push(Golden {
            name,
            model,
            logits,
        });
    }
    records
}

/// SHA-256 of a file's bytes.
pub fn hash(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

fn take<'a>(rest: &mut &'a [u8], len: usize) -> &'a [u8] {
    let (head, tail) = rest.split_at(len);
    *rest = tail;
    head
}

fn take_u32(rest: &mut &[u8]) -> u32 {
    u32::from_le_bytes(take(rest, 4).try_into().expect("4 bytes"))
}
