//! What stays in memory of a packed model beside its units: their order, what the calibration found,
//! and the scales of the columns that were moved out of blocks.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use leanstream_core::pack::{self, Down, PackedHead, PackedLayer, Place, SCALE_GROUP};
use leanstream_core::plan::Head;
use leanstream_core::quant::QuantType;
use leanstream_core::sparse::tables::Prior;

use super::head::HeadParts;
use crate::cpu::units::{Columns, Stored};
use crate::error::Error;
use crate::trace::Shape;

/// Rows of a round of the head, where no layer says how many units are chosen at once.
const ROUND: usize = 2048;

/// The packed layers of a model, or its head alone.
pub struct Packed {
    layers: Vec<PackedLayer>,
    d: usize,
    ff: usize,
    /// Source block of each unit `(layers, ff)`.
    blocks: Vec<u16>,
    /// Mean of `|up . x| * |down|` of each unit when it is active `(layers, ff)`.
    norms: Vec<f32>,
    priors: Vec<Prior>,
    /// Scales and minimums `(ff / 32, d)` of each layer that has them.
    halves: Vec<u16>,
    /// Where each layer's scales and minimums begin and end in `halves`.
    starts: Vec<[usize; 3]>,
    /// The head, where its sketch is used.
    head: Option<PackedHead>,
    head_parts: Option<HeadParts>,
    /// What says which units are used, in place of the gates.
    shape: Option<Shape>,
}

impl Packed {
    /// Reads it; of a head what its sketch needs.
    ///
    /// # Errors
    /// A file that can't be read, or an order, statistics or errors that make no sense.
    pub fn load(
        files: &[(PathBuf, u64)],
        layers: Vec<PackedLayer>,
        head: Option<(Head, PackedHead)>,
        d: u32,
    ) -> Result<Self, Error> {
        let opened: Vec<File> = files
            .iter()
            .map(|(path, _)| File::open(path).map_err(|error| Error::io(path, "open it", error)))
            .collect::<Result<_, _>>()?;
        let mut bytes = Vec::new();
        let read = |place: Place, bytes: &mut Vec<u8>| {
            bytes.resize(place.bytes as usize, 0);
            let file = usize::from(place.file.0);
            opened[file]
                .read_exact_at(bytes, place.offset)
                .map_err(|error| Error::io(&files[file].0, "read its packed layers", error))
        };
        let ff = match layers.first() {
            Some(layer) => layer.count as usize,
            None => head.map_or(0, |(_, place)| ROUND.min(place.count as usize)),
        };
        let units = layers.len() * ff;
        let halves = layers
            .iter()
            .flat_map(|layer| [layer.scales, layer.mins])
            .flatten()
            .map(|place| place.bytes as usize / 2)
            .sum();
        let mut packed = Self {
            d: d as usize,
            ff,
            blocks: Vec::with_capacity(units),
            norms: Vec::with_capacity(units),
            priors: Vec::with_capacity(units),
            halves: Vec::with_capacity(halves),
            starts: Vec::with_capacity(layers.len()),
            head: head.map(|(_, place)| place),
            head_parts: None,
            shape: None,
            layers: Vec::new(),
        };
        let mut seen = vec![0; ff.div_ceil(8)];
        for (number, layer) in layers.iter().enumerate() {
            let path = &files[usize::from(layer.units.file.0)].0;
            let damaged = |what: &str| {
                Error::model(
                    path,
                    format_args!("layer {number}: {what}; pack the model again"),
                )
            };
            read(layer.order, &mut bytes)?;
            let neurons = bytes
                .chunks_exact(4)
                .map(|b| i32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            pack::check_order(number as u32, neurons.clone(), &mut seen)
                .map_err(|error| Error::model(path, error))?;
            packed
                .blocks
                .extend(neurons.map(|neuron| (neuron as u32 / SCALE_GROUP) as u16));
            read(layer.stats, &mut bytes)?;
            let mut floats = bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            for prior in floats.by_ref().take(ff) {
                if !(0.0..=1.0).contains(&prior) {
                    return Err(damaged("a share of tokens outside 0 to 1"));
                }
                packed.priors.push(Prior::new(prior));
            }
            for norm in floats.take(ff) {
                if !(norm.is_finite() && norm >= 0.0) {
                    return Err(damaged("an importance that is no size"));
                }
                packed.norms.push(norm);
            }
            let mut start = [packed.halves.len(); 3];
            for (index, place) in [layer.scales, layer.mins].into_iter().enumerate() {
                if let Some(place) = place {
                    read(place, &mut bytes)?;
                    let halves = bytes
                        .chunks_exact(2)
                        .map(|b| u16::from_le_bytes([b[0], b[1]]));
                    packed.halves.extend(halves);
                }
                start[index + 1] = packed.halves.len();
            }
            packed.starts.push(start);
        }
        if let Some((head, place)) = head {
            read(place.sketch_error, &mut bytes)?;
            let floats = bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
            let mut errors = Vec::with_capacity(place.count as usize);
            errors.extend(floats);
            if let Some(row) = errors.iter().position(|e| !(e.is_finite() && *e >= 0.0)) {
                return Err(Error::model(
                    &files[usize::from(place.sketch_error.file.0)].0,
                    format_args!(
                        "row {row} of output.sketch_error is no size; pack the model again"
                    ),
                ));
            }
            packed.head_parts = Some(HeadParts {
                head,
                place,
                errors,
            });
        }
        packed.layers = layers;
        Ok(packed)
    }

    /// Bytes held.
    pub fn bytes(&self) -> u64 {
        let halves = (self.blocks.capacity() + self.halves.capacity()) * 2;
        let norms = self.norms.capacity() * 4;
        let priors = self.priors.capacity() * size_of::<Prior>();
        let layers = self.layers.capacity() * (size_of::<PackedLayer>() + size_of::<[usize; 3]>());
        let parts = self.head_parts.as_ref();
        let errors = parts.map_or(0, |parts| parts.errors.capacity() * 4);
        let shape = self.shape.as_ref().map_or(0, Shape::bytes);
        (halves + norms + priors + layers + errors) as u64 + shape
    }

    /// Lets `shape` say which units decoded tokens use, and what a calibration would have found.
    pub fn stand_in(&mut self, shape: Shape) {
        let units = (0..self.layers.len() as u32)
            .flat_map(|layer| (0..self.ff as u32).map(move |unit| (layer, unit)));
        for ((layer, unit), (prior, norm)) in units.zip(self.priors.iter_mut().zip(&mut self.norms))
        {
            *prior = Prior::new(shape.prior(layer, unit));
            *norm = shape.mean(layer, unit);
        }
        self.shape = Some(shape);
    }

    /// What says which units are used, in place of the gates.
    pub fn shape(&self) -> Option<&Shape> {
        self.shape.as_ref()
    }

    /// The layers.
    pub fn layers(&self) -> &[PackedLayer] {
        &self.layers
    }

    /// Whether the gates' products are estimates, and units begin with exact rows.
    pub fn sketched(&self) -> bool {
        self.layers.iter().any(|layer| layer.layout.gate.is_some())
    }

    /// Units of a layer; where only the head is packed, most of its rows that are chosen at once.
    pub fn ff(&self) -> usize {
        self.ff
    }

    /// The head, where its sketch is used.
    pub fn head(&self) -> Option<&PackedHead> {
        self.head.as_ref()
    }

    /// Rows of that head that are read one by one.
    pub fn head_rows(&self) -> usize {
        self.head.map_or(0, |head| head.count as usize)
    }

    /// Where the units of all layers and of the head lie.
    pub fn unit_places(&self) -> Vec<Place> {
        let layers = self.layers.iter().map(|layer| layer.units);
        layers.chain(self.head.map(|head| head.units)).collect()
    }

    /// Units of all layers and of the head.
    pub fn units(&self) -> usize {
        self.layers.len() * self.ff + self.head_rows()
    }

    /// Bytes of the largest unit.
    pub fn unit_bytes_max(&self) -> u32 {
        let head = self.head.map(|head| head.unit_bytes);
        let layers = self.layers.iter().map(|l| l.unit_bytes);
        layers.chain(head).max().unwrap_or(0)
    }

    /// What the head's sketch needs, for the run to go on with.
    pub fn take_head(&mut self) -> Option<HeadParts> {
        self.head_parts.take()
    }

    /// Share of the calibration's tokens that used each unit `(layers, ff)`, until the store has them.
    pub fn priors(&self) -> impl Iterator<Item = f32> + '_ {
        self.priors.iter().map(Prior::share)
    }

