//! Cutting matrices into pieces that fit the slots of the arena.
//!
//! All slots have one size, so what a piece leaves of its slot is lost to the cache. Pieces of a
//! matrix are therefore cut equal, and the slot's size is chosen for the model at hand: the
//! matrices' sizes have large common divisors, and a slot a little above one of them wastes little.

use super::Matrix;
use crate::units::{Extent, Piece};

/// Rows of a piece are a multiple of this where a piece has as many: the kernels' panel height.
pub const ROW_TILE: u32 = 16;

/// Bytes by which a piece of whole rows can grow when it is widened to the alignment on both ends.
fn widening(align: u32) -> u32 {
    2 * align - 2
}

/// Rows of each piece of `matrix` in slots of `slot_bytes`; `None` when not even one row fits.
///
/// `align` is a power of two.
pub fn rows_per_piece(matrix: &Matrix, slot_bytes: u32, align: u32) -> Option<u32> {
    let most = slot_bytes.checked_sub(widening(align))? / matrix.row_bytes;
    if most == 0 {
        return None;
    }
    if most >= matrix.rows {
        return Some(matrix.rows);
    }
    let tiled = if most >= ROW_TILE {
        most - most % ROW_TILE
    } else {
        most
    };
    let pieces = matrix.rows.div_ceil(tiled);
    let even = matrix.rows.div_ceil(pieces);
    Some(if most >= ROW_TILE {
        even.next_multiple_of(ROW_TILE).min(tiled)
    } else {
        even
    })
}

/// The `index`-th piece of `matrix`, which has been cut, widened to `align` (a power of two).
pub fn piece(matrix: &Matrix, index: u32, align: u32) -> Piece {
    let (first, rows) = matrix.piece_rows(index);
    let from = matrix.offset + u64::from(first) * u64::from(matrix.row_bytes);
    widen(matrix, from, rows * matrix.row_bytes, align)
}

/// One row of `matrix`, widened to `align`: how an embedding is read.
pub fn row(matrix: &Matrix, row: u32, align: u32) -> Piece {
    let from = matrix.offset + u64::from(row) * u64::from(matrix.row_bytes);
    widen(matrix, from, matrix.row_bytes, align)
}

fn widen(matrix: &Matrix, from: u64, bytes: u32, align: u32) -> Piece {
    let align = u64::from(align);
    let start = from & !(align - 1);
    let end = (from + u64::from(bytes)).next_multiple_of(align);
    Piece {
        extent: Extent {
            file: matrix.file,
            offset: start,
            len: (end - start) as u32,
        },
        skew: (from - start) as u32,
        bytes,
    }
}

/// What a slot size costs and gives.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SlotChoice {
    /// Bytes of a slot.
    pub slot_bytes: u32,
    /// Pieces of all matrices.
    pub pieces: u32,
    /// Share of the slots' bytes that holds weights, 0 to 1.
    pub fill: f64,
}

/// Counts the pieces of `matrices` in slots of `slot_bytes`; `None` when a row doesn't fit.
pub fn try_slot(matrices: &[Matrix], slot_bytes: u32, align: u32) -> Option<SlotChoice> {
    let (mut pieces, mut bytes) = (0u32, 0u64);
    for matrix in matrices {
        pieces = pieces.checked_add(
            matrix
                .rows
                .div_ceil(rows_per_piece(matrix, slot_bytes, align)?),
        )?;
        bytes += matrix.bytes();
    }
    let held = f64::from(pieces) * f64::from(slot_bytes);
    Some(SlotChoice {
        slot_bytes,
        pieces,
        fill: if held > 0.0 { bytes as f64 / held } else { 1.0 },
    })
}

