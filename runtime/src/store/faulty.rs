//! A device that fails on purpose, for tests: the same seed and requests give the same faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nix::libc;

use super::device::{Capabilities, Completion, Device, IoOp, Regions};
use super::hold::{Held, sleep_until};
use super::{IoKind, StoreError};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Fault {
    /// The completion comes late.
    Latency,
    /// `EINTR` or `EAGAIN`.
    Interrupted,
    /// Fewer bytes than asked for, in whole blocks or not.
    Short,
    /// No bytes.
    Nothing,
    /// `EIO`.
    Io,
    /// `ENOSPC`; writes only.
    NoSpace,
    /// One bit of what was read is wrong; reads only.
    BitFlip,
    /// Another place of the file is read; reads only.
    Misdirected,
    /// The write is reported and never made; writes only.
    LostWrite,
}

/// All kinds.
pub const FAULTS: [Fault; 9] = [
    Fault::Latency,
    Fault::Interrupted,
    Fault::Short,
    Fault::Nothing,
    Fault::Io,
    Fault::NoSpace,
    Fault::BitFlip,
    Fault::Misdirected,
    Fault::LostWrite,
];

/// How often what fails.
#[derive(Clone, Debug, Default)]
pub struct FaultOptions {
    /// Seed; whoever uses the device says it, so that a run can be had again.
    pub seed: u64,
    /// Of a million requests that a kind can hit, how many it does. Kinds not named never fire.
    pub per_million: Vec<(Fault, u32)>,
    /// Delay of a late completion at most.
    pub latency_max: Duration,
    /// Requests that are left in peace at the start; the first is the store's header.
    pub skip: u64,
    /// Faults after which there are no more.
    pub fires_max: Option<u64>,
}

/// How many faults of each kind have fired, as a live view.
#[derive(Clone, Debug, Default)]
pub struct FaultCounts(Arc<[AtomicU64; FAULTS.len()]>);

impl FaultCounts {
    /// Faults of one kind.
    pub fn of(&self, fault: Fault) -> u64 {
        self.0[fault as usize].load(Ordering::Relaxed)
    }

    /// Faults of all kinds.
    pub fn total(&self) -> u64 {
        FAULTS.iter().map(|&fault| self.of(fault)).sum()
    }

