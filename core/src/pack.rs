//! What a packed model (`.lean`) adds to a GGUF file: the feed-forward networks as *units* that can
//! be read one by one, the order they stand in, what is known of them, and the head in two planes.
//!
//! `FORMAT.md` describes every byte. [`Pack::of`] checks the metadata, [`Pack::layer`] and
//! [`Pack::head`] the tensors; the places that they return lie inside the files.

mod error;
mod head;
mod layout;
pub mod quality;

pub use error::PackError;
pub use head::PackedHead;
pub use layout::{CRC_BYTES, Down, SCALE_GROUP, UnitLayout, crc_at};
pub use quality::Quality;

use core::fmt::Write as _;

use crate::gguf::{Array, Element, Tensor, Value, ValueType};
use crate::plan::{Hyper, Model};
use crate::quant::QuantType;
use crate::units::FileId;
use layout::row_bytes;

/// The newest version that this program reads; it writes packs with [sketched](GateSketch) gates in it.
pub const VERSION: u32 = 2;

/// The version of packs whose gates are matrices.
pub const VERSION_MATRICES: u32 = 1;

/// Tensors begin at multiples of this many bytes: the largest page and sector of the devices at hand.
pub const ALIGNMENT: u64 = 4096;

/// What a pack has of the feed-forward networks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Ffn {
    /// Units, one a neuron.
    #[default]
    Units,
    /// The source's matrices: only the head is packed.
    Matrices,
}

impl Ffn {
    /// As in `lean.ffn` and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Units => "units",
            Self::Matrices => "matrices",
        }
    }

    /// The one of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Units, Self::Matrices]
            .into_iter()
            .find(|ffn| ffn.name() == name)
    }
}

/// How the units of a layer are ordered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// The most often active first.
    Frequency,
    /// Units that are active together next to each other.
    Coactivation,
    /// As the neurons stand in the source.
    File,
}

impl Order {
    /// Every order.
    pub const ALL: [Self; 3] = [Self::Frequency, Self::Coactivation, Self::File];

    /// As in `lean.order` and on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Frequency => "frequency",
            Self::Coactivation => "coactivation",
            Self::File => "file",
        }
    }

    /// The order of this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|order| order.name() == name)
    }
}

/// Bytes in a file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Which file of the model.
    pub file: FileId,
    /// First byte, from the start of the file; a multiple of [`ALIGNMENT`].
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

/// The gate's matrix in few bits (up's in an ungated network): what it gives is an estimate, and each unit
/// begins with its exact row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GateSketch {
    /// The rows `(ff, d)`, in pack order.
    pub rows: Place,
    /// Their type: one of [`GateSketch::TYPES`].
    pub ty: QuantType,
    /// Bytes of a row.
    pub row_bytes: u32,
    /// CRC32C of each row `(ff)`, as I32.
    pub crcs: Place,
}

impl GateSketch {
    /// Types that a sketch may have.
    pub const TYPES: [QuantType; 2] = [QuantType::Q4_0, QuantType::Q2_K];
}

/// The units of one feed-forward network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PackedLayer {
    /// The units, one after the other, in pack order.
    pub units: Place,
    /// Number of units: `ff`.
    pub count: u32,
    /// Bytes of a unit; a multiple of 4.
    pub unit_bytes: u32,
    /// What a unit consists of.
    pub layout: UnitLayout,
    /// What stands for the gate's matrix, where units begin with their own rows of it.
    pub sketch: Option<GateSketch>,
    /// How its down column is to be read.
    pub down: Down,
    /// F16 `(ff / 32, d)`: row `b` holds the scales of the source's block `b` of every row, where
    /// the columns were moved from blocks. A unit's block is its source neuron / [`SCALE_GROUP`].
    pub scales: Option<Place>,
    /// F16 `(ff / 32, d)`: minimums likewise (Q4_1, Q5_1).
    pub mins: Option<Place>,
    /// I32 `(ff)`: the source's neuron of each unit. See [`check_order`].
    pub order: Place,
    /// F32 `(3, ff)`: share of calibration tokens with the unit active; mean of `|up . x| * |d|`
    /// when it is; L2 norm of the down column.
    pub stats: Place,
}

