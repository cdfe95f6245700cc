//! Activations to int8, bit for bit as the reference.

use std::arch::x86_64::*;

use super::super::scalar::TINY;

/// See [`super::super::Kernels::quantize`].
///
/// # Safety
/// The lengths are n (a multiple of 32), n, n / 32 and n / 16.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
pub(super) unsafe fn quantize(x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
    for group in 0..x.len() / 32 {
        // SAFETY: 32 floats of this group.
        let (a, b) = unsafe {
            let p = x.as_ptr().add(32 * group);
            (_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)))
        };
        // As integers, so that a NaN is above infinity.
        let bits = |v| _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(0x7fff_ffff));
        let largest = _mm512_reduce_max_epi32(_mm512_max_epi32(bits(a), bits(b)));
        let largest = f32::from_bits(largest as u32);
        let inverse = if largest >= TINY && largest.is_finite() {
            127.0 / largest
        } else {
            0.0
        };
        scales[group] = if largest < TINY { 0.0 } else { largest / 127.0 };
        let round = |v| {
            let scaled = _mm512_mul_ps(v, _mm512_set1_ps(inverse));
            // A NaN (infinity times 0) becomes code 0.
            let number = _mm512_cmp_ps_mask::<_CMP_ORD_Q>(scaled, scaled);
            let ints = _mm512_maskz_cvt_roundps_epi32::<
                { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
            >(number, scaled);
            _mm512_cvtepi32_epi8(ints)
        };
        for (half, v) in [a, b].into_iter().enumerate() {
            let bytes = round(v);
            // SAFETY: 16 codes of this group.
            unsafe {
                _mm_storeu_si128(codes.as_mut_ptr().add(32 * group + 16 * half).cast(), bytes)
            };
            // Unsigned bytes add up in two steps; the offset of 128 comes off again.
            let unsigned = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
            let parts = _mm_sad_epu8(unsigned, _mm_setzero_si128());
            let sum = _mm_extract_epi16::<0>(parts) + _mm_extract_epi16::<4>(parts);
            sums[2 * group + half] = (sum - 16 * 128) as i16;
        }
    }
}
