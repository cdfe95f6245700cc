//! The policies by name, as the command line has them.

use super::{Belady, Cause, Fixed, Lfu, LruWindow, Oneshot, Refine, Retain, Rules, Seen};
use crate::stream::policy::Worth;

/// A policy's name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Name {
    /// [`Refine`].
    Refine,
    /// [`LruWindow`].
    LruWindow,
    /// [`Oneshot`].
    Oneshot,
    /// [`Fixed`].
    Static,
    /// [`Lfu`].
    Lfu,
    /// [`Belady`], where the future is known.
    Belady,
}

impl Name {
    /// All of them; the one that needs an oracle last.
    pub const ALL: [Name; 6] = [
        Name::Refine,
        Name::LruWindow,
        Name::Oneshot,
        Name::Static,
        Name::Lfu,
        Name::Belady,
    ];

    /// As it is written.
    pub fn as_str(self) -> &'static str {
        match self {
            Name::Refine => "refine",
            Name::LruWindow => "lru-window",
            Name::Oneshot => "oneshot",
            Name::Static => "static",
            Name::Lfu => "lfu",
            Name::Belady => "belady",
        }
    }

    /// The policy that is written so.
    pub fn from_name(name: &str) -> Option<Name> {
        Name::ALL.into_iter().find(|policy| policy.as_str() == name)
    }

    /// Whether it needs to know the future ([`Seen::next`]), so that only replay can run it.
    pub fn needs_oracle(self) -> bool {
        self == Name::Belady
    }
}

/// Any policy, chosen at run time.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Policy {
    /// See [`Refine`].
    Refine(Refine),
    /// See [`LruWindow`].
    LruWindow(LruWindow),
    /// See [`Oneshot`].
    Oneshot(Oneshot),
    /// See [`Fixed`].
    Static(Fixed),
    /// See [`Lfu`].
    Lfu(Lfu),
    /// See [`Belady`].
    Belady(Belady),
}

impl Policy {
    /// The policy `name` for a cache of `slots` units, where calibration found `priors` (the share of
    /// tokens that use a unit, one a unit).
    pub fn new(name: Name, slots: u32, priors: impl Iterator<Item = f32> + Clone) -> Self {
        match name {
            Name::Refine => Policy::Refine(Refine::new()),
            Name::LruWindow => Policy::LruWindow(LruWindow::default()),
            Name::Oneshot => Policy::Oneshot(Oneshot::new(slots)),
            Name::Static => Policy::Static(Fixed::new(Fixed::cutoff(priors, slots))),
            Name::Lfu => Policy::Lfu(Lfu),
            Name::Belady => Policy::Belady(Belady),
        }
    }

    /// Its name.
    pub fn name(&self) -> Name {
        match self {
            Policy::Refine(_) => Name::Refine,
            Policy::LruWindow(_) => Name::LruWindow,
            Policy::Oneshot(_) => Name::Oneshot,
            Policy::Static(_) => Name::Static,
            Policy::Lfu(_) => Name::Lfu,
            Policy::Belady(_) => Name::Belady,
        }
    }
}

/// Calls the same method of whichever policy it is.
macro_rules! each {
    ($self:expr, $policy:ident => $call:expr) => {
        match $self {
            Policy::Refine($policy) => $call,
            Policy::LruWindow($policy) => $call,
            Policy::Oneshot($policy) => $call,
            Policy::Static($policy) => $call,
            Policy::Lfu($policy) => $call,
            Policy::Belady($policy) => $call,
        }
    };
}

impl Retain for Policy {
    #[inline]
    fn worth(&mut self, seen: &Seen, cause: Cause) -> Worth {
        each!(self, policy => policy.worth(seen, cause))
    }

    fn rules(&self) -> Rules {
        each!(self, policy => policy.rules())
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::seen;
    use super::*;

    #[test]
    fn names_lead_to_their_policies() {
        for name in Name::ALL {
            assert_eq!(Name::from_name(name.as_str()), Some(name));
            let policy = Policy::new(name, 100, [0.5f32; 4].into_iter());
            assert_eq!(policy.name(), name);
            let rules = policy.rules();
            assert_eq!(
                rules.newest_first,
                matches!(name, Name::Refine | Name::Lfu | Name::Belady)
            );
            assert_eq!(rules.segment.is_some(), name == Name::Oneshot);
            assert_eq!(
                rules.speculates,
                matches!(name, Name::Refine | Name::Oneshot)
            );
            assert_eq!(
                rules.reranks,
                matches!(name, Name::Refine | Name::Lfu | Name::Belady)
            );
        }
        assert_eq!(Name::from_name("LFU"), None);
        assert_eq!(Name::from_name(""), None);
    }

    #[test]
    fn no_policy_says_what_only_an_empty_slot_is_worth() {
        let wild = [
            f32::NAN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            -1.0,
            0.0,
            1.0,
            1e30,
        ];
        for name in Name::ALL {
            let mut policy = Policy::new(name, 100, [0.5f32; 4].into_iter());
            for (frequency, score) in wild.into_iter().flat_map(|f| wild.map(|s| (f, s))) {
                for age in [0, 1, 1000, u32::MAX] {
                    let unit = Seen {
                        score,
                        age,
                        ..seen(frequency, frequency)
                    };
                    for cause in [
                        Cause::Used { hit: true },
                        Cause::Used { hit: false },
                        Cause::Passed,
                        Cause::Foreseen,
                    ] {
                        assert!(policy.worth(&unit, cause) >= Worth::LEAST);
                    }
                }
            }
        }
    }
}
