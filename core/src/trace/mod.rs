//! Traces: which units a run used, how much they mattered, what was foreseen and read.
//!
//! Both forms are read in place over a byte slice. [`Trace::parse`] walks the whole file once, so
//! that what it hands out afterwards needs no checks; `core/FORMAT.md` describes every byte.
//!
//! - [`Trace`]: the project's own form, version 1.
//! - [`Importances`]: `FFNTRC1`, importances of chunks of neurons and nothing else.

mod error;
mod importances;

pub use error::TraceError;
pub use importances::Importances;

/// First bytes of a trace.
pub const MAGIC: [u8; 8] = *b"LEANTRC\0";
/// The version that is read and written.
pub const VERSION: u32 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 128;
/// Most layers, units a layer, and bytes a unit of a trace.
pub const UNITS_MAX: u32 = 1 << 24;
/// Stages are numbered below this.
pub const STAGES_MAX: u8 = 16;
/// A recorded score is the score times this, rounded and cut to -127..=127.
pub const SCORE_SCALE: f32 = 16.0;

/// Layer records carry importances.
pub const HAS_IMPORTANCE: u32 = 1;
/// Layer records carry scores.
pub const HAS_SCORES: u32 = 2;
/// There are records of ranks.
pub const HAS_RANKS: u32 = 4;

/// Ranks by the exact gate, which a layer chooses by; a stage's have its number.
pub const RANKS_CHOICE: u8 = STAGES_MAX;
/// Ranks by what each unit added to its layer's output.
pub const RANKS_ADDED: u8 = STAGES_MAX + 1;

/// What a record is, as its first byte.
pub mod tag {
    /// A token begins.
    pub const TOKEN: u8 = 1;
    /// What a stage foresees.
    pub const STAGE: u8 = 2;
    /// What a layer used.
    pub const LAYER: u8 = 3;
    /// A read has ended.
    pub const READ: u8 = 4;
    /// Nothing follows.
    pub const END: u8 = 5;
    /// All units of a layer by size.
    pub const RANKS: u8 = 6;
}

/// What a trace is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// [`HAS_IMPORTANCE`], [`HAS_SCORES`], [`HAS_RANKS`].
    pub flags: u32,
    /// Layers that have units.
    pub layers: u32,
    /// Units a layer.
    pub units: u32,
    /// Bytes that a unit takes on flash.
    pub unit_bytes: u32,
    /// Tokens.
    pub tokens: u32,
    /// Nanoseconds that a layer's computing took on average, without waiting; 0: not measured.
    pub compute_ns: u32,
    /// SHA-256 of the model.
    pub source_sha256: [u8; 32],
    /// The model's name, filled up with zeros.
    pub name: [u8; 56],
}

impl Header {
    /// Bytes of a set of units.
    pub fn set_bytes(&self) -> usize {
        self.units.div_ceil(8) as usize
    }

    /// The name as text, without its filling; empty if it isn't UTF-8.
    pub fn name(&self) -> &str {
        let len = self
            .name
            .iter()
            .rposition(|&b| b != 0)
            .map_or(0, |at| at + 1);
        core::str::from_utf8(&self.name[..len]).unwrap_or("")
    }

    /// The header as it is written.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[..8].copy_from_slice(&MAGIC);
        let numbers = [
            VERSION,
            self.flags,
            self.layers,
            self.units,
            self.unit_bytes,
            self.tokens,
            self.compute_ns,
            0,
        ];
        for (place, number) in out[8..40].chunks_exact_mut(4).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        out[40..72].copy_from_slice(&self.source_sha256);
        out[72..].copy_from_slice(&self.name);
        out
    }

    fn decode(bytes: &[u8]) -> Result<Self, TraceError> {
        if !bytes.starts_with(&MAGIC) {
            return Err(TraceError::Magic);
        }
        let head: &[u8; HEADER_BYTES] = bytes.first_chunk().ok_or(TraceError::Cut { offset: 0 })?;
        let number = |at: usize| u32::from_le_bytes(head[at..at + 4].try_into().expect("four"));
        if number(8) != VERSION {
            return Err(TraceError::Version { version: number(8) });
        }
        let header = Self {
            flags: number(12),
            layers: number(16),
            units: number(20),
            unit_bytes: number(24),
            tokens: number(28),
            compute_ns: number(32),
            source_sha256: head[40..72].try_into().expect("32"),
            name: head[72..].try_into().expect("56"),
        };
        if header.flags & !(HAS_IMPORTANCE | HAS_SCORES | HAS_RANKS) != 0 || number(36) != 0 {
            return Err(TraceError::Header { field: "flags" });
        }
        let bounded = |count: u32| (1..=UNITS_MAX).contains(&count);
        let all = u64::from(header.layers) * u64::from(header.units);
        if !bounded(header.layers) || !bounded(header.units) || all > u64::from(UNITS_MAX) {
            return Err(TraceError::Header {
                field: "layers or units",
            });
        }
        if !bounded(header.unit_bytes) {
            return Err(TraceError::Header {
                field: "unit bytes",
            });
        }
        Ok(header)
    }
}

