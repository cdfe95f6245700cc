//! Many tokens times quantized weights: eight rows at a time are unpacked into a panel that then
//! meets every token.
//!
//! Columns are done in blocks of [`BLOCK`], so that a panel stays in the first-level cache; sums
//! wait in the output between two blocks. A (row, token) goes through the same additions in the
//! same order wherever it lies in a tile.

use std::arch::x86_64::*;

use super::super::scales::{CHUNK, GROUPS, groups_of_a_chunk};
use super::super::{Act, OutTile, Rows, Scratch};
use super::codes::{Codes, Shape, check_shape};
use super::simd::{Dot, F16c, transpose};

/// Rows of a panel.
const ROWS: usize = 8;
/// Columns of a panel: a multiple of a chunk.
const BLOCK: usize = 1024;
/// Tokens that share each load of a panel.
const TOKENS: usize = 4;

/// 32 columns of a panel.
#[derive(Clone, Copy)]
#[repr(C)]
struct Group {
    /// Lane `row` of register `i`: codes `4i .. 4i + 4`.
    codes: [__m256i; 8],
    /// Lane `row`: scale of the group, or of each half of it.
    s: [__m256; 2],
    /// What a code 0 stands for, alike.
    m: [__m256; 2],
}

const _: () = assert!(
    size_of::<Group>() * GROUPS <= CHUNK * 64,
    "a scratch has 64 bytes a column"
);

/// `out[token * stride + row] = weights[row] . act[token]`, int8.
///
/// # Safety
/// The machine has what `D` needs; lengths are as [`super::super::Kernels::matmul`] checks them.
#[inline(always)]
pub(super) unsafe fn all<F: Codes, D: Dot>(
    weights: &Rows<'_>,
    act: &Act<'_>,
    mut out: OutTile<'_>,
    scratch: &mut Scratch,
) {
    const { check_shape::<F>() };
    let row_bytes = weights.row_bytes();
    let panel = scratch.as_mut_slice().as_mut_ptr().cast::<Group>();
    let stride = out.stride();
    for (p, rows) in weights.bytes.chunks(ROWS * row_bytes).enumerate() {
        for first in (0..act.cols).step_by(BLOCK) {
            let groups = BLOCK.min(act.cols - first) / 32;
            // SAFETY: the scratch is aligned to 64 bytes and has room for BLOCK columns, or all that
            // the matrix has; `out` has an element for each row and token; the rest is the caller's.
            unsafe {
                pack::<F>(rows, row_bytes, first, groups, panel);
                let tile = Tile {
                    panel,
                    groups,
                    first,
                    rows: rows.len() / row_bytes,
                    out: out.as_mut_ptr().add(p * ROWS),
                    stride,
                };
                D::tile::<F::Shape>(&tile, act);
            }
        }
    }
}

/// Unpacks `groups` groups from column `first` on of up to eight rows; missing rows become zeros.
#[inline(always)]
unsafe fn pack<F: Codes>(
    rows: &[u8],
    row_bytes: usize,
    first: usize,
    groups: usize,
    panel: *mut Group,
) {
    let chunk_bytes = first / CHUNK * F::CHUNK_BYTES;
    // SAFETY: the caller's; a panel has `groups` groups.
    unsafe {
        for at in (0..groups).step_by(GROUPS) {
            let groups = GROUPS.min(groups - at);
            let panel = panel.add(at);
            let start = chunk_bytes + at / GROUPS * F::CHUNK_BYTES;
            for r in 0..ROWS {
                match rows.get(r * row_bytes + start..(r + 1) * row_bytes) {
                    Some(row) => {
                        let chunk = &row[..F::CHUNK_BYTES.min(row.len())];
                        pack_chunk::<F>(chunk, r, groups, panel);
                    }
                    None => {
                        for g in 0..groups {
                            (*panel.add(g)).codes[r] = _mm256_setzero_si256();
                            put_scales(panel.add(g), r, [0.0; 2], [0.0; 2]);
                        }
                    }
                }
            }
            for g in 0..groups {
                let group = &mut *panel.add(g);
                group.codes = transpose(group.codes);
            }
        }
    }
}

/// Puts row `r`'s codes into register `r` of each group: [`pack`] transposes them when all are there.
#[inline(always)]
unsafe fn pack_chunk<F: Codes>(chunk: &[u8], r: usize, groups: usize, panel: *mut Group) {
    // SAFETY: the caller's.
    unsafe {
        let scales = F::scales::<F16c>(chunk);
        let mut m = scales.m;
        for (m, s) in m.iter_mut().zip(scales.s) {
            *m -= f32::from(F::OFFSET) * s;
        }
        groups_of_a_chunk!(groups, g => {
            (*panel.add(g)).codes[r] = F::codes(chunk.as_ptr(), g);
            if F::SIXTEENS {
                let at = 2 * g;
                put_scales(panel.add(g), r, [scales.s[at], scales.s[at + 1]], [m[at], m[at + 1]]);
            } else {
                put_scales(panel.add(g), r, [scales.s[g], 0.0], [m[g], 0.0]);
            }
        });
    }
}

