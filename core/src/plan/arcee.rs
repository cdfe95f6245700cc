//! `arcee`: Llama's blocks with an ungated feed-forward, `down(relu(up x)^2)`.

use super::{Activation, Arch, Hyper, MatrixId, Model, PlanError, Sink, llama};

const ARCH: &str = "arcee";

/// All but the last step; the embedding, for that.
pub(super) fn plan<'a>(
    model: &Model<'_, 'a>,
    sink: &mut impl Sink,
) -> Result<(Hyper, MatrixId), PlanError<'a>> {
    let hyper = hyper(model)?;
    let embedding = llama::describe(model, sink, &hyper)?;
    Ok((hyper, embedding))
}

/// Hyper-parameters.
pub(super) fn hyper<'a>(model: &Model<'_, 'a>) -> Result<Hyper, PlanError<'a>> {
    llama::hyper(model, ARCH, Arch::Arcee, Activation::ReluSquared)
}
