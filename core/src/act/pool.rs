//! Which pages hold which chunk of which tensor. The bytes are elsewhere.

/// Number of a page, from 0 below the limit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageId(pub u32);

/// Number of a saved tensor; the caller gives it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct TensorId(pub u32);
