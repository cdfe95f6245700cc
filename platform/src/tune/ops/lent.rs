//! Floats that the chunks of a fork write, each its own part, where the parts aren't whole rows.

use std::marker::PhantomData;

/// A borrow that chunks share out among them.
#[derive(Clone, Copy)]
pub(super) struct Lent<'a> {
    at: *mut f32,
    len: usize,
    of: PhantomData<&'a mut [f32]>,
}

// SAFETY: who takes parts vouches that they are disjoint; floats may go to any thread.
unsafe impl Send for Lent<'_> {}
// SAFETY: as above.
unsafe impl Sync for Lent<'_> {}

impl<'a> Lent<'a> {
    /// Lends `data` until the fork has ended.
    pub(super) fn new(data: &'a mut [f32]) -> Self {
        Self {
            at: data.as_mut_ptr(),
            len: data.len(),
            of: PhantomData,
        }
    }

    /// `len` floats from `first`.
    ///
    /// # Safety
    /// While the part lives, nobody takes another that overlaps it.
    ///
    /// # Panics
    /// There are fewer.
    pub(super) unsafe fn part(&self, first: usize, len: usize) -> &'a mut [f32] {
        assert!(first <= self.len && len <= self.len - first, "a part of it");
        // SAFETY: in bounds as just checked, and the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(first), len) }
    }
}
