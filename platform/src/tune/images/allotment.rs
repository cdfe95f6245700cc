//! How many bits each saved tensor gets, and what that comes to in bytes.

use leanstream_core::act::Width;
use leanstream_core::act::allot::{self, Group, Site, TooTight};
use leanstream_core::act::importance::{Average, floor};

use super::net::Net;
use crate::tune::act::{Capacity, Layout, Pages};

/// Weight of what was seen so far against what the last pass showed.
const KEEP: f32 = 0.9;
/// No importance is taken for less than this share of what it would be if all were alike.
const FLOOR: f32 = 0.02;

/// Bytes of a page.
#[must_use]
pub fn page_bytes() -> usize {
    Pages::least_bytes()
}

/// The allotment of a classifier's saved tensors.
#[derive(Debug)]
pub struct Allotment {
    act: Option<Width>,
    sites: Vec<Site>,
    groups: Vec<Group>,
    averages: Vec<Average>,
    priors: Vec<f32>,
    importance: Vec<f32>,
}

impl Allotment {
    /// For batches of `batch` images; every tensor `act` wide, or as many bits as it is worth.
    #[must_use]
    pub fn new(net: &Net, batch: usize, act: Option<Width>) -> Self {
        let layouts = net.kept.iter().map(|kept| layout(batch, kept.len));
        let sites: Vec<Site> = layouts
            .map(|layout| Site::new(layout.pages(page_bytes())))
            .collect();
        let count = sites.len();
        let mut all = Self {
            act,
            groups: if count > 0 {
                vec![Group::new(0, None)]
            } else {
                Vec::new()
            },
            averages: vec![Average::default(); count],
            priors: net
                .kept
                .iter()
                .map(|kept| (batch * kept.len) as f32)
                .collect(),
            importance: vec![0.0; count],
            sites,
        };
        all.learn(&[]);
        all
    }

    /// Pages with which a step can run, and pages beyond which more do no good.
    #[must_use]
    pub fn pages(&self) -> (u64, u64) {
        let sum = |width| -> u64 {
            let pages = self
                .sites
                .iter()
                .map(|site| u64::from(site.pages_at(width)));
            pages.sum()
        };
        match self.act {
            Some(width) => (sum(width), sum(width)),
            None => (sum(Width::One), sum(Width::Eight)),
        }
    }

    /// Takes in what a backward pass showed, by tensor id.
    pub fn learn(&mut self, seen: &[f32]) {
        for (average, seen) in self.averages.iter_mut().zip(seen) {
            average.note(*seen, KEEP);
        }
        floor(&mut self.sites, &self.averages, &self.priors, FLOOR);
        for (importance, site) in self.importance.iter_mut().zip(&self.sites) {
            *importance = site.importance;
        }
    }

    /// Importances by tensor id, for what gives way when the budget falls.
    #[must_use]
    pub fn importance(&self) -> &[f32] {
        &self.importance
    }

    /// Chooses widths, by tensor id, for `pages` pages.
    ///
    /// # Errors
    /// There are too few.
    pub fn choose(&mut self, pages: u64, widths: &mut [Width]) -> Result<(), TooTight> {
        match self.act {
            Some(width) => allot::force(&mut self.sites, &mut self.groups, width, pages)?,
            None => allot::solve(&mut self.sites, &mut self.groups, pages)?,
        };
        for (width, site) in widths.iter_mut().zip(&self.sites) {
            *width = site.width.expect("a choice was just made");
        }
        Ok(())
    }

    /// Mean bits of a saved element.
    #[must_use]
    pub fn mean_bits(&self, widths: &[Width]) -> f64 {
        let parts = widths.iter().zip(&self.priors);
        let (bits, elements) = parts.fold((0.0, 0.0), |(bits, all), (width, elements)| {
            let elements = f64::from(*elements);
            (bits + elements * f64::from(width.bits()), all + elements)
        });
        bits / elements
    }
}

/// How a tensor is saved: an image a row.
fn layout(batch: usize, len: usize) -> Layout {
    Layout::of(batch, len, page_bytes())
}

/// Bytes that are saved whatever the widths of tensors: masks, places, norms' factors, and, unless floats are
/// saved, metadata.
#[must_use]
pub fn fixed_bytes(net: &Net, batch: usize, act: Option<Width>) -> u64 {
    let metadata = match act {
        Some(width) if !width.is_codes() => 0,
        _ => {
            let groups = net.kept.iter().map(|kept| layout(batch, kept.len).groups());
            4 * groups.sum::<usize>()
        }
    };
    (net.exact_len * batch + 4 * net.channels + metadata) as u64
}

/// Room for all tensors of a batch in `pages` pages.
#[must_use]
pub fn capacity(net: &Net, batch: usize, pages: u32) -> Capacity {
    let empty = Capacity::new(page_bytes(), pages, net.kept.len() as u32);
    let each = net.kept.iter();
    each.fold(empty, |capacity, kept| capacity.and(batch, kept.len))
}
