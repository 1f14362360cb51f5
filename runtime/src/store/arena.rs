//! Page-aligned memory that the disk reads into and writes from.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::StoreError;

/// Alignment of an arena's start, in bytes; no less than any direct-I/O memory alignment in use.
pub const ARENA_ALIGN: usize = 4096;

/// How an arena is mapped.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArenaOptions {
    /// Fault all pages in now, so that no page fault and no lack of memory comes later.
    pub populate: bool,
    /// Ask for transparent huge pages.
    pub huge_pages: bool,
    /// For large transfers now and then: the store does not register it, as that would pin its pages, so that
    /// [`Arena::release`] can give them back.
    pub transient: bool,
}

/// One anonymous, zeroed, page-aligned mapping. It lives until the last [`Arc`] goes; the store holds one for as
/// long as a transfer may touch the memory.
#[derive(Debug)]
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    transient: bool,
}

// SAFETY: the mapping is owned, process-wide memory; access through `&Arena` is only by raw pointer or by unsafe
// functions whose contract forbids races.
unsafe impl Send for Arena {}
// SAFETY: as above.
unsafe impl Sync for Arena {}

impl Arena {
    /// Maps `bytes` bytes (rounded up to whole pages), zeroed and lazily backed.
    pub fn new(bytes: usize) -> Result<Arc<Self>, StoreError> {
        Self::with_options(bytes, ArenaOptions::default())
    }

    /// Maps `bytes` bytes (rounded up to whole pages), zeroed. Zero bytes and a lack of memory are errors.
    pub fn with_options(bytes: usize, options: ArenaOptions) -> Result<Arc<Self>, StoreError> {
        let size = bytes
            .checked_next_multiple_of(ARENA_ALIGN)
            .filter(|&size| size > 0 && size <= isize::MAX as usize)
            .ok_or(StoreError::Memory { bytes: bytes as u64, errno: rustix::io::Errno::INVAL.raw_os_error() })?;
        let error = |e: rustix::io::Errno| StoreError::Memory { bytes: size as u64, errno: e.raw_os_error() };
        let flags = MapFlags::PRIVATE | if options.populate { MapFlags::POPULATE } else { MapFlags::empty() };
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, flags)
        }
        .map_err(error)?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(error(rustix::io::Errno::NOMEM))?;
        if options.huge_pages {
            // SAFETY: the range is the mapping just made. Refused advice only costs speed.
            let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), size, Advice::LinuxHugepage) };
        }
        Ok(Arc::new(Self { base, bytes: size, transient: options.transient }))
    }

    /// Size in bytes, a multiple of the page size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Never true: an arena has at least one page.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Whether the store leaves this arena unregistered.
    pub fn is_transient(&self) -> bool {
        self.transient
    }

    /// Gives the pages back to the system; the memory reads as zeros afterwards.
    ///
    /// # Safety
    /// No slice of the arena lives and no transfer of it is in flight.
    pub unsafe fn release(&self) {
        // SAFETY: the range is the whole of our own anonymous mapping, which nothing else uses by the contract. Refused advice
        // only keeps the pages.
        let _ = unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.bytes, Advice::LinuxDontNeed) };
    }

    /// Start of the memory. Reads and writes through it follow the contract of [`Arena::slice_mut`].
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The bytes of `range`. Panics where the range is outside the arena.
    ///
    /// # Safety
    /// While the slice lives, nothing writes to the range: no read from disk into it is in flight (its ticket was
    /// waited for) and no mutable slice overlaps it.
    pub unsafe fn slice(&self, range: Range<usize>) -> &[u8] {
        self.check(&range);
        // SAFETY: inside the mapping (checked), initialised (zeroed by the kernel), not written to by the contract.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(range.start), range.len()) }
    }

    /// The bytes of `range`, to be written. Panics where the range is outside the arena.
    ///
    /// # Safety
    /// While the slice lives, nothing else touches the range: no transfer of it is in flight, in either direction,
    /// and no other slice overlaps it.
    #[expect(
        clippy::mut_from_ref,
        reason = "disjoint ranges of one arena are handed out; the contract forbids overlap"
    )]
    pub unsafe fn slice_mut(&self, range: Range<usize>) -> &mut [u8] {
        self.check(&range);
        // SAFETY: inside the mapping (checked), initialised, exclusive by the contract.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(range.start), range.len()) }
    }

    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.bytes,
            "range {range:?} is outside an arena of {} bytes",
            self.bytes
        );
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and no reference to it outlives the arena.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping an arena: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arena_is_zeroed_aligned_and_whole_pages() {
        for options in [ArenaOptions::default(), ArenaOptions { populate: true, huge_pages: true, transient: false }] {
            let arena = Arena::with_options(5000, options).unwrap();
            assert_eq!(arena.len(), 8192);
            assert_eq!(arena.as_ptr() as usize % ARENA_ALIGN, 0);
            // SAFETY: nothing else knows this arena.
            let bytes = unsafe { arena.slice_mut(0..8192) };
            assert!(bytes.iter().all(|&b| b == 0));
            bytes[8191] = 7;
        }
    }

    #[test]
    fn absurd_sizes_are_errors() {
        for bytes in [0, usize::MAX, isize::MAX as usize] {
            assert!(matches!(Arena::new(bytes), Err(StoreError::Memory { .. })), "{bytes}");
        }
    }
}
