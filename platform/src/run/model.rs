//! A model on disk: its files, their headers, what a pass over it does, and what stays resident.

use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::gguf::{self, Gguf, GgufError, ShardName, TensorIndex};
use leanstream_core::pack::{Pack, PackedHead, PackedLayer, Quality};
use leanstream_core::plan::{
    self, Head, Hyper, Matrix, MatrixId, Model, Op, Sink, StepPlan, Vector, VectorId,
};
use leanstream_core::quant;
use leanstream_core::units::PieceId;
use memmap2::{Mmap, MmapOptions};

use super::lora::Lora;
use super::packed::Packed;
use crate::error::Error;
use crate::text::Tokenizer;

/// How much of a file is mapped first to read its header; grown while the header is longer.
const HEADER_FIRST: u64 = 16 << 20;

/// What is known of a model without its weights; it stays for the whole run.
pub struct Info {
    /// The files, in the order of their shards.
    pub paths: Vec<PathBuf>,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// The numbers of the architecture.
    pub hyper: Hyper,
    /// The tokenizer of the metadata.
    pub tokenizer: Tokenizer,
    /// `general.name`, or the file's name.
    pub name: String,
    /// Whether its neurons are packed into units (its head may be without them).
    pub packed: bool,
    /// What leaving out neurons costs, where it was measured.
    pub quality: Option<Quality>,
    /// SHA-256 of the model that it was packed from.
    pub source_sha256: Option<[u8; 32]>,
    /// How its logits are computed.
    pub head: Head,
    /// Weights of all tensors.
    pub parameters: u64,
    /// Architecture and the format that holds most bytes, for reports: `llama Q4_1`.
    pub kind: String,
}

/// What a pass does and where its weights lie.
pub struct Weights {
    /// Every matrix, not yet cut into pieces.
    pub matrices: Vec<Matrix>,
    /// The embedding matrix.
    pub embedding: MatrixId,
    /// The steps of a pass.
    pub steps: Vec<StepPlan>,
    /// Norms, biases and rotary factors, in memory.
    pub vectors: Vectors,
    /// Rotary frequency divisors, if the model has them.
    pub rope_factors: Option<VectorId>,
    /// The units of a packed model.
    pub packed: Option<Packed>,
    /// Adapters, once they are given.
    pub lora: Option<Lora>,
}

/// Small tensors as f32, one after the other.
#[derive(Default)]
pub struct Vectors {
    floats: Vec<f32>,
    /// Where each begins; one more entry at the end.
    starts: Vec<usize>,
}

impl Vectors {
    /// One vector.
    pub fn get(&self, id: VectorId) -> &[f32] {
        let index = id.0 as usize;
        &self.floats[self.starts[index]..self.starts[index + 1]]
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        (self.floats.capacity() * size_of::<f32>() + self.starts.capacity() * size_of::<usize>())
            as u64
    }
}

/// The mapped headers of a model, for what needs the metadata itself.
pub struct Headers {
    /// Path, length and mapped start of each shard.
    shards: Vec<(PathBuf, u64, Mmap)>,
}

