//! How many bits each saved tensor gets: the decoder's tensors as the allotment's sites and groups.

use leanstream_core::act::Width;
use leanstream_core::act::allot::{self, Group, Recompute as Again, Site, TooTight};
use leanstream_core::act::importance::{Average, floor};
use leanstream_core::plan::Hyper;

use super::act::Layout;
use super::model::kind::{Kind, LayerPlan};
use super::settings::{ActBits, Recompute};

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Weight of what was seen so far against what the last step showed.
const KEEP: f32 = 0.9;
/// No importance is taken for less than this share of what it would be if all were alike.
const FLOOR: f32 = 0.02;
/// What a step's time is worth, as variance relative to the squared gradient: where noise is what
/// limits learning, as much of it as the gradient itself takes as many steps again.
const STEP_WORTH: f32 = 1.0;

/// Letters of [`Width::ALL`] in a plan's text.
const LETTERS: [char; 6] = ['1', '2', '4', '8', 'h', 'f'];

fn at(width: Width) -> usize {
    let place = Width::ALL.iter().position(|other| *other == width);
    place.expect("all widths are listed")
}

/// The allotment of a decoder's saved tensors.
pub struct Allotment {
    act: ActBits,
    recompute: Recompute,
    sites: Vec<Site>,
    groups: Vec<Group>,
    places: Vec<(usize, Kind)>,
    averages: Vec<Average>,
    /// Elements of each.
    elements: Vec<f32>,
    /// Importances before anything is known: as if one bit everywhere made noise as large as the
    /// gradient, in proportion to the elements.
    priors: Vec<f32>,
    /// By tensor id, for what gives way first.
    by_tensor: Vec<f32>,
}

/// Groups of tensors that are saved or recomputed together, and whether they can be recomputed: from the
/// attention's normed input, or from the feed-forward's.
const GROUPS: [(&[Kind], bool); 5] = [
    (&[Kind::AttnNorm], false),
    (&[Kind::Q, Kind::K, Kind::V, Kind::O], true),
    (&[Kind::AttnPost, Kind::FfnNorm], false),
    (&[Kind::Gate, Kind::Up], true),
    (&[Kind::FfnPost], false),
];

impl Allotment {
    /// Of micro-batches of `tokens` tokens.
    pub fn new(
        hyper: &Hyper,
        posts: bool,
        tokens: usize,
        act: ActBits,
        recompute: Recompute,
    ) -> Self {
        let mut all = Self {
            act,
            recompute,
            sites: Vec::new(),
            groups: Vec::new(),
            places: Vec::new(),
            averages: Vec::new(),
            elements: Vec::new(),
            priors: Vec::new(),
            by_tensor: vec![0.0; hyper.layers as usize * Kind::COUNT],
        };
        // Products forward and twice backward, of all layers and the head.
        let (d, ff) = (f64::from(hyper.d), f64::from(hyper.ff));
        let (qd, kvd) = (f64::from(hyper.q_dim()), f64::from(hyper.kv_dim()));
        let inputs = if hyper.act.gated() { 2.0 } else { 1.0 };
        let layer = d * (2.0 * qd + 2.0 * kvd) + (inputs + 1.0) * d * ff;
        let step = 2.0 * (layer * f64::from(hyper.layers) + d * f64::from(hyper.vocab));
        for index in 0..hyper.layers as usize {
            for (kinds, again) in GROUPS {
                let first = all.sites.len() as u32;
                for kind in kinds {
                    let width = kind.width(hyper, posts);
                    if width == 0 {
                        continue;
                    }
                    let layout = Layout::of(tokens, width, PAGE_BYTES);
                    all.sites.push(Site::new(layout.pages(PAGE_BYTES)));
                    all.places.push((index, *kind));
                    all.averages.push(Average::default());
                    all.elements.push((tokens * width) as f32);
                }
                if all.sites.len() as u32 == first {
                    continue;
                }
                let work = match kinds[0] {
                    Kind::Q => d * (qd + 2.0 * kvd) + f64::from(tokens as u32) * qd,
                    _ => inputs * d * ff,
                };
                let share = (work / step) as f32;
                let may = again && recompute == Recompute::Auto && act == ActBits::Auto;
                let again = may.then_some(Again {
                    pages: 0,
                    loss: share * STEP_WORTH,
                });
                all.groups.push(Group::new(first, again));
            }
        }
        let total: f32 = all.elements.iter().sum();
        all.priors = all
            .elements
            .iter()
            .map(|elements| elements / total)
            .collect();
        all.learn(&[]);
        all
    }

