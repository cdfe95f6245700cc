//! The gate in few bits: a sketch of each row, and a checksum of the sketch.

use leanstream_core::quant::decode;

use super::layout::Gate;
use super::quantize::quantize;
use super::source::Source;
use super::write_error;
use crate::error::Error;
use crate::gguf_write::Writer;

/// The gate of one layer (up's matrix in an ungated network), with room for those of others.
#[derive(Default)]
pub struct GateRows {
    /// As the source has it, by source neuron.
    bytes: Vec<u8>,
    /// CRC32C of each sketch row, in pack order.
    pub crcs: Vec<u32>,
    /// Sums of squares of what sketches lose, and of the rows, over all layers.
    lost: f64,
    total: f64,
}

impl GateRows {
    /// Reads the gate, and writes its sketch in the order of `units`.
    ///
    /// # Errors
    /// What can't be read or written, or a row that isn't finite.
    pub fn sketch(
        &mut self,
        source: &Source,
        gate: &Gate,
        units: &[u32],
        writer: &mut Writer,
    ) -> Result<(), Error> {
        source.read_whole(&gate.rows, &mut self.bytes)?;
        let row_bytes = self.bytes.len() / units.len();
        let d = row_bytes / gate.ty.block_bytes() * gate.ty.block_len();
        let coarse_bytes = gate.sketch.row_bytes(d).expect("checked for the layout");
        let (mut row, mut again) = (vec![0.0; d], vec![0.0; d]);
        let mut coarse = vec![0; coarse_bytes];
        self.crcs.clear();
        for &neuron in units {
            decode(gate.ty, self.row(neuron as usize, row_bytes), &mut row);
            if !row.iter().all(|x| x.is_finite()) {
                return Err(Error::model(
                    source.path(),
                    format_args!(
                        "row {neuron} of {} holds a weight that is no finite number; the file is damaged: download it again",
                        gate.rows.name
                    ),
                ));
            }
            quantize(gate.sketch, &row, &mut coarse);
            decode(gate.sketch, &coarse, &mut again);
            for (x, y) in row.iter().zip(&again) {
                self.lost += (f64::from(*x) - f64::from(*y)).powi(2);
                self.total += f64::from(*x).powi(2);
            }
            self.crcs.push(crc32c::crc32c(&coarse));
            writer.write(&coarse).map_err(write_error)?;
        }
        Ok(())
    }

    /// The exact row of a source's neuron, of the layer that was sketched last; nothing of 0 bytes.
    pub fn row(&self, neuron: usize, bytes: usize) -> &[u8] {
        &self.bytes[neuron * bytes..][..bytes]
    }

    /// Relative L2 error of the sketches.
    pub fn loss(&self) -> f64 {
        if self.total > 0.0 {
            (self.lost / self.total).sqrt()
        } else {
            0.0
        }
    }

    /// Gives the memory back.
    pub fn free(&mut self) {
        self.bytes = Vec::new();
    }
}
