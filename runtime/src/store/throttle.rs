//! Slower classes of storage, modelled on a faster one.

use std::str::FromStr;
use std::time::{Duration, Instant};

use super::device::{Capabilities, Completion, Device, IoOp};
use super::hold::{Held, sleep_until};
use super::{IoKind, StoreError, UnknownName};

/// A class of storage to stand in for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskClass {
    /// The disk as it is.
    #[default]
    Native,
    /// An NVMe drive of a development board.
    Nvme,
    /// Universal Flash Storage 3.1.
    Ufs,
    /// eMMC 5.1.
    Emmc,
    /// A UHS-I card of application class A2.
    SdCard,
}

impl FromStr for DiskClass {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "native" => Ok(Self::Native),
            "nvme" => Ok(Self::Nvme),
            "ufs" => Ok(Self::Ufs),
            "emmc" => Ok(Self::Emmc),
            "sdcard" => Ok(Self::SdCard),
            _ => Err(UnknownName { found: name.to_owned(), expected: "native, nvme, ufs, emmc, sdcard" }),
        }
    }
}

impl std::fmt::Display for DiskClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Native => "native",
            Self::Nvme => "nvme",
            Self::Ufs => "ufs",
            Self::Emmc => "emmc",
            Self::SdCard => "sdcard",
        })
    }
}

/// What one direction of a class can do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DirectionProfile {
    /// Bytes per second of large requests.
    pub bytes_per_second: f64,
    /// Requests per second with many outstanding.
    pub requests_per_second: f64,
    /// Time of a request of no bytes with nothing else outstanding. Latencies overlap: `latency *
    /// requests_per_second` is the depth at which more requests gain nothing.
    pub latency: Duration,
}

impl DirectionProfile {
    /// Time of the bytes alone.
    pub fn transfer(&self, bytes: u32) -> Duration {
        Duration::from_secs_f64(f64::from(bytes) / self.bytes_per_second)
    }

    /// Time from one request to the next at full depth.
    pub fn interval(&self, bytes: u32) -> Duration {
        self.transfer(bytes).max(Duration::from_secs_f64(1.0 / self.requests_per_second))
    }
}

/// A class of storage in numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DiskProfile {
    /// Reads.
    pub read: DirectionProfile,
    /// Writes.
    pub write: DirectionProfile,
}

const fn direction(megabytes_per_second: f64, requests_per_second: f64, latency_us: u64) -> DirectionProfile {
    DirectionProfile {
        bytes_per_second: megabytes_per_second * 1e6,
        requests_per_second,
        latency: Duration::from_micros(latency_us),
    }
}

/// - Bandwidth of reads: 1.8 GB/s, the KVSwap paper's NVMe on a Jetson Orin AGX. It gives none for writes: the same.
/// - Requests and latency: Samsung's sheet of the 980, a drive of that class: 500,000 and 480,000 per second at depth
///   32; 17,000 reads and 53,000 writes at depth 1, so 59 us and 19 us.
const NVME: DiskProfile = DiskProfile { read: direction(1800.0, 500e3, 59), write: direction(1800.0, 480e3, 19) };

/// - Bandwidth and requests: Samsung's announcement of the 512 GB eUFS 3.1 (March 2020): 2,100 and 1,200 MB/s, 100,000
///   and 70,000 requests per second.
/// - Latency: no sheet gives it. 100 us is assumed, of the order of a TLC page read with its link.
const UFS: DiskProfile = DiskProfile { read: direction(2100.0, 100e3, 100), write: direction(1200.0, 70e3, 100) };

/// - Bandwidth of reads: 250 MB/s, the KVSwap paper's eMMC and Samsung's announcement of its eMMC 5.1 (February 2015);
///   of writes: 125 MB/s, the latter.
/// - Requests: the latter, 11,000 reads and 13,000 writes per second with the command queue.
/// - Latency: Samsung's table has 7,000 reads per second for eMMC 5.0, which has no queue, so 143 us; writes have the
///   same 13,000 without one, so 77 us.
const EMMC: DiskProfile = DiskProfile { read: direction(250.0, 11e3, 143), write: direction(125.0, 13e3, 77) };

/// - Bandwidth: 90 MB/s for reads, what UHS-I cards reach of the bus's 104; 30 MB/s for writes, the floor of speed class
///   V30.
/// - Requests: the floor of application class A2, 4,000 reads and 2,000 writes per second, which needs the queue.
/// - Latency: the floor of class A1, which does not: 1,500 and 500 per second, so 667 us and 2 ms.
const SDCARD: DiskProfile = DiskProfile { read: direction(90.0, 4e3, 667), write: direction(30.0, 2e3, 2000) };

