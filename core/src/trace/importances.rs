//! `FFNTRC1`: the importance of every chunk of neurons, for each token and layer. Which of them were
//! used is for the reader to decide.

use super::{TraceError, UNITS_MAX};

const MAGIC: [u8; 8] = *b"FFNTRC1\0";
const HEADER_BYTES: usize = 32;

/// A checked trace of importances.
#[derive(Clone, Copy, Debug)]
pub struct Importances<'t> {
    /// Tokens.
    pub tokens: u32,
    /// Layers.
    pub layers: u32,
    /// Chunks a layer.
    pub chunks: u32,
    /// Neurons a chunk.
    pub chunk_neurons: u32,
    /// Tokens of the first of two texts.
    pub first_text: u32,
    bytes: &'t [u8],
}

impl<'t> Importances<'t> {
    /// Whether a file begins as one of these.
    pub fn sniff(bytes: &[u8]) -> bool {
        bytes.starts_with(&MAGIC)
    }

    /// Reads and checks a whole trace.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn parse(bytes: &'t [u8]) -> Result<Self, TraceError> {
        if !Self::sniff(bytes) {
            return Err(TraceError::Magic);
        }
        let head: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(TraceError::Cut { offset: 0 })?;
        let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four"));
        let [tokens, layers, chunks, chunk_neurons, first_text, zero] =
            [8, 12, 16, 20, 24, 28].map(number);
        let bounded = |count: u32| (1..=UNITS_MAX).contains(&count);
        let all = u64::from(layers) * u64::from(chunks);
        if !bounded(layers) || !bounded(chunks) || all > u64::from(UNITS_MAX) {
            return Err(TraceError::Header {
                field: "layers or chunks",
            });
        }
        if chunk_neurons == 0 || first_text > tokens || zero != 0 {
            return Err(TraceError::Header {
                field: "neurons a chunk or tokens",
            });
        }
        let len = u64::from(tokens) * all;
        let body = &bytes[HEADER_BYTES..];
        if (body.len() as u64) < len {
            return Err(TraceError::Cut {
                offset: bytes.len() as u64,
            });
        }
        if body.len() as u64 > len {
            return Err(TraceError::After {
                offset: HEADER_BYTES as u64 + len,
            });
        }
        Ok(Self {
            tokens,
            layers,
            chunks,
            chunk_neurons,
            first_text,
            bytes: body,
        })
    }

    /// Importance of each chunk, 2^((q - 100) / 12).
    ///
    /// # Panics
    /// If there is no such token or layer.
    pub fn layer(&self, token: u32, layer: u32) -> &'t [u8] {
        assert!(token < self.tokens && layer < self.layers);
        // The file is as long as all of them together, so each of these fits.
        let row = token as usize * self.layers as usize + layer as usize;
        let chunks = self.chunks as usize;
        &self.bytes[row * chunks..][..chunks]
    }
}
