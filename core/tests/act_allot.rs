//! Bits by allotment: against all allotments on small cases, over time, and when the budget falls.

use leanstream_core::act::Width;
use leanstream_core::act::allot::{
    Group, Outcome, Recompute, Site, TooTight, force, solve, victim,
};
use leanstream_core::act::importance::{Average, floor, importance};
use leanstream_core::act::pool::{Pool, TensorId};
use leanstream_core::act::tables::{Shape, Sizes};

#[path = "common/act.rs"]
#[allow(dead_code, reason = "the storms are another test's")]
mod act;

struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 20
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// From 0 to 1.
    fn unit(&mut self) -> f32 {
        self.below(1 << 24) as f32 / (1 << 24) as f32
    }
}

/// Chunks of 8 pages of elements, and a last one that is smaller.
fn site(chunks: u64, last: u32, importance: f32) -> Site {
    let shape = Shape {
        elements: chunks * 512 + u64::from(last),
        chunk_elements: 512,
        groups: 0,
    };
    let mut site = Site::new(Width::ALL.map(|width| shape.pages(width, 64) as u32));
    site.importance = importance;
    site
}

/// The smallest loss of all allotments, by trying each.
fn best_loss(sites: &[Site], groups: &[Group], budget: u64) -> Option<f64> {
    // By group: pages and loss of each choice.
    let choices = |at: usize| {
        let end = groups.get(at + 1).map_or(sites.len(), |g| g.first as usize);
        let mut points = vec![(0, 0.0)];
        for site in &sites[groups[at].first as usize..end] {
            let widths = Width::CODES
                .into_iter()
                .filter(|&w| site.least <= w && w <= site.most);
            points = widths
                .flat_map(|w| {
                    let (pages, loss) = (u64::from(site.pages_at(w)), site.loss_at(w));
                    points.iter().map(move |(p, l)| (p + pages, l + loss))
                })
                .collect();
        }
        points.extend(
            groups[at]
                .recompute
                .map(|again| (u64::from(again.pages), f64::from(again.loss))),
        );
        points
    };
    let mut all = vec![(0, 0.0)];
    for at in 0..groups.len() {
        let points = choices(at);
        let mut next: Vec<(u64, f64)> = all
            .iter()
            .flat_map(|(p, l)| points.iter().map(move |(q, m)| (p + q, l + m)))
            .filter(|(pages, _)| *pages <= budget)
            .collect();
        // Only what isn't beaten in both.
        next.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        let mut least = f64::INFINITY;
        next.retain(|(_, loss)| {
            let kept = *loss < least;
            least = least.min(*loss);
            kept
        });
        all = next;
    }
    all.last().map(|(_, loss)| *loss)
}

fn total(sites: &[Site], groups: &[Group]) -> (u64, f64) {
    let (mut pages, mut loss) = (0, 0.0);
    for (at, group) in groups.iter().enumerate() {
        let end = groups.get(at + 1).map_or(sites.len(), |g| g.first as usize);
        if group.recomputed {
            let again = group.recompute.expect("allowed");
            pages += u64::from(again.pages);
            loss += f64::from(again.loss);
            continue;
        }
        for site in &sites[group.first as usize..end] {
            let width = site.width.expect("chosen");
            assert!(site.least <= width && width <= site.most);
            pages += u64::from(site.pages_at(width));
            loss += site.loss_at(width);
        }
    }
    (pages, loss)
}

/// A problem of up to 3 groups of up to 3 sites.
fn problem(random: &mut Random, recompute: bool) -> (Vec<Site>, Vec<Group>) {
    let (mut sites, mut groups) = (Vec::new(), Vec::new());
    for _ in 0..1 + random.below(3) {
        let first = sites.len() as u32;
        for _ in 0..1 + random.below(3) {
            let importance = (random.unit() * 12.0).exp();
            let last = if random.below(3) == 0 {
                0
            } else {
                random.below(512)
            };
            let mut site = site(1 + random.below(5), last as u32, importance);
            if random.below(5) == 0 {
                site.least = Width::CODES[random.below(4) as usize];
            }
            if random.below(5) == 0 {
                site.most = site.least.max(Width::CODES[random.below(4) as usize]);
            }
            sites.push(site);
        }
        let again = Recompute {
            pages: random.below(20) as u32,
            loss: (random.unit() * 12.0).exp(),
        };
        let may = recompute && random.below(4) > 0;
        groups.push(Group::new(first, may.then_some(again)));
    }
    (sites, groups)
}

