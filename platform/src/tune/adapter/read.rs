//! Reading an adapter: its header is checked when it is opened, its matrices are read one by one.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use leanstream_core::gguf::{Gguf, Tensor};
use leanstream_core::quant::{self, QuantType};

use crate::error::Error;
use crate::run::model::Headers;

/// Bytes read and decoded at once.
const PART: usize = 64 << 10;

/// The way out of a file that is damaged.
const AGAIN: &str = "download or convert the adapter again";

/// An open adapter.
#[derive(Debug)]
pub struct Adapter {
    path: PathBuf,
    file: File,
    arch: String,
    alpha: f32,
    pairs: Vec<Pair>,
}

/// The adapter's matrices for one of the model's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Pair {
    /// The tensor of the model that they adapt.
    pub name: String,
    /// Rows of `A`, columns of `B`; at least 1.
    pub rank: u32,
    /// Columns of `A`.
    pub inputs: u32,
    /// Rows of `B`.
    pub outputs: u32,
    a: Place,
    b: Place,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Place {
    ty: QuantType,
    offset: u64,
}

impl Adapter {
    /// Opens a file and checks that it is a whole adapter.
    ///
    /// # Errors
    /// [`Error::Model`] for a file of another kind or a damaged one; what can't be read.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let headers = Headers::open(path)?;
        let (arch, alpha, pairs) = headers.with(|shards, _| {
            let [gguf] = shards else {
                return Err(Error::model(path, "an adapter in shards is not supported"));
            };
            let (arch, alpha) = about(gguf).map_err(|why| Error::model(path, why))?;
            let pairs = pairs(gguf).map_err(|why| Error::model(path, why))?;
            Ok((arch, alpha, pairs))
        })?;
        Ok(Self {
            path: path.to_owned(),
            file: File::open(path).map_err(|error| Error::io(path, "open it", error))?,
            arch,
            alpha,
            pairs,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `general.architecture` of the model that it is for.
    pub fn arch(&self) -> &str {
        &self.arch
    }

    /// `adapter.lora.alpha`, 0 where there is none.
    pub fn alpha(&self) -> f32 {
        self.alpha
    }

    /// What it adapts, sorted by name; at least one.
    pub fn pairs(&self) -> &[Pair] {
        &self.pairs
    }

    /// By what `B A` is multiplied when the adapter is applied with `scale`.
    ///
    /// # Errors
    /// That is no finite number.
    pub fn factor(&self, pair: &Pair, scale: f32) -> Result<f32, Error> {
        let factor = if self.alpha == 0.0 {
            scale
        } else {
            scale * self.alpha / pair.rank as f32
        };
        if factor.is_finite() {
            return Ok(factor);
        }
        Err(self.misplaced(
            pair,
            format_args!(
                "has a scale of {scale} times alpha, which is no number: give a smaller scale"
            ),
        ))
    }

    /// Refuses a model of another architecture.
    ///
    /// # Errors
    /// [`Error::Model`] that names both.
    pub fn check_arch(&self, arch: &str, model: &Path) -> Result<(), Error> {
        if self.arch == arch {
            return Ok(());
        }
        Err(Error::model(
            &self.path,
            format_args!(
                "the adapter is for models of architecture {}, and {} is {arch}: give the model that it was made from",
                self.arch,
                model.display()
            ),
        ))
    }

    /// Refuses a matrix of another shape (outputs, inputs) than the pair's.
    ///
    /// # Errors
    /// [`Error::Model`] that names both.
    pub fn check_shape(
        &self,
        pair: &Pair,
        (outputs, inputs): (u64, u64),
        model: &Path,
    ) -> Result<(), Error> {
        if (u64::from(pair.outputs), u64::from(pair.inputs)) == (outputs, inputs) {
            return Ok(());
        }
        Err(Error::model(
            &self.path,
            format_args!(
                "the adapter's {} is for {} rows of {}, and {} has {outputs} rows of {inputs}: give the model that it was made from",
                pair.name,
                pair.outputs,
                pair.inputs,
                model.display()
            ),
        ))
    }

    /// The error of a tensor that can't be adapted in `model`.
    pub fn misplaced(&self, pair: &Pair, why: impl std::fmt::Display) -> Error {
        Error::model(
            &self.path,
            format_args!("the adapter's {} {why}", pair.name),
        )
    }

    /// The error of a tensor that the model has a place for, but not as it is run: no file is damaged.
    pub fn unsuited(&self, pair: &Pair, why: impl std::fmt::Display) -> Error {
        Error::Usage(format!(
            "{}: the adapter's {} {why}",
            self.path.display(),
            pair.name
        ))
    }

    /// Reads `A` (rank, inputs).
    ///
    /// # Errors
    /// A value that isn't finite, what can't be read.
    ///
    /// # Panics
    /// `out` has another length.
    pub fn read_a(&self, pair: &Pair, out: &mut [f32]) -> Result<(), Error> {
        assert_eq!(
            out.len() as u64,
            u64::from(pair.rank) * u64::from(pair.inputs)
        );
        self.read(pair, 'a', pair.a, out)
    }

    /// Reads `B` (outputs, rank).
    ///
    /// # Errors
    /// As [`Adapter::read_a`].
    ///
    /// # Panics
    /// `out` has another length.
    pub fn read_b(&self, pair: &Pair, out: &mut [f32]) -> Result<(), Error> {
        assert_eq!(
            out.len() as u64,
            u64::from(pair.outputs) * u64::from(pair.rank)
        );
        self.read(pair, 'b', pair.b, out)
    }

    fn read(&self, pair: &Pair, letter: char, place: Place, out: &mut [f32]) -> Result<(), Error> {
        let blocks = PART / place.ty.block_bytes();
        let mut bytes = vec![0; blocks * place.ty.block_bytes()];
        let mut at = place.offset;
        for values in out.chunks_mut(blocks * place.ty.block_len()) {
            let len = values.len() / place.ty.block_len() * place.ty.block_bytes();
            let bytes = &mut bytes[..len];
            self.file
                .read_exact_at(bytes, at)
                .map_err(|error| Error::io(&self.path, "read its matrices", error))?;
            quant::decode(place.ty, bytes, values);
            if let Some(bad) = values.iter().find(|x| !x.is_finite()) {
                return Err(Error::model(
                    &self.path,
                    format_args!(
                        "tensor {}.lora_{letter} has the value {bad}: the file is damaged; {AGAIN}",
                        pair.name
                    ),
                ));
            }
            at += len as u64;
        }
        Ok(())
    }
}

/// Architecture and alpha.
fn about(gguf: &Gguf<'_>) -> Result<(String, f32), String> {
    let text = |key: &str| gguf.get(key).and_then(|value| value.as_str());
    match text("general.type") {
        Some("adapter") => {}
        Some(other) => {
            return Err(format!(
                "it is no adapter (its general.type is '{}'): give a LoRA adapter in GGUF format",
                other.escape_debug()
            ));
        }
        None => {
            return Err(
                "it is no adapter (it has no general.type): give a LoRA adapter in GGUF format"
                    .into(),
            );
        }
    }
    match text("adapter.type") {
        Some("lora") => {}
        other => {
            return Err(format!(
                "adapters of type '{}' are not supported (adapter.type): give a LoRA adapter",
                other.unwrap_or_default().escape_debug()
            ));
        }
    }
    if gguf.get("adapter.alora.invocation_tokens").is_some() {
        return Err(
            "an adapter that is activated by tokens (aLoRA) is not supported: give one that always applies".into(),
        );
    }
    let arch = text("general.architecture")
        .ok_or_else(|| format!("the metadata has no general.architecture; {AGAIN}"))?;
    let key = "adapter.lora.alpha";
    let alpha = match gguf.get(key) {
        None => 0.0,
        Some(value) => value
            .as_f32()
            .filter(|alpha| alpha.is_finite())
            .ok_or_else(|| format!("{key} is not a finite number; {AGAIN}"))?,
    };
    Ok((arch.to_owned(), alpha))
}

/// The tensors by what they adapt.
fn pairs(gguf: &Gguf<'_>) -> Result<Vec<Pair>, String> {
    let mut found: BTreeMap<&str, [Option<Tensor<'_>>; 2]> = BTreeMap::new();
    for tensor in gguf.tensors() {
        let half = [".lora_a", ".lora_b"]
            .into_iter()
            .enumerate()
            .find_map(|(half, suffix)| Some((tensor.name.strip_suffix(suffix)?, half)));
        let Some((name, half)) = half else {
            return Err(format!(
                "tensor {} is neither .lora_a nor .lora_b, and replacing weights is not supported: make the adapter \
                 without it",
                tensor.name
            ));
        };
        found.entry(name).or_default()[half] = Some(tensor);
    }
    if found.is_empty() {
        return Err(format!("it has no tensors, so it adapts nothing; {AGAIN}"));
    }
    found
        .into_iter()
        .map(|(name, [a, b])| {
            let missing = |letter| format!("tensor {name}.lora_{letter} is missing; {AGAIN}");
            pair(
                name,
                &a.ok_or_else(|| missing('a'))?,
                &b.ok_or_else(|| missing('b'))?,
            )
        })
        .collect()
}

fn pair(name: &str, a: &Tensor<'_>, b: &Tensor<'_>) -> Result<Pair, String> {
    let shape = |tensor: &Tensor<'_>| {
        (tensor.n_dims <= 2)
            .then(|| {
                Some((
                    u32::try_from(tensor.rows()).ok()?,
                    u32::try_from(tensor.cols()).ok()?,
                ))
            })
            .flatten()
            .ok_or_else(|| {
                format!(
                    "tensor {} is no matrix of a possible size; {AGAIN}",
                    tensor.name
                )
            })
    };
    let ((rank, inputs), (outputs, b_rank)) = (shape(a)?, shape(b)?);
    if name == "token_embd.weight" {
        return Err(format!(
            "tensor {name}.lora_a adapts the embedding, which is not supported: make the adapter without it"
        ));
    }
    if rank != b_rank {
        return Err(format!(
            "tensor {} has {rank} rows, but {} has rows of {b_rank}; both should be the rank; {AGAIN}",
            a.name, b.name
        ));
    }
    let place = |tensor: &Tensor<'_>| {
        let ty = tensor.ty.quant().ok_or_else(|| {
            format!(
                "tensor {} holds {}, which are no weights; {AGAIN}",
                tensor.name, tensor.ty
            )
        })?;
        Ok::<_, String>(Place {
            ty,
            offset: tensor.offset,
        })
    };
    Ok(Pair {
        name: name.to_owned(),
        rank,
        inputs,
        outputs,
        a: place(a)?,
        b: place(b)?,
    })
}
