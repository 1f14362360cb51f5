//! The store proper: batches of reads and writes, tickets, checksums, counters.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use forebay_kernels::Pool;

use super::backend::{DeviceOptions, open_device};
use super::batch::{Batch, Ticket, Wanted};
use super::checksum::ChecksumTable;
use super::device::{BufferRef, Capabilities, IoOp, Regions};
use super::queue::{Finished, IoQueue, TRANSFERS_MAX};
use super::{Alignment, Arena, FaultCounts, IoKind, ReadPlan, StoreError, StoreLayout, StoreOptions, StoreStats, file};

/// Batches of reads and writes under way at once, unwaited reads included. Two layers of reads and their late
/// refinement need four; writes give their ticket back by themselves, and a full table of them is waited for.
pub const TICKETS_MAX: usize = 128;

/// A write or a sequential read is cut into pieces of this size: large enough for full bandwidth, small enough that a
/// read behind it does not wait long.
pub const PIECE_BYTES: u32 = 1 << 20;

/// Groups whose checksums one task makes: some tens of kilobytes.
const CHECKSUM_GROUPS: usize = 4;

/// Tickets whose lists are reserved when the store is created.
const TICKETS_RESERVED: usize = 8;

/// The groups of one sequence, on disk. See the module's documentation for the contract.
pub struct Store {
    id: u32,
    layout: StoreLayout,
    dir: PathBuf,
    regions: Regions,
    queue: IoQueue,
    alignment: Alignment,
    table: ChecksumTable,
    batches: Vec<Batch>,
    free: Vec<u32>,
    finished: Vec<Finished>,
    /// Checksums of the batch that is verified.
    found: Vec<u32>,
    pool: Option<Arc<Pool>>,
    stats: StoreStats,
    write_budget_bytes: u64,
    bytes_submitted: u64,
    latched: Option<StoreError>,
    fault_counts: FaultCounts,
    /// End of the read time that `io_busy_seconds` already covers.
    busy_until: Instant,
    file: Arc<OwnedFd>,
}

