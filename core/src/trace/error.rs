//! What can be wrong with a trace.

use core::fmt;

/// Why a file isn't a trace that can be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TraceError {
    /// It begins with other bytes.
    Magic,
    /// A version that this program doesn't know.
    Version {
        /// Which.
        version: u32,
    },
    /// A number in the header can't be.
    Header {
        /// Which.
        field: &'static str,
    },
    /// The file ends within a record.
    Cut {
        /// Where the missing bytes should be.
        offset: u64,
    },
    /// There is no such record.
    Tag {
        /// Where.
        offset: u64,
        /// Its first byte.
        tag: u8,
    },
    /// The model has no such layer.
    Layer {
        /// Where.
        offset: u64,
        /// Which.
        layer: u32,
    },
    /// There is no such stage.
    Stage {
        /// Where.
        offset: u64,
        /// Which.
        stage: u8,
    },
    /// A set has units that the layer doesn't have.
    Units {
        /// Where.
        offset: u64,
    },
    /// A record where another one has to come, or more or fewer tokens than the header says.
    Order {
        /// Where.
        offset: u64,
    },
    /// Bytes behind the end.
    After {
        /// Where.
        offset: u64,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("this is no trace; `leanstream trace` makes them"),
            Self::Version { version } => write!(
                f,
                "a trace of version {version}, and version {} is what this program reads; record it again",
                super::VERSION
            ),
            Self::Header { field } => {
                write!(f, "the trace is damaged: {field} in its header can't be")
            }
            Self::Cut { offset } => write!(
                f,
                "the trace is cut at byte {offset}; copy it again or record it again"
            ),
            Self::Tag { offset, tag } => {
                write!(
                    f,
                    "the trace is damaged: no record begins with {tag} (byte {offset})"
                )
            }
            Self::Layer { offset, layer } => {
                write!(
                    f,
                    "the trace is damaged: there is no layer {layer} (byte {offset})"
                )
            }
            Self::Stage { offset, stage } => {
                write!(
                    f,
                    "the trace is damaged: there is no stage {stage} (byte {offset})"
                )
            }
            Self::Units { offset } => write!(
                f,
                "the trace is damaged: a set has units that its layer has not (byte {offset})"
            ),
            Self::Order { offset } => write!(
                f,
                "the trace is damaged: another record has to stand at byte {offset}"
            ),
            Self::After { offset } => {
                write!(f, "the trace ends at byte {offset}, and the file doesn't")
            }
        }
    }
}

impl core::error::Error for TraceError {}
