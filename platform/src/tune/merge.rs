//! Merging adapters into a model: `W + scale * alpha / rank * B A` in each adapted matrix' own type, all
//! else as it is.
//!
//! A few rows are held at a time, and the adapters of one matrix.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;

use leanstream_core::gguf::Element;
use leanstream_core::quant::{self, QuantType};

use crate::error::{Error, refuse_input, refuse_special};
use crate::gguf_write::{ALIGNMENT_MAX, Header, Writer};
use crate::pack::quantize::{INSTEAD, encodes, quantize};
use crate::pack::source::{Region, Source};
use crate::pack::{Progress, write_error};
use crate::run::lora::Use;
use crate::run::model::Headers;
use crate::tune::adapter::{Adapter, Pair};

/// Weights that are held at once as f32.
const WEIGHTS: usize = 1 << 20;

/// How adapters are merged.
#[derive(Clone, Copy, Debug)]
pub struct Options<'a> {
    /// The adapters, at least one.
    pub uses: &'a [Use],
    /// Type of the merged matrices; `None` keeps that of each.
    pub ty: Option<QuantType>,
    /// Threads, at least 1. The file doesn't depend on them.
    pub threads: usize,
}

/// What came of it.
#[derive(Clone, PartialEq, Debug)]
pub struct Report {
    /// Length of the new model.
    pub bytes: u64,
    /// Matrices that the adapters changed.
    pub merged: usize,
    /// By how much they did: the L2 norm of the change over that of the result.
    pub change: f64,
    /// What storing the result lost: the L2 norm of the error over that of the result.
    pub loss: f64,
    /// Types that nothing is quantized to, and how many matrices of them became Q8_0 for that.
    pub instead: Vec<(QuantType, usize)>,
    /// Whether one of the matrices has fewer bits than Q8_0 would give it.
    pub fewer: bool,
}

/// Squared norms.
#[derive(Clone, Copy, Default, Debug)]
struct Sums {
    result: f64,
    change: f64,
    error: f64,
}

/// An adapter's part of a matrix, read.
struct Thin {
    rank: usize,
    factor: f32,
    /// (rank, inputs)
    a: Vec<f32>,
    /// (outputs, rank)
    b: Vec<f32>,
}

/// The adapters of a matrix, by its number among the source's tensors.
type Merges<'a> = BTreeMap<usize, Vec<(&'a Adapter, &'a Pair, f32)>>;

/// Merges adapters into the model at `path` and writes it to `out`. A file of that name is replaced
/// when the new one is complete, and not before.
///
/// # Errors
/// Files that aren't what they should be or don't belong together, an output that is an input, weights
/// that aren't finite, what can't be read or written, a signal.
pub fn merge(
    path: &Path,
    out: &Path,
    options: &Options<'_>,
    progress: &mut Progress<'_>,
) -> Result<Report, Error> {
    refuse_special(out)?;
    let headers = Headers::open(path)?;
    let inputs = headers.files().map(|(path, _)| path);
    refuse_input(
        out,
        inputs.chain(options.uses.iter().map(|given| given.path.as_path())),
    )?;
    let source = Source::open(&headers)?;
    let arch = arch(&headers)?;
    let adapters = options
        .uses
        .iter()
        .map(|given| {
            let adapter = Adapter::open(&given.path)?;
            adapter.check_arch(&arch, source.path())?;
            Ok((adapter, given.scale))
        })
        .collect::<Result<Vec<_>, Error>>()?;
    let merges = place(&adapters, &source)?;
    let mut instead = BTreeMap::<&str, (QuantType, usize)>::new();
    let types = types(&source, &merges, options.ty, &mut instead)?;
    let header = headers.with(|shards, _| {
        if shards[0].alignment() > ALIGNMENT_MAX {
            return Err(Error::model(
                source.path(),
                "its general.alignment can't be meant",
            ));
        }
        let mut header = Header::like(&shards[0], |key| !key.starts_with("split."));
        for (tensor, ty) in source.tensors.iter().zip(&types) {
            header.tensor(&tensor.name, *ty, &tensor.dims);
        }
        Ok(header)
    })?;
    drop(headers);
    let mut written = Written {
        source: &source,
        writer: header.create(out).map_err(write_error)?,
        threads: options.threads.max(1),
        passed: Passed {
            progress,
            bytes: 0,
            all: source.bytes,
        },
        sums: Sums::default(),
    };
    for (number, (tensor, ty)) in source.tensors.iter().zip(&types).enumerate() {
        match (merges.get(&number), ty) {
            (Some(merge), Element::Quant(ty)) => written.merge(tensor, *ty, merge)?,
            _ => written.copy(tensor)?,
        }
    }
    let Written { writer, sums, .. } = written;
    let share = |part: f64| {
        if sums.result > 0.0 {
            (part / sums.result).sqrt()
        } else {
            0.0
        }
    };
    Ok(Report {
        bytes: writer.finish().map_err(write_error)?,
        merged: merges.len(),
        change: share(sums.change),
        loss: share(sums.error),
        instead: instead.into_values().collect(),
        fewer: merges.keys().any(|number| fewer(types[*number])),
    })
}

