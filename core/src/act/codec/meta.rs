//! A group's minimum and scale: 4 bytes, whatever the bits of its codes.

use super::Bits;

/// The least scale: below it `2^16 / s` would overflow. Groups that span less have a coarser grid than
/// they could, of steps that are nothing beside any number that training meets.
pub const SCALE_MIN: f32 = f32::from_bits((127 - 110) << 23);

/// Sign bit of a scale, which scales don't need: the group has one value, kept in the other bits.
const CONSTANT: u16 = 0x8000;

/// The smallest and largest of some elements. A NaN among them makes both NaN.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Range {
    /// The smallest; infinity for no elements.
    pub min: f32,
    /// The largest; negative infinity for no elements.
    pub max: f32,
}

impl Range {
    /// Of no elements: joins with any other without changing it.
    pub const NONE: Self = Self {
        min: f32::INFINITY,
        max: f32::NEG_INFINITY,
    };
    /// Of elements with NaN among them.
    pub const NAN: Self = Self {
        min: f32::NAN,
        max: f32::NAN,
    };

    /// Of `x`.
    #[must_use]
    pub fn of(x: &[f32]) -> Self {
        x.iter()
            .fold(Self::NONE, |range, &x| range.join(Self { min: x, max: x }))
    }

    /// Of both, in any order: partial ranges of tiles and of threads join to the same.
    #[inline]
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        if self.min.is_nan() || other.min.is_nan() {
            return Self::NAN;
        }
        Self {
            min: if other.min < self.min {
                other.min
            } else {
                self.min
            },
            max: if other.max > self.max {
                other.max
            } else {
                self.max
            },
        }
    }
}

/// Minimum and scale of a group, both the upper halves of an f32 (bf16), rounded outward.
///
/// A group of one value `c` keeps 31 bits of `c` instead; its lowest bit is in its codes, which are all
/// ones or all zeros and survive shrinking. So it is exact.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[repr(C)]
pub struct Meta {
    min: u16,
    scale: u16,
}

/// What quantizing an element takes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Grid {
    /// `m`.
    pub base: f32,
    /// `2^16 / s`.
    pub inverse: f32,
    /// `2^16 B`.
    pub top: f32,
}

impl Grid {
    /// The code of `x` where `u` is uniform in `0 .. 2^16`.
    ///
    /// The comparison with `top` comes before `u` is added, so that a group's maximum, which rounding may
    /// put above `B`, can't wrap. NaN becomes 0.
    #[inline]
    #[must_use]
    pub fn code(self, x: f32, u: u32) -> u8 {
        let at = (x - self.base) * self.inverse;
        let at = if at > 0.0 { at } else { 0.0 };
        let at = if at < self.top { at } else { self.top };
        // To the nearest whole number, ties to even: from 2^23 on there are no others.
        const WHOLE: f32 = (1 << 23) as f32;
        let at = if at < WHOLE { (at + WHOLE) - WHOLE } else { at };
        ((at as u32).wrapping_add(u) >> 16) as u8
    }
}

impl Meta {
    /// Of a group with that range; `None` if it isn't finite or the grid would overflow.
    #[inline]
    #[must_use]
    pub fn new(range: Range, bits: Bits) -> Option<Self> {
        // A zero's sign would depend on the order in which elements were compared.
        let (min, max) = (range.min + 0.0, range.max + 0.0);
        if !(min >= f32::MIN && max <= f32::MAX && min <= max) {
            return None;
        }
        if min == max {
            let bits = min.to_bits();
            return Some(Self {
                min: (bits >> 16) as u16,
                scale: CONSTANT | (bits as u16 >> 1),
            });
        }
        let base = down(min);
        let steps = bits.steps() as f32;
        let (span, lost) = exact_difference(max, base);
        let least = span / steps;
        let mut scale = up(if least > SCALE_MIN { least } else { SCALE_MIN });
        // A scale has 8 significant bits and a code too, so all products here are exact. The quotient
        // was rounded: its bf16 neighbour above may still fall short of the span.
        if scale * steps - span < lost {
            scale = f32::from_bits(scale.to_bits().wrapping_add(1 << 16));
        }
        (base + scale * steps).is_finite().then_some(Self {
            min: (base.to_bits() >> 16) as u16,
            scale: (scale.to_bits() >> 16) as u16,
        })
    }

    /// From its 4 bytes: minimum and scale, little endian.
    #[inline]
    #[must_use]
    pub const fn from_bytes([a, b, c, d]: [u8; 4]) -> Self {
        Self {
            min: u16::from_le_bytes([a, b]),
            scale: u16::from_le_bytes([c, d]),
        }
    }

