//! The fallback device: a small pool of threads that call `pread` and `pwrite`.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Instant;

use crossbeam_channel::{Receiver, Sender, bounded};

use super::device::{Capabilities, Completion, Device, IoOp, Regions, check_depth};
use super::{Alignment, IoKind, StoreError};

/// Transfers in flight; the bound of both channels, so that neither side ever blocks on sending.
pub const POOL_DEPTH: usize = 128;

/// Threads of the pool. They sleep in the kernel; this is the queue depth that the disk sees.
pub const POOL_THREADS: usize = 8;

/// Stack of a pool thread: it calls one system call.
const STACK_BYTES: usize = 128 * 1024;

/// A pool on one file.
pub(crate) struct PreadDevice {
    requests: Option<Sender<IoOp>>,
    completions: Receiver<Completion>,
    threads: Vec<JoinHandle<()>>,
    regions: Regions,
    direct: bool,
    alignment: Alignment,
    in_flight: usize,
}

impl PreadDevice {
    /// Starts the threads.
    pub(crate) fn new(
        file: Arc<OwnedFd>,
        regions: Regions,
        direct: bool,
        alignment: Alignment,
    ) -> Result<Self, StoreError> {
        let (requests, work) = bounded::<IoOp>(POOL_DEPTH);
        let (report, completions) = bounded::<Completion>(POOL_DEPTH);
        let mut device = Self {
            requests: Some(requests),
            completions,
            threads: Vec::new(),
            regions,
            direct,
            alignment,
            in_flight: 0,
        };
        for index in 0..POOL_THREADS {
            let (file, regions, work, report) =
                (Arc::clone(&file), device.regions.clone(), work.clone(), report.clone());
            let thread = std::thread::Builder::new()
                .name(format!("forebay-io-{index}"))
                .stack_size(STACK_BYTES)
                .spawn(move || {
                    for op in work {
                        let result = transfer(&file, &regions, &op);
                        if report.send(Completion { tag: op.tag, result, finished: Instant::now() }).is_err() {
                            return;
                        }
                    }
                })
                .map_err(|e| StoreError::Backend {
                    backend: "pread",
                    what: "starting a thread",
                    errno: e.raw_os_error().unwrap_or(0),
                })?;
            device.threads.push(thread);
        }
        Ok(device)
    }

    fn stopped() -> StoreError {
        StoreError::Backend { backend: "pread", what: "the pool has stopped", errno: 0 }
    }
}

/// One system call; its result in io_uring's form.
pub(super) fn transfer(file: &OwnedFd, regions: &Regions, op: &IoOp) -> i32 {
    let Ok(address) = regions.resolve(op.buffer) else { return -rustix::io::Errno::FAULT.raw_os_error() };
    let length = op.buffer.len as usize;
    let result = match op.kind {
        IoKind::Read => {
            // SAFETY: inside an arena that `regions` keeps alive, and nobody else's until the completion.
            let buffer = unsafe { std::slice::from_raw_parts_mut(address.cast::<MaybeUninit<u8>>(), length) };
            rustix::io::pread(file, buffer, op.file_offset).map(|(read, _)| read.len())
        }
        IoKind::Write => {
            // SAFETY: as above, initialised by the kernel when it was mapped; nobody writes to it in flight.
            let buffer = unsafe { std::slice::from_raw_parts(address, length) };
            rustix::io::pwrite(file, buffer, op.file_offset)
        }
    };
    match result {
        Ok(bytes) => i32::try_from(bytes).unwrap_or(i32::MAX),
        Err(e) => -e.raw_os_error(),
    }
}

impl Device for PreadDevice {
    fn submit(&mut self, ops: &[IoOp]) -> Result<(), StoreError> {
        check_depth(self.in_flight, ops.len(), POOL_DEPTH)?;
        for op in ops {
            self.regions.resolve(op.buffer)?;
        }
        let requests = self.requests.as_ref().ok_or_else(Self::stopped)?;
        for op in ops {
            requests.send(*op).map_err(|_| Self::stopped())?;
            self.in_flight += 1;
        }
        Ok(())
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        let before = done.len();
        done.extend(self.completions.try_iter());
        self.in_flight -= done.len() - before;
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        if self.in_flight == 0 {
            return Ok(());
        }
        done.push(self.completions.recv().map_err(|_| Self::stopped())?);
        self.in_flight -= 1;
        self.poll(done)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: "pread",
            depth: POOL_DEPTH,
            background: true,
            direct: self.direct,
            alignment: self.alignment,
            registered_buffers: false,
            registered_file: false,
        }
    }
}

impl Drop for PreadDevice {
    fn drop(&mut self) {
        // Closing the channel lets each thread finish what is queued; there is room for every report.
        self.requests = None;
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                log::warn!("store: an I/O thread panicked");
                self.regions.leak();
            }
        }
    }
}
