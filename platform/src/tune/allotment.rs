//! How many bits each saved tensor gets: the decoder's tensors as the allotment's sites and groups.

use leanstream_core::act::Width;
use leanstream_core::act::allot::{Group, Recompute as Again, Site, TooTight};
use leanstream_core::act::importance::Average;
use leanstream_core::plan::Hyper;

use super::act::Layout;
use super::model::kind::{Kind, LayerPlan};
use super::settings::{ActBits, Recompute};
use super::sites::Sites;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

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
    sites: Sites,
    /// Layer and kind of each of them.
    places: Vec<(usize, Kind)>,
    /// By tensor id, for what gives way first.
    by_tensor: Vec<f32>,
}

/// Groups of tensors that are saved or recomputed together, each from those before it.
pub const GROUPS: [&[Kind]; 5] = [
    &[Kind::AttnNorm],
    &[Kind::Q, Kind::K, Kind::V, Kind::O],
    &[Kind::AttnPost, Kind::FfnNorm],
    &[Kind::Gate, Kind::Up],
    &[Kind::FfnPost],
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
            sites: Sites::default(),
            places: Vec::new(),
            by_tensor: vec![0.0; hyper.layers as usize * Kind::COUNT],
        };
        // Products forward and twice backward, of all layers and the head.
        let (d, ff) = (f64::from(hyper.d), f64::from(hyper.ff));
        let (qd, kvd) = (f64::from(hyper.q_dim()), f64::from(hyper.kv_dim()));
        let inputs = if hyper.act.gated() { 2.0 } else { 1.0 };
        let layer = d * (2.0 * qd + 2.0 * kvd) + (inputs + 1.0) * d * ff;
        let step = 2.0 * (layer * f64::from(hyper.layers) + d * f64::from(hyper.vocab));
        let width = |kind: &Kind| kind.width(hyper, posts);
        // Elements that noise in a tensor of a layer gets into, with what may be computed again from it.
        let reach = |kind: Kind| match kind {
            Kind::AttnNorm | Kind::FfnNorm => Kind::ALL[kind as usize..].iter().map(width).sum(),
            _ => width(&kind),
        };
        for index in 0..hyper.layers as usize {
            for kinds in GROUPS {
                let first = all.places.len();
                for kind in kinds {
                    let width = width(kind);
                    if width == 0 {
                        continue;
                    }
                    let layout = Layout::of(tokens, width, PAGE_BYTES);
                    let site = Site::new(layout.pages(PAGE_BYTES));
                    all.sites.push(site, tokens * width);
                    all.places.push((index, *kind));
                }
                // The products that give them; the layer's input is what all begins with.
                let work = match kinds[0] {
                    Kind::AttnNorm => None,
                    Kind::Q => Some(d * (qd + 2.0 * kvd) + f64::from(tokens as u32) * qd),
                    Kind::AttnPost => Some(d * qd),
                    Kind::FfnPost => Some(d * ff),
                    _ => Some(inputs * d * ff),
                };
                let may = recompute == Recompute::Auto && act == ActBits::Auto;
                let again = work.filter(|_| may).map(|work| Again {
                    pages: 0,
                    loss: (work / step) as f32 * STEP_WORTH,
                });
                all.sites.close(first, again);
            }
        }
        // As if one bit everywhere made noise as large as the gradient, in proportion to the elements.
        let total: f32 = all.sites.elements.iter().sum();
        let reached = all
            .places
            .iter()
            .map(|(_, kind)| (tokens * reach(*kind)) as f32);
        all.sites
            .begin(reached.map(|elements| elements / total).collect());
        all.fill_by_tensor();
        all
    }

    /// Pages with which a step can run at all, and pages that do more than that no good.
    pub fn pages(&self, tokens: usize, hyper: &Hyper) -> (u64, u64) {
        if self.recompute == Recompute::Layers {
            let width = self.input_width();
            let layout = Layout::of(tokens, hyper.d as usize, PAGE_BYTES);
            let pages = layout.shape(width).pages(width, PAGE_BYTES as u32);
            let pages = pages * u64::from(hyper.layers);
            return (pages, pages);
        }
        self.sites.pages(self.act.fixed())
    }

    /// Bytes of its tables.
    pub fn bytes(&self) -> u64 {
        let site = size_of::<Site>() + size_of::<Average>() + size_of::<(usize, Kind)>() + 8;
        let groups = self.sites.groups.len() * size_of::<Group>();
        (self.places.len() * site + groups + self.by_tensor.len() * 4) as u64
    }

    /// Pages with everything at `width`.
    pub fn pages_at(&self, width: Width) -> u64 {
        self.sites.pages_at(width)
    }

    /// The width of the one input that a layer is recomputed from.
    fn input_width(&self) -> Width {
        self.act.fixed().unwrap_or(Width::Bf16)
    }

    /// Takes in what a step showed: importances relative to the squared gradient, by tensor id.
    pub fn learn(&mut self, seen: &[f32]) {
        // Nothing was seen of what is computed again, nor while adapters' second halves are zero.
        self.sites.learn(self.places.iter().map(|(layer, kind)| {
            let seen = seen.get(kind.id(*layer).0 as usize);
            seen.copied().filter(|x| *x > 0.0)
        }));
        self.fill_by_tensor();
    }

    fn fill_by_tensor(&mut self) {
        for (site, (layer, kind)) in self.sites.all.iter().zip(&self.places) {
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
        let changed = self.sites.choose(self.act.fixed(), pages)?;
        for (at, group) in self.sites.groups.iter().enumerate() {
            for site in self.sites.group(at) {
                let (layer, kind) = self.places[site];
                let width = self.sites.all[site].width;
                plan[layer].0[kind as usize] = width.filter(|_| !group.recomputed);
            }
        }
        Ok(changed)
    }

    /// Mean bits of an element, 0 of those that aren't saved.
    pub fn mean_bits(&self, plan: &[LayerPlan]) -> f64 {
        let widths = |(layer, kind): &(usize, Kind)| plan[*layer].width(*kind);
        self.sites.mean_bits(self.places.iter().map(widths))
    }

    /// Bytes that all tensors would take as f32.
    pub fn f32_bytes(&self) -> u64 {
        let elements = self.sites.elements.iter();
        elements.map(|elements| *elements as u64 * 4).sum()
    }

    /// Tensors that are computed again.
    pub fn recomputed(&self) -> usize {
        let groups = self.sites.groups.iter().enumerate();
        groups
            .filter(|(_, group)| group.recomputed)
            .map(|(at, _)| self.sites.group(at).len())
            .sum()
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
        &self.sites.averages
    }

    /// The same, to be set.
    pub fn averages_mut(&mut self) -> &mut [Average] {
        &mut self.sites.averages
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
        for at in 0..self.sites.groups.len() {
            let range = self.sites.group(at);
            let saved = range.clone().any(|site| {
                let (layer, kind) = self.places[site];
                plan[layer].width(kind).is_some()
            });
            let group = &mut self.sites.groups[at];
            group.recomputed = !saved && group.recompute.is_some();
            for site in range {
                let (layer, kind) = self.places[site];
                self.sites.all[site].width = plan[layer].width(kind).or(Some(Width::One));
            }
        }
        true
    }

    /// Mean importance of a kind of tensor, as it counts now.
    pub fn importance_of(&self, kind: Kind) -> f64 {
        let of = self.places.iter().zip(&self.sites.all);
        let of = of.filter(|((_, other), _)| *other == kind);
        let (sum, count) = of.fold((0.0, 0), |(sum, count), (_, site)| {
            (sum + f64::from(site.importance), count + 1)
        });
        sum / f64::from(count.max(1))
    }
}
