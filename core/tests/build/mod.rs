//! Builds GGUF files byte by byte, wrong ones too: every field can be given a value that lies.

pub mod pack;

/// A file to be. Counts follow from the lists unless they are overridden.
#[derive(Clone)]
pub struct Build {
    pub magic: [u8; 4],
    pub version: u32,
    pub pair_count: Option<u64>,
    pub tensor_count: Option<u64>,
    pub alignment: u64,
    pub pairs: Vec<u8>,
    pub pairs_written: u64,
    pub infos: Vec<u8>,
    pub infos_written: u64,
    pub data: u64,
}

/// A string: its length and its bytes.
pub fn string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// An array's type, count and elements.
pub fn array(elements: u32, items: &[Vec<u8>]) -> Vec<u8> {
    let head = [
        &elements.to_le_bytes()[..],
        &(items.len() as u64).to_le_bytes(),
    ]
    .concat();
    [head, items.concat()].concat()
}

impl Build {
    pub fn new() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            pair_count: None,
            tensor_count: None,
            alignment: 32,
            pairs: Vec::new(),
            pairs_written: 0,
            infos: Vec::new(),
            infos_written: 0,
            data: 0,
        }
    }

    /// A key and its value, as a type id and raw bytes.
    pub fn raw(mut self, key: impl AsRef<[u8]>, ty: u32, value: &[u8]) -> Self {
        self.pairs.extend(string(key));
        self.pairs.extend(ty.to_le_bytes());
        self.pairs.extend(value);
        self.pairs_written += 1;
        self
    }

    pub fn u32(self, key: &str, value: u32) -> Self {
        self.raw(key, 4, &value.to_le_bytes())
    }

    pub fn u16(self, key: &str, value: u16) -> Self {
        self.raw(key, 2, &value.to_le_bytes())
    }

    pub fn str(self, key: &str, value: &str) -> Self {
        self.raw(key, 8, &string(value))
    }

    /// A tensor info that says what it likes.
    pub fn info(mut self, name: impl AsRef<[u8]>, dims: &[u64], ty: u32, offset: u64) -> Self {
        self.infos.extend(string(name));
        self.infos.extend((dims.len() as u32).to_le_bytes());
        for dim in dims {
            self.infos.extend(dim.to_le_bytes());
        }
        self.infos.extend(ty.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.infos_written += 1;
        self
    }

    /// A tensor of `bytes` bytes with its data after the last one's.
    pub fn tensor(mut self, name: &str, dims: &[u64], ty: u32, bytes: u64) -> Self {
        let offset = self.data.next_multiple_of(self.alignment);
        self.data = offset + bytes;
        self.info(name, dims, ty, offset)
    }

    /// The header alone, without padding.
    pub fn header(&self) -> Vec<u8> {
        let tensor_count = self.tensor_count.unwrap_or(self.infos_written);
        let pair_count = self.pair_count.unwrap_or(self.pairs_written);
        let mut file = self.magic.to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend(tensor_count.to_le_bytes());
        file.extend(pair_count.to_le_bytes());
        file.extend(&self.pairs);
        file.extend(&self.infos);
        file
    }

    /// The whole file, its data zeros.
    pub fn file(&self) -> Vec<u8> {
        let mut file = self.header();
        let start = (file.len() as u64).next_multiple_of(self.alignment);
        file.resize((start + self.data) as usize, 0);
        file
    }
}

/// A small model: every type of value, nested arrays, a few tensors.
pub fn sample() -> Build {
    let words = ["", "a", "Ġthe", "\u{1f600}"].map(string);
    let numbers = [1.5f32, -0.0, f32::MAX].map(|v| v.to_le_bytes().to_vec());
    let kinds = [1i32, -1, 3].map(|v| v.to_le_bytes().to_vec());
    let counts = [7u32, 0, u32::MAX].map(|v| v.to_le_bytes().to_vec());
    let nested = [
        array(8, &words),
        array(7, &[vec![1], vec![0]]),
        array(5, &[]),
    ];
    Build::new()
        .str("general.architecture", "llama")
        .raw("u8", 0, &[200])
        .raw("i8", 1, &[200])
        .raw("u16", 2, &60000u16.to_le_bytes())
        .raw("i16", 3, &(-2i16).to_le_bytes())
        .u32("u32", 4_000_000_000)
        .raw("i32", 5, &(-3i32).to_le_bytes())
        .raw("f32", 6, &0.5f32.to_le_bytes())
        .raw("true", 7, &[1])
        .raw("false", 7, &[0])
        .raw("u64", 10, &u64::MAX.to_le_bytes())
        .raw("i64", 11, &(-4i64).to_le_bytes())
        .raw("f64", 12, &0.25f64.to_le_bytes())
        .raw("bytes", 8, &string(b"\xff\x00"))
        .raw("words", 9, &array(8, &words))
        .raw("numbers", 9, &array(6, &numbers))
        .raw("kinds", 9, &array(5, &kinds))
        .raw("counts", 9, &array(4, &counts))
        .raw("nested", 9, &array(9, &nested))
        .u32("last", 9)
        .tensor("token_embd.weight", &[64, 3], 8, 3 * 2 * 34)
        .tensor("norm.weight", &[5], 0, 20)
        .tensor("experts.weight", &[256, 2, 3, 2], 12, 12 * 144)
}