/// A packed model: its metadata, checked.
#[derive(Clone, Copy)]
pub struct Pack<'m, 'a> {
    model: Model<'m, 'a>,
    d: u32,
    ff: u32,
    layers: u32,
    vocab: u32,
    tied: bool,
    /// `None` where the networks are matrices.
    types: Option<Types<'a>>,
    /// What it has of the feed-forward networks.
    pub ffn: Ffn,
    /// How the units are ordered.
    pub order: Order,
    /// Tokens that the statistics come from; 0 without calibration.
    pub calibration_tokens: u32,
    /// SHA-256 of the source, in hex (of its shards, one after the other).
    pub source_sha256: &'a str,
    /// Length of the source.
    pub source_bytes: u64,
}

/// What the units of each layer consist of.
#[derive(Clone, Copy)]
struct Types<'a> {
    /// Where gates are sketched.
    gate: Option<Array<'a>>,
    down: Array<'a>,
    moved: Array<'a>,
    up: Option<Array<'a>>,
}

impl core::fmt::Debug for Pack<'_, '_> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Pack")
            .field("layers", &self.layers)
            .field("order", &self.order)
            .field("source_sha256", &self.source_sha256)
            .finish_non_exhaustive()
    }
}

/// Its presence says that gates are sketched.
pub(crate) const GATE_TYPES: &str = "lean.gate.types";

/// A tensor's name, put together without allocation.
type Name = heapless::String<64>;

impl<'m, 'a> Pack<'m, 'a> {
    /// Reads what a packed model says of itself; `None` for a model that isn't packed.
    ///
    /// # Errors
    /// Another version, or metadata that is missing or wrong.
    pub fn of(model: &Model<'m, 'a>, hyper: &Hyper) -> Result<Option<Self>, PackError> {
        let Some(version) = model.first.get("lean.version") else {
            return Ok(None);
        };
        let sketched = match version.as_u32() {
            Some(VERSION_MATRICES) => false,
            Some(VERSION) => true,
            found => return Err(PackError::Version { found }),
        };
        if !sketched && model.first.get(GATE_TYPES).is_some() {
            return Err(PackError::Key {
                key: GATE_TYPES,
                expected: "absent in version 1",
            });
        }
        let alignment = model.first.alignment();
        if !alignment.is_multiple_of(ALIGNMENT) {
            return Err(PackError::Alignment { alignment });
        }
        let ffn = match model.first.get("lean.ffn") {
            // Older packs all had units, and didn't say it.
            None => Ffn::Units,
            Some(value) => value
                .as_str()
                .and_then(Ffn::from_name)
                .ok_or(PackError::Key {
                    key: "lean.ffn",
                    expected: "units or matrices",
                })?,
        };
        let source_sha256 = text(model, "lean.source.sha256")?;
        if source_sha256.len() != 64 || !source_sha256.bytes().all(|b| b.is_ascii_hexdigit()) {
            return Err(PackError::Key {
                key: "lean.source.sha256",
                expected: "64 hexadecimal digits",
            });
        }
        let source_bytes = value(model, "lean.source.bytes")?
            .as_u64()
            .ok_or(PackError::Key {
                key: "lean.source.bytes",
                expected: "an unsigned number",
            })?;
        let mut pack = Self {
            model: *model,
            d: hyper.d,
            ff: hyper.ff,
            layers: 0,
            vocab: hyper.vocab,
            tied: model.tensors.find("output.weight").is_none(),
            types: None,
            ffn,
            order: Order::File,
            calibration_tokens: 0,
            source_sha256,
            source_bytes,
        };
        match ffn {
            Ffn::Units => pack.read_units(hyper, sketched)?,
            Ffn::Matrices if sketched => {
                return Err(PackError::Key {
                    key: "lean.ffn",
                    expected: "units in version 2",
                });
            }
            Ffn::Matrices => {
                let stray = |layer: &u32| pack.find(Some(*layer), "ffn_units").is_ok();
                if let Some(layer) = (0..hyper.layers).find(stray) {
                    return Err(PackError::Stray { layer });
                }
            }
        }
        Ok(Some(pack))
    }

    /// What the metadata says of the units.
    fn read_units(&mut self, hyper: &Hyper, sketched: bool) -> Result<(), PackError> {
        let model = &self.model;
        let order = text(model, "lean.order")?;
        self.order = Order::from_name(order).ok_or(PackError::Key {
            key: "lean.order",
            expected: "frequency, coactivation or file",
        })?;
        self.calibration_tokens =
            value(model, "lean.calibration.tokens")?
                .as_u32()
                .ok_or(PackError::Key {
                    key: "lean.calibration.tokens",
                    expected: "an unsigned number",
                })?;
        let array = |key, ty| per_layer(model, hyper, key, ty);
        self.types = Some(Types {
            gate: if sketched {
                Some(array(GATE_TYPES, ValueType::U32)?)
            } else {
                None
            },
            down: array("lean.down.types", ValueType::U32)?,
            moved: array("lean.down.moved", ValueType::Bool)?,
            up: if hyper.act.gated() {
                Some(array("lean.up.types", ValueType::U32)?)
            } else {
                None
            },
        });
        self.layers = hyper.layers;
        Ok(())
    }

