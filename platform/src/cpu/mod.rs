//! Matrix kernels of the CPU: the types they share and the choice of an instruction set at run time.
//!
//! One file (or folder) an instruction set, each a table of plain functions ([`Kernels`]):
//! [`scalar`] is the readable reference that runs everywhere and that all others are tested against.
//!
//! Two kinds of arithmetic:
//! - *int8* (quantized weights, `exact == false`): activations are rounded to int8 codes with one
//!   f32 scale per 32 ([`Kernels::quantize`]), dot products inside a group are exact integers, and
//!   only the sum over groups is f32.
//! - *f32* (`exact == true`, and always for F32, F16 and BF16 weights): decoded weights times f32
//!   activations.
//!
//! Deterministic: the result for one (row, token) is the same bits however rows are cut into calls,
//! however many tokens share the call, whatever the alignment, on whichever thread. `matvec` and
//! `matmul` may differ from each other by rounding, and so may two instruction sets.

pub mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod error;
mod isa;
#[cfg(target_arch = "aarch64")]
mod neon;
mod prefetch;
pub mod scalar;
mod scales;
mod types;
pub mod units;
pub mod vector;

pub use error::IsaError;
pub use isa::Isa;
pub use types::{Act, OutTile, Rows, SCRATCH_COLS, Scratch};

use leanstream_core::quant::QuantType;
use types::RowList;

/// Name of the environment variable that forces an instruction set down, for tests and for boards
/// whose kernel reports features that don't work.
pub const ISA_VARIABLE: &str = "LEANSTREAM_ISA";

/// Codes that share one activation scale.
pub const ACT_GROUP: usize = 32;
/// Codes that share one entry of [`Act::sums`].
pub const SUM_GROUP: usize = 16;

/// The kernels of one instruction set. A small `Copy` table: give each thread its own.
#[derive(Clone, Copy, Debug)]
pub struct Kernels {
    isa: Isa,
    table: Table,
}

/// What an instruction set provides. The callers in this file have checked every length, so an
/// implementation may rely on them; it is reached only on a machine that has the instruction set.
#[derive(Clone, Copy, Debug)]
struct Table {
    quantize: Quantize,
    matvec: fn(&RowList<'_>, &Act<'_>, bool, &mut [f32]),
    matmul: fn(&Rows<'_>, &Act<'_>, bool, OutTile<'_>, &mut Scratch),
}

/// Activations (n) to codes (n), scales (n / 32) and sums (n / 16).
type Quantize = fn(&[f32], &mut [i8], &mut [f32], &mut [i16]);

impl Kernels {
    /// The best kernels this machine can run.
    #[must_use]
    pub fn detect() -> Self {
        Isa::ALL
            .iter()
            .rev()
            .find_map(|&isa| Self::get(isa))
            .unwrap_or(Self::of(Isa::Scalar, scalar::TABLE))
    }

    /// The kernels of `isa`, or `None` where this machine lacks it.
    #[must_use]
    pub fn get(isa: Isa) -> Option<Self> {
        if !isa.available() {
            return None;
        }
        let table = match isa {
            Isa::Scalar => scalar::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => avx2::TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::AvxVnni => avx2::VNNI_TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => neon::TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonDot => neon::DOT_TABLE,
            #[cfg(target_arch = "aarch64")]
            Isa::NeonI8mm => neon::I8MM_TABLE,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => avx512::TABLE,
            _ => return None,
        };
        Some(Self::of(isa, table))
    }

    /// [`Kernels::detect`], or what the environment variable [`ISA_VARIABLE`] names.
    ///
    /// # Errors
    /// The variable's value is no instruction set, or this machine lacks the one it names.
    pub fn from_env() -> Result<Self, IsaError> {
        match std::env::var_os(ISA_VARIABLE) {
            None => Ok(Self::detect()),
            Some(value) => Self::from_name(&value.to_string_lossy()),
        }
    }

    /// The kernels of the instruction set called `name`, as [`Isa::name`] spells it.
    ///
    /// # Errors
    /// `name` is no instruction set, or this machine lacks it.
    pub fn from_name(name: &str) -> Result<Self, IsaError> {
        let isa = Isa::from_name(name).ok_or_else(|| IsaError::Unknown(name.to_owned()))?;
        Self::get(isa).ok_or(IsaError::Unsupported(isa))
    }

    /// All kernels this machine can run, slowest first.
    pub fn available() -> impl Iterator<Item = Self> {
        Isa::ALL.iter().filter_map(|&isa| Self::get(isa))
    }

    const fn of(isa: Isa, table: Table) -> Self {
        Self { isa, table }
    }