    /// Pages with which a step can run at all, and pages that do more than that no good.
    pub fn pages(&self, tokens: usize, hyper: &Hyper) -> (u64, u64) {
        let sum = |width: Width| -> u64 {
            self.sites
                .iter()
                .map(|site| u64::from(site.pages_at(width)))
                .sum()
        };
        if self.recompute == Recompute::Layers {
            let width = self.input_width();
            let layout = Layout::of(tokens, hyper.d as usize, PAGE_BYTES);
            let pages = layout.shape(width).pages(width, PAGE_BYTES as u32);
            let pages = pages * u64::from(hyper.layers);
            return (pages, pages);
        }
        match self.act {
            ActBits::Fixed(width) => (sum(width), sum(width)),
            ActBits::Auto => {
                let least = self
                    .groups
                    .iter()
                    .enumerate()
                    .filter(|(_, group)| group.recompute.is_none())
                    .flat_map(|(at, _)| &self.sites[self.range(at)])
                    .map(|site| u64::from(site.pages_at(Width::One)))
                    .sum();
                (least, sum(Width::Eight))
            }
        }
    }

    /// Bytes of its tables.
    pub fn bytes(&self) -> u64 {
        let site = size_of::<Site>() + size_of::<Average>() + size_of::<(usize, Kind)>() + 8;
        let groups = self.groups.len() * size_of::<Group>();
        (self.sites.len() * site + groups + self.by_tensor.len() * 4) as u64
    }

    /// Pages with everything at `width`.
    pub fn pages_at(&self, width: Width) -> u64 {
        self.sites
            .iter()
            .map(|site| u64::from(site.pages_at(width)))
            .sum()
    }

    fn range(&self, group: usize) -> std::ops::Range<usize> {
        let end = self
            .groups
            .get(group + 1)
            .map_or(self.sites.len(), |next| next.first as usize);
        self.groups[group].first as usize..end
    }

    /// The width of the one input that a layer is recomputed from.
    fn input_width(&self) -> Width {
        match self.act {
            ActBits::Auto => Width::Bf16,
            ActBits::Fixed(width) => width,
        }
    }

    /// Takes in what a step showed: importances relative to the squared gradient, by tensor id.
    pub fn learn(&mut self, seen: &[f32]) {
        for (average, (layer, kind)) in self.averages.iter_mut().zip(&self.places) {
            // Nothing was seen of what is computed again, nor while adapters' second halves are zero.
            if let Some(seen) = seen.get(kind.id(*layer).0 as usize).filter(|x| **x > 0.0) {
                average.note(*seen, KEEP);
            }
        }
        floor(&mut self.sites, &self.averages, &self.priors, FLOOR);
        for (site, (layer, kind)) in self.sites.iter().zip(&self.places) {
            self.by_tensor[kind.id(*layer).0 as usize] = site.importance;
        }
    }

    /// Importances by tensor id, for what gives way when the budget falls.
    pub fn by_tensor(&self) -> &[f32] {
        &self.by_tensor
    }

    /// Chooses widths for `pages` pages. Returns whether anything changed.
    ///
    /// # Errors
    /// There are too few.
    pub fn choose(&mut self, pages: u64, plan: &mut [LayerPlan]) -> Result<bool, TooTight> {
        if self.recompute == Recompute::Layers {
            let chosen = LayerPlan::input(self.input_width());
            let changed = plan.iter().any(|layer| *layer != chosen);
            plan.fill(chosen);
            return Ok(changed);
        }
        let outcome = match self.act {
            ActBits::Fixed(width) => allot::force(&mut self.sites, &mut self.groups, width, pages)?,
            ActBits::Auto => allot::solve(&mut self.sites, &mut self.groups, pages)?,
        };
        for at in 0..self.groups.len() {
            let again = self.groups[at].recomputed;
            for site in self.range(at) {
                let (layer, kind) = self.places[site];
                let width = self.sites[site].width.filter(|_| !again);
                plan[layer].0[kind as usize] = width;
            }
        }
        Ok(outcome.changed)
    }

