//! Round trips, and files that are wrong.

use std::path::{Path, PathBuf};

use leanstream_core::gguf::Element;
use leanstream_core::quant::QuantType;

use super::*;
use crate::gguf_write::Header;

fn scratch(name: &str) -> PathBuf {
    let dir = std::env::temp_dir().join(format!("leanstream-adapter-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir.join(name)
}

fn values(len: usize, seed: u32) -> Vec<f32> {
    (0..len as u32)
        .map(|i| {
            ((i.wrapping_mul(2_654_435_761).wrapping_add(seed) >> 8) % 4001) as f32 / 1000.0 - 2.0
        })
        .collect()
}

const Q: &str = "blk.0.attn_q.weight";
const UP: &str = "blk.0.ffn_up.weight";

/// Two matrices of rank 3 and 40, the second so large that it is read in parts.
fn sample(path: &Path, precision: Precision) -> [Vec<f32>; 4] {
    let all = [
        values(3 * 64, 1),
        values(32 * 3, 2),
        values(40 * 1000, 3),
        values(700 * 40, 4),
    ];
    let part = |name, (inputs, outputs, rank), a, b| Part {
        name,
        inputs,
        outputs,
        rank,
        a,
        b,
    };
    let parts = [
        part(UP, (1000, 700, 40), &all[2], &all[3]),
        part(Q, (64, 32, 3), &all[0], &all[1]),
    ];
    let about = About {
        arch: "llama",
        alpha: 6.0,
        name: Some("a model"),
    };
    let bytes = write(path, &about, &parts, precision).unwrap();
    assert_eq!(bytes, std::fs::metadata(path).unwrap().len());
    all
}

#[test]
fn what_is_written_is_read() {
    for (precision, name) in [(Precision::F32, "f32.gguf"), (Precision::F16, "f16.gguf")] {
        let path = scratch(name);
        let all = sample(&path, precision);
        let adapter = Adapter::open(&path).unwrap();
        assert_eq!((adapter.arch(), adapter.alpha()), ("llama", 6.0));
        let pairs = adapter.pairs();
        let names: Vec<&str> = pairs.iter().map(|pair| pair.name.as_str()).collect();
        assert_eq!(names, [Q, UP]);
        assert_eq!(
            (pairs[1].rank, pairs[1].inputs, pairs[1].outputs),
            (40, 1000, 700)
        );
        assert_eq!(adapter.factor(&pairs[0], 0.5).unwrap(), 1.0);
        for (pair, (a, b)) in pairs.iter().zip([(&all[0], &all[1]), (&all[2], &all[3])]) {
            let (mut got_a, mut got_b) = (vec![0.0; a.len()], vec![0.0; b.len()]);
            adapter.read_a(pair, &mut got_a).unwrap();
            adapter.read_b(pair, &mut got_b).unwrap();
            let stored = |x: &f32| match precision {
                Precision::F32 => *x,
                Precision::F16 => half::f16::from_f32(*x).to_f32(),
            };
            assert!(got_a.iter().copied().eq(a.iter().map(stored)));
            assert!(got_b.iter().copied().eq(b.iter().map(stored)));
        }
        adapter.check_arch("llama", Path::new("m")).unwrap();
        let other = adapter.check_arch("gemma3", Path::new("m")).unwrap_err();
        assert_eq!(other.exit_code(), 3);
        adapter
            .check_shape(&pairs[0], (32, 64), Path::new("m"))
            .unwrap();
        let other = adapter
            .check_shape(&pairs[0], (64, 32), Path::new("m"))
            .unwrap_err();
        assert!(
            other
                .to_string()
                .contains("32 rows of 64, and m has 64 rows of 32"),
            "{other}"
        );
    }
}

#[test]
fn values_that_no_file_should_hold_are_not_written() {
    let path = scratch("nan.gguf");
    let about = About {
        arch: "llama",
        alpha: 1.0,
        name: None,
    };
    for (bad, precision) in [
        (f32::NAN, Precision::F32),
        (f32::INFINITY, Precision::F16),
        (1e5, Precision::F16),
    ] {
        let parts = [Part {
            name: Q,
            inputs: 2,
            outputs: 1,
            rank: 1,
            a: &[1.0, 2.0],
            b: &[bad],
        }];
        let error = write(&path, &about, &parts, precision).unwrap_err();
        assert!(
            error.to_string().contains("blk.0.attn_q.weight.lora_b"),
            "{error}"
        );
        assert!(!path.exists());
    }
}

struct Made {
    header: Header,
    tensors: Vec<Vec<u8>>,
}

impl Made {
    fn new(general: Option<&str>, kind: &str) -> Self {
        let mut header = Header::new();
        header.str("general.architecture", "llama");
        if let Some(general) = general {
            header.str("general.type", general);
        }
        header.str("adapter.type", kind);
        Self {
            header,
            tensors: Vec::new(),
        }
    }

    fn tensor(mut self, name: &str, ty: impl Into<Element>, dims: &[u64]) -> Self {
        let bytes = self.header.tensor(name, ty, dims);
        self.tensors.push(vec![0; bytes as usize]);
        self
    }

    fn write(&self, path: &Path) {
        let mut writer = self.header.create(path).unwrap();
        for tensor in &self.tensors {
            writer.write(tensor).unwrap();
        }
        writer.finish().unwrap();
    }
}

#[test]
fn files_that_are_no_adapter_are_refused_with_the_reason() {
    let lora = || Made::new(Some("adapter"), "lora");
    let f32 = QuantType::F32;
    let whole = || {
        lora()
            .tensor("x.lora_a", f32, &[4, 2])
            .tensor("x.lora_b", f32, &[2, 3])
    };
    let with = |set: &dyn Fn(&mut Header)| {
        let mut made = lora();
        set(&mut made.header);
        made
    };
    let path = scratch("bad.gguf");
    whole().write(&path);
    let good = Adapter::open(&path).unwrap();
    let factor = good.factor(&good.pairs()[0], 0.5).unwrap();
    assert_eq!(factor, 0.5, "without an alpha");
    for (made, want) in [
        (Made::new(None, "lora"), "has no general.type"),
        (
            Made::new(Some("model"), "lora"),
            "its general.type is 'model'",
        ),
        (Made::new(Some("adapter"), "ia3"), "adapters of type 'ia3'"),
        (lora(), "it has no tensors"),
        (
            with(&|header| {
                header.str("adapter.lora.alpha", "8");
            }),
            "adapter.lora.alpha is not a finite number",
        ),
        (
            with(&|header| {
                header.f32("adapter.lora.alpha", f32::NAN);
            }),
            "adapter.lora.alpha is not a finite number",
        ),
        (
            with(&|header| {
                header.u32s("adapter.alora.invocation_tokens", [1]);
            }),
            "aLoRA",
        ),
        (
            lora().tensor("x.lora_a", f32, &[4, 2]),
            "x.lora_b is missing",
        ),
        (
            lora().tensor("x.lora_b", f32, &[4, 2]),
            "x.lora_a is missing",
        ),
        (
            whole().tensor("blk.0.attn_norm.weight", f32, &[4]),
            "blk.0.attn_norm.weight is neither",
        ),
        (
            lora()
                .tensor("x.lora_a", f32, &[4, 2])
                .tensor("x.lora_b", f32, &[3, 2]),
            "x.lora_a has 2 rows, but x.lora_b has rows of 3",
        ),
        (
            lora()
                .tensor("x.lora_a", f32, &[4, 2, 2])
                .tensor("x.lora_b", f32, &[2, 3]),
            "x.lora_a is no matrix",
        ),
        (
            lora()
                .tensor("x.lora_a", Element::I8, &[4, 2])
                .tensor("x.lora_b", f32, &[2, 3]),
            "holds I8",
        ),
        (
            lora()
                .tensor("token_embd.weight.lora_a", f32, &[2, 4])
                .tensor("token_embd.weight.lora_b", f32, &[2, 3]),
            "adapts the embedding",
        ),
    ] {
        made.write(&path);
        let error = Adapter::open(&path).unwrap_err();
        assert_eq!(error.exit_code(), 3);
        let text = error.to_string();
        assert!(text.contains("bad.gguf") && text.contains(want), "{text}");
    }
}

#[test]
fn damaged_values_are_named() {
    let path = scratch("damaged.gguf");
    sample(&path, Precision::F32);
    let mut bytes = std::fs::read(&path).unwrap();
    let len = bytes.len();
    // The end of the last tensor; rank 3 of 32 rows, without padding.
    bytes[len - 4..].copy_from_slice(&f32::INFINITY.to_le_bytes());
    std::fs::write(&path, &bytes).unwrap();
    let adapter = Adapter::open(&path).unwrap();
    let error = adapter
        .read_b(&adapter.pairs()[0], &mut [0.0; 96])
        .unwrap_err();
    assert_eq!(error.exit_code(), 3);
    assert!(
        error
            .to_string()
            .contains("blk.0.attn_q.weight.lora_b has the value inf"),
        "{error}"
    );
    std::fs::write(&path, &bytes[..len - 1]).unwrap();
    assert_eq!(Adapter::open(&path).unwrap_err().exit_code(), 3);
}

/// Every byte of the header set to a few values: an error or an adapter that can be read, no panic.
#[test]
fn no_header_makes_it_panic() {
    let path = scratch("flipped.gguf");
    Made::new(Some("adapter"), "lora")
        .tensor("x.lora_a", QuantType::F32, &[4, 2])
        .tensor("x.lora_b", QuantType::F16, &[2, 3])
        .write(&path);
    let good = std::fs::read(&path).unwrap();
    for at in 0..good.len() {
        for change in [0x01, 0x80, 0xff] {
            let mut bytes = good.clone();
            bytes[at] ^= change;
            std::fs::write(&path, &bytes).unwrap();
            let Ok(adapter) = Adapter::open(&path) else {
                continue;
            };
            for pair in adapter.pairs() {
                let mut a = vec![0.0; (pair.rank * pair.inputs) as usize];
                let mut b = vec![0.0; (pair.outputs * pair.rank) as usize];
                let _ = (adapter.read_a(pair, &mut a), adapter.read_b(pair, &mut b));
            }
        }
    }
}
