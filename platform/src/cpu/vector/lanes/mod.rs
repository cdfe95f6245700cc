//! The vocabulary in which every kernel of this room is written: one vector of `f32` and what can be
//! done to it. One ISA a file; kernels are generic over [`Lanes`] and instantiated once per ISA.
//!
//! A value of a `Lanes` type is a witness that the CPU has the ISA: it can only be made by an `unsafe`
//! `assume`, so the arithmetic itself is safe to call. Everything is `#[inline(always)]` and must end
//! up inside a function that carries the ISA's `#[target_feature]`, or it compiles to real calls.

#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;

/// The widest vector of any ISA, in floats. Paddings and position blocks are multiples of it.
pub(crate) const LANES_MAX: usize = 16;

/// One vector of `N` floats on one ISA.
pub(crate) trait Lanes: Copy {
    /// Floats in a vector; divides [`LANES_MAX`].
    const N: usize;
    /// Vectors per row that a six-row matrix micro-kernel can keep in registers.
    const PANEL: usize;
    /// The register.
    type V: Copy;

    /// Every lane `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Lane by lane `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lane by lane `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lane by lane `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lane by lane `a / b`, correctly rounded.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// Lane by lane `a * b + c`: rounded once on every ISA but the portable one, which rounds twice.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger; NaN in `b` gives NaN, NaN in `a` gives `b` or NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; NaN as in [`Lanes::max`].
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// Nearest whole number, ties to even. `|a| < 2^22`.
    fn round(self, a: Self::V) -> Self::V;
    /// `2^n` for whole `n` in `-127 ..= 127`; `-127` gives 0.
    fn pow2(self, n: Self::V) -> Self::V;
    /// `yes` where `a < b`, else `no` (also where either is NaN).
    fn where_less(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// The sum of all lanes, as a fixed tree of halves.
    fn sum(self, a: Self::V) -> f32;
    /// The largest lane.
    fn top(self, a: Self::V) -> f32;

    /// Load `N` floats.
    ///
    /// # Safety
    /// `from .. from + N` is readable; no alignment is asked.
    unsafe fn load(self, from: *const f32) -> Self::V;
    /// Store `N` floats.
    ///
    /// # Safety
    /// `to .. to + N` is writable; no alignment is asked.
    unsafe fn store(self, to: *mut f32, v: Self::V);
    /// Load `N` half floats (IEEE binary16 bits), exactly.
    ///
    /// # Safety
    /// `from .. from + N` is readable; no alignment is asked.
    unsafe fn load_f16(self, from: *const u16) -> Self::V;
    /// Store `N` half floats, rounded to nearest even.
    ///
    /// # Safety
    /// `to .. to + N` is writable; no alignment is asked.
    unsafe fn store_f16(self, to: *mut u16, v: Self::V);
    /// Load `N` signed bytes, exactly.
    ///
    /// # Safety
    /// `from .. from + N` is readable.
    unsafe fn load_i8(self, from: *const i8) -> Self::V;

    /// The first `N` floats of a slice, which must have them.
    #[inline(always)]
    fn take(self, from: &[f32]) -> Self::V {
        assert!(from.len() >= Self::N);
        // SAFETY: the length was just checked.
        unsafe { self.load(from.as_ptr()) }
    }
    /// Write the first `N` floats of a slice, which must have them.
    #[inline(always)]
    fn put(self, to: &mut [f32], v: Self::V) {
        assert!(to.len() >= Self::N);
        // SAFETY: the length was just checked.
        unsafe { self.store(to.as_mut_ptr(), v) }
    }
    /// A slice shorter than `N`, filled up with `pad`.
    #[inline(always)]
    fn take_part(self, from: &[f32], pad: f32) -> Self::V {
        let mut full = [pad; LANES_MAX];
        full[..from.len()].copy_from_slice(from);
        self.take(&full)
    }
    /// The first lanes, as many as the slice (at most `N`) holds.
    #[inline(always)]
    fn put_part(self, to: &mut [f32], v: Self::V) {
        let mut full = [0.0; LANES_MAX];
        self.put(&mut full, v);
        let len = to.len();
        to.copy_from_slice(&full[..len]);
    }
}
