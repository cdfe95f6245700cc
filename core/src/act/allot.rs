//! How many bits each saved tensor is worth, and which give way first when the budget falls.
//!
//! Saving tensor i with B = 2^bits - 1 steps adds C / B^2 to the variance of the gradients, where C, its
//! [importance](super::importance), follows from the ranges of its groups and from what the backward pass multiplied it
//! with. [`solve`] minimises the sum under a number of pages: it starts from what takes fewest, and
//! always buys the step with the highest gain per page. A group of tensors may instead be recomputed:
//! that takes the pages of what it is recomputed from, adds no variance, and costs time, which the
//! caller states in the same unit (see [`Recompute::loss`]).
//!
//! Gains per page fall from step to step of one tensor, so the result is within one step of the best.

use core::fmt;

use super::Width;
use super::pool::{Pool, TensorId};

/// Bits of tensors change only for a loss that is this much smaller, unless they have to.
pub const HYSTERESIS: f64 = 0.1;

/// A tensor to be saved.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Site {
    /// Pages of the whole tensor at each of [`Width::ALL`].
    pub pages: [u32; 6],
    /// C: what one step of its grid squared costs. Not negative.
    pub importance: f32,
    /// At least so wide; codes.
    pub least: Width,
    /// At most so wide; codes. A tensor that is saved can't become wider.
    pub most: Width,
    /// What [`solve`] chose, and keeps where that is nearly as good; none before the first time.
    pub width: Option<Width>,
    next: Width,
}

impl Site {
    /// A tensor that may have any codes.
    pub fn new(pages: [u32; 6]) -> Self {
        Self {
            pages,
            importance: 0.0,
            least: Width::One,
            most: Width::Eight,
            width: None,
            next: Width::One,
        }
    }

    /// Pages at `width`.
    pub fn pages_at(&self, width: Width) -> u32 {
        let at = Width::ALL.iter().position(|&w| w == width);
        self.pages[at.expect("all widths are listed")]
    }

    /// What `width` adds to the variance.
    pub fn loss_at(&self, width: Width) -> f64 {
        f64::from(self.importance) * noise(width)
    }
}

/// Sites that are saved, or recomputed, together.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Group {
    /// First of its sites; they go up to the next group's.
    pub first: u32,
    /// Whether and at what price it may be recomputed.
    pub recompute: Option<Recompute>,
    /// What [`solve`] chose.
    pub recomputed: bool,
    next: bool,
}

impl Group {
    /// A group of the sites from `first` on.
    pub fn new(first: u32, recompute: Option<Recompute>) -> Self {
        Self {
            first,
            recompute,
            recomputed: false,
            next: false,
        }
    }
}

/// What it takes to compute a group's tensors again in the backward pass.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Recompute {
    /// Pages of what it starts from, where that is not saved otherwise.
    pub pages: u32,
    /// What its time is worth in variance. With importances relative to the squared gradient, one
    /// step's time is worth the relative variance of the gradient itself: that many more steps are
    /// taken.
    pub loss: f32,
}

/// What an allotment comes to.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Outcome {
    /// Pages of everything.
    pub pages: u64,
    /// Variance that quantization adds, and the price of what is recomputed.
    pub loss: f64,
    /// Groups that are recomputed.
    pub recomputed: u32,
    /// Whether anything differs from before.
    pub changed: bool,
}

/// Not even the narrowest allotment fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TooTight {
    /// Pages of the narrowest.
    pub pages_needed: u64,
    /// Pages that there are.
    pub pages: u64,
}

impl fmt::Display for TooTight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "activations take at least {} pages, the budget leaves {}: recompute, shorten the \
             sequences, or raise the budget",
            self.pages_needed, self.pages
        )
    }
}

impl core::error::Error for TooTight {}

/// 1 / B^2 for codes, 0 for floats.
fn noise(width: Width) -> f64 {
    width
        .steps()
        .map_or(0.0, |steps| 1.0 / f64::from(steps * steps))
}