impl Store {
    /// Makes the store file in `options.dir` and reserves its space. Transfers go to and from `arenas`, named by
    /// their index as regions.
    ///
    /// The directory is checked first: absent, no directory, not writable and too small are an error each.
    pub fn create(options: StoreOptions, layout: StoreLayout, arenas: &[Arc<Arena>]) -> Result<Self, StoreError> {
        let file = file::open(&options.dir, options.buffered)?;
        let align = file.alignment.offset;
        if !layout.stride().is_multiple_of(align) || !layout.header_bytes().is_multiple_of(align) {
            return Err(StoreError::Layout {
                what: "stride",
                found: layout.stride().into(),
                expected: "a multiple of the directory's alignment, as store::probe gives it",
            });
        }
        file::reserve(&file, &options.dir, &layout)?;
        // One more region, for the header.
        let header = Arena::new(layout.header_bytes() as usize)?;
        let mut all = arenas.to_vec();
        all.push(Arc::clone(&header));
        let regions = Regions::new(&all);
        let fd = Arc::new(file.fd);
        let fault_counts = FaultCounts::default();
        let device_options = DeviceOptions {
            backend: options.backend,
            throttle: options.throttle,
            direct: file.direct,
            in_memory: file.in_memory,
            pool: options.pool.clone(),
            alignment: file.alignment,
            faults: options.faults.map(|faults| (faults, fault_counts.clone())),
        };
        let device = open_device(device_options, Arc::clone(&fd), &regions, layout.file_bytes())?;
        static NEXT_ID: AtomicU32 = AtomicU32::new(1);
        let now = Instant::now();
        let mut store = Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            layout,
            dir: options.dir,
            regions,
            queue: IoQueue::new(device, layout),
            alignment: file.alignment,
            table: ChecksumTable::new(&layout, options.checksums),
            batches: Vec::with_capacity(TICKETS_MAX),
            free: Vec::with_capacity(TICKETS_MAX),
            finished: Vec::with_capacity(TRANSFERS_MAX),
            found: Vec::with_capacity(options.plan_groups_max),
            pool: options.pool,
            stats: StoreStats::default(),
            write_budget_bytes: options.write_budget_bytes.unwrap_or(u64::MAX),
            bytes_submitted: 0,
            latched: None,
            fault_counts,
            busy_until: now,
            file: fd,
        };
        for index in 0..TICKETS_MAX {
            store.batches.push(Batch::free(if index < TICKETS_RESERVED { options.plan_groups_max } else { 0 }));
            store.free.push((TICKETS_MAX - 1 - index) as u32);
        }
        store.write_header(&header, all.len() as u32 - 1, &options.fingerprint)?;
        Ok(store)
    }

    fn write_header(&mut self, header: &Arena, region: u32, fingerprint: &[u8; 32]) -> Result<(), StoreError> {
        let bytes = self.layout.encode_header(fingerprint);
        // SAFETY: the arena was made for this and nothing has been submitted yet.
        unsafe { header.slice_mut(0..bytes.len()) }.copy_from_slice(&bytes);
        let length = self.layout.header_bytes();
        self.charge(length.into())?;
        let ticket = self.open_batch(IoKind::Write, 0, 0..0, region, 0, length.into())?;
        let op = self.op(IoKind::Write, 0, region, 0, length);
        self.enqueue(op, &ticket)?;
        self.pump()?;
        self.wait(ticket)
    }

    /// The layout.
    pub fn layout(&self) -> &StoreLayout {
        &self.layout
    }

    /// What the device turned out to be.
    pub fn capabilities(&self) -> Capabilities {
        self.queue.capabilities()
    }

    /// What was done so far.
    pub fn stats(&self) -> StoreStats {
        self.stats
    }

    /// How many faults were injected; stays at zero unless asked for.
    pub fn fault_counts(&self) -> &FaultCounts {
        &self.fault_counts
    }

    /// Whether a group was written (or is being written).
    pub fn is_written(&self, layer: u32, group: u32) -> bool {
        self.layout.check_range(layer, group, 1).is_ok()
            && self.table.is_written(self.layout.record_index(layer, group))
    }

    /// Starts the reads of `plan` into `region`, from `offset` on: the record of `plan.groups()[i]` begins
    /// `plan.slots()[i] * stride` bytes in. Does not wait, unless a group's own write is still under way.
    ///
    /// Until its ticket was waited for, the buffer belongs to the store. A group that was never written, a buffer
    /// outside the region and one that is in use are errors, and nothing is started.
    pub fn submit_reads(&mut self, plan: &ReadPlan, region: u32, offset: u64) -> Result<Ticket, StoreError> {
        self.ready()?;
        let layer = plan.layer();
        let (Some(&first), Some(&last)) = (plan.groups().first(), plan.groups().last()) else {
            return self.open_batch(IoKind::Read, layer, 0..0, region, offset, 0);
        };
        self.layout.check_range(layer, last, 1)?;
        let bytes = u64::from(plan.slot_count()) * u64::from(self.layout.stride());
        self.check_buffer(IoKind::Read, region, offset, bytes)?;
        for &group in plan.groups() {
            self.check_written(layer, group)?;
        }
        self.wait_for_writes_of(layer, first, last + 1, Some(plan.groups()))?;
        let ticket = self.open_batch(IoKind::Read, layer, first..last + 1, region, offset, bytes)?;
        let batch = &mut self.batches[ticket.index as usize];
        batch.wanted = Wanted::List;
        batch.list.extend(plan.groups().iter().copied().zip(plan.slots().iter().copied()));
        self.stats.read_requests += plan.groups().len() as u64;
        let stride = self.layout.stride();
        for extent in plan.extents() {
            let file_offset = self.layout.file_offset(layer, extent.first_group);
            let at = offset + u64::from(extent.first_slot) * u64::from(stride);
            // A plan's extents are bounded by its limits, a u32 of bytes.
            self.enqueue(self.op(IoKind::Read, file_offset, region, at, extent.group_count * stride), &ticket)?;
        }
        self.pump()?;
        Ok(ticket)
    }

    /// Starts the sequential read of `count` groups of a layer into `region`, one stride each, in order, in pieces of
    /// [`PIECE_BYTES`]. Contract and errors as for [`Store::submit_reads`].
    pub fn submit_read_range(
        &mut self,
        layer: u32,
        first_group: u32,
        count: u32,
        region: u32,
        offset: u64,
    ) -> Result<Ticket, StoreError> {
        self.ready()?;
        self.layout.check_range(layer, first_group, count)?;
        let end = first_group + count;
        let bytes = u64::from(count) * u64::from(self.layout.stride());
        self.check_buffer(IoKind::Read, region, offset, bytes)?;
        for group in first_group..end {
            self.check_written(layer, group)?;
        }
        self.wait_for_writes_of(layer, first_group, end, None)?;
        let ticket = self.open_batch(IoKind::Read, layer, first_group..end, region, offset, bytes)?;
        self.stats.read_requests += u64::from(count);
        self.enqueue_pieces(IoKind::Read, &ticket, layer, first_group..end, region, offset)?;
        self.pump()?;
        Ok(ticket)
    }

    /// Reads `count` groups of a layer and waits for them.
    pub fn read_groups_blocking(
        &mut self,
        layer: u32,
        first_group: u32,
        count: u32,
        region: u32,
        offset: u64,
    ) -> Result<(), StoreError> {
        let ticket = self.submit_read_range(layer, first_group, count, region, offset)?;
        self.wait(ticket)
    }

    /// Starts the write of `count` groups of a layer from `region`, one stride each, in order, in pieces of
    /// [`PIECE_BYTES`]. Does not wait, unless an older write of a group is still under way or the queue is full.
    ///
    /// Until the ticket or [`Store::wait_writes`] was waited for, the buffer must not change. The checksums are those
    /// of the buffer at this moment. A group that an unwaited read wants is an error.
    pub fn submit_write(
        &mut self,
        layer: u32,
        first_group: u32,
        count: u32,
        region: u32,
        offset: u64,
    ) -> Result<Ticket, StoreError> {
        self.ready()?;
        self.layout.check_range(layer, first_group, count)?;
        let end = first_group + count;
        let bytes = u64::from(count) * u64::from(self.layout.stride());
        self.check_buffer(IoKind::Write, region, offset, bytes)?;
        let read = self.batches.iter().find(|b| b.kind == Some(IoKind::Read) && b.wants(layer, first_group, end));
        if read.is_some() {
            return Err(StoreError::GroupBusy { layer, group: first_group });
        }
        self.wait_for_writes_of(layer, first_group, end, None)?;
        let ticket = self.open_batch(IoKind::Write, layer, first_group..end, region, offset, bytes)?;
        if let Err(e) = self.charge(bytes) {
            self.release(ticket.index);
            return Err(e);
        }
        self.note_written(layer, first_group..end, region, offset)?;
        self.enqueue_pieces(IoKind::Write, &ticket, layer, first_group..end, region, offset)?;
        self.pump()?;
        Ok(ticket)
    }

    /// Waits for a batch. For reads, verifies the groups that were asked for; a record that is not what was written
    /// is read once more before it is an error. After an error of a read the store is as usable as before, and the
    /// read can be repeated; an error of a write closes the store.
    pub fn wait(&mut self, ticket: Ticket) -> Result<(), StoreError> {
        let index = ticket.index as usize;
        if ticket.store != self.id || index >= self.batches.len() {
            return Err(StoreError::StaleTicket(ticket.number()));
        }
        let current = self.batches[index].generation == ticket.generation && self.batches[index].kind.is_some();
        match (ticket.kind, current) {
            (IoKind::Read, true) => self.wait_read(ticket.index),
            (IoKind::Read, false) => Err(StoreError::StaleTicket(ticket.number())),
            (IoKind::Write, current) => {
                if current {
                    let start = Instant::now();
                    while self.batches[index].kind.is_some() && self.batches[index].generation == ticket.generation {
                        self.advance()?;
                    }
                    self.stats.write_wait_seconds += start.elapsed().as_secs_f64();
                }
                self.ready()
            }
        }
    }

    /// Waits for all writes, and tells of any that failed.
    pub fn wait_writes(&mut self) -> Result<(), StoreError> {
        let start = Instant::now();
        while self.batches.iter().any(|batch| batch.kind == Some(IoKind::Write)) {
            self.advance()?;
        }
        self.stats.write_wait_seconds += start.elapsed().as_secs_f64();
        if !self.capabilities().direct {
            // What was written is not read soon; the memory has better use. Refused advice is no error.
            let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        }
        self.ready()
    }

    /// Takes note of what has completed and starts what was held back. Does not wait. Worth calling between the
    /// parts of a layer's work where more was submitted than the device takes at once.
    pub fn poll(&mut self) -> Result<(), StoreError> {
        if self.queue.unfinished() == 0 {
            return Ok(());
        }
        let polled = self.queue.poll(&mut self.finished);
        self.settle();
        self.latch(polled)
    }

    /// Waits for everything under way and forgets all tickets, those of failed steps included. Errors of reads are
    /// dropped with them; a failed write is told.
    pub fn drain(&mut self) -> Result<(), StoreError> {
        while self.queue.unfinished() > 0 {
            self.advance()?;
        }
        for index in 0..self.batches.len() {
            if self.batches[index].kind.is_some() {
                self.release(index as u32);
            }
        }
        self.ready()
    }

    fn wait_read(&mut self, index: u32) -> Result<(), StoreError> {
        let at = index as usize;
        if self.batches[at].unfinished > 0 {
            self.poll()?;
        }
        let waited_from = Instant::now();
        self.wait_transfers(index)?;
        let busy = self.batches[at].last_finish;
        let began = if self.capabilities().background { self.batches[at].submitted } else { waited_from };
        let from = began.max(self.busy_until);
        self.stats.io_busy_seconds += busy.saturating_duration_since(from).as_secs_f64();
        self.busy_until = self.busy_until.max(busy);
        let mut result = self.batches[at].error.take().map_or(Ok(()), Err);
        if result.is_ok() {
            result = self.verify(index);
        }
        self.release(index);
        result
    }

    fn wait_transfers(&mut self, index: u32) -> Result<(), StoreError> {
        if self.batches[index as usize].unfinished == 0 {
            return Ok(());
        }
        let start = Instant::now();
        let mut result = Ok(());
        while result.is_ok() && self.batches[index as usize].unfinished > 0 {
            result = self.advance();
        }
        self.stats.io_wait_seconds += start.elapsed().as_secs_f64();
        result
    }

    /// Verifies the wanted groups of a batch whose reads are all in, in memory.
    fn verify(&mut self, index: u32) -> Result<(), StoreError> {
        if !self.table.enabled() {
            return Ok(());
        }
        let start = Instant::now();
        let mut found = std::mem::take(&mut self.found);
        let counted = self.checksums(index, &mut found);
        self.stats.checksum_seconds += start.elapsed().as_secs_f64();
        let result = counted.and_then(|()| (0..found.len()).try_for_each(|i| self.compare(index, i, found[i])));
        self.found = found;
        result
    }

    /// Checksums of the wanted groups of a batch, in order.
    fn checksums(&self, index: u32, found: &mut Vec<u32>) -> Result<(), StoreError> {
        let batch = &self.batches[index as usize];
        let (stride, length) = (u64::from(self.layout.stride()), self.layout.record_bytes() as usize);
        let arena = self.regions.check(batch.region, batch.offset, batch.bytes)?;
        let checksum = |i: usize| {
            let (_, slot) = batch.wanted_group(i);
            let at = (batch.offset + u64::from(slot) * stride) as usize;
            // SAFETY: the slots of a batch are inside its buffer, which was checked; its reads are over and the buffer is the
            // store's until its ticket is waited for, so nobody writes to it.
            crc32c::crc32c(unsafe { arena.slice(at..at + length) })
        };
        found.clear();
        found.resize(batch.wanted_count(), 0);
        match &self.pool {
            Some(pool) => pool.for_each_chunk(found, CHECKSUM_GROUPS, |_, task, found| {
                found.iter_mut().enumerate().for_each(|(i, found)| *found = checksum(task * CHECKSUM_GROUPS + i));
            }),
            None => found.iter_mut().enumerate().for_each(|(i, found)| *found = checksum(i)),
        }
        Ok(())
    }

    /// Compares the checksum of wanted group `i` of a batch; the record is read again where it is not the one that was written.
    fn compare(&mut self, index: u32, i: usize, found: u32) -> Result<(), StoreError> {
        let batch = &self.batches[index as usize];
        let (layer, (group, slot)) = (batch.layer, batch.wanted_group(i));
        let (region, offset) = (batch.region, batch.offset + u64::from(slot) * u64::from(self.layout.stride()));
        let record = self.layout.record_index(layer, group);
        if self.table.expected_instead(record, found).is_none() {
            return Ok(());
        }
        self.stats.checksum_retries += 1;
        log::warn!("store: layer {layer}, group {group}: checksum mismatch, reading it again");
        self.read_again(index, layer, group, offset)?;
        let length = self.layout.record_bytes() as usize;
        let arena = self.regions.check(region, offset, length as u64)?;
        // SAFETY: as for all checksums of the batch; the repeated read is over, too.
        let found = crc32c::crc32c(unsafe { arena.slice(offset as usize..offset as usize + length) });
        match self.table.expected_instead(record, found) {
            None => Ok(()),
            Some(expected) => {
                let file_offset = self.layout.file_offset(layer, group);
                Err(StoreError::Corrupt { layer, group, file_offset, expected, found })
            }
        }
    }

    fn read_again(&mut self, index: u32, layer: u32, group: u32, offset: u64) -> Result<(), StoreError> {
        let batch = &self.batches[index as usize];
        let ticket = Ticket { store: self.id, index, generation: batch.generation, kind: IoKind::Read };
        let file_offset = self.layout.file_offset(layer, group);
        self.enqueue(self.op(IoKind::Read, file_offset, batch.region, offset, self.layout.stride()), &ticket)?;
        self.pump()?;
        self.wait_transfers(index)?;
        self.batches[index as usize].error.take().map_or(Ok(()), Err)
    }

    fn op(&self, kind: IoKind, file_offset: u64, region: u32, offset: u64, len: u32) -> IoOp {
        IoOp { kind, file_offset, buffer: BufferRef { region, offset, len }, tag: 0 }
    }

    fn ready(&self) -> Result<(), StoreError> {
        match &self.latched {
            Some(e) => Err(StoreError::Latched(Box::new(e.clone()))),
            None => Ok(()),
        }
    }

    /// An error of the queue itself leaves transfers that never end: the store is closed.
    fn latch(&mut self, result: Result<(), StoreError>) -> Result<(), StoreError> {
        if let Err(e) = &result
            && self.latched.is_none()
        {
            log::warn!("store in {}: closed by a failure: {e}", self.dir.display());
            self.latched = Some(e.clone());
        }
        result
    }

    fn check_buffer(&self, kind: IoKind, region: u32, offset: u64, length: u64) -> Result<(), StoreError> {
        self.regions.check(region, offset, length)?;
        let align = self.alignment.memory;
        if !offset.is_multiple_of(align.into()) {
            return Err(StoreError::Misaligned {
                kind,
                place: self.layout.place(0),
                what: "buffer offset",
                found: offset,
                align,
            });
        }
        let taken = self.batches.iter().any(|batch| {
            let shared = batch.kind == Some(IoKind::Write) && kind == IoKind::Write;
            batch.kind.is_some() && !shared && batch.overlaps(region, offset, length)
        });
        if taken { Err(StoreError::BufferBusy { region, offset, length }) } else { Ok(()) }
    }

    fn check_written(&self, layer: u32, group: u32) -> Result<(), StoreError> {
        match self.table.is_written(self.layout.record_index(layer, group)) {
            true => Ok(()),
            false => Err(StoreError::NeverWritten { layer, group }),
        }
    }

    /// Errors where `bytes` more would exceed the write budget.
    pub fn check_write_budget(&self, bytes: u64) -> Result<(), StoreError> {
        if self.bytes_submitted.saturating_add(bytes) > self.write_budget_bytes {
            return Err(StoreError::WriteBudget {
                wanted_bytes: bytes,
                written_bytes: self.bytes_submitted,
                budget_bytes: self.write_budget_bytes,
            });
        }
        Ok(())
    }

    fn charge(&mut self, bytes: u64) -> Result<(), StoreError> {
        self.check_write_budget(bytes)?;
        self.bytes_submitted = self.bytes_submitted.saturating_add(bytes);
        Ok(())
    }

    fn note_written(
        &mut self,
        layer: u32,
        groups: std::ops::Range<u32>,
        region: u32,
        offset: u64,
    ) -> Result<(), StoreError> {
        let (stride, length) = (self.layout.stride() as usize, self.layout.record_bytes() as usize);
        let bytes = groups.len() as u64 * stride as u64;
        let arena = self.regions.check(region, offset, bytes)?;
        let start = Instant::now();
        for (i, group) in groups.enumerate() {
            let at = offset as usize + i * stride;
            self.table.record(self.layout.record_index(layer, group), || {
                // SAFETY: inside the arena, and no read into it is under way: `check_buffer` saw to that.
                crc32c::crc32c(unsafe { arena.slice(at..at + length) })
            });
        }
        self.stats.checksum_seconds += start.elapsed().as_secs_f64();
        Ok(())
    }

    /// Waits until no write of a wanted group is under way: reads overtake writes in the queue.
    fn wait_for_writes_of(
        &mut self,
        layer: u32,
        first_group: u32,
        end_group: u32,
        list: Option<&[u32]>,
    ) -> Result<(), StoreError> {
        let hit = |batch: &Batch| {
            batch.kind == Some(IoKind::Write)
                && batch.wants(layer, first_group, end_group)
                && list.is_none_or(|groups| {
                    let at = groups.partition_point(|&group| group < batch.first_group);
                    groups.get(at).is_some_and(|&group| group < batch.end_group)
                })
        };
        if !self.batches.iter().any(hit) {
            return Ok(());
        }
        let start = Instant::now();
        while self.batches.iter().any(hit) {
            self.advance()?;
        }
        self.stats.io_wait_seconds += start.elapsed().as_secs_f64();
        self.ready()
    }

    fn open_batch(
        &mut self,
        kind: IoKind,
        layer: u32,
        groups: std::ops::Range<u32>,
        region: u32,
        offset: u64,
        bytes: u64,
    ) -> Result<Ticket, StoreError> {
        while self.free.is_empty() {
            // Writes end by themselves; reads that nobody waits for do not.
            if !self.batches.iter().any(|batch| batch.kind == Some(IoKind::Write)) {
                return Err(StoreError::QueueFull { what: "tickets", limit: TICKETS_MAX });
            }
            self.advance()?;
        }
        self.ready()?;
        // Reads take the tickets with room for their lists first, writes leave those to them.
        let suits = |&index: &u32| (index < TICKETS_RESERVED as u32) == (kind == IoKind::Read);
        let at = self.free.iter().rposition(suits).or(self.free.len().checked_sub(1));
        let Some(at) = at else {
            return Err(StoreError::QueueFull { what: "tickets", limit: TICKETS_MAX });
        };
        let index = self.free.swap_remove(at);
        let now = Instant::now();
        let batch = &mut self.batches[index as usize];
        batch.kind = Some(kind);
        batch.layer = layer;
        (batch.first_group, batch.end_group) = (groups.start, groups.end);
        batch.wanted = Wanted::Range;
        (batch.region, batch.offset, batch.bytes) = (region, offset, bytes);
        (batch.submitted, batch.last_finish) = (now, now);
        Ok(Ticket { store: self.id, index, generation: batch.generation, kind })
    }

    fn release(&mut self, index: u32) {
        let batch = &mut self.batches[index as usize];
        debug_assert_eq!(batch.unfinished, 0);
        batch.kind = None;
        batch.generation = batch.generation.wrapping_add(1);
        batch.list.clear();
        batch.error = None;
        self.free.push(index);
    }

    fn enqueue_pieces(
        &mut self,
        kind: IoKind,
        ticket: &Ticket,
        layer: u32,
        groups: std::ops::Range<u32>,
        region: u32,
        offset: u64,
    ) -> Result<(), StoreError> {
        let stride = self.layout.stride();
        let groups_max = (PIECE_BYTES / stride).max(1);
        let mut group = groups.start;
        while group < groups.end {
            let count = groups_max.min(groups.end - group);
            let at = offset + u64::from(group - groups.start) * u64::from(stride);
            let op = self.op(kind, self.layout.file_offset(layer, group), region, at, count * stride);
            self.enqueue(op, ticket)?;
            group += count;
        }
        Ok(())
    }

    /// Queues a transfer for a batch, waiting for room where there is none.
    fn enqueue(&mut self, op: IoOp, ticket: &Ticket) -> Result<(), StoreError> {
        while !self.queue.has_room() {
            self.advance()?;
        }
        let pushed = self.queue.push(op, ticket.index);
        if pushed.is_ok() {
            self.batches[ticket.index as usize].unfinished += 1;
        }
        // What was checked on submission fails here only by a defect; part of the batch may be under way.
        self.latch(pushed)
    }

    fn pump(&mut self) -> Result<(), StoreError> {
        let pumped = self.queue.pump();
        self.latch(pumped)
    }

    /// Waits until something finishes, and takes note of it.
    fn advance(&mut self) -> Result<(), StoreError> {
        let waited = self.queue.wait(&mut self.finished);
        self.settle();
        self.latch(waited)
    }

    /// Hands finished transfers to their batches.
    fn settle(&mut self) {
        let mut finished = std::mem::take(&mut self.finished);
        for Finished { owner, kind, bytes, result, at } in finished.drain(..) {
            let batch = &mut self.batches[owner as usize];
            batch.unfinished -= 1;
            batch.last_finish = batch.last_finish.max(at);
            match (kind, &result) {
                (IoKind::Read, Ok(())) => {
                    self.stats.reads += 1;
                    self.stats.bytes_read += u64::from(bytes);
                }
                (IoKind::Write, Ok(())) => {
                    self.stats.writes += 1;
                    self.stats.bytes_written += u64::from(bytes);
                }
                (_, Err(_)) => {}
            }
            let over = kind == IoKind::Write && batch.unfinished == 0;
            if let Err(e) = result {
                if kind == IoKind::Write {
                    // The error is told by whatever is called next.
                    let _ = self.latch(Err(e));
                } else {
                    batch.error.get_or_insert(e);
                }
            }
            if over {
                self.release(owner);
            }
        }
        self.finished = finished;
    }
}

impl std::fmt::Debug for Store {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Store")
            .field("dir", &self.dir)
            .field("layout", &self.layout)
            .field("stats", &self.stats)
            .field("latched", &self.latched)
            .finish_non_exhaustive()
    }
}