/// Within one step of the best: the step that would come next, but doesn't fit, is all that separates
/// the greedy loss from that of the relaxed problem.
#[test]
fn close_to_the_best_of_all_allotments() {
    let mut random = Random(5);
    for recompute in [false, true] {
        let (mut exact, mut cases, mut excess, mut worst) = (0, 0, 0.0, 1.0f64);
        for _ in 0..1500 {
            let (mut sites, mut groups) = problem(&mut random, recompute);
            let budget = random.below(150);
            let best = best_loss(&sites, &groups, budget);
            let solved = solve(&mut sites, &mut groups, budget);
            let Some(best) = best else {
                let tight = solved.unwrap_err();
                assert!(tight.pages_needed > budget && tight.pages == budget);
                continue;
            };
            let outcome = solved.unwrap();
            let (pages, loss) = total(&sites, &groups);
            assert!(pages <= budget);
            assert_eq!(outcome.pages, pages);
            assert!((outcome.loss - loss).abs() <= 1e-9 * loss, "as it says");
            assert!(
                loss >= best * (1.0 - 1e-9),
                "nothing is better than the best"
            );
            // The largest step there is.
            let step = sites
                .iter()
                .flat_map(|s| {
                    Width::CODES
                        .into_iter()
                        .filter(move |&w| s.least < w && w <= s.most)
                        .map(move |w| s.loss_at(w.narrower().unwrap()) - s.loss_at(w))
                })
                .fold(0.0, f64::max);
            if !recompute {
                assert!(loss <= best + step, "{loss} {best} {step}");
            }
            cases += 1;
            exact += u32::from(loss <= best * (1.0 + 1e-9));
            excess += loss / best;
            worst = worst.max(loss / best);
        }
        assert!(f64::from(exact) > 0.9 * f64::from(cases), "{exact} {cases}");
        assert!(excess < 1.03 * f64::from(cases), "{excess} {cases}");
        assert!(
            worst < 6.0,
            "{worst}: only where a step is most of the budget"
        );
    }
}

/// The sites of a decoder: 30 layers of 8 tensors of the real proportions.
fn decoder(random: &mut Random) -> (Vec<Site>, Vec<Group>) {
    let (mut sites, mut groups) = (Vec::new(), Vec::new());
    for layer in 0..30 {
        groups.push(Group::new(8 * layer, None));
        for chunks in [9, 9, 9, 3, 3, 9, 24, 24] {
            sites.push(site(
                chunks,
                40,
                (random.unit() * 9.0).exp() * chunks as f32,
            ));
        }
    }
    (sites, groups)
}

/// Pages may be cut in the relaxed problem: its loss is below every whole allotment's.
fn relaxed_loss(sites: &[Site], budget: u64) -> f64 {
    let mut room = budget;
    let mut loss = 0.0;
    let mut steps = Vec::new();
    for site in sites {
        room -= u64::from(site.pages_at(Width::One));
        loss += site.loss_at(Width::One);
        for to in [Width::Two, Width::Four, Width::Eight] {
            let from = to.narrower().unwrap();
            let pages = u64::from(site.pages_at(to) - site.pages_at(from));
            steps.push((site.loss_at(from) - site.loss_at(to), pages));
        }
    }
    let rate = |step: &(f64, u64)| step.0 / step.1 as f64;
    steps.sort_by(|a, b| rate(b).total_cmp(&rate(a)));
    for (gain, pages) in steps {
        let part = room.min(pages);
        loss -= gain * part as f64 / pages as f64;
        room -= part;
    }
    loss
}

#[test]
fn a_decoder_is_within_a_hundredth_of_the_relaxed_problem() {
    let mut random = Random(8);
    let (sites, groups) = decoder(&mut random);
    let least: u64 = sites
        .iter()
        .map(|s| u64::from(s.pages_at(Width::One)))
        .sum();
    let most: u64 = sites
        .iter()
        .map(|s| u64::from(s.pages_at(Width::Eight)))
        .sum();
    let mut before = f64::INFINITY;
    for eighths in 8..70 {
        let (mut sites, mut groups) = (sites.clone(), groups.clone());
        let budget = least * eighths / 8;
        let outcome = solve(&mut sites, &mut groups, budget).unwrap();
        let relaxed = relaxed_loss(&sites, budget);
        assert!(outcome.loss >= relaxed * (1.0 - 1e-9));
        assert!(outcome.loss <= relaxed * 1.01, "{} {relaxed}", outcome.loss);
        assert!(outcome.loss <= before, "more pages cost nothing");
        assert!(budget.min(most) < outcome.pages + 24 * 4, "they are used");
        before = outcome.loss;
    }
    let tight = solve(&mut sites.clone(), &mut groups.clone(), least - 1);
    let TooTight {
        pages_needed,
        pages,
    } = tight.unwrap_err();
    assert_eq!((pages_needed, pages), (least, least - 1));
}