/// One record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Record<'t> {
    /// A token begins, so many microseconds after the first one.
    Token {
        /// When.
        time_us: u64,
    },
    /// What a stage foresees of a layer that follows in the same token.
    Stage {
        /// Which layer.
        layer: u32,
        /// Which stage: 0 prior, 1 residual before the layer's predecessor, 2 after a part of it.
        stage: u8,
        /// Which units.
        predicted: Set<'t>,
    },
    /// What a layer used. Every token has one of each layer, in order.
    Layer {
        /// Which layer.
        layer: u32,
        /// Which units.
        active: Set<'t>,
        /// Importance of each of them in order, 2^((q - 100) / 12); empty without
        /// [`HAS_IMPORTANCE`].
        importance: &'t [u8],
        /// The gate's pre-activation of all units, in units of the layer's root mean square, as
        /// `i8` times [`SCORE_SCALE`]; empty without [`HAS_SCORES`].
        scores: &'t [u8],
    },
    /// A read ended.
    Read {
        /// When it was started, in microseconds after the first token.
        time_us: u64,
        /// How long it took.
        took_us: u32,
        /// Bytes.
        bytes: u32,
        /// 0 demanded, 1 read ahead, 2 for another part of the model.
        kind: u8,
    },
    /// Where each unit of a layer stands among all of them, by size.
    Ranks {
        /// Which layer: one that follows in the same token for a stage's ranks, the last one for others.
        layer: u32,
        /// Whose: a stage's number, [`RANKS_CHOICE`] or [`RANKS_ADDED`].
        of: u8,
        /// For each unit the number of larger ones, in 256ths of all, rounded down.
        ranks: &'t [u8],
    },
}

/// A set of units, one bit each, lowest first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Set<'t> {
    bytes: &'t [u8],
}

impl<'t> Set<'t> {
    /// Whether it has `unit`.
    pub fn has(&self, unit: u32) -> bool {
        self.bytes
            .get(unit as usize / 8)
            .is_some_and(|byte| byte >> (unit % 8) & 1 == 1)
    }

    /// How many it has.
    pub fn count(&self) -> u32 {
        self.bytes.iter().map(|byte| byte.count_ones()).sum()
    }

    /// Those it has, lowest first.
    pub fn iter(&self) -> impl Iterator<Item = u32> + use<'t> {
        let bytes = self.bytes;
        bytes.iter().enumerate().flat_map(|(at, &byte)| {
            (0..8u32)
                .filter(move |bit| byte >> bit & 1 == 1)
                .map(move |bit| at as u32 * 8 + bit)
        })
    }
}

/// A checked trace.
#[derive(Clone, Copy, Debug)]
pub struct Trace<'t> {
    header: Header,
    /// The records, without the header and the end.
    body: &'t [u8],
}

impl<'t> Trace<'t> {
    /// Reads and checks a whole trace.
    ///
    /// # Errors
    /// What is wrong, and where.
    pub fn parse(bytes: &'t [u8]) -> Result<Self, TraceError> {
        let header = Header::decode(bytes)?;
        let mut cursor = Cursor {
            header: &header,
            bytes,
            at: HEADER_BYTES,
        };
        let mut tokens = 0u32;
        // The layer that must come next; all of them are done before the first token.
        let mut layer_next = header.layers;
        loop {
            let offset = cursor.at as u64;
            let order = Err(TraceError::Order { offset });
            match cursor.record()? {
                None => {
                    if layer_next != header.layers || tokens != header.tokens {
                        return order;
                    }
                    if cursor.at != bytes.len() {
                        return Err(TraceError::After {
                            offset: cursor.at as u64,
                        });
                    }
                    let body = &bytes[HEADER_BYTES..offset as usize];
                    return Ok(Self { header, body });
                }
                Some(Record::Token { .. }) => {
                    if layer_next != header.layers || tokens == header.tokens {
                        return order;
                    }
                    tokens += 1;
                    layer_next = 0;
                }
                Some(Record::Stage { layer, .. }) if layer < layer_next => return order,
                Some(Record::Ranks { layer, of, .. }) => {
                    let fits = match of {
                        ..STAGES_MAX => layer >= layer_next && tokens > 0,
                        _ => layer + 1 == layer_next && tokens > 0,
                    };
                    if !fits {
                        return order;
                    }
                }
                Some(Record::Layer { layer, .. }) => {
                    if layer != layer_next {
                        return order;
                    }
                    layer_next += 1;
                }
                Some(Record::Stage { .. } | Record::Read { .. }) => {}
            }
        }
    }

