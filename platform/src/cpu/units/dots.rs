//! Products of scattered rows with one activation.

use leanstream_core::quant::QuantType;

use super::super::{Act, Rows};
use super::UnitKernels;

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
        for out in out.iter_mut() {
            let bytes = rows.next().expect("a row an output");
            let weights = Rows {
                ty,
                cols: act.cols,
                bytes,
            };
            self.kernels
                .matvec(&weights, act, exact, std::slice::from_mut(out));
        }
        assert!(rows.next().is_none(), "an output a row");
    }
}
