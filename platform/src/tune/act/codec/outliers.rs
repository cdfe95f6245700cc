//! Quantizing while some columns are kept apart.

use leanstream_core::act::codec::outlier::Outliers;
use leanstream_core::act::codec::{Bits, GROUP_MAX, Key, Meta, NotFinite};

use super::block::Block;
use super::pages::Writer;
use super::{BATCH, Coding, Run, quantize_groups};
use crate::cpu::vector::multiversion;

/// Where outliers of a run go.
#[derive(Debug)]
pub struct Apart<'a> {
    /// Their columns.
    pub outliers: &'a Outliers,
    /// What their rounding draws from: the tensor's [`Counter::outliers`](leanstream_core::act::codec::Counter::outliers).
    pub key: Key,
    /// bf16 of those in the run, [`Outliers::within`] its groups.
    pub values: &'a mut [u16],
}

multiversion! {
    /// [`Vector::quantize`](crate::cpu::vector::Vector::quantize) with outliers kept apart, so that they don't widen the
    /// grids of others. [`put_back`] comes after decoding.
    ///
    /// # Errors
    /// [`NotFinite`], as there.
    ///
    /// # Panics
    /// The lengths disagree.
    pub fn quantize_apart(
        run: Run,
        coding: Coding,
        apart: Apart<'_>,
        x: &[f32],
        metas: &mut [Meta],
        pages: &mut [&mut [u8]],
    ) -> Result<(), NotFinite> = body;
}

#[inline(always)]
fn body<L: Block>(
    l: L,
    run: Run,
    coding: Coding,
    apart: Apart<'_>,
    x: &[f32],
    metas: &mut [Meta],
    pages: &mut [&mut [u8]],
) -> Result<(), NotFinite> {
    let to = &mut Writer::new(pages);
    with_bits!(coding.bits, B => groups::<L, B>(l, run, coding.key, apart, x, metas, to))
}

#[inline(always)]
fn groups<L: Block, const B: u32>(
    l: L,
    run: Run,
    key: Key,
    apart: Apart<'_>,
    x: &[f32],
    metas: &mut [Meta],
    to: &mut Writer<'_, '_>,
) -> Result<(), NotFinite> {
    assert_eq!(x.len(), run.elements().len(), "the run's elements");
    assert_eq!(metas.len(), run.groups, "metadata for each group");
    let (mut rest, mut values) = (x, apart.values);
    // A batch without its outliers, in L1.
    let mut room = [0.0; BATCH * GROUP_MAX];
    for (batch, metas) in metas.chunks_mut(BATCH).enumerate() {
        let part = Run {
            grouping: run.grouping,
            first: run.first + batch * BATCH,
            groups: metas.len(),
        };
        let mut len = 0;
        for group in part.first..part.first + part.groups {
            let (x, others) = rest.split_at(run.grouping.columns(group).len());
            rest = others;
            let count = apart.outliers.within(&run.grouping, group..group + 1).len();
            let (own, others) = values.split_at_mut(count);
            values = others;
            let room = room[len..].first_chunk_mut().expect("room for every group");
            apart
                .outliers
                .split(x, &run.grouping, group, apart.key, own, room)?;
            len += x.len();
        }
        quantize_groups::<L, B, false>(l, part, key, &room[..len], None, metas, to)?;
    }
    Ok(())
}

/// Puts a run's outliers back into what was decoded.
///
/// Shapes: `values` as in [`Apart`], `out` the run's elements.
///
/// # Panics
/// The lengths disagree.
pub fn put_back(run: Run, outliers: &Outliers, values: &[u16], out: &mut [f32]) {
    assert_eq!(out.len(), run.elements().len(), "the run's elements");
    let (mut rest, mut values) = (out, values);
    for group in run.first..run.first + run.groups {
        let (out, others) = rest.split_at_mut(run.grouping.columns(group).len());
        rest = others;
        let count = outliers.within(&run.grouping, group..group + 1).len();
        let (own, others) = values.split_at(count);
        values = others;
        outliers.merge(&run.grouping, group, own, out);
    }
}
