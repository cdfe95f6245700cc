//! The instruction sets there are kernels for, and whether this machine has them.

use std::fmt;

/// An instruction set there may be kernels for. Ordered by preference within an architecture.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Isa {
    /// Plain Rust: runs everywhere, the reference for all others.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI (Alder Lake and its small cores, Zen 5).
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, VL, DQ, VNNI, next to AVX2, FMA and F16C.
    Avx512,
    /// AArch64 as of ARMv8.0 (Cortex-A53, A57, A72).
    Neon,
    /// AArch64 with the dot-product instructions (Cortex-A55, A76, A78AE).
    NeonDot,
    /// AArch64 with the int8 matrix instructions (Cortex-A510, X2, Neoverse V1).
    NeonI8mm,
}

impl Isa {
    /// All of them; a later one is preferred where the machine has it.
    pub const ALL: [Self; 7] = [
        Self::Scalar,
        Self::Avx2,
        Self::AvxVnni,
        Self::Avx512,
        Self::Neon,
        Self::NeonDot,
        Self::NeonI8mm,
    ];

    /// The name used by the command line and the environment.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::AvxVnni => "avx-vnni",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
            Self::NeonDot => "neon-dot",
            Self::NeonI8mm => "neon-i8mm",
        }
    }

    /// The instruction set called `name`, in upper or lower case.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name().eq_ignore_ascii_case(name))
    }

    /// True where this machine can run it.
    #[must_use]
    pub fn available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => Self::Avx2.available() && is_x86_feature_detected!("avxvnni"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
            #[cfg(target_arch = "aarch64")]
            Self::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
            #[cfg(target_arch = "aarch64")]
            Self::NeonI8mm => {
                Self::NeonDot.available() && std::arch::is_aarch64_feature_detected!("i8mm")
            }
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_read_back() {
        for isa in Isa::ALL {
            assert_eq!(Isa::from_name(isa.name()), Some(isa));
            assert_eq!(Isa::from_name(&isa.name().to_uppercase()), Some(isa));
        }
        assert_eq!(Isa::from_name(""), None);
        assert_eq!(Isa::from_name("avx"), None);
    }

    #[test]
    fn the_reference_is_everywhere() {
        assert!(Isa::Scalar.available());
    }
}