/// Sets lane `r` of a group's scales and minimums.
#[inline(always)]
unsafe fn put_scales(group: *mut Group, r: usize, s: [f32; 2], m: [f32; 2]) {
    // SAFETY: a register is eight floats, and `r` is below eight.
    unsafe {
        for half in 0..2 {
            (&raw mut (*group).s[half])
                .cast::<f32>()
                .add(r)
                .write(s[half]);
            (&raw mut (*group).m[half])
                .cast::<f32>()
                .add(r)
                .write(m[half]);
        }
    }
}

/// A panel and where its results go.
pub(super) struct Tile {
    panel: *const Group,
    groups: usize,
    /// Column of the panel's first group.
    first: usize,
    /// Rows that there are, of eight.
    rows: usize,
    /// Element (token 0, first row).
    out: *mut f32,
    stride: usize,
}

impl Tile {
    /// [`Tile::run`] for every token, a few at a time.
    ///
    /// # Safety
    /// The machine has what `D` needs, the panel holds codes of shape `S`, and `out` has an element
    /// for each row and token.
    #[inline(always)]
    pub(super) unsafe fn all<S: Shape, D: Dot>(&self, act: &Act<'_>) {
        let mut token = 0;
        // SAFETY: the caller's.
        unsafe {
            while token + TOKENS <= act.tokens {
                self.run::<S, D, TOKENS>(act, token);
                token += TOKENS;
            }
            while token < act.tokens {
                self.run::<S, D, 1>(act, token);
                token += 1;
            }
        }
    }

    /// Adds the panel's part of `T` tokens from `token` on to the output; the first panel sets it.
    #[inline(always)]
    unsafe fn run<S: Shape, D: Dot, const T: usize>(&self, act: &Act<'_>, token: usize) {
        let halves = if S::SIXTEENS { 2 } else { 1 };
        let mut act_sums = [[0f32; BLOCK / 16]; T];
        // SAFETY: the caller's.
        unsafe {
            let mut codes = [act.codes.as_ptr(); T];
            let mut scales = [act.scales.as_ptr(); T];
            for t in 0..T {
                let at = (token + t) * act.cols + self.first;
                codes[t] = codes[t].add(at);
                scales[t] = scales[t].add(at / 32);
                if S::MINS {
                    let sums = act.sums.as_ptr().add(at / 16);
                    let scales = std::slice::from_raw_parts(scales[t], self.groups);
                    let sums = std::slice::from_raw_parts(sums, 2 * self.groups);
                    scaled_sums::<S>(scales, sums, &mut act_sums[t]);
                }
            }

            let mut totals = [_mm256_setzero_ps(); T];
            if self.first > 0 {
                for (t, total) in totals.iter_mut().enumerate() {
                    *total = self.load(token + t);
                }
            }
            for g in 0..self.groups {
                let group = &*self.panel.add(g);
                for half in 0..halves {
                    let steps = 8 / halves;
                    let w = group.codes.as_ptr().add(half * steps);
                    let a = codes.map(|codes| codes.add(32 * g + 16 * half));
                    let dots = D::rows::<S, T>(w, steps, a);
                    for t in 0..T {
                        let scale = _mm256_broadcast_ss(&*scales[t].add(g));
                        let scale = _mm256_mul_ps(group.s[half], scale);
                        totals[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t]), scale, totals[t]);
                        if S::MINS {
                            let sum = _mm256_broadcast_ss(&act_sums[t][halves * g + half]);
                            totals[t] = _mm256_fmadd_ps(group.m[half], sum, totals[t]);
                        }
                    }
                }
            }
            for (t, total) in totals.into_iter().enumerate() {
                self.store(token + t, total);
            }
        }
    }

    #[inline(always)]
    unsafe fn load(&self, token: usize) -> __m256 {
        // SAFETY: the caller's; only rows that there are are touched.
        unsafe {
            let at = self.out.add(token * self.stride);
            if self.rows == ROWS {
                _mm256_loadu_ps(at)
            } else {
                let mut lanes = [0f32; ROWS];
                at.copy_to_nonoverlapping(lanes.as_mut_ptr(), self.rows);
                _mm256_loadu_ps(lanes.as_ptr())
            }
        }
    }

    #[inline(always)]
    unsafe fn store(&self, token: usize, total: __m256) {
        // SAFETY: the caller's; only rows that there are are touched.
        unsafe {
            let at = self.out.add(token * self.stride);
            if self.rows == ROWS {
                _mm256_storeu_ps(at, total);
            } else {
                let mut lanes = [0f32; ROWS];
                _mm256_storeu_ps(lanes.as_mut_ptr(), total);
                at.copy_from_nonoverlapping(lanes.as_ptr(), self.rows);
            }
        }
    }
}

/// What a minimum is multiplied with: sums of a token's codes, scaled; one for each scale of the
/// weights.
#[inline(always)]
fn scaled_sums<S: Shape>(scales: &[f32], sums: &[i16], out: &mut [f32; BLOCK / 16]) {
    let pairs = scales.iter().zip(sums.as_chunks::<2>().0);
    if S::SIXTEENS {
        for (out, (scale, [a, b])) in out.as_chunks_mut::<2>().0.iter_mut().zip(pairs) {
            *out = [scale * f32::from(*a), scale * f32::from(*b)];
        }
    } else {
        for (out, (scale, [a, b])) in out.iter_mut().zip(pairs) {
            *out = scale * (i32::from(*a) + i32::from(*b)) as f32;
        }
    }
}