impl Headers {
    /// Opens the file, and the shards that belong to it, whichever of them is named.
    ///
    /// # Errors
    /// A file that can't be opened, isn't a GGUF, or doesn't belong with the others.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let named = map_header(path)?;
        let Some(split) = with_header(&named, |gguf| gguf.split())? else {
            return Ok(Self {
                shards: vec![named],
            });
        };
        let file_name = path.file_name().unwrap_or_default();
        let Some(name) = ShardName::parse(file_name.as_bytes()) else {
            return Err(Error::model(
                path,
                format_args!(
                    "is shard {} of {}, but its name doesn't end in -{:05}-of-{:05}.gguf, so that the others can't be \
                     found; rename it",
                    split.no + 1,
                    split.count,
                    split.no + 1,
                    split.count
                ),
            ));
        };
        let mut shards = Vec::new();
        for no in 0..name.count {
            let sibling = path.with_file_name(OsStr::from_bytes(&name.shard(no)));
            shards.push(map_header(&sibling)?);
        }
        Ok(Self { shards })
    }

    /// Paths and lengths, in the shards' order.
    pub fn files(&self) -> impl Iterator<Item = (&Path, u64)> {
        self.shards
            .iter()
            .map(|(path, len, _)| (path.as_path(), *len))
    }

    /// Calls `f` with the parsed headers and their tensors, checked to be one whole model.
    ///
    /// # Errors
    /// What is wrong with a header, or what `f` returns.
    pub fn with<T>(
        &self,
        f: impl FnOnce(&[Gguf<'_>], TensorIndex<'_, '_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let first = &self.shards[0].0;
        let mut parsed = Vec::with_capacity(self.shards.len());
        for (path, len, map) in &self.shards {
            parsed.push(Gguf::parse(map, *len).map_err(|error| Error::model(path, error))?);
        }
        gguf::check_shards(&parsed).map_err(|error| Error::model(first, error))?;
        let mut scratch = vec![0; TensorIndex::entries_needed(&parsed)];
        let index =
            TensorIndex::new(&parsed, &mut scratch).map_err(|error| Error::model(first, error))?;
        f(&parsed, index)
    }
}

/// Reads everything that stays resident. The headers are unmapped when it returns.
///
/// # Errors
/// What is wrong with the model, by file and name.
pub fn load(path: &Path) -> Result<(Info, Weights), Error> {
    load_with(path, Head::Full)
}

/// The same, to compute logits as `head` says.
///
/// # Errors
/// As [`load`], or a model without a sketch where one is asked for.
pub fn load_with(path: &Path, head: Head) -> Result<(Info, Weights), Error> {
    let headers = Headers::open(path)?;
    let first = headers.shards[0].0.clone();
    let (mut parts, packed, hyper, tokenizer, name, parameters, kind) =
        headers.with(|shards, tensors| {
            let mut parts = Parts::default();
            let model = Model {
                first: &shards[0],
                tensors,
            };
            if head.sketched() && tensors.find("output.sketch").is_none() {
                return Err(Error::Usage(format!(
                    "--head {}: {} has no sketch of its head; only a packed model has: leanstream pack MODEL OUT.lean",
                    head.name(),
                    first.display()
                )));
            }
            let hyper =
                plan::plan(&model, &mut parts, head).map_err(|error| Error::model(&first, error))?;
            let packed = packed_parts(&model, &hyper, &parts, head)
                .map_err(|error| Error::model(&first, error))?;
            let tokenizer =
                Tokenizer::from_gguf(&shards[0]).map_err(|error| Error::model(&first, error))?;
            if tokenizer.vocab_len() > hyper.vocab {
                return Err(Error::model(
                    &first,
                    format_args!(
                        "the tokenizer has {} tokens, but the embedding only {} rows",
                        tokenizer.vocab_len(),
                        hyper.vocab
                    ),
                ));
            }
            let name = shards[0]
                .get("general.name")
                .and_then(|value| value.as_str())
                .map_or_else(
                    || {
                        first
                            .file_name()
                            .unwrap_or_default()
                            .to_string_lossy()
                            .into_owned()
                    },
                    str::to_owned,
                );
            let parameters = shards
                .iter()
                .flat_map(Gguf::tensors)
                .map(|tensor| tensor.rows().saturating_mul(tensor.cols()))
                .fold(0u64, u64::saturating_add);
            let kind = format!("{} {}", hyper.arch.name(), commonest(&parts.matrices));
            Ok((parts, packed, hyper, tokenizer, name, parameters, kind))
        })?;
    let files: Vec<(PathBuf, u64)> = headers
        .files()
        .map(|(path, len)| (path.to_owned(), len))
        .collect();
    drop(headers);
    let vectors = read_vectors(&files, &parts.vectors)?;
    let PackedParts {
        layers,
        head: packed_head,
        quality,
        source_sha256,
    } = packed;
    let neurons = !layers.is_empty();
    let packed = match neurons || packed_head.is_some() {
        true => Some(Packed::load(&files, layers, packed_head, hyper.d)?),
        false => None,
    };
    parts.matrices.shrink_to_fit();
    parts.steps.shrink_to_fit();
    let info = Info {
        file_bytes: files.iter().map(|(_, len)| len).sum(),
        paths: files.into_iter().map(|(path, _)| path).collect(),
        hyper,
        tokenizer,
        name,
        parameters,
        kind,
        packed: neurons,
        quality,
        source_sha256,
        head,
    };
    let weights = Weights {
        matrices: parts.matrices,
        embedding: parts
            .embedding
            .expect("every architecture names its embedding"),
        steps: parts.steps,
        vectors,
        rope_factors: parts.rope_factors,
        packed,
        lora: None,
    };
    Ok((info, weights))
}

/// What is packed of a model.
#[derive(Default)]
struct PackedParts {
    layers: Vec<PackedLayer>,
    /// The head that is computed by its sketch.
    head: Option<(Head, PackedHead)>,
    /// What leaving out neurons costs.
    quality: Option<Quality>,
    source_sha256: Option<[u8; 32]>,
}

/// What is packed of a model, of its head only what `head` needs; nothing when it isn't packed.
fn packed_parts(
    model: &Model<'_, '_>,
    hyper: &Hyper,
    parts: &Parts,
    head: Head,
) -> Result<PackedParts, String> {
    let pack = Pack::of(model, hyper).map_err(|error| error.to_string())?;
    let sparse = |step: &StepPlan| matches!(step.op, Op::Units { .. });
    let sparse = parts.steps.iter().any(sparse);
    let Some(pack) = pack else {
        return if sparse || head.sketched() {
            let what = if sparse { "packed layers" } else { "a sketch" };
            Err(format!("it has {what}, but no lean.version; pack it again"))
        } else {
            Ok(PackedParts::default())
        };
    };
    if !sparse && pack.layers() > 0 {
        return Err("it is a pack, but its layers have no units; pack it again".to_owned());
    }
    let layers = (0..pack.layers())
        .map(|layer| pack.layer(layer).map_err(|error| error.to_string()))
        .collect::<Result<_, _>>()?;
    let place = match head.sketched() {
        true => pack.head().map_err(|error| error.to_string())?,
        false => None,
    };
    let quality = pack.quality().map_err(|error| error.to_string())?;
    Ok(PackedParts {
        layers,
        head: place.map(|place| (head, place)),
        quality,
        source_sha256: digest(pack.source_sha256),
    })
}

/// A SHA-256 from its hexadecimal digits.
fn digest(hex: &str) -> Option<[u8; 32]> {
    let mut out = [0; 32];
    for (byte, digits) in out.iter_mut().zip(hex.as_bytes().as_chunks::<2>().0) {
        let digits = std::str::from_utf8(digits).ok()?;
        *byte = u8::from_str_radix(digits, 16).ok()?;
    }
    Some(out)
}

impl Weights {
    /// Bytes of the matrices that a pass multiplies by.
    pub fn pass_bytes(&self) -> u64 {
        let mut used = vec![false; self.matrices.len()];
        for linear in self
            .steps
            .iter()
            .flat_map(|step| step.linears.iter().flatten())
        {
            used[linear.matrix.0 as usize] = true;
        }
        self.matrices
            .iter()
            .zip(used)
            .filter(|(_, used)| *used)
            .map(|(matrix, _)| matrix.bytes())
            .sum()
    }
}

/// The format that holds most bytes.
fn commonest(matrices: &[Matrix]) -> &'static str {
    quant::QuantType::ALL
        .iter()
        .max_by_key(|ty| {
            matrices
                .iter()
                .filter(|m| m.ty == **ty)
                .map(Matrix::bytes)
                .sum::<u64>()
        })
        .map_or("", |ty| ty.name())
}

