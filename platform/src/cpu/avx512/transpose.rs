//! Across lanes: the 16 x 16 transpose that turns rows into lanes, and the sum of all lanes.

use std::arch::x86_64::*;

/// `out[i]` lane `j` = `rows[j]` lane `i`, of 32-bit lanes.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) fn transpose(rows: &[__m512i; 16]) -> [__m512i; 16] {
    let r = rows;
    // Pairs of rows, then fours: each 128-bit part now holds one column of four rows.
    let mut four = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        let (a, b, c, d) = (r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]);
        let (ab, ab_high) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
        let (cd, cd_high) = (_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
        four[4 * i] = _mm512_unpacklo_epi64(ab, cd);
        four[4 * i + 1] = _mm512_unpackhi_epi64(ab, cd);
        four[4 * i + 2] = _mm512_unpacklo_epi64(ab_high, cd_high);
        four[4 * i + 3] = _mm512_unpackhi_epi64(ab_high, cd_high);
    }
    // Then the 128-bit parts: a 4 x 4 transpose of them for each column within a part.
    let mut out = [_mm512_setzero_si512(); 16];
    for i in 0..4 {
        let (a, b, c, d) = (four[i], four[4 + i], four[8 + i], four[12 + i]);
        let (ab, ab_high) = (
            _mm512_shuffle_i32x4::<0x88>(a, b),
            _mm512_shuffle_i32x4::<0xdd>(a, b),
        );
        let (cd, cd_high) = (
            _mm512_shuffle_i32x4::<0x88>(c, d),
            _mm512_shuffle_i32x4::<0xdd>(c, d),
        );
        out[i] = _mm512_shuffle_i32x4::<0x88>(ab, cd);
        out[8 + i] = _mm512_shuffle_i32x4::<0xdd>(ab, cd);
        out[4 + i] = _mm512_shuffle_i32x4::<0x88>(ab_high, cd_high);
        out[12 + i] = _mm512_shuffle_i32x4::<0xdd>(ab_high, cd_high);
    }
    out
}

/// The sum of all lanes, in this order: halves, quarters, eighths, neighbours.
///
/// Written out because the library's own leaves the order of additions to the compiler, which could
/// choose differently from one caller to the next.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
#[inline]
pub(super) fn reduce(v: __m512) -> f32 {
    let half = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
    let quarter = _mm_add_ps(
        _mm256_castps256_ps128(half),
        _mm256_extractf128_ps::<1>(half),
    );
    let eighth = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    _mm_cvtss_f32(_mm_add_ss(eighth, _mm_movehdup_ps(eighth)))
}

#[cfg(test)]
mod tests {
    use super::super::super::Isa;
    use super::*;

    #[test]
    fn lanes_and_rows_change_places() {
        if !Isa::Avx512.available() {
            return;
        }
        let rows: [[i32; 16]; 16] =
            std::array::from_fn(|r| std::array::from_fn(|c| (100 * r + c) as i32));
        // SAFETY: arrays of one size, and the instruction set is there.
        let out = unsafe {
            let rows = std::mem::transmute::<[[i32; 16]; 16], [__m512i; 16]>(rows);
            std::mem::transmute::<[__m512i; 16], [[i32; 16]; 16]>(transpose(&rows))
        };
        for r in 0..16 {
            for c in 0..16 {
                assert_eq!(out[c][r], rows[r][c]);
            }
        }
    }
}
