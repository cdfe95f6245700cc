//! Buffers that the threads of a pool write side by side.

use std::cell::UnsafeCell;
use std::ops::Range;

/// A fixed buffer whose disjoint parts may be written by several threads at a time.
///
/// The tasks of a pass are cut so that each chunk writes a part of its own, and a task reads only
/// what tasks before it wrote; between tasks the pool synchronises.
pub struct Cells<T>(Box<[UnsafeCell<T>]>);

// SAFETY: all access goes through `read` and `write`, whose callers promise that no part is written
// by one thread while another uses it.
unsafe impl<T: Copy + Send + Sync> Sync for Cells<T> {}

impl<T: Copy + Default> Cells<T> {
    /// `len` zeros.
    pub fn new(len: usize) -> Self {
        Self((0..len).map(|_| UnsafeCell::new(T::default())).collect())
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when there are no elements.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A part, to read.
    ///
    /// # Safety
    /// No thread writes any of `range` while the slice lives.
    pub unsafe fn read(&self, range: Range<usize>) -> &[T] {
        let cells = &self.0[range];
        // SAFETY: UnsafeCell<T> has T's layout, and the caller promises that nobody writes.
        unsafe { std::slice::from_raw_parts(cells.as_ptr().cast(), cells.len()) }
    }

    /// A part, to write.
    ///
    /// # Safety
    /// No other reference to any of `range` is used while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn write(&self, range: Range<usize>) -> &mut [T] {
        let cells = &self.0[range];
        // SAFETY: UnsafeCell<T> has T's layout and allows the write, and the caller promises that
        // the part is theirs alone.
        unsafe { std::slice::from_raw_parts_mut(UnsafeCell::raw_get(cells.as_ptr()), cells.len()) }
    }

    /// Address of the first element.
    pub fn as_ptr(&self) -> *mut T {
        UnsafeCell::raw_get(self.0.as_ptr())
    }
}
