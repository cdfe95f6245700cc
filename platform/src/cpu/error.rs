//! Why an instruction set that was asked for can't be used.

use std::fmt;

use super::{ISA_VARIABLE, Isa, Kernels};

/// Why a named instruction set can't be used. Its text says which names would do.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum IsaError {
    /// No instruction set has this name.
    Unknown(String),
    /// This machine, or this build, lacks it.
    Unsupported(Isa),
}

impl fmt::Display for IsaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name) => write!(f, "unknown instruction set {name:?}")?,
            Self::Unsupported(isa) => write!(f, "this machine lacks the instruction set {isa}")?,
        }
        write!(f, "; unset {ISA_VARIABLE} or set it to one of:")?;
        for kernels in Kernels::available() {
            write!(f, " {}", kernels.isa())?;
        }
        Ok(())
    }
}

impl std::error::Error for IsaError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_name_the_value_and_the_way_out() {
        let unknown = Kernels::from_name("mmx").unwrap_err().to_string();
        assert!(unknown.contains("\"mmx\""), "{unknown}");
        assert!(unknown.contains("LEANSTREAM_ISA"), "{unknown}");
        assert!(unknown.contains(" scalar"), "{unknown}");
        let foreign = if cfg!(target_arch = "x86_64") {
            Isa::Neon
        } else {
            Isa::Avx2
        };
        let error = Kernels::from_name(foreign.name()).unwrap_err();
        assert_eq!(error, IsaError::Unsupported(foreign));
        assert!(error.to_string().contains(foreign.name()));
    }
}
