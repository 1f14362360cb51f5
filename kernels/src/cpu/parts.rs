//! One mutable slice shared by the tasks of a fork-join.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice of which each task takes its own part.
pub(crate) struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts that do not overlap (the promise of `get`), so it is as shareable as the elements are sendable.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Parts { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The elements `range`; panics if they are not all inside.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    #[inline]
    #[expect(clippy::mut_from_ref, reason = "parts are disjoint by the caller's promise")]
    pub(crate) unsafe fn get(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice by the assertion; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.end - range.start) }
    }
}
