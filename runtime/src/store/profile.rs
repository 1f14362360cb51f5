//! What reads of a directory's disk cost, measured through the same queue and devices that the store uses.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::backend::{DeviceOptions, open_device};
use super::device::{BufferRef, IoOp, Regions};
use super::queue::{Finished, IoQueue};
use super::{
    Arena, DiskClass, IoBackend, IoKind, PIECE_BYTES, POOL_DEPTH, RING_ENTRIES, StoreError, StoreLayout, file,
};

/// How reads are measured.
#[derive(Clone, Copy, Debug)]
pub struct ProfileOptions {
    /// How the file is read.
    pub backend: IoBackend,
    /// Class of storage to stand in for.
    pub throttle: DiskClass,
    /// Goes through the page cache even where direct I/O works; then the cache is what is measured.
    pub buffered: bool,
    /// Size of the file that is read, whole pieces of a megabyte. It is written first.
    pub file_bytes: u64,
    /// Reads of one size and depth in a round at most.
    pub reads: u32,
    /// Time of a round at most.
    pub round_time_max: Duration,
    /// Rounds; the fastest counts, since everything else on the machine only adds.
    pub rounds: u32,
    /// Seed of the places that are read.
    pub seed: u64,
}

impl Default for ProfileOptions {
    /// 256 MiB, three rounds of up to 2,000 reads or half a second.
    fn default() -> Self {
        Self {
            backend: IoBackend::Auto,
            throttle: DiskClass::Native,
            buffered: false,
            file_bytes: 256 << 20,
            reads: 2000,
            round_time_max: Duration::from_millis(500),
            rounds: 3,
            seed: 1,
        }
    }
}

/// Random reads of one size at one depth.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReadSample {
    /// Bytes of a read.
    pub bytes: u32,
    /// Reads outstanding at all times.
    pub depth: u32,
    /// Time of the round by reads: what one more read costs.
    pub seconds_per_read: f64,
    /// Mean time from submission to completion of one read.
    pub latency_seconds: f64,
    /// Reads of the round.
    pub reads: u32,
}

/// Measures random reads of each of `sizes` bytes at each of `depths`, direct where the file system has it, in a
/// nameless file in `dir`. Sizes are rounded up to the alignment.
///
/// A size of nothing or larger than the file and a depth of 0 or beyond the device's are errors.
pub fn profile(
    dir: &Path,
    sizes: &[u32],
    depths: &[u32],
    options: &ProfileOptions,
) -> Result<Vec<ReadSample>, StoreError> {
    let file = file::open(dir, options.buffered)?;
    let align = file.alignment.offset;
    let pieces = u32::try_from(options.file_bytes / u64::from(PIECE_BYTES)).unwrap_or(u32::MAX);
    let layout = StoreLayout::new(1, pieces, PIECE_BYTES, file.alignment)?;
    let bound = |what, found: u64, expected: u64| StoreError::Request { what, found, expected };
    let mut rounded = Vec::with_capacity(sizes.len());
    for &size in sizes {
        let bytes = size.checked_next_multiple_of(align).filter(|&bytes| {
            bytes > 0 && u64::from(bytes) <= u64::from(pieces) * u64::from(PIECE_BYTES) && bytes <= 1 << 30
        });
        rounded.push(bytes.ok_or(bound("read size", size.into(), options.file_bytes))?);
    }
    let depth_max = POOL_DEPTH.min(RING_ENTRIES as usize) as u32;
    if let Some(&depth) = depths.iter().find(|&&depth| depth == 0 || depth > depth_max) {
        return Err(bound("depth", depth.into(), depth_max.into()));
    }
    file::reserve(&file, dir, &layout)?;
    let largest = rounded.iter().copied().max().unwrap_or(align);
    let deepest = depths.iter().copied().max().unwrap_or(1);
    let arena = Arena::new((largest as usize).saturating_mul(deepest as usize).max(PIECE_BYTES as usize))?;
    let regions = Regions::new(&[Arc::clone(&arena)]);
    let device_options = DeviceOptions {
        backend: options.backend,
        throttle: options.throttle,
        direct: file.direct,
        in_memory: file.in_memory,
        pool: None,
        alignment: file.alignment,
        faults: None,
    };
    let device = open_device(device_options, Arc::new(file.fd), &regions, layout.file_bytes())?;
    let mut profiler =
        Profiler { queue: IoQueue::new(device, layout), layout, finished: Vec::new(), random: options.seed | 1 };
    profiler.write_all(&arena)?;
    let mut samples = Vec::with_capacity(sizes.len() * depths.len());
    for &bytes in &rounded {
        for &depth in depths {
            let mut best: Option<ReadSample> = None;
            for _ in 0..options.rounds.max(1) {
                let sample = profiler.round(bytes, depth, options)?;
                best = best.filter(|best| best.seconds_per_read <= sample.seconds_per_read).or(Some(sample));
            }
            samples.extend(best);
        }
    }
    Ok(samples)
}

