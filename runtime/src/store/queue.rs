//! The queue in front of a device: bounds what is in flight, puts reads before writes, and decodes every completion.

use std::collections::VecDeque;
use std::time::Instant;

use nix::libc;

use super::device::{Capabilities, Completion, Device};
use super::{IoKind, IoOp, StoreError, StoreLayout};

/// Transfers that may be under way, in the device or waiting for it. A submission that finds them all taken waits for
/// completions; 1024 pieces of 1 MiB are more than a layer of any model in view.
pub const TRANSFERS_MAX: usize = 1024;

/// Writes in the device at once. Enough pieces of a megabyte to keep a disk busy, few enough that a read that comes
/// behind them does not wait long.
pub const WRITES_IN_DEVICE_MAX: usize = 4;

/// How often one transfer may be interrupted, turned away for the moment, or too short to count, without getting any
/// further.
pub const TRANSIENT_TRIES_MAX: u32 = 64;

#[derive(Clone, Copy)]
struct Transfer {
    op: IoOp,
    /// Who is told; the queue does not look at it.
    owner: u32,
    done_bytes: u32,
    tries: u32,
    generation: u32,
    busy: bool,
}

/// The end of a transfer.
pub(crate) struct Finished {
    pub(crate) owner: u32,
    pub(crate) kind: IoKind,
    pub(crate) bytes: u32,
    pub(crate) result: Result<(), StoreError>,
    pub(crate) at: Instant,
}

/// What a completion means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    /// All bytes that were left have moved.
    Done,
    /// To be submitted again, after `progress` bytes that need not move again. `errno` is 0 for a short transfer.
    Again { progress: u32, errno: i32 },
    /// Nothing moved where bytes were due.
    Nothing,
    /// A write found the disk full.
    Full,
    /// The device failed.
    Failed { errno: i32 },
}

/// The one decoder of completions: a negative result is a negated error number; a short transfer goes on from the last
/// multiple of `align` that it reached; nothing where bytes were due is a failure, as is more than was asked for.
fn outcome(kind: IoKind, result: i32, left: u32, align: u32) -> Outcome {
    match u32::try_from(result) {
        Ok(0) => Outcome::Nothing,
        Ok(moved) if moved == left => Outcome::Done,
        Ok(moved) if moved < left => Outcome::Again { progress: moved / align * align, errno: 0 },
        Ok(_) => Outcome::Failed { errno: libc::EIO },
        Err(_) => match result.saturating_neg() {
            errno @ (libc::EINTR | libc::EAGAIN) => Outcome::Again { progress: 0, errno },
            libc::ENOSPC | libc::EDQUOT if kind == IoKind::Write => Outcome::Full,
            errno => Outcome::Failed { errno },
        },
    }
}

/// Transfers on their way through one device.
pub(crate) struct IoQueue {
    device: Box<dyn Device>,
    layout: StoreLayout,
    depth: usize,
    /// Both alignments: a transfer that was cut short goes on from a multiple of it.
    resume_align: u32,
    transfers: Vec<Transfer>,
    free: Vec<u32>,
    reads: VecDeque<u32>,
    writes: VecDeque<u32>,
    writes_in_device: usize,
    batch: Vec<IoOp>,
    raw: Vec<Completion>,
}

impl IoQueue {
    pub(crate) fn new(device: Box<dyn Device>, layout: StoreLayout) -> Self {
        let Capabilities { depth, alignment, .. } = device.capabilities();
        Self {
            device,
            layout,
            depth,
            resume_align: alignment.memory.max(alignment.offset).max(1),
            transfers: Vec::with_capacity(TRANSFERS_MAX),
            free: Vec::with_capacity(TRANSFERS_MAX),
            reads: VecDeque::with_capacity(TRANSFERS_MAX),
            writes: VecDeque::with_capacity(TRANSFERS_MAX),
            writes_in_device: 0,
            batch: Vec::with_capacity(depth),
            raw: Vec::with_capacity(depth),
        }
    }

