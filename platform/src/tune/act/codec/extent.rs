//! Smallest and largest of what is being produced, in registers: the first stage of a reduction that
//! goes on in L1 (a group's tile) and, by [`Range::join`], across tiles and threads.

use leanstream_core::act::codec::Range;

use crate::cpu::vector::lanes::Lanes;

/// Running extremes, one per lane. For kernels that see each vector of a group go by; what they
/// gather takes three registers and three instructions a vector.
#[derive(Clone, Copy)]
pub(crate) struct Extent<L: Lanes> {
    low: L::V,
    high: L::V,
    /// 0 times everything seen: NaN once something wasn't finite.
    odd: L::V,
}

impl<L: Lanes> Extent<L> {
    /// Of nothing yet.
    #[inline(always)]
    pub(crate) fn new(l: L) -> Self {
        Self {
            low: l.splat(f32::INFINITY),
            high: l.splat(f32::NEG_INFINITY),
            odd: l.splat(0.0),
        }
    }

    /// One more vector of elements.
    #[inline(always)]
    pub(crate) fn see(&mut self, l: L, v: L::V) {
        self.low = l.min(self.low, v);
        self.high = l.max(self.high, v);
        self.odd = l.fma(v, l.splat(0.0), self.odd);
    }

    /// Of all that both have seen.
    #[inline(always)]
    pub(crate) fn join(self, l: L, other: Self) -> Self {
        Self {
            low: l.min(self.low, other.low),
            high: l.max(self.high, other.high),
            odd: l.add(self.odd, other.odd),
        }
    }

    /// The range of all elements: as [`Range::of`] has it, but for the sign of a zero, and NaN also if one was
    /// infinite.
    #[inline(always)]
    pub(crate) fn range(self, l: L) -> Range {
        if l.sum(self.odd).is_nan() {
            return Range::NAN;
        }
        Range {
            min: -l.top(l.sub(l.splat(0.0), self.low)),
            max: l.top(self.high),
        }
    }

    /// Of a slice, two vectors at a time.
    #[inline(always)]
    pub(crate) fn of(l: L, x: &[f32]) -> Range {
        let (mut a, mut b) = (Self::new(l), Self::new(l));
        let mut pairs = x.chunks_exact(2 * L::N);
        for pair in &mut pairs {
            a.see(l, l.take(pair));
            b.see(l, l.take(&pair[L::N..]));
        }
        for part in pairs.remainder().chunks(L::N) {
            // What fills a part up has been seen already.
            let v = if part.len() == L::N {
                l.take(part)
            } else {
                l.take_part(part, part[0])
            };
            a.see(l, v);
        }
        a.join(l, b).range(l)
    }
}
