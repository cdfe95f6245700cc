//! What another budget would do for a run.

use super::memory::{self, HELD_VARIES, Request};
use super::model::{Info, Weights};

/// Doublings of the budget that are tried: enough for any machine.
const DOUBLINGS_MAX: u32 = 24;

/// About the least budget, in whole MiB, with which prompts are taken in by batches of `batch` tokens
/// or more. `None` if no budget does that.
pub fn budget_for_batch(
    info: &Info,
    weights: &Weights,
    request: &Request,
    batch: u32,
) -> Option<u64> {
    let does = |mib: u64| {
        let request = Request {
            budget: mib << 20,
            // The next process may hold a little more when it plans.
            held: request.held + HELD_VARIES,
            ..*request
        };
        memory::plan(info, weights, &request).is_ok_and(|plan| plan.batch >= batch)
    };
    let mut low = request.budget >> 20;
    let mut high = low.max(1);
    for _ in 0..DOUBLINGS_MAX {
        if does(high) {
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                *(if does(middle) { &mut high } else { &mut low }) = middle;
            }
            return Some(high << 20);
        }
        low = high;
        high *= 2;
    }
    None
}

/// The least budget with which `slots` units of a packed model have slots, and everything else stays
/// in memory beside them. `None` if no budget does that.
pub fn budget_for_units(
    info: &Info,
    weights: &Weights,
    request: &Request,
    slots: u32,
) -> Option<u64> {
    let does = |budget: u64| {
        let request = Request { budget, ..*request };
        memory::plan(info, weights, &request)
            .is_ok_and(|plan| plan.kept() == plan.planned && plan.unit_slots() >= slots)
    };
    let (mut low, mut high) = (0, request.held.max(1 << 20));
    for _ in 0..DOUBLINGS_MAX {
        if does(high) {
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                *(if does(middle) { &mut high } else { &mut low }) = middle;
            }
            return Some(high);
        }
        low = high;
        high = high.checked_mul(2)?;
    }
    None
}