    /// What leaving out neurons costs; `None` when it wasn't measured.
    ///
    /// # Errors
    /// Keys of another kind, or losses that are none.
    pub fn quality(&self) -> Result<Option<Quality>, PackError> {
        Quality::of(&self.model)
    }

    /// Number of packed layers: all of the model's, or none.
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// The units of a layer.
    ///
    /// # Errors
    /// Tensors that are missing or misshapen.
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, layer: u32) -> Result<PackedLayer, PackError> {
        assert!(layer < self.layers, "layer {layer} of {}", self.layers);
        let (d, ff) = (u64::from(self.d), u64::from(self.ff));
        let types = self.types.as_ref().expect("packed layers have types");
        let down = down_at(types, layer)?;
        let up = match &types.up {
            Some(types) => Some(ty_at(types, layer, "lean.up.types")?),
            None => None,
        };
        let gate = match &types.gate {
            Some(types) => Some(ty_at(types, layer, GATE_TYPES)?),
            None => None,
        };
        let layout = UnitLayout::new(gate, up, down, self.d).ok_or(PackError::Unit {
            layer: Some(layer),
            d: self.d,
        })?;
        let unit_bytes = layout.unit_bytes();
        let at = Some(layer);
        let units = self.place(at, "ffn_units", Element::I8, &[unit_bytes.into(), ff])?;
        let groups = [d, u64::from(self.ff / SCALE_GROUP)];
        let half = Element::Quant(QuantType::F16);
        if down.has_scales() && !self.ff.is_multiple_of(SCALE_GROUP) {
            return Err(PackError::Unit {
                layer: at,
                d: self.ff,
            });
        }
        let apart = |has: bool, name| has.then(|| self.place(at, name, half, &groups)).transpose();
        Ok(PackedLayer {
            units,
            count: self.ff,
            unit_bytes,
            layout,
            sketch: match gate {
                Some(_) => Some(self.sketch(layer, types.up.is_some())?),
                None => None,
            },
            down,
            scales: apart(down.has_scales(), "ffn_down.scales")?,
            mins: apart(down.has_mins(), "ffn_down.mins")?,
            order: self.place(at, "ffn_order", Element::I32, &[ff])?,
            stats: self.place(at, "ffn_stats", QuantType::F32.into(), &[ff, 3])?,
        })
    }

    fn sketch(&self, layer: u32, gated: bool) -> Result<GateSketch, PackError> {
        let (d, ff) = (u64::from(self.d), u64::from(self.ff));
        let (rows, crcs) = if gated {
            ("ffn_gate.sketch", "ffn_gate.sketch_crc")
        } else {
            ("ffn_up.sketch", "ffn_up.sketch_crc")
        };
        let found = self.find(Some(layer), rows)?.1.ty;
        let known = |ty: &QuantType| GateSketch::TYPES.contains(ty);
        let ty = found.quant().filter(known).ok_or(PackError::Type {
            layer: Some(layer),
            name: rows,
            expected: "Q4_0 or Q2_K",
            found: found.name(),
        })?;
        Ok(GateSketch {
            rows: self.place(Some(layer), rows, ty.into(), &[d, ff])?,
            ty,
            row_bytes: row_bytes(ty, self.d).ok_or(PackError::Unit {
                layer: Some(layer),
                d: self.d,
            })?,
            crcs: self.place(Some(layer), crcs, Element::I32, &[ff])?,
        })
    }

    /// A tensor of the pack, checked against its type and shape.
    fn place(
        &self,
        layer: Option<u32>,
        name: &'static str,
        ty: Element,
        dims: &[u64],
    ) -> Result<Place, PackError> {
        let (file, tensor) = self.find(layer, name)?;
        if tensor.ty != ty {
            return Err(PackError::Type {
                layer,
                name,
                expected: ty.name(),
                found: tensor.ty.name(),
            });
        }
        for (axis, &found) in tensor.dims.iter().enumerate() {
            let expected = dims.get(axis).copied().unwrap_or(1);
            if found != expected {
                return Err(PackError::Dim {
                    layer,
                    name,
                    axis: axis as u8,
                    expected,
                    found,
                });
            }
        }
        Ok(Place {
            file,
            offset: tensor.offset,
            bytes: tensor.bytes,
        })
    }

    fn find(
        &self,
        layer: Option<u32>,
        name: &'static str,
    ) -> Result<(FileId, Tensor<'a>), PackError> {
        let full = tensor_name(layer, name);
        match self.model.tensors.find(&full) {
            Some((file, tensor)) => Ok((FileId(file as u16), tensor)),
            None => Err(PackError::Missing { layer, name }),
        }
    }
}

