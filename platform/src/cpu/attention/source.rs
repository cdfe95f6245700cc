//! Blocks of the KV cache as matrices of floats, widened where they are used or once a block.
//!
//! Widening is exact for both types (a scale of 11 bits times a code of 8), so it makes no difference
//! to a result where it happens.

use crate::cpu::vector::lanes::Lanes;
use crate::run::kv::BLOCK;

/// Elements that share a scale.
const GROUP: usize = 32;

/// The right-hand matrix of a product: a vector of row `k` from column `column`.
pub(super) trait Source<L: Lanes>: Copy {
    /// # Safety
    /// The matrix has the elements.
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V;
}

/// Floats with a stride.
#[derive(Clone, Copy)]
pub(super) struct Floats(pub *const f32, pub usize);

impl<L: Lanes> Source<L> for Floats {
    #[inline(always)]
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load(self.0.add(k * self.1 + column)) }
    }
}

/// Half floats with a stride: f16 keys (head_dim, BLOCK) or values (BLOCK, width).
#[derive(Clone, Copy)]
pub(super) struct Halves(pub *const u16, pub usize);

impl<L: Lanes> Source<L> for Halves {
    #[inline(always)]
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load_f16(self.0.add(k * self.1 + column)) }
    }
}

/// q8_0 keys: codes (head_dim, BLOCK), scales widened (head_dim / 32, BLOCK).
#[derive(Clone, Copy)]
pub(super) struct KeyCodes {
    codes: *const i8,
    scales: *const f32,
}

impl KeyCodes {
    /// Keys of a block; widens their scales into `scales`.
    ///
    /// # Safety
    /// `block` is a block of keys, `scales` has `head_dim / 32 * BLOCK` floats that outlive this.
    #[inline(always)]
    pub unsafe fn of<L: Lanes>(l: L, block: *const u8, head_dim: usize, scales: *mut f32) -> Self {
        let count = head_dim / GROUP * BLOCK;
        // SAFETY: scales come first in a block.
        unsafe {
            widen(l, Halves(block.cast(), count), 1, count, scales);
            let codes = block.add(count * 2).cast();
            Self { codes, scales }
        }
    }
}

impl<L: Lanes> Source<L> for KeyCodes {
    #[inline(always)]
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe {
            let codes = l.load_i8(self.codes.add(k * BLOCK + column));
            l.mul(codes, l.load(self.scales.add(k / GROUP * BLOCK + column)))
        }
    }
}

/// q8_0 values: codes (BLOCK, head_dim), scales widened (BLOCK, head_dim / 32).
#[derive(Clone, Copy)]
pub(super) struct ValueCodes {
    codes: *const i8,
    scales: *const f32,
    head_dim: usize,
}

impl ValueCodes {
    /// Values of a block; widens their scales into `scales`.
    ///
    /// # Safety
    /// `block` is a block of values, `scales` has `head_dim / 32 * BLOCK` floats that outlive this.
    #[inline(always)]
    pub unsafe fn of<L: Lanes>(l: L, block: *const u8, head_dim: usize, scales: *mut f32) -> Self {
        // SAFETY: scales come first in a block, as many as a block of keys has.
        let KeyCodes { codes, scales } = unsafe { KeyCodes::of(l, block, head_dim, scales) };
        Self {
            codes,
            scales,
            head_dim,
        }
    }
}

impl<L: Lanes> Source<L> for ValueCodes {
    #[inline(always)]
    unsafe fn at(self, l: L, k: usize, column: usize) -> L::V {
        let groups = self.head_dim / GROUP;
        // SAFETY: the caller vouches for the elements; a vector lies in one group.
        unsafe {
            let codes = l.load_i8(self.codes.add(k * self.head_dim + column));
            l.mul(
                codes,
                l.splat(*self.scales.add(k * groups + column / GROUP)),
            )
        }
    }
}

/// A whole matrix to floats (depth, columns). `columns` is a multiple of LANES_MAX.
///
/// # Safety
/// Both have the elements.
#[inline(always)]
pub(super) unsafe fn widen<L: Lanes, S: Source<L>>(
    l: L,
    from: S,
    depth: usize,
    columns: usize,
    to: *mut f32,
) {
    for k in 0..depth {
        for column in (0..columns).step_by(L::N) {
            // SAFETY: the caller vouches for the elements.
            unsafe { l.store(to.add(k * columns + column), from.at(l, k, column)) };
        }
    }
}