    /// To 4 bytes.
    #[inline]
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 4] {
        let ([a, b], [c, d]) = (self.min.to_le_bytes(), self.scale.to_le_bytes());
        [a, b, c, d]
    }

    /// Whether the group has one value.
    #[inline]
    #[must_use]
    pub const fn is_constant(self) -> bool {
        self.scale & CONSTANT != 0
    }

    /// The value of all elements, given a byte of their codes; `None` unless the group has one value.
    #[inline]
    #[must_use]
    pub const fn constant(self, code: u8) -> Option<f32> {
        if !self.is_constant() {
            return None;
        }
        let bits = (self.min as u32) << 16 | (self.scale as u32) << 1 & 0xffff | (code & 1) as u32;
        Some(f32::from_bits(bits))
    }

    /// The byte that all codes of a group consist of whose only value is `value`.
    #[inline]
    #[must_use]
    pub fn constant_codes(value: f32) -> u8 {
        // As in `new`, a zero is positive.
        if (value + 0.0).to_bits() & 1 == 1 {
            0xff
        } else {
            0
        }
    }

    /// `m`; meaningless where the group has one value.
    #[inline]
    #[must_use]
    pub const fn base(self) -> f32 {
        f32::from_bits((self.min as u32) << 16)
    }

    /// The grid's step for codes of `stored` bits in a group that was quantized to `encoded` bits: `s` times what
    /// the coarser grid skips. Exact, and so is its product with any code.
    #[inline]
    #[must_use]
    pub fn step(self, encoded: Bits, stored: Bits) -> f32 {
        debug_assert!(stored <= encoded, "codes shrink");
        self.scale() * (encoded.steps() / stored.steps()) as f32
    }

    /// What quantizing to `bits` takes; meaningless where the group has one value.
    #[inline]
    #[must_use]
    pub fn grid(self, bits: Bits) -> Grid {
        Grid {
            base: self.base(),
            inverse: 65536.0 / self.scale(),
            top: (bits.steps() << 16) as f32,
        }
    }

    /// `B s`: what the grid spans, at least the group's range and hardly more; 0 where the group has one
    /// value. A code's variance is at most `(span / steps)^2 / 4`, on average a sixth of the square.
    #[inline]
    #[must_use]
    pub fn span(self, encoded: Bits) -> f32 {
        if self.is_constant() {
            0.0
        } else {
            self.scale() * encoded.steps() as f32
        }
    }

    const fn scale(self) -> f32 {
        f32::from_bits((self.scale as u32) << 16)
    }
}

/// `a - b` rounded, and exactly what that lost.
#[inline]
fn exact_difference(a: f32, b: f32) -> (f32, f32) {
    let near = a - b;
    let part = near - a;
    (near, (a - (near - part)) - (b + part))
}

/// The largest bf16 that isn't above `x`; negative infinity below them all.
#[inline]
fn down(x: f32) -> f32 {
    let bits = x.to_bits();
    let whole = bits & 0xffff_0000;
    // Cutting bits off rounds toward zero: up, where the number is negative.
    let step = u32::from(bits != whole && bits >> 31 == 1) << 16;
    f32::from_bits(whole.wrapping_add(step))
}

