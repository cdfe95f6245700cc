//! `arcee`: Llama's blocks with an ungated feed-forward, `down(relu(up x)^2)`.

use super::{Activation, Arch, Hyper, Model, PlanError, Sink, llama};

const ARCH: &str = "arcee";

pub(super) fn plan<'a>(
    model: &Model<'_, 'a>,
    sink: &mut impl Sink,
) -> Result<Hyper, PlanError<'a>> {
    let hyper = hyper(model)?;
    llama::describe(model, sink, &hyper)?;
    Ok(hyper)
}

/// Hyper-parameters.
pub(super) fn hyper<'a>(model: &Model<'_, 'a>) -> Result<Hyper, PlanError<'a>> {
    llama::hyper(model, ARCH, Arch::Arcee, Activation::ReluSquared)
}