impl DiskClass {
    /// The class in numbers, `None` for the disk as it is.
    pub fn profile(self) -> Option<DiskProfile> {
        match self {
            Self::Native => None,
            Self::Nvme => Some(NVME),
            Self::Ufs => Some(UFS),
            Self::Emmc => Some(EMMC),
            Self::SdCard => Some(SDCARD),
        }
    }
}

/// When each request of a modelled disk ends: one server that takes requests in order, an interval apart at least;
/// latencies overlap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskModel {
    profile: DiskProfile,
    free_at: Instant,
}

impl DiskModel {
    pub(crate) fn new(profile: DiskProfile, now: Instant) -> Self {
        Self { profile, free_at: now }
    }

    /// End of a request that arrives now, behind those that arrived before.
    pub(crate) fn arrive(&mut self, kind: IoKind, bytes: u32, now: Instant) -> Instant {
        let direction = match kind {
            IoKind::Read => &self.profile.read,
            IoKind::Write => &self.profile.write,
        };
        let start = self.free_at.max(now);
        self.free_at = start + direction.interval(bytes);
        start + direction.latency + direction.transfer(bytes)
    }
}

/// Holds every completion back until the modelled disk would have reported it.
pub(crate) struct Throttled {
    inner: Box<dyn Device>,
    model: DiskModel,
    /// Modelled end of what the inner device has not reported.
    due: Vec<(u64, Instant)>,
    held: Held,
    raw: Vec<Completion>,
}

impl Throttled {
    pub(crate) fn new(inner: Box<dyn Device>, profile: DiskProfile) -> Self {
        let depth = inner.capabilities().depth;
        Self {
            inner,
            model: DiskModel::new(profile, Instant::now()),
            due: Vec::with_capacity(depth),
            held: Held::with_capacity(depth),
            raw: Vec::with_capacity(depth),
        }
    }

    fn absorb(&mut self) {
        for mut completion in self.raw.drain(..) {
            if let Some(at) = self.due.iter().position(|&(tag, _)| tag == completion.tag) {
                let (_, due) = self.due.swap_remove(at);
                completion.finished = completion.finished.max(due);
            }
            self.held.push(completion.finished, completion);
        }
    }
}

impl Device for Throttled {
    fn submit(&mut self, ops: &[IoOp]) -> Result<(), StoreError> {
        self.inner.submit(ops)?;
        let now = Instant::now();
        for op in ops {
            self.due.push((op.tag, self.model.arrive(op.kind, op.buffer.len, now)));
        }
        Ok(())
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
            // The next thing that can be due: held back already, or still to come from the inner device.
            let now = Instant::now();
            let coming = self.due.iter().map(|&(_, due)| due).filter(|&due| due > now).min();
            match self.held.next_due().into_iter().chain(coming).min() {
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
        // The modelled disk goes on by itself, whatever stands in for it.
        Capabilities { background: true, ..self.inner.capabilities() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for class in [DiskClass::Native, DiskClass::Nvme, DiskClass::Ufs, DiskClass::Emmc, DiskClass::SdCard] {
            assert_eq!(class.to_string().parse(), Ok(class));
            assert_eq!(class.profile().is_none(), class == DiskClass::Native);
        }
        assert!("floppy".parse::<DiskClass>().unwrap_err().to_string().contains("sdcard"));
    }

    #[test]
    fn one_request_takes_its_latency_and_its_bytes() {
        let now = Instant::now();
        let end = DiskModel::new(EMMC, now).arrive(IoKind::Read, 25_000, now) - now;
        assert_eq!(end, Duration::from_micros(243));
    }

    #[test]
    fn many_requests_reach_the_rates_of_the_sheet() {
        for profile in [NVME, UFS, EMMC, SDCARD] {
            for (kind, direction) in [(IoKind::Read, profile.read), (IoKind::Write, profile.write)] {
                for (bytes, rate) in
                    [(512, direction.requests_per_second), (1 << 20, direction.bytes_per_second / (1 << 20) as f64)]
                {
                    let start = Instant::now();
                    let mut model = DiskModel::new(profile, start);
                    let count = 100_000;
                    let end = (0..count).map(|_| model.arrive(kind, bytes, start)).last().unwrap();
                    let found = f64::from(count) / (end - start).as_secs_f64();
                    assert!((found / rate - 1.0).abs() < 0.01, "{profile:?} {kind} {bytes}: {found} of {rate}");
                }
            }
        }
    }
}