/// The least bf16 that isn't below `x`, which is positive; infinity above them all.
#[inline]
fn up(x: f32) -> f32 {
    f32::from_bits(x.to_bits().wrapping_add(0xffff) & 0xffff_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn exact(x: f32) -> f64 {
        f64::from(x)
    }

    /// A generator (xorshift) of floats of all sizes.
    fn floats(n: usize) -> impl Iterator<Item = f32> {
        let mut state = 0x1234_5678_9abc_def1u64;
        core::iter::repeat_with(move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            f32::from_bits((state >> 32) as u32)
        })
        .filter(|x| x.is_finite())
        .take(n)
    }

    #[test]
    fn rounding_is_outward_to_the_nearest() {
        for x in floats(100_000).chain([0.0, 1.0, -1.0, f32::MIN_POSITIVE, -1e-45, 1e-45]) {
            let (low, high) = (down(x), up(x.abs()));
            assert!(low <= x && low.to_bits() & 0xffff == 0, "{x:e} {low:e}");
            assert!(high >= x.abs() && high.to_bits() & 0xffff == 0, "{x:e}");
            if low.is_finite() && low != x {
                // The next bf16 above is above x.
                let bits = low.to_bits();
                let next = if bits >> 31 == 1 {
                    bits - 0x1_0000
                } else {
                    bits + 0x1_0000
                };
                assert!(f32::from_bits(next) > x, "{x:e}");
            }
        }
    }

    #[test]
    fn the_grid_spans_the_group_and_its_scale_is_the_least_that_does() {
        let pairs: heapless::Vec<f32, 4000> = floats(4000).collect();
        let near = [1.0f32, -1.0, 3.0, 1000.1, -0.3].map(|x| [x, x * (1.0 + 1e-6), x * 0.99, 0.0]);
        let all = pairs.chunks(2).map(|p| (p[0], p[1]));
        let close = near.iter().flat_map(|n| n[1..].iter().map(|&b| (n[0], b)));
        for (a, b) in all.chain(close) {
            let (min, max) = if a < b { (a, b) } else { (b, a) };
            for bits in Bits::ALL {
                let Some(meta) = Meta::new(Range { min, max }, bits) else {
                    let span = exact(max) - exact(min);
                    assert!(
                        span > 0.98 * exact(f32::MAX) || min < -3.3e38,
                        "{min:e} {max:e}"
                    );
                    continue;
                };
                if meta.is_constant() {
                    assert_eq!(min, max);
                    continue;
                }
                let (base, scale) = (exact(meta.base()), exact(meta.scale()));
                let steps = f64::from(bits.steps());
                assert!(base <= exact(min));
                // Differences against powers of ten apart round in f64 as well, by next to nothing.
                let short = exact(max) - base - steps * scale;
                assert!(short <= 0.0, "{min:e} {max:e} {bits:?} {short:e}");
                let below = exact(f32::from_bits(meta.scale().to_bits() - (1 << 16)));
                assert!(
                    base + steps * below < exact(max) || meta.scale() == SCALE_MIN,
                    "{min:e} {max:e} {bits:?}: {scale:e} is more than needed"
                );
            }
        }
    }

    #[test]
    fn what_is_on_a_grid_gets_that_grid() {
        for bits in Bits::ALL {
            let range = Range {
                min: -3.0,
                max: -3.0 + 0.5 * bits.steps() as f32,
            };
            let meta = Meta::new(range, bits).unwrap();
            assert_eq!((meta.base(), meta.scale()), (-3.0, 0.5), "{bits:?}");
            assert_eq!(meta.span(bits), 0.5 * bits.steps() as f32);
        }
    }

    #[test]
    fn one_value_is_exact() {
        for x in floats(10_000).chain([0.0, -0.0, f32::MAX, f32::MIN, 1e-45]) {
            let meta = Meta::new(Range { min: x, max: x }, Bits::Two).unwrap();
            assert_eq!(meta.constant(Meta::constant_codes(x)), Some(x));
            assert_eq!(Meta::from_bytes(meta.to_bytes()), meta);
            assert_eq!(meta.span(Bits::Two), 0.0);
        }
    }

    #[test]
    fn what_is_not_finite_is_refused() {
        let refused = |min: f32, max: f32| Meta::new(Range { min, max }, Bits::Four).is_none();
        assert!(refused(f32::NAN, f32::NAN));
        assert!(refused(0.0, f32::INFINITY));
        assert!(refused(f32::NEG_INFINITY, 0.0));
        assert!(refused(f32::INFINITY, f32::INFINITY));
        assert!(refused(f32::INFINITY, f32::NEG_INFINITY), "no elements");
        assert!(refused(-3e38, 3e38), "the range overflows");
        assert!(refused(1.0, 0.0), "upside down");
        assert!(!refused(-1e38, 2e38));
    }

    #[test]
    fn ranges_join_in_any_order() {
        let x = [3.0, -1.0, 7.0, 2.0];
        let whole = Range::of(&x);
        assert_eq!(
            whole,
            Range {
                min: -1.0,
                max: 7.0
            }
        );
        assert_eq!(Range::of(&x[2..]).join(Range::of(&x[..2])), whole);
        assert_eq!(whole.join(Range::NONE), whole);
        for x in [
            [f32::NAN, 1.0, 2.0],
            [1.0, f32::NAN, 2.0],
            [1.0, 2.0, f32::NAN],
        ] {
            assert!(Range::of(&x).min.is_nan());
            assert!(Range::of(&x).join(whole).min.is_nan());
            assert!(whole.join(Range::of(&x)).min.is_nan());
        }
    }
}