/// Whether a type has fewer bits than Q8_0.
fn fewer(ty: Element) -> bool {
    let bytes = |ty: QuantType| ty.row_bytes(256);
    ty.quant()
        .is_some_and(|ty| bytes(ty) < bytes(QuantType::Q8_0))
}

/// The model's architecture.
fn arch(headers: &Headers) -> Result<String, Error> {
    let (path, _) = headers.files().next().expect("a model has a file");
    headers.with(|shards, _| {
        if shards[0].get("lean.version").is_some() {
            return Err(Error::model(
                path,
                "is a pack, whose neurons are laid out anew; merge into the GGUF file that it was made from, and pack \
                 the result",
            ));
        }
        let arch = shards[0].get("general.architecture").and_then(|arch| arch.as_str());
        arch.map(str::to_owned).ok_or_else(|| {
            Error::model(path, "the metadata has no general.architecture; give a model")
        })
    })
}

/// Finds the matrix of every pair that changes one.
fn place<'a>(adapters: &'a [(Adapter, f32)], source: &Source) -> Result<Merges<'a>, Error> {
    let model = source.path();
    let mut merges = Merges::new();
    for (adapter, scale) in adapters {
        for pair in adapter.pairs() {
            let found = source
                .tensors
                .iter()
                .position(|tensor| tensor.name == pair.name);
            let Some(number) = found else {
                return Err(adapter.misplaced(
                    pair,
                    format_args!(
                        "is for a tensor that {} doesn't have: give the model that the adapter was made from",
                        model.display()
                    ),
                ));
            };
            let tensor = &source.tensors[number];
            let [inputs, outputs] = tensor.dims[..] else {
                return Err(adapter.misplaced(
                    pair,
                    format_args!("is for a tensor that is no matrix in {}", model.display()),
                ));
            };
            adapter.check_shape(pair, (outputs, inputs), model)?;
            let factor = adapter.factor(pair, *scale)?;
            // At a scale of 0 it changes nothing.
            if factor != 0.0 {
                merges
                    .entry(number)
                    .or_default()
                    .push((adapter, pair, factor));
            }
        }
    }
    Ok(merges)
}

/// Types of the new tensors.
fn types(
    source: &Source,
    merges: &Merges<'_>,
    wanted: Option<QuantType>,
    instead: &mut BTreeMap<&str, (QuantType, usize)>,
) -> Result<Vec<Element>, Error> {
    let of = |(number, tensor): (usize, &Region)| {
        if !merges.contains_key(&number) {
            return Ok(tensor.ty);
        }
        let Some(own) = tensor.ty.quant() else {
            return Err(Error::model(
                source.path(),
                format_args!(
                    "tensor {} holds {}, which are no weights",
                    tensor.name, tensor.ty
                ),
            ));
        };
        let ty = match wanted {
            Some(ty) => ty,
            None if encodes(own) => own,
            None => {
                instead.entry(own.name()).or_insert((own, 0)).1 += 1;
                INSTEAD
            }
        };
        if !tensor.dims[0].is_multiple_of(ty.block_len() as u64) {
            return Err(Error::Usage(format!(
                "--type {}: the rows of {} have {} values, and its blocks {}: choose another type, such as q8_0 or f16",
                ty.name().to_ascii_lowercase(),
                tensor.name,
                tensor.dims[0],
                ty.block_len()
            )));
        }
        Ok(Element::Quant(ty))
    };
    source.tensors.iter().enumerate().map(of).collect()
}

/// The model on its way into the file.
struct Written<'a, 'p> {
    source: &'a Source,
    writer: Writer,
    threads: usize,
    passed: Passed<'a, 'p>,
    sums: Sums,
}

/// How far it is, for who wants to see it.
struct Passed<'a, 'p> {
    progress: &'a mut Progress<'p>,
    bytes: u64,
    all: u64,
}

impl Passed<'_, '_> {
    fn add(&mut self, bytes: usize) {
        self.bytes += bytes as u64;
        (self.progress)("merging", self.bytes, self.all);
    }
}

impl Written<'_, '_> {
    /// A tensor as it is.
    fn copy(&mut self, tensor: &Region) -> Result<(), Error> {
        self.source
            .copy(tensor, &mut self.writer, |bytes| self.passed.add(bytes))
    }

