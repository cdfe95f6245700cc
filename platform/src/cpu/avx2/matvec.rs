//! One token times quantized weights: rows are read once, straight from their blocks.

use std::arch::x86_64::*;

use super::super::scales::{CHUNK, GROUPS, groups_of_a_chunk};
use super::super::{Act, RowList};
use super::codes::Codes;
use super::simd::{Dot, F16c, decode, sum8};

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

/// Sums so far of one row: eight (twice) that make up the products, eight for offsets and minimums.
struct Sums {
    products: [__m256; 2],
    mins: __m256,
}

#[inline(always)]
unsafe fn row_dot<F: Codes, D: Dot>(row: &[u8], act: &Act<'_>) -> f32 {
    let (whole, rest) = (act.cols / CHUNK, act.cols % CHUNK / 32);
    // SAFETY: reads stay inside `act`, whose lengths agree with its columns, and inside `row`; the
    // instruction set is the caller's.
    unsafe {
        let zero = _mm256_setzero_ps();
        let mut sums = Sums {
            products: [zero; 2],
            mins: zero,
        };
        for c in 0..whole {
            let chunk = &row[c * F::CHUNK_BYTES..][..F::CHUNK_BYTES];
            let codes = act.codes.as_ptr().add(c * CHUNK);
            let scales = _mm256_loadu_ps(act.scales.as_ptr().add(c * GROUPS));
            let code_sums = _mm256_loadu_si256(act.sums.as_ptr().add(c * 2 * GROUPS).cast());
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
                _mm256_loadu_ps(scales.as_ptr()),
                _mm256_loadu_si256(code_sums.as_ptr().cast()),
                &mut sums,
            );
        }
        let products = _mm256_add_ps(sums.products[0], sums.products[1]);
        sum8(_mm256_add_ps(products, sums.mins))
    }
}

/// Adds `groups` groups of 32.
#[inline(always)]
unsafe fn add_chunk<F: Codes, D: Dot>(
    chunk: &[u8],
    groups: usize,
    codes: *const i8,
    act_scales: __m256,
    code_sums: __m256i,
    sums: &mut Sums,
) {
    // SAFETY: the caller's.
    unsafe {
        let scales = F::scales::<F16c>(chunk);
        let s = [
            _mm256_loadu_ps(scales.s.as_ptr()),
            _mm256_loadu_ps(scales.s.as_ptr().add(8)),
        ];
        let m = [
            _mm256_loadu_ps(scales.m.as_ptr()),
            _mm256_loadu_ps(scales.m.as_ptr().add(8)),
        ];
        // Product of both scales, for each group of this format.
        let mut both = [0f32; 16];
        if F::SIXTEENS {
            let low = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
            let high = _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7);
            let a = [
                _mm256_permutevar8x32_ps(act_scales, low),
                _mm256_permutevar8x32_ps(act_scales, high),
            ];
            let sums16 = [
                _mm256_cvtepi16_epi32(_mm256_castsi256_si128(code_sums)),
                _mm256_cvtepi16_epi32(_mm256_extracti128_si256::<1>(code_sums)),
            ];
            for i in 0..2 {
                let sum = _mm256_mul_ps(a[i], _mm256_cvtepi32_ps(sums16[i]));
                add_mins::<F>(s[i], m[i], sum, &mut sums.mins);
                _mm256_storeu_ps(both.as_mut_ptr().add(8 * i), _mm256_mul_ps(s[i], a[i]));
            }
        } else {
            let sums32 = _mm256_madd_epi16(code_sums, _mm256_set1_epi16(1));
            let sum = _mm256_mul_ps(act_scales, _mm256_cvtepi32_ps(sums32));
            add_mins::<F>(s[0], m[0], sum, &mut sums.mins);
            _mm256_storeu_ps(both.as_mut_ptr(), _mm256_mul_ps(s[0], act_scales));
        }
        groups_of_a_chunk!(groups, g => {
            let a = _mm256_loadu_si256(codes.add(32 * g).cast());
            let w = F::codes(chunk.as_ptr(), g);
            let dots = D::dot::<F::Shape>(w, a);
            let scale = if F::SIXTEENS {
                // Lanes 0..4 are sums of the first 16 codes.
                _mm256_set_m128(_mm_set1_ps(both[2 * g + 1]), _mm_set1_ps(both[2 * g]))
            } else {
                _mm256_set1_ps(both[g])
            };
            let sum = &mut sums.products[g % 2];
            *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *sum);
        });
    }
}

/// Adds what minimums and the codes' offset contribute, eight groups at once.
#[inline(always)]
unsafe fn add_mins<F: Codes>(s: __m256, m: __m256, code_sums: __m256, total: &mut __m256) {
    // SAFETY: the instruction set is the caller's.
    unsafe {
        if F::MINS {
            *total = _mm256_fmadd_ps(m, code_sums, *total);
        }
        if F::OFFSET != 0 {
            let offset = _mm256_mul_ps(s, _mm256_set1_ps(f32::from(F::OFFSET)));
            *total = _mm256_fnmadd_ps(offset, code_sums, *total);
        }
    }
}

/// `out[row] = weights[row] . act` with f32 activations.
///
/// # Safety
/// That of [`rows`].
#[inline(always)]
pub(super) unsafe fn rows_exact<F: Codes>(weights: &RowList<'_>, act: &Act<'_>, out: &mut [f32]) {
    for (row, out) in weights.iter().zip(out) {
        // SAFETY: the caller's.
        *out = unsafe { row_dot_exact::<F>(row, act.x) };
    }
}

#[inline(always)]
unsafe fn row_dot_exact<F: Codes>(row: &[u8], x: &[f32]) -> f32 {
    // SAFETY: a row has as many weights as `x` has values; the instruction set is the caller's.
    unsafe {
        let mut sums = [_mm256_setzero_ps(); 4];
        for (chunk, x) in row.chunks(F::CHUNK_BYTES).zip(x.chunks(CHUNK)) {
            let scales = F::scales::<F16c>(chunk);
            groups_of_a_chunk!(x.len() / 32, g => {
                let w = decode::<F>(chunk.as_ptr(), g, &scales);
                for (i, sum) in sums.iter_mut().enumerate() {
                    let x = _mm256_loadu_ps(x.as_ptr().add(32 * g + 8 * i));
                    *sum = _mm256_fmadd_ps(w[i], x, *sum);
                }
            });
        }
        let [a, b, c, d] = sums;
        sum8(_mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d)))
    }
}
