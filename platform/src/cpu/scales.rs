//! Scales and minimums of the quantized formats, for the vector kernels: `w = s * q + m` with an
//! integer `q` that each instruction set unpacks in its own way.
//!
//! Everything is seen in chunks of up to 256 weights: one super-block, or up to eight blocks of 32
//! (fewer at the end of a row). Plain loops over fixed arrays, which the compiler turns into vector
//! code of whatever instruction set it inlines them into; only halves need an instruction of their
//! own ([`Halves`]).

use leanstream_core::quant::QuantType;

/// Weights in a whole chunk.
pub(super) const CHUNK: usize = 256;
/// Groups of 32 in a whole chunk.
pub(super) const GROUPS: usize = CHUNK / 32;

/// Runs a body for each group `g` of a chunk; whole chunks are unrolled, with `g` a constant.
macro_rules! groups_of_a_chunk {
    (@ $g:ident $body:block $($n:literal)*) => {
        $({
            #[allow(non_upper_case_globals)]
            const $g: usize = $n;
            $body
        })*
    };
    ($groups:expr, $g:ident => $body:block) => {
        let groups = $groups;
        if groups == $crate::cpu::scales::GROUPS {
            $crate::cpu::scales::groups_of_a_chunk!(@ $g $body 0 1 2 3 4 5 6 7);
        } else {
            for $g in 0..groups $body
        }
    };
}
pub(super) use groups_of_a_chunk;

/// Converts halves to singles with the instruction set at hand.
pub(super) trait Halves {
    /// Eight at once, exactly.
    ///
    /// # Safety
    /// The machine has the instruction set this is for.
    unsafe fn widen(halves: [u16; 8]) -> [f32; 8];
}

/// Scale and minimum of each 16 or 32 weights of a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scales {
    /// `s`: 16 of them, or 8 for a format with one per 32. Zero past the end of a short chunk.
    pub s: [f32; 16],
    /// `m`, alike. Zeros for a format without minimums.
    pub m: [f32; 16],
}

/// How a quantized format lays out a chunk.
pub(super) trait Layout {
    /// Which format.
    const TY: QuantType;
    /// True where 16 weights share a scale; otherwise 32 do.
    const SIXTEENS: bool;
    /// True where the format has minimums.
    const MINS: bool;
    /// Bytes of a block.
    const BYTES: usize = Self::TY.block_bytes();
    /// Bytes of a whole chunk.
    const CHUNK_BYTES: usize = CHUNK / Self::TY.block_len() * Self::BYTES;

    /// The scales of `chunk`: whole blocks, [`Layout::CHUNK_BYTES`] or fewer.
    ///
    /// # Safety
    /// That of [`Halves::widen`].
    unsafe fn scales<H: Halves>(chunk: &[u8]) -> Scales;
}

/// One marker type a format.
macro_rules! layout {
    ($name:ident, $ty:ident, $sixteens:literal, $mins:literal, $scales:ident) => {
        #[doc = concat!(stringify!($ty), ".")]
        #[derive(Clone, Copy, Debug)]
        pub(super) struct $name;

        impl Layout for $name {
            const TY: QuantType = QuantType::$ty;
            const SIXTEENS: bool = $sixteens;
            const MINS: bool = $mins;

            #[inline(always)]
            unsafe fn scales<H: Halves>(chunk: &[u8]) -> Scales {
                // SAFETY: the caller's duty is the same.
                unsafe { $scales::<H, { QuantType::$ty.block_bytes() }>(chunk) }
            }
        }
    };
}

layout!(Q4_0, Q4_0, false, false, one_half);
layout!(Q4_1, Q4_1, false, true, two_halves);
layout!(Q5_0, Q5_0, false, false, one_half);
layout!(Q5_1, Q5_1, false, true, two_halves);
layout!(Q8_0, Q8_0, false, false, one_half);
layout!(Iq4Nl, IQ4_NL, false, false, one_half);
layout!(Mxfp4, MXFP4, false, false, one_exponent);
layout!(Q2K, Q2_K, true, true, q2_k);
layout!(Q3K, Q3_K, true, false, q3_k);
layout!(Q4K, Q4_K, false, true, q4_k);
layout!(Q5K, Q5_K, false, true, q4_k);
layout!(Q6K, Q6_K, true, false, q6_k);

