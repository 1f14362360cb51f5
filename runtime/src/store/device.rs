//! What a device does: raw transfers between a file and arenas. Devices report what the system call reported;
//! [`super::queue`] is the one place that decides what that means.

use std::sync::Arc;
use std::time::Instant;

use super::{Alignment, Arena, IoKind, StoreError};

/// Bytes in an arena that a transfer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRef {
    /// Which arena, in the order given when the store was created.
    pub region: u32,
    /// Start in the arena, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub len: u32,
}

impl BufferRef {
    /// Whether two buffers share a byte.
    pub fn overlaps(&self, other: &BufferRef) -> bool {
        self.region == other.region
            && self.offset < other.offset + u64::from(other.len)
            && other.offset < self.offset + u64::from(self.len)
    }
}

/// One transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoOp {
    /// Direction.
    pub kind: IoKind,
    /// Where in the file, bytes.
    pub file_offset: u64,
    /// Where in memory.
    pub buffer: BufferRef,
    /// Comes back with the completion.
    pub tag: u64,
}

/// The end of a transfer as the system reported it.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The operation's tag.
    pub tag: u64,
    /// Bytes moved, or a negated error number.
    pub result: i32,
    /// When it ended, as far as the device can know: io_uring has no time stamps and gives the time of reaping.
    pub finished: Instant,
}

/// What a device turned out to be.
#[derive(Clone, Copy, Debug)]
pub struct Capabilities {
    /// `io_uring` or `pread`.
    pub backend: &'static str,
    /// Transfers that may be in flight at once.
    pub depth: usize,
    /// Whether transfers go on while nobody waits for them.
    pub background: bool,
    /// Whether transfers bypass the page cache.
    pub direct: bool,
    /// What transfers must be aligned to.
    pub alignment: Alignment,
    /// Whether the arenas are registered with the kernel.
    pub registered_buffers: bool,
    /// Whether the file is registered with the kernel.
    pub registered_file: bool,
}

/// An asynchronous device. After an error of any method it is broken: what is in flight never completes, and its
/// memory is never given back.
///
/// The memory of a transfer belongs to the device from `submit` to its completion. Dropping a device waits for
/// everything in flight.
pub trait Device: Send {
    /// Starts all of `ops` without waiting for any, in one system call where there is one to make. The caller keeps
    /// `in_flight() + ops.len()` within the depth; more is an error, and nothing is started.
    fn submit(&mut self, ops: &[IoOp]) -> Result<(), StoreError>;

    /// Appends what has completed. Does not wait.
    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError>;

    /// Appends at least one completion, waiting for it; nothing where nothing is in flight.
    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError>;

    /// Transfers submitted and not yet reported.
    fn in_flight(&self) -> usize;

    /// What the device turned out to be.
    fn capabilities(&self) -> Capabilities;
}

/// The arenas that transfers may touch, kept alive by everyone who holds a copy.
#[derive(Clone, Debug)]
pub struct Regions(Arc<[Arc<Arena>]>);

impl Regions {
    /// Regions in the order of `arenas`.
    pub fn new(arenas: &[Arc<Arena>]) -> Self {
        Self(arenas.into())
    }

    /// The arenas, by region index.
    pub fn arenas(&self) -> &[Arc<Arena>] {
        &self.0
    }

    /// Errors where the bytes are not inside one arena.
    pub fn check(&self, region: u32, offset: u64, length: u64) -> Result<&Arc<Arena>, StoreError> {
        let arena = self.0.get(region as usize);
        let region_bytes = arena.map_or(0, |arena| arena.len() as u64);
        match (arena, offset.checked_add(length)) {
            (Some(arena), Some(end)) if end <= region_bytes => Ok(arena),
            _ => Err(StoreError::BufferRange { region, offset, length, region_bytes }),
        }
    }

    /// Address of a buffer, checked to be inside its arena.
    pub(crate) fn resolve(&self, buffer: BufferRef) -> Result<*mut u8, StoreError> {
        let arena = self.check(buffer.region, buffer.offset, buffer.len.into())?;
        // SAFETY: the offset was just checked to be inside the mapping, or one past its end for no bytes.
        Ok(unsafe { arena.as_ptr().add(buffer.offset as usize) })
    }

    /// Lets the memory live as long as the process. For transfers that will never be reported.
    pub(crate) fn leak(&self) {
        std::mem::forget(self.clone());
    }
}

/// Errors where `ops` would exceed the depth of a device.
pub(crate) fn check_depth(in_flight: usize, ops: usize, depth: usize) -> Result<(), StoreError> {
    if in_flight + ops > depth { Err(StoreError::QueueFull { what: "device", limit: depth }) } else { Ok(()) }
}