/// Chooses a width for each site, and which groups are recomputed, so that all fit in `budget` pages
/// with the smallest loss. What was chosen before stays if it fits and the new choice's loss isn't
/// smaller by [`HYSTERESIS`].
///
/// # Errors
/// [`TooTight`]; then nothing has changed.
///
/// # Panics
/// The groups aren't in order from site 0 on.
pub fn solve(sites: &mut [Site], groups: &mut [Group], budget: u64) -> Result<Outcome, TooTight> {
    check(sites, groups);
    let before = standing(sites, groups).filter(|before| before.pages <= budget);
    narrowest(sites);
    let mut pages = 0;
    for at in 0..groups.len() {
        let (least, _) = at_next(&sites[range(groups, at, sites.len())]);
        let again = groups[at].recompute.map(|again| u64::from(again.pages));
        groups[at].next = again.is_some_and(|again| again < least);
        pages += again.map_or(least, |again| again.min(least));
    }
    if pages > budget {
        return Err(TooTight {
            pages_needed: pages,
            pages: budget,
        });
    }
    while let Some(offer) = best_step(sites, groups, budget - pages) {
        match offer.step {
            Step::Widen(site) => sites[site].next = wider(&sites[site]).expect("it was offered"),
            Step::Recompute(group) => groups[group].next = true,
            Step::Save(group) => {
                let range = range(groups, group, sites.len());
                let sites = &mut sites[range];
                let again = groups[group].recompute.expect("it was recomputed so far");
                let entry = entry(sites, &again, budget - pages).expect("it was offered");
                narrowest(sites);
                (0..entry.steps).for_each(|_| assert!(widen(sites)));
                groups[group].next = false;
            }
        }
        pages = pages + offer.after - offer.before;
    }
    let after = total(sites, groups, |site| site.next, |group| group.next);
    debug_assert_eq!(after.pages, pages);
    match before {
        Some(before) if after.loss >= (1.0 - HYSTERESIS) * before.loss => Ok(before),
        _ => {
            let mut changed = false;
            for site in sites.iter_mut() {
                changed |= site.width != Some(site.next);
                site.width = Some(site.next);
            }
            for group in groups.iter_mut() {
                changed |= group.recomputed != group.next;
                group.recomputed = group.next;
            }
            Ok(Outcome { changed, ..after })
        }
    }
}

/// Every site at `width`, nothing recomputed.
///
/// # Errors
/// [`TooTight`]: that takes more than `budget` pages; nothing has changed.
pub fn force(
    sites: &mut [Site],
    groups: &mut [Group],
    width: Width,
    budget: u64,
) -> Result<Outcome, TooTight> {
    let forced = total(sites, groups, |_| width, |_| false);
    if forced.pages > budget {
        return Err(TooTight {
            pages_needed: forced.pages,
            pages: budget,
        });
    }
    let mut changed = false;
    for site in sites.iter_mut() {
        changed |= site.width.replace(width) != Some(width);
    }
    for group in groups.iter_mut() {
        changed |= core::mem::replace(&mut group.recomputed, false);
    }
    Ok(Outcome { changed, ..forced })
}

/// A saved tensor that gives way: its chunks of width `from` that shrink to `to` free pages.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Victim {
    /// Which tensor.
    pub tensor: TensorId,
    /// The width of its widest chunks of more than one page.
    pub from: Width,
    /// The next narrower.
    pub to: Width,
    /// Variance that each freed page adds.
    pub loss_per_page: f64,
}

/// The saved tensor whose shrinking costs least for each page that it frees; none when all that is
/// held is as narrow as it can be. `importance` is by tensor id, of whole tensors; where it has no
/// entry, a tensor goes first.
pub fn victim(pool: &Pool<'_>, importance: &[f32]) -> Option<Victim> {
    let mut best: Option<Victim> = None;
    for tensor in pool.tensors() {
        let Some(victim) = widest(pool, tensor, importance) else {
            continue;
        };
        if best.is_none_or(|best| victim.loss_per_page < best.loss_per_page) {
            best = Some(victim);
        }
    }
    best
}