/// Chooses by the format of `$weights`: `$int8` or, where exact results are asked for, `$exact`, with
/// `$f` one of the types above; or `$float`, with `$f` one of `float::{F32, F16, Bf16}` in the
/// caller's module.
macro_rules! for_format {
    ($weights:expr, $wants_exact:expr, $f:ident => {
        int8: $int8:expr, exact: $exact:expr, float: $float:expr $(,)?
    }) => {
        $crate::cpu::scales::for_format!(@ $weights.ty, $wants_exact, $f, $int8, $exact, $float;
            F32 F32, F16 F16, BF16 Bf16;
            Q4_0 Q4_0, Q4_1 Q4_1, Q5_0 Q5_0, Q5_1 Q5_1, Q8_0 Q8_0, IQ4_NL Iq4Nl, MXFP4 Mxfp4,
            Q2_K Q2K, Q3_K Q3K, Q4_K Q4K, Q5_K Q5K, Q6_K Q6K)
    };
    (@ $ty:expr, $wants_exact:expr, $f:ident, $int8:expr, $exact:expr, $float:expr;
        $($float_id:ident $float_ty:ident),*; $($id:ident $quant_ty:ident),*) => {
        match $ty {
            $(leanstream_core::quant::QuantType::$float_id => {
                type $f = float::$float_ty;
                $float
            })*
            $(leanstream_core::quant::QuantType::$id => {
                type $f = $crate::cpu::scales::$quant_ty;
                if $wants_exact { $exact } else { $int8 }
            })*
        }
    };
}
pub(super) use for_format;

/// Blocks of 32 that start with a half `s`.
#[inline(always)]
unsafe fn one_half<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    // SAFETY: the caller's duty is the same.
    let s = unsafe { H::widen(column::<BYTES>(chunk, 0)) };
    Scales {
        s: padded(s),
        m: [0.0; 16],
    }
}

/// Blocks of 32 that start with halves `s` and `m`.
#[inline(always)]
unsafe fn two_halves<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    // SAFETY: the caller's duty is the same.
    let (s, m) = unsafe {
        (
            H::widen(column::<BYTES>(chunk, 0)),
            H::widen(column::<BYTES>(chunk, 2)),
        )
    };
    Scales {
        s: padded(s),
        m: padded(m),
    }
}

/// Blocks of 32 that start with an exponent.
#[inline(always)]
unsafe fn one_exponent<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    let mut exponents = [0u8; GROUPS];
    for (e, block) in exponents.iter_mut().zip(chunk.as_chunks::<BYTES>().0) {
        *e = block[0];
    }
    let mut s = exponents.map(half_scale);
    s[chunk.len() / BYTES..].fill(0.0);
    Scales {
        s: padded(s),
        m: [0.0; 16],
    }
}

/// As `mxfp4::half_scale`, without a branch.
#[inline(always)]
fn half_scale(e: u8) -> f32 {
    let e = u32::from(e);
    let normal = e.wrapping_sub(1) << 23;
    let subnormal = 0x0020_0000 << (e & 1);
    f32::from_bits(if e < 2 { subnormal } else { normal })
}

#[inline(always)]
unsafe fn q2_k<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    let block: &[u8; BYTES] = chunk.try_into().expect("one block a chunk");
    // SAFETY: the caller's duty is the same.
    let (d, dmin) = unsafe { pair::<H>(half_at(block, 80), half_at(block, 82)) };
    let mut out = Scales {
        s: [0.0; 16],
        m: [0.0; 16],
    };
    for (i, &byte) in block[..16].iter().enumerate() {
        out.s[i] = d * f32::from(byte & 0xf);
        out.m[i] = -(dmin * f32::from(byte >> 4));
    }
    out
}