/// Checks the values of an `ffn_order` tensor: `order` `(count)` must name every neuron once.
/// `seen` is scratch of at least `count / 8` bytes, rounded up.
///
/// # Errors
/// [`PackError::Order`] with the first unit whose neuron isn't one or was named before.
///
/// # Panics
/// When `seen` is too short.
pub fn check_order(
    layer: u32,
    order: impl ExactSizeIterator<Item = i32>,
    seen: &mut [u8],
) -> Result<(), PackError> {
    let count = order.len();
    let seen = &mut seen[..count.div_ceil(8)];
    seen.fill(0);
    for (unit, neuron) in order.enumerate() {
        let fresh = usize::try_from(neuron)
            .ok()
            .filter(|&neuron| neuron < count)
            .filter(|&neuron| seen[neuron / 8] & 1 << (neuron % 8) == 0);
        let Some(fresh) = fresh else {
            return Err(PackError::Order {
                layer,
                unit: unit as u32,
                neuron,
            });
        };
        seen[fresh / 8] |= 1 << (fresh % 8);
    }
    Ok(())
}

/// `name`, or `blk.LAYER.name`.
fn tensor_name(layer: Option<u32>, name: &str) -> Name {
    let mut full = Name::new();
    let written = match layer {
        Some(layer) => write!(full, "blk.{layer}.{name}"),
        None => full.push_str(name).map_err(|_| core::fmt::Error),
    };
    written.expect("names are short");
    full
}

fn value<'a>(model: &Model<'_, 'a>, key: &'static str) -> Result<Value<'a>, PackError> {
    model.first.get(key).ok_or(PackError::MissingKey { key })
}

fn text<'a>(model: &Model<'_, 'a>, key: &'static str) -> Result<&'a str, PackError> {
    value(model, key)?.as_str().ok_or(PackError::Key {
        key,
        expected: "text",
    })
}

/// An array with one value for each layer.
fn per_layer<'a>(
    model: &Model<'_, 'a>,
    hyper: &Hyper,
    key: &'static str,
    ty: ValueType,
) -> Result<Array<'a>, PackError> {
    value(model, key)?
        .as_array()
        .filter(|array| array.element_type() == ty && array.len() == hyper.layers as usize)
        .ok_or(PackError::Key {
            key,
            expected: "an array with one value for each layer",
        })
}

fn down_at(types: &Types<'_>, layer: u32) -> Result<Down, PackError> {
    let ty = ty_at(&types.down, layer, "lean.down.types")?;
    let moved = types.moved.get(layer as usize);
    let down = match moved.and_then(|moved| moved.as_bool()) {
        Some(true) => Down::moved(ty),
        Some(false) => Down::rows(ty),
        None => None,
    };
    down.ok_or(PackError::Key {
        key: "lean.down.types",
        expected: "types that columns can be moved from or quantized to",
    })
}

fn ty_at(types: &Array<'_>, layer: u32, key: &'static str) -> Result<QuantType, PackError> {
    types
        .get(layer as usize)
        .and_then(|id| QuantType::from_ggml(id.as_u32()?))
        .ok_or(PackError::Key {
            key,
            expected: "types of weights",
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_names_every_neuron_once() {
        let mut seen = [0; 2];
        let mut check = |order: &[i32]| check_order(3, order.iter().copied(), &mut seen);
        assert_eq!(check(&[2, 0, 1, 4, 3, 8, 7, 6, 5]), Ok(()));
        let error = |unit, neuron| {
            Err(PackError::Order {
                layer: 3,
                unit,
                neuron,
            })
        };
        assert_eq!(check(&[2, 0, 2]), error(2, 2));
        assert_eq!(check(&[0, 3, 1]), error(1, 3));
        assert_eq!(check(&[-1]), error(0, -1));
    }
}