/// What shrinking the widest chunks of `tensor` costs.
fn widest(pool: &Pool<'_>, tensor: TensorId, importance: &[f32]) -> Option<Victim> {
    let shape = pool.held(tensor)?.shape;
    let (mut chunk, mut from) = (0, None);
    for at in 0..shape.chunks() {
        let width = pool.width(tensor, at).ok()?;
        let spare = shape.pages_of(at, width, pool.page_bytes()) > 1;
        if width.is_codes() && spare && from.is_none_or(|from| width > from) {
            (chunk, from) = (at, Some(width));
        }
    }
    let (from, to) = (from?, from?.narrower()?);
    let shrink = pool.shrink(tensor, chunk, to).ok()?;
    let importance = importance.get(tensor.0 as usize).copied().unwrap_or(0.0);
    let share = f64::from(shrink.elements) / shape.elements as f64;
    let loss = f64::from(importance) * share * (noise(to) - noise(from));
    Some(Victim {
        tensor,
        from,
        to,
        loss_per_page: loss / f64::from(shrink.freed()),
    })
}

#[derive(Clone, Copy)]
enum Step {
    /// A site takes the next wider codes.
    Widen(usize),
    /// A group that was to be recomputed is saved.
    Save(usize),
    /// A group that was to be saved is recomputed.
    Recompute(usize),
}

/// A step, the pages that it takes from those in use to those after it, and its gain.
#[derive(Clone, Copy)]
struct Offer {
    step: Step,
    before: u64,
    after: u64,
    gain: f64,
}

impl Offer {
    /// Gain per page; what takes none goes first.
    fn rate(&self) -> f64 {
        match self.after.saturating_sub(self.before) {
            0 => f64::INFINITY,
            more => self.gain / more as f64,
        }
    }
}

/// The better of a known step and one more, if that gains anything and fits in `room` pages.
fn better(best: Option<Offer>, offer: Offer, room: u64) -> Option<Offer> {
    let fits = offer.after <= offer.before.saturating_add(room);
    let wins = best.is_none_or(|best| offer.rate() > best.rate());
    if fits && wins && offer.gain > 0.0 {
        Some(offer)
    } else {
        best
    }
}

/// The step with the highest gain per page of those that take at most `room` pages.
fn best_step(sites: &mut [Site], groups: &[Group], room: u64) -> Option<Offer> {
    let mut best = None;
    for (at, group) in groups.iter().enumerate() {
        let range = range(groups, at, sites.len());
        if let Some(again) = group.recompute {
            let offer = if group.next {
                entry(&mut sites[range.clone()], &again, room).map(|entry| Offer {
                    step: Step::Save(at),
                    before: u64::from(again.pages),
                    after: entry.pages,
                    gain: entry.gain,
                })
            } else {
                let (pages, loss) = at_next(&sites[range.clone()]);
                Some(Offer {
                    step: Step::Recompute(at),
                    before: pages,
                    after: u64::from(again.pages),
                    gain: loss - f64::from(again.loss),
                })
            };
            best = offer.map_or(best, |offer| better(best, offer, room));
        }
        if !group.next {
            for site in range {
                if let Some(offer) = widening(site, &sites[site]) {
                    best = better(best, offer, room);
                }
            }
        }
    }
    best
}

/// How to save a group that was to be recomputed.
#[derive(Clone, Copy)]
struct Entry {
    /// Steps from the narrowest widths.
    steps: u32,
    /// Pages at these widths.
    pages: u64,
    /// Loss that recomputing would have more.
    gain: f64,
}

/// The widths at which a group gains most per page when it is saved instead of recomputed, within
/// `room` pages more.
fn entry(sites: &mut [Site], again: &Recompute, room: u64) -> Option<Entry> {
    let least = u64::from(again.pages);
    let mut best: Option<Offer> = None;
    let mut steps = 0;
    narrowest(sites);
    for taken in 0.. {
        let (pages, loss) = at_next(sites);
        let offer = Offer {
            step: Step::Save(0),
            before: least,
            after: pages,
            gain: f64::from(again.loss) - loss,
        };
        let known = best.map_or(0.0, |best| best.rate());
        best = better(best, offer, room);
        if best.map_or(0.0, |best| best.rate()) > known {
            steps = taken;
        }
        if pages > least.saturating_add(room) || !widen(sites) {
            break;
        }
    }
    best.map(|best| Entry {
        steps,
        pages: best.after,
        gain: best.gain,
    })
}