struct Profiler {
    queue: IoQueue,
    layout: StoreLayout,
    finished: Vec<Finished>,
    random: u64,
}

impl Profiler {
    /// Xorshift.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Blocks that were reserved and never written are answered without the disk, so all are written.
    fn write_all(&mut self, arena: &Arena) -> Result<(), StoreError> {
        // SAFETY: nothing is under way, and nobody else has this arena.
        let bytes = unsafe { arena.slice_mut(0..PIECE_BYTES as usize) };
        for word in bytes.chunks_exact_mut(8) {
            word.copy_from_slice(&self.random().to_le_bytes());
        }
        for piece in 0..self.layout.groups_per_layer() {
            while !self.queue.has_room() {
                self.wait()?;
            }
            let buffer = BufferRef { region: 0, offset: 0, len: PIECE_BYTES };
            let file_offset = self.layout.file_offset(0, piece);
            self.queue.push(IoOp { kind: IoKind::Write, file_offset, buffer, tag: 0 }, 0)?;
        }
        while self.queue.unfinished() > 0 {
            self.wait()?;
        }
        Ok(())
    }

    fn wait(&mut self) -> Result<(), StoreError> {
        self.queue.wait(&mut self.finished)?;
        self.finished.drain(..).try_for_each(|finished| finished.result)
    }

    /// Keeps `depth` reads outstanding, each in its own buffer.
    fn round(&mut self, bytes: u32, depth: u32, options: &ProfileOptions) -> Result<ReadSample, StoreError> {
        let places = (self.layout.file_bytes() - u64::from(self.layout.header_bytes())) / u64::from(bytes);
        let mut idle: Vec<u32> = (0..depth).collect();
        let mut submitted_at = vec![Instant::now(); depth as usize];
        let (mut submitted, mut completed, mut latency) = (0u32, 0u32, Duration::ZERO);
        let start = Instant::now();
        let mut last = start;
        loop {
            if start.elapsed() < options.round_time_max || submitted == 0 {
                while submitted < options.reads.max(1)
                    && let Some(buffer) = idle.pop()
                {
                    let file_offset = u64::from(self.layout.header_bytes()) + self.random() % places * u64::from(bytes);
                    let offset = u64::from(buffer) * u64::from(bytes);
                    let buffer_ref = BufferRef { region: 0, offset, len: bytes };
                    self.queue.push(IoOp { kind: IoKind::Read, file_offset, buffer: buffer_ref, tag: 0 }, buffer)?;
                    submitted_at[buffer as usize] = Instant::now();
                    submitted += 1;
                }
            }
            if self.queue.unfinished() == 0 {
                break;
            }
            self.queue.wait(&mut self.finished)?;
            for finished in self.finished.drain(..) {
                finished.result?;
                latency += finished.at.saturating_duration_since(submitted_at[finished.owner as usize]);
                last = last.max(finished.at);
                idle.push(finished.owner);
                completed += 1;
            }
        }
        let count = f64::from(completed.max(1));
        Ok(ReadSample {
            bytes,
            depth,
            seconds_per_read: (last - start).as_secs_f64() / count,
            latency_seconds: latency.as_secs_f64() / count,
            reads: completed,
        })
    }
}
