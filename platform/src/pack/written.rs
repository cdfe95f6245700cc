//! The tensors of a pack on their way into the file, one after the other.

use leanstream_core::pack::Order;
use leanstream_core::plan::Hyper;

use super::calibrate::Seen;
use super::columns::Columns;
use super::gate::GateRows;
use super::layout::{Content, Item, Layout};
use super::source::Source;
use super::{Progress, head, order, put, put_all, seal};
use crate::error::Error;
use crate::gguf_write::Writer;

/// The tensors on their way into the file.
pub(super) struct Written<'a> {
    source: &'a Source,
    layout: &'a Layout,
    hyper: &'a Hyper,
    seen: &'a [Seen],
    tokens: u32,
    order: Order,
    threads: usize,
    /// One matrix of the source.
    matrix: Vec<u8>,
    /// The gate of the layer that is written, where gates are sketched.
    gate: GateRows,
    /// The columns of layer `units_of`.
    columns: Columns,
    /// Source neuron of each of its units.
    units: Vec<u32>,
    units_of: Option<usize>,
    sketch_errors: Vec<f32>,
    lost: f64,
    total: f64,
}

impl<'a> Written<'a> {
    /// Nothing is written yet. `seen` is what the calibration found, with its tokens and the order that it gives.
    pub fn new(
        source: &'a Source,
        layout: &'a Layout,
        hyper: &'a Hyper,
        (seen, tokens, order): (&'a [Seen], u32, Order),
        threads: usize,
    ) -> Self {
        Self {
            source,
            layout,
            hyper,
            seen,
            tokens,
            order,
            threads,
            matrix: Vec::new(),
            gate: GateRows::default(),
            columns: Columns::default(),
            units: Vec::new(),
            units_of: None,
            sketch_errors: Vec::new(),
            lost: 0.0,
            total: 0.0,
        }
    }

    /// Relative L2 error of the down matrices so far.
    pub fn down_loss(&self) -> f64 {
        if self.total > 0.0 {
            (self.lost / self.total).sqrt()
        } else {
            0.0
        }
    }

    /// Relative L2 error of the gates' sketches so far.
    pub fn gate_loss(&self) -> f64 {
        self.gate.loss()
    }

    /// Writes the next tensor.
    ///
    /// # Errors
    /// What can't be read or written, a source that is damaged.
    pub fn item(
        &mut self,
        item: &Item,
        writer: &mut Writer,
        progress: &mut Progress<'_>,
    ) -> Result<(), Error> {
        match item.content {
            Content::Copy(tensor) => {
                let region = &self.source.tensors[tensor];
                self.source.copy(region, writer, |_| ())
            }
            Content::Permuted { tensor, layer } => self.permuted(tensor, layer, writer),
            Content::GateSketch(layer) => {
                self.turn_to(layer);
                let gate = self.layout.layers[layer].gate.as_ref();
                let gate = gate.expect("an item of it");
                self.gate.sketch(self.source, gate, &self.units, writer)
            }
            Content::GateCrcs(_) => {
                put_all(writer, self.gate.crcs.iter().map(|crc| crc.to_le_bytes()))
            }
            Content::Units(layer) => self.layer(layer, writer),
            Content::Scales(_) => put(writer, &self.columns.scales),
            Content::Mins(_) => put(writer, &self.columns.mins),
            Content::Order(layer) => {
                self.turn_to(layer);
                put_all(writer, self.units.iter().map(|n| n.to_le_bytes()))
            }
            Content::Stats(layer) => self.stats(layer, writer),
            Content::Sketch => {
                // The head needs room of its own.
                self.matrix = Vec::new();
                self.columns = Columns::default();
                self.gate.free();
                let head = self.layout.head.as_ref().expect("an item of it");
                let mut done = 0;
                self.sketch_errors = head::sketch(self.source, head, self.threads, writer, |n| {
                    done += n as u64;
                    progress("sketching the head", done, head.rows.bytes);
                })?;
                Ok(())
            }
            Content::SketchError => {
                put_all(writer, self.sketch_errors.iter().map(|x| x.to_le_bytes()))
            }
            Content::HeadUnits => {
                let head = self.layout.head.as_ref().expect("an item of it");
                let mut done = 0;
                head::units(self.source, head, writer, |n| {
                    done += n as u64;
                    progress("packing the head", done, head.rows.bytes);
                })
            }
        }
    }

    fn permuted(&mut self, tensor: usize, layer: usize, writer: &mut Writer) -> Result<(), Error> {
        self.turn_to(layer);
        let region = &self.source.tensors[tensor];
        self.source.read_whole(region, &mut self.matrix)?;
        // Rows of a matrix, values of a bias: there are `ff` of them.
        let row = self.matrix.len() / self.hyper.ff as usize;
        for &neuron in &self.units {
            put(writer, &self.matrix[neuron as usize * row..][..row])?;
        }
        Ok(())
    }

    /// Writes a layer's units; its columns and order stay for the items that follow.
    fn layer(&mut self, layer: usize, writer: &mut Writer) -> Result<(), Error> {
        self.turn_to(layer);
        let packed = &self.layout.layers[layer];
        let (region, ty) = &packed.down;
        let shape = (self.hyper.d as usize, self.hyper.ff as usize);
        self.source.read_whole(region, &mut self.matrix)?;
        self.columns
            .turn(&self.matrix, *ty, packed.how, shape)
            .map_err(|error| {
                Error::model(
                    self.source.path(),
                    format_args!(
                        "column {} of {} holds a weight that is no finite number; the file is damaged: download it again",
                        error.neuron, region.name
                    ),
                )
            })?;
        if !packed.how.is_moved() {
            self.lost += self.columns.lost;
        }
        self.total += self.columns.total;
        let up_bytes = packed.unit.up.map_or(0, |(_, bytes)| bytes as usize);
        if let Some(up) = &packed.up {
            self.source.read_whole(up, &mut self.matrix)?;
        }
        let column = packed.unit.down_bytes as usize;
        let mut unit = vec![0; packed.unit.unit_bytes() as usize];
        for &neuron in &self.units {
            let neuron = neuron as usize;
            let (rows, down) = unit.split_at_mut(packed.unit.down_at as usize);
            let (gate, up) = rows.split_at_mut(packed.unit.up_at as usize);
            gate.copy_from_slice(self.gate.row(neuron, gate.len()));
            up.copy_from_slice(&self.matrix[neuron * up_bytes..][..up_bytes]);
            down[..column].copy_from_slice(&self.columns.bytes[neuron * column..][..column]);
            seal(&mut unit, packed.unit.crc_at as usize);
            put(writer, &unit)?;
        }
        Ok(())
    }

    /// Share of tokens with the unit active, strength, norm: a row of each.
    fn stats(&self, layer: usize, writer: &mut Writer) -> Result<(), Error> {
        let seen = self.seen.get(layer);
        let units = || self.units.iter().map(|neuron| *neuron as usize);
        let norm = |neuron: usize| self.columns.norms[neuron];
        let share = units().map(|neuron| {
            seen.map_or(0.5, |seen| {
                (f64::from(seen.active[neuron]) / f64::from(self.tokens.max(1))) as f32
            })
        });
        put_all(writer, share.map(f32::to_le_bytes))?;
        let strength =
            units().map(|neuron| seen.map_or(1.0, |seen| seen.strength[neuron]) * norm(neuron));
        put_all(writer, strength.map(f32::to_le_bytes))?;
        put_all(writer, units().map(|neuron| norm(neuron).to_le_bytes()))
    }

    /// Orders the units of `layer`, unless it was done.
    fn turn_to(&mut self, layer: usize) {
        if self.units_of.replace(layer) == Some(layer) {
            return;
        }
        self.units = match (self.order, self.seen.get(layer)) {
            (Order::Frequency, Some(seen)) => order::by_frequency(&seen.active),
            (Order::Coactivation, Some(seen)) => order::by_coactivation(&seen.active, &seen.bits),
            _ => (0..self.hyper.ff).collect(),
        };
    }
}