/// The slot size for `matrices` between `least` and `most` bytes, in steps of `unit` (a multiple of
/// `align` and of the page).
///
/// The best product of how full the slots are and how near reads of that size come to the device's
/// bandwidth, taken as `bytes / (bytes + request_cost)`: `request_cost` is what one request costs,
/// in bytes that could have been read meanwhile. Rows too long for `most` raise it.
pub fn choose_slot(
    matrices: &[Matrix],
    least: u32,
    most: u32,
    unit: u32,
    align: u32,
    request_cost: u32,
) -> SlotChoice {
    let longest = matrices.iter().map(|m| m.row_bytes).max().unwrap_or(0);
    let floor = (longest + widening(align))
        .next_multiple_of(unit)
        .max(least.next_multiple_of(unit));
    let mut best: Option<(f64, SlotChoice)> = None;
    let mut slot_bytes = floor;
    loop {
        if let Some(choice) = try_slot(matrices, slot_bytes, align) {
            let read = choice.fill * f64::from(slot_bytes);
            let score = choice.fill * read / (read + f64::from(request_cost));
            if best.is_none_or(|(least, _)| score > least) {
                best = Some((score, choice));
            }
        }
        match slot_bytes.checked_add(unit) {
            Some(next) if next <= most => slot_bytes = next,
            _ => break,
        }
    }
    best.map_or(
        SlotChoice {
            slot_bytes: floor,
            pieces: 0,
            fill: 1.0,
        },
        |(_, choice)| choice,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::QuantType;
    use crate::units::{FileId, PieceId};

    fn matrix(rows: u32, row_bytes: u32, offset: u64) -> Matrix {
        Matrix {
            file: FileId(0),
            offset,
            ty: QuantType::Q8_0,
            rows,
            cols: 32,
            row_bytes,
            first: PieceId(0),
            rows_per_piece: rows,
        }
    }

    /// Every row lies in exactly one piece, whole, inside the slot, wherever the tensor starts.
    #[test]
    fn pieces_cover_every_row_once() {
        for align in [512u32, 4096] {
            for (rows, row_bytes, offset) in [
                (1536, 360, 31_868_992u64),
                (7, 612, 33),
                (192, 360, 511),
                (1, 34, 4095),
                (49152, 612, 32),
            ] {
                let mut m = matrix(rows, row_bytes, offset);
                let slot = 64 << 10;
                m.rows_per_piece = rows_per_piece(&m, slot, align).unwrap();
                let mut next = 0;
                for index in 0..m.piece_count() {
                    let (first, count) = m.piece_rows(index);
                    assert_eq!(first, next);
                    next += count;
                    let piece = piece(&m, index, align);
                    assert!(piece.extent.len <= slot);
                    assert_eq!(piece.extent.offset % u64::from(align), 0);
                    assert_eq!(piece.extent.len % align, 0);
                    assert_eq!(
                        piece.extent.offset + u64::from(piece.skew),
                        offset + u64::from(first) * u64::from(row_bytes)
                    );
                    assert!(piece.skew + piece.bytes <= piece.extent.len);
                }
                assert_eq!(next, rows);
            }
        }
    }

    #[test]
    fn a_row_longer_than_the_slot_does_not_fit() {
        assert_eq!(rows_per_piece(&matrix(4, 4096, 0), 4096, 512), None);
        assert_eq!(
            rows_per_piece(&matrix(4, 4096, 0), 4096 + 1022, 512),
            Some(1)
        );
    }

    /// SmolLM2's shapes: the search finds a size that wastes less than a twentieth.
    #[test]
    fn the_chosen_slot_is_nearly_full() {
        let layer = [
            (576, 360),
            (192, 360),
            (192, 360),
            (576, 360),
            (1536, 360),
            (1536, 360),
            (576, 960),
        ];
        let mut all = [matrix(1, 1, 0); 8];
        for (slot, (rows, bytes)) in all.iter_mut().zip(layer) {
            *slot = matrix(rows, bytes, 32);
        }
        all[7] = matrix(49152, 612, 32);
        let choice = choose_slot(&all, 64 << 10, 512 << 10, 4096, 512, 8 << 10);
        assert!(choice.fill > 0.93, "{choice:?}");
    }
}
