//! Elements that the chunks of a fork write, each its own part.

use std::marker::PhantomData;

/// A borrow that chunks share out among them.
pub(in crate::tune) struct Lent<'a, T> {
    at: *mut T,
    len: usize,
    of: PhantomData<&'a mut [T]>,
}

// SAFETY: who takes parts vouches that they are disjoint, and what may go to another thread may go in parts.
unsafe impl<T: Send> Send for Lent<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Lent<'_, T> {}

impl<'a, T> Lent<'a, T> {
    /// Lends `data` until the fork has ended.
    pub(in crate::tune) fn new(data: &'a mut [T]) -> Self {
        Self {
            at: data.as_mut_ptr(),
            len: data.len(),
            of: PhantomData,
        }
    }

    /// `len` elements from `first`.
    ///
    /// # Safety
    /// While the part lives, nobody takes another that overlaps it.
    ///
    /// # Panics
    /// There are fewer.
    #[allow(clippy::mut_from_ref)]
    pub(in crate::tune) unsafe fn part(&self, first: usize, len: usize) -> &'a mut [T] {
        assert!(first <= self.len && len <= self.len - first, "a part of it");
        // SAFETY: in bounds as just checked, and the caller's alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(first), len) }
    }
}