    /// Mean bits of the elements that are saved, and share of elements that are.
    pub fn mean_bits(&self, plan: &[LayerPlan]) -> f64 {
        let (mut bits, mut elements) = (0.0, 0.0);
        for ((layer, kind), prior) in self.places.iter().zip(&self.elements) {
            elements += f64::from(*prior);
            if let Some(width) = plan[*layer].width(*kind) {
                bits += f64::from(*prior) * f64::from(width.bits());
            }
        }
        bits / elements
    }

    /// Bytes that all tensors would take as f32.
    pub fn f32_bytes(&self) -> u64 {
        self.elements
            .iter()
            .map(|elements| *elements as u64 * 4)
            .sum()
    }

    /// Tensors that are computed again.
    pub fn recomputed(&self) -> usize {
        let of =
            |group: usize| self.range(group).len() * usize::from(self.groups[group].recomputed);
        (0..self.groups.len()).map(of).sum()
    }

    /// Mean bits by kind of tensor: `None` where all of it is recomputed.
    pub fn bits_of(&self, plan: &[LayerPlan], kind: Kind) -> Option<f64> {
        let widths: Vec<f64> = plan
            .iter()
            .filter_map(|layer| layer.width(kind))
            .map(|width| f64::from(width.bits()))
            .collect();
        let saved = self.places.iter().any(|(_, other)| *other == kind) && !widths.is_empty();
        saved.then(|| widths.iter().sum::<f64>() / widths.len() as f64)
    }

    /// Averages of importances, in a fixed order.
    pub fn averages(&self) -> &[Average] {
        &self.averages
    }

    /// The same, to be set.
    pub fn averages_mut(&mut self) -> &mut [Average] {
        &mut self.averages
    }

    /// A plan as text: a letter for each tensor of each layer.
    pub fn text(&self, plan: &[LayerPlan]) -> String {
        plan.iter()
            .flat_map(|layer| layer.0)
            .map(|width| match width {
                None => '-',
                Some(width) => LETTERS[at(width)],
            })
            .collect()
    }

    /// Takes a plan from its text, as what was chosen before. False when it is no plan of this model.
    pub fn take(&mut self, text: &str, plan: &mut [LayerPlan]) -> bool {
        let widths = || {
            text.chars().map(|letter| {
                let known = LETTERS.iter().position(|l| *l == letter);
                known.map(|at| Width::ALL[at])
            })
        };
        let known = |letter: char| letter == '-' || LETTERS.contains(&letter);
        if text.chars().count() != plan.len() * Kind::COUNT || !text.chars().all(known) {
            return false;
        }
        for (place, width) in plan.iter_mut().flat_map(|layer| &mut layer.0).zip(widths()) {
            *place = width;
        }
        for at in 0..self.groups.len() {
            let range = self.range(at);
            let saved = range.clone().any(|site| {
                let (layer, kind) = self.places[site];
                plan[layer].width(kind).is_some()
            });
            self.groups[at].recomputed = !saved && self.groups[at].recompute.is_some();
            for site in range {
                let (layer, kind) = self.places[site];
                self.sites[site].width = plan[layer].width(kind).or(Some(Width::One));
            }
        }
        true
    }

    /// Mean importance of a kind of tensor, as it counts now.
    pub fn importance_of(&self, kind: Kind) -> f64 {
        let of = self.places.iter().zip(&self.sites);
        let of = of.filter(|((_, other), _)| *other == kind);
        let (sum, count) = of.fold((0.0, 0), |(sum, count), (_, site)| {
            (sum + f64::from(site.importance), count + 1)
        });
        sum / f64::from(count.max(1))
    }
}
