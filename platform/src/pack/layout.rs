//! Which tensors a pack has, in which order, and where each gets its bytes.

use leanstream_core::gguf::Element;
use leanstream_core::pack::{self, Down, SCALE_GROUP, UnitLayout};
use leanstream_core::plan::Hyper;
use leanstream_core::quant::QuantType;

use super::Gates;
use super::columns::Columns;
use super::source::{Region, Source};
use crate::error::Error;

/// What a tensor of the pack is made from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Content {
    /// The source's tensor of this number, as it is.
    Copy(usize),
    /// The source's tensor of this number, its rows in the order of the layer's units.
    Permuted {
        /// Number among the source's tensors.
        tensor: usize,
        /// The layer.
        layer: usize,
    },
    /// The gate of a layer in few bits.
    GateSketch(usize),
    /// A checksum of each of its rows. Follows the sketch.
    GateCrcs(usize),
    /// The units of a layer. The four below follow.
    Units(usize),
    /// Scales of its moved columns.
    Scales(usize),
    /// Their minimums.
    Mins(usize),
    /// Its order.
    Order(usize),
    /// Its statistics.
    Stats(usize),
    /// The head, coarsely.
    Sketch,
    /// How coarsely. Follows the sketch.
    SketchError,
    /// The head's exact rows.
    HeadUnits,
}

/// A tensor of the pack.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Item {
    /// Its name.
    pub name: String,
    /// Its type.
    pub ty: Element,
    /// Values along each dimension, fastest first.
    pub dims: Vec<u64>,
    /// What it is made from.
    pub content: Content,
}

/// A gate's matrix (up's in an ungated network) that is sketched.
#[derive(Clone, Debug)]
pub struct Gate {
    /// The matrix.
    pub rows: Region,
    /// Its type.
    pub ty: QuantType,
    /// The sketch's.
    pub sketch: QuantType,
}

/// How a layer is packed.
#[derive(Clone, Debug)]
pub struct Layer {
    /// The gate's part, where units begin with its rows.
    pub gate: Option<Gate>,
    /// The up matrix of a gated network.
    pub up: Option<Region>,
    /// The down matrix and its type.
    pub down: (Region, QuantType),
    /// How columns are stored.
    pub how: Down,
    /// What a unit consists of.
    pub unit: UnitLayout,
}

/// The head that is sketched.
#[derive(Clone, Debug)]
pub struct Head {
    /// The matrix.
    pub rows: Region,
    /// Its type.
    pub ty: QuantType,
    /// Bytes of a row.
    pub row_bytes: usize,
    /// First byte of a unit's CRC.
    pub crc_at: usize,
}

/// Everything that is written.
pub struct Layout {
    /// In the order of the file.
    pub items: Vec<Item>,
    /// By number.
    pub layers: Vec<Layer>,
    /// `None` where rows aren't whole blocks of the sketch's type.
    pub head: Option<Head>,
}

impl Layout {
    /// Decides how `source` is packed. `down` is what columns are quantized to; `None` moves those
    /// that can be moved, and takes Q8_0 for the others.
    ///
    /// # Errors
    /// A network that can't be packed.
    pub fn new(
        source: &Source,
        hyper: &Hyper,
        down: Option<QuantType>,
        gates: Gates,
    ) -> Result<Self, Error> {
        let mut layout = Self {
            items: Vec::new(),
            layers: Vec::new(),
            head: None,
        };
        for layer in 0..hyper.layers {
            let layer = Layer::new(source, hyper, layer, down, gates)?;
            layout.layers.push(layer);
        }
        layout.head = head(source, hyper);
        let mut packed = vec![false; layout.layers.len()];
        for (number, tensor) in source.tensors.iter().enumerate() {
            match place(&tensor.name, hyper) {
                Place::Elsewhere => layout.copy(tensor, Content::Copy(number)),
                Place::Bias(layer) => layout.copy(
                    tensor,
                    Content::Permuted {
                        tensor: number,
                        layer,
                    },
                ),
                // The whole network where its first matrix stands: what a token needs of a layer
                // lies together.
                Place::Network(layer) => {
                    if !std::mem::replace(&mut packed[layer], true) {
                        layout.network(source, hyper, layer);
                    }
                }
            }
        }
        layout.two_planes(hyper);
        Ok(layout)
    }

