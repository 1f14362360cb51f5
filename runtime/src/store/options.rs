//! How a store is made, and what it tells about itself.

use std::path::PathBuf;
use std::sync::Arc;

use forebay_kernels::Pool;

use super::{DiskClass, FaultOptions, IoBackend};

/// How a store is made.
#[derive(Clone, Debug)]
pub struct StoreOptions {
    /// Directory of the store file.
    pub dir: PathBuf,
    /// How the file is read and written.
    pub backend: IoBackend,
    /// Class of storage to stand in for.
    pub throttle: DiskClass,
    /// Model fingerprint for the header.
    pub fingerprint: [u8; 32],
    /// Goes through the page cache even where direct I/O works.
    pub buffered: bool,
    /// Keeps and verifies a CRC32C per record.
    pub checksums: bool,
    /// Threads that share the verification of what a batch has read; without it the one that waits does it all.
    pub pool: Option<Arc<Pool>>,
    /// Bytes that may be written in all, header included.
    pub write_budget_bytes: Option<u64>,
    /// Groups of a read plan at most; memory for their bookkeeping is reserved, larger plans allocate.
    pub plan_groups_max: usize,
    /// Makes the device fail on purpose; for tests.
    pub faults: Option<FaultOptions>,
}

impl StoreOptions {
    /// Checksums on, everything else as found.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            backend: IoBackend::Auto,
            throttle: DiskClass::Native,
            fingerprint: [0; 32],
            buffered: false,
            checksums: true,
            pool: None,
            write_budget_bytes: None,
            plan_groups_max: 256,
            faults: None,
        }
    }
}

/// What a store has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StoreStats {
    /// Bytes written, header included.
    pub bytes_written: u64,
    /// Bytes read, needless ones and repeated reads included.
    pub bytes_read: u64,
    /// Reads that the device made.
    pub reads: u64,
    /// Groups asked for.
    pub read_requests: u64,
    /// Writes that the device made.
    pub writes: u64,
    /// Time in which the caller waited for reads.
    pub io_wait_seconds: f64,
    /// Time in which at least one batch of reads was under way. With io_uring a batch ends when it is noticed, in
    /// [`super::Store::poll`] at the earliest, so this is an upper bound.
    pub io_busy_seconds: f64,
    /// Time in which the caller waited for writes.
    pub write_wait_seconds: f64,
    /// Time spent on checksums of what was read and written.
    pub checksum_seconds: f64,
    /// Records that had to be read again for their checksum.
    pub checksum_retries: u64,
}
