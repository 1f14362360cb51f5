//! The io_uring device: one ring, registered file and buffers, no thread of its own.
//!
//! The thread that computes submits a layer's reads in one system call and comes back for the completions when it
//! needs the data; the kernel works in between.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, types};
use nix::libc;

use super::device::{Capabilities, Completion, Device, IoOp, Regions, check_depth};
use super::{Alignment, IoKind, StoreError};

/// Entries of the submission queue, and the bound of what is in flight: a layer's batch (62 extents at 100 groups)
/// and the next one's fit, and the completion queue, which is twice as long, cannot overflow.
pub const RING_ENTRIES: u32 = 128;

/// The kernel registers at most 1 GiB as one buffer; larger arenas are registered in pieces.
const REGISTERED_BYTES_MAX: usize = 1 << 30;

/// How often the kernel may turn `io_uring_enter` away for lack of resources before the device counts as broken; with
/// the pause in between this is about a second.
const ENTER_TRIES_MAX: u32 = 1000;
const ENTER_PAUSE: Duration = Duration::from_millis(1);

/// A ring on one file.
pub(crate) struct UringDevice {
    ring: IoUring,
    file: Arc<OwnedFd>,
    regions: Regions,
    /// Index of the first registered buffer of each region, where it has one; `None` where no buffers are registered.
    first_buffer: Option<Vec<Option<u16>>>,
    registered_file: bool,
    direct: bool,
    alignment: Alignment,
    in_flight: usize,
}

fn backend_error(what: &'static str, e: &std::io::Error) -> StoreError {
    StoreError::Backend { backend: "io_uring", what, errno: e.raw_os_error().unwrap_or(0) }
}

impl UringDevice {
    /// Sets the ring up. Whether it works is found by trying: the ring itself, then the opcodes by probing.
    pub(crate) fn new(
        file: Arc<OwnedFd>,
        regions: Regions,
        direct: bool,
        alignment: Alignment,
    ) -> Result<Self, StoreError> {
        let ring = Self::ring().map_err(|e| backend_error("setting up the ring", &e))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|e| backend_error("probing opcodes", &e))?;
        let needed = [opcode::Read::CODE, opcode::Write::CODE, opcode::ReadFixed::CODE, opcode::WriteFixed::CODE];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(StoreError::Backend {
                backend: "io_uring",
                what: "READ, WRITE and their fixed forms",
                errno: 0,
            });
        }
        let registered_file = match ring.submitter().register_files(&[file.as_raw_fd()]) {
            Ok(()) => true,
            Err(e) => {
                log::info!("store: the file is not registered with io_uring ({e})");
                false
            }
        };
        let first_buffer = register_buffers(&ring, &regions);
        Ok(Self { ring, file, regions, first_buffer, registered_file, direct, alignment, in_flight: 0 })
    }

    fn ring() -> std::io::Result<IoUring> {
        // Without COOP_TASKRUN a completion interrupts the computing thread; kernels before 5.19 know no other way.
        IoUring::builder()
            .setup_coop_taskrun()
            .setup_taskrun_flag()
            .build(RING_ENTRIES)
            .or_else(|_| IoUring::builder().build(RING_ENTRIES))
    }

    /// Index of the registered buffer that holds all of the operation's bytes.
    fn buffer_index(&self, op: &IoOp) -> Option<u16> {
        let first = (*self.first_buffer.as_ref()?.get(op.buffer.region as usize)?)?;
        let start = op.buffer.offset as usize;
        let piece = start / REGISTERED_BYTES_MAX;
        let last = (start + (op.buffer.len as usize).saturating_sub(1)) / REGISTERED_BYTES_MAX;
        (piece == last).then(|| first + piece as u16)
    }

    fn entry(&self, op: &IoOp, address: *mut u8) -> io_uring::squeue::Entry {
        macro_rules! build {
            ($file:expr) => {
                match (op.kind, self.buffer_index(op)) {
                    (IoKind::Read, Some(index)) => {
                        opcode::ReadFixed::new($file, address, op.buffer.len, index).offset(op.file_offset).build()
                    }
                    (IoKind::Read, None) => {
                        opcode::Read::new($file, address, op.buffer.len).offset(op.file_offset).build()
                    }
                    (IoKind::Write, Some(index)) => {
                        opcode::WriteFixed::new($file, address, op.buffer.len, index).offset(op.file_offset).build()
                    }
                    (IoKind::Write, None) => {
                        opcode::Write::new($file, address, op.buffer.len).offset(op.file_offset).build()
                    }
                }
            };
        }
        let entry =
            if self.registered_file { build!(types::Fixed(0)) } else { build!(types::Fd(self.file.as_raw_fd())) };
        entry.user_data(op.tag)
    }

    fn drain(&mut self, done: &mut Vec<Completion>) -> usize {
        let before = done.len();
        let finished = Instant::now();
        done.extend(self.ring.completion().map(|c| Completion { tag: c.user_data(), result: c.result(), finished }));
        let count = done.len() - before;
        self.in_flight -= count;
        count
    }

    /// One `io_uring_enter` that does not wait. What the kernel has no room for stays in the submission queue.
    fn enter(&mut self) -> Result<(), StoreError> {
        match self.ring.submit() {
            Ok(_) => Ok(()),
            Err(e) if is_transient(&e) => Ok(()),
            Err(e) => Err(backend_error("submitting", &e)),
        }
    }
}