    fn fire(&self, fault: Fault) {
        self.0[fault as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// What is to happen to a request that the inner device works on.
#[derive(Clone, Copy)]
struct Altered {
    op: IoOp,
    fault: Fault,
    random: u64,
}

/// Passes requests on, except where chance has it otherwise.
pub(crate) struct Faulty {
    inner: Box<dyn Device>,
    regions: Regions,
    file_bytes: u64,
    options: FaultOptions,
    counts: FaultCounts,
    state: u64,
    seen: u64,
    altered: Vec<Altered>,
    held: Held,
    raw: Vec<Completion>,
    batch: Vec<IoOp>,
}

impl Faulty {
    pub(crate) fn new(
        inner: Box<dyn Device>,
        regions: Regions,
        file_bytes: u64,
        options: FaultOptions,
        counts: FaultCounts,
    ) -> Self {
        let depth = inner.capabilities().depth;
        log::warn!("store: faults are injected, seed {}", options.seed);
        Self {
            inner,
            regions,
            file_bytes,
            state: options.seed,
            options,
            counts,
            seen: 0,
            altered: Vec::with_capacity(depth),
            held: Held::with_capacity(depth),
            raw: Vec::with_capacity(depth),
            batch: Vec::with_capacity(depth),
        }
    }

    /// SplitMix64.
    fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At most one fault for a request.
    fn draw(&mut self, op: &IoOp) -> Option<Fault> {
        self.seen += 1;
        let spent = self.options.fires_max.is_some_and(|max| self.counts.total() >= max);
        if spent || self.seen <= self.options.skip {
            return None;
        }
        for i in 0..self.options.per_million.len() {
            let (fault, rate) = self.options.per_million[i];
            let possible = match fault {
                Fault::NoSpace | Fault::LostWrite => op.kind == IoKind::Write,
                Fault::BitFlip | Fault::Misdirected => op.kind == IoKind::Read,
                _ => true,
            };
            if possible && self.random() % 1_000_000 < u64::from(rate) {
                return Some(fault);
            }
        }
        None
    }

    fn report(&mut self, tag: u64, result: i32) {
        let finished = Instant::now();
        self.held.push(finished, Completion { tag, result, finished });
    }

    /// Another aligned place of the file with room for the request, `None` where there is none.
    fn elsewhere(&self, op: &IoOp, random: u64) -> Option<u64> {
        let step = u64::from(self.capabilities().alignment.offset.max(1));
        let places = self.file_bytes.checked_sub(op.buffer.len.into())? / step + 1;
        let here = op.file_offset / step;
        let shift = 1 + random % places.checked_sub(1).filter(|&others| others > 0)?;
        Some((here + shift) % places * step)
    }

    fn absorb(&mut self) {
        let mut raw = std::mem::take(&mut self.raw);
        for mut completion in raw.drain(..) {
            let mut due = completion.finished;
            if let Some(at) = self.altered.iter().position(|altered| altered.op.tag == completion.tag) {
                let Altered { op, fault, random } = self.altered.swap_remove(at);
                match fault {
                    Fault::Latency => {
                        let micros = self.options.latency_max.as_micros().max(1) as u64;
                        due += Duration::from_micros(random % micros);
                        completion.finished = due;
                    }
                    // Not always a multiple of the block: nobody may count on it.
                    Fault::Short if completion.result > 1 && random.is_multiple_of(2) => completion.result -= 1,
                    Fault::BitFlip if completion.result > 0 => self.flip(&op, completion.result as u64, random),
                    _ => {}
                }
            }
            self.held.push(due, completion);
        }
        self.raw = raw;
    }

    fn flip(&self, op: &IoOp, bytes: u64, random: u64) {
        let Ok(address) = self.regions.resolve(op.buffer) else { return };
        let bit = random % (bytes * 8);
        // SAFETY: inside the buffer of a read that has just ended and has not been reported: it is still the device's.
        unsafe { *address.add((bit / 8) as usize) ^= 1 << (bit % 8) };
    }
}

impl Device for Faulty {
    fn submit(&mut self, ops: &[IoOp]) -> Result<(), StoreError> {
        let block = self.capabilities().alignment.offset.max(1);
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        for &op in ops {
            let fault = self.draw(&op);
            let random = self.random();
            let mut passed = op;
            let fired = match fault {
                None => None,
                Some(Fault::Interrupted) => {
                    self.report(op.tag, if random.is_multiple_of(2) { -libc::EINTR } else { -libc::EAGAIN });
                    fault
                }
                Some(Fault::Nothing) => {
                    self.report(op.tag, 0);
                    fault
                }
                Some(Fault::Io) => {
                    self.report(op.tag, -libc::EIO);
                    fault
                }
                Some(Fault::NoSpace) => {
                    self.report(op.tag, -libc::ENOSPC);
                    fault
                }
                Some(Fault::LostWrite) => {
                    self.report(op.tag, op.buffer.len as i32);
                    fault
                }
                Some(Fault::Short) if op.buffer.len > block => {
                    let blocks = op.buffer.len / block;
                    passed.buffer.len = block * (1 + (random >> 8) as u32 % (blocks - 1).max(1));
                    fault
                }
                // A single block cannot be cut.
                Some(Fault::Short) => None,
                Some(Fault::Misdirected) => self.elsewhere(&op, random).and_then(|file_offset| {
                    passed.file_offset = file_offset;
                    fault
                }),
                Some(Fault::Latency | Fault::BitFlip) => fault,
            };
            let Some(fired) = fired else {
                batch.push(op);
                continue;
            };
            self.counts.fire(fired);
            if matches!(fired, Fault::Short | Fault::Misdirected | Fault::Latency | Fault::BitFlip) {
                self.altered.push(Altered { op: passed, fault: fired, random });
                batch.push(passed);
            }
        }
        let submitted = if batch.is_empty() { Ok(()) } else { self.inner.submit(&batch) };
        self.batch = batch;
        submitted
    }

    fn poll(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        self.inner.poll(&mut self.raw)?;
        self.absorb();
        self.held.deliver(Instant::now(), done);
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        let before = done.len();
        while done.len() == before && self.in_flight() > 0 {
            self.poll(done)?;
            if done.len() > before {
                break;
            }
            match self.held.next_due() {
                Some(due) => sleep_until(due),
                None => {
                    self.inner.wait(&mut self.raw)?;
                    self.absorb();
                }
            }
        }
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.held.len()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}
