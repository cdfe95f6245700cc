//! How many bits each saved tensor gets, and what that comes to in bytes.

use leanstream_core::act::Width;
use leanstream_core::act::allot::{Site, TooTight};

use super::net::Net;
use crate::tune::act::{Capacity, Layout, Pages};
use crate::tune::sites::Sites;

/// Bytes of a page.
#[must_use]
pub fn page_bytes() -> usize {
    Pages::least_bytes()
}

/// The allotment of a classifier's saved tensors.
#[derive(Debug)]
pub struct Allotment {
    act: Option<Width>,
    sites: Sites,
    importance: Vec<f32>,
}

impl Allotment {
    /// For batches of `batch` images; every tensor `act` wide, or as many bits as it is worth.
    #[must_use]
    pub fn new(net: &Net, batch: usize, act: Option<Width>) -> Self {
        let mut sites = Sites::default();
        for kept in &net.kept {
            let pages = layout(batch, kept.len).pages(page_bytes());
            sites.push(Site::new(pages), batch * kept.len);
        }
        sites.close(0, None);
        sites.begin(sites.elements.clone());
        let importance = sites.all.iter().map(|site| site.importance).collect();
        Self {
            act,
            sites,
            importance,
        }
    }

    /// Pages with which a step can run, and pages beyond which more do no good.
    #[must_use]
    pub fn pages(&self) -> (u64, u64) {
        self.sites.pages(self.act)
    }

    /// Takes in what a backward pass showed, by tensor id.
    pub fn learn(&mut self, seen: &[f32]) {
        self.sites.learn(seen.iter().map(|seen| Some(*seen)));
        for (importance, site) in self.importance.iter_mut().zip(&self.sites.all) {
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
        self.sites.choose(self.act, pages)?;
        for (width, site) in widths.iter_mut().zip(&self.sites.all) {
            *width = site.width.expect("a choice was just made");
        }
        Ok(())
    }

    /// Mean bits of a saved element.
    #[must_use]
    pub fn mean_bits(&self, widths: &[Width]) -> f64 {
        self.sites.mean_bits(widths.iter().copied().map(Some))
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