    /// What it is of.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The records in order.
    pub fn records(&self) -> impl Iterator<Item = Record<'t>> + use<'t> {
        let Trace { header, body } = *self;
        let mut at = 0;
        core::iter::from_fn(move || {
            if at == body.len() {
                return None;
            }
            let mut cursor = Cursor {
                header: &header,
                bytes: body,
                at,
            };
            let record = cursor.record().expect("it was checked");
            at = cursor.at;
            record
        })
    }
}

/// Reads records front to back; every length is compared with what is left before it is used.
struct Cursor<'h, 't> {
    header: &'h Header,
    bytes: &'t [u8],
    at: usize,
}

impl<'t> Cursor<'_, 't> {
    fn take(&mut self, len: usize) -> Result<&'t [u8], TraceError> {
        let rest = &self.bytes[self.at..];
        if len > rest.len() {
            return Err(TraceError::Cut {
                offset: self.at as u64,
            });
        }
        self.at += len;
        Ok(&rest[..len])
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], TraceError> {
        Ok(self.take(N)?.try_into().expect("as long as was asked for"))
    }

    fn u32(&mut self) -> Result<u32, TraceError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, TraceError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn layer(&mut self, offset: u64) -> Result<u32, TraceError> {
        let layer = self.u32()?;
        if layer < self.header.layers {
            Ok(layer)
        } else {
            Err(TraceError::Layer { offset, layer })
        }
    }

    fn set(&mut self) -> Result<Set<'t>, TraceError> {
        let offset = self.at as u64;
        let bytes = self.take(self.header.set_bytes())?;
        let over = self.header.units % 8;
        if over != 0 && bytes[bytes.len() - 1] >> over != 0 {
            return Err(TraceError::Units { offset });
        }
        Ok(Set { bytes })
    }

    /// The next record; `None` at the end's.
    fn record(&mut self) -> Result<Option<Record<'t>>, TraceError> {
        let offset = self.at as u64;
        let [kind] = self.array()?;
        let record = match kind {
            tag::TOKEN => Record::Token {
                time_us: self.u64()?,
            },
            tag::STAGE => {
                let layer = self.layer(offset)?;
                let [stage] = self.array()?;
                if stage >= STAGES_MAX {
                    return Err(TraceError::Stage { offset, stage });
                }
                Record::Stage {
                    layer,
                    stage,
                    predicted: self.set()?,
                }
            }
            tag::LAYER => {
                let layer = self.layer(offset)?;
                let active = self.set()?;
                let flags = self.header.flags;
                let (mut importance, mut scores) = (&[][..], &[][..]);
                if flags & HAS_IMPORTANCE != 0 {
                    importance = self.take(active.count() as usize)?;
                }
                if flags & HAS_SCORES != 0 {
                    scores = self.take(self.header.units as usize)?;
                }
                Record::Layer {
                    layer,
                    active,
                    importance,
                    scores,
                }
            }
            tag::READ => Record::Read {
                time_us: self.u64()?,
                took_us: self.u32()?,
                bytes: self.u32()?,
                kind: self.array::<1>()?[0],
            },
            tag::RANKS if self.header.flags & HAS_RANKS != 0 => {
                let layer = self.layer(offset)?;
                let [of] = self.array()?;
                if of > RANKS_ADDED {
                    return Err(TraceError::Stage { offset, stage: of });
                }
                Record::Ranks {
                    layer,
                    of,
                    ranks: self.take(self.header.units as usize)?,
                }
            }
            tag::END => return Ok(None),
            tag => return Err(TraceError::Tag { offset, tag }),
        };
        Ok(Some(record))
    }
}
