//! Batches under way and their tickets.

use std::time::Instant;

use super::{IoKind, StoreError};

/// A batch under way. A read's has to be waited for; a write's may be.
#[must_use = "a batch of reads is over only when its ticket is waited for"]
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket {
    pub(super) store: u32,
    pub(super) index: u32,
    pub(super) generation: u32,
    pub(super) kind: IoKind,
}

impl Ticket {
    pub(super) fn number(&self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

/// Which groups a batch is about: a range, or a list with staging slots.
pub(super) enum Wanted {
    Range,
    List,
}

pub(super) struct Batch {
    pub(super) generation: u32,
    /// `None`: free.
    pub(super) kind: Option<IoKind>,
    pub(super) layer: u32,
    /// All wanted groups are in `first_group..end_group`.
    pub(super) first_group: u32,
    pub(super) end_group: u32,
    pub(super) wanted: Wanted,
    /// `(group, slot)`, ascending; only for `Wanted::List`.
    pub(super) list: Vec<(u32, u32)>,
    pub(super) region: u32,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) unfinished: u32,
    pub(super) error: Option<StoreError>,
    pub(super) submitted: Instant,
    pub(super) last_finish: Instant,
}

impl Batch {
    /// A free entry with room for the list of `groups` groups.
    pub(super) fn free(groups: usize) -> Self {
        let now = Instant::now();
        Self {
            generation: 0,
            kind: None,
            layer: 0,
            first_group: 0,
            end_group: 0,
            wanted: Wanted::Range,
            list: Vec::with_capacity(groups),
            region: 0,
            offset: 0,
            bytes: 0,
            unfinished: 0,
            error: None,
            submitted: now,
            last_finish: now,
        }
    }

    /// Number of wanted groups.
    pub(super) fn wanted_count(&self) -> usize {
        match self.wanted {
            Wanted::Range => (self.end_group - self.first_group) as usize,
            Wanted::List => self.list.len(),
        }
    }

    /// The `i`-th wanted group and its slot in the buffer.
    pub(super) fn wanted_group(&self, i: usize) -> (u32, u32) {
        match self.wanted {
            Wanted::Range => (self.first_group + i as u32, i as u32),
            Wanted::List => self.list[i],
        }
    }

    pub(super) fn wants(&self, layer: u32, first_group: u32, end_group: u32) -> bool {
        if self.layer != layer || self.end_group <= first_group || end_group <= self.first_group {
            return false;
        }
        match self.wanted {
            Wanted::Range => true,
            Wanted::List => {
                let at = self.list.partition_point(|&(group, _)| group < first_group);
                self.list.get(at).is_some_and(|&(group, _)| group < end_group)
            }
        }
    }

    pub(super) fn overlaps(&self, region: u32, offset: u64, bytes: u64) -> bool {
        self.region == region && self.offset < offset + bytes && offset < self.offset + self.bytes
    }
}