/// What an architecture describes, collected.
#[derive(Default)]
pub struct Parts {
    /// Matrices, by id.
    pub matrices: Vec<Matrix>,
    /// Vectors, by id.
    pub vectors: Vec<Vector>,
    /// Steps, in order.
    pub steps: Vec<StepPlan>,
    embedding: Option<MatrixId>,
    rope_factors: Option<VectorId>,
}

impl Sink for Parts {
    fn matrix(&mut self, matrix: Matrix) -> MatrixId {
        self.matrices.push(Matrix {
            first: PieceId(u32::MAX),
            ..matrix
        });
        MatrixId(self.matrices.len() as u32 - 1)
    }

    fn vector(&mut self, vector: Vector) -> VectorId {
        self.vectors.push(vector);
        VectorId(self.vectors.len() as u32 - 1)
    }

    fn step(&mut self, step: StepPlan) {
        self.steps.push(step);
    }

    fn embedding(&mut self, matrix: MatrixId) {
        self.embedding = Some(matrix);
    }

    fn rope_factors(&mut self, vector: VectorId) {
        self.rope_factors = Some(vector);
    }
}

fn read_vectors(files: &[(PathBuf, u64)], vectors: &[Vector]) -> Result<Vectors, Error> {
    let opened: Vec<File> = files
        .iter()
        .map(|(path, _)| File::open(path).map_err(|error| Error::io(path, "open it", error)))
        .collect::<Result<_, _>>()?;
    let total = vectors.iter().map(|vector| vector.len as usize).sum();
    let mut out = Vectors {
        floats: Vec::with_capacity(total),
        starts: Vec::with_capacity(vectors.len() + 1),
    };
    let mut bytes = Vec::new();
    out.starts.push(0);
    for vector in vectors {
        let path = &files[usize::from(vector.file.0)].0;
        let len = vector
            .ty
            .row_bytes(vector.len as usize)
            .expect("the plan checked whole blocks");
        bytes.resize(len, 0);
        opened[usize::from(vector.file.0)]
            .read_exact_at(&mut bytes, vector.offset)
            .map_err(|error| Error::io(path, "read its norms", error))?;
        let start = out.floats.len();
        out.floats.resize(start + vector.len as usize, 0.0);
        quant::decode(vector.ty, &bytes, &mut out.floats[start..]);
        if let Some(bad) = out.floats[start..].iter().find(|x| !x.is_finite()) {
            let name = tensor_at(&files[0].0, usize::from(vector.file.0), vector.offset)?;
            return Err(Error::model(
                path,
                format_args!("tensor {name} holds {bad}; the file is damaged: download it again"),
            ));
        }
        out.starts.push(out.floats.len());
    }
    Ok(out)
}