    /// A matrix with its adapters.
    fn merge(
        &mut self,
        tensor: &Region,
        ty: QuantType,
        merge: &[(&Adapter, &Pair, f32)],
    ) -> Result<(), Error> {
        let own = tensor.ty.quant().expect("only weights are merged");
        let [cols, rows] = [tensor.dims[0] as usize, tensor.dims[1] as usize];
        let row_bytes = |ty: QuantType| ty.row_bytes(cols).expect("whole blocks were checked");
        let (from_bytes, to_bytes) = (row_bytes(own), row_bytes(ty));
        let thins = merge
            .iter()
            .map(|(adapter, pair, factor)| {
                let rank = pair.rank as usize;
                let (mut a, mut b) = (vec![0.0; rank * cols], vec![0.0; rows * rank]);
                adapter.read_a(pair, &mut a)?;
                adapter.read_b(pair, &mut b)?;
                Ok(Thin {
                    rank,
                    factor: *factor,
                    a,
                    b,
                })
            })
            .collect::<Result<Vec<_>, Error>>()?;
        let held = (WEIGHTS / cols).clamp(1, rows);
        let (mut from, mut to) = (vec![0; held * from_bytes], vec![0; held * to_bytes]);
        let mut sums = vec![Sums::default(); held];
        for first in (0..rows).step_by(held) {
            let count = held.min(rows - first);
            let from = &mut from[..count * from_bytes];
            self.source
                .read(tensor, (first * from_bytes) as u64, from)?;
            let (from, to, sums) = (&*from, &mut to[..count * to_bytes], &mut sums[..count]);
            let each = count.div_ceil(self.threads);
            let thins = &thins;
            thread::scope(|scope| {
                let parts = from
                    .chunks(each * from_bytes)
                    .zip(to.chunks_mut(each * to_bytes))
                    .zip(sums.chunks_mut(each));
                for (part, ((from, to), sums)) in parts.enumerate() {
                    let work = move || {
                        let mut room = vec![0.0; 3 * cols];
                        let rows = from
                            .chunks_exact(from_bytes)
                            .zip(to.chunks_exact_mut(to_bytes));
                        for (i, ((from, to), sums)) in rows.zip(sums).enumerate() {
                            let row = first + part * each + i;
                            *sums = merge_row((own, from), (ty, to), thins, row, &mut room);
                        }
                    };
                    // The last part is this thread's own.
                    if (part + 1) * each < count {
                        scope.spawn(work);
                    } else {
                        work();
                    }
                }
            });
            for (i, row) in sums.iter().enumerate() {
                self.check(tensor, ty, first + i, row)?;
                self.sums.result += row.result;
                self.sums.change += row.change;
                self.sums.error += row.error;
            }
            self.writer.write(to).map_err(write_error)?;
            self.passed.add(from.len());
        }
        Ok(())
    }

    /// Refuses a row whose weights aren't finite, before or after.
    fn check(&self, tensor: &Region, ty: QuantType, row: usize, sums: &Sums) -> Result<(), Error> {
        let name = &tensor.name;
        if !sums.result.is_finite() {
            return Err(Error::model(
                self.source.path(),
                format_args!(
                    "row {row} of tensor {name} has a value that isn't finite once the adapter is merged: the model is \
                     damaged (leanstream verify --blocks), or the adapter's scale is too large"
                ),
            ));
        }
        if !sums.error.is_finite() {
            return Err(Error::Runtime(format!(
                "row {row} of tensor {name} has a value that {ty} can't hold: give --type f32, or a smaller scale"
            )));
        }
        Ok(())
    }
}

/// One row with what the adapters add; `room` is three rows of floats.
fn merge_row(
    (own, from): (QuantType, &[u8]),
    (ty, to): (QuantType, &mut [u8]),
    thins: &[Thin],
    row: usize,
    room: &mut [f32],
) -> Sums {
    let cols = room.len() / 3;
    let (weights, rest) = room.split_at_mut(cols);
    let (change, back) = rest.split_at_mut(cols);
    quant::decode(own, from, weights);
    change.fill(0.0);
    for thin in thins {
        let b = &thin.b[row * thin.rank..(row + 1) * thin.rank];
        for (b, a) in b.iter().zip(thin.a.chunks_exact(cols)) {
            let b = thin.factor * b;
            for (change, a) in change.iter_mut().zip(a) {
                *change += b * a;
            }
        }
    }
    for (weight, change) in weights.iter_mut().zip(&*change) {
        *weight += change;
    }
    let mut sums = Sums::default();
    let square = |x: f32| f64::from(x) * f64::from(x);
    for (weight, change) in weights.iter().zip(&*change) {
        sums.result += square(*weight);
        sums.change += square(*change);
    }
    // Nothing is quantized that isn't finite; the caller sees the sum.
    if sums.result.is_finite() {
        quantize(ty, weights, to);
        quant::decode(ty, to, back);
        for (weight, back) in weights.iter().zip(&*back) {
            sums.error += square(weight - back);
        }
    }
    sums
}