    /// All tensors as they are, and the head in two planes.
    ///
    /// # Errors
    /// A head that can't be sketched.
    pub fn head_alone(source: &Source, hyper: &Hyper) -> Result<Self, Error> {
        let mut layout = Self {
            items: Vec::new(),
            layers: Vec::new(),
            head: head(source, hyper),
        };
        if layout.head.is_none() {
            return Err(Error::model(
                source.path(),
                format_args!(
                    "rows of {} values can't be sketched, so there is nothing to pack; only widths that are a multiple \
                     of 32 can",
                    hyper.d
                ),
            ));
        }
        for (number, tensor) in source.tensors.iter().enumerate() {
            layout.copy(tensor, Content::Copy(number));
        }
        layout.two_planes(hyper);
        Ok(layout)
    }

    /// Bytes of the largest matrix that is held whole.
    pub fn matrix_bytes(&self, source: &Source) -> u64 {
        let permuted = self.items.iter().filter_map(|item| match item.content {
            Content::Permuted { tensor, .. } => Some(source.tensors[tensor].bytes),
            _ => None,
        });
        let turned = self
            .layers
            .iter()
            .flat_map(|layer| [layer.up.as_ref(), Some(&layer.down.0)])
            .flatten()
            .map(|region| region.bytes);
        permuted.chain(turned).max().unwrap_or(0)
    }

    /// Bytes of the largest gate that is held beside another matrix.
    pub fn gate_bytes(&self) -> u64 {
        let gates = self.layers.iter().flat_map(|layer| &layer.gate);
        gates.map(|gate| gate.rows.bytes).max().unwrap_or(0)
    }

    /// Bytes that the largest layer's columns take.
    pub fn columns_bytes(&self, hyper: &Hyper) -> u64 {
        let bytes = |layer: &Layer| {
            Columns::memory_bytes(layer.down.1, layer.how, hyper.d, hyper.ff).unwrap_or(u64::MAX)
        };
        self.layers.iter().map(bytes).max().unwrap_or(0)
    }

    fn copy(&mut self, tensor: &Region, content: Content) {
        self.push(tensor.name.clone(), tensor.ty, &tensor.dims, content);
    }

    fn push(&mut self, name: String, ty: Element, dims: &[u64], content: Content) {
        self.items.push(Item {
            name,
            ty,
            dims: dims.to_vec(),
            content,
        });
    }

    /// The gate's part and what replaces the other matrices.
    fn network(&mut self, source: &Source, hyper: &Hyper, layer: usize) {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let part = gate_part(hyper);
        let gate = name(&format!("{part}.weight"));
        let (d, ff) = (u64::from(hyper.d), u64::from(hyper.ff));
        if let Some(gate) = &self.layers[layer].gate {
            let (ty, content) = (gate.sketch.into(), Content::GateSketch(layer));
            self.push(name(&format!("{part}.sketch")), ty, &[d, ff], content);
            let (crc, content) = (Element::I32, Content::GateCrcs(layer));
            self.push(name(&format!("{part}.sketch_crc")), crc, &[ff], content);
        } else if let Some(number) = source.tensors.iter().position(|tensor| tensor.name == gate) {
            let content = Content::Permuted {
                tensor: number,
                layer,
            };
            self.copy(&source.tensors[number], content);
        }
        let Layer { how, unit, .. } = self.layers[layer];
        let units = [u64::from(unit.unit_bytes()), ff];
        let tables = [d, ff / u64::from(SCALE_GROUP)];
        let (half, single) = (QuantType::F16.into(), QuantType::F32.into());
        self.push(
            name("ffn_units"),
            Element::I8,
            &units,
            Content::Units(layer),
        );
        if how.has_scales() {
            let content = Content::Scales(layer);
            self.push(name("ffn_down.scales"), half, &tables, content);
        }
        if how.has_mins() {
            self.push(name("ffn_down.mins"), half, &tables, Content::Mins(layer));
        }
        self.push(
            name("ffn_order"),
            Element::I32,
            &[ff],
            Content::Order(layer),
        );
        self.push(name("ffn_stats"), single, &[ff, 3], Content::Stats(layer));
    }

    fn two_planes(&mut self, hyper: &Hyper) {
        let Some(head) = &self.head else { return };
        let (d, vocab) = (u64::from(hyper.d), u64::from(hyper.vocab));
        let unit = head.crc_at as u64 + u64::from(pack::CRC_BYTES);
        let sketch = QuantType::Q4_0.into();
        self.push("output.sketch".into(), sketch, &[d, vocab], Content::Sketch);
        self.push(
            "output.sketch_error".into(),
            QuantType::F32.into(),
            &[vocab],
            Content::SketchError,
        );
        self.push(
            "output.units".into(),
            Element::I8,
            &[unit, vocab],
            Content::HeadUnits,
        );
    }
}

