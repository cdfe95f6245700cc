//! What can be wrong with the tokenizer metadata of a file.

use core::fmt;

/// Why a file's tokenizer can't be used. Every message names the metadata key and a way out.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TextError {
    /// A key that the tokenizer needs is absent.
    Missing {
        /// The metadata key.
        key: &'static str,
    },
    /// A key holds another type than the format defines for it.
    WrongType {
        /// The metadata key.
        key: &'static str,
        /// The type it should have.
        want: &'static str,
    },
    /// `tokenizer.ggml.model` names a kind of tokenizer that isn't supported.
    Model {
        /// The name in the file.
        name: String,
    },
    /// `tokenizer.ggml.pre` names a pre-tokenizer that isn't supported.
    Pre {
        /// The name in the file.
        name: String,
        /// The supported names, separated by commas.
        supported: String,
    },
    /// An array that belongs to the tokens has another length than they.
    Length {
        /// The metadata key of the array.
        key: &'static str,
        /// Its length.
        len: u64,
        /// The number of tokens.
        tokens: u32,
    },
    /// A token id is not below the number of tokens.
    Id {
        /// The metadata key.
        key: &'static str,
        /// The id in the file.
        id: u64,
        /// The number of tokens.
        tokens: u32,
    },
    /// Two tokens have the same text.
    Duplicate {
        /// The lower id.
        first: u32,
        /// The higher id.
        second: u32,
    },
    /// A token's score is not a number.
    Score {
        /// The token.
        id: u32,
    },
    /// A merge rule is not two tokens whose texts join to a third.
    Merge {
        /// Its place in `tokenizer.ggml.merges`, from 0.
        index: u32,
        /// What is wrong with it.
        what: &'static str,
    },
    /// There is more of something than the tables can hold.
    TooLarge {
        /// The metadata key.
        key: &'static str,
        /// How much there is.
        len: u64,
        /// How much there may be.
        max: u64,
    },
    /// The metadata asks for a token to be added that it doesn't name.
    NoToken {
        /// The key that asks.
        asks: &'static str,
        /// The key that should name the token.
        key: &'static str,
    },
    /// The system has no memory for the tables.
    Memory {
        /// What the table that failed needs, in bytes.
        bytes: u64,
    },
}

/// The way out of a file whose metadata is broken.
const CONVERT: &str = "convert the model again with a current converter, or use another file of it";

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing { key } => write!(f, "the file has no {key}: {CONVERT}"),
            Self::WrongType { key, want } => write!(f, "{key} is not {want}: {CONVERT}"),
            Self::Model { name } => write!(
                f,
                "tokenizer.ggml.model is '{name}', which is not supported: use a model whose \
                 tokenizer is 'gpt2' (byte-level BPE) or 'llama' (SentencePiece BPE)"
            ),
            Self::Pre { name, supported } => write!(
                f,
                "tokenizer.ggml.pre is '{name}', which is not supported (cutting text in another \
                 way would give wrong tokens): use a model with one of {supported}"
            ),
            Self::Length { key, len, tokens } => {
                write!(f, "{key} has {len} entries for {tokens} tokens: {CONVERT}")
            }
            Self::Id { key, id, tokens } => write!(
                f,
                "{key} is {id}, but there are {tokens} tokens: set it to a token's id, or {CONVERT}"
            ),
            Self::Duplicate { first, second } => write!(
                f,
                "tokenizer.ggml.tokens has one text for the ids {first} and {second}: {CONVERT}"
            ),
            Self::Score { id } => write!(
                f,
                "tokenizer.ggml.scores is not a number for token {id}: {CONVERT}"
            ),
            Self::Merge { index, what } => {
                write!(f, "tokenizer.ggml.merges, entry {index}: {what}: {CONVERT}")
            }
            Self::TooLarge { key, len, max } => write!(
                f,
                "{key} has {len} entries or bytes, more than the {max} that are supported: use a \
                 model with a smaller vocabulary"
            ),
            Self::NoToken { asks, key } => write!(
                f,
                "{asks} is true (or the default), but there is no {key}: add it, or set {asks} to \
                 false"
            ),
            Self::Memory { bytes } => write!(
                f,
                "no memory for {bytes} bytes of tokenizer tables: free some, or use a model with a \
                 smaller vocabulary"
            ),
        }
    }
}

impl std::error::Error for TextError {}
