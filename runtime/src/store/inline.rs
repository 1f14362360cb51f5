//! The device for a file system in memory: a read is a copy, made by the compute pool when it is waited for.
//!
//! Nothing works in the background, so threads or a ring would only add hand-overs between cores that compute.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use forebay_kernels::Pool;

use super::device::{Capabilities, Completion, Device, IoOp, Regions, check_depth};
use super::pread::{POOL_DEPTH, transfer};
use super::{Alignment, StoreError};

/// Transfers that are made by whoever waits for them, and by the workers of its pool.
pub(crate) struct InlineDevice {
    file: Arc<OwnedFd>,
    regions: Regions,
    pool: Arc<Pool>,
    alignment: Alignment,
    pending: Vec<IoOp>,
    results: Box<[AtomicI32]>,
}

impl InlineDevice {
    pub(crate) fn new(file: Arc<OwnedFd>, regions: Regions, pool: Arc<Pool>, alignment: Alignment) -> Self {
        let results = (0..POOL_DEPTH).map(|_| AtomicI32::new(0)).collect();
        Self { file, regions, pool, alignment, pending: Vec::with_capacity(POOL_DEPTH), results }
    }
}

impl Device for InlineDevice {
    fn submit(&mut self, ops: &[IoOp]) -> Result<(), StoreError> {
        check_depth(self.pending.len(), ops.len(), POOL_DEPTH)?;
        for op in ops {
            self.regions.resolve(op.buffer)?;
        }
        self.pending.extend_from_slice(ops);
        Ok(())
    }

    fn poll(&mut self, _done: &mut Vec<Completion>) -> Result<(), StoreError> {
        Ok(())
    }

    fn wait(&mut self, done: &mut Vec<Completion>) -> Result<(), StoreError> {
        let (pending, results) = (&self.pending, &self.results);
        self.pool.for_each(pending.len(), |_, i| {
            results[i].store(transfer(&self.file, &self.regions, &pending[i]), Ordering::Relaxed);
        });
        let finished = Instant::now();
        let results = results.iter().map(|result| result.load(Ordering::Relaxed));
        done.extend(pending.iter().zip(results).map(|(op, result)| Completion { tag: op.tag, result, finished }));
        self.pending.clear();
        Ok(())
    }

    fn in_flight(&self) -> usize {
        self.pending.len()
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            backend: "pread",
            depth: POOL_DEPTH,
            background: false,
            direct: false,
            alignment: self.alignment,
            registered_buffers: false,
            registered_file: false,
        }
    }
}