/// Every site as narrow as it may be.
fn narrowest(sites: &mut [Site]) {
    for site in sites.iter_mut() {
        site.next = site.least;
    }
}

/// The step of one site that gains most per page. Whether there is one.
fn widen(sites: &mut [Site]) -> bool {
    let offers = (0..sites.len()).filter_map(|at| widening(at, &sites[at]));
    let best = offers.fold(None, |best, offer| better(best, offer, u64::MAX));
    if let Some(Offer {
        step: Step::Widen(at),
        ..
    }) = best
    {
        sites[at].next = wider(&sites[at]).expect("it was offered");
    }
    best.is_some()
}

/// The next wider codes of a site, if it may have them.
fn wider(site: &Site) -> Option<Width> {
    let mut wider = Width::CODES.into_iter().filter(|&w| w > site.next);
    wider.next().filter(|&w| w <= site.most)
}

fn widening(at: usize, site: &Site) -> Option<Offer> {
    let to = wider(site)?;
    Some(Offer {
        step: Step::Widen(at),
        before: u64::from(site.pages_at(site.next)),
        after: u64::from(site.pages_at(to)),
        gain: site.loss_at(site.next) - site.loss_at(to),
    })
}

/// Pages and loss of sites at the widths that are being chosen.
fn at_next(sites: &[Site]) -> (u64, f64) {
    sites.iter().fold((0, 0.0), |(pages, loss), site| {
        (
            pages + u64::from(site.pages_at(site.next)),
            loss + site.loss_at(site.next),
        )
    })
}

/// What was chosen before, by the importances of now; none when it isn't allowed any more.
fn standing(sites: &[Site], groups: &[Group]) -> Option<Outcome> {
    let allowed = sites
        .iter()
        .all(|s| s.width.is_some_and(|w| s.least <= w && w <= s.most))
        && groups
            .iter()
            .all(|g| !g.recomputed || g.recompute.is_some());
    allowed.then(|| {
        total(
            sites,
            groups,
            |site| site.width.expect("just seen"),
            |group| group.recomputed,
        )
    })
}

fn total(
    sites: &[Site],
    groups: &[Group],
    width: impl Fn(&Site) -> Width,
    again: impl Fn(&Group) -> bool,
) -> Outcome {
    let mut sum = Outcome {
        pages: 0,
        loss: 0.0,
        recomputed: 0,
        changed: false,
    };
    for (at, group) in groups.iter().enumerate() {
        match group.recompute.filter(|_| again(group)) {
            Some(again) => {
                sum.pages += u64::from(again.pages);
                sum.loss += f64::from(again.loss);
                sum.recomputed += 1;
            }
            None => {
                for site in &sites[range(groups, at, sites.len())] {
                    sum.pages += u64::from(site.pages_at(width(site)));
                    sum.loss += site.loss_at(width(site));
                }
            }
        }
    }
    sum
}

/// Sites of group `at`.
fn range(groups: &[Group], at: usize, sites: usize) -> core::ops::Range<usize> {
    let end = groups.get(at + 1).map_or(sites, |g| g.first as usize);
    groups[at].first as usize..end
}

fn check(sites: &[Site], groups: &[Group]) {
    assert!(
        groups.first().is_none_or(|g| g.first == 0) && groups.is_sorted_by_key(|g| g.first),
        "groups in the order of their sites"
    );
    assert!(
        groups
            .last()
            .map_or(sites.is_empty(), |g| g.first as usize <= sites.len()),
        "every site in a group"
    );
    for site in sites {
        assert!(site.least <= site.most && site.most.is_codes());
    }
}