/// Importances are measured anew with every step. Without the margin, sites near a threshold would
/// change their bits for ever.
#[test]
fn noise_changes_nothing_and_a_real_change_does() {
    let mut random = Random(3);
    let (mut sites, mut groups) = decoder(&mut random);
    let true_importance: Vec<f32> = sites.iter().map(|s| s.importance).collect();
    let budget = 6000;
    assert!(solve(&mut sites, &mut groups, budget).unwrap().changed);
    let mut changes = (0, 0);
    for _ in 0..100 {
        for (site, importance) in sites.iter_mut().zip(&true_importance) {
            site.importance = importance * (0.8 + 0.4 * random.unit());
        }
        changes.0 += u32::from(solve(&mut sites, &mut groups, budget).unwrap().changed);
        let mut anew = sites.clone();
        anew.iter_mut().for_each(|site| site.width = None);
        solve(&mut anew, &mut groups.clone(), budget).unwrap();
        let differs = anew.iter().zip(&sites).any(|(a, b)| a.width != b.width);
        changes.1 += u32::from(differs);
    }
    assert_eq!(changes, (0, 100), "kept, and would have flapped");

    // What mattered least matters most.
    for (site, importance) in sites.iter_mut().zip(true_importance.iter().rev()) {
        site.importance = *importance;
    }
    let outcome = solve(&mut sites, &mut groups, budget).unwrap();
    assert!(outcome.changed);
    assert!(!solve(&mut sites, &mut groups, budget).unwrap().changed);
    // Less room has to be heeded at once, more is used when it is worth a tenth.
    let less = solve(&mut sites, &mut groups, outcome.pages - 1).unwrap();
    assert!(less.changed && less.pages < outcome.pages);
    assert!(
        !solve(&mut sites, &mut groups, less.pages + 10)
            .unwrap()
            .changed
    );
    let more = solve(&mut sites, &mut groups, 2 * budget).unwrap();
    assert!(more.changed && more.loss < 0.5 * less.loss);
}

#[test]
fn what_is_saved_can_only_become_narrower() {
    let mut random = Random(4);
    let (mut sites, mut groups) = decoder(&mut random);
    solve(&mut sites, &mut groups, 6000).unwrap();
    let saved: Vec<Width> = sites[..100].iter().map(|s| s.width.unwrap()).collect();
    for (site, width) in sites.iter_mut().zip(&saved) {
        site.most = *width;
    }
    for budget in [9000, 4500, 3400] {
        let outcome = solve(&mut sites, &mut groups, budget).unwrap();
        assert!(outcome.changed && outcome.pages <= budget);
        for (site, width) in sites.iter().zip(&saved) {
            assert!(site.width.unwrap() <= *width);
        }
    }
}

#[test]
fn recomputing_is_for_what_costs_more_than_its_time() {
    let again = |loss| Some(Recompute { pages: 3, loss });
    // Two layers alike but for the price of computing the second again.
    let mut sites = vec![site(5, 0, 100.0), site(5, 0, 100.0)];
    let mut groups = vec![Group::new(0, again(1e6)), Group::new(1, again(0.5))];
    // No room for even one bit of both: the cheap one.
    let outcome = solve(&mut sites, &mut groups, 12).unwrap();
    assert_eq!(outcome.recomputed, 1);
    assert_eq!((groups[0].recomputed, groups[1].recomputed), (false, true));
    // With all the room there is, eight bits lose less than the time.
    solve(&mut sites, &mut groups, 80).unwrap();
    assert!(!groups[1].recomputed);
    assert_eq!(sites[1].width, Some(Width::Eight));
    // Two bits don't.
    solve(&mut sites, &mut groups, 30).unwrap();
    assert!(groups[1].recomputed);
    // Not even the least fits.
    let tight = solve(&mut sites, &mut groups, 5).unwrap_err();
    assert_eq!((tight.pages_needed, tight.pages), (6, 5));
    assert_eq!(
        tight.to_string(),
        "activations take at least 6 pages, the budget leaves 5: recompute, shorten the sequences, \
         or raise the budget"
    );
}