fn is_transient(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

/// Registers every arena that is not transient, in pieces of at most 1 GiB. Index of each region's first piece, or `None` where the kernel
/// refuses, usually for the limit of locked memory.
fn register_buffers(ring: &IoUring, regions: &Regions) -> Option<Vec<Option<u16>>> {
    let mut first = Vec::with_capacity(regions.arenas().len());
    let mut pieces = Vec::new();
    for arena in regions.arenas() {
        if arena.is_transient() {
            first.push(None);
            continue;
        }
        first.push(Some(u16::try_from(pieces.len()).ok()?));
        let mut offset = 0;
        while offset < arena.len() {
            let bytes = (arena.len() - offset).min(REGISTERED_BYTES_MAX);
            // SAFETY: `offset` is inside the mapping.
            let base = unsafe { arena.as_ptr().add(offset) };
            pieces.push(libc::iovec { iov_base: base.cast(), iov_len: bytes });
            offset += bytes;
        }
    }
    if pieces.is_empty() {
        return None;
    }
    // SAFETY: every piece lies in an arena that the device keeps alive until the ring is closed.
    match unsafe { ring.submitter().register_buffers(&pieces) } {
        Ok(()) => Some(first),
        Err(e) => {
            log::info!("store: arenas are not registered with io_uring ({e}); reads work, a little slower");
            None
        }
    }
}

impl Device for UringDevice {
    fn submit(&mut self, ops: &[IoOp]) -> Result<(), StoreError> {
        check_depth(self.in_flight, ops.len(), RING_ENTRIES as usize)?;
        for op in ops {
            self.regions.resolve(op.buffer)?;
        }
        for op in ops {
            let address = self.regions.resolve(op.buffer)?;
            let entry = self.entry(op, address);
            // SAFETY: the buffer is inside an arena that this device keeps alive until the completion, the file is
            // held as well, and by the trait's contract nobody else uses the bytes until then.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            if pushed.is_err() {
                return Err(StoreError::QueueFull { what: "submission queue", limit: RING_ENTRIES as usize });
            }
            self.in_flight += 1;
        }
        if ops.is_empty() { Ok(()) } else { self.enter() }
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        if self.in_flight == 0 {
            return Ok(());
        }
        let (left, work) = {
            let queue = self.ring.submission();
            (!queue.is_empty(), queue.taskrun() || queue.cq_overflow())
        };
        if left {
            self.enter()?;
        } else if work {
            // SAFETY: no argument is passed. Runs the completions that the kernel holds for this thread.
            let entered = unsafe {
                const GETEVENTS: u32 = 1;
                self.ring.submitter().enter::<libc::sigset_t>(0, 0, GETEVENTS, None)
            };
            if let Err(e) = entered
                && !is_transient(&e)
            {
                return Err(backend_error("polling", &e));
            }
        }
        self.drain(done);
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        let mut tries = 0;
        while self.in_flight > 0 && self.drain(done) == 0 {
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                // Signals are not failures, however many come.
                Err(e) if e.raw_os_error() == Some(libc::EINTR) => {}
                Err(e) if is_transient(&e) && tries < ENTER_TRIES_MAX => {
                    tries += 1;
                    std::thread::sleep(ENTER_PAUSE);
                }
                Err(e) => return Err(backend_error("waiting", &e)),
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: "io_uring",
            depth: RING_ENTRIES as usize,
            background: true,
            direct: self.direct,
            alignment: self.alignment,
            registered_buffers: self.first_buffer.is_some(),
            registered_file: self.registered_file,
        }
    }
}

impl Drop for UringDevice {
    fn drop(&mut self) {
        let mut done = Vec::new();
        while self.in_flight > 0 {
            if let Err(e) = self.wait(&mut done) {
                log::warn!("store: {e}; {} transfers are left behind with their memory", self.in_flight);
                self.regions.leak();
                return;
            }
        }
        // The kernel tears a ring down in the background. Taking back the file and the memory first frees the disk
        // space and the pinned pages now.
        if self.registered_file {
            let _ = self.ring.submitter().unregister_files();
        }
        if self.first_buffer.is_some() {
            let _ = self.ring.submitter().unregister_buffers();
        }
    }
}
