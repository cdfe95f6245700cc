//! Products of scattered rows with one activation.

use leanstream_core::quant::QuantType;

use super::super::Act;
use super::UnitKernels;

/// Rows whose addresses are gathered before the kernel runs over them.
const BATCH: usize = 32;

impl UnitKernels {
    /// `out[i] = rows[i] . act` for one token, each the very bits that [`super::super::Kernels::matvec`]
    /// gives for that row. A row is `cols` weights of type `ty`, at any address. Shapes: `out` (rows).
    ///
    /// # Panics
    /// A row has another length, there are more or fewer rows than outputs, or what `matvec` panics at.
    pub fn rows_dot<'a>(
        &self,
        rows: impl IntoIterator<Item = &'a [u8]>,
        ty: QuantType,
        act: &Act<'_>,
        exact: bool,
        out: &mut [f32],
    ) {
        let mut rows = rows.into_iter();
        for out in out.chunks_mut(BATCH) {
            let mut batch: [&[u8]; BATCH] = [&[]; BATCH];
            let batch = &mut batch[..out.len()];
            batch.fill_with(|| rows.next().expect("a row an output"));
            self.kernels.matvec_apart(batch, ty, act, exact, out);
        }
        assert!(rows.next().is_none(), "an output a row");
    }
}
