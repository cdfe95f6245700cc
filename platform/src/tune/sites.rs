//! The tensors among which the pages of saved activations are shared out: what each takes by its width, what
//! its noise does, and the width that is chosen for it. Whose tensors they are is the caller's to know.

use std::ops::Range;

use leanstream_core::act::Width;
use leanstream_core::act::allot::{self, Group, Recompute, Site, TooTight};
use leanstream_core::act::importance::{Average, floor};

/// Weight of what was seen so far against what the last step showed.
const KEEP: f32 = 0.9;
/// No importance is taken for less than this share of what it would be if all were alike.
const FLOOR: f32 = 0.02;

/// Tensors in a fixed order, in groups that are saved or computed again together.
#[derive(Debug, Default)]
pub(in crate::tune) struct Sites {
    /// Each tensor's pages, importance and width.
    pub all: Vec<Site>,
    /// Where groups begin among them, and what computing one again costs.
    pub groups: Vec<Group>,
    /// What was seen of each tensor's importance.
    pub averages: Vec<Average>,
    /// Elements of each.
    pub elements: Vec<f32>,
    /// Importances before anything is known.
    priors: Vec<f32>,
}

impl Sites {
    /// One more tensor, with the pages that it takes by its width.
    pub fn push(&mut self, site: Site, elements: usize) {
        self.all.push(site);
        self.averages.push(Average::default());
        self.elements.push(elements as f32);
    }

    /// Those from `first` on, if any, are a group.
    pub fn close(&mut self, first: usize, again: Option<Recompute>) {
        if self.all.len() > first {
            self.groups.push(Group::new(first as u32, again));
        }
    }

    /// Sets what importances are before anything is known.
    pub fn begin(&mut self, priors: Vec<f32>) {
        self.priors = priors;
        self.learn(std::iter::empty());
    }

    /// Tensors of a group.
    pub fn group(&self, group: usize) -> Range<usize> {
        let end = self
            .groups
            .get(group + 1)
            .map_or(self.all.len(), |next| next.first as usize);
        self.groups[group].first as usize..end
    }

    /// Pages with everything at `width`.
    pub fn pages_at(&self, width: Width) -> u64 {
        let pages = self.all.iter().map(|site| u64::from(site.pages_at(width)));
        pages.sum()
    }

    /// Pages with which a step can run, and pages beyond which more do no good: all `act` wide, or as wide
    /// as each is worth.
    pub fn pages(&self, act: Option<Width>) -> (u64, u64) {
        if let Some(width) = act {
            return (self.pages_at(width), self.pages_at(width));
        }
        let kept = (0..self.groups.len()).filter(|group| self.groups[*group].recompute.is_none());
        let least = kept
            .flat_map(|group| &self.all[self.group(group)])
            .map(|site| u64::from(site.pages_at(Width::One)))
            .sum();
        (least, self.pages_at(Width::Eight))
    }

    /// Takes in what a step showed of the importance of each tensor; `None` where it showed nothing.
    pub fn learn(&mut self, seen: impl Iterator<Item = Option<f32>>) {
        for (average, seen) in self.averages.iter_mut().zip(seen) {
            if let Some(seen) = seen {
                average.note(seen, KEEP);
            }
        }
        floor(&mut self.all, &self.averages, &self.priors, FLOOR);
    }

    /// Chooses widths for `pages` pages. Whether anything changed.
    ///
    /// # Errors
    /// There are too few.
    pub fn choose(&mut self, act: Option<Width>, pages: u64) -> Result<bool, TooTight> {
        let outcome = match act {
            Some(width) => allot::force(&mut self.all, &mut self.groups, width, pages)?,
            None => allot::solve(&mut self.all, &mut self.groups, pages)?,
        };
        Ok(outcome.changed)
    }

    /// Mean bits of an element, 0 of those that aren't saved.
    pub fn mean_bits(&self, widths: impl Iterator<Item = Option<Width>>) -> f64 {
        let (mut bits, mut all) = (0.0, 0.0);
        for (width, elements) in widths.zip(&self.elements) {
            let elements = f64::from(*elements);
            bits += elements * f64::from(width.map_or(0, Width::bits));
            all += elements;
        }
        bits / all
    }
}