    /// The calibrated use of all units, for the store to go on with.
    pub fn take_priors(&mut self) -> Vec<Prior> {
        std::mem::take(&mut self.priors)
    }

    /// Source block of each unit of a layer `(ff)`.
    pub fn blocks(&self, layer: u32) -> &[u16] {
        &self.blocks[layer as usize * self.ff..][..self.ff]
    }

    /// Mean of `|up . x| * |down|` of each unit of a layer when it is active `(ff)`.
    pub fn norms(&self, layer: u32) -> &[f32] {
        &self.norms[layer as usize * self.ff..][..self.ff]
    }

    /// What the down columns of a layer share.
    pub fn columns(&self, layer: u32) -> Columns<'_> {
        let [scales, mins, end] = self.starts[layer as usize];
        Columns::new(
            stored(self.layers[layer as usize].down),
            self.d,
            &self.halves[scales..mins],
            &self.halves[mins..end],
        )
    }
}

/// How the kernels call it.
fn stored(down: Down) -> Stored {
    match down {
        Down::Moved {
            ty: QuantType::Q8_0,
        } => Stored::Moved8,
        Down::Moved {
            ty: QuantType::Q4_0 | QuantType::Q4_1,
        } => Stored::Moved4,
        Down::Moved {
            ty: QuantType::Q5_0 | QuantType::Q5_1,
        } => Stored::Moved5,
        Down::Moved { ty } | Down::Rows { ty } => Stored::Row(ty),
    }
}
