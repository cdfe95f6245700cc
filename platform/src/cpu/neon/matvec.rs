//! One token times quantized weights: rows are read once, straight from their blocks.

use std::arch::aarch64::*;

use super::super::scales::{CHUNK, GROUPS, groups_of_a_chunk};
use super::super::{Act, RowList};
use super::codes::Codes;
use super::dot::Dot;
use super::simd::{Fcvtl, decode};

/// `out[row] = weights[row] . act`, int8.
///
/// # Safety
/// The machine has what `D` needs; lengths are as [`super::super::Kernels::matvec`] checks them.
#[inline(always)]
pub(super) unsafe fn rows<F: Codes, D: Dot>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        // SAFETY: the caller's.
        *out = unsafe { row_dot::<F, D>(row, act) };
    }
}

/// Sums so far of one row: four (twice) that make up the products, four for minimums.
struct Sums {
    products: [float32x4_t; 2],
    mins: float32x4_t,
}

#[inline(always)]
unsafe fn row_dot<F: Codes, D: Dot>(row: &[u8], act: &Act<'_>) -> f32 {
    let (whole, rest) = (act.cols / CHUNK, act.cols % CHUNK / 32);
    // SAFETY: reads stay inside `act`, whose lengths agree with its columns, and inside `row`; the
    // instruction set is the caller's.
    unsafe {
        let zero = vdupq_n_f32(0.0);
        let mut sums = Sums {
            products: [zero; 2],
            mins: zero,
        };
        for c in 0..whole {
            let chunk = &row[c * F::CHUNK_BYTES..][..F::CHUNK_BYTES];
            let codes = act.codes.as_ptr().add(c * CHUNK);
            let scales = act.scales.as_ptr().add(c * GROUPS);
            let code_sums = act.sums.as_ptr().add(c * 2 * GROUPS);
            add_chunk::<F, D>(chunk, GROUPS, codes, scales, code_sums, &mut sums);
        }
        if rest > 0 {
            let mut scales = [0f32; GROUPS];
            let mut code_sums = [0i16; 2 * GROUPS];
            scales[..rest].copy_from_slice(&act.scales[whole * GROUPS..]);
            code_sums[..2 * rest].copy_from_slice(&act.sums[2 * whole * GROUPS..]);
            add_chunk::<F, D>(
                &row[whole * F::CHUNK_BYTES..],
                rest,
                act.codes.as_ptr().add(whole * CHUNK),
                scales.as_ptr(),
                code_sums.as_ptr(),
                &mut sums,
            );
        }
        let products = vaddq_f32(sums.products[0], sums.products[1]);
        vaddvq_f32(vaddq_f32(products, sums.mins))
    }
}

/// Adds `groups` groups of 32. There are eight `act_scales` and 16 `code_sums`, with zeros past the
/// end of a row.
#[inline(always)]
unsafe fn add_chunk<F: Codes, D: Dot>(
    chunk: &[u8],
    groups: usize,
    codes: *const i8,
    act_scales: *const f32,
    code_sums: *const i16,
    sums: &mut Sums,
) {
    // SAFETY: the caller's.
    unsafe {
        let scales = F::scales::<Fcvtl>(chunk);
        // Product of both scales, for each group of this format.
        let mut both = [0f32; 16];
        if F::SIXTEENS {
            for i in 0..4 {
                let a = vld1_f32(act_scales.add(2 * i));
                let a = vcombine_f32(vdup_lane_f32::<0>(a), vdup_lane_f32::<1>(a));
                let s = vld1q_f32(scales.s.as_ptr().add(4 * i));
                vst1q_f32(both.as_mut_ptr().add(4 * i), vmulq_f32(s, a));
                if F::MINS {
                    let sum = vcvtq_f32_s32(vmovl_s16(vld1_s16(code_sums.add(4 * i))));
                    let m = vld1q_f32(scales.m.as_ptr().add(4 * i));
                    sums.mins = vfmaq_f32(sums.mins, m, vmulq_f32(a, sum));
                }
            }
        } else {
            for i in 0..2 {
                let a = vld1q_f32(act_scales.add(4 * i));
                let s = vld1q_f32(scales.s.as_ptr().add(4 * i));
                vst1q_f32(both.as_mut_ptr().add(4 * i), vmulq_f32(s, a));
                if F::MINS {
                    let sum = vcvtq_f32_s32(vpaddlq_s16(vld1q_s16(code_sums.add(8 * i))));
                    let m = vld1q_f32(scales.m.as_ptr().add(4 * i));
                    sums.mins = vfmaq_f32(sums.mins, m, vmulq_f32(a, sum));
                }
            }
        }
        groups_of_a_chunk!(groups, g => {
            let a = [vld1q_s8(codes.add(32 * g)), vld1q_s8(codes.add(32 * g + 16))];
            let w = F::codes(chunk.as_ptr(), g);
            if F::SIXTEENS {
                for half in 0..2 {
                    let dots = vcvtq_f32_s32(D::sixteen::<F::Shape>(w[half], a[half]));
                    let sum = &mut sums.products[half];
                    *sum = vfmaq_n_f32(*sum, dots, both[2 * g + half]);
                }
            } else {
                let dots = vcvtq_f32_s32(D::thirty_two::<F::Shape>(w, a));
                let sum = &mut sums.products[g % 2];
                *sum = vfmaq_n_f32(*sum, dots, both[g]);
            }
        });
    }
}

/// `out[row] = weights[row] . act` with f32 activations.
///
/// # Safety
/// Lengths are as [`super::super::Kernels::matvec`] checks them.
#[inline(always)]
pub(super) unsafe fn rows_exact<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        // SAFETY: the caller's.
        *out = unsafe { row_dot_exact::<F>(row, act.x) };
    }
}

#[inline(always)]
unsafe fn row_dot_exact<F: Codes>(row: &[u8], x: &[f32]) -> f32 {
    // SAFETY: a row has as many weights as `x` has values.
    unsafe {
        let mut sums = [vdupq_n_f32(0.0); 8];
        for (chunk, x) in row.chunks(F::CHUNK_BYTES).zip(x.chunks(CHUNK)) {
            let scales = F::scales::<Fcvtl>(chunk);
            groups_of_a_chunk!(x.len() / 32, g => {
                let w = decode::<F>(chunk.as_ptr(), g, &scales);
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = vld1q_f32(x.as_ptr().add(32 * g + 4 * i));
                    *sum = vfmaq_f32(*sum, w[i], x);
                }
            });
        }
        let [a, b, c, d, e, f, g, h] = sums;
        let low = vaddq_f32(vaddq_f32(a, b), vaddq_f32(c, d));
        let high = vaddq_f32(vaddq_f32(e, f), vaddq_f32(g, h));
        vaddvq_f32(vaddq_f32(low, high))
    }
}