impl Layer {
    fn new(
        source: &Source,
        hyper: &Hyper,
        layer: u32,
        down: Option<QuantType>,
        gates: Gates,
    ) -> Result<Self, Error> {
        let bad = |why: String| Error::model(source.path(), why);
        let find = |part: &str| {
            let name = format!("blk.{layer}.{part}");
            let found = source.find(&name).and_then(|region| {
                let ty = region.ty.quant()?;
                Some((region.clone(), ty))
            });
            found.ok_or_else(|| bad(format!("tensor {name} is missing; it can't be packed")))
        };
        let from = find("ffn_down.weight")?;
        let how = match down {
            None => Down::moved(from.1).or(Down::rows(QuantType::Q8_0)),
            Some(ty) => Down::rows(ty),
        };
        let up = if hyper.act.gated() {
            Some(find("ffn_up.weight")?)
        } else {
            None
        };
        let gate = match gates {
            Gates::Matrix => None,
            Gates::Sketch => {
                let (rows, ty) = find(&format!("{}.weight", gate_part(hyper)))?;
                let sketch = sketch_type(ty, hyper.d).ok_or_else(|| no_sketch(&rows, ty, hyper))?;
                Some(Gate { rows, ty, sketch })
            }
        };
        let unit = how.and_then(|how| {
            let first = gate.as_ref().map(|gate| gate.ty);
            let unit = UnitLayout::new(first, up.as_ref().map(|(_, ty)| *ty), how, hyper.d)?;
            Some((how, unit))
        });
        let Some((how, unit)) = unit else {
            return Err(bad(format!(
                "columns of {} values can't be taken out of blk.{layer}.ffn_down.weight ({}); only widths that are a \
                 multiple of 32 can be packed from this type: convert the model to F16 first",
                hyper.d, from.1
            )));
        };
        Ok(Self {
            gate,
            up: up.map(|(region, _)| region),
            down: from,
            how,
            unit,
        })
    }
}

/// The matrix that decides which neurons are active.
fn gate_part(hyper: &Hyper) -> &'static str {
    if hyper.act.gated() {
        "ffn_gate"
    } else {
        "ffn_up"
    }
}

/// What a gate of type `ty` is sketched in; `None` where a sketch would save too little. Q4_0 misses 5% of the
/// active neurons and Q2_K 16% (`DESIGN.md`), so that Q2_K is for gates of four bits alone.
fn sketch_type(ty: QuantType, d: u32) -> Option<QuantType> {
    let bytes = |ty: QuantType| ty.row_bytes(d as usize);
    let gate = bytes(ty)?;
    let (q4_0, q2_k) = (QuantType::Q4_0, QuantType::Q2_K);
    if bytes(q4_0)? < gate {
        return Some(q4_0);
    }
    // 3.5 bits a weight.
    let worth_it = gate * 16 > 7 * d as usize;
    (worth_it && bytes(q2_k)? < gate).then_some(q2_k)
}

fn no_sketch(rows: &Region, ty: QuantType, hyper: &Hyper) -> Error {
    Error::Usage(format!(
        "--gates sketch: {} has rows of {} values in {ty}, and a sketch would save too little: it takes Q4_0 for rows of \
         more than 4.5 bits a value, or Q2_K for those of more than 3.5 bits in whole blocks of 256; leave --gates out",
        rows.name, hyper.d
    ))
}

fn head(source: &Source, hyper: &Hyper) -> Option<Head> {
    let rows = source.find(if hyper.tied {
        "token_embd.weight"
    } else {
        "output.weight"
    })?;
    let ty = rows.ty.quant()?;
    let row_bytes = ty.row_bytes(hyper.d as usize)?;
    QuantType::Q4_0.row_bytes(hyper.d as usize)?;
    let crc_at = pack::crc_at(u32::try_from(row_bytes).ok()?)? as usize;
    Some(Head {
        rows: rows.clone(),
        ty,
        row_bytes,
        crc_at,
    })
}

/// Where a tensor of the source goes.
enum Place {
    /// Matrices of a layer's feed-forward network.
    Network(usize),
    /// Biases by neuron.
    Bias(usize),
    /// Everything else.
    Elsewhere,
}

fn place(name: &str, hyper: &Hyper) -> Place {
    let parts = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    let Some((number, part)) = parts else {
        return Place::Elsewhere;
    };
    // Layers past the model's number (there are files with such) stay as they are.
    match number.parse::<u32>() {
        Ok(layer) if layer < hyper.layers && number == layer.to_string() => match part {
            "ffn_gate.weight" if hyper.act.gated() => Place::Network(layer as usize),
            "ffn_up.weight" | "ffn_down.weight" => Place::Network(layer as usize),
            "ffn_gate.bias" | "ffn_up.bias" => Place::Bias(layer as usize),
            _ => Place::Elsewhere,
        },
        _ => Place::Elsewhere,
    }
}
