//! How 32 elements of a column are added to sums in registers: one way to store them an `impl`.

use super::column::Part;
use super::unpack::{GROUP, Unpack};
use crate::cpu::vector::lanes::portable::f16_to_f32;

/// One way to store a column.
pub(super) trait Kind {
    /// Bytes of a group.
    const BYTES: usize;

    /// Panics unless the part has what [`Kind::add`] reads of `len` elements.
    fn check(part: &Part<'_>, len: usize);

    /// `sums[i] += a * vector i of group g`.
    ///
    /// # Safety
    /// [`Kind::check`] has passed for the part and at least `32 * (g + 1)` elements.
    unsafe fn add<L: Unpack>(l: L, part: &Part<'_>, g: usize, a: L::V, sums: &mut [L::V; 8]);
}

/// Columns whose scales lie apart.
macro_rules! moved {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, $mins:ident, |$l:ident, $from:ident, $i:ident| $codes:expr
        $(, <const $param:ident: bool>)?) => {
        $(#[$doc])*
        pub(super) struct $name$(<const $param: bool>)?;

        impl$(<const $param: bool>)? Kind for $name$(<$param>)? {
            const BYTES: usize = $bytes;

            fn check(part: &Part<'_>, len: usize) {
                assert!(len.is_multiple_of(GROUP), "whole groups");
                assert_eq!(part.bytes.len(), len / GROUP * $bytes, "a code an element");
                assert_eq!(part.scales.len(), len, "a scale an element");
                assert_eq!(part.mins.len(), if $mins { len } else { 0 }, "minimums");
            }

            #[inline(always)]
            unsafe fn add<L: Unpack>(
                $l: L,
                part: &Part<'_>,
                g: usize,
                a: L::V,
                sums: &mut [L::V; 8],
            ) {
                // SAFETY: the caller says that the group is there.
                unsafe {
                    let $from = part.bytes.as_ptr().add(g * $bytes);
                    for ($i, sum) in sums.iter_mut().enumerate().take(GROUP / L::N) {
                        let at = g * GROUP + $i * L::N;
                        let scale = $l.load_f16(part.scales.as_ptr().add(at));
                        *sum = $l.fma($l.mul(a, scale), $codes, *sum);
                        if $mins {
                            let min = $l.load_f16(part.mins.as_ptr().add(at));
                            *sum = $l.fma(a, min, *sum);
                        }
                    }
                }
            }
        }
    };
}

const NO_MINS: bool = false;

moved!(
    /// Signed bytes.
    Moved8, 32, NO_MINS, |l, from, i| l.signed(from, i)
);
moved!(
    /// Nibbles, with an offset of 8 or minimums.
    Moved4, 16, MINS, |l, from, i| l.nibbles(from, i, if MINS { 0.0 } else { 8.0 }),
    <const MINS: bool>
);
moved!(
    /// Bytes to 31, with an offset of 16 or minimums.
    Moved5, 32, MINS, |l, from, i| l.unsigned(from, i, if MINS { 0.0 } else { 16.0 }),
    <const MINS: bool>
);

/// Blocks of a half-float scale and 32 signed bytes.
pub(super) struct Q8_0;

impl Kind for Q8_0 {
    const BYTES: usize = 34;

    fn check(part: &Part<'_>, len: usize) {
        assert!(len.is_multiple_of(GROUP), "whole groups");
        assert_eq!(part.bytes.len(), len / GROUP * Self::BYTES, "whole blocks");
    }

    #[inline(always)]
    unsafe fn add<L: Unpack>(l: L, part: &Part<'_>, g: usize, a: L::V, sums: &mut [L::V; 8]) {
        // SAFETY: the caller says that the group is there.
        unsafe {
            let block = part.bytes.as_ptr().add(g * Self::BYTES);
            let scale = f16_to_f32(u16::from_le_bytes(block.cast::<[u8; 2]>().read()));
            let t = l.mul(a, l.splat(scale));
            for (i, sum) in sums.iter_mut().enumerate().take(GROUP / L::N) {
                *sum = l.fma(t, l.signed(block.add(2), i), *sum);
            }
        }
    }
}

/// Float columns.
macro_rules! float {
    ($(#[$doc:meta])* $name:ident, $bytes:literal, |$l:ident, $from:ident, $i:ident| $value:expr) => {
        $(#[$doc])*
        pub(super) struct $name;

        impl Kind for $name {
            const BYTES: usize = GROUP * $bytes;

            fn check(part: &Part<'_>, len: usize) {
                assert_eq!(part.bytes.len(), len * $bytes, "a value an element");
            }

            #[inline(always)]
            unsafe fn add<L: Unpack>(
                $l: L,
                part: &Part<'_>,
                g: usize,
                a: L::V,
                sums: &mut [L::V; 8],
            ) {
                // SAFETY: the caller says that the group is there.
                unsafe {
                    let $from = part.bytes.as_ptr().add(g * Self::BYTES);
                    for ($i, sum) in sums.iter_mut().enumerate().take(GROUP / L::N) {
                        *sum = $l.fma(a, $value, *sum);
                    }
                }
            }
        }
    };
}

float!(
    /// IEEE singles.
    F32, 4, |l, from, i| l.load(from.add(4 * i * L::N).cast())
);
float!(
    /// IEEE halves.
    F16, 2, |l, from, i| l.load_f16(from.add(2 * i * L::N).cast())
);
float!(
    /// Upper halves of IEEE singles.
    Bf16, 2, |l, from, i| l.bf16(from, i)
);