/// The name of the tensor that begins at byte `offset` of the model's `file`-th shard, for messages: names aren't
/// kept.
fn tensor_at(path: &Path, file: usize, offset: u64) -> Result<String, Error> {
    Headers::open(path)?.with(|shards, _| {
        let found = shards[file].tensors().find(|t| t.offset == offset);
        Ok(found.map_or_else(
            || format!("at byte {offset}"),
            |tensor| tensor.name.to_owned(),
        ))
    })
}

fn map_header(path: &Path) -> Result<(PathBuf, u64, Mmap), Error> {
    // Asked before opening: opening a pipe would wait for its writer.
    let meta = std::fs::metadata(path).map_err(|error| Error::io(path, "open it", error))?;
    if !meta.is_file() {
        return Err(Error::model(
            path,
            "is not a regular file; name a .gguf file",
        ));
    }
    let file = File::open(path).map_err(|error| Error::io(path, "open it", error))?;
    let len = file
        .metadata()
        .map_err(|error| Error::io(path, "look at it", error))?
        .len();
    let mut mapped = HEADER_FIRST.min(len);
    loop {
        let map =
            map_start(&file, mapped).map_err(|error| Error::io(path, "map its header", error))?;
        match Gguf::parse(&map[..mapped as usize], len) {
            Ok(_) => return Ok((path.to_owned(), len, map)),
            Err(GgufError::NeedMore { .. }) if mapped < len => {
                mapped = mapped.saturating_mul(4).min(len)
            }
            Err(error) => return Err(Error::model(path, error)),
        }
    }
}

/// Maps the first `len` bytes of `file`. An empty file can't be mapped; a blank byte stands for it,
/// so that the parser's message for empty files is given.
fn map_start(file: &File, len: u64) -> std::io::Result<Mmap> {
    if len == 0 {
        return MmapOptions::new().len(1).map_anon()?.make_read_only();
    }
    // SAFETY: the map is only read. A file that another program truncates while its header is
    // mapped would raise SIGBUS, so the map is dropped as soon as the header has been read.
    unsafe { MmapOptions::new().len(len as usize).map(file) }
}

fn with_header<T>(
    (path, len, map): &(PathBuf, u64, Mmap),
    f: impl FnOnce(&Gguf<'_>) -> T,
) -> Result<T, Error> {
    Ok(f(
        &Gguf::parse(map, *len).map_err(|error| Error::model(path, error))?
    ))
}