#[test]
fn forced_bits_are_forced() {
    let mut random = Random(6);
    let (mut sites, mut groups) = decoder(&mut random);
    for width in Width::ALL {
        let pages: u64 = sites.iter().map(|s| u64::from(s.pages_at(width))).sum();
        let outcome: Outcome = force(&mut sites, &mut groups, width, pages).unwrap();
        assert_eq!(outcome.pages, pages);
        assert!(outcome.changed);
        assert!(sites.iter().all(|s| s.width == Some(width)));
        assert!(
            !force(&mut sites, &mut groups, width, pages)
                .unwrap()
                .changed
        );
        let tight = force(&mut sites, &mut groups, width, pages - 1).unwrap_err();
        assert_eq!(tight.pages_needed, pages);
    }
}

/// With B = 0 the gradient of A is 0, and so is every importance: bits then go by size, not to nobody.
#[test]
fn nothing_is_without_importance() {
    let mut sites = vec![site(4, 0, 0.0), site(4, 0, 0.0), site(4, 0, 0.0)];
    let mut groups = vec![Group::new(0, None)];
    let mut averages = [Average::default(); 3];
    let priors = [4.0, 4.0, 8.0];
    averages.iter_mut().for_each(|a| a.note(0.0, 0.9));
    floor(&mut sites, &averages, &priors, 0.1);
    assert_eq!([4.0, 4.0, 8.0], [0, 1, 2].map(|i| sites[i].importance));
    solve(&mut sites, &mut groups, 48).unwrap();
    assert!(sites.iter().all(|s| s.width == Some(Width::Four)));

    averages[1].note(1600.0, 0.0);
    averages[2].note(f32::NAN, 0.5);
    averages[2].note(-1.0, 0.5);
    floor(&mut sites, &averages, &priors, 0.1);
    assert_eq!([40.0, 1600.0, 80.0], [0, 1, 2].map(|i| sites[i].importance));
}

#[test]
fn averages_forget() {
    let mut average = Average::default();
    assert_eq!(average.value(), 0.0);
    average.note(8.0, 0.75);
    assert_eq!(average.value(), 8.0, "the first counts in full");
    for _ in 0..40 {
        average.note(2.0, 0.75);
    }
    assert!((average.value() - 2.0).abs() < 1e-3);
    // Two rows, groups of 48: 48 / 6 (3 * 5 + 1 * 7).
    assert_eq!(importance(48, [(3.0, 5.0), (1.0, 7.0)]), 176.0);
}

/// By loss for each freed page: the widest of the least important, until another is cheaper.
#[test]
fn the_cheapest_gives_way_first() {
    let sizes = Sizes {
        pages: 200,
        chunks: 20,
        tensors: 4,
    };
    let mut owned = act::Owned::new(sizes);
    let mut pool = Pool::new(64, 200, 0, owned.lend()).unwrap();
    let shape = |chunks: u64, last| Shape {
        elements: 512 * chunks + last,
        chunk_elements: 512,
        groups: 0,
    };
    pool.take(TensorId(0), shape(2, 64), Width::Eight).unwrap();
    pool.take(TensorId(1), shape(3, 0), Width::Eight).unwrap();
    pool.take(TensorId(2), shape(1, 0), Width::F32).unwrap();
    // Smaller than a page at any width: nothing to gain.
    pool.take(TensorId(3), shape(0, 9), Width::Eight).unwrap();
    let importance = [1.0, 40.0, 0.0, 0.0];
    let mut order = Vec::new();
    let mut losses = Vec::new();
    while let Some(victim) = victim(&pool, &importance) {
        losses.push(victim.loss_per_page);
        order.push((victim.tensor.0, victim.to.bits()));
        for chunk in 0..pool.held(victim.tensor).unwrap().shape.chunks() {
            if pool.width(victim.tensor, chunk) == Ok(victim.from) {
                let shrink = pool.shrink(victim.tensor, chunk, victim.to).unwrap();
                pool.shrunk(shrink).unwrap();
            }
        }
    }
    assert_eq!(order, [(0, 4), (1, 4), (0, 2), (0, 1), (1, 2), (1, 1)]);
    assert!(losses.is_sorted(), "{losses:?}");
    assert_eq!(pool.in_use(), 3 + 3 + 32 + 1);
}