#[inline(always)]
unsafe fn q3_k<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    let block: &[u8; BYTES] = chunk.try_into().expect("one block a chunk");
    // SAFETY: the caller's duty is the same.
    let (d, _) = unsafe { pair::<H>(half_at(block, 108), 0) };
    // Four scales a word: see core's `q3_k::scale` for where their bits are.
    let low = [word_at(block, 96), word_at(block, 100)];
    let high = word_at(block, 104);
    let words = [
        low[0] & 0x0f0f_0f0f | high << 4 & 0x3030_3030,
        low[1] & 0x0f0f_0f0f | high << 2 & 0x3030_3030,
        low[0] >> 4 & 0x0f0f_0f0f | high & 0x3030_3030,
        low[1] >> 4 & 0x0f0f_0f0f | high >> 2 & 0x3030_3030,
    ];
    let bytes: [u8; 16] = bytes_of(words);
    let mut s = [0f32; 16];
    for (s, byte) in s.iter_mut().zip(bytes) {
        *s = d * (f32::from(byte) - 32.0);
    }
    Scales { s, m: [0.0; 16] }
}

/// Q4_K and Q5_K.
#[inline(always)]
unsafe fn q4_k<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    let block: &[u8; BYTES] = chunk.try_into().expect("one block a chunk");
    // SAFETY: the caller's duty is the same.
    let (d, dmin) = unsafe { pair::<H>(half_at(block, 0), half_at(block, 2)) };
    // Four scales or minimums a word: see core's `q4_k::scale_min` for where their bits are.
    let (a, b, c) = (word_at(block, 4), word_at(block, 8), word_at(block, 12));
    let words = [
        a & 0x3f3f_3f3f,
        c & 0x0f0f_0f0f | a >> 2 & 0x3030_3030,
        b & 0x3f3f_3f3f,
        c >> 4 & 0x0f0f_0f0f | b >> 2 & 0x3030_3030,
    ];
    let bytes: [u8; 16] = bytes_of(words);
    let mut out = Scales {
        s: [0.0; 16],
        m: [0.0; 16],
    };
    for g in 0..GROUPS {
        out.s[g] = d * f32::from(bytes[g]);
        out.m[g] = -(dmin * f32::from(bytes[GROUPS + g]));
    }
    out
}

#[inline(always)]
unsafe fn q6_k<H: Halves, const BYTES: usize>(chunk: &[u8]) -> Scales {
    let block: &[u8; BYTES] = chunk.try_into().expect("one block a chunk");
    // SAFETY: the caller's duty is the same.
    let (d, _) = unsafe { pair::<H>(half_at(block, 208), 0) };
    let mut s = [0f32; 16];
    for (s, &byte) in s.iter_mut().zip(&block[192..208]) {
        *s = d * f32::from(byte as i8);
    }
    Scales { s, m: [0.0; 16] }
}

/// The half at byte `at` of each block of 32; zero for those a short chunk lacks.
#[inline(always)]
fn column<const BYTES: usize>(chunk: &[u8], at: usize) -> [u16; 8] {
    let blocks = chunk.as_chunks::<BYTES>().0;
    match <&[_; GROUPS]>::try_from(blocks) {
        // The usual case, without a branch a block.
        Ok(blocks) => std::array::from_fn(|i| half_at(&blocks[i], at)),
        Err(_) => {
            let mut out = [0; 8];
            for (out, block) in out.iter_mut().zip(blocks) {
                *out = half_at(block, at);
            }
            out
        }
    }
}

#[inline(always)]
fn half_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

#[inline(always)]
fn word_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

#[inline(always)]
fn bytes_of(words: [u32; 4]) -> [u8; 16] {
    let mut out = [0; 16];
    for (out, word) in out.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *out = word.to_le_bytes();
    }
    out
}

#[inline(always)]
fn padded(low: [f32; 8]) -> [f32; 16] {
    let mut out = [0.0; 16];
    out[..8].copy_from_slice(&low);
    out
}

#[inline(always)]
unsafe fn pair<H: Halves>(a: u16, b: u16) -> (f32, f32) {
    // SAFETY: the caller's duty is the same.
    let wide = unsafe { H::widen([a, b, 0, 0, 0, 0, 0, 0]) };
    (wide[0], wide[1])
}

#[cfg(test)]
mod tests {
    use leanstream_core::quant::mxfp4;

    #[test]
    fn exponents_are_what_core_says() {
        for e in 0..=u8::MAX {
            assert_eq!(super::half_scale(e), mxfp4::half_scale(e), "{e}");
        }
    }
}