    /// The instruction set these are for.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// Round activations to int8: `x[k]` becomes about `codes[k] * scales[k / 32]`.
    ///
    /// In each group of 32, with `m` the largest absolute value: the scale is `m / 127` and a code
    /// is `x * (127 / m)` rounded to nearest, ties to even. A group whose `m` is below 1e-30 becomes
    /// zeros with scale 0; one that holds an infinity or a NaN gets codes 0 and a scale that is not
    /// finite, so that the result isn't either. `sums[k / 16]` is the sum of 16 codes. Bit-identical
    /// on every instruction set. Several tokens may be quantized in one call.
    ///
    /// Shapes: `x` (n), `codes` (n), `scales` (n / 32), `sums` (n / 16).
    ///
    /// # Panics
    /// `n` is no multiple of 32 or the lengths disagree.
    pub fn quantize(&self, x: &[f32], codes: &mut [i8], scales: &mut [f32], sums: &mut [i16]) {
        assert!(
            x.len().is_multiple_of(ACT_GROUP),
            "activations come in groups of 32"
        );
        assert_eq!(codes.len(), x.len(), "one code an activation");
        assert_eq!(
            scales.len(),
            x.len() / ACT_GROUP,
            "one scale per 32 activations"
        );
        assert_eq!(
            sums.len(),
            x.len() / SUM_GROUP,
            "one sum per 16 activations"
        );
        (self.table.quantize)(x, codes, scales, sums);
    }

    /// `out[row] = weights[row] . act` for one token: the decode path, bound by memory bandwidth.
    ///
    /// Shapes: `out` (rows). `exact` asks for f32 activations; float weights always use them.
    ///
    /// # Panics
    /// `act` has another number of columns, not one token, or lacks the form that is needed.
    pub fn matvec(&self, weights: &Rows<'_>, act: &Act<'_>, exact: bool, out: &mut [f32]) {
        assert_eq!(act.tokens, 1, "matvec takes one token");
        assert_eq!(out.len(), weights.rows(), "one output a row");
        let weights = RowList::together(weights);
        check(&weights, act, exact);
        (self.table.matvec)(&weights, act, exact, out);
    }

    /// [`Kernels::matvec`] over rows of `ty` that lie anywhere, bit for bit the same.
    ///
    /// # Panics
    /// As `matvec`, or a row has another length.
    fn matvec_apart(
        &self,
        rows: &[&[u8]],
        ty: QuantType,
        act: &Act<'_>,
        exact: bool,
        out: &mut [f32],
    ) {
        assert_eq!(act.tokens, 1, "matvec takes one token");
        assert_eq!(out.len(), rows.len(), "one output a row");
        let weights = RowList::apart(ty, act.cols, rows);
        check(&weights, act, exact);
        (self.table.matvec)(&weights, act, exact, out);
    }

    /// `out[token * stride + row] = weights[row] . act[token]`: the prompt path, bound by arithmetic.
    ///
    /// Weights are decoded once a call, so many tokens a call pay off; any number works. `exact` as
    /// in [`Kernels::matvec`]. Does not allocate: `scratch` is this thread's own.
    ///
    /// # Panics
    /// `act` has another number of columns or lacks the form that is needed, `out` is too short, or
    /// `scratch` was made for fewer columns.
    pub fn matmul(
        &self,
        weights: &Rows<'_>,
        act: &Act<'_>,
        exact: bool,
        out: OutTile<'_>,
        scratch: &mut Scratch,
    ) {
        check(&RowList::together(weights), act, exact);
        out.check(weights.rows(), act.tokens);
        assert!(
            scratch.fits(weights.cols),
            "scratch was made for fewer than {} columns",
            weights.cols
        );
        if act.tokens > 0 && weights.rows() > 0 {
            (self.table.matmul)(weights, act, exact, out, scratch);
        }
    }
}

/// Every length an implementation relies on.
fn check(weights: &RowList<'_>, act: &Act<'_>, exact: bool) {
    assert_eq!(
        act.cols, weights.cols,
        "activations and weights have the same columns"
    );
    let n = act.cols * act.tokens;
    if weights.uses_f32(exact) {
        assert_eq!(act.x.len(), n, "f32 activations of every token");
    } else {
        assert_eq!(act.codes.len(), n, "int8 activations of every token");
        assert_eq!(
            act.scales.len(),
            n / ACT_GROUP,
            "activation scales of every token"
        );
        assert_eq!(
            act.sums.len(),
            n / SUM_GROUP,
            "activation sums of every token"
        );
    }
}
