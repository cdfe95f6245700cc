//! Elementwise and reducing operations over `f32`, one concern a file, on the best vectors the CPU has.
//!
//! [`Vector`] is the handle: it names an instruction set that was checked, and every operation is a
//! method of it. All operations are deterministic: on one instruction set, equal inputs give equal
//! bits, whatever the alignment or the thread. Sums run in a fixed number of lanes that are added in
//! a fixed order, so two instruction sets may differ in the last bits.
//!
//! Nothing here allocates. Lengths that disagree are programmer errors and panic.

mod arith;
mod exp;
mod gate;
mod halves;
pub(crate) mod lanes;
mod norm;
mod reduce;
mod softmax;

pub(crate) use exp::{exp_lanes, tanh_lanes};

use super::{Isa, Kernels};

/// An instruction set that this machine was seen to have. One byte; copy it freely.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Vector(Isa);

impl Vector {
    /// The best this machine has.
    #[must_use]
    pub fn detect() -> Self {
        Isa::ALL
            .into_iter()
            .rev()
            .find_map(Self::get)
            .unwrap_or(Self(Isa::Scalar))
    }

    /// The operations on `isa`, or `None` where this machine lacks it.
    #[must_use]
    pub fn get(isa: Isa) -> Option<Self> {
        isa.available().then_some(Self(isa))
    }

    /// The operations that go with these matrix kernels.
    #[must_use]
    pub fn beside(kernels: &Kernels) -> Self {
        // Kernels exist only where their instruction set does.
        Self(kernels.isa())
    }

    /// The instruction set.
    #[must_use]
    pub fn isa(self) -> Isa {
        self.0
    }

    /// All that this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Isa::ALL.into_iter().filter_map(Self::get)
    }
}

/// Methods of [`Vector`] from bodies that are generic over [`lanes::Lanes`]: each body is compiled
/// once per instruction set, inside a function that carries the set's target features.
macro_rules! multiversion {
    ($(
        $(#[$meta:meta])*
        $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:path;
    )+) => {
        impl $crate::cpu::vector::Vector {$(
            $(#[$meta])*
            $vis fn $name(self, $($arg: $ty),*) $(-> $ret)? {
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function carries the features.
                    let lanes = unsafe { $crate::cpu::vector::lanes::avx512::Avx512::assume() };
                    $body(lanes, $($arg),*)
                }
                #[cfg(target_arch = "x86_64")]
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    // SAFETY: this function carries the features.
                    let lanes = unsafe { $crate::cpu::vector::lanes::avx2::Avx2::assume() };
                    $body(lanes, $($arg),*)
                }
                match self.isa() {
                    // SAFETY: a `Vector` names only an instruction set that the machine has.
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx512 => unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    $crate::cpu::Isa::Avx2 | $crate::cpu::Isa::AvxVnni => unsafe { avx2($($arg),*) },
                    #[cfg(target_arch = "aarch64")]
                    $crate::cpu::Isa::Neon
                    | $crate::cpu::Isa::NeonDot
                    | $crate::cpu::Isa::NeonI8mm => {
                        // SAFETY: every target of this architecture that we build for has NEON.
                        let lanes = unsafe { $crate::cpu::vector::lanes::neon::Neon::assume() };
                        $body(lanes, $($arg),*)
                    }
                    _ => $body($crate::cpu::vector::lanes::portable::Portable, $($arg),*),
                }
            }
        )+}
    };
}
pub(crate) use multiversion;

/// What the tests of this room share: every instruction set, and numbers that look random.
#[cfg(test)]
pub(crate) mod testing {
    /// A small generator (xorshift), so that failures repeat.
    pub(crate) struct Random(pub u64);

    impl Random {
        /// Uniform in `-1 .. 1`.
        pub(crate) fn unit(&mut self) -> f32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        }
        /// `len` numbers in `-size .. size`.
        pub(crate) fn floats(&mut self, len: usize, size: f32) -> Vec<f32> {
            (0..len).map(|_| self.unit() * size).collect()
        }
    }

    /// Lengths around every vector width, and a long one.
    pub(crate) const LENGTHS: [usize; 13] = [1, 3, 4, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1000];

    /// Panics unless `got` is within `relative` of `want`, or within `absolute`.
    #[track_caller]
    pub(crate) fn close(got: f32, want: f64, relative: f64, absolute: f64) {
        let error = (f64::from(got) - want).abs();
        assert!(
            error <= relative * want.abs() + absolute,
            "{got:e}, not {want:e}: off by {error:e}"
        );
    }
}
