//! Tensor infos: what the header says of each tensor, checked.

use super::cursor::{At, Cursor};
use super::element::Element;
use super::error::{GgufError, Label};

/// The least a tensor info can take: an empty name, one dimension.
pub(super) const INFO_BYTES_MIN: u64 = 8 + 4 + 8 + 4 + 8;

/// A tensor in a file. `dims[0]` is the length of a row, which lies contiguous.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tensor<'a> {
    /// Its name, such as `blk.0.ffn_up.weight`.
    pub name: &'a str,
    /// How its values are stored.
    pub ty: Element,
    /// Values along each dimension, fastest first; 1 past `n_dims`.
    pub dims: [u64; 4],
    /// Dimensions in the file, 1 to 4.
    pub n_dims: usize,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Tensor<'_> {
    /// Values in a row.
    pub fn cols(&self) -> u64 {
        self.dims[0]
    }

    /// Rows, over all outer dimensions.
    pub fn rows(&self) -> u64 {
        self.dims[1] * self.dims[2] * self.dims[3]
    }
}

/// Reads one info. `offset` is still relative to the start of the data.
pub(super) fn read<'a>(
    cursor: &mut Cursor<'a>,
    index: u64,
    alignment: u64,
) -> Result<Tensor<'a>, GgufError> {
    cursor.at = At::TensorInfo(index);
    let name = cursor.name()?;
    cursor.at = At::Tensor(name);
    let tensor = || Label::new(name);

    let n_dims = cursor.u32()?;
    if !(1..=4).contains(&n_dims) {
        return Err(GgufError::DimCount {
            tensor: tensor(),
            n_dims,
        });
    }
    let mut dims = [1; 4];
    for dim in &mut dims[..n_dims as usize] {
        *dim = cursor.u64()?;
    }
    let id = cursor.u32()?;
    let ty = Element::from_ggml(id).ok_or_else(|| GgufError::TensorType {
        tensor: tensor(),
        id,
    })?;
    let offset = cursor.u64()?;

    let (len, size) = (ty.block_len() as u64, ty.block_bytes() as u64);
    if !dims[0].is_multiple_of(len) {
        return Err(GgufError::Row {
            tensor: tensor(),
            ty,
            cols: dims[0],
        });
    }
    let values = dims
        .iter()
        .try_fold(1u64, |product, &dim| product.checked_mul(dim));
    // Bounding both by 2^63 keeps every later sum of two of them exact.
    let bytes = values
        .filter(|&values| values != 0 && values <= i64::MAX as u64)
        .and_then(|values| (values / len).checked_mul(size))
        .filter(|&bytes| bytes <= i64::MAX as u64)
        .ok_or_else(|| GgufError::Dims {
            tensor: tensor(),
            dims,
        })?;
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::Misaligned {
            tensor: tensor(),
            offset,
            alignment,
        });
    }
    Ok(Tensor {
        name,
        ty,
        dims,
        n_dims: n_dims as usize,
        offset,
        bytes,
    })
}