    pub(crate) fn capabilities(&self) -> Capabilities {
        self.device.capabilities()
    }

    /// Whether another transfer can be pushed.
    pub(crate) fn has_room(&self) -> bool {
        !self.free.is_empty() || self.transfers.len() < TRANSFERS_MAX
    }

    /// Transfers that are not finished.
    pub(crate) fn unfinished(&self) -> usize {
        self.transfers.len() - self.free.len()
    }

    /// Queues a transfer; [`IoQueue::pump`] hands it to the device. The operation's tag is the queue's own.
    ///
    /// A transfer that breaks the alignment is an error, as is a full queue.
    pub(crate) fn push(&mut self, mut op: IoOp, owner: u32) -> Result<(), StoreError> {
        self.check_alignment(&op)?;
        let full = StoreError::QueueFull { what: "transfers", limit: TRANSFERS_MAX };
        let fresh = Transfer { op, owner, done_bytes: 0, tries: 0, generation: 0, busy: true };
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.transfers.len() < TRANSFERS_MAX => {
                self.transfers.push(Transfer { busy: false, ..fresh });
                self.transfers.len() as u32 - 1
            }
            None => return Err(full),
        };
        let slot = &mut self.transfers[index as usize];
        let generation = slot.generation.wrapping_add(1);
        op.tag = u64::from(generation) << 32 | u64::from(index);
        *slot = Transfer { op, generation, ..fresh };
        match op.kind {
            IoKind::Read => self.reads.push_back(index),
            IoKind::Write => self.writes.push_back(index),
        }
        Ok(())
    }

    fn check_alignment(&self, op: &IoOp) -> Result<(), StoreError> {
        let alignment = self.device.capabilities().alignment;
        let fields = [
            ("file offset", op.file_offset, alignment.offset),
            ("length", op.buffer.len.into(), alignment.offset),
            // Arenas begin on a page.
            ("buffer offset", op.buffer.offset, alignment.memory),
        ];
        for (what, found, align) in fields {
            let aligned = found.is_multiple_of(u64::from(align.max(1)));
            if !aligned {
                return Err(StoreError::Misaligned {
                    kind: op.kind,
                    place: self.layout.place(op.file_offset),
                    what,
                    found,
                    align,
                });
            }
        }
        Ok(())
    }

    /// Hands to the device what it has room for, reads first, in one submission.
    pub(crate) fn pump(&mut self) -> Result<(), StoreError> {
        let room = self.depth - self.device.in_flight();
        self.batch.clear();
        while self.batch.len() < room {
            let index = match self.reads.pop_front() {
                Some(index) => index,
                None if self.writes_in_device < WRITES_IN_DEVICE_MAX => match self.writes.pop_front() {
                    Some(index) => {
                        self.writes_in_device += 1;
                        index
                    }
                    None => break,
                },
                None => break,
            };
            let Transfer { mut op, done_bytes, .. } = self.transfers[index as usize];
            op.file_offset += u64::from(done_bytes);
            op.buffer.offset += u64::from(done_bytes);
            op.buffer.len -= done_bytes;
            self.batch.push(op);
        }
        if self.batch.is_empty() { Ok(()) } else { self.device.submit(&self.batch) }
    }

    /// Appends what has finished, and keeps the device busy. Does not wait.
    pub(crate) fn poll(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        self.device.poll(&mut self.raw)?;
        self.settle(finished);
        self.pump()
    }

    /// Appends at least one finished transfer, or nothing where none is under way.
    pub(crate) fn wait(&mut self, finished: &mut Vec<Finished>) -> Result<(), StoreError> {
        let before = finished.len();
        self.pump()?;
        while finished.len() == before && self.unfinished() > 0 {
            self.device.wait(&mut self.raw)?;
            self.settle(finished);
            self.pump()?;
        }
        Ok(())
    }

    fn settle(&mut self, finished: &mut Vec<Finished>) {
        let mut raw = std::mem::take(&mut self.raw);
        for completion in raw.drain(..) {
            finished.extend(self.decode(completion));
        }
        self.raw = raw;
    }

    /// What becomes of a transfer after a completion; `None` where it goes on. One that gets no further is tried again
    /// a bounded number of times.
    fn decode(&mut self, completion: Completion) -> Option<Finished> {
        let index = completion.tag as u32;
        let transfer = self
            .transfers
            .get_mut(index as usize)
            .filter(|transfer| transfer.busy && transfer.op.tag == completion.tag);
        let Some(transfer) = transfer else {
            debug_assert!(false, "a completion of no transfer: {completion:?}");
            log::warn!("store: the device reported a transfer that does not exist");
            return None;
        };
        if transfer.op.kind == IoKind::Write {
            self.writes_in_device -= 1;
        }
        let (kind, bytes) = (transfer.op.kind, u64::from(transfer.op.buffer.len));
        let place = self.layout.place(transfer.op.file_offset);
        let left = transfer.op.buffer.len - transfer.done_bytes;
        let outcome = outcome(kind, completion.result, left, self.resume_align);
        let (progress, errno) = match outcome {
            Outcome::Again { progress, errno } => (progress, errno),
            Outcome::Done | Outcome::Nothing | Outcome::Full | Outcome::Failed { .. } => (0, 0),
        };
        transfer.done_bytes += progress;
        transfer.tries = if progress > 0 { 0 } else { transfer.tries + 1 };
        let (done, tries) = (transfer.done_bytes, transfer.tries);
        let result = match outcome {
            Outcome::Done => Ok(()),
            Outcome::Again { .. } if tries < TRANSIENT_TRIES_MAX => {
                self.requeue(index);
                return None;
            }
            Outcome::Again { .. } => Err(StoreError::Retries { kind, place, bytes, errno, tries }),
            Outcome::Nothing => Err(StoreError::Truncated { kind, place, bytes, done: done.into() }),
            Outcome::Full => Err(StoreError::DiskFull { place, bytes }),
            Outcome::Failed { errno } => Err(StoreError::Io { kind, place, bytes, errno }),
        };
        let transfer = &mut self.transfers[index as usize];
        transfer.busy = false;
        let finished = Finished { owner: transfer.owner, kind, bytes: bytes as u32, result, at: completion.finished };
        self.free.push(index);
        Some(finished)
    }

    /// Goes on with a transfer before anything that has not begun.
    fn requeue(&mut self, index: u32) {
        match self.transfers[index as usize].op.kind {
            IoKind::Read => self.reads.push_front(index),
            IoKind::Write => self.writes.push_front(index),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_are_decoded() {
        let read = |result| outcome(IoKind::Read, result, 8192, 512);
        let write = |result| outcome(IoKind::Write, result, 8192, 512);
        assert_eq!(read(8192), Outcome::Done);
        assert_eq!(read(0), Outcome::Nothing);
        assert_eq!(read(1536), Outcome::Again { progress: 1536, errno: 0 });
        assert_eq!(read(1535), Outcome::Again { progress: 1024, errno: 0 });
        assert_eq!(read(1), Outcome::Again { progress: 0, errno: 0 });
        assert_eq!(read(8193), Outcome::Failed { errno: libc::EIO });
        assert_eq!(read(-libc::EIO), Outcome::Failed { errno: libc::EIO });
        assert_eq!(read(i32::MIN), Outcome::Failed { errno: i32::MAX });
        assert_eq!(read(-libc::ENOSPC), Outcome::Failed { errno: libc::ENOSPC });
        assert_eq!(read(-libc::ECANCELED), Outcome::Failed { errno: libc::ECANCELED });
        assert_eq!(write(-libc::ENOSPC), Outcome::Full);
        assert_eq!(write(-libc::EDQUOT), Outcome::Full);
        for errno in [libc::EINTR, libc::EAGAIN] {
            assert_eq!(write(-errno), Outcome::Again { progress: 0, errno });
        }
    }
}
