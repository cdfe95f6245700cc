//! Metadata in memory for the tests: a GGUF file without tensors, written as it comes, so that it can
//! be wrong. The fuzz target uses it too.

/// Keys and values of a file to be.
#[derive(Clone, Default)]
pub struct Metadata {
    bytes: Vec<u8>,
    keys: u64,
}

impl Metadata {
    fn key(&mut self, key: &str, ty: u32) {
        self.keys += 1;
        self.text(key.as_bytes());
        self.bytes.extend(ty.to_le_bytes());
    }

    fn text(&mut self, text: &[u8]) {
        self.bytes.extend((text.len() as u64).to_le_bytes());
        self.bytes.extend(text);
    }

    fn array(&mut self, key: &str, ty: u32, len: usize) {
        self.key(key, 9);
        self.bytes.extend(ty.to_le_bytes());
        self.bytes.extend((len as u64).to_le_bytes());
    }

    /// A number.
    pub fn u32(mut self, key: &str, value: u32) -> Self {
        self.key(key, 4);
        self.bytes.extend(value.to_le_bytes());
        self
    }

    /// A signed number.
    pub fn i32(mut self, key: &str, value: i32) -> Self {
        self.key(key, 5);
        self.bytes.extend(value.to_le_bytes());
        self
    }

    /// A truth value.
    pub fn bool(mut self, key: &str, value: bool) -> Self {
        self.key(key, 7);
        self.bytes.push(value.into());
        self
    }

    /// A string.
    pub fn str(mut self, key: &str, value: impl AsRef<[u8]>) -> Self {
        self.key(key, 8);
        self.text(value.as_ref());
        self
    }

    /// An array of strings.
    pub fn strs(mut self, key: &str, values: &[impl AsRef<[u8]>]) -> Self {
        self.array(key, 8, values.len());
        for value in values {
            self.text(value.as_ref());
        }
        self
    }

    /// An array of signed numbers.
    pub fn i32s(mut self, key: &str, values: &[i32]) -> Self {
        self.array(key, 5, values.len());
        self.bytes
            .extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self
    }

    /// An array of floats.
    pub fn f32s(mut self, key: &str, values: &[f32]) -> Self {
        self.array(key, 6, values.len());
        self.bytes
            .extend(values.iter().flat_map(|value| value.to_le_bytes()));
        self
    }

    /// The file.
    pub fn file(&self) -> Vec<u8> {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(0_u64.to_le_bytes());
        file.extend(self.keys.to_le_bytes());
        file.extend(&self.bytes);
        file
    }
}
